"""Errors as OpenAI clients expect them: a status and a JSON body."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from app.errors import (
    DeadlineError,
    EngineError,
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
from app.openai.replies import ErrorBody, ErrorDetail

# A body may have as many faults as fields.
_MOST_COMPLAINTS = 5
# Fields that are not known here have any name.
_LONGEST_NAME = 100
# Seconds for which everybody is refused, for whoever answers in front of us.
CLOSED_HEADER = "X-Folio-Closed-For"
_HTTP_CODES = {404: "not_found", 405: "method_not_allowed", 415: "unsupported_media_type"}


def error_response(error: BaseException) -> tuple[int, ErrorBody]:
    """(HTTP status, body). What the client did not cause is not explained to it; the log has the traceback."""
    if isinstance(error, RequestError):
        status = 404 if isinstance(error, UnknownModelError | UnknownRequestError | UnknownPinError) else 400
        return status, body(error.message, "invalid_request_error", error.param, error.code)
    if isinstance(error, ForbiddenError):
        return 403, body(error.message, "invalid_request_error", error.param, "not_allowed")
    if isinstance(error, RateLimitError):
        return 429, body(str(error), "rate_limit_error", None, "rate_limit_exceeded")
    if isinstance(error, OverloadedError):
        return 429, body(str(error), "rate_limit_error", None, "overloaded")
    if isinstance(error, DeadlineError):
        return 408, body(str(error), "timeout_error", None, "timeout")
    if isinstance(error, UnavailableError):
        return 503, body(str(error), "server_error", None, "unavailable")
    if isinstance(error, EngineError):
        return 500, body(str(error), "server_error", None, "engine_error")
    if isinstance(error, ModelError):  # an adapter whose files cannot be used
        return 500, body(str(error), "server_error", None, "model_error")
    return 500, body("internal error; the server's log says more", "server_error", None, "internal_error")


def error_headers(error: BaseException) -> dict[str, str]:
    """`Retry-After` in whole seconds and `CLOSED_HEADER`, when the error knows them."""
    headers = {}
    if isinstance(error, OverloadedError | UnavailableError) and error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, OverloadedError) and error.closed_s > 0:
        headers[CLOSED_HEADER] = f"{error.closed_s:.3f}"
    return headers


def validation_error(errors: Sequence[Any]) -> ErrorBody:
    """pydantic's complaints in one message; `param` is the first field's name."""
    messages = []
    for error in errors[:_MOST_COMPLAINTS]:
        place = [str(part)[:_LONGEST_NAME] for part in error["loc"] if part != "body"]
        if error["type"] == "json_invalid":
            return body(
                f"the body is not valid JSON: {error['ctx']['error']}", "invalid_request_error", None, "invalid_json"
            )
        what = "unknown field" if error["type"] == "extra_forbidden" else error["msg"].removeprefix("Value error, ")
        messages.append(f"{'.'.join(place) or 'body'}: {what}")
    if len(errors) > _MOST_COMPLAINTS:
        messages.append(f"and {len(errors) - _MOST_COMPLAINTS} more")
    field = next((str(part)[:_LONGEST_NAME] for part in errors[0]["loc"] if part != "body"), None)
    return body("; ".join(messages), "invalid_request_error", field, "invalid_value")


def http_error(status: int, message: str) -> ErrorBody:
    """Of what is refused before it comes to a route."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return body(message, kind, None, _HTTP_CODES.get(status))


def body(message: str, kind: str, param: str | None, code: str | None) -> ErrorBody:
    return ErrorBody(error=ErrorDetail(message=message, type=kind, param=param, code=code))
