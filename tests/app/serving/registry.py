"""A registry of adapters in this process, in place of Ray's actor."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest
from ray.exceptions import RayActorError

from folio.app.fleet.loaded import LoadedRegistry
from folio.app.serving import loaded as loaded_module


class Actor:
    """The registry's actor.

    Attributes:
        dies: methods whose calls find it dead, before (or after) they have had their effect.
        starts: it does not answer yet.
    """

    def __init__(self, settling_s: float = 0.0) -> None:
        self.registry = LoadedRegistry(settling_s)
        self.is_dead = self.starts = False
        self.dies: dict[str, bool] = {}

    def __getattr__(self, method: str) -> Any:
        return _Method(self, method)


class _Method:
    def __init__(self, actor: Actor, method: str) -> None:
        self._actor, self._method = actor, method

    def remote(self, *args: Any) -> _Method:
        self._future: Future[Any] = Future()
        actor, has_effect = self._actor, self._actor.dies.get(self._method)
        if actor.starts:
            return self
        if not actor.is_dead and has_effect is not False:
            self._future.set_result(getattr(actor.registry, self._method)(*args))
        if has_effect is not None:
            actor.is_dead = True
        if actor.is_dead:
            self._future = Future()
            self._future.set_exception(RayActorError())
        return self

    def future(self) -> Future[Any]:
        return self._future


class Cluster:
    """Makes a registry when there is none, or a dead one."""

    def __init__(self, name: str) -> None:
        self.actor = Actor()
        self.num_finds = 0
        self._name = name

    def find(self, kind: type, name: str) -> Actor:
        assert (kind, name) == (LoadedRegistry, self._name)
        self.num_finds += 1
        if self.actor.is_dead:
            self.actor = Actor()
        return self.actor


def patched_cluster(monkeypatch: pytest.MonkeyPatch, application: str = "folio") -> Cluster:
    """A registry for an application's replicas and ingresses in this process."""
    cluster = Cluster(f"folio-loaded:{application}")
    monkeypatch.setattr(loaded_module, "find_actor", cluster.find)
    monkeypatch.setattr(loaded_module.ray, "get", lambda reference, timeout: reference.future().result())
    return cluster
