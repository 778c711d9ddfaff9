"""Cost of one routing decision with many replicas and large caches. Measured, not simulated.

python -m benchmarks.simulator.decision
"""

from __future__ import annotations

import json
import random
import statistics
import time
import tracemalloc
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field

from folio.app.engine.report import ReplicaReport, StepTimes
from folio.app.engine.request.prefix_keys import prompt_keys
from folio.app.engine.schedule.load_report import MOST_KEYS
from folio.app.fleet.fleet import Fleet, RoutedRequest
from folio.app.fleet.policies import PrefixAware
from folio.vmem import NO_KEYS, CachedKeys, key_of
from folio.vmem.prefix.prefix_summary import PrefixSummary

_UNIT_TOKENS = 16
# Units of the prefix that all prompts share, of a prompt, and of the cached part of a prompt that continues one.
_SYSTEM, _PROMPT, _CACHED = 32, 750, (400, 740)
# One in this number of conversations was at two replicas.
_TWICE = 4
_IN_FLIGHT = 8  # requests of this router at each replica
_CHANGED = 200  # blocks between two reports
_NUM_REPORTS = 8  # of each replica, timed

Digests = list[bytes]


@dataclass(frozen=True, slots=True)
class DecisionCost:
    """Microseconds; medians, and 99th percentiles.

    Attributes:
        decision_us: `rank`, and a router's other look-ups for a request.
        hash_us: hashing its prompt.
        sent_us: noting that it was sent, and that it has ended.
        first_report_us: applying a replica's first report.
        report_us: applying a report with `_CHANGED` changed blocks.
        whole_report_us: applying a report after too many missed ones, so that all keys are compared.
        known_bytes: of the state about all replicas.
        report_keys, report_bytes: of one report.
    """

    decision_us: float
    decision_p99_us: float
    hash_us: float
    hash_p99_us: float
    sent_us: float
    first_report_us: float
    report_us: float
    report_p99_us: float
    whole_report_us: float
    known_bytes: int
    report_keys: int
    report_bytes: int


