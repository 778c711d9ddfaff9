"""A result is stale once code that it measured has changed, whatever git knows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import measured
from benchmarks.all import why_due
from benchmarks.figures import BENCHMARKS, Benchmark

ROW = Benchmark("a", "", ("benchmarks.a",), 1, True, (), measures=("app", "vmem"))
FILES = {
    "app/code.py": '"""What it does."""\n\n\ndef double(x):\n    """Twice."""\n    return 2 * x  # a comment\n',
    "app/style.css": "p { color: red }",
    "vmem/page.h": "int x;  // a comment\n",
    "benchmarks/engine/a.py": "from benchmarks import b, picture\nfrom folio.app import code\n",
    "benchmarks/b.py": "from benchmarks.simulator import c\n",
    "benchmarks/simulator/c.py": "x = 1\n",
    "benchmarks/simulator/__main__.py": "x = 1\n",
    "benchmarks/picture.py": "x = 1\n",
    "benchmarks/other.py": "x = 1\n",
}


def digests_of(folder: Path, files: dict[str, str]) -> dict[str, str]:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    measured._read.cache_clear()
    return measured.digests(ROW, folder)


@pytest.mark.parametrize(
    ("file", "text", "changed"),
    [
        ("app/code.py", '"""Otherwise."""\ndef double(x):\n\n    return (2 *\n        x)\n', None),  # how it is written
        ("app/code.py", "def double(x):\n    return 3 * x\n", "app"),
        ("app/code.py", "def double(x=None):\n    return 2 * x\n", "app"),
        ("app/new.py", "", "app"),
        ("app/style.css", "p { color: blue }", None),
        ("vmem/page.h", "int x;  // another comment\n", "vmem"),
        ("benchmarks/engine/a.py", "from benchmarks import b, picture\nfrom folio.app import core\n", measured.OWN),
        ("benchmarks/simulator/c.py", "x = 2\n", measured.OWN),  # imported by what it imports
        ("benchmarks/simulator/__main__.py", "x = 2\n", None),  # a command, which importing its package does not run
        ("benchmarks/picture.py", "x = 2\n", None),
        ("benchmarks/other.py", "x = 2\n", None),
    ],
)
def test_a_digest_changes_with_the_code(file: str, text: str, changed: str | None, tmp_path: Path) -> None:
    before, after = digests_of(tmp_path, FILES), digests_of(tmp_path, {file: text})
    assert list(before) == ["app", "vmem", measured.OWN]
    assert [path for path in before if before[path] != after[path]] == ([changed] if changed else [])


def test_a_result_of_other_code_or_without_digests_is_measured_again(tmp_path: Path) -> None:
    row, path = BENCHMARKS[0], tmp_path / "a.json"
    assert why_due(row, path) == "no result"
    path.write_text(json.dumps({"measured": measured.digests(row)}))
    assert why_due(row, path) == ""
    path.write_text(json.dumps({"measured": measured.digests(row) | {"vmem": "0"}}))
    assert why_due(row, path) == "stale: vmem"
    path.write_text(json.dumps({"commit": "77e5fc0"}))
    assert why_due(row, path) == "stale: kernels, vmem, benchmark"


@pytest.mark.parametrize("row", BENCHMARKS, ids=lambda row: row.name)
def test_every_row_measures_code_that_there_is(row: Benchmark) -> None:
    """A mistyped path would never change."""
    assert [path for path in row.measures if not any(measured._files(measured.ROOT / path))] == []
    assert (measured.OWN in measured.digests(row)) == (row.command[:1] not in [(), ("pytest",), ("tests.mutation",)])
