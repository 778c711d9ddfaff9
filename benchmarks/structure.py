"""Size and shape of the source tree: lines, longest parts, import circles, imports against the order of layers.

Modules have the names of their files: `app.main` is imported as `folio.app.main`.

`python -m benchmarks.structure` reads the working tree; `--against COMMIT` puts an earlier commit beside it.
`--levels PACKAGE` lists its modules by the longest chain of imports below each. `--crossed` lists the files whose code
runs for one streamed chat request, from the ASGI application to the pages and back, without Ray's part.
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
        "app.version",
        "app.logs",
        "app.haproxy",
        "app.compat",
        "app.event_stream",
        "app.static_files",
        "app.chat_template",
    ),
    ("app.config",),
    ("app.engine", "app.builtin"),
    ("app.fleet",),
    ("app.request_context", "app.http_errors", "app.error_json"),
    ("app.openai", "app.edge", "app.proto", "app.dashboard", "app.tracing"),
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
    ("app.openai", "app.edge"),
    ("app.dashboard", "app.openai"),
    ("app.dashboard", "app.edge"),
)
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
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    text = path.read_text()
    tree = ast.parse(text)
    module = Module(name, str(relative), lines=text.count("\n"))
    spans: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body
            if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
                spans.update(range(body[0].lineno, (body[0].end_lineno or 0) + 1))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            module.functions[node.name] = max(
                module.functions.get(node.name, (0, 0)),
                ((node.end_lineno or 0) - node.lineno + 1, branches(node)),
                key=lambda size: size[1],
            )
        if isinstance(node, ast.ClassDef):
            methods = sum(isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) for part in node.body)
            module.classes[node.name] = ((node.end_lineno or 0) - node.lineno + 1, methods)
    code: set[int] = set()
    quiet = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER, tokenize.ENCODING)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            module.comment += token.line.strip().startswith("#")
        elif token.type not in quiet:
            code.update(range(token.start[0], token.end[0] + 1))
    module.docstring = len(spans)
    module.code = len(code - spans)
    for statement in runtime_imports(tree):
        if isinstance(statement, ast.Import):
            module.imports.update(alias.name.removeprefix("folio.") for alias in statement.names)
        elif statement.module:
            module.imports.update(
                f"{statement.module}.{alias.name}".removeprefix("folio.") for alias in statement.names
            )
    return module


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


def crossed() -> list[str]:
    """Trace one streamed chat request through a whole server in this process, after one that warms it up."""
    from starlette.testclient import TestClient

    local_server: Any = importlib.import_module("tests.local_server")  # a server without Ray is for tests only

    called: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            called.add(frame.f_code.co_filename)

    threading.setprofile(note)  # of threads that start from here on: the engine's and the event loop's
    server = local_server.LocalServer()
    try:
        chat = {"model": "builtin", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "stream": True}
        client = TestClient(server.api)
        for _ in range(2):
            server.wait_until_idle()
            called.clear()
            assert client.post("/v1/chat/completions", json=chat).text.endswith("[DONE]\n\n")
        server.wait_until_idle()
    finally:
        threading.setprofile(None)
        server.close()
    files = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    relative = [path.relative_to(ROOT) for path in files]
    return sorted(str(path) for path in relative if str(ROOT / "folio" / path) in called)


def summary(root: Path) -> dict[str, object]:
    """All figures of one tree."""
    found = modules(root)
    all_of = list(found.values())
    functions = [(f"{m.path}:{n}", *size) for m in all_of for n, size in m.functions.items()]
    classes = [(f"{m.path}:{n}", *size) for m in all_of for n, size in m.classes.items()]
    folders: dict[str, int] = {}
    for module in all_of:
        folders[str(Path(module.path).parent)] = folders.get(str(Path(module.path).parent), 0) + 1
    longest_file = max(all_of, key=lambda m: m.lines)
    longest_class = max(classes, key=lambda c: c[1])
    longest_function = max(functions, key=lambda f: f[1])
    core = core_path(root)
    return {
        "files": len(all_of),
        "lines": sum(m.lines for m in all_of),
        "code_lines": sum(m.code for m in all_of),
        "docstring_lines": sum(m.docstring for m in all_of),
        "comment_lines": sum(m.comment for m in all_of),
        "files_over_500_lines": sum(m.lines > 500 for m in all_of),
        "files_under_40_lines": sum(m.lines < 40 and not m.path.endswith("__init__.py") for m in all_of),
        "longest_file": f"{longest_file.path} {longest_file.lines}",
        "longest_class": f"{longest_class[0]} {longest_class[1]}",
        "longest_function": f"{longest_function[0]} {longest_function[1]}",
        "classes_over_30_methods": sorted(f"{n} {methods}" for n, _, methods in classes if methods > 30),
        "functions_over_15_branches": sorted(f"{n} {count}" for n, _, count in functions if count > 15),
        "fullest_folder": "{} {}".format(*max(folders.items(), key=lambda item: item[1])),
        "circles": circles(found),
        "upward_imports": upward(found),
        "core_path_files": len(core),
        "core_path_lines": sum((root / path).read_text().count("\n") for path in core),
        "test_lines": sum(p.read_text().count("\n") for p in (root / "tests").rglob("*.py")),
    }


def main() -> None:
    """Print the figures, then one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", metavar="COMMIT")
    parser.add_argument("--levels", metavar="PACKAGE")
    parser.add_argument("--crossed", action="store_true")
    options = parser.parse_args()
    if options.crossed:
        files = crossed()
        print("\n".join(files))
        lines = sum((ROOT / file).read_text().count("\n") for file in files)
        print(json.dumps({"chat_request_files": len(files), "chat_request_lines": lines}))
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
    for key in columns[-1]:
        print(f"{key:28}" + " | ".join(str(c[key]) for c in columns))
    print(json.dumps(columns[-1]))


if __name__ == "__main__":
    main()
