"""Mutants: the code with one place changed, for `python -m tests.mutation`."""

from __future__ import annotations

import ast
import hashlib
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAIRS = "Lt LtE, Gt GtE, Eq NotEq, Is IsNot, In NotIn, And Or, Add Sub, Mult FloorDiv, BitAnd BitOr, LShift RShift"
SWAPS: dict[type[Any], type[Any]] = {ast.Div: ast.Mult, ast.Mod: ast.FloorDiv}
for one, other in map(str.split, PAIRS.split(",")):
    SWAPS |= {getattr(ast, one): getattr(ast, other), getattr(ast, other): getattr(ast, one)}
LOG_CALLS = {"debug", "info", "warning", "error", "exception", "critical", "log"}
TYPE_HINTS = {"annotation", "returns", "decorator_list"}


@dataclass(frozen=True)
class Mutant:
    file: str
    line: int
    original: str  # its first line, stripped; with `file` and `operator` the key in mutants.toml
    operator: str
    source: str
    # The qualified name of the function or method around it; empty at the level of module and class, and where results
    # are cached, so that not all tests that need them call it.
    function: str

    @property
    def mutated(self) -> str:
        return self.source.splitlines()[self.line - 1].strip()

    def __str__(self) -> str:
        return f"{self.file}:{self.line}  [{self.operator}]  {self.original}  →  {self.mutated}"


def mutants_of(root: Path, file: str, skipped_functions: Collection[str], seed: int) -> Iterator[tuple[bytes, Mutant]]:
    """One mutant for each place of a file, with a random key that edits elsewhere in the file leave the same."""
    source = (root / file).read_bytes()
    lines = source.splitlines(keepends=True)
    seen: Counter[str] = Counter()

    def offset(line: int, column: int) -> int:
        return sum(map(len, lines[: line - 1])) + column

    for node, function, returns_bool in places(ast.parse(source), skipped_functions):
        if not (variants := list(variants_of(node, returns_bool))):
            continue
        text = lines[variants[0][1].lineno - 1].decode().strip()
        place = f"{seed} {file} {text} {type(node).__name__}"
        seen[place] += 1
        key = hashlib.sha256(f"{place} {seen[place]}".encode()).digest()
        operator, old, new = variants[key[-1] % len(variants)]
        start = offset(old.lineno, old.col_offset)
        end = offset(old.end_lineno, old.end_col_offset)
        mutated = (source[:start] + new.encode() + source[end:]).decode()
        yield key, Mutant(file, old.lineno, lines[old.lineno - 1].decode().strip(), operator, mutated, function)


def places(
    node: ast.AST,
    skipped_functions: Collection[str],
    scope: str = "",
    function: str = "",
    returns_bool: bool = False,
) -> Iterator[tuple[Any, str, bool]]:
    """The nodes below that a test can be expected to notice: no type hints, no text for people, no assertions.

    With each come the qualified name of the outermost function around it, and whether the innermost returns a truth
    value. `scope`: of the classes around the node.
    """
    match node:
        case ast.JoinedStr() | ast.Raise() | ast.Assert() | ast.Expr(ast.Constant()):
            return
        case ast.Expr(ast.Call(ast.Attribute(attr=name))) if name in LOG_CALLS:
            return
        case ast.If(ast.Name("TYPE_CHECKING")):
            return
        case ast.ClassDef():
            scope = f"{scope}{node.name}."
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            if node.name in skipped_functions:
                return
            if not any("cache" in ast.unparse(decorator) for decorator in node.decorator_list):
                function = function or f"{scope}{node.name}"
            returns_bool = isinstance(node.returns, ast.Name) and node.returns.id == "bool"
    yield node, function, returns_bool
    for name, value in ast.iter_fields(node):
        if name not in TYPE_HINTS:
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from places(child, skipped_functions, scope, function, returns_bool)


def variants_of(node: Any, returns_bool: bool) -> Iterator[tuple[str, Any, str]]:
    """What may be changed at a place: the operator's name, the node to replace, and its new text."""

    def swapped(old: Any, changed: ast.AST) -> tuple[str, Any, str]:
        text = ast.unparse(changed) if isinstance(node, ast.stmt) else f"({ast.unparse(changed)})"
        return f"{type(old).__name__} to {SWAPS[type(old)].__name__}", node, text

    match node:
        case ast.Compare():
            for i, op in enumerate(node.ops):
                ops = [*node.ops[:i], SWAPS[type(op)](), *node.ops[i + 1 :]]
                yield swapped(op, ast.Compare(node.left, ops, node.comparators))
        case ast.BinOp() if type(node.op) in SWAPS:
            yield swapped(node.op, ast.BinOp(node.left, SWAPS[type(node.op)](), node.right))
        case ast.AugAssign() if type(node.op) in SWAPS:
            yield swapped(node.op, ast.AugAssign(node.target, SWAPS[type(node.op)](), node.value))
        case ast.BoolOp():
            yield swapped(node.op, ast.BoolOp(SWAPS[type(node.op)](), node.values))
        case ast.UnaryOp(ast.Not()):
            yield "drop not", node, f"({ast.unparse(node.operand)})"
        case ast.If() | ast.While() | ast.IfExp():
            yield "negate", node.test, f"(not ({ast.unparse(node.test)}))"
        case ast.comprehension(ifs=[condition, *_]):
            yield "negate", condition, f"(not ({ast.unparse(condition)}))"
        case ast.Constant(bool()):
            pass
        case ast.Constant(int() | float() as number):
            yield "plus 1", node, f"({number + 1})"
            yield "minus 1", node, f"({number - 1})"
        case ast.Expr(ast.Call() | ast.Await(ast.Call())):
            yield "drop call", node, "pass"
        case ast.Return(value) if value is not None and not (isinstance(value, ast.Constant) and value.value is None):
            if returns_bool:
                yield "return not", value, f"(not ({ast.unparse(value)}))"
            else:
                yield "return None", value, "None"
