"""A real Ray Serve application that load scales from one engine replica to two, which share the node's KV memory:
requests go where their prefix is cached, a lost replica costs only its requests in flight, and budgets add up
throughout."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
import ray
from ray.exceptions import RayActorError

from benchmarks.served import Served, processes_called
from folio.app.api.openai.bodies import CompletionRequest, ForkRequest
from folio.app.api.operators.bodies import PinRequest
from folio.app.engine import SamplingParams
from folio.app.engine.request.prefix_keys import prompt_keys
from folio.app.errors import UnknownRequestError
from folio.app.fleet.fleet import RoutedRequest
from folio.app.fleet.ledger_file import LedgerFile
from folio.app.fleet.messages import GenerateRequest, Piece, whole_outputs
from folio.app.serving.ledger import ledger_name
from tests.cluster import Front, deleted_at_the_end
from tests.processes import until

pytestmark = pytest.mark.third_day(0)
DEADLINE_S = 90
SHARED_BYTES = 64 << 20
ARGS = {
    "engine": {"model": "builtin", "max_model_len": 2048, "num_threads": 1, "warm_up": False},
    "shared_kv_memory_bytes": SHARED_BYTES,
    "routing": {"report_period_s": 0.2},
}
# The least that needs a second replica: any two requests. It then stays for the rest of the tests.
POLICY = {
    "policy_function": "folio.app.serving.autoscaling:KVAwareScaling",
    "policy_kwargs": {"kv_share": 0.001, "up_after_s": 0.5, "down_after_s": 600.0},
}
AUTOSCALING = {
    "min_replicas": 1,
    "max_replicas": 2,
    "metrics_interval_s": 0.5,
    "look_back_period_s": 2.0,
    "upscale_delay_s": 0.0,
    "downscale_delay_s": 0.0,
    "policy": POLICY,
}
STORY = "The keys hang in the hall, and each has a number on it that somebody painted there long ago. "


@pytest.fixture(scope="module")
def server(cluster_url: str, front: Front) -> Iterator[Served]:
    front.delete()
    server = Served("folio-routing", cluster_url, ARGS)
    with deleted_at_the_end(server.name):
        server.deploy(autoscaling_config=AUTOSCALING)
        yield server


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S) as client:
        yield client


def members(server: Served) -> set[str]:
    """Names of the replicas in the node's ledger, whose counted bytes are within the shared memory."""
    with LedgerFile(ledger_name(server.name, ray.get_runtime_context().get_node_id(), "cpu")).locked() as ledger:
        assert ledger.counted_bytes <= SHARED_BYTES
        return set(ledger.members)


def budgets(server: Served) -> list[int] | None:
    """Of all replicas, after a check that they add up; None while they change, or a replica is gone."""
    try:
        first, second = ([status.memory for status in server.engines.broadcast("status").results()] for _ in range(2))
    except RayActorError:
        return None
    if [report.budget_revision for report in first] != [report.budget_revision for report in second]:
        return None
    found = [report.budget_bytes for report in first]
    assert sum(found) <= SHARED_BYTES
    assert sum(report.physical_bytes for report in first) <= SHARED_BYTES
    return found


def is_shared_by_two(server: Served) -> bool:
    found = budgets(server)
    return len(members(server)) == 2 and found is not None and len(found) == 2 and sum(found) > 0.9 * SHARED_BYTES


def ask(client: openai.OpenAI, messages: list[Any], **more: Any) -> Any:
    return client.chat.completions.create(model="builtin", messages=messages, temperature=0, max_tokens=16, **more)


def replica_of(answer: Any) -> str:
    return str(answer.id.rpartition(".")[2])


def converse(client: openai.OpenAI, name: str, num_turns: int) -> tuple[str, int, int]:
    """A conversation; returns the last replica, the prompt tokens of all turns but the first, and how many of them were
    cached."""
    messages: list[Any] = []
    prompt_tokens = cached_tokens = 0
    for turn in range(num_turns):
        messages.append({"role": "user", "content": f"{name}, part {turn}. {STORY * 2}"})
        answer = ask(client, messages)
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        if turn:
            prompt_tokens += answer.usage.prompt_tokens
            cached_tokens += answer.usage.prompt_tokens_details.cached_tokens
    return replica_of(answer), prompt_tokens, cached_tokens


def pieces_of(answer: Iterable[Any]) -> list[Piece]:
    """Without the name of a replica whose first piece is late."""
    return [piece for item in answer if isinstance(item, list) for piece in item]


def test_load_brings_a_second_replica_which_gets_its_share_of_the_memory(server: Served) -> None:
    until(lambda: budgets(server) == [SHARED_BYTES])
    params = SamplingParams(max_tokens=1200, ignore_eos=True)
    requests = [GenerateRequest(f"request {i}", [65 + i], params, whole=True) for i in range(4)]
    replicas = server.engines.options(stream=True)
    answers = [replicas.generate_stream.remote(request) for request in requests]
    until(lambda: is_shared_by_two(server))
    outputs = [whole_outputs(pieces_of(answer)) for answer in answers]
    assert [len(piece.token_ids) for [piece] in outputs] == [1200] * 4


def test_conversations_stay_where_they_are_cached(server: Served, client: openai.OpenAI) -> None:
    used: set[str] = set()

    def has_used_both() -> bool:
        """The ingress's router learns of the second one by its first report."""
        used.add(replica_of(ask(client, [{"role": "user", "content": f"{len(used)} {time.monotonic()}"}])))
        return len(used) == 2

    until(has_used_both, DEADLINE_S)
    names = [f"Story {i}" for i in range(6)]
    with ThreadPoolExecutor(3) as pool:
        replicas, *turns = zip(*pool.map(lambda name: converse(client, name, 4), names), strict=True)
    prompt_tokens, cached_tokens = map(sum, turns)
    # What is new in a turn is about a third of its prompt.
    assert cached_tokens > 0.5 * prompt_tokens
    assert {*replicas} == used  # not all at one replica
    assert sum(report.cached_tokens for report in server.reports()) >= cached_tokens


