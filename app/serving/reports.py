"""From what engine replicas say of themselves to what operators are told."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Protocol

from fastapi import FastAPI

from app.openai.operator_replies import LoadFigures, LoadReport, PinCard, PinList, ReplicaLoad
from app.serving.messages import ReplicaStatus
from vmem import MemoryReport, PinReport


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
