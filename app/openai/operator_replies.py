"""What operators and load balancers are told: the load of replicas, and pinned prefixes.

From what engine replicas say of themselves to what operators are told.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Literal, Protocol

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict

from app.fleet.messages import ReplicaStatus
from vmem import MemoryReport, PinReport


class _Report(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)


class LoadFigures(_Report):
    """Of one engine replica, or the sum of all. Bytes are of the KV cache."""

    num_running: int
    """Sequences that have memory."""
    num_waiting: int
    """Sequences that have none yet, or have been preempted."""
    queued_tokens: int
    """Of prompts, not computed yet."""
    free_tokens: int
    """The KV cache has room for so many more, cached ones given up."""
    total_tokens: int
    """Tokens that it holds within the budget."""
    budget_bytes: int
    physical_bytes: int
    """Taken from the device."""
    active_bytes: int
    """Owned by requests and pinned prefixes."""
    cached_bytes: int
    """Kept for requests that begin alike, and given up when there is need."""
    pinned_bytes: int
    swapped_bytes: int
    """Host memory of preempted requests."""
    prompt_tokens: int
    """Of all requests since the start."""
    cached_tokens: int
    """How many of these the prefix cache had."""


class ReplicaLoad(LoadFigures):
    name: str
    queued_s: float
    """Expected time to compute what is queued."""
    busy_share: float
    """Of the last seconds, in steps that compute prompts."""
    max_num_seqs: int
    """Sequences that run at once."""
    ready_s: float
    """Seconds from the start of its engine until it was ready."""


class LoadReport(_Report):
    """Every engine replica that has answered, in order of their names; `num_silent` have not."""

    object: Literal["load"] = "load"
    num_replicas: int
    num_silent: int
    total: LoadFigures
    least_queued_s: float | None
    """Of the replica that is free first; null when none has answered."""
    replicas: list[ReplicaLoad]


class PinCard(_Report):
    """A pinned prefix. Replicas that have started since it was pinned by a request may not have it."""

    id: str
    object: Literal["pin"] = "pin"
    num_tokens: int
    num_bytes: int
    """On one replica, with blocks that it shares with other pins."""
    num_replicas: int
    """That have it."""


class PinList(BaseModel):
    object: Literal["list"] = "list"
    data: list[PinCard]


class PinDeleted(BaseModel):
    id: str
    object: Literal["pin"] = "pin"
    deleted: Literal[True] = True


class HasReports(Protocol):
    async def reports(self) -> dict[str, MemoryReport]: ...


def add_memory_route(api: FastAPI, service: HasReports) -> None:
    """Below `/v1/load`, so that it is for operators, too."""

    @api.get("/v1/load/memory", tags=["operation"])
    async def memory() -> dict[str, MemoryReport]:
        """The KV memory of every engine replica, by its name, in detail."""
        return await service.reports()


def load_report(answers: Sequence[Any]) -> LoadReport:
    """Args: of every replica its `ReplicaStatus`, or the error instead of it."""
    statuses = sorted(_statuses(answers), key=lambda status: status.name)
    replicas = [ReplicaLoad(**_without_pins(status)) for status in statuses]
    total = LoadFigures(
        **{name: sum(getattr(replica, name) for replica in replicas) for name in LoadFigures.model_fields}
    )
    return LoadReport(
        num_replicas=len(answers),
        num_silent=len(answers) - len(replicas),
        total=total,
        least_queued_s=min((replica.queued_s for replica in replicas), default=None),
        replicas=replicas,
    )


def pin_list(answers: Sequence[Any]) -> PinList:
    """Args: as above. Raises the first error when no replica has answered."""
    statuses = _statuses(answers)
    if answers and not statuses:
        raise answers[0]
    found: defaultdict[str, list[PinReport]] = defaultdict(list)
    for status in statuses:
        for pin in status.pins:
            found[pin.name].append(pin)
    return PinList(
        data=[
            PinCard(
                id=name,
                num_tokens=pins[0].num_tokens,
                num_bytes=max(pin.num_bytes for pin in pins),
                num_replicas=len(pins),
            )
            for name, pins in sorted(found.items())
        ]
    )


def _statuses(answers: Sequence[Any]) -> list[ReplicaStatus]:
    return [answer for answer in answers if isinstance(answer, ReplicaStatus)]


def _without_pins(status: ReplicaStatus) -> dict[str, Any]:
    fields = asdict(status)
    del fields["pins"]
    return fields
