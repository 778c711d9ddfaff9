"""JSON bodies of requests: bounds, parsing and validation in threads sized by the body, and strict base types."""

from __future__ import annotations

import asyncio
import contextvars
import json
import re
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, ParamSpec, Protocol, TypeVar

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, model_validator
from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from folio.app.api.output.json_text import paired_surrogates
from folio.app.api.unknown_fields import UnknownFields
from folio.app.errors import RequestError

# Nesting of objects and arrays. Python's recursion limit depends on the caller's depth and would be answered with 500.
MAX_JSON_DEPTH = 100
# Far more than any object here has. Each unknown field would be an error of its own.
MAX_FIELDS = 200
MAX_METADATA = 16

# Parts of messages that other servers accept.
_MEDIA = {"image_url", "input_image", "image", "input_audio", "audio", "input_file", "file", "document"}
_MEDIA |= {"video_url", "input_video", "video"}

Item = TypeVar("Item")
# pydantic describes every bad item of a list in about a kilobyte; the first one is enough.
ListOf = Annotated[list[Item], Field(fail_fast=True)]
# Left out of the JSON when it is null. OpenAI sends all other nulls.
Omitted = Annotated[Item | None, Field(exclude_if=lambda value: value is None)]


class StrictBody(BaseModel):
    """Base of request bodies. A field's docstring is its description on the OpenAPI page."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)

    dropped: ClassVar[frozenset[str]] = frozenset()
    """Fields that clients send and that mean nothing here; they are dropped."""

    @model_validator(mode="before")
    @classmethod
    def _check_fields(cls, fields: Any) -> Any:
        _check_number(fields, MAX_FIELDS, "fields")
        if cls.dropped and isinstance(fields, dict) and not cls.dropped.isdisjoint(fields):
            return {name: value for name, value in fields.items() if name not in cls.dropped}
        return fields


def at_most(number: int, what: str) -> BeforeValidator:
    """Bound a list's or object's length before its items are validated, which takes microseconds each."""
    return BeforeValidator(lambda items: _check_number(items, number, what))


def _check_number(items: Any, most: int, what: str) -> Any:
    if isinstance(items, dict | list) and len(items) > most:
        raise ValueError(f"{len(items)} {what}; at most {most} are allowed")
    return items


def check_text(text: str) -> str:
    """Raise `ValueError` for an unpaired surrogate: JSON can carry it, but UTF-8 and tokenizers cannot."""
    text.encode()  # UnicodeEncodeError is a ValueError
    return text


def check_json(value: dict[str, Any]) -> dict[str, Any]:
    """Raise `ValueError` for an object that is nested too deep, or cannot be written as strict JSON in UTF-8."""
    level: list[dict[str, Any] | list[Any]] = [value]
    depth = 0
    while level:
        depth += 1
        if depth > MAX_JSON_DEPTH:
            raise ValueError(f"objects and arrays are nested deeper than {MAX_JSON_DEPTH}; make it flatter")
        children = (child for node in level for child in (node.values() if isinstance(node, dict) else node))
        level = [child for child in children if isinstance(child, dict | list)]
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    return value


def json_text(value: object) -> object:
    """JSON text of a value, for a field that some clients send as an object. A text stays; null becomes empty."""
    try:
        return value if isinstance(value, str) else "" if value is None else json.dumps(value, ensure_ascii=False)
    except (TypeError, RecursionError) as error:  # not from HTTP
        raise ValueError(f"it cannot be written as JSON: {error}") from error


Text = Annotated[str, AfterValidator(check_text)]
JsonObject = Annotated[dict[str, Any], AfterValidator(check_json)]


def unsupported_field(why: str, *harmless: Any) -> BeforeValidator:
    """Refuse values of an OpenAI field that is not supported, except null and the `harmless` ones."""

    def check(value: Any) -> Any:
        if value is not None and not any(type(value) is type(one) and value == one for one in harmless):
            raise ValueError(why)
        return value

    return BeforeValidator(check)


def _refuse_media(part: Any) -> Any:
    if isinstance(part, dict) and isinstance(kind := part.get("type"), str) and kind in _MEDIA:
        raise ValueError(f"this model takes text only; leave out the part of type {part['type']!r}")
    return part


# For a part of a message.
only_text = BeforeValidator(_refuse_media)
_NOT_PLAIN = re.compile(r"[^A-Za-z0-9_.-]")


def plain_name(name: str) -> str:
    """A client's name of a field or type, in the characters that the header of ignored fields can have."""
    return _NOT_PLAIN.sub("_", name)[:64]


def left_out_kind(part: object) -> tuple[str, str]:
    """A part of a client's history that no text model reads: its type in printable ASCII, and the text in its place.

    An image in a tool's result must not be refused: it stays in the history, and would end the conversation.
    """
    kind = str(part.get("type")) if isinstance(part, dict) else type(part).__name__
    noun = "image" if "image" in kind or "screenshot" in kind else kind
    is_media = kind in _MEDIA or noun == "image"
    return plain_name(kind), f"[{noun} left out: this model reads text only]" if is_media else ""


