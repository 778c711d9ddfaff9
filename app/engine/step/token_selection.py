"""Token selection: the rows of a step's logits, and the tokens sampled from them."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field

import numpy as np
import torch

from folio.app.engine.layers.batch import Array
from folio.app.engine.request.faults import failure_of
from folio.app.engine.request.request import Request, Sequence
from folio.app.engine.sampling.beam import BeamSearch, likeliest
from folio.app.engine.sampling.choice import compiled_kernels
from folio.app.engine.sampling.logprobs import prompt_logprobs
from folio.app.engine.sampling.sampler import PendingSample, Sampled, launch_sampling, sample_apart
from folio.app.engine.sampling.state import SamplingState
from folio.app.engine.sampling.token_logprobs import TokenLogprobs
from folio.app.engine.schedule.scheduled import Scheduled
from folio.app.errors import FolioError, RequestError


@dataclass(frozen=True, slots=True)
class SampledRows:
    """Rows to sample of one sequence: one for each draft and one more, or one for each fork. `start`: the first one."""

    sequence: Sequence
    start: int
    states: tuple[SamplingState, ...]
    drafts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BeamCandidates:
    """Candidates of one beam search: the likeliest next tokens of each beam."""

    request: Request
    sequences: tuple[Sequence, ...]
    logprobs: Array  # [beams, candidates]
    token_ids: Array
    is_sound: bool


@dataclass(slots=True)
class TokenSelection:
    """The rows of a step's logits to choose tokens from, then the chosen tokens, before they are applied.

    Attributes:
        plain: sequences with one row to sample and no structure, and their row among those to sample.
        rows: the other sequences that sample.
        where, states, positions: for each row to sample: its row of the logits, its state, number of drafts before.
        beam_rows: for each beam search, its beams and their rows of the logits.
        prompt_rows: rows of the logits for prompt log probabilities.
        pending, sampled: the sampled tokens, on the device or, if requests had to be sampled one by one, on the host.
        failed: sequences for which choosing has failed.
    """

    plain: list[tuple[Sequence, int]] = field(default_factory=list)
    rows: list[SampledRows] = field(default_factory=list)
    where: list[int] = field(default_factory=list)
    states: list[SamplingState] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    beam_rows: list[tuple[Request, dict[Sequence, int]]] = field(default_factory=list)
    prompt_rows: list[tuple[Scheduled, slice]] = field(default_factory=list)
    pending: PendingSample | None = None
    sampled: Sampled | None = None
    beams: list[BeamCandidates] = field(default_factory=list)
    prompts: list[tuple[Sequence, tuple[TokenLogprobs, ...]]] = field(default_factory=list)
    failed: dict[Sequence, FolioError] = field(default_factory=dict)

    def fail(self, sequence: Sequence, error: BaseException) -> None:
        """Record a sequence's failure; only the first of a request counts. Raises the error if no request caused it."""
        if all(other.request_id != sequence.request_id for other in self.failed):
            self.failed[sequence] = failure_of(sequence.request_id, error)


