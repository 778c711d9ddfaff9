"""The report of all results, and the figures in the documents.

`python -m benchmarks.report` writes `report.md` beside the committed results: every figure with its meaning, value, aim
and rival, and for each benchmark machine, date, commit and file; first the aims that are missed. Results are marked as
stale if code that they measured has changed since (`benchmarks.measured`). `--quick` does so for quick results.

`--write` also renews README.md and docs/: the pages in `PAGES`, pictures, and every figure between a pair of comments,

    <!--f throughput.batch16_vs_transformers_cb .2f-->2.45<!--/f-->

which name a result (`cuda/…` of a GPU), a key, optionally a factor (`x100`, `x1e-3`) and a format of Python. Text
around it stays: a page is its own template. A test holds that writing again changes nothing. `--draw` draws all
pictures again, without measuring.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import shutil
from collections.abc import Container, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks import harness, measured
from benchmarks.figures import BENCHMARKS, BY_NAME, Benchmark, row_of
from benchmarks.papers import page as papers

COMMITTED = harness.RESULTS / "cpu"
# Results with a picture, and the module whose `draw` makes it.
DRAWN = {
    "attention": "benchmarks.engine.attention",
    "elastic": "benchmarks.engine.elastic",
    "fragmentation": "benchmarks.engine.fragmentation",
    "mapping": "benchmarks.engine.mapping",
    "papers": "benchmarks.papers.drawn",
    "preemption": "benchmarks.engine.preemption",
    "quality": "benchmarks.quality.__main__",
    "routing": "benchmarks.fleet.routing_picture",
    "serving": "benchmarks.serving.latency",
    "sharing": "benchmarks.engine.sharing",
    "shelf": "benchmarks.fleet.shelf_outcome",
    "shelf_simulated": "benchmarks.fleet.shelf_simulated",
    "throughput": "benchmarks.engine.throughput",
    "walkthrough": "benchmarks.engine.walkthrough",
}
ALL_FIGURES = harness.ROOT / "docs" / "benchmarks" / "all-figures.md"
PICTURES = harness.ROOT / "docs" / "benchmarks" / "pictures"
_FIGURE = re.compile(r"<!--f ((?:cuda/)?(?:[\w-]|\.(?=\d))+)\.(\S+)((?: x[\d.e-]+)?) ([^\s>]+)-->(.*?)<!--/f-->")


@cache
def result(name: str, folder: Path = COMMITTED) -> Mapping[str, Any] | None:
    """Content of a result's JSON, without raw data; `None` if there is none.

    Raises:
        ValueError: its dtype is not that of the benchmark's row. Results of CPUs from before dtypes were recorded have
            none, and are shown as such.
    """
    path = folder / f"{name}.json"
    if not path.exists():
        return None
    content: dict[str, Any] = json.loads(path.read_text())
    del content["raw"]
    row = row_of(name)
    if row is not None and ("dtype" in content or folder.name != "cpu"):
        row.check_dtype(content.get("dtype"))
    return content


def text_of(folder: Path, failed: Mapping[str, str]) -> str:
    """The report of a folder's results.

    Args:
        failed: benchmark → how it failed in the run that has just ended.
    """
    results = {b.name: result(b.name, folder) for b in BENCHMARKS}
    there = {name: found for name, found in results.items() if found is not None}
    stale = {name: changed for name, found in there.items() if (changed := measured.changed(BY_NAME[name], found))}
    lines = [
        "# Results",
        "",
        "Written by `python -m benchmarks.report`; every value is from the file beside its heading.",
        "",
    ]
    if any(found["quick"] for found in there.values()):
        lines += [
            "**Quick runs**: small sizes, one repeat. They show that the benchmarks work, and are no figures.",
            "",
        ]
    for name, failure in failed.items():
        lines.append(f"**{name} failed in the last run**: {failure}. Its figures, if any, are of an earlier run.")
    lines.append(
        f"{len(stale)} of {len(there)} results are **stale**: code that they measured has changed since, comments and "
        "docstrings aside."
    )
    aims = list(_aims(there, stale))
    missed = [row for row in aims if not row[0]]
    lines += ["", f"## Aims: {len(aims) - len(missed)} met, {len(missed)} missed", ""]
    head = ["| | Figure | Value | Aim | Against | Meaning |", "|---|---|---|---|---|---|"]
    lines += head + [row for _, row in missed] + [row for is_met, row in aims if is_met]
    lines += ["", "Not measured:", ""] + [f"- {row}" for row in _not_measured(results)]
    lines += ["", "## Aims that were changed", ""]
    lines += [
        f"- `{benchmark.name}.{figure.key}` (now {figure.aim or 'none'}): {figure.argued}"
        for benchmark in BENCHMARKS
        for figure in benchmark.figures
        if figure.argued
    ]
    for name, found in there.items():
        lines += ["", *_section(BY_NAME[name], found, folder, stale.get(name, ()))]
    return "\n".join(lines) + "\n"


def _aims(there: Mapping[str, Mapping[str, Any]], stale: Container[str]) -> Iterator[tuple[bool, str]]:
    """For each figure with an aim: whether it is met, and a row of the table."""
    for name, found in there.items():
        for key, value in found["figures"].items():
            figure = BY_NAME[name].figure(key)
            if figure is not None and figure.aim:
                is_met = figure.is_met(value)
                mark = ("met" if is_met else "**missed**") + (", stale" if name in stale else "")
                mark += ", synthetic requests" if "without_traces" in found else ""
                meaning = figure.meaning_of(key)
                yield is_met, f"| {mark} | `{name}.{key}` | {value:.4g} | {figure.aim} | {figure.rival} | {meaning} |"


def _not_measured(results: Mapping[str, Mapping[str, Any] | None]) -> Iterator[str]:
    """Aims without a figure, with the reason."""
    for benchmark in BENCHMARKS:
        found = results[benchmark.name]
        reason = (
            "no result"
            if found is None
            else f"not in the result of commit {found['commit']}: newer than it, or the rival was not there"
        )
        for figure in benchmark.figures:
            if figure.aim and not any(figure.meaning_of(key) is not None for key in (found or {}).get("figures", ())):
                meaning = re.sub(r"[;,]? ?\\\d", "", figure.meaning)
                yield f"`{benchmark.name}.{figure.key}` (aim {figure.aim}; {meaning}): {reason}".replace("|", "\\|")


def _section(benchmark: Benchmark, found: Mapping[str, Any], folder: Path, changed: Sequence[str]) -> Iterator[str]:
    yield f"## {benchmark.name}"
    yield ""
    yield benchmark.what
    yield ""
    file = (folder / benchmark.name).relative_to(harness.ROOT)
    yield f"{_origin(found)}{_dtype(benchmark, found)} File: `{file}.json`."
    if "without_traces" in found:
        yield ""
        yield f"**Synthetic requests**: there was no {' and no '.join(found['without_traces'])}."
    if changed:
        yield ""
        not_recorded = "Which code it measured is not recorded."
        yield f"**Stale.** {_what_changed(changed) if 'measured' in found else not_recorded}"
    yield ""
    yield "| Key | Meaning | Value | Aim | Against |"
    yield "|---|---|---|---|---|"
    for key, value in found["figures"].items():
        figure = benchmark.figure(key)
        assert figure is not None, f"{benchmark.name}.{key} is not in benchmarks/figures.yaml"
        aim = f"{figure.aim}{'' if figure.is_met(value) else ' **missed**'}" if figure.aim else ""
        yield f"| `{key}` | {figure.meaning_of(key)} | {value:.4g} | {aim} | {figure.rival} |"


def _what_changed(paths: Sequence[str]) -> str:
    named = ["the benchmark itself" if path == measured.OWN else f"`{path}`" for path in paths]
    return f"Changed since it was measured: {', '.join(named)}."


def _origin(found: Mapping[str, Any]) -> str:
    """Machine, date, commit, command and versions of a result, in sentences."""
    machine = found["machine"]
    memory = "" if machine["memory_gib"] is None else f", {machine['memory_gib']:g} GiB"
    command = "" if found["command"] is None else f" Command: `{found['command']}`."
    took = "" if found["duration_s"] is None else f", took {found['duration_s'] / 60:.0f} min"
    versions = ", ".join(f"{package} {version}" for package, version in found["versions"].items())
    return (
        f"{machine['processor']}, {machine['cores']} cores{memory}; {found['date'][:10]}{took}; commit "
        f"`{found['commit']}`. Versions: {versions}.{command}"
    )


def _dtype(benchmark: Benchmark, found: Mapping[str, Any]) -> str:
    """The dtype of a result, in a sentence."""
    if dtype := found.get("dtype"):
        return f" Measured in {dtype}."
    return f" Its dtype was not recorded; the benchmark's is {benchmark.dtype}." if benchmark.dtype else ""


def write(folder: Path, failed: Mapping[str, str] | None = None) -> None:
    """Write the report beside a folder's results."""
    result.cache_clear()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.md").write_text(text_of(folder, failed or {}))