@dataclass(slots=True)
class _Cache:
    """A replica's prefix cache with its conversations, the oldest first."""

    conversations: list[Digests]
    summary: PrefixSummary = field(default_factory=PrefixSummary)
    told: CachedKeys = NO_KEYS
    num_told: int = -1

    def __post_init__(self) -> None:
        depths = {digest: i + 1 for digests in self.conversations for i, digest in enumerate(digests)}
        for digest, depth in depths.items():
            self.summary.add(digest, depth)

    def change(self, rng: random.Random) -> None:
        """Change blocks: half of them continue a prompt, the others are the ends of the oldest prompts."""
        oldest = self.conversations[0]
        begun = oldest[: _PROMPT - _CHANGED // 2]
        for depth in range(_PROMPT, len(begun), -1):
            self.summary.remove(oldest[depth - 1], depth)
        for depth in range(len(begun) + 1, _PROMPT + 1):
            begun.append(rng.randbytes(16))
            self.summary.add(begun[-1], depth)
        self.conversations = [*self.conversations[1:], begun]

    def report(self, made_at: float) -> ReplicaReport:
        self.told = self.summary.keys(MOST_KEYS, self.told, self.num_told)
        self.num_told = self.summary.num_changes
        return _report(self.told, len(self.summary) * _UNIT_TOKENS, made_at)


def measure(num_replicas: int, cached_blocks: int, num_prompts: int, seed: int = 0) -> DecisionCost:
    rng = random.Random(seed)
    system = [rng.randbytes(16) for _ in range(_SYSTEM)]
    per_replica = (cached_blocks - _SYSTEM) // (_PROMPT - _SYSTEM)
    homes = [[_conversation(rng, system) for _ in range(per_replica)] for _ in range(num_replicas)]
    for i, home in enumerate(homes):
        for j in range(1, per_replica, _TWICE):
            home[j - 1] = homes[i - 1][j]
    caches = [_Cache(home) for home in homes]
    reports = [cache.report(made_at=0.0) for cache in caches]
    names = [f"replica-{i:03d}" for i in range(num_replicas)]

    tracemalloc.start()
    _take_in(Fleet(), names, reports)
    known_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    fleet, deaf = Fleet(), Fleet()
    first_us = _take_in(fleet, names, reports)
    _take_in(deaf, names, reports)
    later_us: list[float] = []
    for made_at in range(1, _NUM_REPORTS + 1):
        for cache in caches:
            cache.change(rng)
        later_us += _take_in(fleet, names, [cache.report(made_at) for cache in caches])
    for cache in caches[:8]:
        while cache.told.changes:  # until no router can follow the changes
            for _ in range(100):
                cache.change(rng)
            cache.report(0.0)
    whole_us = _take_in(deaf, names, [cache.report(_NUM_REPORTS + 1.0) for cache in caches[:8]])
    now = _NUM_REPORTS + 0.5
    requests = [_request(rng, i, rng.choice(rng.choice(homes))) for i in range(num_prompts + _IN_FLIGHT * num_replicas)]
    policy = PrefixAware(fleet)
    for i, request in enumerate(requests[num_prompts:]):
        fleet.note_sent(request, names[i % num_replicas], 0, now)
    decision_us = _typical(_decisions_us(policy, fleet, names, requests[:num_prompts], now))
    hash_us = _typical(_hash_us(rng) for _ in range(200))
    return DecisionCost(
        decision_us=decision_us[0],
        decision_p99_us=decision_us[1],
        hash_us=hash_us[0],
        hash_p99_us=hash_us[1],
        sent_us=statistics.median(_sent_us(fleet, rng.choice(names), r, now) for r in requests[:200]),
        first_report_us=statistics.median(first_us),
        report_us=_typical(later_us)[0],
        report_p99_us=_typical(later_us)[1],
        whole_report_us=statistics.median(whole_us),
        known_bytes=known_bytes,
        report_keys=len(reports[0].keys) // len(key_of(system[0])),
        report_bytes=len(caches[0].told.keys) + len(caches[0].told.changes),
    )


def _typical(times_us: Iterable[float]) -> tuple[float, float]:
    """Median and 99th percentile."""
    ordered = sorted(times_us)
    return statistics.median(ordered), ordered[len(ordered) * 99 // 100]


def _conversation(rng: random.Random, system: Digests) -> Digests:
    return system + [rng.randbytes(16) for _ in range(_PROMPT - _SYSTEM)]


def _request(rng: random.Random, number: int, cached: Digests) -> RoutedRequest:
    """A request that continues a cached prompt."""
    known = rng.randint(*_CACHED)
    digests = cached[:known] + [rng.randbytes(16) for _ in range(_PROMPT - known)]
    return RoutedRequest(f"r{number}", _PROMPT * _UNIT_TOKENS, [key_of(d) for d in digests])


def _report(cached: CachedKeys, total_tokens: int, made_at: float) -> ReplicaReport:
    return ReplicaReport(
        made_at=made_at,
        unit_tokens=_UNIT_TOKENS,
        keys=cached.keys,
        changes=cached.changes,
        stride=cached.stride,
        keys_version=cached.version,
        step=StepTimes(0.01, 1e-4, 1e-9),
        step_tokens=8192,
        max_num_seqs=256,
        num_running=20,
        num_waiting=2,
        queued_tokens=5000,
        queued_s=0.6,
        num_decodes=20,
        decode_s=0.01,
        free_tokens=total_tokens // 2,
        total_tokens=total_tokens,
        freed_tokens_per_s=3000.0,
        busy_share=0.6,
        budget_bytes=1 << 36,
    )


def _take_in(fleet: Fleet, names: Sequence[str], reports: Sequence[ReplicaReport]) -> list[float]:
    fleet.update(names)
    times_us = []
    for name, report in zip(names, reports, strict=False):
        start = time.perf_counter()
        fleet.apply_report(name, report, report.made_at)
        times_us.append((time.perf_counter() - start) * 1e6)
    return times_us


def _decisions_us(
    policy: PrefixAware, fleet: Fleet, names: Sequence[str], requests: Sequence[RoutedRequest], now: float
) -> Iterator[float]:
    for request in requests:
        start = time.perf_counter()
        chosen = policy.rank_replicas(request, names, now)[0]
        fleet.cached_tokens(request, [chosen])
        yield (time.perf_counter() - start) * 1e6


def _hash_us(rng: random.Random) -> float:
    prompt = [rng.randrange(100_000) for _ in range(_PROMPT * _UNIT_TOKENS)]
    start = time.perf_counter()
    keys = prompt_keys(prompt, _UNIT_TOKENS, None)
    elapsed = time.perf_counter() - start
    assert len(keys) == _PROMPT
    return elapsed * 1e6


def _sent_us(fleet: Fleet, name: str, request: RoutedRequest, now: float) -> float:
    start = time.perf_counter()
    sent = fleet.note_sent(request, name, 0, now)
    assert sent is not None
    fleet.withdraw(sent, now)
    return (time.perf_counter() - start) * 1e6


if __name__ == "__main__":
    print(json.dumps({name: round(value, 1) for name, value in asdict(measure(64, 100_000, 500)).items()}))