class TokenChooser:
    """Chooses tokens from logits. A call that fails for one request fails that request, when the tokens are applied."""

    def __init__(self) -> None:
        compiled_kernels()  # before there are requests

    def select(self, scheduled: abc.Sequence[Scheduled]) -> TokenSelection:
        """Select the rows of a step's logits to choose tokens from. Sequences that have ended since the step was
        scheduled are left out."""
        selection = TokenSelection()
        plain, where, states, positions = selection.plain, selection.where, selection.states, selection.positions
        beams: dict[Request, dict[Sequence, int]] = {}
        end = 0
        for s in scheduled:
            start, end = end, end + s.num_logits
            sequence = s.sequence
            if start == end or sequence.is_ended:
                continue
            try:
                if sequence.params.prompt_logprobs is not None and s.start < len(sequence.prompt_token_ids):
                    selection.prompt_rows.append((s, slice(start, end)))
                if not s.samples:
                    continue
                if sequence.params.use_beam_search:
                    beams.setdefault(sequence.request, {})[sequence] = end - 1
                elif not sequence.num_forks and not s.drafts and sequence.sampling.matcher is None:  # most sequences
                    plain.append((sequence, len(states)))
                    states.append(sequence.sampling)
                    where.append(end - 1)
                    positions.append(0)
                else:
                    own, ahead = _rows_to_sample(s)
                    selection.rows.append(SampledRows(sequence, len(states), own, s.drafts))
                    states += own
                    positions += ahead
                    where += [end - 1 - ahead[-1] + position for position in ahead]
            except BaseException as error:  # noqa: BLE001 - raised again unless the request caused it
                selection.fail(sequence, error)
        for request, rows in beams.items():
            selection.beam_rows.append((request, {sequence: rows[sequence] for sequence in request.sequences}))
        return selection

    def choose(self, selection: TokenSelection, logits: torch.Tensor) -> None:
        """Choose tokens from `logits [sum(num_logits), vocab_size]`. Raises an error of sampling that occurs for all
        rows together and for each request alone."""
        for s, part in selection.prompt_rows:
            try:
                selection.prompts.append((s.sequence, _prompt_logprobs(s, logits[part])))
            except BaseException as error:  # noqa: BLE001 - as in `select`
                selection.fail(s.sequence, error)
        if states := selection.states:
            where = selection.where
            rows = logits if where == list(range(len(logits))) else logits[where]
            offsets = selection.positions if any(selection.positions) else None
            try:
                selection.pending = launch_sampling(rows, states, offsets)
            except BaseException as error:  # noqa: BLE001 - as in `select`
                selection.sampled = self._sample_apart(selection, rows, states, offsets, error)
        for request, beam_rows in selection.beam_rows:
            try:
                selection.beams.append(_beam_candidates(request, beam_rows, logits))
            except BaseException as error:  # noqa: BLE001 - as in `select`
                selection.fail(next(iter(beam_rows)), error)

    def _sample_apart(
        self,
        selection: TokenSelection,
        logits: torch.Tensor,
        states: abc.Sequence[SamplingState],
        positions: abc.Sequence[int] | None,
        cause: BaseException,
    ) -> Sampled:
        """Sample each request by itself, after `sample` has failed for all together."""
        parts = [(sequence, slice(row, row + 1)) for sequence, row in selection.plain]
        parts += [(rows.sequence, slice(rows.start, rows.start + len(rows.states))) for rows in selection.rows]
        sampled, errors = sample_apart(logits, states, positions, [part for _, part in parts])
        if len(errors) == len(parts) > 1 and not any(isinstance(error, RequestError) for error in errors.values()):
            raise cause  # not caused by a single request
        for i, error in errors.items():
            selection.fail(parts[i][0], error)
        return sampled


def _beam_candidates(request: Request, rows: dict[Sequence, int], logits: torch.Tensor) -> BeamCandidates:
    assert isinstance(request.selection, BeamSearch)
    logprobs, token_ids = likeliest(logits[list(rows.values())], request.selection.num_candidates)
    return BeamCandidates(request, tuple(rows), logprobs, token_ids, bool(np.isfinite(logprobs).all()))


def _rows_to_sample(s: Scheduled) -> tuple[tuple[SamplingState, ...], abc.Sequence[int]]:
    """The states of a sequence's rows, with the drafts before each: one row per fork, or per draft and one more."""
    state = s.sequence.sampling
    if num_forks := s.sequence.num_forks:
        return (state, *(state.fork(index=1 + i) for i in range(num_forks))), [0] * (1 + num_forks)
    return (state,) * (1 + len(s.drafts)), range(1 + len(s.drafts))


def _prompt_logprobs(s: Scheduled, logits: torch.Tensor) -> tuple[TokenLogprobs, ...]:
    """Log probabilities of the prompt tokens after the scheduled ones, without those known from before a preemption."""
    sequence, top = s.sequence, s.sequence.params.prompt_logprobs
    assert top is not None
    known = 1 + len(sequence.prompt_logprobs)
    following = range(
        max(s.start + 1, known),
        min(s.start + s.num_tokens + 1, len(sequence.prompt_token_ids)),
    )
    if not following:
        return ()
    skipped = following.start - s.start - 1
    return prompt_logprobs(
        logits[skipped : skipped + len(following)], sequence.prompt_token_ids[following.start : following.stop], top
    )
