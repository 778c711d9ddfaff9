"""Size and shape of the source tree: lines, longest parts, import circles, imports against the order of layers.

`python -m benchmarks.structure` reads the working tree; `--against COMMIT` puts an earlier commit beside it. The last
line is JSON, with the lists whole.
`--levels PACKAGE` lists its modules by the longest chain of imports below each. `--crossed WALK` lists the files whose
code runs for one streamed chat request, from the ASGI application to the pages and back, for the blocks of its KV
memory, or for one `/v1/rerank`, each without Ray's part.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import io
import json
import subprocess
import tarfile
import tempfile
import threading
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGES = ("app", "vmem", "kernels")
GENERATED = ("app/proto/folio_pb2.py", "app/proto/folio_pb2_grpc.py")
# From the lowest to the highest; a module may import modules of its own row and of lower rows only.
LAYERS = (
    ("vmem", "kernels"),
    (
        "app.errors",
        "app.config.logs",
        "app.compat",
        "app.http.haproxy",
        "app.http.operations",
        "app.http.event_stream",
        "app.http.static_files",
        "app.models.chat_template",
        "app.models.gguf",
        "app.models.named",
    ),
    ("app.config",),
    ("app.models",),
    ("app.engine.device", "app.engine.report"),
    ("app.engine.sampling",),
    ("app.engine.request",),
    ("app.engine.schedule",),
    ("app.engine.tensor_parallel",),
    ("app.engine.layers",),
    ("app.engine.lora",),
    ("app.engine.model",),
    ("app.engine.execution",),
    ("app.engine.ranks",),
    ("app.engine.memory", "app.engine.speculation"),
    ("app.engine.step",),
    ("app.engine",),
    ("app.shelf",),
    ("app.fleet",),
    ("app.http",),
    ("app.api", "app.edge", "app.proto", "app.dashboard", "app.tracing"),
    ("app.replica",),
    ("app.serving",),
    ("app.client",),
    ("app.checks",),
    ("app.main",),
    ("app.cli",),
)
# Packages of one row that must not import each other.
APART = (
    ("vmem", "kernels"),
    ("app.api", "app.edge"),
    ("app.dashboard", "app.api"),
    ("app.dashboard", "app.edge"),
)
# Limits of parts outside of kernels, which may be longer.
MOST_ENTRIES, MOST_LINES, MOST_FUNCTION_LINES, MOST_BRANCHES = 20, 450, 60, 12
_CHAT = "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "stream": True}
# Folders, settings of the engine, route and body.
WALKS: dict[str, tuple[tuple[str, ...], dict[str, Any], str, dict[str, Any]]] = {
    "chat": (PACKAGES, {}, *_CHAT),
    "block": (("vmem",), {}, *_CHAT),
    "rerank": (PACKAGES, {"pooling": "mean"}, "/v1/rerank", {"query": "keys", "documents": ["A hall.", "Keys."]}),
}
BRANCHES = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.IfExp, ast.ExceptHandler, ast.match_case)


@dataclass
class Module:
    """One source file and what was counted in it."""

    name: str
    path: str
    lines: int = 0
    code: int = 0
    docstring: int = 0
    comment: int = 0
    imports: set[str] = field(default_factory=set)
    functions: dict[str, tuple[int, int]] = field(default_factory=dict)  # lines, branches
    classes: dict[str, tuple[int, int]] = field(default_factory=dict)  # lines, methods


def branches(function: ast.AST) -> int:
    """Count conditions, loops, handlers, cases, filters, and operands after the first of `and` and `or`."""
    count = 0
    for node in ast.walk(function):
        count += isinstance(node, BRANCHES)
        count += len(node.values) - 1 if isinstance(node, ast.BoolOp) else 0
        count += len(node.ifs) if isinstance(node, ast.comprehension) else 0
    return count


def runtime_imports(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Every import of a module, but not those for types only."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        else:
            yield from runtime_imports(node)


def read(root: Path, path: Path) -> Module:
    """Parse and count one file below `root`."""
    relative = path.relative_to(root)
    parts = relative.with_suffix("").parts
    text = path.read_text()
    tree = ast.parse(text)
    module = Module(".".join(parts[:-1] if parts[-1] == "__init__" else parts), str(relative), lines=text.count("\n"))
    _count_parts(module, tree)
    _count_lines(module, text, tree)
    for statement in runtime_imports(tree):
        if isinstance(statement, ast.Import):
            names = [alias.name for alias in statement.names]
        else:
            names = [f"{statement.module}.{alias.name}" for alias in statement.names if statement.module]
        # The folders of the packages lie at the top, whatever their import names begin with.
        module.imports.update(name.removeprefix("folio.") for name in names)
    return module


def _count_parts(module: Module, tree: ast.Module) -> None:
    """Functions by name, the most branched one of a name, and classes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            size = ((node.end_lineno or 0) - node.lineno + 1, branches(node))
            module.functions[node.name] = max(module.functions.get(node.name, (0, 0)), size, key=lambda s: s[1])
        if isinstance(node, ast.ClassDef):
            methods = sum(isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) for part in node.body)
            module.classes[node.name] = ((node.end_lineno or 0) - node.lineno + 1, methods)


