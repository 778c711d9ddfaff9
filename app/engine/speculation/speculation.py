"""Speculation: the engine's interface to methods that propose draft tokens, and counts of their acceptance."""

from __future__ import annotations

import logging
from collections import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from folio.app.config.engine import ResolvedConfig
from folio.app.engine.execution.captured_graphs import CapturedGraphs
from folio.app.engine.execution.model_runner import ObservedLayers
from folio.app.engine.memory.memory_profile import DevicePlan
from folio.app.engine.model.loader import LoadedModel
from folio.app.engine.report import StepTimes
from folio.app.engine.request.faults import SequenceFailure, is_request_failure
from folio.app.engine.request.request import Sequence
from folio.app.engine.speculation.draft import DraftProposer
from folio.app.engine.speculation.length import LengthControl
from folio.app.engine.speculation.ngram import NgramProposer
from folio.app.errors import ConfigError
from folio.app.models.weights.store import WeightStore
from folio.vmem import DevicePages, IntegrityError, KVMemory


class Proposer(Protocol):
    """Proposes draft tokens, for one thread. A sequence's `token_ids` may only grow."""

    share: float
    """Part of the KV budget that the proposer takes."""

    @property
    def models(self) -> tuple[LoadedModel, ...]:
        """The models that the proposer runs."""
        ...

    @property
    def memory(self) -> KVMemory | None:
        """The proposer's KV memory, once opened."""
        ...

    @property
    def graphs(self) -> CapturedGraphs | None:
        """Captured graphs of the proposer's steps, once opened."""
        ...

    def open(self, max_model_len: int, plan: DevicePlan | None = None, pages: DevicePages | None = None) -> None:
        """Prepare to propose, after the model's KV memory is created. Arguments: see `Speculation.open`."""
        ...

    @property
    def step_times(self) -> StepTimes:
        """Measured cost of one further draft token for each of several sequences; all 0 if negligible."""
        ...

    def propose(self, sequences: abc.Sequence[Sequence], most: abc.Sequence[int]) -> list[list[int]]:
        """For each sequence at most `most[i]` draft tokens to follow `token_ids`, possibly none. Raises
        `SequenceFailure` for a sequence that must be forgotten; the state is consistent then."""
        ...

    def forget_sequence(self, sequence: Sequence) -> None:
        """Free a sequence's state, if it has any. The sequence may come back."""
        ...

    def forget_all(self) -> None:
        """Free the state of all sequences."""
        ...

    def check_integrity(self) -> None:
        """Raise `IntegrityError` if the state is inconsistent."""
        ...

    def close(self) -> None:
        """Free everything, opened or not."""
        ...


@dataclass(slots=True)
class SpeculationCounts:
    """Counts of draft tokens.

    Attributes:
        proposer: the method's name.
        draft_tokens: verified draft tokens.
        accepted_tokens: accepted ones among them.
        checks: verifications, one for each sequence and step with draft tokens.
    """

    proposer: str
    draft_tokens: int = 0
    accepted_tokens: int = 0
    checks: int = 0


logger = logging.getLogger(__name__)


