"""What would be told to Ray, written down."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from ray.serve import metrics

Told = list[tuple[str, float, dict[str, str]]]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    """(name, value, tags) of every call, in order."""
    calls: Told = []

    class Metric:
        def __init__(
            self,
            name: str,
            description: str,
            tag_keys: tuple[str, ...] = (),
            boundaries: Sequence[float] = (),
        ) -> None:
            assert description.endswith(".")
            assert sorted(boundaries) == list(boundaries)
            self.info = {"name": name}
            self._name, self._tag_keys = name, tag_keys

        def inc(self, value: float, tags: dict[str, str]) -> None:
            assert value > 0  # else Ray raises
            self.set(value, tags)

        def observe(self, value: float, tags: dict[str, str] | None = None) -> None:
            self.set(value, tags)

        def set(self, value: float, tags: dict[str, str] | None = None) -> None:
            assert set(tags or {}) == set(self._tag_keys)
            calls.append((self._name, value, dict(tags or {})))

    for kind in ("Counter", "Gauge", "Histogram"):
        replacement: Any = Metric
        monkeypatch.setattr(metrics, kind, replacement)
    return calls
