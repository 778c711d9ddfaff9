"""Decoder: a step's chosen tokens to sequences and deltas; verification of drafts, forks and beams."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import takewhile

from folio.app.engine.delta import Delta
from folio.app.engine.faults import failure_of
from folio.app.engine.generation import BestOf, EndedOutputs, Generation
from folio.app.engine.load_report import LoadMeter
from folio.app.engine.request import Request
from folio.app.engine.sampling.beam import BeamSearch
from folio.app.engine.sampling.params import SamplingParams
from folio.app.engine.sampling.sampler import Sampled
from folio.app.engine.sampling.state import SamplingState
from folio.app.engine.scheduler import Scheduler
from folio.app.engine.speculation import Speculation
from folio.app.engine.token_selection import BeamCandidates, SampledRows, TokenSelection
from folio.app.engine.turn import MOST_TOKENS_READ
from folio.app.engine.vocabulary import Vocabulary
from folio.app.errors import EngineError, FolioError, RequestError
from folio.vmem import IntegrityError, KVMemory, ViewPolicy, VmemError

NOT_FINITE = "the model's logits are not finite numbers"
CONTRADICTION = (
    "no token may follow: structure, allowed_token_ids, bad_words, min_tokens and stop_token_ids contradict each other "
    "here; leave one of them out"
)


class Decoder:
    """Apply chosen tokens to sequences.

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
        except BaseException as error:  # noqa: BLE001 - raised again unless it is the request's
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
                self._add(request, self._append(SampledRows(request, row, (request.sampling,), ()), sampled), deltas)
                continue
            logprob = logprobs[row]
            try:
                delta = request.append((token_ids[row],), eos, () if logprob is None else (logprob,))
                if delta.finish_reason is None:
                    deltas.append(delta)
                else:
                    deltas += self._ended(request, generation, delta)
            except BaseException as error:  # noqa: BLE001 - raised again unless it is the request's
                deltas.append(self.fail(generation, failure_of(request.request_id, error)))

    def _append(self, rows: SampledRows, sampled: Sampled) -> Iterator[Delta]:
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

    def _advance(self, beams: BeamCandidates) -> Iterator[Delta]:
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
