"""The router in Serve's routing loop, with replicas that only have a queue. No cluster."""

from __future__ import annotations

import asyncio
import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from ray import cloudpickle
from ray.serve.request_router import PendingRequest

from folio.app.engine import SamplingParams
from folio.app.engine.report import ReplicaReport
from folio.app.engine.request.engine_request import BegunOutput
from folio.app.engine.request.prefix_keys import prompt_keys
from folio.app.errors import DeadlineError, NoReplicaError, OverloadedError
from folio.app.fleet.decisions import DECISIONS
from folio.app.fleet.departures import DEPARTURES, PlacedCall
from folio.app.fleet.messages import ExpectedPrefix, ForkCall, GenerateRequest, reports_as_stats
from folio.app.serving.router import FolioRouter, Route
from tests.app.compat.ray_types import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata, choose_replica
from tests.app.fleet.reports import IDLE, UNIT, report
from tests.processes import until_async

DEPLOYMENT = DeploymentID("EngineReplica", "test")
PROMPT = list(range(10 * UNIT + 5))
DEADLINE_S = 10


class Replica:
    """The part of `RunningReplica` that `FolioRouter` and Serve's loop use."""

    def __init__(self, name: str, max_ongoing_requests: int = 10) -> None:
        self.replica_id = ReplicaID(name, DEPLOYMENT)
        self.max_ongoing_requests = max_ongoing_requests
        self.routing_stats: dict[str, Any] = {}
        self.num_ongoing = 0
        self.num_probes = 0
        self.node_id = "node"
        self.availability_zone = None
        self.multiplexed_model_ids: set[str] = set()

    async def get_queue_len(self, *, deadline_s: float) -> int:
        self.num_probes += 1
        return self.num_ongoing


@pytest.fixture
def replicas() -> list[Replica]:
    return [Replica(name) for name in "abc"]


def router_for(replicas: list[Any], kind: type[FolioRouter] = FolioRouter, **kwargs: Any) -> FolioRouter:
    router = kind(
        deployment_id=DEPLOYMENT, handle_source=DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True
    )
    router.initialize_state(**kwargs)
    router.update_replicas(replicas)
    return router


def in_flight(router: FolioRouter, names: Sequence[str]) -> list[float]:
    """This router's own requests in flight: without a fresh report the fleet knows no others."""
    return router.route().fleet.num_requests(list(names), math.inf)


def left_in(router: FolioRouter) -> list[Any]:
    """What the router still keeps of requests."""
    return [*router._placed, *router._waiting]


def pending(number: int = 0, prompt: list[int] = PROMPT, call: Any = None, **fields: Any) -> PendingRequest:
    """A request, by default to generate. `fields`: of its call."""
    call = call or GenerateRequest(f"r{number}", prompt, SamplingParams(max_tokens=1), **fields)
    metadata = RequestMetadata(f"x{number}", f"internal-{number}", call_method="generate_stream")
    return PendingRequest([call], {}, metadata)


def fork(number: int = 0) -> PendingRequest:
    return pending(number, call=ForkCall(f"f{number}", "r", 0, "c", SamplingParams(max_tokens=1)))


async def choose(router: FolioRouter, request: PendingRequest, **retry: bool) -> str:
    async with asyncio.timeout(DEADLINE_S):
        replica = await choose_replica(router, request, **retry)
    return replica.replica_id.unique_id


def now_with(keys: list[bytes], **changes: Any) -> dict[str, Any]:
    return reports_as_stats({"": report(time.time(), keys, **changes)}, {"": ("fingerprint", "")}, 1.0)


def all_report(replicas: list[Replica], keys: Sequence[bytes] = ()) -> None:
    """New reports of all replicas. `keys`: of prefixes cached at "b"."""
    for replica in replicas:
        replica.routing_stats = now_with([*keys] if replica.replica_id.unique_id == "b" else [])


def fill(replicas: list[Replica]) -> None:
    for replica in replicas:
        replica.num_ongoing = replica.max_ongoing_requests


