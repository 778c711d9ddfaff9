"""Actors of shared tables in this process, in place of Ray's."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest
from ray.exceptions import RayActorError

from folio.app.serving import shared_table
from folio.app.serving.shared_table import SharedTable


class Actor:
    """An actor.

    Attributes:
        table: what it holds.
        dies: methods whose calls find it dead, before (or after) they have had their effect.
        late: calls that were made while it is a list; each gives its answer when it is called.
    """

    def __init__(self, table: Any) -> None:
        self.table = table
        self.is_dead = False
        self.dies: dict[str, bool] = {}
        self.late: list[Any] | None = None

    def __getattr__(self, method: str) -> Any:
        return _Method(self, method)


class _Method:
    def __init__(self, actor: Actor, method: str) -> None:
        self._actor, self._method = actor, method

    def remote(self, *args: Any) -> _Method:
        self._future: Future[Any] = Future()
        actor, has_effect = self._actor, self._actor.dies.get(self._method)
        if has_effect is not None and not has_effect:
            actor.is_dead = True
        if actor.is_dead:
            self._future.set_exception(RayActorError())
        elif actor.late is not None:
            actor.late.append(lambda: self._answer(args))
        else:
            self._answer(args)
        return self

    def future(self) -> Future[Any]:
        return self._future

    def _answer(self, args: tuple[Any, ...]) -> None:
        answer = getattr(self._actor.table, self._method)(*args)
        if self._method in self._actor.dies:
            self._actor.is_dead = True
            self._future.set_exception(RayActorError())
        elif not self._future.cancelled():
            self._future.set_result(answer)


class Actors:
    """Makes an actor when there is none of its name, or a dead one.

    Attributes:
        num_finds: how often one was looked for.
    """

    def __init__(self, make: Any) -> None:
        self.num_finds = 0
        self._make = make
        self._by_name: dict[str, Actor] = {}

    def of(self, name: str, *, creates: bool = True) -> Actor:
        found = self._by_name.get(name)
        if (found is None or found.is_dead) and creates:
            found = self._by_name[name] = Actor(self._make())
        assert found is not None
        return found

    def find(self, table: SharedTable, creates: bool) -> Actor | None:
        self.num_finds += 1
        return self.of(table._name) if creates or table._name in self._by_name else None


def patched_actors(monkeypatch: pytest.MonkeyPatch, make: Any) -> Actors:
    """Actors whose tables are made by `make`."""
    actors = Actors(make)
    monkeypatch.setattr(SharedTable, "_find", lambda table, creates: actors.find(table, creates))
    monkeypatch.setattr(shared_table.ray, "get", lambda reference, timeout: reference.future().result())
    monkeypatch.setattr(shared_table, "_STARTS_S", 0.0)
    return actors
