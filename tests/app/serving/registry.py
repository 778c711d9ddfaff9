"""A registry of models and adapters in this process, in place of Ray's actor."""

from __future__ import annotations

import pytest

from folio.app.fleet.loaded import LoadedRegistry
from tests.app.serving.shared_actors import Actor, patched_actors


class Cluster:
    """The registry of an application, which is made when there is none, or a dead one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, application: str) -> None:
        self.actors = patched_actors(monkeypatch, lambda: LoadedRegistry(settling_s=0.0))
        self._name = f"folio-loaded:{application}"

    @property
    def actor(self) -> Actor:
        return self.actors.of(self._name)

    @property
    def registry(self) -> LoadedRegistry:
        registry: LoadedRegistry = self.actor.table
        return registry


def patched_cluster(monkeypatch: pytest.MonkeyPatch, application: str = "folio") -> Cluster:
    """A registry for an application's replicas and ingresses in this process."""
    return Cluster(monkeypatch, application)
