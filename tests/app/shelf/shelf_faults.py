"""Injected failures for tests of the shelf: each one hits a known model, and says whether its requests may fail."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from folio.app.engine.async_engine import AsyncEngine
from folio.app.engine.engine import Engine
from folio.app.models.weights.arena import WeightArena
from folio.app.models.weights.file import write_all
from folio.app.models.weights.store import Contents, StoredWeights, WeightStore
from folio.app.shelf import control
from folio.app.shelf.shelf import Shelf
from folio.app.shelf.shelved_model import ShelvedModel
from folio.vmem import IntegrityError, MapError, OutOfPages
from folio.vmem.backends.host import HostBackend
from tests.app.shelf.shelves import arenas_of, device_of, members_of

_MOVE = "folio-move-"  # name of the thread that loads or wakes a model, before the model's name

# (what fails, in how many calls at most, the error)
FAULTS: list[tuple[str, int, Callable[[], BaseException]]] = [
    ("HostBackend.create", 40, lambda: OutOfPages(1, 0)),
    ("HostBackend.create", 40, lambda: MapError("injected")),
    ("HostBackend._map", 60, lambda: MapError("injected")),
    ("WeightArena.map", 3, lambda: OutOfPages(1000, 0, unit="bytes")),
    ("WeightArena.map", 3, lambda: MapError("injected")),
    ("Engine.step", 60, lambda: RuntimeError("injected")),
    ("Engine.step", 60, lambda: IntegrityError("injected")),
    ("Engine.sleep", 2, lambda: MapError("injected")),
    ("Engine.wake", 2, lambda: MapError("injected")),
    ("AsyncEngine", 1, lambda: OSError(errno.EIO, "injected")),
]


class Faults:
    """Failures at a later call.

    Attributes:
        counts: of the failures so far, by what failed.
        unexplained: models that failed although nothing of theirs had.
        disk_is_full: writes of weight files fail.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts: Counter[str] = Counter()
        self.unexplained: list[str] = []
        self.disk_is_full = False
        self._armed: dict[str, tuple[int, BaseException]] = {}
        self._owners: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()  # → name of the model
        self._hits: defaultdict[str, list[float]] = defaultdict(list)  # name → times of failures
        self._pending: set[str] = set()  # models hit since they were last set to "failed"
        for kind, name in (
            (HostBackend, "create"),
            (HostBackend, "_map"),
            (WeightArena, "map"),
            (Engine, "step"),
            (Engine, "sleep"),
            (Engine, "wake"),
        ):
            self._patch(monkeypatch, kind, name)
        real_set_failed = ShelvedModel.set_failed

        def load(*args: Any, **kwargs: Any) -> AsyncEngine:
            self._call("AsyncEngine", None)
            return AsyncEngine(*args, **kwargs)

        def set_failed(model: ShelvedModel, error: Exception, retry_s: float | None = None) -> None:
            real_set_failed(model, error, retry_s)
            if retry_s is not None:  # removed
                return
            if model.name not in self._pending:
                self.unexplained.append(f"{model.name}: {error!r}")
            self._pending.discard(model.name)
            self._hits[model.name].append(time.monotonic())

        self._count_sources(monkeypatch)
        monkeypatch.setattr(control, "AsyncEngine", load)
        monkeypatch.setattr(ShelvedModel, "set_failed", set_failed)

    def arm(self, dice: random.Random) -> None:
        """Let one of the next calls of something fail."""
        kind, calls, error = dice.choice(FAULTS)
        self._armed[kind] = dice.randrange(calls), error()

    def disarm(self) -> None:
        self._armed.clear()
        self.disk_is_full = False

    def hit(self, name: str, since: float) -> bool:
        """Whether a failure may have ended requests of a model since a time."""
        return bool(self._hits[name]) and self._hits[name][-1] > since

    def write(self, fd: int, data: memoryview, offset: int) -> None:
        """Write to a weight file, on a disk that may be full."""
        if self.disk_is_full:
            self.counts["write"] += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_all(fd, data, offset)

    def _count_sources(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Count where weights come from."""
        real_provide, real_map, real_open = WeightStore.provide, WeightStore.map, StoredWeights.open

        def provide(store: WeightStore, *args: Any) -> Contents:
            contents = real_provide(store, *args)
            self.counts["weights in memory" if contents.in_memory else "weights in a file"] += 1
            return contents

        def map_file(store: WeightStore, *args: Any) -> WeightArena:
            self.counts["loaded from a file"] += 1
            return real_map(store, *args)

        def open_stored(stored: StoredWeights) -> tuple[int, int]:
            self.counts["made again"] += stored._contents is None
            self.counts["from memory"] += stored._host_bytes > 0
            return real_open(stored)

        monkeypatch.setattr(WeightStore, "provide", provide)
        monkeypatch.setattr(WeightStore, "map", map_file)
        monkeypatch.setattr(StoredWeights, "open", open_stored)

    def _patch(self, monkeypatch: pytest.MonkeyPatch, kind: type, name: str) -> None:
        real = getattr(kind, name)

        def call(this: Any, *args: Any) -> Any:
            self._call(f"{kind.__name__}.{name}", this)
            return real(this, *args)

        monkeypatch.setattr(kind, name, call)

    def _call(self, what: str, this: object) -> None:
        thread = threading.current_thread().name
        if thread.startswith(_MOVE):
            owner: str | None = thread.removeprefix(_MOVE)
            if this is not None and this not in self._owners:
                self._owners[this] = owner
        else:
            owner = self._owners.get(this)
        if owner is None or what not in self._armed:  # an engine of no shelf
            return
        calls, error = self._armed[what]
        if calls:
            self._armed[what] = calls - 1, error
            return
        del self._armed[what]
        self.counts[f"{what} {type(error).__name__}"] += 1
        if not isinstance(error, OutOfPages):  # for memory, requests wait
            self._hits[owner].append(time.monotonic())
            self._pending.add(owner)
        raise error


class Mount:
    """Files that do not answer to one model's thread.

    Attributes:
        asked: the thread waits for them.
        answers: set to let it go on.
        num_calls: by this thread.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, model: str) -> None:
        self.asked, self.answers, self.num_calls = threading.Event(), threading.Event(), 0
        real = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread().name == _MOVE + model:
                self.num_calls += 1
                self.asked.set()
                assert self.answers.wait(60)
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)


def damage_a_file(shelf: Shelf, dice: random.Random) -> str | None:
    """Truncate, change, replace or remove a weight file that is mapped nowhere, in the step thread.

    Returns: what was done; `None` if all files are, or may be, in use.
    """
    if (members := members_of(shelf)) is None:
        return None
    mapped = set()
    for member in members:
        for arena in arenas_of(member.engine):
            if arena.is_mapped:
                source: Any = arena._source
                mapped.add(os.fstat(source._contents.fd).st_ino)
    folder = device_of(shelf).shared.weights._folder
    paths = [path for path in sorted(folder.glob("*.weights")) if path.stat().st_ino not in mapped]
    if not paths:
        return None
    path, damage = dice.choice(paths), dice.choice(["truncate", "change", "replace", "remove"])
    num_bytes = path.stat().st_size
    path.chmod(0o600)
    if damage == "truncate":
        os.truncate(path, dice.randrange(num_bytes))
    elif damage == "change":
        with path.open("r+b") as file:
            file.seek(dice.randrange(num_bytes))
            file.write(bytes([dice.randrange(256) for _ in range(5000)]))
            file.truncate(num_bytes)
    else:
        path.unlink()
        if damage == "replace":
            path.write_bytes(dice.randbytes(5000))
    return damage
