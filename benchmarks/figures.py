"""The benchmarks and their figures, from `figures.yaml`: what each key means, its aim, and what it is measured against.

`BENCHMARKS` is in the order of a full run; results of a GPU alone are last.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import yaml

_COMPARISONS: dict[str, Callable[[float, float], bool]] = {"≥": operator.ge, "≤": operator.le, "=": operator.eq}


@dataclass(frozen=True, slots=True)
class Figure:
    r"""Keys with one meaning.

    Attributes:
        key: a regular expression for the whole key.
        meaning: may contain \1, \2 … for the key's groups.
        aim: such as "≥ 0.98"; empty for figures that are only reported.
        rival: what the figure is measured against, in the same run.
        argued: the aim that was set first, and why it is another one, or none, now.
    """

    key: str
    meaning: str
    aim: str = ""
    rival: str = ""
    argued: str = ""

    def meaning_of(self, key: str) -> str | None:
        """The meaning of this key; `None` if it is not one of these."""
        match = re.fullmatch(self.key, key)
        return match.expand(self.meaning).replace("_", " ") if match else None

    def is_met(self, value: float) -> bool:
        """Whether a value meets the aim, which there must be."""
        sign, bound = self.aim.split()
        return _COMPARISONS[sign](value, float(bound))


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A benchmark, or one way of running it.

    Attributes:
        name: of its result's file; for results of a GPU alone, a regular expression for all of it.
        what: what is measured, in a sentence.
        command: module and arguments of the full run; empty if there is none, and `benchmarks.gpu_day` runs it.
        minutes: of a full run on two cores, estimated before the first run that recorded it.
        quick: whether `make bench` runs it with `--quick`.
        dtype: that of the measured tensors (`facts.noted_dtypes`); a result of another one is refused. Empty for
            benchmarks that measure no tensors, or only those of other processes.
        measures: files and folders whose code the figures depend on (`benchmarks.measured`); by default, the server's.
    """

    name: str
    what: str
    command: tuple[str, ...]
    minutes: int
    quick: bool
    figures: tuple[Figure, ...]
    dtype: str = ""
    measures: tuple[str, ...] = ("app", "kernels", "vmem")

    def figure(self, key: str) -> Figure | None:
        """The entry for a key."""
        return next((figure for figure in self.figures if figure.meaning_of(key) is not None), None)

    def check_dtype(self, dtype: str | None) -> None:
        """Raise `ValueError` if a result has not this row's dtype."""
        if self.dtype and dtype != self.dtype:
            raise ValueError(
                f"the result of {self.name} is of {dtype or 'no recorded dtype'}, and benchmarks/figures.yaml says "
                f"{self.dtype}: measure it again in that dtype, or change the row"
            )


def _read() -> tuple[Benchmark, ...]:
    rows = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
    lists = ("command", "measures")
    return tuple(
        Benchmark(
            **row
            | {name: tuple(row[name]) for name in lists if name in row}
            | {"figures": tuple(Figure(**f) for f in row["figures"])}
        )
        for row in rows
    )


BENCHMARKS = _read()
BY_NAME = {benchmark.name: benchmark for benchmark in BENCHMARKS}


def row_of(name: str) -> Benchmark | None:
    """The entry for a result's name; `None` if there is none."""
    return next((benchmark for benchmark in BENCHMARKS if re.fullmatch(benchmark.name, name)), None)
