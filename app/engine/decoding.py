"""Decoder: a step's logits to tokens and deltas, by sampling, draft verification, forks and beam search."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

import numpy as np
import torch

from app.engine.delta import Delta, TokenLogprobs
from app.engine.execution.batch import Array
from app.engine.faults import failure_of
from app.engine.generation import BestOf, EndedOutputs, Generation
from app.engine.load_report import LoadMeter
from app.engine.request import Request, SequenceGroup
from app.engine.sampling.beam import BeamSearch, likeliest
from app.engine.sampling.choice import compiled_kernels
from app.engine.sampling.logprobs import prompt_logprobs
from app.engine.sampling.params import SamplingParams
from app.engine.sampling.sampler import PendingSample, Sampled, launch_sampling, sample_apart
from app.engine.sampling.state import SamplingState
from app.engine.scheduler import Scheduled, Scheduler
from app.engine.speculation import Speculation
from app.engine.turn import MOST_TOKENS_READ
from app.engine.vocabulary import Vocabulary
from app.errors import EngineError, FolioError, RequestError
from vmem import IntegrityError, KVMemory, ViewPolicy, VmemError

NOT_FINITE = "the model's logits are not finite numbers"
CONTRADICTION = (
    "no token may follow: structure, allowed_token_ids, bad_words, min_tokens and stop_token_ids contradict each other "
    "here; leave one of them out"
)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows to sample of one sequence: one for each draft and one more, or one for each fork."""

    request: Request
    start: int
    states: tuple[SamplingState, ...]
    drafts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Beams:
    """Candidates of one beam search: the likeliest next tokens of each beam."""

    generation: Generation
    requests: tuple[Request, ...]
    logprobs: Array  # [beams, candidates]
    token_ids: Array
    is_sound: bool


@dataclass(slots=True)
class TokenSelection:
    """The rows of a step's logits to choose tokens from, then the chosen tokens, before they are applied.

    Attributes:
        plain: sequences with one row to sample and no structure, and their row among those to sample.
        rows: the other sequences that sample.
        where, states, positions: of each row to sample: its row of the logits, its state, the drafts before it.
        beam_rows: of each beam search, its beams and their rows of the logits.
        prompt_rows: rows of the logits for prompt log probabilities.
        pending, sampled: the sampled tokens, on the device or, if they had to be sampled request by request, here.
        failed: sequences for which choosing has failed.
    """

    plain: list[tuple[Request, int]] = field(default_factory=list)
    rows: list[_Rows] = field(default_factory=list)
    where: list[int] = field(default_factory=list)
    states: list[SamplingState] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    beam_rows: list[tuple[Generation, dict[Request, int]]] = field(default_factory=list)
    prompt_rows: list[tuple[Scheduled, slice]] = field(default_factory=list)
    pending: PendingSample | None = None
    sampled: Sampled | None = None
    beams: list[_Beams] = field(default_factory=list)
    prompts: list[tuple[Request, tuple[TokenLogprobs, ...]]] = field(default_factory=list)
    failed: dict[Request, FolioError] = field(default_factory=dict)

    def fail(self, request: Request, error: BaseException) -> None:
        """Note a failure for a sequence; the first one of a request counts. Raises it if it is no request's."""
        if all(other.request_id != request.request_id for other in self.failed):
            self.failed[request] = failure_of(request.request_id, error)


