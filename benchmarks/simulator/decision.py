"""What one decision costs a router that knows many replicas with large caches. Measured, not simulated."""

from __future__ import annotations

import random
import statistics
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from app.engine.load import MOST_KEYS
from app.fleet.fleet import Fleet, RoutedRequest
from app.fleet.keys import prompt_keys
from app.fleet.policies import PrefixAware
from app.fleet.report import ReplicaReport, StepTimes
from vmem import key_of
from vmem.summary import PrefixSummary

_UNIT_TOKENS = 16
# Units of a prompt that all share, of one, and of a prompt that goes on from one that is cached: the cached ones.
_SYSTEM, _PROMPT, _CACHED = 32, 750, (400, 740)
# Every so many conversations one has been at two replicas.
_TWICE = 4
_IN_FLIGHT = 8  # requests of this router at each replica

Digests = list[bytes]


@dataclass(frozen=True, slots=True)
class DecisionCost:
    """Microseconds, medians: of `rank` and what else a router looks up for a request; of hashing its prompt; of noting
    that it was sent, and that it is over; of taking in a replica's first report, and a later one. Bytes of all that is
    known of replicas; keys of one report."""

    decision_us: float
    hash_us: float
    sent_us: float
    first_report_us: float
    report_us: float
    known_bytes: int
    report_keys: int


def measure(num_replicas: int, cached_blocks: int, num_prompts: int, seed: int = 0) -> DecisionCost:
    rng = random.Random(seed)
    system = [rng.randbytes(16) for _ in range(_SYSTEM)]
    per_replica = (cached_blocks - _SYSTEM) // (_PROMPT - _SYSTEM)
    homes = [[_conversation(rng, system) for _ in range(per_replica)] for _ in range(num_replicas)]
    for i, home in enumerate(homes):
        for j in range(1, per_replica, _TWICE):
            home[j - 1] = homes[i - 1][j]
    reports = [_report(home, made_at=0.0) for home in homes]
    changed = [_report([*home[1:], _conversation(rng, system)], made_at=1.0) for home in homes[:8]]
    names = [f"replica-{i:03d}" for i in range(num_replicas)]

    tracemalloc.start()
    _take_in(Fleet(), names, reports)
    known_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    fleet = Fleet()
    first_us = _take_in(fleet, names, reports)
    later_us = _take_in(fleet, names, changed)
    requests = [_request(rng, i, rng.choice(rng.choice(homes))) for i in range(num_prompts + _IN_FLIGHT * num_replicas)]
    policy = PrefixAware(fleet)
    for i, request in enumerate(requests[num_prompts:]):
        fleet.sent(request, names[i % num_replicas], 0, 1.0)
    return DecisionCost(
        decision_us=statistics.median(_decisions_us(policy, fleet, names, requests[:num_prompts])),
        hash_us=statistics.median(_hash_us(rng) for _ in range(100)),
        sent_us=statistics.median(_sent_us(fleet, rng.choice(names), r) for r in requests[:200]),
        first_report_us=statistics.median(first_us),
        report_us=statistics.median(later_us),
        known_bytes=known_bytes,
        report_keys=len(reports[0].keys) // len(key_of(system[0])),
    )


def _conversation(rng: random.Random, system: Digests) -> Digests:
    return system + [rng.randbytes(16) for _ in range(_PROMPT - _SYSTEM)]


def _request(rng: random.Random, number: int, cached: Digests) -> RoutedRequest:
    """One that goes on from a cached prompt."""
    known = rng.randint(*_CACHED)
    digests = cached[:known] + [rng.randbytes(16) for _ in range(_PROMPT - known)]
    return RoutedRequest(f"r{number}", _PROMPT * _UNIT_TOKENS, [key_of(d) for d in digests])


def _report(conversations: Sequence[Digests], made_at: float) -> ReplicaReport:
    summary = PrefixSummary()
    depths = {digest: i + 1 for digests in conversations for i, digest in enumerate(digests)}
    for digest, depth in depths.items():
        summary.add(digest, depth)
    keys = summary.keys(MOST_KEYS)
    total = len(summary) * _UNIT_TOKENS
    return ReplicaReport(
        made_at=made_at,
        unit_tokens=_UNIT_TOKENS,
        keys=keys.keys,
        stride=keys.stride,
        keys_version=keys.version + round(made_at),
        step=StepTimes(0.01, 1e-4, 1e-9),
        step_tokens=8192,
        max_num_seqs=256,
        num_running=20,
        num_waiting=2,
        queued_tokens=5000,
        queued_s=0.6,
        num_decodes=20,
        decode_s=0.01,
        free_tokens=total // 2,
        total_tokens=total,
        freed_tokens_per_s=3000.0,
        busy_share=0.6,
        budget_bytes=1 << 36,
        physical_bytes=1 << 36,
        expected_cached_tokens=0,
        cached_tokens=0,
        missed_tokens=0,
    )


def _take_in(fleet: Fleet, names: Sequence[str], reports: Sequence[ReplicaReport]) -> list[float]:
    fleet.update(names)
    times_us = []
    for name, report in zip(names, reports, strict=False):
        start = time.perf_counter()
        fleet.report(name, report, report.made_at)
        times_us.append((time.perf_counter() - start) * 1e6)
    return times_us


def _decisions_us(
    policy: PrefixAware, fleet: Fleet, names: Sequence[str], requests: Sequence[RoutedRequest]
) -> Iterator[float]:
    for request in requests:
        start = time.perf_counter()
        chosen = policy.rank(request, names, 1.5)[0]
        fleet.cached_tokens(request, [chosen])
        yield (time.perf_counter() - start) * 1e6


def _hash_us(rng: random.Random) -> float:
    prompt = [rng.randrange(100_000) for _ in range(_PROMPT * _UNIT_TOKENS)]
    start = time.perf_counter()
    keys = prompt_keys(prompt, _UNIT_TOKENS, None)
    elapsed = time.perf_counter() - start
    assert len(keys) == _PROMPT
    return elapsed * 1e6


def _sent_us(fleet: Fleet, name: str, request: RoutedRequest) -> float:
    start = time.perf_counter()
    sent = fleet.sent(request, name, 0, 1.5)
    assert sent is not None
    fleet.withdraw(sent, 1.5)
    return (time.perf_counter() - start) * 1e6
