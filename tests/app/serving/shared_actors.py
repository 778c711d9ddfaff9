"""Actors of shared tables in this process, in place of Ray's."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from folio.app.serving import shared_table


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

    # ---- of `ray` ----

    def get_actor(self, name: str, namespace: str) -> Actor:
        if name not in self._by_name:
            raise ValueError(f"there is no actor {name}")
        return self._found(name)

    def remote(self, kind: type) -> Any:
        options = lambda name, **_: SimpleNamespace(remote=lambda: self._found(name))  # noqa: E731
        return SimpleNamespace(options=options)

    def get(self, reference: _Method, timeout: float) -> Any:
        return reference.future().result()

    def _found(self, name: str) -> Actor:
        self.num_finds += 1
        return self.of(name)


def patched_actors(monkeypatch: pytest.MonkeyPatch, make: Any) -> Actors:
    """Actors whose tables are made by `make`."""
    actors = Actors(make)
    monkeypatch.setattr(shared_table, "ray", actors)
    monkeypatch.setattr(shared_table, "_STARTS_S", 0.0)
    return actors