class OtherKind(StrictBody):
    """An object of an unsupported type. Only the type is kept, so that it can be named."""

    type: Annotated[str, AfterValidator(plain_name)]

    @model_validator(mode="before")
    @classmethod
    def _check_fields(cls, fields: Any) -> Any:
        if isinstance(fields, dict):
            return {name: fields[name] for name in cls.model_fields if name in fields}
        return fields


def text_or(kind: str) -> Discriminator:
    """Tell a list, tagged `kind`, from a text, so that errors describe only the kind that was sent."""
    return Discriminator(lambda value: kind if isinstance(value, list) else "text")


def by_type(*known: str) -> Discriminator:
    """Tag objects with their `type` if it is known, and with "other" if not."""

    def tag(value: Any) -> str:
        kind = value.get("type", known[0]) if isinstance(value, dict) else getattr(value, "type", known[0])
        return kind if isinstance(kind, str) and kind in known else "other"

    return Discriminator(tag)


# For lists that clients send empty to mean none.
none_if_empty = BeforeValidator(lambda items: None if items == [] else items)


class _Part(Protocol):
    @property
    def text(self) -> str: ...


def joined_text(content: str | Sequence[_Part] | None) -> str:
    """The text of a message's content."""
    return (content or "") if content is None or isinstance(content, str) else "".join(part.text for part in content)


@contextmanager
def in_terms_of(fields: Mapping[str, str]) -> Iterator[None]:
    """Rename the fields in errors of a chat completion to those of the body that it was made from.

    Args:
        fields: of a chat completion → their names in that body.
    """
    try:
        yield
    except RequestError as error:
        if error.param is None or (field := fields.get(error.param)) is None:
            raise
        raise type(error)(re.sub(rf"\b{error.param}\b", field, error.message), field) from error


Name = Annotated[Text, Field(min_length=1, max_length=256)]
Metadata = Annotated[
    dict[Annotated[Text, Field(max_length=64)], Annotated[Text, Field(max_length=512)]],
    Field(max_length=MAX_METADATA),
    at_most(MAX_METADATA, "notes"),
]


class ClientFields(StrictBody):
    """Fields of clients that change no output."""

    metadata: Metadata | None = None
    """Notes of the client. `/v1/responses` repeats them in its answer."""
    store: bool | None = None
    """No effect: only responses are stored."""
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None
    """No effect: there is one tier, and answers say "default". Use `priority` for urgent requests."""
    safety_identifier: Annotated[Text | None, Field(max_length=256)] = None
    """The end user of the request. Ignored."""
    prompt_cache_key: Name | None = None
    """Requests with the same key go to the same replica where that costs little, like those with the same
    `X-Session-Id`. Cached prefixes are found without it."""
    session_id: Name | None = None
    """OpenRouter's name for `prompt_cache_key`."""
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    """`24h`: keep the prefix of this request in the cache for as long as the server allows (`max_cache_ttl_s`, an hour
    by default), like `cache_ttl_s`, which takes precedence. `in_memory` has no effect."""


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


def json_routes(unknown: UnknownFields) -> type[APIRoute]:
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
            kind = field.field_info.annotation
            assert isinstance(kind, type)
            assert issubclass(kind, BaseModel)

            def read(body: bytes) -> tuple[Any, Sequence[str]]:
                """The body, and its fields that were dropped."""
                given = parse_json(body)
                value, errors = field.validate(given, {}, loc=("body",))
                return unknown.resolve(kind, given, errors) if errors else (value, ())

            async def handle_json(request: Request) -> Response:
                given = request.headers.get("content-type", "")
                media = given.partition(";")[0].strip().lower()
                if media != "application/json" and not (media.startswith("application/") and media.endswith("+json")):
                    said = f"content-type is {given[:100]!r}" if given else "there is no content-type"
                    raise HTTPException(415, f"{said}; send JSON as application/json")
                if not (body := await request.body()):
                    return await handle(request)
                if len(body) <= LOOP_BYTES:
                    value, dropped = read(body)
                else:
                    value, dropped = await executor.run(len(body), read, body)
                if dropped:
                    unknown.note(dropped, request.client.host if request.client else "unknown")
                return await handle(_ParsedRequest(request, value))

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
    """Parse strict JSON in UTF-8, nested at most 200 deep. Of duplicate keys the last counts. An unpaired surrogate
    becomes U+FFFD.

    Raises:
        RequestValidationError: the text is not such JSON (Python would accept `NaN`), or has too many values.
    """
    if reason := too_much(body):
        raise RequestValidationError([{"type": "too_much", "loc": ("body",), "msg": reason}])
    try:
        return from_json(body, allow_inf_nan=False)
    except ValueError as error:
        if b"\\u" in body:  # JavaScript clients cut texts inside a character
            with suppress(ValueError):
                return from_json(paired_surrogates(body.decode()), allow_inf_nan=False)
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
