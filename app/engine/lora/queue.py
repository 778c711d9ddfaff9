"""Adapter queue: requests that wait for an adapter, before the scheduler's waiting queue.

Requests without an adapter pass at once. The others are first come, first served within priority: behind a request that
waits for a slot, later ones wait even if their adapter is loaded, because adapters in constant use could never be
evicted. A request whose adapter is being read already has a slot and does not block others.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from operator import attrgetter

from app.engine.faults import failure_of
from app.engine.lora.store import AdapterStore
from app.engine.request import Request, SequenceGroup
from app.engine.scheduler import Scheduler
from app.errors import FolioError, UnknownModelError


class AdapterQueue:
    """For the engine's thread, where nothing else is stated.

    Args:
        store: keeps adapters that a request of the scheduler uses; `None` without adapters.
    """

    def __init__(self, store: AdapterStore | None, scheduler: Scheduler) -> None:
        self._store = store
        self._scheduler = scheduler
        self._held: list[SequenceGroup] = []  # in queue order

    @property
    def waiting_groups(self) -> list[Request]:
        """Requests that wait for an adapter. From any thread."""
        return [request for group in tuple(self._held) for request in tuple(group.members)]

    @property
    def slots(self) -> Mapping[str, int]:
        """Name → slot of every loaded adapter."""
        return {} if self._store is None else self._store.slots

    def check_adapter(self, name: str | None) -> None:
        """Raise `UnknownModelError` for an unknown adapter; `None` is always known. From any thread."""
        if name is None:
            return
        if self._store is None:
            raise UnknownModelError(f"there is no adapter {name!r}; this engine has none", "model")
        self._store.check_known(name)

    def add(self, group: SequenceGroup) -> None:
        """Pass a group to the scheduler once its adapter is loaded."""
        if group.adapter is None:
            self._scheduler.waiting.add(group)
        else:
            bisect.insort(self._held, group, key=attrgetter("sort_key"))

    def advance(self) -> dict[str, FolioError]:
        """Pass on groups whose adapter is loaded, and begin to load others as slots allow. Return failed requests with
        their errors; they have left the queue, and the caller ends them."""
        if self._store is None or not (self._held or self._store.loading):
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
                self._scheduler.waiting.add(group)
            else:
                self._held.append(group)
                blocked |= name not in self._store.loading
        return failed

    def wait(self, timeout_s: float) -> bool:
        """See `AdapterStore.wait`."""
        return self._store is not None and self._store.wait(timeout_s)

    def close(self) -> None:
        """Drop all adapters."""
        if self._store is not None:
            self._store.close()

    def _used(self) -> set[str]:
        return {request.group.adapter for request in self._scheduler.unfinished() if request.group.adapter is not None}
