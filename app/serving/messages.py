"""What travels between the ingress and an engine replica."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from app.engine.params import SamplingParams
from app.fleet.report import ReplicaReport, StepTimes

_REPORT_FIELDS = {field.name for field in fields(ReplicaReport)}
_STEP_FIELDS = {field.name for field in fields(StepTimes)}


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A tokenised prompt and how to continue it.

    `priority`, `cache_salt`, `adapter`, `tenant`, `user`, `timeout_s`: see `RequestOptions`; `session`: what belongs
    together, a hint for the router; `expected`: the router's word for what a replica has cached of the prompt.

    Attributes:
        refused_by: replicas whose queues were full a moment ago: to be asked last.
        stopped: replicas whose engines have stopped: not to be asked.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None
    adapter: str | None = None
    tenant: str | None = None
    user: str | None = None
    timeout_s: float | None = None
    session: str | None = None
    expected: Expected | None = None
    refused_by: tuple[str, ...] = ()
    stopped: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ForkCall:
    """Go on with output `index` of the request `fork_of` in `params.n` more ways, at the `replica` that has it."""

    request_id: str
    fork_of: str
    index: int
    replica: str
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Expected:
    """Tokens that a router expects to be cached at a replica; another one that gets the request may ignore it."""

    replica: str
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """What the ingress tells clients about the model."""

    max_model_len: int


def report_as_stats(report: ReplicaReport) -> dict[str, Any]:
    """The report in plain types: it passes through Serve's controller, which knows nothing of Folio."""
    return asdict(report)


def report_from_stats(stats: Mapping[str, Any]) -> ReplicaReport | None:
    """What `report_as_stats` was given; `None` if that was another version of it, as in the middle of an update."""
    if stats.keys() != _REPORT_FIELDS or not isinstance(stats["step"], dict) or stats["step"].keys() != _STEP_FIELDS:
        return None
    return ReplicaReport(**{**stats, "step": StepTimes(**stats["step"])})
