"""Status of a replica, for routers, operators and metrics."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING

from folio.app.errors import UnavailableError
from folio.app.fleet.status import ModelReport, ReplicaStatus, unloaded_report

if TYPE_CHECKING:
    from folio.app.shelf.shelf import Shelf


def replica_status(shelf: Shelf, name: str, host: str = "", *, most_keys: int = 0) -> ReplicaStatus:
    """The status of this moment; may wait for the memory's lock. A model whose engine has stopped, but not the shelf,
    has the load of a model that has not been loaded.

    Args:
        name: of the replica.
        host: this machine's address, where engines of other machines get blocks.
        most_keys: in each engine's load.

    Raises:
        UnavailableError: the shelf serves no requests any more.
    """
    shelf.check()
    engines, models = shelf.engines(), []
    for status in shelf.statuses():
        report = ModelReport(status, unloaded_report(status, time.monotonic()))
        if (engine := engines.get(status.name)) is not None:
            with suppress(UnavailableError):
                load, memory = engine.load(most_keys=most_keys), engine.report()
                report = ModelReport(status, load, memory, engine.fingerprints.outputs, engine.held_at(host))
        models.append(report)
    ready_s = sum(engine.start_times.ready_s for engine in engines.values())
    return ReplicaStatus(name, ready_s, tuple(models), shelf.device_status(), shelf.gpu_memory())