def documents() -> list[Path]:
    """Pages whose figures come from results: README.md and docs/, without records of past decisions."""
    pages = sorted((harness.ROOT / "docs").rglob("*.md"))
    decisions = harness.ROOT / "docs" / "decisions"
    return [harness.ROOT / "README.md", *(page for page in pages if not page.is_relative_to(decisions))]


def renewed(text: str) -> str:
    """The text with every marked figure as the results have it. Raises `KeyError` for one that they do not have."""

    def value_of(match: re.Match[str]) -> str:
        name, key, factor, form, _ = match.groups()
        device, _, own = name.rpartition("/")
        found = result(own, harness.RESULTS / (device or "cpu"))
        if found is None or key not in found["figures"]:
            raise KeyError(f"there is no figure {name}.{key} in {harness.RESULTS}")
        value = found["figures"][key] * float(factor.strip().removeprefix("x") or 1)
        return match[0][: match.start(5) - match.start()] + format(value, form) + "<!--/f-->"

    return _FIGURE.sub(value_of, text)


def all_figures() -> str:
    """The page of all figures: the committed report with pictures."""
    text = text_of(COMMITTED, {}).replace("# Results\n", "# All figures\n", 1)
    for name in DRAWN:
        if (COMMITTED / f"{name}.png").exists():
            text = text.replace(f"## {name}\n", f"## {name}\n\n![{BY_NAME[name].what}](pictures/{name}.png)\n", 1)
    return text


