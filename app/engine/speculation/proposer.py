"""What guesses tokens: the engine checks them all in one step, and keeps those that it would have chosen itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from app.engine.report import StepTimes
from app.engine.request import Request


class Proposer(Protocol):
    """Guesses how requests go on. One thread calls it. A request's `token_ids` must only ever grow."""

    name: str
    """For metrics."""

    @property
    def step_times(self) -> StepTimes:
        """What one more guess for each of several requests costs, as measured so far; all 0 if that is next to
        nothing."""
        ...

    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> list[list[int]]:
        """For each request at most `most[i]` guesses of the tokens that follow all of `token_ids`; perhaps none. Raises
        `SequenceFailure` for a request that has to be forgotten; the books add up then."""
        ...

    def forget_request(self, request: Request) -> None:
        """Give up what is kept for a request. It may come back; nothing happens if nothing is kept."""
        ...

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless its books add up."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


@dataclass(slots=True)
class SpeculationCounts:
    """What has come of guesses.

    Attributes:
        proposer: who made them.
        draft_tokens: guesses that were checked.
        accepted_tokens: those that were right, and behind right ones only.
        checks: how often a request had any.
    """

    proposer: str
    draft_tokens: int = 0
    accepted_tokens: int = 0
    checks: int = 0
