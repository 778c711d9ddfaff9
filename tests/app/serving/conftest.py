"""Metrics recorded instead of sent to Ray."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from ray.serve import metrics

Recorded = list[tuple[str, float, dict[str, str]]]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """(name, value, tags) of every call, in order."""
    calls: Recorded = []

    class Metric:
        def __init__(
            self, name: str, description: str, tag_keys: Sequence[str] = (), boundaries: Sequence[float] = ()
        ) -> None:
            assert description.endswith(".")
            assert sorted(boundaries) == list(boundaries)
            self.info = {"name": name}
            self._name, self._tag_keys = name, tag_keys

        def inc(self, value: float = 1, tags: dict[str, str] | None = None) -> None:
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