def write_documents() -> None:
    """Renew the documents from the committed results."""
    write(COMMITTED)
    ALL_FIGURES.write_text(all_figures())
    papers.write()
    for page in documents():
        page.write_text(renewed(page.read_text()))
    PICTURES.mkdir(exist_ok=True)
    for name in DRAWN:
        for drawn in (COMMITTED / f"{name}.png", *COMMITTED.glob(f"{name}-*.png")):
            if drawn.exists():
                shutil.copyfile(drawn, PICTURES / drawn.name)


def draw(folder: Path) -> None:
    """Draw every picture of a folder's results again."""
    for name, module in DRAWN.items():
        if (path := folder / f"{name}.json").exists():
            importlib.import_module(module).draw(json.loads(path.read_text()), path.with_suffix(".png"))
            print(path.with_suffix(".png").relative_to(harness.ROOT))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="of quick results")
    parser.add_argument("--draw", action="store_true", help="draw the pictures again")
    parser.add_argument("--write", action="store_true", help="renew the figures in README.md and docs/, too")
    args = parser.parse_args()
    folder = harness.QUICK_RESULTS / "cpu" if args.quick else COMMITTED
    if args.draw:
        draw(folder)
    if args.write:
        if args.quick:
            parser.error("--write takes full results; leave out --quick")
        write_documents()
    write(folder)
    print((folder / "report.md").relative_to(harness.ROOT))


if __name__ == "__main__":
    main()