def _count_lines(module: Module, text: str, tree: ast.Module) -> None:
    """Lines of docstrings, of comments alone, and of code."""
    spans: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body
            if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
                spans.update(range(body[0].lineno, (body[0].end_lineno or 0) + 1))
    code: set[int] = set()
    quiet = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER, tokenize.ENCODING)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            module.comment += token.line.strip().startswith("#")
        elif token.type not in quiet:
            code.update(range(token.start[0], token.end[0] + 1))
    module.docstring = len(spans)
    module.code = len(code - spans)


def modules(root: Path) -> dict[str, Module]:
    """All modules of the three packages, by name, with their imports of each other resolved."""
    found = {}
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            if str(path.relative_to(root)) not in GENERATED:
                module = read(root, path)
                found[module.name] = module
    for module in found.values():
        inside = set()
        for name in module.imports:
            inside.add(name if name in found else name.rpartition(".")[0])
        module.imports = {name for name in inside if name in found and name != module.name}
    return found


def circles(found: dict[str, Module]) -> list[list[str]]:
    """Strongly connected sets of more than one module (Tarjan's algorithm)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    result = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(found[name].imports):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            members: list[str] = []
            while not members or members[-1] != name:
                members.append(stack.pop())
            if len(members) > 1:
                result.append(sorted(members))

    for name in found:
        if name not in index:
            visit(name)
    return result


def layer(name: str) -> int | None:
    """Row of `LAYERS` that a module belongs to; None for one that no row names."""
    for number, row in enumerate(LAYERS):
        if any(name == package or name.startswith(package + ".") for package in row):
            return number
    return None


def upward(found: dict[str, Module]) -> list[str]:
    """Imports from a lower layer of a higher one, or between packages that are to stay apart."""
    crossed = []
    for module in found.values():
        own = layer(module.name)
        for other in sorted(module.imports):
            theirs = layer(other)
            if own is not None and theirs is not None and theirs > own:
                crossed.append(f"{module.name} -> {other}")
            for pair in APART:
                sides = [next((p for p in pair if n == p or n.startswith(p + ".")), None) for n in (module.name, other)]
                if None not in sides and sides[0] != sides[1]:
                    crossed.append(f"{module.name} -> {other}")
    return sorted(set(crossed))


def both_ways(found: dict[str, Module], folder: str) -> list[str]:
    """Packages of one folder that import each other, with the numbers of imports. Of two packages one should lie above
    the other: the fewer imports of a pair point up."""
    arrows: Counter[tuple[str, str]] = Counter()
    for module in found.values():
        for other in module.imports:
            ends = [_package_in(folder, name) for name in (module.path, found[other].path)]
            if None not in ends and ends[0] != ends[1]:
                arrows[str(ends[0]), str(ends[1])] += 1
    return sorted(f"{a} <-> {b} {count}/{arrows[b, a]}" for (a, b), count in arrows.items() if a < b and arrows[b, a])


def _package_in(folder: str, path: str) -> str | None:
    """The package of `folder` that a file lies in; None for a file of another folder, or of the folder itself."""
    below, _, rest = path.removeprefix(f"{folder}/").partition("/")
    return below if path.startswith(f"{folder}/") and rest else None


def crowded(root: Path) -> list[str]:
    """Folders with more than `MOST_ENTRIES` entries, without caches and other files that git ignores."""
    found = {}
    for folder in (
        path for package in PACKAGES for path in (root / package, *(root / package).rglob("*")) if path.is_dir()
    ):
        entries = [e for e in folder.iterdir() if not e.name.startswith((".", "__pycache__"))]
        if len(entries) > MOST_ENTRIES and any(entry.suffix == ".py" for entry in entries):
            found[str(folder.relative_to(root))] = len(entries)
    return [f"{name} {count}" for name, count in sorted(found.items())]


def levels(found: dict[str, Module], folder: str) -> dict[str, int]:
    """Longest chain of imports below each module of one package, within that package."""
    inside = {n: m for n, m in found.items() if n == folder or n.startswith(folder + ".")}
    depth: dict[str, int] = {}

    def measure(name: str, path: tuple[str, ...]) -> int:
        if name not in depth:
            below = [o for o in inside[name].imports if o in inside and o not in path]
            depth[name] = 1 + max((measure(o, (*path, name)) for o in below), default=-1)
        return depth[name]

    for name in inside:
        measure(name, ())
    return depth


def core_path(root: Path) -> list[str]:
    """List the files that `docs/architecture.md` names below its heading "The core path"."""
    text = (root / "docs" / "architecture.md").read_text()
    _, found, rest = text.partition("## The core path")
    if not found:
        return []
    section = rest.partition("\n## ")[0]
    return [
        line.split("`")[1]
        for line in section.splitlines()
        if line.lstrip().startswith(("- `", "1", "2", "3")) and "`" in line
    ]


def crossed(walk: str) -> list[str]:
    """Trace one request of `WALKS` through a whole server in this process, after one that warms it up."""
    from starlette.testclient import TestClient

    local_server: Any = importlib.import_module("tests.local_server")  # a server without Ray is for tests only

    folders, settings, route, body = WALKS[walk]
    called: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            called.add(frame.f_code.co_filename)

    threading.setprofile(note)  # of threads that start from here on: the engine's and the event loop's
    server = local_server.LocalServer(**settings)
    try:
        client = TestClient(server.api)
        for _ in range(2):
            server.wait_until_idle()
            called.clear()
            client.post(route, json={"model": "builtin"} | body).raise_for_status()
        server.wait_until_idle()
    finally:
        threading.setprofile(None)
        server.close()
    files = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    relative = (path.relative_to(ROOT) for path in files)
    return sorted(str(path) for path in relative if str(ROOT / "folio" / path) in called)


def summary(root: Path) -> dict[str, object]:
    """All figures of one tree."""
    found = modules(root)
    all_of = list(found.values())
    functions = [(f"{m.path}:{n}", *size) for m in all_of for n, size in m.functions.items()]
    classes = [(f"{m.path}:{n}", *size) for m in all_of for n, size in m.classes.items()]
    limited = [function for function in functions if not function[0].startswith("kernels/")]
    longest_file = max(all_of, key=lambda m: m.lines)
    longest_class = max(classes, key=lambda c: c[1])
    longest_function = max(limited, key=lambda f: f[1])
    most_branches = max(limited, key=lambda f: f[2])
    core = core_path(root)
    return {
        "files": len(all_of),
        "lines": sum(m.lines for m in all_of),
        "code_lines": sum(m.code for m in all_of),
        "docstring_lines": sum(m.docstring for m in all_of),
        "comment_lines": sum(m.comment for m in all_of),
        "longest_file": f"{longest_file.path} {longest_file.lines}",
        "longest_class": f"{longest_class[0]} {longest_class[1]}",
        "longest_function": f"{longest_function[0]} {longest_function[1]}",
        "most_branches": f"{most_branches[0]} {most_branches[2]}",
        "files_over_450_lines": sorted(f"{m.path} {m.lines}" for m in all_of if m.lines > MOST_LINES),
        "files_under_40_lines": sum(m.lines < 40 and not m.path.endswith("__init__.py") for m in all_of),
        "functions_over_60_lines": sorted(f"{n} {lines}" for n, lines, _ in limited if lines > MOST_FUNCTION_LINES),
        "functions_over_12_branches": sorted(f"{n} {count}" for n, _, count in limited if count > MOST_BRANCHES),
        "classes_over_30_methods": sorted(f"{n} {methods}" for n, _, methods in classes if methods > 30),
        "folders_over_20_entries": crowded(root),
        "circles": circles(found),
        "upward_imports": upward(found),
        "engine_both_ways": both_ways(found, "app/engine"),
        "core_path_files": len(core),
        "core_path_lines": sum((root / path).read_text().count("\n") for path in core),
        "test_lines": _lines(root, "tests"),
        "benchmark_lines": _lines(root, "benchmarks"),
        "tool_lines": _lines(root, "tools"),
    }


def _lines(root: Path, folder: str) -> int:
    return sum(path.read_text().count("\n") for path in (root / folder).rglob("*.py"))


def show(columns: list[dict[str, object]]) -> None:
    """A line for each figure, with the earlier commit's first; long lists as their lengths."""
    for key in columns[-1]:
        values = [column.get(key, "") for column in columns]
        shown = [
            f"{len(value)} listed" if isinstance(value, list) and len(value) > 3 else str(value) for value in values
        ]
        print(f"{key:28}" + " | ".join(shown))


def main() -> None:
    """Print the figures, then one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", metavar="COMMIT")
    parser.add_argument("--levels", metavar="PACKAGE")
    parser.add_argument("--crossed", choices=WALKS)
    options = parser.parse_args()
    if options.crossed:
        files = crossed(options.crossed)
        print("\n".join(files))
        lines = sum((ROOT / file).read_text().count("\n") for file in files)
        print(json.dumps({"walk": options.crossed, "files": len(files), "lines": lines}))
        return
    if options.levels:
        depth = levels(modules(ROOT), options.levels)
        for name in sorted(depth, key=lambda n: (depth[n], n)):
            print(f"{depth[name]:3} {name}")
        return
    columns = [summary(ROOT)]
    if options.against:
        with tempfile.TemporaryDirectory() as folder:
            archive = subprocess.run(["git", "archive", options.against], cwd=ROOT, capture_output=True, check=True)
            with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tree:
                tree.extractall(folder, filter="data")
            columns.insert(0, summary(Path(folder)))
    show(columns)
    print(json.dumps(columns[-1]))


if __name__ == "__main__":
    main()
