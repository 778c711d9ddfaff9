"""One request on its way through the engine.

A request's deltas on their way from the engine's thread to whoever asked, a list at a time.

When requests have to be finished.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypedDict

from app.engine.sampling.params import SamplingParams
from app.engine.sampling.state import SamplingState
from app.engine.sampling.token_text import IncrementalDetokenizer
from app.errors import FolioError, RequestError
from vmem import SequenceMemory, SwappedGroup, TokenChain

FinishReason = Literal["stop", "length"]


class RequestOptions(TypedDict, total=False):
    """What goes with a request beside its prompt and its sampling.

    priority: the lower goes first, and is preempted last; 0 by default.
    cache_salt: only requests with the same one share cached prefixes.
    adapter: name of the LoRA adapter to run with.
    tenant: whose request it is: with `fair_tenants` all tenants get the same share, and with `isolate_tenants` cached
        prefixes are shared within one only.
    user: whose it is without a tenant; for fair shares alone.
    timeout_s: it ends with `DeadlineError` when it has not finished after so long.
    expected_cached_tokens: how much of the prompt the sender thinks is cached here; it changes nothing but the load
        report.
    """

    priority: int
    cache_salt: str | None
    adapter: str | None
    tenant: str | None
    user: str | None
    timeout_s: float | None
    expected_cached_tokens: int | None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A token's log probability by the model alone, before temperature, penalties and anything else.

    Attributes:
        rank: 1 for the likeliest.
        top: (token id, log probability) of the likeliest tokens, in order.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """What a step added to one output of a request. With an `error` the whole request has ended.

    Attributes:
        index: which of its `n` outputs.
        num_unfinished: other outputs of the request that are still to come.
        stop_reason: the stop string or token id that ended it, if it was not the end-of-sequence token.
        num_cached_tokens: of the prompt, found in the prefix cache.
        logprobs: for each of the tokens, if asked for.
        prompt_logprobs: of the prompt but its first token, if asked for, with the first delta.
        score: of a beam.
    """

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None = None
    error: FolioError | None = None
    num_cached_tokens: int = 0
    index: int = 0
    num_unfinished: int = 0
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    score: float | None = None

    @property
    def finished(self) -> bool:
        """Whether this output is complete."""
        return self.finish_reason is not None or self.error is not None

    @property
    def ends_request(self) -> bool:
        """Whether nothing of the request follows."""
        return self.error is not None or (self.finish_reason is not None and not self.num_unfinished)


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """A request's sequences and their forks: they are preempted, swapped and brought back together (PagedAttention
    §4.5).

    Attributes:
        priority: the lower goes first.
        arrival: the earlier goes first, among equals.
        members: those that have not finished.
        adapter: name of the LoRA adapter that all of them run with.
        lockstep: all of them compute their next token in the same step, or none: beams.
        swapped: blocks in host memory while it is swapped out, of the members in `swapped_members`.
        tenant: whose request it is.
    """

    priority: int
    arrival: int
    members: list[Request] = field(default_factory=list)
    adapter: str | None = None
    lockstep: bool = False
    swapped: SwappedGroup | None = None
    swapped_members: list[Request] = field(default_factory=list)
    tenant: str | None = None

    @property
    def sort_key(self) -> tuple[int, int]:
        return self.priority, self.arrival

    @property
    def num_sequences(self) -> int:
        """Its members, and the forks that they will have once their prompt is computed."""
        return len(self.members) + sum(request.num_forks for request in self.members)


@dataclass(slots=True, eq=False)
class Request:
    """One sequence of a request: its prompt, its output so far, and how far its keys and values are cached.

    Attributes:
        group: who is preempted with it.
        token_ids: prompt and output.
        num_computed: tokens whose keys and values are in the cache; the rest is still to be computed.
        furthest: the most of them there ever were.
        max_tokens: output tokens at most, resolved against the context.
        chain: hashes of its tokens, for the prefix cache.
        memory: its blocks while it runs, else `None`.
        index: which output of the request it is.
        num_forks: sequences that begin like it and are made when its prompt is computed.
        num_cached_tokens: of its prompt, found in the prefix cache when it began; `None` before.
        expected_cached_tokens: what whoever sent it here expected that to be; `None`: nothing.
        stops_at: token counts at which a step must end, so that a recurrent state is kept there.
        pin_name: it computes a prefix to pin, and samples nothing.
        text: the incremental detokeniser, `None` without a tokenizer.
        sampling: what choosing its next token depends on.
        prompt_logprobs: of the prompt's tokens from the second on, as far as they are computed, if asked for.
        submitted_at: when the engine got it, by `time.perf_counter`.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    text: IncrementalDetokenizer | None
    chain: TokenChain
    group: SequenceGroup
    token_ids: list[int]
    num_computed: int = 0
    max_computed: int = 0
    memory: SequenceMemory | None = None
    index: int = 0
    num_forks: int = 0
    num_cached_tokens: int | None = None
    expected_cached_tokens: int | None = None
    snapshot_positions: tuple[int, ...] = ()
    pin_name: str | None = None
    sampling: SamplingState = None  # type: ignore[assignment]  # made from `params` unless it is given
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    submitted_at: float = 0.0

    def __post_init__(self) -> None:
        self.group.members.append(self)
        if self.sampling is None:
            self.sampling = SamplingState(self.params, self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def num_uncomputed(self) -> int:
        return len(self.token_ids) - self.num_computed

    @property
    def most_tokens(self) -> int:
        """Tokens it may come to have."""
        return len(self.prompt_token_ids) + self.max_tokens

    def append(
        self, token_ids: Sequence[int], eos_token_ids: frozenset[int], logprobs: Sequence[TokenLogprobs] = ()
    ) -> Delta:
        """Add sampled tokens up to the one that ends the output, if there is one; the returned delta says so."""
        texts: list[str] = []
        reason: FinishReason | None = None
        stop_reason: str | int | None = None
        num_taken = 0
        for token_id in token_ids:
            num_taken += 1
            text, reason, stop_reason = self._take(token_id, eos_token_ids)
            texts.append(text)
            if reason is not None:
                break
        return Delta(
            self.request_id,
            tuple(token_ids[:num_taken]),
            "".join(texts),
            reason,
            None,
            self.num_cached_tokens or 0,
            self.index,
            0,
            stop_reason,
            tuple(logprobs[:num_taken]),
        )

    def _take(self, token_id: int, eos_token_ids: frozenset[int]) -> tuple[str, FinishReason | None, str | int | None]:
        """Add a token; returns the text that is certain now, and why the output ends with it, if it does."""
        params, matcher = self.params, self.sampling.matcher
        self.token_ids.append(token_id)
        self.sampling.append(token_id)
        num_output = len(self.token_ids) - len(self.prompt_token_ids)
        reason: FinishReason | None = None
        stop_reason: str | int | None = None
        ended = False
        if num_output > params.min_tokens:
            if token_id in eos_token_ids and not params.ignore_eos:
                ended = True
            elif token_id in params.stop_token_ids:
                ended, stop_reason = True, token_id
        if ended or (matcher is not None and matcher.finished):
            reason = "stop"
        elif num_output >= self.max_tokens:
            reason = "length"
        if self.text is None:
            return "", reason, stop_reason
        text = ""
        if not ended or params.include_stop_str:  # the token that ends an output is no text of it
            text, stopped = self.text.push(token_id)
            if stopped:
                reason, stop_reason = "stop", self.text.met
        if reason is not None:
            text += self.text.flush()
        return text, reason, stop_reason


class DeltaQueue:
    """Deltas between one loop's callbacks, which put them, and one task of that loop, which takes them.

    A reader that is busy elsewhere, or does not want to be woken before a certain time, finds all that has come
    meanwhile: so what handing over costs does not depend on the number of steps. The end of a request wakes it at once.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._deltas: list[Delta] = []
        self._ended = False
        self._waiter: asyncio.Future[None] | None = None
        self._not_before = 0.0

    def put(self, delta: Delta) -> None:
        """In the loop's thread."""
        self._deltas.append(delta)
        self._ended = self._ended or delta.ends_request
        if self._ended or self._loop.time() >= self._not_before:
            self._wake()

    async def get_all(self, not_before: float = 0.0) -> list[Delta]:
        """All deltas that are there, at least one, in order; waits for it.

        Args:
            not_before: on the loop's clock; sooner only if the request has ended.
        """
        self._not_before = not_before
        while not self._deltas or (not self._ended and self._loop.time() < not_before):
            self._waiter = self._loop.create_future()
            waits = self._loop.time() < not_before < math.inf
            timer = self._loop.call_at(not_before, self._wake) if waits else None
            try:
                await self._waiter
            finally:
                self._waiter = None
                if timer is not None:
                    timer.cancel()
        taken, self._deltas = self._deltas, []
        return taken

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


# Entries of requests that have ended are dropped when there are more of them than of others, and than this.
_FEW = 64


def check_timeout(timeout_s: float) -> None:
    """Raise `RequestError` unless it is a time that can pass."""
    if not 0 < timeout_s < math.inf:
        raise RequestError(
            f"timeout_s is {timeout_s}; it must be above 0 and finite, or left out for no limit", "timeout_s"
        )


class Deadlines:
    """Deadlines of requests, on any clock that never goes back. O(log n) each, and O(1) when none has passed."""

    def __init__(self) -> None:
        self._at: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []  # has entries that `_at` has no more, too

    def add(self, request_id: str, at_s: float) -> None:
        """Set the deadline of a request, in place of one it may have."""
        self._at[request_id] = at_s
        heapq.heappush(self._heap, (at_s, request_id))
        if len(self._heap) > 2 * len(self._at) + _FEW:
            self._heap = [(at, name) for name, at in self._at.items()]
            heapq.heapify(self._heap)

    def discard(self, request_id: str) -> None:
        """Forget the deadline of a request, if it has one."""
        self._at.pop(request_id, None)

    def expired(self, now: float) -> list[str]:
        """Requests whose deadline has come, the earliest first. They are forgotten."""
        passed = []
        while self._heap and self._heap[0][0] <= now:
            at, request_id = heapq.heappop(self._heap)
            if self._at.get(request_id) == at:
                del self._at[request_id]
                passed.append(request_id)
        return passed
