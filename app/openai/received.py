"""From OpenAI's error JSON back to the error that it was made of, in a client."""

from __future__ import annotations

from typing import Any

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
