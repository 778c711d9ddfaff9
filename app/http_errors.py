"""Errors as OpenAI clients expect them: a status and a JSON body.

Answers that the guard gives itself.

From OpenAI's error JSON back to the error that it was made of, in a client.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from app import http_errors as errors
from app.errors import (
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
    UnknownModelError,
    UnknownPinError,
    UnknownRequestError,
)
from app.exchange import current_context

# A body may have as many faults as fields.
_MOST_COMPLAINTS = 5
# Fields that are not known here have any name.
_LONGEST_NAME = 100
# Of pydantic's kinds of errors; others say it well enough.
_COMPLAINTS = {
    "extra_forbidden": "unknown field",
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
    "too_short": "must have at least {min_length}",
    "too_long": "must have at most {max_length}",
    "string_pattern_mismatch": "must match {pattern}",
}
_HTTP_CODES = {404: "not_found", 405: "method_not_allowed", 415: "unsupported_media_type"}


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """OpenAI's error JSON."""

    error: ErrorDetail


def error_response(error: BaseException) -> tuple[int, ErrorBody]:
    """(HTTP status, body). What the client did not cause is not explained to it; the log has the traceback."""
    if isinstance(error, RequestError):
        status = 404 if isinstance(error, UnknownModelError | UnknownRequestError | UnknownPinError) else 400
        return status, error_body(error.message, "invalid_request_error", error.param, error.code)
    if isinstance(error, ForbiddenError):
        return 403, error_body(error.message, "invalid_request_error", error.param, "not_allowed")
    if isinstance(error, RateLimitError):
        return 429, error_body(str(error), "rate_limit_error", None, "rate_limit_exceeded")
    if isinstance(error, OverloadedError):
        return 429, error_body(str(error), "rate_limit_error", None, "overloaded")
    if isinstance(error, DeadlineError):
        return 408, error_body(str(error), "timeout_error", None, "timeout")
    if isinstance(error, UnavailableError):
        return 503, error_body(str(error), "server_error", None, "unavailable")
    if isinstance(error, EngineError):
        return 500, error_body(str(error), "server_error", None, "engine_error")
    if isinstance(error, ModelError):  # an adapter whose files cannot be used
        return 500, error_body(str(error), "server_error", None, "model_error")
    exchange = current_context()
    where = "" if exchange is None else f" of request {exchange.request_id}"
    return 500, error_body(f"internal error; the server's log says more{where}", "server_error", None, "internal_error")


