"""Writes `docs/benchmarks/papers.md` from `claims.yaml` and the committed results: each claim with the paper's figure,
ours, and where they differ by more than a third the reason, whose figures are measured, too.

Numbers are markers of `benchmarks.report`, which renews them with those of all other pages.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import yaml

from benchmarks import harness

PAGE = harness.ROOT / "docs" / "benchmarks" / "papers.md"
WITHIN = 1 / 3
_NUMBER = re.compile(r"\{([\w/-]+\.[\w.-]+)((?: x[\d.e-]+)?) ([^\s}]+)\}")


@dataclass(frozen=True, slots=True)
class Claim:
    """A row of a table.

    Attributes:
        claim: what the paper says, without its figure.
        paper: its figure, or its lowest and highest; none for claims without one.
        ours, here: benchmark and key of what is measured (simulated, or of this machine, where `here` is none), and on
            this machine.
        form: of numbers, as in f-strings; `times`: factor for all of ours.
        holds: "≥ 1.7": when the claim holds; by default within a third of the paper's figure.
        why: the reason of a difference; {benchmark.key form} is a measured figure.
        because: it is not repeated here, for this reason.
    """

    claim: str
    paper: tuple[float, ...] = ()
    ours: str = ""
    here: str = ""
    form: str = ".2f"
    times: float = 1.0
    unit: str = ""
    holds: str = ""
    why: str = ""
    because: str = ""

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Self:
        paper = row.get("paper", ())
        return cls(**{**row, "paper": tuple(paper) if isinstance(paper, list) else (paper,) if paper != () else ()})

    def value(self, key: str) -> float:
        """The measured figure, in the claim's unit."""
        return figure(key) * self.times

    def is_near(self, key: str) -> bool:
        """Whether the measured figure is within a third of the paper's."""
        return not self.paper or min(self.paper) * (1 - WITHIN) <= self.value(key) <= max(self.paper) * (1 + WITHIN)

    @property
    def is_held(self) -> bool:
        """Whether the claim holds here."""
        if not self.holds:
            return self.is_near(self.ours)
        sign, bound = self.holds.split()
        value = self.value(self.ours)
        return value >= float(bound) if sign == "≥" else value <= float(bound)

    @property
    def is_far(self) -> bool:
        """Whether a figure of ours differs from the paper's by more than a third, or the claim does not hold."""
        if self.because:
            return False
        return not self.is_held or any(key and not self.is_near(key) for key in (self.ours, self.here))

    def check(self) -> None:
        """Raise `ValueError` for a difference without a reason."""
        if self.is_far and not self.why:
            raise ValueError(f"claims.yaml: {self.claim!r} needs `why`: {self.cells()[2:]}, the paper: {self.paper}")

    def cells(self) -> list[str]:
        """The row's cells: mark and claim, the paper's figure, ours, ours on this machine."""
        if self.because:
            return [f"not here: {self.claim}", _said(self), self.because, ""]
        mark = ("✓ " if self.is_held else "✗ ") if self.paper or self.holds else ""
        ours, here = (marker(key, self.form, self.times) + self.unit if key else "" for key in (self.ours, self.here))
        return [f"{mark}{self.claim}", _said(self), ours, here]


def figure(key: str) -> float:
    """A figure of a committed result, by `[cuda/]benchmark.key`."""
    name, _, own = key.partition(".")
    device, _, benchmark = name.rpartition("/")
    return float(harness.committed(benchmark, device or "cpu")["figures"][own])


def marker(key: str, form: str, times: float = 1.0) -> str:
    """A figure in a page, as `benchmarks.report` renews it."""
    name, _, own = key.partition(".")
    factor = f" x{times:g}" if times != 1.0 else ""
    return f"<!--f {name}.{own}{factor} {form}-->{format(figure(key) * times, form)}<!--/f-->"


def _said(claim: Claim) -> str:
    return " to ".join(f"{value:g}" for value in claim.paper) + (claim.unit if claim.paper else "")


def with_figures(text: str) -> str:
    """The text with a marker for each {benchmark.key form}."""

    def put(match: re.Match[str]) -> str:
        key, factor, form = match.groups()
        return marker(key, form, float(factor.strip().removeprefix("x") or 1))

    return _NUMBER.sub(put, text)


def page() -> str:
    """The page."""
    described = yaml.safe_load(Path(__file__).with_name("claims.yaml").read_text())
    return "\n".join([*_head(described), *(line for s in described["sections"] for line in _section(s))]) + "\n"


def _head(described: Mapping[str, Any]) -> Iterator[str]:
    result = harness.committed("papers")
    machine = result["machine"]
    yield from (f"# {described['title']}", "", with_figures(described["intro"]).strip(), "")
    yield (
        f"Measured on {result['date'][:10]} on {machine['processor']}, {machine['cores']} cores, at commit "
        f"`{result['commit']}`, by `{result['command']}`; other benchmarks' figures have theirs in "
        f"[All figures](all-figures.md)."
    )
    yield ""


def _section(section: Mapping[str, Any]) -> Iterator[str]:
    claims = [Claim.of(row) for row in section["rows"]]
    yield from (f"## {section['title']}", "")
    if text := section.get("text"):
        yield from (with_figures(text).strip(), "")
    for name, shows in section.get("pictures", {}).items():
        yield from (f"![{shows}](pictures/{name}.png)", "")
    columns = section.get("columns", ("Simulated", "This machine"))
    head = ["", "Paper", *columns[: 1 + any(claim.here for claim in claims)]]
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for claim in claims:
        claim.check()
        yield f"| {' | '.join(claim.cells()[: len(head)])} |"
    reasons = [(claim.claim, claim.why) for claim in claims if claim.is_far and claim.why]
    if reasons:
        yield ""
    for name, why in reasons:
        yield f"- *{name}*: {with_figures(why).strip()}"
    yield ""


def write() -> None:
    """Write the page. Raises `ValueError` for a difference that is not explained, `KeyError` for an unknown figure."""
    PAGE.write_text(page())
