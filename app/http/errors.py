"""Errors as HTTP answers with OpenAI's JSON, refusals by the guard, and the errors behind such answers for clients."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel
from pydantic_core import from_json

from folio.app.errors import (
    ContextLengthError,
    DeadlineError,
    EngineError,
    FolioError,
    ForbiddenError,
    ModelError,
    OverloadedError,
    RateLimitError,
    RequestError,
    UnavailableError,
    UnknownBatchError,
    UnknownFileError,
    UnknownModelError,
    UnknownPinError,
    UnknownReplicaError,
    UnknownRequestError,
    UnknownResponseError,
    UnknownThreadError,
)
from folio.app.http.request_context import current_context

Headers = list[tuple[bytes, bytes]]

# (error, status, type, code) of errors without a code of their own; the first match counts.
_ANSWERS: tuple[tuple[type[FolioError], int, str, str], ...] = (
    (ForbiddenError, 403, "invalid_request_error", "not_allowed"),
    (RateLimitError, 429, "rate_limit_error", "rate_limit_exceeded"),
    (OverloadedError, 429, "rate_limit_error", "overloaded"),
    (DeadlineError, 408, "timeout_error", "timeout"),
    (UnavailableError, 503, "server_error", "unavailable"),
    (EngineError, 500, "server_error", "engine_error"),
    (ModelError, 500, "server_error", "model_error"),  # files of an adapter
)
_NOT_FOUND = (
    UnknownModelError,
    UnknownRequestError,
    UnknownPinError,
    UnknownReplicaError,
    UnknownFileError,
    UnknownBatchError,
    UnknownResponseError,
    UnknownThreadError,
)
_BY_CODE: dict[str, type[FolioError]] = {
    **{error.code: error for error in (ContextLengthError, *_NOT_FOUND)},
    **{code: error for error, _, _, code in _ANSWERS},
    "invalid_api_key": ForbiddenError,
}
_BY_TYPE: dict[str, type[FolioError]] = {
    "invalid_request_error": RequestError,
    "rate_limit_error": OverloadedError,
    "timeout_error": DeadlineError,
    "server_error": EngineError,
    # Anthropic's, without codes.
    "authentication_error": ForbiddenError,
    "permission_error": ForbiddenError,
    "not_found_error": UnknownModelError,
    "request_too_large": RequestError,
    "overloaded_error": OverloadedError,
    "api_error": EngineError,
}
# Outcome by HTTP status; otherwise 4xx is "invalid", 5xx "failed".
_OUTCOMES = {408: "timeout", 429: "refused", 503: "unavailable"}
_HTTP_CODES = {404: "not_found", 405: "method_not_allowed", 415: "unsupported_media_type"}
_UNREAD_CODES = {
    400: "invalid_value",
    408: "timeout",
    413: "body_too_large",
    414: "url_too_long",
    415: "unsupported_media_type",
    431: "headers_too_large",
}

# A body may have as many faults as fields; unknown fields may have any name.
_MAX_FAULTS, _MAX_NAME_CHARS = 5, 100
# Messages for pydantic's types of errors; other types keep pydantic's message.
_MESSAGES = {
    "extra_forbidden": "unknown field",
    "misspelt_field": "unknown field; the nearest is {nearest}",
    "missing": "is missing",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "dict_type": "must be an object",
    "list_type": "must be a list",
    "none_required": "must be null",
    "int_type": "must be an integer",
    "int_from_float": "must be an integer",
    "bool_type": "must be true or false",
    "literal_error": "must be {expected}",
    "union_tag_invalid": "its {discriminator} is '{tag}'; it must be {expected_tags}",
    "union_tag_not_found": "its {discriminator} is missing",
    "too_short": "must have at least {min_length} items",
    "too_long": "must have at most {max_length} items",
    "string_pattern_mismatch": "must match {pattern}",
}


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """OpenAI's error JSON."""

    error: ErrorDetail


def error_body(message: str, kind: str, param: str | None, code: str | None) -> ErrorBody:
    return ErrorBody(error=ErrorDetail(message=message, type=kind, param=param, code=code))


def outcome_of(error: BaseException) -> str:
    """The outcome of a request that ends with this error, for metrics and traces."""
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        return "cancelled"
    status, _ = error_response(error)
    return _OUTCOMES.get(status, "invalid" if status < 500 else "failed")


def error_response(error: BaseException) -> tuple[int, ErrorBody]:
    """(HTTP status, body). Internal errors are not explained to the client; the log has the traceback."""
    if isinstance(error, RequestError):
        status = 404 if isinstance(error, _NOT_FOUND) else 400
        return status, error_body(error.message, "invalid_request_error", error.param, error.code)
    for kind, status, name, code in _ANSWERS:
        if isinstance(error, kind):
            return status, error_body(str(error), name, getattr(error, "param", None), code)
    context = current_context()
    where = "" if context is None else f", request {context.request_id}"
    return 500, error_body(f"internal error; see the server's log{where}", "server_error", None, "internal_error")


def error_headers(error: BaseException) -> dict[str, str]:
    """`Retry-After` in whole seconds, if the error knows it."""
    if isinstance(error, OverloadedError | UnavailableError) and error.retry_after_s is not None:
        return {"Retry-After": str(whole_seconds(error.retry_after_s))}
    return {}


def whole_seconds(retry_after_s: float) -> int:
    return max(1, math.ceil(retry_after_s))


