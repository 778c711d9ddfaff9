"""Digests of the code that a benchmark measures, by which a result is told to be stale.

A result has a digest of each path that its row in `figures.yaml` measures, and one of the benchmark's own files: its
module and what that imports of `benchmarks`. A Python file counts by its syntax tree without docstrings, so that
comments and formatting do not matter, and alike for all versions of Python; of other files, every byte counts. Nothing
needs git: a clone without history, or an archive, tells stale results, too.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks import GROUPS
from benchmarks.figures import Benchmark

ROOT = Path(__file__).parents[1]
OWN = "benchmark"  # the key of the benchmark's own files
# Files that a figure can depend on. Others, such as the dashboard's styles, are not read while something is measured.
SUFFIXES = {".py", ".c", ".cpp", ".h", ".yaml", ".toml", ".json", ".jsonl", ".jinja", ".safetensors"}
# They show results.
_SHOW = {
    *("benchmarks.all", "benchmarks.figures", "benchmarks.measured", "benchmarks.picture", "benchmarks.report"),
    *("benchmarks.papers.drawn", "benchmarks.papers.page"),
}


def digests(benchmark: Benchmark, root: Path = ROOT) -> dict[str, str]:
    """Path → digest of what a benchmark measures, as the files are now."""
    of_paths = {path: _digest(_files(root / path), root) for path in benchmark.measures}
    own = set(_own_files(benchmark.command[0], root)) if benchmark.command else set()
    return of_paths | ({OWN: _digest(own, root)} if own else {})


def changed(benchmark: Benchmark, result: Mapping[str, Any]) -> list[str]:
    """What has changed since a result was measured: paths, and `OWN`; everything if the result has no digests."""
    then: Mapping[str, str] = result.get("measured", {})
    return [path for path, digest in digests(benchmark).items() if then.get(path) != digest]


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    yield from (file for file in path.rglob("*") if file.suffix in SUFFIXES and "__pycache__" not in file.parts)


def _own_files(module: str, root: Path) -> Iterator[Path]:
    """The file of a module of `benchmarks`, and those that it imports of this package, directly or not."""
    due, seen = [module, f"{module}.__main__"], set(_SHOW)
    while due:
        name = due.pop()
        if name in seen or (file := _file_of(name, root)) is None:
            continue
        seen.add(name)
        due += _read(file)[1]
        yield file


def _file_of(module: str, root: Path) -> Path | None:
    """The file of a module, which may be named without its group; `None` for packages and other code."""
    package, *names = module.split(".")
    if package != "benchmarks":
        return None
    inner = Path(*names)
    files = ((root / package / group / inner).with_suffix(".py") for group in ("", *GROUPS))
    return next((file for file in files if file.is_file()), None)


def _digest(files: Iterable[Path], root: Path) -> str:
    """Of the names and the contents."""
    found = hashlib.sha256()
    for file in sorted(files):
        found.update(f"{file.relative_to(root)}\0{_read(file)[0]}\0".encode())
    return found.hexdigest()[:16]


@cache
def _read(file: Path) -> tuple[str, frozenset[str]]:
    """A file's digest, and the names that it imports."""
    content = file.read_bytes()
    if file.suffix != ".py":
        return hashlib.sha256(content).hexdigest(), frozenset()
    tree = ast.parse(content)
    parts: list[str] = []
    _write(tree, parts)
    return hashlib.sha256("".join(parts).encode("utf-8", "surrogatepass")).hexdigest(), frozenset(_imported(tree))


def _write(node: object, parts: list[str]) -> None:
    """Append a syntax tree's text. Empty fields are left out, because newer versions of Python have more of them."""
    if isinstance(node, ast.AST):
        parts.append(f"{type(node).__name__}(")
        for field in node._fields:
            value = getattr(node, field, None)
            if value is not None and value != []:
                parts.append(f"{field}=")
                _write(value, parts)
        parts.append(")")
    elif isinstance(node, list):
        parts.append("[")
        for item in node:
            if not _is_docstring(item):
                _write(item, parts)
        parts.append("]")
    else:
        parts.append(f"{node!r},")


def _is_docstring(node: object) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
