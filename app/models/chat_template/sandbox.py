"""Sandbox of chat templates: transformers' Jinja environment, in which a rendering is bounded in time and size.

A template comes with a model, and a client chooses what it renders. One call into C holds the interpreter's lock and
cannot be interrupted, so that each must be short:

- every block of statements is a step, at which processor time is checked: loops and recursion end;
- operators, literals, filters and methods whose result may be much larger than their operands are checked before;
- other filters and methods are those whose work is linear in their operands.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import wraps
from types import FunctionType
from typing import Any

from jinja2 import Environment, TemplateError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context
from jinja2.visitor import NodeTransformer

# The most characters of one value, and of all values of a rendering; the most items of a list that an operator makes.
MAX_CHARS, MAX_TOTAL, MAX_ITEMS = 1 << 24, 1 << 28, 1 << 13
# Cost of a step and of an item of a container, in characters.
_STEP, _ITEM = 64, 32
_UNCHECKED = 1024  # characters between checks of the clock
_MAX_WIDTH, _MAX_INDENT, _MAX_BITS, _MAX_PARTS = 1000, 64, 4096, 1 << 17
WORK = " work"  # the variable of a rendering's bounds; no template can spell it
_WIDE_FORMAT = re.compile(r"[0-9]{4}|\*|:[^{}]*\{")

_STR = (
    "capitalize casefold center count endswith find format format_map index isalnum isalpha isascii isdecimal "
    "isdigit isidentifier islower isnumeric isprintable isspace istitle isupper join ljust lower lstrip partition "
    "removeprefix removesuffix replace rfind rindex rjust rpartition rsplit rstrip split splitlines startswith "
    "strip swapcase title upper zfill"
)
_METHODS: tuple[tuple[type, set[str]], ...] = (
    (str, set(_STR.split())),
    (dict, {"get", "items", "keys", "values"}),
    (list, {"count", "index"}),
    (tuple, {"count", "index"}),
    (int, set()),
    (float, {"is_integer"}),
)
_FILTERS = (
    "abs attr batch capitalize center count d default dictsort e escape first float forceescape format groupby indent "
    "int items join last length list lower map max min reject rejectattr replace reverse round safe select selectattr "
    "slice sort string sum title trim truncate unique upper urlencode wordcount"
)


class LimitError(TemplateError):
    """A rendering takes too long, or makes too much text."""

    def __init__(self, message: str, *, is_time: bool = False) -> None:
        super().__init__(message)
        self.is_time = is_time


class Work:
    """Account of one rendering's work, and its limits.

    Args:
        limit_s: seconds of the thread's processor time.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s, self._deadline = limit_s, time.thread_time() + limit_s
        self._total = self._checked = 0

    def spend(self, num_chars: int) -> None:
        """Charge a value, or the execution of a block. Raises `LimitError`."""
        self._total += num_chars
        if self._total > self._checked:
            self._check(num_chars)

    def _check(self, num_chars: int) -> None:
        self._checked = self._total + _UNCHECKED
        if num_chars > MAX_CHARS or self._total > MAX_TOTAL:
            raise LimitError(
                f"it makes more than {MAX_CHARS} characters at once, or {MAX_TOTAL} in all, a step counted as {_STEP}"
            )
        if time.thread_time() > self._deadline:
            raise LimitError(f"it takes more than {self._limit_s:g} s", is_time=True)


def _weight(*values: object) -> int:
    """Characters and items of values, shared parts counted as often as they occur. Raises `LimitError`."""
    total, parts = 0, list(values)
    for value in parts:  # grows
        if isinstance(value, str):
            total += len(value)
        elif isinstance(value, list | tuple):
            parts += value
        elif isinstance(value, dict):
            parts += value
            parts += value.values()
        else:
            continue
        if total + _ITEM * len(parts) > MAX_CHARS:
            raise LimitError(f"it makes a value of more than {MAX_CHARS} characters")
    return total + _ITEM * len(parts)


def _check_product(number: int, times: int = 1) -> None:
    if number * times > MAX_CHARS:
        raise LimitError(f"it makes a value of more than {MAX_CHARS} characters")


def _check_at_most(value: object, most: int) -> None:
    if isinstance(value, int) and abs(value) > most:
        raise LimitError(f"it uses the number {most + 1} or a larger one where at most {most} is allowed")


def _check_format(text: str) -> None:
    if _WIDE_FORMAT.search(text):
        raise LimitError(f"it formats with a width of four digits or a variable one: {text[:40]!r}")


def _check_method(text: str, name: str, args: tuple[Any, ...]) -> None:
    """Check a call of a text's method before it is made."""
    if name in ("center", "ljust", "rjust", "zfill"):
        _check_at_most(args[0], _MAX_WIDTH)
    elif name == "replace":
        _check_product(len(text) + text.count(args[0]) * len(args[1]))
    elif name in ("split", "rsplit", "splitlines"):
        most = len(text) // 2 if name == "splitlines" or not args or args[0] is None else text.count(args[0])
        if min(most, args[1] if len(args) > 1 and args[1] >= 0 else most) > _MAX_PARTS:
            raise LimitError(f"it splits a text into more than {_MAX_PARTS} parts")


