"""gRPC front of the HTTP API: each gRPC call becomes a call of the ASGI application in this process.

Keys, limits, validation, the request log and errors are therefore those of HTTP. Serve calls the methods by their names
in `folio.proto`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar, cast
from urllib.parse import unquote, urlencode

import grpc
from google.protobuf.message import DecodeError
from pydantic_core import from_json
from ray.serve.grpc_util import RayServegRPCContext
from starlette.types import ASGIApp, Message

from folio.app.api.base import LOOP_BYTES, SizedExecutor
from folio.app.errors import RequestError
from folio.app.http.errors import HttpRefusal, error_of, error_response
from folio.app.http.event_stream import DONE, event_data
from folio.app.http.haproxy import ATTEMPT_HEADER
from folio.app.proto import convert
from folio.app.proto import folio_pb2 as pb

# All others: INVALID_ARGUMENT below 500, INTERNAL from 500 on. 413 is not RESOURCE_EXHAUSTED: a retry would fail, too.
_STATUSES = {
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
}
# The headers that a call's metadata may set.
_HEADERS = {"authorization", "x-api-key", "x-request-id", "x-forwarded-for", ATTEMPT_HEADER}
ERROR_METADATA = "folio-error"
# Most characters of an error message. It is in the status and in the metadata, which must fit into 8 KiB together, and
# a character beyond ASCII takes up to twelve bytes.
_LONGEST_MESSAGE, _LONGEST_OTHER_MESSAGE = 1000, 200

M = TypeVar("M")
Context: TypeAlias = RayServegRPCContext
Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Call(Generic[M]):
    """A request of the API.

    Attributes:
        kind: type of the answer's messages.
        fields: makes the fields of the body; `None`: no body.
        num_bytes: size of the message that the body is made of.
        session: a hint for routing.
        filled: fills a message with the fields of the answer's JSON.
        query: of the URL.
    """

    method: str
    path: str
    kind: type[M]
    fields: Callable[[], Fields] | None = None
    num_bytes: int = 0
    session: str | None = None
    filled: Callable[[M, Fields], M] = convert.filled
    query: str = ""


def _completions(streams: bool, request: Any) -> _Call[pb.Completion]:
    return _generation("/v1/completions", pb.Completion, convert.generate_body, streams, request)


def _chat(kind: type[M], streams: bool, request: Any) -> _Call[M]:
    return _generation("/v1/chat/completions", kind, convert.chat_body, streams, request)


def _generation(path: str, kind: type[M], body: Callable[[Any], Fields], streams: bool, request: Any) -> _Call[M]:
    def fields() -> Fields:
        return body(request) | {"stream": streams}

    session = request.scheduling.session or None
    return _Call("POST", path, kind, fields, request.ByteSize(), session, convert.answer_message)


def _pin(request: pb.PinRequest) -> _Call[pb.PinCard]:
    return _Call("POST", "/v1/pins", pb.PinCard, partial(convert.pin_body, request), request.ByteSize())


def _unpin(request: pb.UnpinRequest) -> _Call[pb.PinDeleted]:
    query = urlencode({"model": request.model}) if request.HasField("model") else ""
    return _Call("DELETE", f"/v1/pins/{request.name}", pb.PinDeleted, query=query)


def _read(data: bytes, kind: Any, answer: type[M], call: Callable[[Any], _Call[M]]) -> _Call[M]:
    """Parse a message into its call. Bytes that do not parse make a call that is refused after its key was checked;
    therefore gRPC passes bytes on instead of parsing them itself (`make proto`)."""
    try:
        return call(kind.FromString(data))
    except DecodeError:
        refusal = f"the request is not a {kind.DESCRIPTOR.full_name} message; see app/proto/folio.proto"

    def fields() -> Fields:
        raise RequestError(refusal)

    return _Call("POST", "/v1/completions", answer, fields)


def _unary(kind: Any, answer: type[M], call: Callable[[Any], _Call[M]]) -> Any:
    """The method of a call with one answer. `kind`: of the request's message."""

    async def method(self: GrpcIngress, request: bytes, grpc_context: Context) -> M:
        return await self._whole(_read(request, kind, answer, call), grpc_context)

    return method


