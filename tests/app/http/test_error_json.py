"""The two forms of an error's JSON."""

from __future__ import annotations

import json

import pytest

from folio.app.errors import (
    ContextLengthError,
    FolioError,
    ForbiddenError,
    ModelError,
    RateLimitError,
    UnknownModelError,
)
from folio.app.http.error_json import error_json, is_anthropic
from folio.app.http.errors import error_of, error_response


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/v1/messages", True),
        ("/v1/messages/", True),
        ("/v1/messages/count_tokens", True),
        ("/mounted/v1/messages", True),
        ("/v1/messages_of_others", False),
        ("/v1/chat/completions", False),
    ],
)
def test_routes_of_anthropic(path: str, expected: bool) -> None:
    assert is_anthropic(path) == expected


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ContextLengthError("x", "messages"), "invalid_request_error"),
        (UnknownModelError("x", "model"), "not_found_error"),
        (ForbiddenError("x"), "permission_error"),
        (RateLimitError("x", 3.0), "rate_limit_error"),
        (ModelError("x"), "api_error"),
    ],
)
def test_types_of_errors(error: FolioError, kind: str) -> None:
    status, answer = error_response(error)
    body = json.loads(error_json("/v1/messages", status, answer))
    assert body.keys() == {"type", "error", "request_id"}
    assert body["error"].keys() == {"type", "message"}
    assert body["error"]["type"] == kind
    assert isinstance(error_of(body), FolioError)  # Folio's own client reads it
    assert json.loads(error_json("/v1/completions", status, answer)) == answer.model_dump()


def test_an_error_that_quotes_a_surrogate() -> None:
    body = error_json("/v1/messages", *error_response(UnknownModelError("no '\ud800'", "model")))
    assert body.isascii()
