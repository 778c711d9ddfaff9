"""Figures in README and docs are those of the committed results, and every result can be explained."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import subprocess
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from benchmarks import harness, measured, report
from benchmarks.all import command_of
from benchmarks.figures import BENCHMARKS, BY_NAME, Figure, row_of
from benchmarks.papers import page as papers

RESULTS = sorted(harness.RESULTS.glob("c*/*.json"))  # of CPUs and of GPUs
PAGES = report.documents()
# Quantities that are measured, in the units in which pages state them. Seconds and bytes are mostly settings.
MEASURED = re.compile(
    r"(?<![\w.])\d[\d.,]*(?: to \d[\d.,]*)? ?"
    r"(?:tok/s|tokens/s|tokens a second|requests/s|ms|µs|us|×|%|GB/s|GFLOP/s)(?!\w)"
)
# Page → quantities that are settings, bounds or parameters of a method, not results → the reason.
SETTINGS: dict[str, dict[str, str]] = json.loads((Path(__file__).parent / "settings_in_pages.json").read_text())
NOT_PROSE = re.compile(r"^(```|~~~).*?^\1|`[^`\n]*`|<!--f .*?<!--/f-->|<!--.*?-->", re.S | re.M)
# Import name → requirement, where they differ.
DISTRIBUTIONS = {name: found[0] for name, found in packages_distributions().items()}
# Rivals, in environments of their own.
ELSEWHERE = {"openvino", "openvino_genai", "uvicorn"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(harness.ROOT)))
def test_marked_figures_are_those_of_the_results(page: Path) -> None:
    """The README said 2.86 where its file had 2.45."""
    text = page.read_text()
    assert report.renewed(text) == text, "python -m benchmarks.report --write"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(harness.ROOT)))
def test_other_quantities_are_settings(page: Path) -> None:
    """A figure without its file: "0 bytes after half a second" was of a setting that is not the default."""
    name = str(page.relative_to(harness.ROOT))
    if page in (report.ALL_FIGURES, papers.PAGE):
        return  # written as a whole
    found = MEASURED.findall(NOT_PROSE.sub("", page.read_text()))
    unexplained = [quantity for quantity in found if quantity not in SETTINGS.get(name, {})]
    assert not unexplained, "mark them as figures (docs/benchmarks), or list them in settings_in_pages.json"


def test_listed_settings_are_still_in_their_pages() -> None:
    for name, quantities in SETTINGS.items():
        text = NOT_PROSE.sub("", (harness.ROOT / name).read_text())
        assert not [quantity for quantity in quantities if quantity not in text], name


def test_report_and_pages_are_written_from_the_results() -> None:
    """Also after a change of code that results measured: they are stale then."""
    written = report.text_of(report.COMMITTED, {})
    assert (report.COMMITTED / "report.md").read_text() == written, "python -m benchmarks.report --write"
    assert report.ALL_FIGURES.read_text() == report.all_figures()


def test_pictures_in_the_docs_are_those_of_the_results() -> None:
    for picture in report.PICTURES.glob("*.png"):
        assert picture.read_bytes() == (report.COMMITTED / picture.name).read_bytes(), picture.name


@pytest.mark.processes
@pytest.mark.parametrize("path", RESULTS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_results_are_explained_and_dated(path: Path) -> None:
    """Full results only, except of GPUs, whose every key has a meaning, of the row's dtype, and whose commit exists."""
    result, benchmark = report.result(path.stem, path.parent), row_of(path.stem)
    assert result is not None
    assert benchmark is not None
    assert not result["quick"] or path.parent != report.COMMITTED
    assert [key for key in result["figures"] if benchmark.figure(key) is None] == []
    assert result["date"] >= "2026-11"
    assert result["machine"]["cores"] > 0
    git = ["git", "-C", str(harness.ROOT)]
    shallow = subprocess.run([*git, "rev-parse", "--is-shallow-repository"], capture_output=True, text=True)
    if shallow.stdout.strip() != "false":
        pytest.skip("without the repository's history")
    commit = result["commit"].removesuffix("+changes")
    found = subprocess.run([*git, "cat-file", "-e", f"{commit}^{{commit}}"], capture_output=True)
    assert found.returncode == 0, f"{path.name} is of {commit}, which is not in the history"


