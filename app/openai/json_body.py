"""How bodies are read: what is no JSON is an error that says so, before anybody looks at its fields.

How much there is in a JSON text, told before it is parsed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from app.openai.lanes import LOOP_BYTES, SizedExecutor

# Reading holds the interpreter's lock most of the time: more threads would make nothing faster.
_NUM_THREADS = 2


def json_routes() -> type[APIRoute]:
    """The class of an application's routes. Bodies of more than `LOOP_BYTES` are parsed and validated in threads, and
    none that has too much in it."""
    lanes = SizedExecutor("bodies", _NUM_THREADS)

    class JsonRoute(APIRoute):
        """A route whose body, if it has one, is JSON, and is said to be: a web page of another origin cannot send that
        without being asked for its origin first."""

        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()
            field = self.body_field
            if field is None:
                return handle

            def read(body: bytes) -> Any:
                """What the handler takes as it is. Raises `RequestValidationError`."""
                given = _parsed(body)
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
                    return await handle(_ReadRequest(request, read(body)))
                return await handle(_ReadRequest(request, await lanes.run(len(body), read, body)))

            return handle_json

    return JsonRoute


class _ReadRequest(Request):
    """A request whose body has been read."""

    def __init__(self, request: Request, value: Any) -> None:
        super().__init__(request.scope, request.receive)
        self._body = b"read"  # not empty, which is all that is asked of it
        self._value = value

    async def json(self) -> Any:
        return self._value


def _parsed(body: bytes) -> Any:
    """Raises `RequestValidationError` also for what is not UTF-8, nested more than 200 deep, or has `NaN`, which Python
    would take; and for what has too much in it. Of equal keys the last counts."""
    if reason := too_much(body):
        raise RequestValidationError([{"type": "too_much", "loc": ("body",), "msg": reason}])
    try:
        return from_json(body, allow_inf_nan=False)
    except ValueError as error:
        invalid = {"type": "json_invalid", "loc": ("body",), "msg": "", "ctx": {"error": str(error)}}
        raise RequestValidationError([invalid]) from error


# The cost of a body is that of its values, not of its bytes: 8 MiB of `{"role":"user","content":""}` take a second to
# parse and validate, 8 MiB of prose a few milliseconds. Prompts of token ids are many values, and cheap ones.
MAX_OBJECTS, MAX_STRINGS, MAX_VALUES = 1 << 15, 1 << 17, 1 << 19

_STRING = re.compile(rb'"[^"]*"?')  # without escapes


def too_much(text: bytes) -> str | None:
    """Why a JSON text is not to be parsed; `None` if it may be. It is looked at in steps of one string, between which
    other threads run, and not further than to the bound."""
    num_objects, num_values = text.count(b"{") + text.count(b"["), text.count(b",")
    if num_objects <= MAX_OBJECTS and num_values <= MAX_VALUES and text.count(b'"') <= 2 * MAX_STRINGS:
        return None  # even if none of them is within a string
    text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    num_objects = num_values = num_strings = end = 0
    for string in _STRING.finditer(text):
        begin = string.start()
        num_objects += text.count(b"{", end, begin) + text.count(b"[", end, begin)
        num_values += text.count(b",", end, begin)
        num_strings += 1
        end = string.end()
        if reason := _reason(num_objects, num_strings, num_values):
            return reason
    num_objects += text.count(b"{", end) + text.count(b"[", end)
    return _reason(num_objects, num_strings, num_values + text.count(b",", end))


def _reason(num_objects: int, num_strings: int, num_values: int) -> str | None:
    counts = (
        (num_objects, MAX_OBJECTS, "objects and arrays"),
        (num_strings, MAX_STRINGS, "strings, names of fields included"),
        (num_values, MAX_VALUES, "values"),
    )
    for number, most, what in counts:
        if number > most:
            return f"there are more than {most} {what}; send less in one request"
    return None