class Decoder:
    """Choose tokens from logits, and apply them to sequences.

    Args:
        scheduler: its groups get forks, and lose sequences that end.
        generations: of the engine's requests; requests that end are removed.
        speculation: gets the results of verification.

    Attributes:
        ended: outputs that have ended, for forks.
    """

    def __init__(
        self,
        memory: KVMemory,
        scheduler: Scheduler,
        vocabulary: Vocabulary,
        generations: dict[str, Generation],
        meter: LoadMeter,
        speculation: Speculation | None = None,
    ) -> None:
        self._memory = memory
        self._scheduler = scheduler
        self._vocabulary = vocabulary
        self._generations = generations
        self._meter = meter
        self._speculation = speculation
        self.ended = EndedOutputs()
        compiled_kernels()  # before there are requests

    def select(self, scheduled: Sequence[Scheduled]) -> TokenSelection:
        """Select the rows of a step's logits to choose tokens from. A call that fails for one request fails that
        request, in `apply`. Sequences that have ended since the step was scheduled are left out."""
        selection = TokenSelection()
        plain, where, states, positions = selection.plain, selection.where, selection.states, selection.positions
        beams: dict[SequenceGroup, dict[Request, int]] = {}
        end = 0
        for s in scheduled:
            start, end = end, end + s.num_logits
            request = s.request
            if start == end or request.is_ended:
                continue
            try:
                if request.params.prompt_logprobs is not None and s.start < len(request.prompt_token_ids):
                    selection.prompt_rows.append((s, slice(start, end)))
                if not s.samples:
                    continue
                if request.params.use_beam_search:
                    beams.setdefault(request.group, {})[request] = end - 1
                elif not request.num_forks and not s.drafts and request.sampling.matcher is None:  # most sequences
                    plain.append((request, len(states)))
                    states.append(request.sampling)
                    where.append(end - 1)
                    positions.append(0)
                else:
                    own, ahead = _rows_to_sample(s)
                    selection.rows.append(_Rows(request, len(states), own, s.drafts))
                    states += own
                    positions += ahead
                    where += [end - 1 - ahead[-1] + position for position in ahead]
            except BaseException as error:  # noqa: BLE001 - raised again unless it is the request's
                selection.fail(request, error)
        for group, rows in beams.items():
            generation = self._generations[group.members[0].request_id]
            selection.beam_rows.append((generation, {request: rows[request] for request in group.members}))
        return selection

    def choose(self, selection: TokenSelection, logits: torch.Tensor) -> None:
        """Choose tokens from `logits [sum(num_logits), vocab_size]`.

        A call that fails for one request fails that request, in `apply`. A call for all rows that fails for each row
        alone too is raised.
        """
        for s, part in selection.prompt_rows:
            try:
                selection.prompts.append((s.request, _prompt_logprobs(s, logits[part])))
            except BaseException as error:  # noqa: BLE001 - as in `select`
                selection.fail(s.request, error)
        if states := selection.states:
            where = selection.where
            rows = logits if where == list(range(len(logits))) else logits[where]
            offsets = selection.positions if any(selection.positions) else None
            try:
                selection.pending = launch_sampling(rows, states, offsets)
            except BaseException as error:  # noqa: BLE001 - as in `select`
                selection.sampled = self._sample_apart(selection, rows, states, offsets, error)
        for generation, beam_rows in selection.beam_rows:
            try:
                selection.beams.append(_beams(generation, beam_rows, logits))
            except BaseException as error:  # noqa: BLE001 - as in `select`
                selection.fail(next(iter(beam_rows)), error)

    def _sample_apart(
        self,
        selection: TokenSelection,
        logits: torch.Tensor,
        states: Sequence[SamplingState],
        positions: Sequence[int] | None,
        cause: BaseException,
    ) -> Sampled:
        """Sample each request by itself, after `sample` has failed for all together."""
        parts = [(request, slice(row, row + 1)) for request, row in selection.plain]
        parts += [(rows.request, slice(rows.start, rows.start + len(rows.states))) for rows in selection.rows]
        sampled, errors = sample_apart(logits, states, positions, [part for _, part in parts])
        if len(errors) == len(parts) > 1 and not any(isinstance(error, RequestError) for error in errors.values()):
            raise cause  # no request's failure
        for i, error in errors.items():
            selection.fail(parts[i][0], error)
        return sampled

    def apply(self, selection: TokenSelection) -> list[Delta]:
        """Append the chosen tokens to the sequences of a committed step."""
        deltas: list[Delta] = []
        for request, error in selection.failed.items():
            if not request.is_ended:
                deltas.append(self.fail(self._generations[request.request_id], error))
        for request, logprobs in selection.prompts:
            request.prompt_logprobs += logprobs
        sampled = selection.sampled if selection.pending is None else selection.pending.read()
        if sampled is not None:
            self._append_plain(selection.plain, sampled, deltas)
            for rows in selection.rows:
                self._add(rows.request, self._append(rows, sampled), deltas)
        for beams in selection.beams:
            self._add(beams.requests[0], self._advance(beams), deltas)
        return deltas

    def _add(self, request: Request, made: Iterator[Delta], deltas: list[Delta]) -> None:
        """Add the deltas made for a request; if that fails, also its error. None for one that has ended."""
        if request.is_ended:
            return
        generation = self._generations[request.request_id]
        try:
            for delta in made:
                deltas.append(delta)  # deltas from before a failure remain
        except BaseException as error:  # noqa: BLE001 - as in `select`
            deltas.append(self.fail(generation, failure_of(generation.request_id, error)))

    def end_sequence(self, request: Request) -> None:
        """End a sequence and free its memory; with the last one the request ends."""
        generation = self._generations[request.request_id]
        self._scheduler.remove_sequence(request)
        generation.sequences.remove(request)
        if not generation.sequences:
            del self._generations[request.request_id]
        if self._speculation is not None:
            self._speculation.forget_request(request)
        self._meter.note_ended(request, time.monotonic())

    # ---- samples ----

    def _append_plain(self, plain: list[tuple[Request, int]], sampled: Sampled, deltas: list[Delta]) -> None:
        """Do as `_append`, for one token each, in less time."""
        eos = self._vocabulary.eos_token_ids
        token_ids, sound, logprobs = sampled.token_ids, sampled.sound, sampled.logprobs
        for request, row in plain:
            if request.is_ended:  # cancelled, or another of its outputs has failed
                continue
            generation = self._generations[request.request_id]
            if not sound[row] or generation.selection is not None or request.prompt_logprobs:
                self._add(request, self._append(_Rows(request, row, (request.sampling,), ()), sampled), deltas)
                continue
            logprob = logprobs[row]
            try:
                delta = request.append((token_ids[row],), eos, () if logprob is None else (logprob,))
                if delta.finish_reason is None:
                    deltas.append(delta)
                else:
                    deltas += self._ended(request, generation, delta)
            except BaseException as error:  # noqa: BLE001 - as in `select`
                deltas.append(self.fail(generation, failure_of(request.request_id, error)))

    def _append(self, rows: _Rows, sampled: Sampled) -> Iterator[Delta]:
        request, start = rows.request, rows.start
        generation = self._generations[request.request_id]
        at = slice(start, start + len(rows.states))
        if not all(sampled.sound[at]):
            blocked = not sampled.blocked.isdisjoint(range(at.start, at.stop))
            yield self.fail(generation, RequestError(CONTRADICTION) if blocked else EngineError(NOT_FINITE))
            return
        tokens, logprobs = sampled.token_ids[at], sampled.logprobs[at]
        sequences, chosen = [request], [tokens]
        if request.num_forks:
            sequences += self._fork_all(request, rows.states[1:])
            chosen = [[token] for token in tokens]
        elif rows.drafts:
            accepted = takewhile(lambda pair: pair[0] == pair[1], zip(rows.drafts, tokens, strict=False))
            num_accepted = sum(1 for _ in accepted)
            chosen = [tokens[: 1 + num_accepted]]
            self._scheduler.waiting.charge(request.group, num_accepted)
            if self._speculation is not None:
                self._speculation.verified(request, len(rows.drafts), num_accepted)
        eos = self._vocabulary.eos_token_ids
        offset = 0
        for sequence, token_ids in zip(sequences, chosen, strict=True):
            known = [logprob for logprob in logprobs[offset:] if logprob is not None][: len(token_ids)]
            offset += len(token_ids)
            delta = sequence.append(token_ids, eos, known)
            if (matcher := sequence.sampling.matcher) is not None and matcher.error is not None:
                yield self.fail(generation, matcher.error)
                return
            if sequence is request and request.num_output_tokens == len(token_ids) and request.prompt_logprobs:
                delta = replace(delta, prompt_logprobs=tuple(request.prompt_logprobs))
            if delta.finished:
                yield from self._ended(sequence, generation, delta)
                continue
            if rows.drafts:
                self._roll_back(sequence)
            yield from generation.emit(delta)

    def _ended(self, sequence: Request, generation: Generation, delta: Delta) -> list[Delta]:
        """End a sequence with its last delta; returns the deltas to send."""
        start = len(sequence.prompt_token_ids)
        if sequence.turn.depends_on_output:
            text = self._vocabulary.read(sequence.token_ids[max(start, len(sequence.token_ids) - MOST_TOKENS_READ) :])
            sequence.use = replace(sequence.use, kind=sequence.turn.kind_of(text))
        self.end_sequence(sequence)
        sent = generation.emit(delta)
        for output in sent:
            whole = isinstance(generation.selection, BestOf)
            self.ended.add(sequence, output.index, output.token_ids if whole else sequence.token_ids[start:])
        return sent

    def _roll_back(self, request: Request) -> None:
        """Drop the computed draft tokens that were not accepted."""
        computed = len(request.token_ids) - 1
        if computed < request.num_computed:
            assert request.memory is not None
            request.num_computed = request.max_computed = computed
            self._memory.truncate(request.memory, computed)

    def _fork_all(self, request: Request, states: Sequence[SamplingState]) -> list[Request]:
        """Fork the sequences that share the request's prompt, which is computed."""
        generation = self._generations[request.request_id]
        forks = []
        for i, state in enumerate(states):
            forks.append(self.fork_sequence(request, state, index=1 + i))
            generation.sequences.append(forks[-1])  # at once, so that `fail` ends it if the next one fails
        request.num_forks = 0
        return forks

    def fork_running(
        self, parent: Request, fork_id: str, params: SamplingParams, states: Sequence[SamplingState], most_tokens: int
    ) -> Generation:
        """Create a request whose sequences continue `parent`, up to `most_tokens` tokens with the prompt."""
        generation = Generation(fork_id, params)
        try:
            for index, state in enumerate(states):
                child = self.fork_sequence(parent, state, index=index, request_id=fork_id)
                child.max_tokens = most_tokens - len(parent.prompt_token_ids)
                generation.sequences.append(child)
        except BaseException:
            for child in generation.sequences:
                self._scheduler.remove_sequence(child)
            raise
        return generation

    def fork_sequence(
        self, parent: Request, state: SamplingState, *, index: int, request_id: str | None = None
    ) -> Request:
        """Create a sequence that continues `parent` in its group, and shares its blocks (PagedAttention §4.4)."""
        num_tokens = parent.num_computed
        chain = parent.chain.fork(num_tokens)
        text = None  # before the memory, which a failure here would leak
        if not parent.group.lockstep:
            text = self._vocabulary.detokenizer(
                parent.prompt_token_ids, state.params, parent.token_ids[len(parent.prompt_token_ids) :]
            )
        memory = None
        if parent.memory is not None and num_tokens:
            policy: ViewPolicy | None = (
                "block_table" if parent.params.use_beam_search and parent.memory.policy == "auto" else None
            )
            try:
                memory = self._memory.fork(parent.memory, num_tokens, policy, chain)
            except IntegrityError:
                raise
            except VmemError:
                num_tokens = 0  # no region is free, or its blocks have been evicted: recompute
        else:
            num_tokens = 0
        return Request(
            request_id or parent.request_id,
            parent.prompt_token_ids,
            state.params,
            parent.max_tokens,
            text,
            chain,
            parent.group,
            parent.token_ids.copy(),
            num_computed=num_tokens,
            max_computed=num_tokens,
            memory=memory,
            index=index,
            num_cached_tokens=parent.num_cached_tokens,
            turn=parent.turn,
            use=parent.use,
            snapshot_positions=parent.snapshot_positions if memory is not None else (),
            sampling=state,
            prompt_logprobs=parent.prompt_logprobs if parent.group.lockstep else [],
            queue_s=parent.queue_s,
            submitted_at=time.perf_counter(),  # a fork that shares nothing waits until it is recomputed
        )

    def fail(self, generation: Generation, error: FolioError) -> Delta:
        """End all sequences of a request with an error."""
        for request in list(generation.sequences):
            self.end_sequence(request)
        return Delta(generation.request_id, (), "", error=error)

    # ---- beams ----

    def _advance(self, beams: _Beams) -> Iterator[Delta]:
        generation, search = beams.generation, beams.generation.selection
        assert isinstance(search, BeamSearch)
        if not beams.is_sound:
            yield self.fail(generation, EngineError(NOT_FINITE))
            return
        start = len(beams.requests[0].prompt_token_ids)
        outputs = [request.token_ids[start:] for request in beams.requests]
        continuations = search.advance(outputs, beams.logprobs, beams.token_ids)
        if search.done:
            first = beams.requests[0]
            for request in beams.requests:
                self.end_sequence(request)
            yield from self._best(generation, search, first)
            return
        going: list[Request] = []
        for beam, _ in continuations:  # forks first, so that no block is freed that a fork shares
            parent = beams.requests[beam]
            if parent in going:
                going.append(self.fork_sequence(parent, parent.sampling.fork(), index=0))
                generation.sequences.append(going[-1])  # at once, so that `fail` ends it if the next one fails
            else:
                going.append(parent)
        for request in beams.requests:
            if request not in going:
                self._scheduler.remove_sequence(request)
        for request, (_, token_id) in zip(going, continuations, strict=True):
            request.token_ids.append(token_id)
        first = going[0]
        first.num_forks = 0
        first.group.members[:] = generation.sequences[:] = going

    def _best(self, generation: Generation, search: BeamSearch, first: Request) -> Iterator[Delta]:
        n = generation.params.n
        for index, hypothesis in enumerate(search.hypotheses[:n]):
            ended = hypothesis.token_ids[-1] in self._vocabulary.stop_token_ids(generation.params)
            text = self._vocabulary.detokenizer(first.prompt_token_ids, generation.params)
            pieces = [text.push(token_id)[0] for token_id in hypothesis.token_ids] if text is not None else []
            self.ended.add(first, index, hypothesis.token_ids)
            yield Delta(
                generation.request_id,
                hypothesis.token_ids,
                "".join(pieces),
                "stop" if ended else "length",
                num_cached_tokens=first.num_cached_tokens or 0,
                index=index,
                num_unfinished=n - 1 - index,
                prompt_logprobs=tuple(first.prompt_logprobs) if not index else (),
                score=hypothesis.score,
                queue_s=first.queue_s,
            )


