"""Status of a replica, for routers, operators and metrics."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from folio.app.errors import UnavailableError
from folio.app.fleet.status import ModelReport, ReplicaStatus, unloaded_report

if TYPE_CHECKING:
    from folio.app.engine.shelf.shelf import Shelf


def replica_status(shelf: Shelf, name: str, *, most_keys: int = 0) -> ReplicaStatus:
    """The status of this moment; may wait for the memory's lock. Where models share a device, one whose engine has
    stopped has the load of a model that has not been loaded.

    Args:
        name: of the replica.
        most_keys: in each engine's load.

    Raises:
        UnavailableError: the only engine has stopped.
    """
    engines, device = shelf.engines(), shelf.device_status()
    models = []
    for status in shelf.statuses():
        engine = engines.get(status.name)
        try:
            if engine is not None:
                models.append(ModelReport(status, engine.load(most_keys=most_keys), engine.report()))
                continue
        except UnavailableError:
            if device is None:
                raise
        models.append(ModelReport(status, unloaded_report(status, time.monotonic())))
    ready_s = sum(engine.start_times.ready_s for engine in engines.values())
    return ReplicaStatus(name, ready_s, tuple(models), device, shelf.gpu_memory())
