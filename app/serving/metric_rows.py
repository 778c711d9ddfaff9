"""Prometheus metrics as tables: each row names a metric and reads its values from a status."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ray.serve import metrics

# Half of the time between two exports of Ray, so that a gauge is in each of them.
_REPEAT_S = 5.0

Status = TypeVar("Status")
Tags = Mapping[str, str]
Value = float | Sequence[float] | None


@dataclass(frozen=True, slots=True)
class Row(Generic[Status]):
    """One metric.

    Attributes:
        get: returns the value; of a sequence each value is recorded. A mapping has them by the value of the last tag.
        tags: a tuple, though Ray's annotation allows one name only.
    """

    name: str
    help: str
    get: Callable[[Status], Value | Mapping[str, Value]]
    tags: Any = ("model",)
    buckets: Sequence[float] = ()

    def recorder(self) -> Callable[[float, Tags], None]:
        """Make the metric. Returns the function that records a value with its tags."""
        raise NotImplementedError


Rows = Sequence[Row[Status]]


class Gauge(Row[Status]):
    """The present value."""

    def recorder(self) -> Callable[[float, Tags], None]:
        return SteadyGauge(metrics.Gauge(self.name, self.help, self.tags)).set


class Total(Row[Status]):
    """A counter that rises to the value."""

    def recorder(self) -> Callable[[float, Tags], None]:
        return TotalCounter(metrics.Counter(self.name, self.help, self.tags)).rise_to


class Counter(Row[Status]):
    """A counter that is increased by the value."""

    def recorder(self) -> Callable[[float, Tags], None]:
        counter = metrics.Counter(self.name, self.help, self.tags)
        return lambda value, tags: counter.inc(value, dict(tags)) if value else None  # Ray refuses an increase by 0


class Histogram(Row[Status]):
    """The values, counted in `buckets`, which are upper bounds."""

    def recorder(self) -> Callable[[float, Tags], None]:
        histogram = metrics.Histogram(self.name, self.help, boundaries=list(self.buckets), tag_keys=self.tags)
        return lambda value, tags: histogram.observe(value, dict(tags))


class MetricTable(Generic[Status]):
    """Records the metrics of rows. One thread at a time."""

    def __init__(self, rows: Rows[Status]) -> None:
        self._rows = [(row.get, row.tags, row.recorder()) for row in rows]

    def note(self, status: Status, *tags: str) -> None:
        """Record a status. `tags`: the values of each row's first tags."""
        for get, names, record in self._rows:
            found = get(status)
            for tag, value in found.items() if isinstance(found, Mapping) else ((None, found),):
                named = dict(zip(names, tags if tag is None else (*tags, tag), strict=True))
                for each in value if isinstance(value, Sequence) else () if value is None else (value,):
                    record(each, named)


class SteadyGauge:
    """A gauge that is set again only where its value has changed, or after `_REPEAT_S`: Ray drops a gauge 20 s after it
    was last set."""

    def __init__(self, gauge: metrics.Gauge) -> None:
        self._gauge = gauge
        self._set: dict[tuple[str, ...], tuple[float, float]] = {}  # values of the tags → (value, time)

    def set(self, value: float, tags: Tags) -> None:
        key, now = tuple(tags.values()), time.monotonic()
        before = self._set.get(key)
        if before is None or before[0] != value or now - before[1] >= _REPEAT_S:
            self._gauge.set(value, dict(tags))
            self._set[key] = value, now


class TotalCounter:
    """A counter that is increased to totals, which begin again at 0 with a new engine."""

    def __init__(self, counter: metrics.Counter) -> None:
        self._counter = counter
        self._totals: dict[tuple[str, ...], float] = {}

    def rise_to(self, total: float, tags: Tags) -> None:
        key = tuple(tags.values())
        before = self._totals.get(key, 0)
        gained = total - before if total >= before else total
        self._totals[key] = total
        if gained > 0:  # Ray refuses an increase by 0
            self._counter.inc(gained, dict(tags))