@pytest.mark.parametrize(
    ("cached", "call", "is_found", "isolate"),
    [
        ((), {}, True, True),
        (("mine", "pirate"), {"cache_salt": "mine", "adapter": "pirate"}, True, True),
        (("mine", "pirate"), {"cache_salt": "mine", "adapter": "poet"}, False, True),
        (("mine", "pirate"), {"adapter": "pirate"}, False, True),
        # An adapter loaded at run time is known by its version.
        ((None, "legal@1"), {"adapter": "legal", "adapter_key": "legal@1"}, True, True),
        ((None, "legal@1"), {"adapter": "legal", "adapter_key": "legal@2"}, False, True),
        ((None, "legal@1"), {"adapter": "legal"}, False, True),
        (("b", None, "a"), {"tenant": "a", "cache_salt": "b"}, True, True),
        (("b", None, "a"), {"tenant": "ab", "cache_salt": ""}, False, True),
        (("b", None, "a"), {"cache_salt": "b"}, False, True),
        (("b", None, None), {"tenant": "a", "cache_salt": "b"}, True, False),
        (("b", None, None), {"tenant": "ab", "cache_salt": ""}, False, False),
        (("b", None, None), {"cache_salt": "b"}, True, False),
    ],
)
async def test_a_prompt_goes_where_the_engine_has_cached_it(
    replicas: list[Replica], cached: tuple[Any, ...], call: dict[str, Any], is_found: bool, isolate: bool
) -> None:
    """By the engine's own keys: with others the routing audit would be all misses."""
    all_report(replicas, prompt_keys(PROMPT, UNIT, *(cached or (None,))))
    request = pending(user="u", **call)
    chosen = await choose(router_for(replicas, isolate_tenants=isolate), request)
    assert request.args[0].expected == ExpectedPrefix(chosen, 10 * UNIT * is_found)  # for the replica to compare
    assert chosen == "b" or not is_found


@pytest.fixture
def decisions() -> Iterator[Callable[[], list[tuple[str, str]]]]:
    """The chosen replicas and their reasons, the newest first."""
    DECISIONS.is_on = True
    yield lambda: [(decision.chosen, decision.reason) for decision in DECISIONS.latest()]
    DECISIONS.is_on = False
    DECISIONS.clear()


async def test_decisions_name_the_replica_that_got_the_request(
    replicas: list[Replica], decisions: Callable[[], list[tuple[str, str]]]
) -> None:
    """Each look at full replicas was one of its own, and the first choice was named even when another one got it."""
    all_report(replicas, prompt_keys(PROMPT, UNIT, None))
    router = router_for(replicas)
    fill(replicas)
    waiting = asyncio.create_task(choose(router, pending(1)))
    await until_async(lambda: sum(replica.num_probes for replica in replicas) >= 6)  # two looks
    assert decisions() == []
    replicas[0].num_ongoing = 0
    assert await waiting == "a"
    assert decisions() == [("a", "first was full")]
    replicas[1].num_ongoing = 0
    assert await choose(router_for(replicas), pending(2)) == "b"
    await asyncio.sleep(0)  # it is noted by a callback
    assert decisions() == [("b", "cost"), ("a", "first was full")]
    assert DECISIONS.latest()[0].scores[0].cached_tokens == 10 * UNIT
    DECISIONS.is_on = False
    await choose(router, pending(3))
    await asyncio.sleep(0)
    assert len(decisions()) == 2


def test_a_pickled_log_is_the_process_own() -> None:
    """Regression: Serve pickles the router's module by value, so that the router of an ingress had a log of its own,
    and the dashboard showed no decision."""
    assert cloudpickle.loads(cloudpickle.dumps(DECISIONS)) is DECISIONS


async def test_a_fork_goes_to_its_requests_replica(replicas: list[Replica]) -> None:
    """However busy it is. When it is gone, any replica answers with the error."""
    for replica in replicas:
        busy = replica is replicas[2]
        replica.routing_stats = now_with([], num_waiting=50 * busy, queued_s=60.0 * busy)
    router = router_for(replicas)
    assert [await choose(router, fork(i)) for i in range(5)] == ["c"] * 5
    router.update_replicas(replicas[:2])  # type: ignore[arg-type]
    assert await choose(router, fork(9)) in "ab"


