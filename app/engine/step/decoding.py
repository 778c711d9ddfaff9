"""Decoder: turns a step's chosen tokens into deltas; verifies drafts, forks sequences, advances beams."""

from __future__ import annotations

import time
from collections import abc
from collections.abc import Iterator
from dataclasses import replace

from folio.app.engine.model.vocabulary import Vocabulary
from folio.app.engine.request.best_of import BestOf
from folio.app.engine.request.delta import Delta
from folio.app.engine.request.ended_outputs import EndedOutputs
from folio.app.engine.request.faults import failure_of
from folio.app.engine.request.request import Request, Sequence
from folio.app.engine.request.turn import MOST_TOKENS_READ
from folio.app.engine.sampling.beam import BeamSearch
from folio.app.engine.sampling.sampler import Sampled
from folio.app.engine.sampling.state import SamplingState
from folio.app.engine.schedule.load_report import LoadMeter
from folio.app.engine.schedule.scheduler import Scheduler
from folio.app.engine.speculation import Speculation
from folio.app.engine.step.token_selection import BeamCandidates, SampledRows, TokenSelection
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
        scheduler: sequences that end are removed from it.
        requests: the engine's requests by id; those that end are removed.
        speculation: gets the results of verification.

    Attributes:
        ended: outputs that have ended, for forks.
    """

    def __init__(
        self,
        memory: KVMemory,
        scheduler: Scheduler,
        vocabulary: Vocabulary,
        requests: dict[str, Request],
        meter: LoadMeter,
        speculation: Speculation | None = None,
    ) -> None:
        self._memory = memory
        self._scheduler = scheduler
        self._vocabulary = vocabulary
        self._requests = requests
        self._meter = meter
        self._speculation = speculation
        self.ended = EndedOutputs()

    def apply(self, selection: TokenSelection) -> list[Delta]:
        """Append the chosen tokens to the sequences of a committed step."""
        deltas: list[Delta] = []
        for sequence, error in selection.failed.items():
            if not sequence.is_ended:
                deltas.append(self.fail(sequence.request, error))
        for sequence, logprobs in selection.prompts:
            sequence.prompt_logprobs += logprobs
        sampled = selection.sampled if selection.pending is None else selection.pending.read()
        if sampled is not None:
            self._append_plain(selection.plain, sampled, deltas)
            for rows in selection.rows:
                self._add(rows.sequence, self._append(rows, sampled), deltas)
        for beams in selection.beams:
            self._add(beams.sequences[0], self._advance(beams), deltas)
        return deltas

    def _add(self, sequence: Sequence, made: Iterator[Delta], deltas: list[Delta]) -> None:
        """Add the deltas of a request; after a failure, also its error. Add nothing if the sequence has ended."""
        if sequence.is_ended:
            return
        try:
            for delta in made:
                deltas.append(delta)  # deltas from before a failure remain
        except BaseException as error:  # noqa: BLE001 - raised again unless the request caused it
            deltas.append(self.fail(sequence.request, failure_of(sequence.request_id, error)))

    def end_sequence(self, sequence: Sequence) -> None:
        """End a sequence and free its memory; with the last one the request ends."""
        self._scheduler.remove_sequence(sequence)
        if not sequence.request.sequences:
            del self._requests[sequence.request_id]
        if self._speculation is not None:
            self._speculation.forget_sequence(sequence)
        self._meter.note_ended(sequence, time.monotonic())

    # ---- samples ----

    def _append_plain(self, plain: list[tuple[Sequence, int]], sampled: Sampled, deltas: list[Delta]) -> None:
        """Do what `_append` does, faster, for sequences that get one token each."""
        eos = self._vocabulary.eos_token_ids
        token_ids, sound, logprobs = sampled.token_ids, sampled.sound, sampled.logprobs
        for sequence, row in plain:
            if sequence.is_ended:  # cancelled, or another output of its request has failed
                continue
            request = sequence.request
            if not sound[row] or request.selection is not None or sequence.prompt_logprobs:
                self._add(sequence, self._append(SampledRows(sequence, row, (sequence.sampling,), ()), sampled), deltas)
                continue
            logprob = logprobs[row]
            try:
                delta = sequence.append((token_ids[row],), eos, () if logprob is None else (logprob,))
                if delta.finish_reason is None:
                    deltas.append(delta)
                else:
                    deltas += self._ended(sequence, delta)
            except BaseException as error:  # noqa: BLE001 - raised again unless the request caused it
                deltas.append(self.fail(request, failure_of(sequence.request_id, error)))

    def _append(self, rows: SampledRows, sampled: Sampled) -> Iterator[Delta]:
        first, start = rows.sequence, rows.start
        request = first.request
        at = slice(start, start + len(rows.states))
        if not all(sampled.sound[at]):
            yield self._fail_unsound(request, range(at.start, at.stop), sampled)
            return
        tokens, logprobs = sampled.token_ids[at], sampled.logprobs[at]
        sequences, chosen = [first], [tokens]
        if first.num_forks:
            sequences += self._fork_all(first, rows.states[1:])
            chosen = [[token] for token in tokens]
        elif rows.drafts:
            chosen = [tokens[: 1 + self._count_accepted(rows, tokens)]]
        eos = self._vocabulary.eos_token_ids
        offset = 0
        for sequence, token_ids in zip(sequences, chosen, strict=True):
            known = [logprob for logprob in logprobs[offset:] if logprob is not None][: len(token_ids)]
            offset += len(token_ids)
            delta = sequence.append(token_ids, eos, known)
            if (matcher := sequence.sampling.matcher) is not None and matcher.error is not None:
                yield self.fail(request, matcher.error)
                return
            if sequence is first and sequence.num_output_tokens == len(token_ids) and sequence.prompt_logprobs:
                delta = replace(delta, prompt_logprobs=tuple(sequence.prompt_logprobs))
            if delta.finished:
                yield from self._ended(sequence, delta)
                continue
            if rows.drafts:
                self._roll_back(sequence)
            yield from request.emit(delta)

    def _fail_unsound(self, request: Request, rows: range, sampled: Sampled) -> Delta:
        blocked = not sampled.blocked.isdisjoint(rows)
        return self.fail(request, RequestError(CONTRADICTION) if blocked else EngineError(NOT_FINITE))

    def _count_accepted(self, rows: SampledRows, tokens: list[int]) -> int:
        """Count the draft tokens before the first that differs from the sampled one."""
        num_accepted = 0
        while num_accepted < len(rows.drafts) and rows.drafts[num_accepted] == tokens[num_accepted]:
            num_accepted += 1
        self._scheduler.waiting.charge(rows.sequence.request, num_accepted)
        if self._speculation is not None:
            self._speculation.verified(rows.sequence, len(rows.drafts), num_accepted)
        return num_accepted

    def _ended(self, sequence: Sequence, delta: Delta) -> list[Delta]:
        """End a sequence with its last delta; returns the deltas to send."""
        request, start = sequence.request, len(sequence.prompt_token_ids)
        if sequence.turn.depends_on_output:
            text = self._vocabulary.read(sequence.token_ids[max(start, len(sequence.token_ids) - MOST_TOKENS_READ) :])
            sequence.use = replace(sequence.use, kind=sequence.turn.kind_of(text))
        self.end_sequence(sequence)
        sent = request.emit(delta)
        for output in sent:
            whole = isinstance(request.selection, BestOf)
            self.ended.add(sequence, output.index, output.token_ids if whole else sequence.token_ids[start:])
        return sent

    def _roll_back(self, sequence: Sequence) -> None:
        """Drop the computed draft tokens that were not accepted."""
        computed = len(sequence.token_ids) - 1
        if computed < sequence.num_computed:
            assert sequence.memory is not None
            sequence.num_computed = sequence.max_computed = computed
            self._memory.truncate(sequence.memory, computed)

    def _fork_all(self, sequence: Sequence, states: abc.Sequence[SamplingState]) -> list[Sequence]:
        """Fork the request's other sequences from the one that has computed the prompt."""
        forks = [self.fork_sequence(sequence, state, index=1 + i) for i, state in enumerate(states)]
        sequence.num_forks = 0
        return forks

    def fork_running(
        self, parent: Sequence, request: Request, states: abc.Sequence[SamplingState], most_tokens: int
    ) -> None:
        """Give a request sequences that continue `parent`, of up to `most_tokens` tokens, prompt included."""
        try:
            for index, state in enumerate(states):
                child = self.fork_sequence(parent, state, index=index, request=request)
                child.max_tokens = most_tokens - len(parent.prompt_token_ids)
        except BaseException:
            for child in list(request.sequences):
                self._scheduler.remove_sequence(child)
            raise

    def fork_sequence(
        self, parent: Sequence, state: SamplingState, *, index: int, request: Request | None = None
    ) -> Sequence:
        """Create a sequence of a request, by default the parent's, that continues `parent` and shares its blocks
        (PagedAttention §4.4)."""
        num_tokens = parent.num_computed
        chain = parent.chain.fork(num_tokens)
        text = None  # before the memory, which a failure here would leak
        if not parent.request.lockstep:
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
        return Sequence(
            request or parent.request,
            parent.prompt_token_ids,
            state.params,
            parent.max_tokens,
            text,
            chain,
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
            prompt_logprobs=parent.prompt_logprobs if parent.request.lockstep else [],
            queue_s=parent.queue_s,
            submitted_at=time.perf_counter(),  # a fork that shares nothing waits until it is recomputed
        )

    def fail(self, request: Request, error: FolioError) -> Delta:
        """End all sequences of a request with an error."""
        for sequence in list(request.sequences):
            self.end_sequence(sequence)
        return Delta(request.request_id, (), "", error=error)

    # ---- beams ----

    def _advance(self, beams: BeamCandidates) -> Iterator[Delta]:
        request, search = beams.request, beams.request.selection
        assert isinstance(search, BeamSearch)
        if not beams.is_sound:
            yield self.fail(request, EngineError(NOT_FINITE))
            return
        start = len(beams.sequences[0].prompt_token_ids)
        outputs = [sequence.token_ids[start:] for sequence in beams.sequences]
        continuations = search.advance(outputs, beams.logprobs, beams.token_ids)
        if search.done:
            first = beams.sequences[0]
            for sequence in beams.sequences:
                self.end_sequence(sequence)
            yield from self._best(request, search, first)
            return
        going: list[Sequence] = []
        for beam, _ in continuations:  # forks first, so that no block is freed that a fork shares
            parent = beams.sequences[beam]
            if parent in going:
                going.append(self.fork_sequence(parent, parent.sampling.fork(), index=0))
            else:
                going.append(parent)
        for sequence in beams.sequences:
            if sequence not in going:
                self._scheduler.remove_sequence(sequence)
        for sequence, (_, token_id) in zip(going, continuations, strict=True):
            sequence.token_ids.append(token_id)
        first = going[0]
        first.num_forks = 0
        request.sequences[:] = going

    def _best(self, request: Request, search: BeamSearch, first: Sequence) -> Iterator[Delta]:
        n = request.params.n
        for index, hypothesis in enumerate(search.hypotheses[:n]):
            ended = hypothesis.token_ids[-1] in self._vocabulary.stop_token_ids(request.params)
            text = self._vocabulary.detokenizer(first.prompt_token_ids, request.params)
            pieces = [text.push(token_id)[0] for token_id in hypothesis.token_ids] if text is not None else []
            self.ended.add(first, index, hypothesis.token_ids)
            yield Delta(
                request.request_id,
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