def _multiplied(left: Any, right: Any) -> Any:
    for sequence, number in ((left, right), (right, left)):
        if isinstance(sequence, str | list | tuple) and isinstance(number, int):
            _check_product(len(sequence) if isinstance(sequence, str) else _weight(sequence), max(number, 0))
            if not isinstance(sequence, str) and len(sequence) * number > MAX_ITEMS:
                raise LimitError(f"it makes a list of more than {MAX_ITEMS} items")
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > _MAX_BITS:
        raise LimitError(f"it makes a number of more than {_MAX_BITS} bits")
    return left * right


def _powered(left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * abs(right) > _MAX_BITS:
        raise LimitError(f"it makes a number of more than {_MAX_BITS} bits")
    return left**right


def _modulo(left: Any, right: Any) -> Any:
    if isinstance(left, str):
        _check_format(left)
        _weight(right)
    return left % right


_OPERATORS: Mapping[str, Callable[[Any, Any], Any]] = {"*": _multiplied, "**": _powered, "%": _modulo}


def _joined(context: _Context, *parts: object) -> str:
    """The operator `a ~ b`."""
    return "".join(str(_shown(context, part)) for part in parts)


def _built(context: _Context, value: Any) -> Any:
    """Charge a list, tuple or dict that is written in the template."""
    context.work.spend(_weight(value))
    return value


def _counted(context: _Context) -> bool:
    """Charge a step of a loop that only filters."""
    context.work.spend(_STEP)
    return True


@pass_context
def _shown(context: _Context, value: Any) -> Any:
    """Charge a value before it is written."""
    context.work.spend(len(value) if isinstance(value, str) else _weight(value))
    return value


def _concat(pieces: Iterable[str]) -> str:
    pieces = list(pieces)
    _check_product(sum(map(len, pieces)))
    return "".join(pieces)


@pass_context
def _tojson(
    context: _Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    context.work.spend(_weight(value))
    if (indent if isinstance(indent, int) else len(indent or "")) > _MAX_INDENT:
        raise LimitError(f"it indents by more than {_MAX_INDENT}")
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys, allow_nan=True
    )
    if indent is None:
        return encoder.encode(value)
    pieces = []
    for piece in encoder.iterencode(value):  # indentation may be far larger than the value
        context.work.spend(len(piece))
        pieces.append(piece)
    return "".join(pieces)


def _limited(items: Iterable[Any]) -> Iterator[Any]:
    """Items that a filter makes one by one, as far as they do not weigh too much together."""
    total = 0
    for item in items:
        total += _weight(item)
        _check_product(total)
        yield item


def _spread(context: _Context, items: Iterable[Any]) -> list[Any]:
    """The `*items` of a call, bounded."""
    return list(_limited(items))


_OWN: tuple[Any, ...] = (_joined, _built, _counted, _spread)


def _check_filter(
    name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], given: Sequence[Any], total: int
) -> None:
    """Refuse a call whose result would be too large. `given`: texts and collections, of the weight `total`."""
    if name == "indent":
        _check_indent(args, kwargs, given)
    elif name == "replace" and len(given) > 2:
        _check_method(str(given[0]), name, tuple(given[1:]))
    elif name == "join" and len(given) > 1:
        _check_product(total + len(given[0]) * len(given[-1]))
    elif name == "format":
        _check_format(str(args[0]))
    elif name == "int" and isinstance(args[0], str) and len(args[0]) > _MAX_BITS:
        raise LimitError(f"it makes a number of more than {_MAX_BITS} digits")
    elif name == "sum" and any(isinstance(arg, list | tuple) for arg in given[1:]):
        raise LimitError("it sums up lists, which takes the square of their length")


def _check_indent(args: tuple[Any, ...], kwargs: Mapping[str, Any], given: Sequence[Any]) -> None:
    widths = [len(arg) for arg in given[1:] if isinstance(arg, str)]
    widths += [arg for arg in (*args, *kwargs.values()) if isinstance(arg, int)]
    _check_product(str(args[0]).count("\n") + 1, max(widths, default=4))


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter of Jinja's whose arguments and result are checked."""

    @wraps(function)  # also keeps the mark of filters that want the context
    def bounded(*args: Any, **kwargs: Any) -> Any:
        limited = (_limited(arg) if isinstance(arg, Iterator) else arg for arg in args)
        args = tuple(list(arg) if name == "join" and isinstance(arg, Iterator) else arg for arg in limited)
        given = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, str | list | tuple | dict)]
        total = _weight(*given)
        if name in ("batch", "center", "indent", "round", "slice"):
            for arg in (*args[1:], *kwargs.values()):
                _check_at_most(arg, _MAX_WIDTH)
        _check_filter(name, args, kwargs, given, total)
        value = function(*args, **kwargs)
        if isinstance(value, str | list | tuple):
            _weight(value)
        return value

    return bounded


