"""Speculative decoding, as the engine sees it: guesses before a step, what came of them afterwards."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from app.config.engine import EngineConfig
from app.engine.execution.model_runner import ObservedLayers
from app.engine.faults import SequenceFailure, is_request_failure
from app.engine.model.loader import LoadedModel
from app.engine.report import StepTimes
from app.engine.request import Request
from app.engine.speculation.draft import DraftModel, DraftProposer
from app.engine.speculation.length import LengthControl
from app.engine.speculation.ngram import NgramProposer
from app.engine.speculation.proposer import Proposer, SpeculationCounts
from app.errors import ConfigError
from vmem import IntegrityError

logger = logging.getLogger(__name__)


class Speculation:
    """Guesses tokens for requests that generate. The engine checks them: its outputs do not depend on what is guessed.

    `load` it before the model's KV memory is made, which gets `memory_share` of the budget, and `open` it afterwards.

    Args:
        draft: the draft model, or `None` for guesses from the text.

    Attributes:
        counts: what has come of it so far. From any thread.
    """

    def __init__(self, config: EngineConfig, target: LoadedModel, draft: DraftModel | None) -> None:
        self._config = config
        self._eos_token_ids = target.eos_token_ids
        self._draft = draft
        self._proposer: Proposer | None = None
        self._lengths: LengthControl
        self._step_times: Callable[[], StepTimes]
        self._excluded: set[Request] = set()  # guessing has failed for them
        self.counts = SpeculationCounts(config.speculation)

    @classmethod
    def load(cls, config: EngineConfig, target: LoadedModel, layers: ObservedLayers) -> Speculation | None:
        """Load what the settings ask for; `None` when they ask for nothing.

        Args:
            target: the model, and `layers` of it, as this rank has them.

        Raises:
            ConfigError: the model, or the draft model, cannot be used that way.
            ModelError: the draft model cannot be loaded.
        """
        if config.speculation == "off":
            return None
        if layers.states:
            raise ConfigError(
                f"speculation is {config.speculation!r}, but {config.model!r} keeps a recurrent state in "
                f"{len(layers.states)} layers, which cannot go back when a guess is wrong; set it to 'off'"
            )
        return cls(config, target, DraftModel(config, target, layers) if config.speculation == "draft" else None)

    @property
    def memory_share(self) -> float:
        """Of the KV budget, what is left to the model itself."""
        return 1.0 if self._draft is None else 1 - self._draft.share

    def open(self, max_model_len: int, step_times: Callable[[], StepTimes]) -> None:
        """Get ready to guess.

        Args:
            max_model_len: the engine's context.
            step_times: of the model's steps as measured so far, the time for guesses left aside.

        Raises:
            ConfigError, ModelError: the draft model cannot run with these settings; `close` all the same.
        """
        if self._draft is None:
            self._proposer = NgramProposer()
        else:
            self._draft.open(max_model_len)
            self._proposer = DraftProposer(
                self._draft,
                step_tokens=self._config.max_num_batched_tokens,
                max_num_seqs=self._config.max_num_seqs,
                view=self._config.kv_view,
            )
        self._step_times = step_times
        self.begin()

    def begin(self) -> None:
        """Nothing has been guessed yet that would say how good guesses are; no request runs."""
        assert self._proposer is not None
        proposer = self._proposer
        self._lengths = LengthControl(self._config.max_draft_tokens, self._step_times, lambda: proposer.step_times)
        self.counts = SpeculationCounts(self._config.speculation)

    def propose(self, requests: Sequence[Request], budget: int) -> list[list[int]]:
        """Guesses of what follows all tokens of each request, at most `budget` together; for many there are none.

        When guessing fails for a request, that one gets no guesses any more, and nobody in this step; when nobody knows
        for which, that is so for all of them. Their outputs are the same without.

        Args:
            requests: whose next token is to be chosen in the coming step: all but their last token is computed. Beams,
                those about to be forked, and those whose sampling cannot look ahead get no guesses.
        """
        assert self._proposer is not None
        able: list[Request] = []
        drafts: dict[Request, list[int]] = {}
        at_fault: Request | None = None
        try:
            for at_fault in requests:
                if at_fault not in self._excluded and _can_speculate(at_fault):
                    able.append(at_fault)
            at_fault = None
            lengths = self._lengths.choose(able, budget)
            proposed = self._proposer.propose(able, lengths)
            for at_fault, guesses in zip(able, proposed, strict=True):
                drafts[at_fault] = self._cut(at_fault, guesses)
        except BaseException as error:
            if not is_request_failure(error):
                raise
            if isinstance(error, SequenceFailure):
                at_fault = error.request
            drafts.clear()
            self._exclude(able if at_fault is None else [at_fault], error)
        return [drafts.get(request, []) for request in requests]

    def verified(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """So many guesses for the request were checked, and the first `num_accepted` of them were right."""
        assert 0 <= num_accepted <= num_drafts
        if num_drafts:
            self._lengths.note(request, num_drafts, num_accepted)
            self.counts.checks += 1
            self.counts.draft_tokens += num_drafts
            self.counts.accepted_tokens += num_accepted

    def forget_request(self, request: Request) -> None:
        """A request has ended, or lost its memory. It may come back."""
        if self._proposer is not None:
            self._proposer.forget_request(request)
            self._lengths.forget_request(request)
        self._excluded.discard(request)

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless the books of what guesses add up."""
        if self._proposer is not None:
            self._proposer.check_integrity()

    def check_idle(self) -> None:
        """Raise `IntegrityError` unless all requests are forgotten."""
        self.check_integrity()
        remembered = self._lengths.num_requests if self._proposer is not None else 0
        if remembered or self._excluded:
            raise IntegrityError(f"{remembered or len(self._excluded)} requests that have ended are not forgotten")

    def close(self) -> None:
        """Give everything back, opened or not."""
        if self._proposer is not None:
            self._proposer.close()
            self._proposer = None
        elif self._draft is not None:
            self._draft.close()

    def _exclude(self, requests: Sequence[Request], error: BaseException) -> None:
        names = ", ".join(request.request_id for request in requests)
        logger.error("no more guesses for %s: guessing failed", names, exc_info=error)
        for request in requests:
            self.forget_request(request)
        self._excluded.update(requests)

    def _cut(self, request: Request, guesses: list[int]) -> list[int]:
        """Nothing follows a token that ends the output."""
        params = request.params
        for i, token_id in enumerate(guesses):
            if token_id in params.stop_token_ids or (token_id in self._eos_token_ids and not params.ignore_eos):
                return guesses[: i + 1]
        return guesses


def _can_speculate(request: Request) -> bool:
    several = request.params.use_beam_search or request.num_forks
    return not several and request.pin_name is None and request.sampling.can_look_ahead
