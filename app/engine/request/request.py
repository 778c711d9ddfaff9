"""Request and Sequence: the engine's records of a request and of its sequences."""

from __future__ import annotations

import math
from collections import abc
from dataclasses import dataclass, field, replace

from folio.app.engine.request.best_of import BestOf
from folio.app.engine.request.delta import Delta, FinishReason
from folio.app.engine.request.pooled import PooledPrompt
from folio.app.engine.request.turn import COMPLETION, Turn
from folio.app.engine.sampling.beam import BeamSearch
from folio.app.engine.sampling.params import SamplingParams
from folio.app.engine.sampling.state import SamplingState
from folio.app.engine.sampling.token_logprobs import TokenLogprobs
from folio.app.engine.sampling.token_text import IncrementalDetokenizer
from folio.vmem import PrefixUse, SequenceMemory, SwappedGroup, TokenChain


@dataclass(slots=True, eq=False)
class Request:
    """A request with its sequences, which are admitted, preempted and resumed together (PagedAttention §4.5).

    Attributes:
        request_id: the engine's id.
        priority, arrival: running requests are preempted from the last in this order.
        selection: selects the outputs to send, with `best_of` or beam search.
        deadline: when the request ends with an error, by `time.monotonic`.
        due: prompts of a priority are computed in this order, see `Scheduler`.
        sequences: those that have not ended.
        held_at: where another process that has begun it offers its blocks (`PrefixGiver.address`); empty: nowhere.
        one_by_one: memory has been too small for all sequences: each begins when it fits beside those that run.
        swapped: blocks in host memory, of the sequences in `swapped_sequences`.
    """

    request_id: str
    params: SamplingParams
    priority: int = 0
    arrival: int = 0
    adapter: str | None = None
    tenant: str | None = None
    selection: BestOf | BeamSearch | None = None
    deadline: float = math.inf
    due: float = 0.0
    sequences: list[Sequence] = field(default_factory=list)
    held_at: str = ""
    one_by_one: bool = False
    swapped: SwappedGroup | None = None
    swapped_sequences: list[Sequence] = field(default_factory=list)

    @property
    def sort_key(self) -> tuple[int, int]:
        return self.priority, self.arrival

    @property
    def prefill_key(self) -> tuple[int, float, int]:
        return self.priority, self.due, self.arrival

    @property
    def lockstep(self) -> bool:
        """Whether all sequences compute their next token in a step, or none does."""
        return self.params.use_beam_search

    @property
    def num_sequences(self) -> int:
        """Sequences that have not ended, and the forks that they will have once their prompt is computed."""
        return sum(1 + sequence.num_forks for sequence in self.sequences)

    @property
    def max_sequences(self) -> int:
        """Most sequences: a beam search may run with fewer beams for a while. From any thread."""
        return max(self.num_sequences, self.params.num_sequences) if self.lockstep else self.num_sequences

    @property
    def can_decode(self) -> bool:
        """Whether sequences may compute their last tokens: in lockstep, only when all of them can."""
        return not self.lockstep or all(s.memory is not None and s.num_uncomputed == 1 for s in self.sequences)

    def emit(self, delta: Delta) -> list[Delta]:
        """The deltas to send for a sequence's delta. A sequence that has ended must have left `sequences`."""
        if delta.error is not None:
            return [delta]
        if isinstance(self.selection, BestOf):
            self.selection.hold(delta)
            return [] if self.sequences else self.selection.best()
        return [replace(delta, num_unfinished=self.num_sequences) if delta.finished else delta]


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt and one of its request's outputs.

    Attributes:
        token_ids: prompt and output.
        num_computed: tokens whose keys and values are in the cache.
        max_computed: the largest `num_computed` so far.
        num_awaited: launched steps whose token for this sequence is not known yet.
        pending_row: the last such token's row in its step's sampled tokens, if the next step can read it there.
        is_ended: the sequence is finished or cancelled.
        max_tokens: most output tokens, limited by the context.
        text: incremental detokenizer; `None` without a tokenizer.
        chain: hashes of the tokens, for the prefix cache.
        memory: its blocks while it runs, else `None`.
        index: number of the output.
        num_forks: sequences to fork when the prompt is computed.
        num_cached_tokens: prompt tokens found in the prefix cache when the request began; `None` before.
        expected_cached_tokens: see `EngineRequest`.
        snapshot_positions: token counts at which a step must end, to keep a recurrent state.
        turn, use: the kind of request, and what the prefix cache is told of it.
        pin_name: the sequence computes a prefix to pin under this name, and samples nothing.
        pooled: the sequence returns a vector of the prompt, and samples nothing.
        sampling: state that the choice of the next token depends on.
        prompt_logprobs: log probabilities of the prompt tokens from the second on, as far as computed, if requested.
        submitted_at: arrival in the engine, by `time.perf_counter`.
        queue_s: see `Delta`.
    """

    request: Request
    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    text: IncrementalDetokenizer | None
    chain: TokenChain
    token_ids: list[int]
    num_computed: int = 0
    max_computed: int = 0
    num_awaited: int = 0
    pending_row: int | None = None
    is_ended: bool = False
    memory: SequenceMemory | None = None
    index: int = 0
    num_forks: int = 0
    num_cached_tokens: int | None = None
    expected_cached_tokens: int | None = None
    snapshot_positions: tuple[int, ...] = ()
    turn: Turn = COMPLETION
    use: PrefixUse = field(default_factory=PrefixUse)
    pin_name: str | None = None
    pooled: PooledPrompt | None = None
    sampling: SamplingState = None  # type: ignore[assignment]  # made from `params` unless it is given
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    submitted_at: float = 0.0
    queue_s: float = 0.0

    def __post_init__(self) -> None:
        self.request.sequences.append(self)
        if self.sampling is None:
            self.sampling = SamplingState(self.params, self.prompt_token_ids)

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def num_uncomputed(self) -> int:
        """Tokens, awaited ones included, whose keys and values are not in the cache."""
        return len(self.token_ids) + self.num_awaited - self.num_computed

    @property
    def reads_whole_prompt(self) -> bool:
        """Whether all prompt tokens but one are computed anew, for their logits or hidden states."""
        return self.params.prompt_logprobs is not None or (self.pooled is not None and self.pooled.method == "mean")

    @property
    def most_tokens(self) -> int:
        """Most tokens of prompt and output."""
        return len(self.prompt_token_ids) + self.max_tokens

    def append(
        self, token_ids: abc.Sequence[int], eos_token_ids: frozenset[int], logprobs: abc.Sequence[TokenLogprobs] = ()
    ) -> Delta:
        """Append sampled tokens, up to one that ends the output."""
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
            self.request.request_id,
            tuple(token_ids[:num_taken]),
            "".join(texts),
            reason,
            None,
            self.num_cached_tokens or 0,
            self.index,
            0,
            stop_reason,
            tuple(logprobs[:num_taken]),
            queue_s=self.queue_s,
        )

    def _take(self, token_id: int, eos_token_ids: frozenset[int]) -> tuple[str, FinishReason | None, str | int | None]:
        """Append a token; returns the text that is certain now, the finish reason and the stop reason."""
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
        if not ended or params.include_stop_str:  # the ending token is not part of the text
            text, stopped = self.text.push(token_id)
            if stopped:
                reason, stop_reason = "stop", self.text.met
        if reason is not None:
            text += self.text.flush()
        return text, reason, stop_reason