class Speculation:
    """Proposes draft tokens for decoding requests; outputs do not depend on them, because the engine verifies them.

    Call `load` before the model's KV memory is created, which gets `memory_share` of the budget, and `open` afterwards.

    Attributes:
        counts: counts of draft tokens so far. From any thread.
    """

    def __init__(self, config: ResolvedConfig, target: LoadedModel, proposer: Proposer) -> None:
        self._config = config
        self._eos_token_ids = target.eos_token_ids
        self._proposer = proposer
        self._lengths: LengthControl
        self._step_times: Callable[[], StepTimes]
        self._excluded: set[Sequence] = set()  # proposing has failed for them
        self.counts = SpeculationCounts(config.speculation)

    @classmethod
    def load(
        cls, config: ResolvedConfig, target: LoadedModel, layers: ObservedLayers, weights: WeightStore | None = None
    ) -> Speculation | None:
        """Load the configured method; `None` if speculation is off.

        Args:
            target: the model, with this rank's `layers`.
            weights: store of the draft model's weights, see `load_model`.

        Raises:
            ConfigError: the model or the draft model does not support speculation.
            ModelError: the draft model cannot be loaded.
        """
        if config.speculation == "off":
            return None
        if layers.states:
            raise ConfigError(
                f"speculation is {config.speculation!r}, but {config.model!r} keeps a recurrent state in "
                f"{len(layers.states)} layers, which cannot be rolled back after a rejected draft; set it to 'off'"
            )
        by_model = config.speculation == "draft"
        return cls(config, target, DraftProposer(config, target, layers, weights) if by_model else NgramProposer())

    @property
    def memory_share(self) -> float:
        """The model's own share of the KV budget."""
        return 1 - self._proposer.share

    def open(
        self,
        max_model_len: int,
        step_times: Callable[[], StepTimes],
        plan: DevicePlan | None = None,
        pages: DevicePages | None = None,
    ) -> None:
        """Prepare to propose.

        Args:
            max_model_len: the engine's context.
            step_times: measured times of the model's steps, without the time of proposing.
            plan: plan of a CUDA device's memory (`plan_device`).
            pages: pages of a shared device.

        Raises:
            ConfigError, ModelError: the draft model cannot run with these settings; call `close` nevertheless.
        """
        self._proposer.open(max_model_len, plan, pages)
        self._step_times = step_times
        self.begin()

    def begin(self) -> None:
        """Reset the acceptance statistics, while no sequence runs."""
        proposer = self._proposer
        self._lengths = LengthControl(self._config.max_draft_tokens, self._step_times, lambda: proposer.step_times)
        self.counts = SpeculationCounts(self._config.speculation)

    def propose(self, sequences: abc.Sequence[Sequence], budget: int) -> list[list[int]]:
        """Draft tokens to follow each sequence's tokens, at most `budget` together, possibly none.

        A failure costs all draft tokens of this step, and excludes the failed sequence from speculation, or all
        sequences if the failed one is unknown. Outputs do not change.

        Args:
            sequences: decoding sequences, of which all tokens but the last are computed. Beams, sequences about to be
                forked, and sequences whose sampling depends on preceding tokens get no draft tokens.
        """
        eligible: list[Sequence] = []
        drafts: dict[Sequence, list[int]] = {}
        at_fault: Sequence | None = None
        try:
            for at_fault in sequences:
                if at_fault not in self._excluded and _can_speculate(at_fault):
                    eligible.append(at_fault)
            at_fault = None
            lengths = self._lengths.choose(eligible, budget)
            proposed = self._proposer.propose(eligible, lengths)
            for at_fault, token_ids in zip(eligible, proposed, strict=True):
                drafts[at_fault] = self._cut(at_fault, token_ids)
        except BaseException as error:
            if not is_request_failure(error):
                raise
            if isinstance(error, SequenceFailure):
                at_fault = error.sequence
            drafts.clear()
            self._exclude(eligible if at_fault is None else [at_fault], error)
        return [drafts.get(sequence, []) for sequence in sequences]

    def verified(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        """Record a verification: the first `num_accepted` of `num_drafts` draft tokens were accepted."""
        assert 0 <= num_accepted <= num_drafts
        if num_drafts:
            self._lengths.note(sequence, num_drafts, num_accepted)
            self.counts.checks += 1
            self.counts.draft_tokens += num_drafts
            self.counts.accepted_tokens += num_accepted

    def forget_sequence(self, sequence: Sequence) -> None:
        """Free the state of a sequence that has ended or was preempted. It may come back."""
        self._proposer.forget_sequence(sequence)
        self._lengths.forget_sequence(sequence)
        self._excluded.discard(sequence)

    @property
    def models(self) -> tuple[LoadedModel, ...]:
        """The models that the proposer runs."""
        return self._proposer.models

    @property
    def memory(self) -> KVMemory | None:
        """The proposer's KV memory, once opened."""
        return self._proposer.memory

    @property
    def graphs(self) -> CapturedGraphs | None:
        """Captured graphs of the proposer's steps, once opened."""
        return self._proposer.graphs

    def forget_all(self) -> None:
        """Free the proposer's state of all sequences, which may come back."""
        self._proposer.forget_all()

    def check_integrity(self, *, idle: bool) -> None:
        """Raise `IntegrityError` if the proposer's state is inconsistent, or, without sequences (`idle`), not empty."""
        self._proposer.check_integrity()
        remembered = self._lengths.num_requests or len(self._excluded)
        if idle and remembered:
            raise IntegrityError(f"speculation has state of {remembered} ended sequences")

    def close(self) -> None:
        """Free everything, opened or not."""
        self._proposer.close()

    def _exclude(self, sequences: abc.Sequence[Sequence], error: BaseException) -> None:
        names = ", ".join(sequence.request_id for sequence in sequences)
        logger.error("speculation ends for %s: proposing failed", names, exc_info=error)
        for sequence in sequences:
            self.forget_sequence(sequence)
        self._excluded.update(sequences)

    def _cut(self, sequence: Sequence, drafts: list[int]) -> list[int]:
        params = sequence.params
        for i, token_id in enumerate(drafts):
            if token_id in params.stop_token_ids or (token_id in self._eos_token_ids and not params.ignore_eos):
                return drafts[: i + 1]
        return drafts


def _can_speculate(sequence: Sequence) -> bool:
    several = sequence.params.use_beam_search or sequence.num_forks
    return not several and sequence.pin_name is None and sequence.sampling.can_look_ahead