def test_a_figure_that_no_result_has_is_an_error() -> None:
    with pytest.raises(KeyError, match=r"no figure sharing\.nothing"):
        report.renewed("<!--f sharing.nothing .1f-->1.0<!--/f-->")


def test_a_figure_is_renewed_with_factor_and_format() -> None:
    share = json.loads((report.COMMITTED / "mapping.json").read_text())["figures"]["exposed_share"]
    renewed = report.renewed("a <!--f mapping.exposed_share x100 .2f-->9<!--/f--> % b")
    assert renewed == f"a <!--f mapping.exposed_share x100 .2f-->{100 * share:.2f}<!--/f--> % b"


def test_aims() -> None:
    assert Figure("k", "m", "≥ 0.98").is_met(0.98)
    assert not Figure("k", "m", "≤ 1.0").is_met(1.01)
    assert Figure(r"ms_(\w+)", r"time of \1, ms").meaning_of("ms_a_b") == "time of a b, ms"
    assert Figure(r"ms_(\w+)", r"time of \1, ms").meaning_of("other") is None


def test_missed_aims_come_first_and_stale_results_are_marked(tmp_path: Path) -> None:
    figures = {"token_state_share": 0.99, "cuda_waste_qwen05b": 0.2}
    of_now = {"figures": figures, "quick": True, "measured": measured.digests(BY_NAME["fragmentation"])}
    found = json.loads((report.COMMITTED / "fragmentation.json").read_text()) | of_now
    folder = harness.QUICK_RESULTS / tmp_path.name
    folder.mkdir(parents=True)
    try:
        (folder / "fragmentation.json").write_text(json.dumps(found))
        text = report.text_of(folder, {"sharing": "exit status 1"})
        del found["measured"]["vmem"]
        (folder / "fragmentation.json").write_text(json.dumps(found))
        report.result.cache_clear()
        stale = report.text_of(folder, {})
    finally:
        (folder / "fragmentation.json").unlink()
        folder.rmdir()
    assert text.index("`fragmentation.cuda_waste_qwen05b`") < text.index("`fragmentation.token_state_share`")
    assert "1 met, 1 missed" in text
    assert "**sharing failed in the last run**: exit status 1" in text
    assert "Quick runs" in text
    assert "stale |" not in text
    assert "**Stale.**" not in text
    assert "1 of 1 results are **stale**" in stale
    assert "| **missed**, stale | `fragmentation.cuda_waste_qwen05b`" in stale
    assert "**Stale.** Changed since it was measured: `vmem`.\n" in stale


def test_every_program_has_a_name_of_its_own_and_the_rows_have_programs() -> None:
    """A command is found by its file's name in any group: a second file of the same name would hide it."""
    folder = harness.ROOT / "benchmarks"
    programs = {
        f"benchmarks.{file.stem}": file
        for file in sorted(folder.rglob("*.py"))
        if '__name__ == "__main__"' in file.read_text() and file.stem not in ("__main__", "keeper")
    }
    found = {name: importlib.util.find_spec(name) for name in programs}
    assert {name: spec and spec.origin for name, spec in found.items()} == {n: str(f) for n, f in programs.items()}
    packages = {f"benchmarks.{file.parent.name}" for file in folder.rglob("__main__.py")}
    commands = {command_of(benchmark, quick=False)[2] for benchmark in BENCHMARKS if benchmark.command}
    assert commands - programs.keys() - packages == {"pytest", "tests.mutation"}


def test_make_bench_installs_what_benchmarks_import() -> None:
    """`make bench` failed on a fresh clone for want of httpx."""
    project = tomllib.loads((harness.ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(r for extra in ("bench", "dev") for r in project["optional-dependencies"][extra]),
    ]
    installed = {_normal(re.split(r"[\s\[<>=;~]", requirement)[0]) for requirement in wanted}
    missing: dict[str, str] = {}
    for file in (harness.ROOT / "benchmarks").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []
            for top in {name.partition(".")[0] for name in names}:
                distribution = DISTRIBUTIONS.get(top)
                if distribution is not None and top not in ELSEWHERE and _normal(distribution) not in installed:
                    missing[top] = file.name
    # Of CUDA only, or parts of installed ones.
    assert not set(missing) - {"cuda", "folio"}, missing


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