def http_error(status: int, message: str) -> ErrorBody:
    """The body for a request that reaches no route."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return error_body(message, kind, None, _HTTP_CODES.get(status))


def validation_error(errors: Sequence[Any], given: Any) -> ErrorBody:
    """pydantic's errors in the body `given` as one message; `param` is the first faulty field."""
    if errors[0]["type"] == "json_invalid":
        reason = errors[0]["ctx"]["error"]
        return error_body(f"the body is not valid JSON: {reason}", "invalid_request_error", None, "invalid_json")
    found: dict[str, list[str]] = {}  # a union has an error for each of its types
    for error in errors:
        place = _written(_place(error, given))
        if (message := _message(error)) not in found.setdefault(place, []):
            found[place].append(message)
    messages = [
        f"{place or 'body'}: {' or '.join([first, *(other.removeprefix('must be ') for other in others)])}"
        for place, (first, *others) in found.items()
    ]
    if len(messages) > _MAX_FAULTS:
        messages[_MAX_FAULTS:] = [f"and {len(messages) - _MAX_FAULTS} more"]
    field = next((str(part)[:_MAX_NAME_CHARS] for part in _place(errors[0], given)), None)
    return error_body("; ".join(messages), "invalid_request_error", field, "invalid_value")


def _place(error: Any, given: Any) -> list[str | int]:
    """Path of the faulty value: in a body, pydantic's path without names of models and types."""
    source, *path = error["loc"]
    place: list[str | int] = []
    for i, part in enumerate(path):
        if isinstance(given, dict) and (part in given or (error["type"] == "missing" and i == len(path) - 1)):
            given = given.get(part)
        elif isinstance(given, list) and isinstance(part, int):
            given = given[part]
        elif source == "body":
            continue
        place.append(part)
    return place


def _written(place: Sequence[str | int]) -> str:
    parts = (f"[{part}]" if isinstance(part, int) else f".{part[:_MAX_NAME_CHARS]}" for part in place)
    return "".join(parts).removeprefix(".")


def _message(error: Any) -> str:
    if (known := _MESSAGES.get(error["type"])) is not None:
        message = known.format(**error.get("ctx", {}))
        return message.replace(" items", " characters") if isinstance(error.get("input"), str) else message
    message = error["msg"].removeprefix("Value error, ")
    return message.replace("Input should be", "must be").replace(" a valid ", " a ")


class HttpRefusal(FolioError):
    """A request is refused before it reaches a route, with this status, JSON and these headers."""

    def __init__(self, status: int, answer: ErrorBody, headers: Headers | None = None) -> None:
        super().__init__(answer.error.message)
        self.status = status
        self.answer = answer
        self.headers = list(headers or ())

    def messages(self, body: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """The answer as ASGI messages. `body`: the answer's JSON."""
        content = body.encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(content)), *self.headers]
        start = {"type": "http.response.start", "status": self.status, "headers": headers}
        return start, {"type": "http.response.body", "body": content}

    @staticmethod
    def from_error(error: FolioError) -> HttpRefusal:
        """The refusal with the API's answer to an error."""
        headers = [(name.lower().encode(), value.encode()) for name, value in error_headers(error).items()]
        return HttpRefusal(*error_response(error), headers)

    @staticmethod
    def no_key(presented: bool) -> HttpRefusal:
        if presented:
            message, challenge = "the API key is invalid; send a valid one", b'Bearer error="invalid_token"'
        else:
            message, challenge = (
                "the API key is missing; send it as Authorization: Bearer KEY or x-api-key: KEY",
                b"Bearer",
            )
        answer = error_body(message, "invalid_request_error", None, "invalid_api_key")
        return HttpRefusal(401, answer, [(b"www-authenticate", challenge)])

    @staticmethod
    def of_unread(status: int, message: str) -> HttpRefusal:
        """A refusal before the body is read; the rest of the body follows on this connection."""
        kind = "timeout_error" if status == 408 else "invalid_request_error"
        return HttpRefusal(status, error_body(message, kind, None, _UNREAD_CODES[status]), [(b"connection", b"close")])

    @staticmethod
    def too_busy(limit: int, retry_after_s: float) -> HttpRefusal:
        message = f"the server is busy (max_concurrent_requests={limit}); send the request again later"
        headers = [(b"retry-after", b"%d" % whole_seconds(retry_after_s))]
        return HttpRefusal(503, error_body(message, "server_error", None, "overloaded"), headers)


def error_of(answer: Any, retry_after_s: float | None = None) -> FolioError | None:
    """The error behind an answer's JSON, or a streamed event's; `None` if the JSON is no error.

    Args:
        retry_after_s: of the answer's headers.
    """
    detail = answer.get("error") if isinstance(answer, dict) else None
    if not isinstance(detail, dict):
        return None
    message, param, code = str(detail.get("message")), detail.get("param"), detail.get("code")
    kind = _BY_CODE.get(str(code)) or _BY_TYPE.get(str(detail.get("type")), EngineError)
    if issubclass(kind, RequestError):
        error = kind(message, param)
        error.code = code or kind.code  # a plain `RequestError` may have any of several
        return error
    if issubclass(kind, ForbiddenError):
        return kind(message, param)
    if issubclass(kind, OverloadedError | UnavailableError):
        return kind(message, retry_after_s)
    return kind(message)


def error_of_status(status: int, retry_after: str | None, content: bytes) -> FolioError:
    """The error behind an answer with an error status, which may be a proxy's and have no JSON.

    Args:
        retry_after: the header.
    """
    retry_after_s = float(retry_after) if retry_after is not None and retry_after.isdigit() else None
    try:
        error = error_of(from_json(content), retry_after_s)
    except ValueError:
        error = None
    if error is not None:
        return error
    message = f"HTTP status {status}: {content[:200].decode(errors='replace')}"
    if status == 503:
        return UnavailableError(message, retry_after_s)
    if status == 429:
        return OverloadedError(message, retry_after_s)
    if status in (408, 504):
        return DeadlineError(message)
    return RequestError(message) if status < 500 else EngineError(message)