def error_headers(error: BaseException) -> dict[str, str]:
    """`Retry-After` in whole seconds, when the error knows it."""
    if isinstance(error, OverloadedError | UnavailableError) and error.retry_after_s is not None:
        return {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
    return {}


def validation_error(errors: Sequence[Any], given: Any) -> ErrorBody:
    """pydantic's complaints of the body `given` in one message, in words of its writer; `param` is the first field's
    name."""
    if errors[0]["type"] == "json_invalid":
        why = errors[0]["ctx"]["error"]
        return error_body(f"the body is not valid JSON: {why}", "invalid_request_error", None, "invalid_json")
    found: dict[str, list[str]] = {}  # a value that may be of several kinds has a complaint of each
    for error in errors:
        place = _place(error, given)
        if (complaint := _complaint(error)) not in found.setdefault(_written(place), []):
            found[_written(place)].append(complaint)
    messages = [
        f"{place or 'body'}: {' or '.join([first, *(other.removeprefix('must be ') for other in others)])}"
        for place, (first, *others) in found.items()
    ]
    if len(messages) > _MOST_COMPLAINTS:
        messages[_MOST_COMPLAINTS:] = [f"and {len(messages) - _MOST_COMPLAINTS} more"]
    field = next((str(part)[:_LONGEST_NAME] for part in _place(errors[0], given)), None)
    return error_body("; ".join(messages), "invalid_request_error", field, "invalid_value")


def _place(error: Any, given: Any) -> list[str | int]:
    """The path of what is wrong in the body: pydantic's, without names of models and kinds, which no client knows."""
    path = [part for part in error["loc"] if part not in ("body", "header")]
    place: list[str | int] = []
    for i, part in enumerate(path):
        if isinstance(given, dict) and (part in given or (error["type"] == "missing" and i == len(path) - 1)):
            given = given.get(part)
        elif isinstance(given, list) and isinstance(part, int):
            given = given[part]
        elif error["loc"][0] != "header":
            continue
        place.append(part)
    return place


def _written(place: Sequence[str | int]) -> str:
    parts = (f"[{part}]" if isinstance(part, int) else f".{part[:_LONGEST_NAME]}" for part in place)
    return "".join(parts).removeprefix(".")


def _complaint(error: Any) -> str:
    if (known := _COMPLAINTS.get(error["type"])) is not None:
        return known.format(**error.get("ctx", {}))
    message: str = error["msg"].removeprefix("Value error, ")
    return message.replace("Input should be", "must be").replace(" a valid ", " a ")


def http_error(status: int, message: str) -> ErrorBody:
    """Of what is refused before it comes to a route."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return error_body(message, kind, None, _HTTP_CODES.get(status))


def error_body(message: str, kind: str, param: str | None, code: str | None) -> ErrorBody:
    return ErrorBody(error=ErrorDetail(message=message, type=kind, param=param, code=code))


Headers = list[tuple[bytes, bytes]]

# What follows on this connection is the rest of a body that nobody wants.
_CLOSE: Headers = [(b"connection", b"close")]
_TOO_LARGE = {413: "body_too_large", 414: "url_too_long", 431: "headers_too_large"}


class HttpRefusal(FolioError):
    """The request is not let in. `status`, `answer` and `headers` are those of the HTTP answer."""

    def __init__(self, status: int, answer: ErrorBody, headers: Headers | None = None) -> None:
        super().__init__(answer.error.message)
        self.status = status
        self.answer = answer
        self.headers = headers or []

    @staticmethod
    def from_error(error: FolioError) -> HttpRefusal:
        """As the API would answer that error."""
        status, answer = errors.error_response(error)
        headers = [(name.lower().encode(), value.encode()) for name, value in errors.error_headers(error).items()]
        return HttpRefusal(status, answer, headers)

    @staticmethod
    def no_key(presented: bool) -> HttpRefusal:
        if presented:
            message, challenge = "the API key is not valid here", b'Bearer error="invalid_token"'
        else:
            message, challenge = "there is no API key; send it as Authorization: Bearer KEY", b"Bearer"
        answer = errors.error_body(message, "invalid_request_error", None, "invalid_api_key")
        return HttpRefusal(401, answer, [(b"www-authenticate", challenge)])

    @staticmethod
    def not_operator() -> HttpRefusal:
        return HttpRefusal.from_error(ForbiddenError("this is for operators; your API key is not one of theirs"))

    @staticmethod
    def too_large(status: int, what: str, most: int, unit: str) -> HttpRefusal:
        """413, 414 or 431."""
        message = f"{what} may have at most {most} {unit}"
        return HttpRefusal(
            status, errors.error_body(message, "invalid_request_error", None, _TOO_LARGE[status]), _CLOSE
        )

    @staticmethod
    def bad_length() -> HttpRefusal:
        message = "Content-Length is not a number of bytes"
        return HttpRefusal(400, errors.error_body(message, "invalid_request_error", None, "invalid_value"), _CLOSE)

    @staticmethod
    def too_slow(timeout_s: float) -> HttpRefusal:
        message = f"the body has not arrived within {timeout_s:g} s; send it again"
        return HttpRefusal(408, errors.error_body(message, "timeout_error", None, "timeout"), _CLOSE)

    @staticmethod
    def too_busy(most: int, retry_after_s: float) -> HttpRefusal:
        message = f"{most} requests are being answered, as many as may be; send it again later"
        headers = [(b"retry-after", b"%d" % max(1, math.ceil(retry_after_s)))]
        return HttpRefusal(503, errors.error_body(message, "server_error", None, "overloaded"), headers)


_BY_CODE: dict[str, type[FolioError]] = {
    "context_length_exceeded": ContextLengthError,
    "model_not_found": UnknownModelError,
    "request_not_found": UnknownRequestError,
    "pin_not_found": UnknownPinError,
    "not_allowed": ForbiddenError,
    "invalid_api_key": ForbiddenError,
    "rate_limit_exceeded": RateLimitError,
    "overloaded": OverloadedError,
    "timeout": DeadlineError,
    "unavailable": UnavailableError,
    "model_error": ModelError,
}
_BY_TYPE: dict[str, type[FolioError]] = {
    "invalid_request_error": RequestError,
    "rate_limit_error": OverloadedError,
    "timeout_error": DeadlineError,
    "server_error": EngineError,
}


def error_of(answer: Any, retry_after_s: float | None = None) -> FolioError | None:
    """The error of an answer's JSON, or of a streamed event's; `None` if it is not one.

    Args:
        retry_after_s: what the answer says beside it.
    """
    detail = answer.get("error") if isinstance(answer, dict) else None
    if not isinstance(detail, dict):
        return None
    message, param, code = str(detail.get("message")), detail.get("param"), detail.get("code")
    kind = _BY_CODE.get(str(code)) or _BY_TYPE.get(str(detail.get("type")), EngineError)
    if issubclass(kind, RequestError):
        error = kind(message, param)
        error.code = code or kind.code  # of a plain `RequestError` there are several
        return error
    if issubclass(kind, ForbiddenError):
        return kind(message, param)
    if issubclass(kind, OverloadedError | UnavailableError):
        return kind(message, retry_after_s)
    return kind(message)
