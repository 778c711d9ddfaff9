"""Jobs of a stage, and what came of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Job:
    """One process.

    Attributes:
        argv: arguments of the interpreter.
        limit_s: time after which it is killed.
        alone: it measures time, so no other job runs beside it.
    """

    name: str
    argv: tuple[str, ...]
    limit_s: float
    alone: bool = True


@dataclass(frozen=True, slots=True)
class Outcome:
    """End of a job. `reason` says why it failed or was not run, and is empty if it succeeded; `tail` has its last
    lines."""

    job: Job
    seconds: float
    reason: str
    tail: tuple[str, ...]
