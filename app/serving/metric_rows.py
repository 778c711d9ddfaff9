"""Prometheus metrics as tables: each row names a metric and reads its values from a status."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ray.serve import metrics

# Half of the time between two exports of Ray, so that a gauge is in each of them.
_REPEAT_S = 5.0

Status = TypeVar("Status")
Value = float | list[Any]


@dataclass(frozen=True, slots=True)
class Row(ABC, Generic[Status]):
    """One metric.

    Attributes:
        get: returns the value, a list whose values are each recorded, a dictionary from values of the last tag to
            either of these, or `None` to record nothing.
        tags: a tuple, though Ray's annotation allows one name only.
        buckets: upper bounds, of a histogram.
    """

    name: str
    help: str
    get: Callable[[Status], Value | dict[str, Any] | None]
    tags: Any = ("model",)
    buckets: Sequence[float] = ()

    @abstractmethod
    def recorder(self) -> Callable[[float, dict[str, str]], None]:
        """Make the metric. Returns the function that records a value with its tags."""


Rows = Sequence[Row[Status]]


class Gauge(Row[Status]):
    """The present value. It is set again only where it has changed, or after `_REPEAT_S`: Ray drops a gauge 20 s after
    it was last set."""

    def recorder(self) -> Callable[[float, dict[str, str]], None]:
        gauge = metrics.Gauge(self.name, self.help, self.tags)
        last: dict[tuple[str, ...], tuple[float, float]] = {}  # values of the tags → (value, time)

        def record(value: float, tags: dict[str, str]) -> None:
            key, now = tuple(tags.values()), time.monotonic()
            before = last.get(key)
            if before is None or before[0] != value or now - before[1] >= _REPEAT_S:
                gauge.set(value, tags)
                last[key] = value, now

        return record


class Counter(Row[Status]):
    """The value is added."""

    def recorder(self) -> Callable[[float, dict[str, str]], None]:
        counter = metrics.Counter(self.name, self.help, self.tags)
        return lambda value, tags: counter.inc(value, tags) if value > 0 else None  # Ray refuses an increase by 0


class Total(Counter[Status]):
    """A counter that follows a running total. The total begins again at 0 with a new engine."""

    def recorder(self) -> Callable[[float, dict[str, str]], None]:
        add, totals = Counter.recorder(self), dict[tuple[str, ...], float]()

        def record(value: float, tags: dict[str, str]) -> None:
            before = totals.get(key := tuple(tags.values()), 0)
            totals[key] = value
            add(value - before if value >= before else value, tags)

        return record


class Histogram(Row[Status]):
    """The values, counted in buckets."""

    def recorder(self) -> Callable[[float, dict[str, str]], None]:
        return metrics.Histogram(self.name, self.help, boundaries=list(self.buckets), tag_keys=self.tags).observe


class MetricTable(Generic[Status]):
    """Records the metrics of rows. One thread at a time."""

    def __init__(self, rows: Rows[Status]) -> None:
        self._rows = [(row.get, row.tags, row.recorder()) for row in rows]

    def note(self, status: Status, *tags: str) -> None:
        """Record a status. `tags`: the values of each row's first tags."""
        common: dict[tuple[str, ...], dict[str, str]] = {}
        for get, names, record in self._rows:
            found = get(status)
            if isinstance(found, dict):
                named = dict(zip(names, tags, strict=False))
                for tag, value in found.items():
                    _record(record, value, named | {names[-1]: tag})
            elif found is not None:
                if (shared := common.get(names)) is None:
                    shared = common[names] = dict(zip(names, tags, strict=True))
                _record(record, found, shared)


def _record(record: Callable[[float, dict[str, str]], None], value: Value, tags: dict[str, str]) -> None:
    for each in value if isinstance(value, list) else (value,):
        record(each, tags)