def _beams(generation: Generation, rows: dict[Request, int], logits: torch.Tensor) -> _Beams:
    assert isinstance(generation.selection, BeamSearch)
    logprobs, token_ids = likeliest(logits[list(rows.values())], generation.selection.num_candidates)
    return _Beams(generation, tuple(rows), logprobs, token_ids, bool(np.isfinite(logprobs).all()))


def _rows_to_sample(s: Scheduled) -> tuple[tuple[SamplingState, ...], Sequence[int]]:
    """The states of a sequence's rows, and the drafts before each: one row per fork, or per draft and one more."""
    state = s.request.sampling
    if num_forks := s.request.num_forks:
        return (state, *(state.fork(index=1 + i) for i in range(num_forks))), [0] * (1 + num_forks)
    return (state,) * (1 + len(s.drafts)), range(1 + len(s.drafts))


def _prompt_logprobs(s: Scheduled, logits: torch.Tensor) -> tuple[TokenLogprobs, ...]:
    """Log probabilities of the prompt tokens after the scheduled ones, without those known from before a preemption."""
    request, top = s.request, s.request.params.prompt_logprobs
    assert top is not None
    known = 1 + len(request.prompt_logprobs)
    following = range(
        max(s.start + 1, known),
        min(s.start + s.num_tokens + 1, len(request.prompt_token_ids)),
    )
    if not following:
        return ()
    skipped = following.start - s.start - 1
    return prompt_logprobs(
        logits[skipped : skipped + len(following)], request.prompt_token_ids[following.start : following.stop], top
    )
