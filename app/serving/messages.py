"""What travels between the ingress and an engine replica."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from app.engine.report import ReplicaReport, StepTimes
from app.engine.sampling.params import SamplingParams
from vmem import CachedPrefix, MemoryReport, PinReport

_REPORT_FIELDS = {field.name for field in fields(ReplicaReport)}
_STEP_FIELDS = {field.name for field in fields(StepTimes)}


@dataclass(frozen=True, slots=True)
class ToldPrefixes:
    """What a replica tells one that starts of its prefix cache, for those with the same fingerprint
    (`Engine.prefix_fingerprint`)."""

    fingerprint: str
    prefixes: list[CachedPrefix]


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A tokenised prompt and how to continue it.

    `priority`, `cache_salt`, `adapter`, `tenant`, `user`, `timeout_s`: see `RequestOptions`; `session`: what belongs
    together, a hint for the router; `expected`: the router's word for what a replica has cached of the prompt.

    Attributes:
        crowded: replicas whose queues were full a moment ago: to be asked last.
        refused_by: those that have refused this request: not to be asked.
        stopped: replicas whose engines have stopped: not to be asked.
        share: where its pieces may go, all but the first (`app.serving.shared`).
        repeat_key: the same when this call is sent once more because the first one's caller has died
            (`app.serving.repeats`). Other calls of the same HTTP request have other keys.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None
    adapter: str | None = None
    tenant: str | None = None
    user: str | None = None
    timeout_s: float | None = None
    session: str | None = None
    expected: Expected | None = None
    crowded: tuple[str, ...] = ()
    refused_by: tuple[str, ...] = ()
    stopped: tuple[str, ...] = ()
    share: Share | None = None
    repeat_key: str | None = None


@dataclass(frozen=True, slots=True)
class Share:
    """What an ingress calls a request whose pieces may come by a shared stream."""

    ingress: str
    number: int


@dataclass(frozen=True, slots=True)
class ShareCall:
    """Asks a replica for a shared stream to an ingress, under this number."""

    ingress: str
    connection: int
    replica: str


@dataclass(frozen=True, slots=True)
class ForkCall:
    """Go on with output `index` of the request `fork_of` in `params.n` more ways, at the `replica` that has it."""

    request_id: str
    fork_of: str
    index: int
    replica: str
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Expected:
    """Tokens that a router expects to be cached at a replica; another one that gets the request may ignore it."""

    replica: str
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """What the ingress tells clients about the model."""

    max_model_len: int


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """What an engine replica tells operators about itself: fields of `ReplicaReport` and `MemoryReport`.

    Attributes:
        name: of the replica.
        prompt_tokens, cached_tokens: `queried_tokens` and `hit_tokens` of the memory.
        ready_s: seconds from its start until it was ready.
    """

    name: str
    num_running: int
    num_waiting: int
    max_num_seqs: int
    queued_tokens: int
    queued_s: float
    busy_share: float
    free_tokens: int
    total_tokens: int
    budget_bytes: int
    physical_bytes: int
    active_bytes: int
    cached_bytes: int
    pinned_bytes: int
    swapped_bytes: int
    prompt_tokens: int
    cached_tokens: int
    pins: tuple[PinReport, ...]
    ready_s: float

    @staticmethod
    def of(name: str, load: ReplicaReport, memory: MemoryReport, ready_s: float) -> ReplicaStatus:
        return ReplicaStatus(
            name=name,
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            max_num_seqs=load.max_num_seqs,
            queued_tokens=load.queued_tokens,
            queued_s=load.queued_s,
            busy_share=load.busy_share,
            free_tokens=load.free_tokens,
            total_tokens=load.total_tokens,
            budget_bytes=memory.budget_bytes,
            physical_bytes=memory.physical_bytes,
            active_bytes=memory.active_bytes,
            cached_bytes=memory.cached_bytes,
            pinned_bytes=memory.pinned_bytes,
            swapped_bytes=memory.swapped_bytes,
            prompt_tokens=memory.queried_tokens,
            cached_tokens=memory.hit_tokens,
            pins=memory.pins,
            ready_s=ready_s,
        )


def report_as_stats(report: ReplicaReport) -> dict[str, Any]:
    """The report in plain types: it passes through Serve's controller, which knows nothing of Folio."""
    return asdict(report)


def report_from_stats(stats: Mapping[str, Any]) -> ReplicaReport | None:
    """What `report_as_stats` was given; `None` if that was another version of it, as in the middle of an update."""
    if stats.keys() != _REPORT_FIELDS or not isinstance(stats["step"], dict) or stats["step"].keys() != _STEP_FIELDS:
        return None
    return ReplicaReport(**{**stats, "step": StepTimes(**stats["step"])})