def test_a_router_learns_prefixes_from_reports(server: Served) -> None:
    """The prompt came over HTTP, through the ingress's router. The one in this process goes by reports alone."""
    token_ids = list(range(100, 260))
    body = {"model": "builtin", "prompt": token_ids, "max_tokens": 2, "temperature": 0}
    assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=DEADLINE_S).status_code == 200
    engines: Any = server.engines
    engines.max_model_len.remote().result()  # the router in this process begins
    router = engines._router._asyncio_router.request_router
    routed = RoutedRequest("r", len(token_ids) + 1, prompt_keys(token_ids, 16, None))

    def knows_the_prefix() -> bool:
        known = router.route().fleet.fresh([replica.unique_id for replica in router.curr_replicas], time.monotonic())
        return bool((router.route().fleet.cached_tokens(routed, known) >= 160).any())

    until(knows_the_prefix, DEADLINE_S)
    request = GenerateRequest("r", [*token_ids, 300], SamplingParams(max_tokens=2, temperature=0), whole=True)
    [piece] = pieces_of(engines.options(stream=True).generate_stream.remote(request))
    assert piece.num_cached_tokens == 160


def test_forks_find_their_replica(server: Served) -> None:
    """A fork goes to the replica that has its request, also if the id names another one."""
    greedy: dict[str, Any] = {"model": "builtin", "temperature": 0}
    numbers = itertools.count(300)
    for _ in range(20):  # until the router knows several replicas
        prompts = [[next(numbers)] * 40 for _ in range(6)]
        begun = [
            server.ingress.generate.remote(CompletionRequest(prompt=prompt, max_tokens=40, **greedy))
            for prompt in prompts
        ]
        ids = [answer.result().id for answer in begun]
        if len({request_id.partition(".")[2] for request_id in ids}) > 1:
            break
    else:
        pytest.fail("one replica got all requests")
    for request_id in ids:
        fork = ForkRequest(request_id=request_id, max_tokens=2, **greedy)
        assert len(server.ingress.fork.remote(fork).result().choices) == 1
    moved = ForkRequest(request_id=ids[0].partition(".")[0] + ".nowhere", max_tokens=2, **greedy)
    assert len(server.ingress.fork.remote(moved).result().choices) == 1
    unknown = ForkRequest(request_id=f"cmpl-{'0' * 32}.nowhere", **greedy)
    with pytest.raises(UnknownRequestError, match="is gone"):
        server.ingress.fork.remote(unknown).result()


def test_a_replica_is_killed_under_load(server: Served) -> None:
    """Every request is answered; then two replicas serve, the new one has the prefixes that were pinned on the other
    and a share of the memory, and the ledger has forgotten the killed one."""
    before = members(server)
    pin = PinRequest(name="story", prompt=STORY * 4, tenant="a")
    for _ in range(2):  # the second time it is there already
        server.ingress.pin.remote(pin).result()
    body = {"model": "builtin", "prompt": "What is Folio?", "max_tokens": 30, "temperature": 0, "ignore_eos": True}

    def complete(i: int) -> httpx.Response:
        if i == 20:
            server.kill_one()
        return httpx.post(f"{server.url}/v1/completions", json=body, timeout=DEADLINE_S)

    with ThreadPoolExecutor(8) as pool:
        responses = list(pool.map(complete, range(60)))
    assert {response.status_code for response in responses} == {200}
    assert len({response.json()["choices"][0]["text"] for response in responses}) == 1
    until(lambda: len(before & members(server)) == 1 and is_shared_by_two(server))
    until(lambda: server.num_running == len(server.processes()) == 2)
    until(lambda: [report.num_running for report in server.reports()] == [0, 0])
    pinned = [[pin.name for pin in status.memory.pins] for status in server.engines.broadcast("status").results()]
    assert pinned == [["story"]] * 2


def test_an_ingress_is_killed_under_load(server: Served) -> None:
    """HAProxy retries unanswered requests at the next ingress; a stream that has begun loses its connection, which no
    client takes for its end."""
    url = f"{server.url}/v1/completions"
    body = {"model": "builtin", "prompt": "What is Folio?", "max_tokens": 600, "temperature": 0, "ignore_eos": True}
    assert httpx.post(url, json=body | {"max_tokens": 1}, timeout=DEADLINE_S).status_code == 200
    with ThreadPoolExecutor(4) as pool:
        with httpx.stream("POST", url, json=body | {"max_tokens": 2000, "stream": True}, timeout=DEADLINE_S) as answer:
            lines = (line for line in answer.iter_lines() if line.startswith("data: "))
            next(lines)
            others = [pool.submit(httpx.post, url, json=body, timeout=DEADLINE_S) for _ in range(4)]

            def all_have_begun() -> bool:
                assert not any(other.done() for other in others)
                return sum(report.num_running + report.num_waiting for report in server.reports()) == 5

            until(all_have_begun)
            [ingress] = processes_called(f"ray::ServeReplica:{server.name}:Ingress")
            os.kill(ingress, signal.SIGKILL)
            with pytest.raises(httpx.RemoteProtocolError, match="incomplete"):
                list(lines)
        assert [other.result().json()["usage"]["completion_tokens"] for other in others] == [600] * 4
