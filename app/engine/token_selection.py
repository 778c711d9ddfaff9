"""The choice of a step's tokens: the rows of its logits, and the tokens sampled from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from folio.app.engine.delta import TokenLogprobs
from folio.app.engine.execution.batch import Array
from folio.app.engine.faults import failure_of
from folio.app.engine.generation import Generation
from folio.app.engine.request import Request, SequenceGroup
from folio.app.engine.sampling.beam import BeamSearch, likeliest
from folio.app.engine.sampling.choice import compiled_kernels
from folio.app.engine.sampling.logprobs import prompt_logprobs
from folio.app.engine.sampling.sampler import PendingSample, Sampled, launch_sampling, sample_apart
from folio.app.engine.sampling.state import SamplingState
from folio.app.engine.scheduled import Scheduled
from folio.app.errors import FolioError, RequestError


@dataclass(frozen=True, slots=True)
class SampledRows:
    """Rows to sample of one sequence: one for each draft and one more, or one for each fork. `start`: the first one."""

    request: Request
    start: int
    states: tuple[SamplingState, ...]
    drafts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BeamCandidates:
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
    rows: list[SampledRows] = field(default_factory=list)
    where: list[int] = field(default_factory=list)
    states: list[SamplingState] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    beam_rows: list[tuple[Generation, dict[Request, int]]] = field(default_factory=list)
    prompt_rows: list[tuple[Scheduled, slice]] = field(default_factory=list)
    pending: PendingSample | None = None
    sampled: Sampled | None = None
    beams: list[BeamCandidates] = field(default_factory=list)
    prompts: list[tuple[Request, tuple[TokenLogprobs, ...]]] = field(default_factory=list)
    failed: dict[Request, FolioError] = field(default_factory=dict)

    def fail(self, request: Request, error: BaseException) -> None:
        """Note a failure for a sequence; the first one of a request counts. Raises it if it is no request's."""
        if all(other.request_id != request.request_id for other in self.failed):
            self.failed[request] = failure_of(request.request_id, error)


class TokenChooser:
    """Chooses tokens from logits. A call that fails for one request fails that request, when the tokens are applied.

    Args:
        generations: of the engine's requests.
    """

    def __init__(self, generations: Mapping[str, Generation]) -> None:
        self._generations = generations
        compiled_kernels()  # before there are requests

    def select(self, scheduled: Sequence[Scheduled]) -> TokenSelection:
        """Select the rows of a step's logits to choose tokens from. Sequences that have ended since the step was
        scheduled are left out."""
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
                    selection.rows.append(SampledRows(request, len(states), own, s.drafts))
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
        """Choose tokens from `logits [sum(num_logits), vocab_size]`. Raises an error of a call for all rows that fails
        for each row alone, too."""
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
                selection.beams.append(_beam_candidates(generation, beam_rows, logits))
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


def _beam_candidates(generation: Generation, rows: dict[Request, int], logits: torch.Tensor) -> BeamCandidates:
    assert isinstance(generation.selection, BeamSearch)
    logprobs, token_ids = likeliest(logits[list(rows.values())], generation.selection.num_candidates)
    return BeamCandidates(generation, tuple(rows), logprobs, token_ids, bool(np.isfinite(logprobs).all()))


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
