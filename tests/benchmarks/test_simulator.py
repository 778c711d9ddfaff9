"""The simulator that `benchmarks.routing` measures policies with."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.fleet import routing_real
from benchmarks.fleet.autoscaling import num_flaps
from benchmarks.simulator import single_cache, traffic
from benchmarks.simulator.cluster import Cluster, MakePolicy, Scaling
from benchmarks.simulator.device import Device, roofline
from benchmarks.simulator.kv_aware import KvAware, KvIndex
from benchmarks.simulator.outcome import Outcome
from benchmarks.simulator.ray_affinity import RayAffinity
from benchmarks.simulator.replica import SimulatedReplica
from benchmarks.simulator.transfers import Link
from folio.app.checks import check_args
from folio.app.config.args import AppArgs
from folio.app.fleet.autoscaling import ScalingPolicy, ScalingTargets
from folio.app.fleet.fleet import Fleet
from folio.app.fleet.policies import Policy, make_policy
from folio.app.fleet.roles import Roles
from folio.vmem import key_of

UNIT = traffic.MOONCAKE_UNIT
DEVICE = Device(
    name="a small one",
    fixed_s=0.01,
    token_s=1e-5,
    attended_s=1e-9,
    decode_attended_s=1e-8,
    step_tokens=8192,
    max_num_seqs=8,
    cache_tokens=400 * UNIT,
    unit_tokens=UNIT,
)


def named(policy: str) -> MakePolicy:
    return lambda fleet, _: make_policy(policy, fleet)


def arrivals(count: int = 100) -> list[traffic.Arrival]:
    return list(traffic.faster(traffic.conversations(count, seed=1), 2.0))


def prompt(number: int, blocks: list[int], rest: int = 10) -> traffic.Arrival:
    return traffic.arrival_of(number, float(number), len(blocks) * UNIT + rest, 3, blocks, 1000 + number)


def times(outcome: Outcome) -> list[tuple[str, int, int, float | None, float | None]]:
    return [(s.arrival.request_id, s.replica, s.cached_tokens, s.first_token_at, s.ended_at) for s in outcome.served]


@pytest.mark.parametrize("policy", ["prefix_aware", "least_loaded", "round_robin", "consistent_hash"])
def test_every_request_is_served_once(policy: str) -> None:
    """A replica's memory checks its own integrity when the run is over."""
    sent = arrivals()
    outcome = Cluster(DEVICE, 4, named(policy)).run(sent)
    assert sorted(s.arrival.number for s in outcome.served) == list(range(len(sent)))
    for served in outcome.served:
        assert served.first_token_at is not None
        assert served.ended_at is not None
        assert served.arrival.at < served.first_token_at <= served.ended_at <= outcome.ended_at
        assert 0 <= served.cached_tokens < served.arrival.num_tokens
    computed = sum(life.prefill_tokens for life in outcome.lifetimes)
    assert computed >= sum(s.arrival.num_tokens - s.cached_tokens for s in outcome.served)
    assert outcome.busy_max_over_mean >= 1


def test_deterministic() -> None:
    first, second = (Cluster(DEVICE, 4, named("prefix_aware"), seed=3).run(arrivals()) for _ in range(2))
    assert times(first) == times(second)
    assert first.missed_tokens == second.missed_tokens


def test_many_steps_as_one_take_as_long() -> None:
    """In turn, because what a replica learns about its steps depends on how many it has seen."""
    leaping, stepping = (
        Cluster(DEVICE, 3, named("round_robin"), leaps=leaps).run(arrivals(80)) for leaps in (True, False)
    )
    assert leaping.num_steps == stepping.num_steps
    for a, b in zip(leaping.served, stepping.served, strict=True):
        assert (a.replica, a.cached_tokens) == (b.replica, b.cached_tokens)
        assert a.first_token_at == pytest.approx(b.first_token_at, abs=1e-9)
        assert a.ended_at == pytest.approx(b.ended_at, abs=1e-9)
    for a_life, b_life in zip(leaping.lifetimes, stepping.lifetimes, strict=True):
        assert a_life.busy_s == pytest.approx(b_life.busy_s, abs=1e-9)


