"""The table of docs/reference/errors.md has exactly the errors that the server sends; the two forms of their JSON."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from folio.app import errors
from folio.app.http import haproxy
from folio.app.http.error_json import error_json, is_anthropic
from folio.app.http.errors import (
    _HTTP_CODES,
    _UNREAD_CODES,
    ErrorBody,
    HttpRefusal,
    error_of,
    error_response,
    http_error,
    validation_error,
)

Row = tuple[int, str, str | None]


def documented() -> list[Row]:
    """A row of the table may have several codes."""
    page = Path("docs/reference/errors.md").read_text(encoding="utf-8")
    _, _, table = page.partition("| status | `type` | `code` |")
    rows = []
    for line in table.partition("\n\n")[0].splitlines()[2:]:
        status, kind, codes = (cell.strip() for cell in line.split("|")[1:4])
        rows += [(int(status), kind.strip("`"), code.strip(" `")) for code in codes.split(",")]
    return rows


def sent() -> set[Row]:
    def row(status: int, answer: ErrorBody) -> Row:
        return status, answer.error.type, answer.error.code

    raised = {error for name, error in vars(errors).items() if name[0] != "_" and isinstance(error, type)}
    raised -= {errors.FolioError, errors.ConfigError}  # the one is none, the other is not raised by requests
    refusals = [
        HttpRefusal.no_key(presented=True),
        HttpRefusal.too_busy(1, 1.0),
        *(HttpRefusal.of_unread(status, "x") for status in _UNREAD_CODES),
    ]
    bad_json = [{"type": "json_invalid", "loc": ("body", 0), "ctx": {"error": "x"}}]
    return {
        *(row(*error_response(error("x"))) for error in raised),
        row(*error_response(ZeroDivisionError())),
        *(row(refusal.status, refusal.answer) for refusal in refusals),
        *(row(status, http_error(status, "x")) for status in _HTTP_CODES),
        row(400, validation_error(bad_json, None)),
        *by_haproxy(),
    }


def by_haproxy() -> set[Row]:
    """HAProxy's own answers; 502 and 504 become 503."""
    configuration = "".join(replacement for _, replacement in haproxy.amendments("", "/x", ["127.0.0.1"], None))
    answers = re.findall(r"status (\d+) content-type application/json string '(.*?)'", configuration)
    found = [(int(status), json.loads(body)["error"]) for status, body in answers]
    return {(status, error["type"], error["code"]) for status, error in found if status not in (502, 504)}


def test_the_table_of_errors() -> None:
    table = documented()
    assert len(table) == len(set(table))
    assert set(table) == sent()


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
        (errors.ContextLengthError("x", "messages"), "invalid_request_error"),
        (errors.UnknownModelError("x", "model"), "not_found_error"),
        (errors.ForbiddenError("x"), "permission_error"),
        (errors.RateLimitError("x", 3.0), "rate_limit_error"),
        (errors.ModelError("x"), "api_error"),
    ],
)
def test_types_of_errors(error: errors.FolioError, kind: str) -> None:
    status, answer = error_response(error)
    body = json.loads(error_json("/v1/messages", status, answer))
    assert body.keys() == {"type", "error", "request_id"}
    assert body["error"].keys() == {"type", "message"}
    assert body["error"]["type"] == kind
    assert isinstance(error_of(body), errors.FolioError)  # Folio's own client reads it
    assert json.loads(error_json("/v1/completions", status, answer)) == answer.model_dump()


def test_an_error_that_quotes_a_surrogate() -> None:
    body = error_json("/v1/messages", *error_response(errors.UnknownModelError("no '\ud800'", "model")))
    assert body.isascii()