def _streaming(kind: Any, answer: type[M], call: Callable[[Any], _Call[M]]) -> Any:
    async def method(self: GrpcIngress, request: bytes, grpc_context: Context) -> AsyncIterator[M]:
        async with aclosing(self._streamed(_read(request, kind, answer, call), grpc_context)) as messages:
            async for message in messages:
                yield message

    return method


def _filled_reports(message: M, answer: Fields) -> M:
    return convert.filled(message, {"replicas": answer})


class GrpcIngress:
    """The service of `folio.proto` on top of an ASGI application.

    A failed call answers with an empty message, also as a stream: Serve's proxy, where it is used, reads the status
    only together with a message.
    """

    _api: ASGIApp  # with the guard
    _lanes: SizedExecutor | None = None

    Generate = _unary(pb.GenerateRequest, pb.Completion, partial(_completions, False))
    GenerateStream = _streaming(pb.GenerateRequest, pb.Completion, partial(_completions, True))
    Chat = _unary(pb.ChatRequest, pb.ChatCompletion, partial(_chat, pb.ChatCompletion, False))
    ChatStream = _streaming(pb.ChatRequest, pb.ChatCompletionChunk, partial(_chat, pb.ChatCompletionChunk, True))
    Pin = _unary(pb.PinRequest, pb.PinCard, _pin)
    Unpin = _unary(pb.UnpinRequest, pb.PinDeleted, _unpin)
    Pins = _unary(pb.PinsRequest, pb.PinList, lambda _: _Call("GET", "/v1/pins", pb.PinList))
    Load = _unary(pb.LoadRequest, pb.LoadReport, lambda _: _Call("GET", "/v1/load", pb.LoadReport))
    Report = _unary(
        pb.ReportRequest,
        pb.MemoryReports,
        lambda _: _Call("GET", "/v1/load/memory", pb.MemoryReports, filled=_filled_reports),
    )
    Ready = _unary(pb.ReadyRequest, pb.ReadyReply, lambda _: _Call("GET", "/ready", pb.ReadyReply))

    async def _whole(self, call: _Call[M], context: Context) -> M:
        async with aclosing(self._sent(call, context)) as parts:
            content = b"".join([part async for part in parts])
        if context.code() or not content:
            return call.kind()
        if len(content) <= LOOP_BYTES:
            return call.filled(call.kind(), from_json(content))
        return await self._in_thread(len(content), lambda: call.filled(call.kind(), from_json(content)))

    async def _streamed(self, call: _Call[M], context: Context) -> AsyncGenerator[M, None]:
        async with aclosing(self._sent(call, context)) as parts:
            async for data in event_data(parts):
                if data == DONE:
                    continue
                answer = from_json(data)
                if (error := error_of(answer)) is not None:
                    _fail(context, error_response(error)[0], answer)
                else:
                    yield call.filled(call.kind(), answer)
        if context.code():
            yield call.kind()

    async def _sent(self, call: _Call[Any], context: Context) -> AsyncGenerator[bytes, None]:
        """The parts of the answer. An error has none: it goes into the context."""

        async def body() -> bytes:
            if call.fields is None:
                return b""
            try:
                if call.num_bytes <= LOOP_BYTES:
                    return _json(call.fields)
                return cast(bytes, await self._in_thread(call.num_bytes, partial(_json, call.fields)))
            except RequestError as error:
                raise HttpRefusal.from_error(error) from None

        headers, client = _headers(call, context), _client_of(context.peer())
        scope = http_scope(call.method, call.path, headers, client, call.query)
        status, failed = 200, b""
        async with aclosing(asgi_call(self._api, scope, body)) as messages:
            async for message in messages:
                if message["type"] == "http.response.start":
                    status = message["status"]
                    context.set_trailing_metadata(_trailing_metadata(message["headers"]))
                elif status < 400:
                    yield message.get("body", b"")
                else:
                    failed += message.get("body", b"")
        if status >= 400:
            _fail(context, status, from_json(failed))

    async def _in_thread(self, num_bytes: int, call: Callable[[], Any]) -> Any:
        if self._lanes is None:
            self._lanes = SizedExecutor("grpc", 1)
        return await self._lanes.run(num_bytes, call)


