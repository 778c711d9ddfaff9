"""What travels between the ingress and an engine replica.

Output on its way from an engine to an answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from app.engine.report import ReplicaReport, StepTimes
from app.engine.request import Delta, FinishReason, TokenLogprobs
from app.engine.sampling.params import SamplingParams
from vmem import CachedPrefix, MemoryReport, PinReport

_REPORT_FIELDS = {field.name for field in fields(ReplicaReport)}
_STEP_FIELDS = {field.name for field in fields(StepTimes)}


@dataclass(frozen=True, slots=True)
class HotPrefixes:
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
        share: where its pieces may go, all but the first (`app.serving.shared_streams`).
        repeat_key: the same when this call is sent once more because the first one's caller has died
            (`app.fleet.retry`). Other calls of the same HTTP request have other keys.
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
    expected: ExpectedPrefix | None = None
    crowded: tuple[str, ...] = ()
    refused_by: tuple[str, ...] = ()
    stopped: tuple[str, ...] = ()
    share: SharedStreamKey | None = None
    repeat_key: str | None = None


@dataclass(frozen=True, slots=True)
class SharedStreamKey:
    """What an ingress calls a request whose pieces may come by a shared stream."""

    ingress: str
    number: int


@dataclass(frozen=True, slots=True)
class SharedStreamCall:
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
class ExpectedPrefix:
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
    def from_reports(name: str, load: ReplicaReport, memory: MemoryReport, ready_s: float) -> ReplicaStatus:
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


# Neither hexadecimal digits nor the names of replicas have it.
_SEPARATOR = "."


@dataclass(frozen=True, slots=True)
class Piece:
    """What one or more steps added to one output: the `Delta`s of these steps in one.

    Attributes:
        replica: the one that has the request.
    """

    text: str
    token_ids: tuple[int, ...]
    index: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    num_unfinished: int = 0
    num_cached_tokens: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    score: float | None = None
    replica: str = ""

    @staticmethod
    def from_deltas(deltas: Sequence[Delta], prompt_logprobs: tuple[TokenLogprobs, ...], replica: str) -> Piece:
        """At least one, all of one output, none with an error."""
        last = deltas[-1]
        return Piece(
            text="".join(delta.text for delta in deltas),
            token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
            index=last.index,
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
            num_unfinished=last.num_unfinished,
            num_cached_tokens=last.num_cached_tokens,
            logprobs=tuple(token for delta in deltas for token in delta.logprobs),
            prompt_logprobs=prompt_logprobs,
            score=last.score,
            replica=replica,
        )

    @property
    def ends_request(self) -> bool:
        """Whether nothing of the request follows."""
        return self.finish_reason is not None and not self.num_unfinished


class PieceCollector:
    """Deltas of a request's outputs until there is something to send: those that end inside a character, or inside what
    may be a stop string, add to the next piece. The first piece, of whichever output, has the prompt's log
    probabilities."""

    def __init__(self, replica: str) -> None:
        self._replica = replica
        self._held: dict[int, list[Delta]] = {}
        self._prompt_logprobs: tuple[TokenLogprobs, ...] = ()

    def push(self, deltas: Sequence[Delta]) -> list[Piece]:
        """A piece of each output that has got text, or its end; last of all the one that ends the request."""
        self.hold(deltas)
        latest_first = dict.fromkeys(d.index for d in reversed(deltas) if d.text or d.finished)
        return [self._take(index) for index in reversed(latest_first)]

    def hold(self, deltas: Sequence[Delta]) -> None:
        """Keep them for `all`."""
        for delta in deltas:
            self._prompt_logprobs = delta.prompt_logprobs or self._prompt_logprobs
            self._held.setdefault(delta.index, []).append(delta)

    def held_pieces(self) -> list[Piece]:
        """What is held, each output in one piece, in order."""
        return [self._take(index) for index in sorted(self._held)]

    def _take(self, index: int) -> Piece:
        entries, self._prompt_logprobs = self._prompt_logprobs, ()
        return Piece.from_deltas(self._held.pop(index), entries, self._replica)


def public_id(request_id: str, replica: str) -> str:
    """What clients know a request by: a fork finds the replica in it, whichever ingress it comes to."""
    return f"{request_id}{_SEPARATOR}{replica}"


def split_public_id(public: str) -> tuple[str, str]:
    """(request id, replica). The latter is empty when there is none in it."""
    request_id, _, replica = public.partition(_SEPARATOR)
    return request_id, replica