def test_a_request_alone_takes_the_device_models_time() -> None:
    request = prompt(0, [1, 2, 3])
    [served] = Cluster(DEVICE, 1, named("round_robin")).run([request]).served
    n = request.num_tokens
    first_s = DEVICE.step_s(n, n * (n + 1) // 2, 0)
    decodes_s = sum(DEVICE.step_s(1, 0, n + i) for i in (1, 2))
    assert served.first_token_at == pytest.approx(first_s)
    assert served.ended_at == pytest.approx(first_s + decodes_s)


def test_without_reports_as_the_least_loaded() -> None:
    blind, least = (
        Cluster(DEVICE, 4, named(policy), report_period_s=None).run(arrivals(80))
        for policy in ("prefix_aware", "least_loaded")
    )
    assert times(blind) == times(least)


def test_requests_go_to_the_replica_with_their_prefix() -> None:
    """The second request goes where the first was, although the others have nothing to do."""
    same = [replace(prompt(i, [1, 2, 3, 4]), at=5.0 * i) for i in range(4)]
    outcome = Cluster(DEVICE, 3, named("prefix_aware"), num_routers=1).run(same)
    assert len({served.replica for served in outcome.served}) == 1
    assert [served.cached_tokens for served in outcome.served] == [0, 4 * UNIT, 4 * UNIT, 4 * UNIT]
    assert outcome.missed_tokens == 0


def test_single_cache() -> None:
    """Four blocks of room: the third prompt takes that of the first, and the last one finds only what is shared."""
    small = replace(DEVICE, cache_tokens=4 * UNIT)
    sent = [prompt(0, [1, 2]), prompt(1, [1, 2, 3]), prompt(2, [7, 8, 9]), prompt(3, [1, 2])]
    tokens = sum(request.num_tokens for request in sent)
    assert single_cache.hit_share(sent, small, 100 * UNIT) * tokens == pytest.approx((2 + 2) * UNIT)
    assert single_cache.hit_share(sent, small, 4 * UNIT) * tokens < (2 + 2) * UNIT
    assert single_cache.infinite_hit_share(sent, UNIT) * tokens == pytest.approx((2 + 2) * UNIT)


def test_a_prompt_of_less_than_a_unit_hits_nothing() -> None:
    assert single_cache.infinite_hit_share([prompt(0, [1], rest=0), prompt(1, [1], rest=0)], UNIT) == 0


def test_replicas_are_added_and_removed() -> None:
    """A burst, and a few requests long after it."""
    burst = [prompt(i, [10 * i + j for j in range(8)]) for i in range(60)]
    sent = [replace(request, at=0.05 * i) for i, request in enumerate(burst)]
    sent += [replace(prompt(60 + i, [2000 + i]), at=100.0 + 20 * i) for i in range(12)]
    slow = replace(DEVICE, token_s=5e-4)
    targets = ScalingTargets(ttft_s=1.0, up_after_s=1.0, down_after_s=10.0, start_s=10.0)
    scaling = Scaling(policy=ScalingPolicy(targets), start_s=5.0, most_replicas=4)
    outcome = Cluster(slow, 1, named("prefix_aware"), scaling=scaling).run(sent)
    sizes = [ordered for _, ordered, _ in outcome.fleet_sizes]
    assert max(sizes) > 1
    assert sizes[-1] == 1
    assert len(outcome.served) == len(sent)
    assert len(outcome.lifetimes) >= max(sizes)
    assert outcome.replica_s < max(sizes) * outcome.ended_at


def test_flaps() -> None:
    assert num_flaps([(0, True), (30, False), (200, True), (210, True), (265, False)]) == 2


def test_roofline() -> None:
    device = roofline(
        "test",
        parameters=1e9,
        layers=10,
        heads=8,
        kv_heads=2,
        head_dim=100,
        flops=2e12,
        bandwidth=1e10,
        memory_bytes=4e9,
        unit_tokens=16,
        compute_share=0.5,
        bandwidth_share=0.5,
    )
    assert device.fixed_s == pytest.approx(0.4)
    assert device.token_s == pytest.approx(2e-3)
    assert device.cache_tokens == int(1.6e9 / 8000) // 16 * 16


def test_traffic() -> None:
    sent = traffic.conversations(3000, seed=0)
    assert sent == sorted(sent, key=lambda request: request.at)
    assert sum(request.num_tokens for request in sent) / len(sent) == pytest.approx(12_000, rel=0.1)
    assert sum(request.num_output_tokens for request in sent) / len(sent) == pytest.approx(343, rel=0.1)
    half = list(traffic.in_bursts(sent, 60.0, 0.5))
    assert all(a.at % 60 <= 30 for a in half)
    assert half == sorted(half, key=lambda request: request.at)


class Tree:
    """Stands in for Ray's, which need not be there: the replica with the first character matches the whole text."""

    def __init__(self) -> None:
        self.tenant_to_char_count: dict[str, int] = {}
        self._first: dict[str, list[str]] = {}

    def add_tenants(self, tenants: list[str], now: float) -> None:
        self.tenant_to_char_count |= dict.fromkeys(tenants, 0)

    def insert(self, text: str, tenant: str, now: float) -> None:
        self.tenant_to_char_count[tenant] += len(text)
        self._first.setdefault(text[:1], []).append(tenant)

    def prefix_match(self, text: str, tenants: list[str]) -> tuple[str, list[str] | None]:
        found = self._first.get(text[:1])
        return (text, found) if found else ("", tenants)

    def get_smallest_tenants(self) -> list[str]:
        least = min(self.tenant_to_char_count.values())
        return [tenant for tenant, count in self.tenant_to_char_count.items() if count == least]


@pytest.mark.parametrize(("threshold", "to_the_same"), [(float("inf"), True), (0.0, False)])
def test_ray_affinity(threshold: float, to_the_same: bool) -> None:
    """With a threshold of 0, queues are never balanced while a request runs."""
    tree, rng = Tree(), random.Random(0)

    def make(fleet: Fleet, replica: Callable[[str], SimulatedReplica]) -> Policy:
        return RayAffinity(tree, lambda name: replica(name).num_unfinished, rng, imbalanced_threshold=threshold)

    same = [replace(prompt(i, [1, 2, 3]), at=0.001 * i) for i in range(8)]
    outcome = Cluster(DEVICE, 3, make).run(same)
    assert (len({served.replica for served in outcome.served}) == 1) == to_the_same


def kv_aware(temperature: float = 0.0) -> MakePolicy:
    index, rng = KvIndex(), random.Random(0)
    return lambda fleet, replica: KvAware(index, replica, rng, unit_tokens=UNIT, temperature=temperature)


def test_kv_aware_weighs_prefixes_against_blocks_in_use() -> None:
    """The cost is in blocks: 4 cached ones of a prompt are worth as much as 4 more that are computed or in use."""
    first = replace(prompt(0, [1, 2, 3, 4]), at=0.0)
    again = replace(prompt(1, [1, 2, 3, 4], rest=20), at=5.0)  # idle fleet: goes where the prefix is
    long = replace(prompt(2, list(range(100, 160))), at=10.0)
    beside = replace(prompt(3, list(range(200, 204))), at=10.001)  # to one of the others
    outcome = Cluster(DEVICE, 3, kv_aware(), report_period_s=None).run([first, again, long, beside])
    where = {served.arrival.number: served.replica for served in outcome.served}
    assert where[1] == where[0]
    assert where[3] != where[2]
    # Where the prefix is, so much is under way that it is computed elsewhere.
    begin = [replace(prompt(0, [1, 2, 3, 4]), at=0.0), replace(prompt(1, [1, 2, 3, 4, *range(100, 160)]), at=5.0)]
    late = replace(prompt(2, [1, 2, 3, 4]), at=5.001)
    outcome = Cluster(DEVICE, 3, kv_aware(), report_period_s=None).run([*begin, late])
    assert outcome.served[0].replica == outcome.served[1].replica != outcome.served[2].replica


def test_kv_aware_forgets_finished_requests() -> None:
    replica = SimulatedReplica(0, DEVICE)
    request = prompt(0, [1, 2, 3], rest=0)
    replica.submit(request, 0, 0.0)
    assert (replica.prefill_due_tokens, replica.active_units_with([])) == (3 * UNIT, 3)
    other = [key_of(digest) for digest in prompt(1, [1, 2, 9]).digests]
    assert replica.active_units_with(other) == 4  # two are shared
    assert len(list(replica.advance(100.0))) == 1
    assert (replica.prefill_due_tokens, replica.active_units_with(other)) == (0, 3)
    assert KvIndex().cached_units(other, [replica]) == [2]
    replica.close()


def test_kv_aware_with_a_temperature_draws() -> None:
    same = [replace(prompt(i, [1, 2, 3]), at=5.0 * i) for i in range(30)]
    outcome = Cluster(DEVICE, 3, kv_aware(temperature=1.0), report_period_s=None).run(same)
    assert len({served.replica for served in outcome.served}) == 3


def test_agents_come_back_when_the_turn_before_has_ended() -> None:
    """With fixed times, as traces have them, a slow fleet would get a turn before it has answered the last one."""
    sent = traffic.agents(120, 4.0, seed=1)
    assert [arrival.number for arrival in sent] == list(range(len(sent)))
    before = {arrival.number: arrival for arrival in sent}
    for arrival in sent:
        if arrival.follows is not None:
            last = before[arrival.follows]
            assert last.session == arrival.session
            assert arrival.num_tokens > last.num_tokens + last.num_output_tokens
            assert arrival.digests[: len(last.digests)] == last.digests
    outcome = Cluster(DEVICE, 3, named("prefix_aware")).run(sent)
    ended = {served.arrival.number: served.ended_at for served in outcome.served}
    assert len(ended) == len(sent)
    for served in outcome.served:
        if served.arrival.follows is not None:
            assert served.arrival.at == pytest.approx((ended[served.arrival.follows] or 0.0) + served.arrival.pause_s)


def test_load_bounds() -> None:
    """Six replicas' worth of short prompts, and a long one at the end: balanced only if it is known."""
    sent = [prompt(i, [10 * i]) for i in range(12)] + [prompt(12, list(range(200, 206)))]
    as_they_come, known = single_cache.load_bounds(sent, DEVICE, 3)
    assert as_they_come > 1.4
    assert known == pytest.approx(1.0, abs=0.05)
    assert single_cache.load_bounds([prompt(0, [1]), prompt(1, [1])], DEVICE, 2)[0] > 1.5  # the second is found


def test_the_model_of_the_real_runs_is_accepted(tmp_path: Path) -> None:
    """Regression: its vocabulary was smaller than that of the tokenizer it borrows from the built-in model."""
    routing_real.make_checkpoint(tmp_path)
    check_args(AppArgs.model_validate(routing_real.serve_args(tmp_path)))


def by_role(
    num_prefill: int,
    num_replicas: int,
    sent: list[traffic.Arrival],
    bytes_per_s: float = 1e9,
    overlaps: bool = True,
    step_tokens: int = DEVICE.step_tokens,
) -> Outcome:
    roles = Roles(num_prefill / num_replicas)
    link_of = Link(bytes_per_s=bytes_per_s, token_bytes=1000, overlaps=overlaps)
    device = replace(DEVICE, step_tokens=step_tokens)
    return Cluster(device, num_replicas, named("prefix_aware"), roles=roles, link=link_of).run(sent)


@pytest.mark.parametrize("overlaps", [False, True])
def test_every_request_is_decoded_where_its_blocks_went(overlaps: bool) -> None:
    outcome = by_role(1, 3, arrivals(), overlaps=overlaps)
    assert sorted(s.arrival.number for s in outcome.served) == list(range(100))
    for served in outcome.served:
        assert served.first_token_at is not None
        assert served.ended_at is not None
        assert (served.moved_at is not None) == (served.arrival.num_output_tokens > 1)
        if served.moved_at is not None:
            assert served.replica in (1, 2)
            assert served.first_token_at <= served.moved_at < served.ended_at
    prefill, *others = sorted(outcome.lifetimes, key=lambda life: life.name)
    assert prefill.prefill_tokens == sum(s.arrival.num_tokens - s.cached_tokens for s in outcome.served)
    assert not any(life.prefill_tokens for life in others)  # memory is enough: nothing is computed again


@pytest.mark.parametrize(("overlaps", "num_steps", "share"), [(False, 1, 1.0), (False, 3, 1.0), (True, 3, 1 / 3)])
def test_a_move_waits_for_what_is_not_sent_yet(overlaps: bool, num_steps: int, share: float) -> None:
    request = prompt(0, [1, 2, 3])
    n = request.num_tokens
    [served] = by_role(1, 2, [request], overlaps=overlaps, step_tokens=-(-n // num_steps)).served
    assert served.first_token_at is not None
    if num_steps == 1:
        assert served.first_token_at == pytest.approx(DEVICE.step_s(n, n * (n + 1) // 2, 0))
    assert served.moved_at is not None
    assert served.moved_at - served.first_token_at == pytest.approx(share * n * 1000 / 1e9, rel=0.05)
    assert served.ended_at == pytest.approx(served.moved_at + sum(DEVICE.step_s(1, 0, n + i) for i in (1, 2)))


def test_a_link_carries_one_transfer_after_the_other() -> None:
    """The link is slower than the device: each prompt's blocks wait for those of the one before."""
    sent = [replace(prompt(i, [10 * i + 1, 10 * i + 2]), at=0.0) for i in range(3)]
    moved = sorted(s.moved_at or 0.0 for s in by_role(1, 2, sent, bytes_per_s=1e6, overlaps=False).served)
    assert [b - a for a, b in itertools.pairwise(moved)] == pytest.approx([sent[0].num_tokens * 1000 / 1e6] * 2)
