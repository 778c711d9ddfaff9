"""Transport over a server's gRPC interface (`app/proto/folio.proto`)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import grpc
from pydantic import TypeAdapter
from pydantic_core import from_json

from folio.app.api.operators.replies import LoadReport, PinList
from folio.app.client.transport import PerLoop, connection_lost, no_such_call, unreachable
from folio.app.errors import DeadlineError, EngineError, FolioError, OverloadedError, RequestError
from folio.app.http.errors import error_of
from folio.app.proto import convert
from folio.app.proto import folio_pb2 as pb
from folio.app.proto.folio_pb2_grpc import FolioStub
from folio.vmem import MemoryReport

# The call ends this much later than `timeout_s`, so that the server's own error arrives first.
_GRACE_S = 2.0
_REPORTS = TypeAdapter(dict[str, MemoryReport])


class OverGrpc:
    """Calls over gRPC. Args: the URL, `grpc://host:port` or, with TLS, `grpcs://…`, and metadata of every call. The
    path names one of several applications of a Serve: `grpc://host:port/folio`."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        parts = urlsplit(url)
        self._url = url
        self._target = parts.netloc
        self._has_tls = parts.scheme == "grpcs"
        self._metadata = [(name.lower(), value) for name, value in headers.items()]
        if application := parts.path.strip("/"):
            self._metadata.append(("application", application))
        self._channels = PerLoop(self._channel, grpc.aio.Channel.close)

    async def call(self, method: str, answer: Any, *args: Any) -> Any:
        name, message, read = self._prepared(method, answer, args)
        with self._errors():
            return read(await self._started(name, message, args))

    async def stream(self, method: str, item: Any, *args: Any) -> AsyncGenerator[Any, None]:
        name, message, read = self._prepared(method, item, args)
        with self._errors():
            call = self._started(name, message, args)
            try:
                async for answer in call:
                    if answer.id:  # otherwise the answer is empty and an error follows
                        yield read(answer)
            finally:
                call.cancel()

    async def close(self) -> None:
        await self._channels.close()

    def _prepared(self, method: str, answer: Any, args: Sequence[Any]) -> tuple[str, Any, Callable[[Any], Any]]:
        """(Name of the call, its message, conversion of the answer's message)."""
        session = args[1] if len(args) > 1 else None
        match method:
            case "generate" | "generate_stream":
                name, message = "Generate", convert.generate_message(_json(args[0]), session)
            case "chat" | "chat_stream":
                name, message = "Chat", convert.chat_message(_json(args[0]), session)
            case "pin":
                return "Pin", convert.pin_message(_json(args[0])), _nothing
            case "unpin":
                return "Unpin", pb.UnpinRequest(name=args[0], model=session), _nothing
            case "pins":
                return "Pins", pb.PinsRequest(), _pins
            case "load":
                return "Load", pb.LoadRequest(), _load
            case "reports":
                return "Report", pb.ReportRequest(), _reports
            case "ready":
                return "Ready", pb.ReadyRequest(), _nothing
            case _:
                raise no_such_call(method, "gRPC")
        if method.endswith("_stream"):
            name += "Stream"
        return name, message, lambda message: answer.model_validate(convert.answer_fields(message))

    def _started(self, name: str, message: Any, args: Sequence[Any]) -> Any:
        timeout_s = getattr(args[0], "timeout_s", None) if args else None
        method = getattr(FolioStub(self._channels.get()), name)
        return method(message, metadata=self._metadata, timeout=None if timeout_s is None else timeout_s + _GRACE_S)

    def _channel(self) -> Any:
        options = [
            ("grpc.max_receive_message_length", -1),  # answers may be large
            # By default gRPC tries to reconnect at growing intervals, up to two minutes.
            ("grpc.initial_reconnect_backoff_ms", 500),
            ("grpc.max_reconnect_backoff_ms", 1000),
        ]
        if self._has_tls:
            return grpc.aio.secure_channel(self._target, grpc.ssl_channel_credentials(), options)
        return grpc.aio.insecure_channel(self._target, options)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except grpc.aio.AioRpcError as error:
            raise call_error(error, self._url) from error


def call_error(error: grpc.aio.AioRpcError, url: str) -> FolioError:
    """The server's error, or that of gRPC or Serve in front of the server, which has no JSON of Folio's."""
    metadata = dict(error.trailing_metadata() or ())
    retry_after = metadata.get("retry-after")
    if "folio-error" in metadata:
        known = error_of(from_json(metadata["folio-error"]), None if retry_after is None else float(retry_after))
        if known is not None:
            return known
    details = error.details() or error.code().name
    match error.code():  # an error of gRPC itself, or of Serve
        case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.NOT_FOUND:  # the latter: the application has not started
            return unreachable(url, details)
        case grpc.StatusCode.CANCELLED:
            return connection_lost(url)
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineError(details)
        case grpc.StatusCode.RESOURCE_EXHAUSTED if "larger than max" not in details:
            return OverloadedError(details)
        case grpc.StatusCode.RESOURCE_EXHAUSTED | grpc.StatusCode.UNIMPLEMENTED:
            return RequestError(details)
    return EngineError(f"{error.code().name}: {details}")


def _json(request: Any) -> dict[str, Any]:
    body: dict[str, Any] = request.model_dump(mode="json", exclude_unset=True, by_alias=True)
    return body


def _nothing(answer: Any) -> None:
    """The conversion of an answer without fields."""


def _pins(answer: pb.PinList) -> PinList:
    return PinList.model_validate({"data": []} | convert.plain(answer))


def _load(answer: pb.LoadReport) -> LoadReport:
    return LoadReport.model_validate({"least_queued_s": None, "replicas": []} | convert.plain(answer))


def _reports(answer: pb.MemoryReports) -> dict[str, MemoryReport]:
    return _REPORTS.validate_python(convert.reports_fields(answer))