class _Context(Context):
    """Variables of one rendering, and its bounds."""

    def __init__(self, environment: Environment, parent: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        super().__init__(environment, parent, *args, **kwargs)
        self.work: Work = parent[WORK]


class _Steps(CodeGenerator):
    def blockvisit(self, nodes: Iterable[nodes.Node], frame: Frame) -> None:
        self.writeline(f"spend({_STEP})")
        super().blockvisit(nodes, frame)

    def write_commons(self) -> None:
        super().write_commons()
        self.writeline("spend = context.work.spend")


class _Bounds(NodeTransformer):
    """Replaces expressions by calls of the functions above."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _call("joined", node.nodes, node)

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if node.test is not None:
            node.test = nodes.And(_call("counted", [], node), node.test, lineno=node.lineno)
        return node

    def _visit_call(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        if node.dyn_args is not None:
            node.dyn_args = _call("spread", [node.dyn_args], node)
        return node

    def _visit_literal(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        if getattr(node, "ctx", "load") != "load" or all(isinstance(part, nodes.Const) for part in _parts(node)):
            return node
        return _call("built", [node], node)

    visit_List = visit_Tuple = visit_Dict = _visit_literal  # noqa: N815 (the names that Jinja calls)
    visit_Call = visit_Filter = visit_Test = _visit_call  # noqa: N815


def _parts(literal: nodes.Node) -> Iterable[nodes.Node]:
    for item in literal.iter_child_nodes():
        yield from item.iter_child_nodes() if isinstance(item, nodes.Pair) else (item,)


def _call(name: str, args: list[nodes.Expr], place: nodes.Node) -> nodes.Call:
    function = nodes.EnvironmentAttribute(name, lineno=place.lineno)
    return nodes.Call(function, args, [], None, None, lineno=place.lineno)


class _Generation(Extension):
    """`{% generation %}`: marks an answer for training; its content is rendered."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own form)

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=lineno)


def _raise_exception(message: str) -> None:
    raise TemplateError(str(message))


def _strftime_now(form: str) -> str:
    if len(form) > _MAX_WIDTH:
        raise LimitError(f"the form of the date has more than {_MAX_WIDTH} characters")
    return datetime.now().strftime(form)


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    made = dict(*(arg if isinstance(arg, dict) else _limited(arg) for arg in args), **kwargs)
    _weight(made)
    return made


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Compiles chat templates. The variables of a rendering must have `WORK`."""

    code_generator_class = _Steps
    context_class = _Context
    concat = staticmethod(_concat)
    intercepted_binops = frozenset({"+", *_OPERATORS})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], finalize=_shown, cache_size=0
        )
        self.filters = {name: _bounded(name, FILTERS[name]) for name in _FILTERS.split()} | {"tojson": _tojson}
        self.joined, self.built, self.counted, self.spread = _OWN
        self.globals = {
            "range": self.globals["range"],
            "joiner": self.globals["joiner"],
            "dict": _dict,
            "namespace": Namespace,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_Bounds().visit(source), *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        value = left + right if operator == "+" else _OPERATORS[operator](left, right)
        if isinstance(value, str):
            context.work.spend(len(value))
        elif isinstance(value, list | tuple):
            if len(value) > MAX_ITEMS:
                raise LimitError(f"it makes a list of more than {MAX_ITEMS} items")
            context.work.spend(len(value))
        return value

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        if type(function) is FunctionType and any(function is own for own in _OWN):
            return function(context, *args)
        owner = getattr(function, "__self__", None)
        if isinstance(owner, str) and type(function) is not FunctionType:
            kwargs = {key: value for key, value in kwargs.items() if not key.startswith("_")}  # Jinja's own
            name = function.__name__
            if name == "join" and args:
                args = (list(_limited(args[0])), *args[1:])
                _check_product(_weight(args[0]) + len(owner) * len(args[0]))
            else:
                _check_method(owner, name, args)
            value = function(*args, **kwargs)
            context.work.spend(len(value) if isinstance(value, str | list) else 1)
            return value
        if getattr(function, "catch_varargs", False) or getattr(function, "catch_kwargs", False):
            context.work.spend(_weight(args, kwargs))  # as a tuple and a dict
        return super().call(context, function, *args, **kwargs)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        for kind, names in _METHODS:
            if isinstance(obj, kind):
                return attr in names
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        make, text = wrapped, value.__self__

        def bounded(*args: Any, **kwargs: Any) -> str:
            _check_format(text)
            _weight(args, kwargs)
            made = make(*args, **kwargs)
            _check_product(len(made))
            return made

        return bounded
