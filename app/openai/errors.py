"""Errors as OpenAI clients expect them: a status and a JSON body."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from app.errors import (
    DeadlineError,
    EngineError,
    OverloadedError,
    RequestError,
    UnavailableError,
    UnknownModelError,
)
from app.openai.bodies import ErrorBody, ErrorDetail


def error_response(error: BaseException) -> tuple[int, ErrorBody]:
    """(HTTP status, body). What the client did not cause is not explained to it; the log has the traceback."""
    if isinstance(error, RequestError):
        status = 404 if isinstance(error, UnknownModelError) else 400
        return status, body(error.message, "invalid_request_error", error.param, error.code)
    if isinstance(error, OverloadedError):
        return 429, body(str(error), "rate_limit_error", None, "overloaded")
    if isinstance(error, DeadlineError):
        return 408, body(str(error), "timeout_error", None, "timeout")
    if isinstance(error, UnavailableError):
        return 503, body(str(error), "server_error", None, "unavailable")
    if isinstance(error, EngineError):
        return 500, body(str(error), "server_error", None, "engine_error")
    return 500, body("internal error; the server's log says more", "server_error", None, "internal_error")


def validation_error(errors: Sequence[Any]) -> ErrorBody:
    """pydantic's complaints in one message; `param` is the first field's name."""
    messages = []
    for error in errors:
        place = [str(part) for part in error["loc"] if part != "body"]
        if error["type"] == "json_invalid":
            return body(f"the body is not valid JSON: {error['ctx']['error']}", "invalid_request_error", None, None)
        what = "unknown field" if error["type"] == "extra_forbidden" else error["msg"]
        messages.append(f"{'.'.join(place) or 'body'}: {what}")
    field = next((str(part) for part in errors[0]["loc"] if part != "body"), None)
    return body("; ".join(messages), "invalid_request_error", field, "invalid_value")


def body(message: str, kind: str, param: str | None, code: str | None) -> ErrorBody:
    return ErrorBody(error=ErrorDetail(message=message, type=kind, param=param, code=code))
