"""Errors as JSON: in OpenAI's form, and in Anthropic's on the routes of its API."""

from __future__ import annotations

import json
import re
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from folio.app.errors import ContextLengthError, UnknownThreadError
from folio.app.http.errors import ErrorBody
from folio.app.http.request_context import current_context

_ANTHROPIC_ROUTES = re.compile(r"/v1/messages(?:/|$)")
# Status → its type; other statuses below 500 are "invalid_request_error", all others "api_error".
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
# The numbers in a `ContextLengthError`. By Anthropic's words Claude Code knows that it has to shorten the conversation,
# or to ask for fewer tokens.
_OVERFLOW = re.compile(
    r"length is (\d+) tokens\. However, (?:.* resulted in .*?(\d+) tokens|.*\((\d+) in .*, (\d+) in the)"
)
_TOO_LONG = "prompt is too long"


class ErrorDetails(BaseModel):
    """Details of an error for programs."""

    error_code: str


class AnthropicErrorDetail(BaseModel):
    type: str
    message: str
    details: Annotated[ErrorDetails | None, Field(exclude_if=lambda value: value is None)] = None


class AnthropicErrorBody(BaseModel):
    """Anthropic's error JSON, also the data of a stream's event `error`."""

    type: Literal["error"] = "error"
    error: AnthropicErrorDetail
    request_id: str | None = None


def is_anthropic(path: str) -> bool:
    """Whether the path is a route of Anthropic's API, or below one."""
    return _ANTHROPIC_ROUTES.search(path) is not None


def error_json(path: str, status: int, answer: ErrorBody) -> str:
    """The body of an error answer on this path. In ASCII: errors may quote unpaired surrogates of a client."""
    body = anthropic_error(status, answer) if is_anthropic(path) else answer
    return json.dumps(body.model_dump(mode="json"))


def _overflow(message: str) -> str:
    """The message of a `ContextLengthError` in Anthropic's words."""
    if (numbers := _OVERFLOW.search(message)) is None:
        return f"{_TOO_LONG}: {message}"
    context, prompt, beside, limit = numbers.groups()
    if prompt is not None:
        return f"{_TOO_LONG}: {prompt} tokens > {int(context) - 1} maximum"
    return (
        f"input length and `max_tokens` exceed context limit: {beside} + {limit} > {context}, decrease input length or "
        "`max_tokens` and try again"
    )


def anthropic_error(status: int, answer: ErrorBody) -> AnthropicErrorBody:
    """An error in Anthropic's form."""
    detail, context = answer.error, current_context()
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    if detail.code == "overloaded":  # 429, too; but not because of the caller's own limits
        kind = "overloaded_error"
    message = detail.message
    if detail.code == ContextLengthError.code:
        message = _overflow(message)
    # By this code Anthropic's client knows that it has to send the whole conversation again.
    details = ErrorDetails(error_code=detail.code) if detail.code == UnknownThreadError.code else None
    return AnthropicErrorBody(
        error=AnthropicErrorDetail(type=kind, message=message, details=details),
        request_id=None if context is None else context.request_id,
    )
