"""Proposer: the Protocol of methods that propose draft tokens, and counts of their acceptance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from app.engine.report import StepTimes
from app.engine.request import Request


class Proposer(Protocol):
    """Proposes draft tokens, for one thread. A request's `token_ids` may only grow."""

    name: str
    """For metrics."""

    @property
    def step_times(self) -> StepTimes:
        """Measured cost of one further draft token for each of several requests; all 0 if negligible."""
        ...

    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> list[list[int]]:
        """For each request at most `most[i]` draft tokens to follow `token_ids`, possibly none. Raises
        `SequenceFailure` for a request that must be forgotten; the state is consistent then."""
        ...

    def forget_request(self, request: Request) -> None:
        """Free a request's state, if it has any. The request may come back."""
        ...

    def check_integrity(self) -> None:
        """Raise `IntegrityError` if the state is inconsistent."""
        ...

    def close(self) -> None:
        """Free everything."""
        ...


@dataclass(slots=True)
class SpeculationCounts:
    """Counts of draft tokens.

    Attributes:
        proposer: the method's name.
        draft_tokens: verified draft tokens.
        accepted_tokens: accepted ones among them.
        checks: verifications, one for each request and step with draft tokens.
    """

    proposer: str
    draft_tokens: int = 0
    accepted_tokens: int = 0
    checks: int = 0
