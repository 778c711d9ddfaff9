"""Messages between ingress and engine replica: calls, load reports as plain types, pieces of output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from folio.app.config.added_model import AddedModel
from folio.app.engine.report import ReplicaReport, StepTimes
from folio.app.engine.request.delta import Delta, FinishReason
from folio.app.engine.request.engine_request import EngineRequest
from folio.app.engine.request.pooled import PooledKind
from folio.app.engine.sampling.params import SamplingParams
from folio.app.engine.sampling.token_logprobs import TokenLogprobs
from folio.app.shelf.status import ModelStatus
from folio.vmem import CachedPrefix

# Bounds of a call that pools several short prompts, which saves calls: each takes as long as hundreds of tokens.
_MOST_POOLED, _MOST_POOLED_TOKENS = 16, 4096
_REPORT_FIELDS = {field.name for field in fields(ReplicaReport)}
_STEP_FIELDS = {field.name for field in fields(StepTimes)}


@dataclass(frozen=True, slots=True)
class HotPrefixes:
    """The prefixes that warm the cache of a new replica with the same `Fingerprints.prefixes`."""

    fingerprint: str
    prefixes: list[CachedPrefix]


@dataclass(frozen=True, slots=True)
class GenerateRequest(EngineRequest):
    """A request to an engine, with what routing and delivery need. The replica passes it to the engine as it is.

    Attributes:
        adapter_key: the adapter's id in the keys of cached prefixes, as far as the ingress knows. A hint for the
            router: the replica decides which adapter has the name.
        session: the client's name for related requests, a hint for the router.
        expected: the router's expectation of the replica's prefix cache.
        crowded: replicas whose queues were full a moment ago; they come last.
        refused_by, stopped: replicas that have refused this request, or whose engines have stopped; they are left out.
        share: the key under which a shared stream may carry all pieces but the first
            (`folio.app.serving.shared_streams`).
        repeat_key: the same in a call that is sent again because the caller of the first has died
            (`folio.app.fleet.retry`). Other calls of the same HTTP request have other keys.
        more_prompts: further prompts to pool in the same call; output `i + 1` is of `more_prompts[i]`.
        model: the model's name at the replica; empty: the first one.
        begun_by: the replica that has begun the outputs of `begun`; only replicas with its model continue them.
        shows_progress: the replica sends a `Progress` every `PROGRESS_S` without output.
        whole: the caller puts the pieces together, and needs them only for a continuation: they come seldom.
        fetches: a replica is to get the prompt's blocks from `held_at`, while they are computed there, and keep them
            for the call itself until this one is closed. Its only item is the replica's name.
        fetched_by: a replica that does so: it gets the call.
    """

    adapter_key: str | None = None
    session: str | None = None
    expected: ExpectedPrefix | None = None
    crowded: tuple[str, ...] = ()
    refused_by: tuple[str, ...] = ()
    stopped: tuple[str, ...] = ()
    share: SharedStreamKey | None = None
    repeat_key: str | None = None
    more_prompts: tuple[Sequence[int], ...] = ()
    model: str = ""
    begun_by: str = ""
    shows_progress: bool = False
    whole: bool = False
    fetches: bool = False
    fetched_by: str = ""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return len(self.prompt_token_ids) + sum(map(len, self.more_prompts))


@dataclass(frozen=True, slots=True)
class ServedPooling:
    """The vectors that a replica's model makes of prompts: none, embeddings, or scores of pairs. `score_template`: see
    `EngineConfig`."""

    kind: PooledKind | None
    score_template: str | None = None


@dataclass(frozen=True, slots=True)
class SharedStreamKey:
    """An ingress's key of a request whose pieces may come through a shared stream."""

    ingress: str
    number: int


@dataclass(frozen=True, slots=True)
class SharedStreamCall:
    """Opens a shared stream from a replica to an ingress, with the number `connection`."""

    ingress: str
    connection: int
    replica: str


@dataclass(frozen=True, slots=True)
class ForkCall:
    """Continue output `index` of the request `fork_of` in `params.n` more ways, at the `replica` that has it.

    Attributes:
        owner: the only owner whose requests may be continued; `None`: the caller may continue all.
        model, whole: see `GenerateRequest`.
    """

    request_id: str
    fork_of: str
    index: int
    replica: str
    params: SamplingParams
    timeout_s: float | None = None
    owner: str | None = None
    model: str = ""
    whole: bool = False

    def as_generated(self, asked: EngineRequest) -> GenerateRequest:
        """The call that gets the same forks from any replica, given the engine's `asked` for them."""
        of_engine = {field.name: getattr(asked, field.name) for field in fields(EngineRequest)}
        of_call = {"request_id": self.request_id, "timeout_s": self.timeout_s, "owner": self.owner}
        return GenerateRequest(**of_engine | of_call, model=self.model, whole=self.whole)


@dataclass(frozen=True, slots=True)
class ExpectedPrefix:
    """What a router expects of a replica; any other replica ignores it.

    Attributes:
        cached_tokens: prompt tokens that are cached there.
        leaves: the call leaves after its first output, for another replica to decode (`folio.app.fleet.roles`).
    """

    replica: str
    cached_tokens: int
    leaves: bool = False


