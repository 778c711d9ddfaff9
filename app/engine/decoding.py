"""From a step's logits to the tokens of every sequence, whatever way each of them chooses: samples, drafts that are
checked, forks after a common prompt, beams.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from app.engine.execution.batch import Array
from app.engine.faults import failure_of
from app.engine.generation import BestOf, EndedOutputs, Generation
from app.engine.load_report import LoadMeter
from app.engine.request import Delta, Request, SequenceGroup, TokenLogprobs
from app.engine.sampling.beam import BeamSearch, likeliest
from app.engine.sampling.logprobs import prompt_logprobs
from app.engine.sampling.params import SamplingParams
from app.engine.sampling.sampler import Sampled, sample, sample_apart
from app.engine.sampling.state import SamplingState
from app.engine.scheduler import Scheduled, Scheduler
from app.engine.speculation import Speculation
from app.engine.vocabulary import Vocabulary
from app.errors import EngineError, FolioError, RequestError
from vmem import IntegrityError, KVMemory, ViewPolicy, VmemError

NOT_FINITE = "the model's logits are not finite numbers"
CONTRADICTION = (
    "no token may follow: what structure, bad_words, min_tokens and stop_token_ids ask for contradicts itself here; "
    "leave one of them out"
)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of what was sampled that belong to a sequence: one for each draft and one more, or one for each fork."""

    request: Request
    start: int
    states: tuple[SamplingState, ...]
    drafts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Beams:
    """A search and its sequences, in the order of its beams, with each one's likeliest next tokens."""

    generation: Generation
    requests: tuple[Request, ...]
    logprobs: Array  # [beams, candidates]
    token_ids: Array
    is_sound: bool


@dataclass(slots=True)
class TokenSelection:
    """What a step's logits say, before anything is changed by it.

    `failed`: requests for which choosing has failed, and what they end with.
    """

    plain: list[tuple[Request, int]] = field(default_factory=list)  # one row each
    rows: list[_Rows] = field(default_factory=list)
    sampled: Sampled | None = None
    beams: list[_Beams] = field(default_factory=list)
    prompts: list[tuple[Request, tuple[TokenLogprobs, ...]]] = field(default_factory=list)
    failed: dict[str, FolioError] = field(default_factory=dict)