def _json(fields: Callable[[], Fields]) -> bytes:
    try:
        return json.dumps(fields(), ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"a string has half of a surrogate pair, which is not valid text: {error}") from None
    except ValueError as error:
        raise RequestError(f"a number is not finite: {error}") from None


def _headers(call: _Call[Any], context: Context) -> list[tuple[bytes, bytes]]:
    given = [(name, value) for name, value in context.invocation_metadata() if name in _HEADERS]
    given.append(("host", "localhost"))  # passes the host check, which is for browsers: they send no gRPC
    # Serve's id, which the client gets. The client's own id comes first and takes precedence.
    given += [("x-request-id", value) for name, value in context.trailing_metadata() if name == "request_id"]
    if call.session is not None:
        given.append(("x-session-id", call.session))
    if call.fields is not None:
        given.append(("content-type", "application/json"))
    return [(name.encode(), value.encode()) for name, value in given]


def _trailing_metadata(headers: list[tuple[bytes, bytes]]) -> list[tuple[str, str]]:
    """The answer's headers that callers get."""
    found = [(name.decode().lower(), value.decode("latin-1")) for name, value in headers]
    return [(name, value) for name, value in found if name == "retry-after" or name.startswith("x-ratelimit-")]


def _fail(context: Context, status: int, answer: Fields) -> None:
    """End the call with this error of the API."""
    message = str(answer["error"]["message"])
    message = message[: _LONGEST_MESSAGE if message.isascii() else _LONGEST_OTHER_MESSAGE]
    other = grpc.StatusCode.INVALID_ARGUMENT if status < 500 else grpc.StatusCode.INTERNAL
    context.set_code(_STATUSES.get(status, other))
    context.set_details(message)
    kept = [(name, value) for name, value in context.trailing_metadata() if name != "request_id"]
    error = json.dumps({"error": answer["error"] | {"message": message}})
    context.set_trailing_metadata([*kept, (ERROR_METADATA, error)])


def _client_of(peer: str) -> tuple[str, int]:
    """(address, port) of a gRPC peer such as `ipv4:127.0.0.1:5000` or `ipv6:%5B::1%5D:5000`."""
    host, _, port = unquote(peer).partition(":")[2].rpartition(":")
    return host.strip("[]") or peer, int(port) if port.isdigit() else 0


# Messages that the application may send ahead of its reader.
_MOST_AHEAD = 2


def http_scope(
    method: str, path: str, headers: Iterable[tuple[bytes, bytes]], client: tuple[str, int], query: str = ""
) -> Any:
    """The ASGI scope of a request; `path`: within the application."""
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "2",
        "method": method,
        "scheme": "http",
        "path": path,
        "root_path": "",
        "query_string": query.encode(),
        "headers": list(headers),
        "client": client,
        "server": None,
    }


async def asgi_call(
    application: ASGIApp, scope: Any, body: Callable[[], Awaitable[bytes]]
) -> AsyncGenerator[Message, None]:
    """The messages that the application sends. Closing cancels the request.

    Args:
        body: makes the body when the application asks for it; requests refused by their heads never do.
    """
    messages: asyncio.Queue[Message | None] = asyncio.Queue()
    room = asyncio.Semaphore(_MOST_AHEAD)
    was_read = False

    async def receive() -> Message:
        nonlocal was_read
        if was_read:
            await asyncio.Event().wait()  # a client that disconnects cancels the call
        was_read = True
        return {"type": "http.request", "body": await body(), "more_body": False}

    async def send(message: Message) -> None:
        await room.acquire()
        messages.put_nowait(message)

    task = asyncio.ensure_future(application(scope, receive, send))
    task.add_done_callback(lambda _: messages.put_nowait(None))
    try:
        while (message := await messages.get()) is not None:
            room.release()
            yield message
    finally:
        task.cancel()
        await asyncio.wait([task])
    await task  # raises the application's error