@dataclass(frozen=True, slots=True)
class CheckedModel:
    """A model that a replica can serve, with its folder's path. `files`: names and sizes of its files."""

    config: AddedModel
    files: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class HostedModel:
    """A replica's answer about one of its models. `max_model_len`: the context length that fits its memory; `None`
    until the replica has loaded it."""

    status: ModelStatus
    max_model_len: int | None


def reports_as_stats(
    reports: Mapping[str, ReplicaReport],
    outputs: Mapping[str, tuple[str, str]],
    start_s: float,
    is_draining: bool = False,
) -> dict[str, Any]:
    """A replica's report of each model, at least one, in plain types: Serve's controller, on the way, does not import
    Folio.

    Args:
        outputs: see `Departures.note_outputs`.
        start_s: seconds that the replica's start took.
        is_draining: its calls are to move to others.
    """
    return {
        "start_s": start_s,
        "outputs": dict(outputs),
        "is_draining": is_draining,
        "made_at": max(report.made_at for report in reports.values()),
        "models": {name: asdict(report) for name, report in reports.items()},
    }


def reports_from_stats(stats: Mapping[str, Any]) -> dict[str, ReplicaReport] | None:
    """The inverse of `reports_as_stats`; `None` for another version's reports, as during an update."""
    if stats.keys() != {"start_s", "outputs", "is_draining", "made_at", "models"}:
        return None
    reports: dict[str, ReplicaReport] = {}
    for name, of_model in stats["models"].items():
        if (report := _report_from_stats(of_model)) is None:
            return None
        reports[name] = report
    return reports


def _report_from_stats(stats: Mapping[str, Any]) -> ReplicaReport | None:
    if stats.keys() != _REPORT_FIELDS or not isinstance(stats["step"], dict) or stats["step"].keys() != _STEP_FIELDS:
        return None
    return ReplicaReport(**{**stats, "step": StepTimes(**stats["step"])})


# Occurs in no request id (hexadecimal digits) and in no replica's name.
_SEPARATOR = "."


@dataclass(frozen=True, slots=True)
class Piece:
    """The `Delta`s of one output in one or more steps. `replica`: the replica that has the request. `pooled`: see
    `Delta`."""

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
    pooled: bytes | None = None

    @staticmethod
    def joined(deltas: Sequence[Delta | Piece], prompt_logprobs: tuple[TokenLogprobs, ...], replica: str) -> Piece:
        """Join deltas or pieces: at least one, all of one output, none with an error."""
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
            pooled=last.pooled,
        )

    @property
    def ends_request(self) -> bool:
        """Whether nothing of the request follows."""
        return self.finish_reason is not None and not self.num_unfinished


class PieceCollector:
    """Holds a request's deltas until there is text to send: a delta may end inside a character, or inside a possible
    stop string. The first piece of any output carries the prompt's log probabilities."""

    def __init__(self, replica: str) -> None:
        self._replica = replica
        self._held: dict[int, list[Delta]] = {}
        self._ready: dict[int, None] = {}  # outputs with new text, and those that have ended; the latest is the last
        self._prompt_logprobs: tuple[TokenLogprobs, ...] = ()

    def hold(self, deltas: Sequence[Delta]) -> None:
        """Keep deltas for `pieces`."""
        for delta in deltas:
            self._prompt_logprobs = delta.prompt_logprobs or self._prompt_logprobs
            self._held.setdefault(delta.index, []).append(delta)
            if delta.text or delta.finished:
                self._ready.pop(delta.index, None)
                self._ready[delta.index] = None

    def pieces(self) -> list[Piece]:
        """A piece of each output that has new text or has ended; the piece that ends the request is the last."""
        ready, self._ready = self._ready, {}
        return [self._take(index) for index in ready]

    def _take(self, index: int) -> Piece:
        entries, self._prompt_logprobs = self._prompt_logprobs, ()
        return Piece.joined(self._held.pop(index), entries, self._replica)


def whole_outputs(pieces: Sequence[Piece]) -> list[Piece]:
    """A whole answer: each output in one piece, in order; the first one has the prompt's log probabilities."""
    outputs: dict[int, list[Piece]] = {}
    for piece in pieces:
        outputs.setdefault(piece.index, []).append(piece)
    entries = next((piece.prompt_logprobs for piece in pieces if piece.prompt_logprobs), ())
    return [
        Piece.joined(of_output, () if number else entries, of_output[0].replica)
        for number, (_, of_output) in enumerate(sorted(outputs.items()))
    ]


def grouped_to_pool(calls: Sequence[GenerateRequest], most: int) -> list[GenerateRequest]:
    """Merge up to `most` adjacent calls into one, while their prompts together are short."""
    most, groups = min(most, _MOST_POOLED), list[GenerateRequest]()
    for call in calls:
        last = groups[-1] if groups else None
        if (
            last is None
            or 1 + len(last.more_prompts) >= most
            or last.num_prompt_tokens + len(call.prompt_token_ids) > _MOST_POOLED_TOKENS
        ):
            groups.append(call)
        else:
            groups[-1] = replace(last, more_prompts=(*last.more_prompts, call.prompt_token_ids))
    return groups


def public_id(request_id: str, replica: str) -> str:
    """The request id for clients. It names the replica, for forks that reach any ingress."""
    return f"{request_id}{_SEPARATOR}{replica}"


def split_public_id(public: str) -> tuple[str, str]:
    """(request id, replica); the replica is empty when the id has none."""
    request_id, _, replica = public.partition(_SEPARATOR)
    return request_id, replica
