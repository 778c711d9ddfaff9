"""Requests whose adapter is not there yet.

They come to the scheduler when it is, so that nobody who needs no adapter waits for a file. Among those who do, it is
first come first served within priority: once somebody waits for a slot, whoever comes later with an adapter waits
behind, even if his own is loaded; or adapters that are always in use would never be dropped. Who waits for a file has
a slot already, and is passed by.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from operator import attrgetter

from app.engine.faults import failure_of
from app.engine.lora.store import AdapterReport, AdapterStore
from app.engine.request import Request, SequenceGroup
from app.engine.scheduler import Scheduler
from app.errors import FolioError, UnknownModelError


class AdapterQueue:
    """Stands before the scheduler; belongs to the engine's thread, unless something else is said.

    Args:
        store: whose adapters stay as long as the scheduler has a request for them; `None`: there are no adapters.
    """

    def __init__(self, store: AdapterStore | None, scheduler: Scheduler) -> None:
        self._store = store
        self._scheduler = scheduler
        self._held: list[SequenceGroup] = []  # in order of rank

    @property
    def waiting_groups(self) -> list[Request]:
        """Who waits here. From any thread."""
        return [request for group in tuple(self._held) for request in tuple(group.members)]

    @property
    def slots(self) -> Mapping[str, int]:
        """Where the adapters are that a step can use."""
        return {} if self._store is None else self._store.slots

    @property
    def report(self) -> AdapterReport:
        """From any thread."""
        return AdapterReport({}) if self._store is None else self._store.report

    def check_adapter(self, name: str | None) -> None:
        """Raise `UnknownModelError` unless there is such an adapter, or none is wanted. From any thread."""
        if name is None:
            return
        if self._store is None:
            raise UnknownModelError(f"there is no adapter {name!r}; this engine has none", "model")
        self._store.check_known(name)

    def add(self, group: SequenceGroup) -> None:
        """Hand a group on when its adapter is there, or now if it needs none."""
        if group.adapter is None:
            self._scheduler.add(group)
        else:
            bisect.insort(self._held, group, key=attrgetter("sort_key"))

    def advance(self) -> dict[str, FolioError]:
        """Hand on whose adapter is there, and begin to load those that there is a slot for; returns the requests whose
        adapter could not be loaded, and why. They are forgotten here, and have to be ended."""
        if self._store is None or not (self._held or self._store.num_loading):
            return {}
        failures = self._store.collect()
        held, self._held = self._held, []
        failed: dict[str, FolioError] = {}
        blocked = False
        for group in held:
            name = group.adapter
            assert name is not None
            if not group.members:  # cancelled
                continue
            request_id = group.members[0].request_id
            if (error := failures.get(name)) is not None:
                failed[request_id] = error
                continue
            try:
                is_ready = not blocked and self._store.ensure_loading(name, self._used)
            except BaseException as failure:  # noqa: BLE001 - raised again unless it is the request's
                failed[request_id] = failure_of(request_id, failure)
                continue
            if is_ready:
                self._scheduler.add(group)
            else:
                self._held.append(group)
                blocked |= not self._store.is_loading(name)
        return failed

    def wait(self, timeout_s: float) -> bool:
        """Wait until an adapter that is being loaded has been read; false if there is none to wait for."""
        return self._store is not None and self._store.wait(timeout_s)

    def close(self) -> None:
        """Drop all adapters."""
        if self._store is not None:
            self._store.close()

    def _used(self) -> set[str]:
        return {request.group.adapter for request in self._scheduler.unfinished() if request.group.adapter is not None}
