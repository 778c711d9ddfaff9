"""JSON bodies of requests: bounds on the number of values, parsing and validation in threads sized by the body."""

from __future__ import annotations

import asyncio
import contextvars
import re
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ParamSpec, TypeVar

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

# Larger bodies are parsed and tokenised outside of the event loop, ...
LOOP_BYTES = 16 << 10
# ... and bodies larger than this one at a time, so that memory and latency do not grow with the number of clients.
SHARED_BYTES = 128 << 10
# Parsing mostly holds the interpreter's lock: more threads would not be faster.
_NUM_THREADS = 2
# The cost of a body is that of its values, not of its bytes: 8 MiB of `{"role":"user","content":""}` take a second to
# parse and validate, 8 MiB of prose a few milliseconds. Prompts of token ids are many values, and cheap ones.
MAX_OBJECTS, MAX_STRINGS, MAX_VALUES = 1 << 15, 1 << 17, 1 << 19

_STRING = re.compile(rb'"[^"]*"?')  # in a text without escapes

P = ParamSpec("P")
T = TypeVar("T")


class SizedExecutor:
    """Threads for work in proportion to a request's size: one for large requests, and several for all others, which
    never wait for a large one.

    Args:
        name: of the threads.
        num_threads: for requests that are not large.
    """

    def __init__(self, name: str, num_threads: int) -> None:
        self._shared = ThreadPoolExecutor(num_threads, name)
        self._large = ThreadPoolExecutor(1, f"{name}-large")

    async def run(self, num_bytes: int, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """`asyncio.to_thread`, in the thread for a request of this size."""
        threads = self._large if num_bytes > SHARED_BYTES else self._shared
        in_context = partial(contextvars.copy_context().run, call, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(threads, in_context)


def json_routes() -> type[APIRoute]:
    """The class of an application's routes. Bodies of more than `LOOP_BYTES` are parsed and validated in threads."""
    executor = SizedExecutor("bodies", _NUM_THREADS)

    class JsonRoute(APIRoute):
        """A route whose body, if it has one, must be declared as JSON: browsers send that to another origin only after
        a preflight request."""

        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()
            field = self.body_field
            if field is None:
                return handle

            def read(body: bytes) -> Any:
                given = parse_json(body)
                value, errors = field.validate(given, {}, loc=("body",))
                if errors:
                    raise RequestValidationError(errors, body=given)
                return value

            async def handle_json(request: Request) -> Response:
                given = request.headers.get("content-type", "")
                kind = given.partition(";")[0].strip().lower()
                if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
                    said = f"content-type is {given[:100]!r}" if given else "there is no content-type"
                    raise HTTPException(415, f"{said}; send JSON as application/json")
                if not (body := await request.body()):
                    return await handle(request)
                if len(body) <= LOOP_BYTES:
                    return await handle(_ParsedRequest(request, read(body)))
                return await handle(_ParsedRequest(request, await executor.run(len(body), read, body)))

            return handle_json

    return JsonRoute


class _ParsedRequest(Request):
    """A request whose body has been parsed and validated."""

    def __init__(self, request: Request, value: Any) -> None:
        super().__init__(request.scope, request.receive)
        self._body = b"read"  # FastAPI only checks that it is not empty
        self._value = value

    async def json(self) -> Any:
        return self._value


def parse_json(body: bytes) -> Any:
    """Parse strict JSON in UTF-8, nested at most 200 deep. Of equal keys the last counts.

    Raises:
        RequestValidationError: the text is not such JSON (Python would accept `NaN`), or has too many values.
    """
    if reason := too_much(body):
        raise RequestValidationError([{"type": "too_much", "loc": ("body",), "msg": reason}])
    try:
        return from_json(body, allow_inf_nan=False)
    except ValueError as error:
        invalid = {"type": "json_invalid", "loc": ("body",), "msg": "", "ctx": {"error": str(error)}}
        raise RequestValidationError([invalid]) from error


def too_much(text: bytes) -> str | None:
    """Why a JSON text has too many values to be parsed; `None` if it may be parsed.

    The text is scanned string by string, so that other threads run in between, and only as far as the bound.
    """
    num_objects, num_values = text.count(b"{") + text.count(b"["), text.count(b",")
    if num_objects <= MAX_OBJECTS and num_values <= MAX_VALUES and text.count(b'"') <= 2 * MAX_STRINGS:
        return None  # even if no bracket, comma or quote is part of a string
    text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    num_objects = num_values = num_strings = end = 0
    for string in _STRING.finditer(text):
        begin = string.start()
        num_objects += text.count(b"{", end, begin) + text.count(b"[", end, begin)
        num_values += text.count(b",", end, begin)
        num_strings += 1
        end = string.end()
        if reason := _exceeded(num_objects, num_strings, num_values):
            return reason
    num_objects += text.count(b"{", end) + text.count(b"[", end)
    return _exceeded(num_objects, num_strings, num_values + text.count(b",", end))


def _exceeded(num_objects: int, num_strings: int, num_values: int) -> str | None:
    counts = (
        (num_objects, MAX_OBJECTS, "objects and arrays"),
        (num_strings, MAX_STRINGS, "strings, names of fields included"),
        (num_values, MAX_VALUES, "values"),
    )
    for number, most, what in counts:
        if number > most:
            return f"there are more than {most} {what}; send less in one request"
    return None