async def test_a_fork_waits_for_a_full_replica(replicas: list[Replica]) -> None:
    fill(replicas[2:])
    waiting = asyncio.create_task(choose(router_for(replicas), fork()))
    await until_async(lambda: replicas[2].num_probes >= 2)
    assert not waiting.done()
    replicas[2].num_ongoing = 0
    assert await waiting == "c"


async def test_a_report_of_another_version_is_ignored(
    replicas: list[Replica], caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: an exception in Serve's long poll, after which this process received no updates."""
    replicas[0].routing_stats = now_with([])
    replicas[1].routing_stats = now_with([]) | {"new_field": 1}
    router = router_for(replicas)
    router.update_replicas(replicas)  # type: ignore[arg-type]
    assert [await choose(router, pending(i)) for i in range(2)] == ["a", "a"]
    assert caplog.text.count("it has another version") == 1


async def test_only_new_reports_are_read(replicas: list[Replica]) -> None:
    """Regression: Serve passes on all reports whenever one is new, and all were parsed again: 0.4 ms of the router's
    loop with 64 replicas, ten times a second."""
    read = []

    class Stats(dict[str, Any]):
        def __getitem__(self, name: str) -> Any:
            if name == "models":
                read.append(super().__getitem__(name)[""]["num_running"])
            return super().__getitem__(name)

    for i, replica in enumerate(replicas):
        replica.routing_stats = Stats(now_with([], num_running=i))
    router = router_for(replicas)
    router.update_replicas(copy.deepcopy(replicas))  # type: ignore[arg-type]
    assert read == [0, 1, 2]
    replicas[1].routing_stats = Stats(now_with([], num_running=7))
    router.update_replicas(replicas)  # type: ignore[arg-type]
    assert read == [0, 1, 2, 7]
    router.update_replicas(replicas[:1])  # type: ignore[arg-type]
    router.update_replicas(replicas)  # type: ignore[arg-type]
    assert read == [0, 1, 2, 7, 7, 2]  # those that come back are not known any more


@pytest.mark.parametrize("ahead_s", [-3600.0, 3600.0])
async def test_the_clocks_of_replicas_do_not_matter(replicas: list[Replica], ahead_s: float) -> None:
    """Reports of machines whose clocks are an hour off are as fresh as others, and become stale as soon."""
    made_at = time.monotonic() + ahead_s
    keys = prompt_keys(PROMPT, UNIT, None)
    for replica in replicas:
        replica.routing_stats = reports_as_stats(
            {"": report(made_at, keys if replica is replicas[1] else [])}, {"": ("fingerprint", "")}, 1.0
        )
    router = router_for(replicas, stale_after_s=100.0)
    assert await choose(router, pending()) == "b"
    assert len(router.route().fleet.fresh("abc", time.monotonic() + 99.0)) == 3
    assert not router.route().fleet.fresh("abc", time.monotonic() + 100.0)


def shelf_report(replica: Replica, **of_models: ReplicaReport) -> None:
    made_at = time.time()
    replica.routing_stats = reports_as_stats(
        {m: replace(load, made_at=made_at) for m, load in of_models.items()}, {}, 1.0
    )


def of_model(model: str, number: int = 0) -> PendingRequest:
    return pending(number, model=model)


async def test_prefixes_of_one_model_are_none_of_another(replicas: list[Replica]) -> None:
    """Both models have the same unit, and so the same keys for the same token ids."""
    keys = prompt_keys(PROMPT, UNIT, None)
    shelf_report(replicas[0], m=report(0.0, keys), n=report(0.0, queued_s=0.3, queued_tokens=300))
    for other in replicas[1:]:
        shelf_report(other, m=IDLE, n=IDLE)
    router = router_for(replicas, first_model="m")
    for model, first in (("m", "a"), ("", "a"), ("n", "bc")):
        request = of_model(model)
        assert await choose(router, request) in first
        assert request.args[0].expected.cached_tokens == (0 if model == "n" else 10 * UNIT)


async def test_a_request_goes_where_its_model_is_awake_unless_the_queue_is_longer(replicas: list[Replica]) -> None:
    asleep = replace(IDLE, unit_tokens=0, wake_s=0.4)
    for queued_s, first in ((0.0, "a"), (0.5, "a"), (2.0, "bc")):
        shelf_report(replicas[0], m=replace(IDLE, queued_s=queued_s, queued_tokens=int(1000 * queued_s)))
        for other in replicas[1:]:
            shelf_report(other, m=asleep)
        assert await choose(router_for(replicas, first_model="m"), of_model("m")) in first


async def test_requests_gather_where_the_first_one_wakes_the_model(replicas: list[Replica]) -> None:
    """Each of several requests for a sleeping model woke it at another replica."""
    for replica in replicas:
        shelf_report(replica, m=IDLE, n=replace(IDLE, wake_s=2.0))
    router = router_for(replicas, first_model="m")
    chosen = {await choose(router, of_model("n", number)) for number in range(5)}
    assert len(chosen) == 1
    assert router.route("m").fleet.num_requests(list("abc"), time.monotonic()) == [0, 0, 0]


async def test_models_that_nobody_reports_any_more_are_forgotten(replicas: list[Replica]) -> None:
    for replica in replicas:
        shelf_report(replica, m=IDLE, n=IDLE)
    router = router_for(replicas, first_model="m")
    request = of_model("n")
    chosen = await choose(router, request)
    known, settled = router.route("n"), router.route("m")
    for replica in replicas:
        shelf_report(replica, m=IDLE)
    router.update_replicas(replicas)  # type: ignore[arg-type]
    assert router.route("n") is not known
    assert router.route("m") is settled
    await asyncio.sleep(0)  # its placement is noted
    router.on_request_completed(ReplicaID(chosen, DEPLOYMENT), request.metadata.internal_request_id)
    assert not left_in(router)


async def test_a_call_about_a_model_goes_where_it_is_awake(replicas: list[Replica]) -> None:
    """`max_model_len` of a model waits until it has been loaded."""
    for replica in replicas:
        shelf_report(replica, m=IDLE, n=replace(IDLE, wake_s=0.0 if replica is replicas[2] else 5.0))
    router = router_for(replicas, first_model="m")
    assert [await choose(router, pending(number, call="n")) for number in range(3)] == ["c"] * 3


async def test_calls_of_one_client_request_have_one_id(replicas: list[Replica]) -> None:
    """Regression: Serve found only the first call by its id, and the others waited for ever."""
    all_report(replicas)
    router = router_for(replicas)
    same = [pending(0, PROMPT[i:]) for i in range(5)]
    chosen = await asyncio.gather(*(choose(router, request) for request in same))
    await asyncio.sleep(0)
    counted = dict(zip("abc", in_flight(router, "abc"), strict=True))
    assert counted == {name: chosen.count(name) for name in "abc"}
    for name in chosen:
        router.on_request_completed(ReplicaID(name, DEPLOYMENT), "internal-0")
    assert not any(in_flight(router, "abc"))


async def test_a_retry_at_the_same_replica(replicas: list[Replica]) -> None:
    """The end of the first attempt is noted after the second has begun."""
    router = router_for(replicas[:1])
    request = pending()
    name = await choose(router, request)
    assert await choose(router, request, is_retry=True) == name
    await asyncio.sleep(0)
    for left in (1, 0):
        assert in_flight(router, [name]) == [left + 1]
        router.on_request_completed(ReplicaID(name, DEPLOYMENT), "internal-0")
    assert in_flight(router, [name]) == [0]
    assert not left_in(router)


async def test_a_request_that_fails_while_it_is_sent(replicas: list[Replica]) -> None:
    """Serve reports the end before the placement."""
    router = router_for(replicas)
    request = pending()
    task = asyncio.create_task(choose(router, request))
    while not request.future.done():
        await asyncio.sleep(0)
    router.on_request_completed(request.future.result().replica_id, "internal-0")
    await task
    await asyncio.sleep(0)
    assert not any(in_flight(router, "abc"))
    assert not left_in(router)


@pytest.mark.parametrize("policy", ["prefix_aware", "least_loaded", "round_robin", "consistent_hash"])
async def test_every_policy_serves_everything(replicas: list[Replica], policy: str) -> None:
    """Prompts, empty prompts and calls without a prompt, with and without reports."""
    router = router_for(replicas, policy=policy)
    for round_number in range(2):
        for i in range(6):
            assert await choose(router, pending(10 * round_number + i)) in "abc"
        assert await choose(router, pending(10 * round_number + 7, [])) in "abc"
        metadata = RequestMetadata("y", f"probe-{round_number}", call_method="max_model_len")
        assert await choose(router, PendingRequest([], {}, metadata)) in "abc"
        all_report(replicas)
        router.update_replicas(replicas)


async def test_a_full_replica_is_skipped(replicas: list[Replica]) -> None:
    all_report(replicas, prompt_keys(PROMPT, UNIT, None))
    fill(replicas[1:2])
    router = router_for(replicas)
    request = pending()
    chosen = await choose(router, request)
    await asyncio.sleep(0)
    assert chosen in "ac"
    assert request.args[0].expected.replica == "b"  # another one ignores it
    assert in_flight(router, "abc") == [chosen == "a", 0, chosen == "c"]


async def test_waiting_for_full_replicas_does_not_spin(replicas: list[Replica]) -> None:
    fill(replicas)
    router = router_for(replicas)
    waiting = asyncio.create_task(choose(router, pending()))
    await until_async(lambda: replicas[0].num_probes >= 4)
    assert not waiting.done()
    replicas[2].num_ongoing = 0
    assert await waiting == "c"
    assert max(replica.num_probes for replica in replicas) < 50
    await asyncio.sleep(0)
    assert in_flight(router, "abc") == [0, 0, 1]


async def test_a_replica_that_vanishes_while_it_is_chosen(replicas: list[Replica]) -> None:
    """The replica goes while Serve asks for its queue length."""

    class Vanishing(Replica):
        async def get_queue_len(self, *, deadline_s: float) -> int:
            router.update_replicas(replicas[1:])
            return 0

    replicas[0] = Vanishing("a")
    replicas[0].routing_stats = now_with(prompt_keys(PROMPT, UNIT, None))
    router = router_for(replicas)
    assert await choose(router, pending()) in "bc"


async def test_nothing_is_left_of_ended_requests(replicas: list[Replica], monkeypatch: pytest.MonkeyPatch) -> None:
    """Completed requests, cancelled ones, and those of a replica that died."""
    monkeypatch.setattr("folio.app.fleet.fleet._LEAST_LAG_S", 0.0)  # the last reports are made when all is over

    all_report(replicas)
    router = router_for(replicas)
    for i in range(9):
        chosen = await choose(router, pending(i))
        if chosen != "c":
            router.on_request_completed(ReplicaID(chosen, DEPLOYMENT), f"internal-{i}")
    fill(replicas)
    for replica in replicas:
        router.on_new_queue_len_info(replica.replica_id, replica.num_ongoing)
    waiting = asyncio.create_task(choose(router, pending(100)))
    await asyncio.sleep(0.05)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await asyncio.sleep(0)
    router.on_replica_actor_died(replicas[2].replica_id)
    assert in_flight(router, "ab") == [0, 0]
    assert DEPARTURES.num_replicas == 2
    all_report(replicas[:2])
    router.update_replicas(replicas[:2])  # type: ignore[arg-type]
    assert router.route().fleet.num_known_prefixes == 0


async def test_a_failing_policy_does_not_hold_requests(
    replicas: list[Replica], caplog: pytest.LogCaptureFixture
) -> None:
    """Serve logs an error of `choose_replicas` and never asks again: the request would wait for ever."""

    class Broken(FolioRouter):
        def route(self, model: str = "") -> Route:
            return Route(super().route(model).fleet, self)

        def rank_replicas(self, *args: Any) -> list[str]:
            raise ZeroDivisionError

    assert await choose(router_for(replicas, Broken), pending()) in "abc"
    assert "the routing policy failed" in caplog.text


@pytest.mark.parametrize(
    ("known", "chosen"),
    [
        ({"crowded": ("b",), "stopped": ("a",)}, "c"),
        ({"refused_by": ("b", "c")}, "a"),
        ({"crowded": ("a", "b", "c")}, "b"),  # where its prompt is, as if none were
        ({"crowded": ("a", "c"), "refused_by": ("b", "c")}, "a"),
        ({"refused_by": ("a", "b"), "stopped": ("c",)}, None),
    ],
)
async def test_full_replicas_come_last_and_refusing_or_stopped_ones_never(
    replicas: list[Replica], known: dict[str, Any], chosen: str | None
) -> None:
    all_report(replicas, prompt_keys(PROMPT, UNIT, None))
    router = router_for(replicas)
    if chosen is not None:
        assert await choose(router, pending(**known)) == chosen
        return
    with pytest.raises(OverloadedError, match="all engine replicas"):
        await choose(router, pending(**known))


@pytest.mark.parametrize("all_have_stopped", [True, False])
async def test_the_wait_for_a_replica_is_bounded(replicas: list[Replica], all_have_stopped: bool) -> None:
    """Regression: without a replica requests hung until one came."""
    router = router_for(replicas if all_have_stopped else [], wait_for_replica_s=0.05)
    with pytest.raises(NoReplicaError, match="no engine replica") as error:
        await choose(router, pending(stopped=("a", "b", "c")))
    assert error.value.retry_after_s == 0.05
    await asyncio.sleep(0)  # the future's callbacks run
    assert not left_in(router)
    with pytest.raises(DeadlineError, match="timeout_s"):
        await choose(router, pending(1, stopped=("a", "b", "c"), timeout_s=0.01))


async def test_a_request_waits_for_the_first_replica_and_has_the_time_left(replicas: list[Replica]) -> None:
    router = router_for([])
    request = pending()
    waiting = asyncio.create_task(choose(router, request))
    await asyncio.sleep(0)
    assert not waiting.done()
    router.update_replicas(replicas)  # type: ignore[arg-type]
    assert await waiting in "abc"
    assert request.args[0].timeout_s is None
    request = pending(1, timeout_s=60.0)
    request.created_at -= 10.0  # it has waited
    await choose(router, request)
    assert 40.0 < request.args[0].timeout_s <= 50.0


async def test_an_output_continues_where_the_same_model_is(replicas: list[Replica]) -> None:
    """At no new version, and at no replica that has not told its version yet."""
    silent = replicas.pop()
    for replica, fingerprint in zip(replicas, ("old", "new"), strict=True):
        replica.routing_stats = reports_as_stats({"": report(time.time(), [])}, {"": (fingerprint, "")}, 2.0)
    router = router_for([*replicas, silent], wait_for_replica_s=0.05)
    begun = {"begun": (BegunOutput(0, [1]),), "begun_by": "a"}
    for number in range(5):
        assert await choose(router, pending(number, **begun)) == "a"
    router.update_replicas([replicas[1], silent])
    with pytest.raises(NoReplicaError) as error:
        await choose(router, pending(6, **begun))
    assert error.value.replaced_within_s > 2.0
    silent.routing_stats = reports_as_stats({"": report(time.time(), [])}, {"": ("old", "")}, 2.0)
    router.update_replicas([replicas[1], silent])
    assert await choose(router, pending(7, **begun)) == "c"


async def test_a_draining_replica_gets_no_requests_while_there_is_another(replicas: list[Replica]) -> None:
    """And the calls that it has leave it, until it may have requests again."""
    left: list[str] = []
    call = DEPARTURES.place(PlacedCall("a", "", lambda: left.append("a")))
    router = router_for(replicas)
    for draining in (["a"], ["a", "b"], ["a", "b", "c"], []):
        for replica in replicas:
            name = replica.replica_id.unique_id
            stats = reports_as_stats({"": report(time.time(), [])}, {"": ("f", "")}, 1.0, is_draining=name in draining)
            replica.routing_stats = stats
        router.update_replicas(replicas)
        chosen = {await choose(router, pending(number)) for number in range(6)}
        assert chosen <= {"a", "b", "c"} - {*draining} or len(draining) == 3
    assert left == ["a"]
    assert call.is_leaving
    DEPARTURES.remove(call)


async def test_prompts_are_computed_and_decoded_by_role(replicas: list[Replica]) -> None:
    """And by any replica when all of one role are gone, or drain."""
    for replica in replicas:
        replica.routing_stats = reports_as_stats({"": report(time.time(), [])}, {"": ("f", "address")}, 1.0)
    router = router_for(replicas, prefill_share=0.3, prefill_from_tokens=UNIT)
    begun: dict[str, Any] = {"begun": (BegunOutput(0, [1]),), "begun_by": "a"}

    async def placed(number: int, num_tokens: int = len(PROMPT), **fields: Any) -> tuple[str, bool]:
        chosen = await choose(router, request := pending(number, [number] * num_tokens, **fields))
        return chosen, request.args[0].expected.leaves

    for number in range(4):
        assert await placed(number) == ("a", True)
        by_decode = [await placed(number, **begun), await placed(number, UNIT - 1)]
        by_decode += [await placed(number, adapter="poet"), await placed(number)]  # the last one is cached there now
        assert {*by_decode} <= {("b", False), ("c", False)}
    ahead = {"fetches": True, "begun_by": "a", "held_at": "address"}
    assert {await placed(4, **ahead) for _ in range(4)} <= {("b", False), ("c", False)}
    assert [await placed(4, **begun, fetched_by=name, crowded=(name,)) for name in "bc"] == [("b", False), ("c", False)]
    router.update_replicas(replicas[1:])
    assert [await placed(5), await placed(6, **begun)] == [("b", True), ("c", False)]
    router.update_replicas(replicas[1:2])
    assert [await placed(7), await placed(8, **begun)] == [("b", False)] * 2


async def test_a_prompt_stays_where_its_blocks_are(replicas: list[Replica]) -> None:
    """A replica that hands no blocks over, or one beside another version, decodes the prompts that it computes."""
    for addresses, others in ((("", ""), "f"), (("address", "address"), "g")):
        for replica, address, version in zip(replicas, addresses, ("f", others), strict=False):
            replica.routing_stats = reports_as_stats({"": report(time.time(), [])}, {"": (version, address)}, 1.0)
        router = router_for(replicas[:2], prefill_share=0.5)
        assert await choose(router, request := pending()) == "a"
        assert not request.args[0].expected.leaves


async def test_calls_leave_a_queue_when_another_replica_is_free(replicas: list[Replica]) -> None:
    """Once for each report of the queue."""
    left: list[str] = []
    calls = [DEPARTURES.place(PlacedCall("a", "", partial(left.append, name))) for name in ("x", "y", "z")]
    router = router_for(replicas)
    for replica, queued_s in zip(replicas, (10.0, 0.0, 0.0), strict=True):
        load = {"num_waiting": int(queued_s > 0), "queued_tokens": int(100 * queued_s), "queued_s": queued_s}
        reports = {"": report(time.time(), [], **load)}
        replica.routing_stats = reports_as_stats(reports, {"": ("f", "")}, 1.0)
    for _ in range(3):
        router.update_replicas(replicas)
    await asyncio.sleep(0)
    assert left == ["z"]
    for call in calls:
        DEPARTURES.remove(call)


async def test_calls_that_went_on_elsewhere_are_counted(
    replicas: list[Replica], decisions: Callable[[], list[tuple[str, str]]]
) -> None:
    router = router_for(replicas)
    for number, had in enumerate(({}, {"begun": (BegunOutput(0, [1]),)}, {"held_at": "there"})):
        await choose(router, pending(number, **had))
    await asyncio.sleep(0)  # until its placement is noted
    assert [reason for _, reason in decisions()] == ["continued", "continued", "no report"]
    assert DECISIONS.num_continued(time.monotonic()) == 2
    assert DECISIONS.num_continued(time.monotonic() + 60.0) == 0
    DECISIONS.clear()
    assert DECISIONS.num_continued(time.monotonic()) == 0


async def test_the_number_of_waiting_requests_is_bounded() -> None:
    router = router_for([])
    waiting = [asyncio.create_task(choose(router, pending(i))) for i in range(1000)]
    await asyncio.sleep(0)
    with pytest.raises(NoReplicaError, match="1000 requests wait"):
        await choose(router, pending(1000))
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