class Decoder:
    """Turns logits into deltas.

    Args:
        scheduler: whose sequences these are; forks join their groups, and what ends leaves them.
        generations: request id → the request as its sender sees it; those that end are taken out.
        speculation: who made the drafts, and wants to know what came of them.
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

    def choose(self, scheduled: Sequence[Scheduled], logits: torch.Tensor) -> TokenSelection:
        """Choose tokens from `logits [sum(num_logits), vocab_size]`. Changes nothing.

        A call that fails for one request fails that request, by `apply`; one that serves all rows, and cannot be done
        for any request alone either, is raised.
        """
        choice = TokenSelection()
        where: list[int] = []  # the row of logits of each row to sample
        states: list[SamplingState] = []
        positions: list[int] = []
        beams: dict[SequenceGroup, dict[Request, int]] = {}
        end = 0
        for s in scheduled:
            start, end = end, end + s.num_logits
            if start == end:
                continue
            request = s.request
            try:
                if request.params.prompt_logprobs is not None and request.num_computed < len(request.prompt_token_ids):
                    choice.prompts.append((request, _of_prompt(s, logits[start:end])))
                if not s.samples:
                    continue
                if request.params.use_beam_search:
                    beams.setdefault(request.group, {})[request] = end - 1
                    continue
                first = len(states)
                is_single = s.num_logits == 1 and not request.num_forks
                if is_single and request.sampling.matcher is None:  # most are like that
                    choice.plain.append((request, first))
                    states.append(request.sampling)
                    where.append(start)
                    positions.append(0)
                    continue
                if request.num_forks:
                    forks = [request.sampling.fork(index=1 + i) for i in range(request.num_forks)]
                    states += [request.sampling, *forks]
                    where += [end - 1] * (1 + len(forks))
                    positions += [0] * (1 + len(forks))
                else:
                    states += [request.sampling] * (1 + len(s.drafts))
                    where += range(end - 1 - len(s.drafts), end)
                    positions += range(1 + len(s.drafts))
                choice.rows.append(_Rows(request, first, tuple(states[first:]), s.drafts))
            except BaseException as error:  # noqa: BLE001 - raised again unless it is the request's
                choice.failed[request.request_id] = failure_of(request.request_id, error)
        if states:
            rows = logits if where == list(range(len(logits))) else logits[where]
            ahead = positions if any(positions) else None
            try:
                choice.sampled = sample(rows, states, ahead)
            except BaseException as error:  # noqa: BLE001 - as in `choose`
                choice.sampled = self._sample_apart(choice, rows, states, ahead, error)
        for group, of_group in beams.items():
            request_id = group.members[0].request_id
            if request_id not in choice.failed:
                try:
                    choice.beams.append(self._beams(group, of_group, logits))
                except BaseException as error:  # noqa: BLE001 - as in `choose`
                    choice.failed[request_id] = failure_of(request_id, error)
        return choice

    def _sample_apart(
        self,
        choice: TokenSelection,
        logits: torch.Tensor,
        states: Sequence[SamplingState],
        positions: Sequence[int] | None,
        cause: BaseException,
    ) -> Sampled:
        """What `sample` gives each request by itself, after it has failed for all of them together."""
        parts = [(request, slice(row, row + 1)) for request, row in choice.plain]
        parts += [(rows.request, slice(rows.start, rows.start + len(rows.states))) for rows in choice.rows]
        sampled, errors = sample_apart(logits, states, positions, [part for _, part in parts])
        if len(errors) == len(parts) > 1 and not any(isinstance(error, RequestError) for error in errors.values()):
            raise cause  # it is not one of them
        for i, error in errors.items():
            request_id = parts[i][0].request_id
            if request_id not in choice.failed:
                choice.failed[request_id] = failure_of(request_id, error)
        return sampled

    def apply(self, choice: TokenSelection) -> list[Delta]:
        """Add what was chosen to the sequences, which are computed now up to there."""
        deltas: list[Delta] = []
        for request_id, error in choice.failed.items():
            deltas += self.fail(self._generations[request_id], error)
        for request, logprobs in choice.prompts:
            request.prompt_logprobs += logprobs
        if choice.sampled is not None:
            self._append_plain(choice.plain, choice.sampled, deltas)
            for rows in choice.rows:
                self._add(self._generations.get(rows.request.request_id), self._append(rows, choice.sampled), deltas)
        for beams in choice.beams:
            self._add(beams.generation, self._advance(beams), deltas)
        return deltas

    def _add(self, generation: Generation | None, made: Iterator[Delta], deltas: list[Delta]) -> None:
        """Add what is made for a request, or what it ends with if that fails; for none that has failed before."""
        if generation is None:
            return
        try:
            for delta in made:
                deltas.append(delta)  # what came before a failure stays
        except BaseException as error:  # noqa: BLE001 - as in `choose`
            deltas += self.fail(generation, failure_of(generation.request_id, error))

    def end_sequence(self, request: Request) -> None:
        """A sequence is over."""
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
        """What `_append` does, for one token each, in less time."""
        eos = self._vocabulary.eos_token_ids
        token_ids, sound, logprobs = sampled.token_ids, sampled.sound, sampled.logprobs
        for request, row in plain:
            generation = self._generations.get(request.request_id)
            if generation is None:  # another of its outputs has failed
                continue
            if not sound[row] or generation.selection is not None or request.prompt_logprobs:
                self._add(generation, self._append(_Rows(request, row, (request.sampling,), ()), sampled), deltas)
                continue
            logprob = logprobs[row]
            try:
                delta = request.append((token_ids[row],), eos, () if logprob is None else (logprob,))
                if delta.finish_reason is None:
                    deltas.append(delta)
                else:
                    deltas += self._ended(request, generation, delta)
            except BaseException as error:  # noqa: BLE001 - as in `choose`
                deltas += self.fail(generation, failure_of(request.request_id, error))

    def _append(self, rows: _Rows, sampled: Sampled) -> Iterator[Delta]:
        request, start = rows.request, rows.start
        generation = self._generations[request.request_id]
        at = slice(start, start + len(rows.states))
        if not all(sampled.sound[at]):
            blocked = not sampled.blocked.isdisjoint(range(at.start, at.stop))
            yield from self.fail(generation, RequestError(CONTRADICTION) if blocked else EngineError(NOT_FINITE))
            return
        tokens, logprobs = sampled.token_ids[at], sampled.logprobs[at]
        sequences, chosen = [request], [tokens]
        if request.num_forks:
            sequences += self._fork_all(request, rows.states[1:])
            chosen = [[token] for token in tokens]
        elif rows.drafts:
            num_accepted = _num_equal(rows.drafts, tokens)
            chosen = [tokens[: 1 + num_accepted]]
            self._scheduler.charge(request, num_accepted)
            if self._speculation is not None:
                self._speculation.verified(request, len(rows.drafts), num_accepted)
        eos = self._vocabulary.eos_token_ids
        offset = 0
        for sequence, token_ids in zip(sequences, chosen, strict=True):
            known = [logprob for logprob in logprobs[offset:] if logprob is not None][: len(token_ids)]
            offset += len(token_ids)
            delta = sequence.append(token_ids, eos, known)
            if (matcher := sequence.sampling.matcher) is not None and matcher.error is not None:
                yield from self.fail(generation, matcher.error)
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
        """A sequence is over with this delta; what the sender is to hear of it."""
        self.end_sequence(sequence)
        sent = generation.emit(delta)
        start = len(sequence.prompt_token_ids)
        for output in sent:
            whole = isinstance(generation.selection, BestOf)
            self.ended.add(sequence, output.index, output.token_ids if whole else sequence.token_ids[start:])
        return sent

    def _roll_back(self, request: Request) -> None:
        """Keep what was computed of tokens that are there, and of no drafts beyond."""
        computed = len(request.token_ids) - 1
        if computed < request.num_computed:
            assert request.memory is not None
            request.num_computed = request.max_computed = computed
            self._memory.truncate(request.memory, computed)

    def _fork_all(self, request: Request, states: Sequence[SamplingState]) -> list[Request]:
        """The sequences that share the request's prompt, which is computed now."""
        generation = self._generations[request.request_id]
        forks = []
        for i, state in enumerate(states):
            forks.append(self.fork_sequence(request, state, index=1 + i))
            generation.sequences.append(forks[-1])  # at once: if the next one fails, all of them end
        request.num_forks = 0
        return forks

    def fork_running(
        self, parent: Request, fork_id: str, params: SamplingParams, states: Sequence[SamplingState], most_tokens: int
    ) -> Generation:
        """Another request, whose sequences go on where `parent` is, up to `most_tokens` tokens in all."""
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
        """A sequence that goes on where `parent` is, in its group. It shares what is computed (PagedAttention §4.4)."""
        num_tokens = parent.num_computed
        chain = parent.chain.fork(num_tokens)
        text = None  # before the memory: nobody would give that back
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
                num_tokens = 0  # no region is left, or what it needs has been given up: it is computed again
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
            snapshot_positions=parent.snapshot_positions if memory is not None else (),
            sampling=state,
            prompt_logprobs=parent.prompt_logprobs if parent.group.lockstep else [],
            submitted_at=time.perf_counter(),  # for one that shares nothing: it waits until it is computed again
        )

    def fail(self, generation: Generation, error: FolioError) -> Iterator[Delta]:
        """End all sequences of a request; the one delta says why."""
        for request in list(generation.sequences):
            self.end_sequence(request)
        yield Delta(generation.request_id, (), "", error=error)

    # ---- beams ----

    def _beams(self, group: SequenceGroup, rows: dict[Request, int], logits: torch.Tensor) -> _Beams:
        requests = tuple(group.members)
        generation = self._generations[requests[0].request_id]
        assert isinstance(generation.selection, BeamSearch)
        assert len(rows) == len(requests)
        logprobs, token_ids = likeliest(
            logits[[rows[request] for request in requests]], generation.selection.num_candidates
        )
        return _Beams(generation, requests, logprobs, token_ids, bool(np.isfinite(logprobs).all()))

    def _advance(self, beams: _Beams) -> Iterator[Delta]:
        generation, search = beams.generation, beams.generation.selection
        assert isinstance(search, BeamSearch)
        if not beams.is_sound:
            yield from self.fail(generation, EngineError(NOT_FINITE))
            return
        start = len(beams.requests[0].prompt_token_ids)
        outputs = [request.token_ids[start:] for request in beams.requests]
        step = search.advance(outputs, beams.logprobs, beams.token_ids)
        if search.done:
            first = beams.requests[0]
            for request in beams.requests:
                self.end_sequence(request)
            yield from self._best(generation, search, first)
            return
        going: list[Request] = []
        for beam, _ in step.continuations:  # forks first: then nothing is freed that one of them shares
            parent = beams.requests[beam]
            if parent in going:
                going.append(self.fork_sequence(parent, parent.sampling.fork(), index=0))
                generation.sequences.append(going[-1])  # at once: if the next one fails, all of them end
            else:
                going.append(parent)
        for request in beams.requests:
            if request not in going:
                self._scheduler.remove_sequence(request)
        for request, (_, token_id) in zip(going, step.continuations, strict=True):
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
            )


def _of_prompt(s: Scheduled, logits: torch.Tensor) -> tuple[TokenLogprobs, ...]:
    """Log probabilities of those prompt tokens after the scheduled ones that are not known yet: after preemption a
    prompt is computed again."""
    request, top = s.request, s.request.params.prompt_logprobs
    assert top is not None
    known = 1 + len(request.prompt_logprobs)
    following = range(
        max(s.request.num_computed + 1, known),
        min(s.request.num_computed + s.num_tokens + 1, len(request.prompt_token_ids)),
    )
    if not following:
        return ()
    skipped = following.start - request.num_computed - 1
    return prompt_logprobs(
        logits[skipped : skipped + len(following)], request.prompt_token_ids[following.start : following.stop], top
    )


def _num_equal(drafts: Sequence[int], tokens: Sequence[int]) -> int:
    """How many drafts are what was chosen in their place."""
    count = 0
    while count < len(drafts) and drafts[count] == tokens[count]:
        count += 1
    return count
