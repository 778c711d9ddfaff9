"""Servers that are not Folio, or do not let us in: one line in place of a traceback."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import web

from folio.app.cli.main import main
from tests.app.cli.fake_server import error, serving, stream

CALLS = (["budget"], ["pins"], ["top", "--once"])
FORBIDDEN = {"error": {"message": "this path is for operators", "type": "invalid_request_error", "code": "not_allowed"}}
NO_ROUTE = {"error": {"message": "Not Found", "type": "invalid_request_error", "code": "not_found"}}


@pytest.mark.parametrize("arguments", CALLS)
@pytest.mark.parametrize(
    ("status", "content", "line"),
    [
        (200, "<html>", "it is of another kind, or its settings turn this off; check --url"),
        (404, {"detail": "Not Found"}, "it is of another kind, or its settings turn this off; check --url"),
        (404, NO_ROUTE, "it is of another kind, or its settings turn this off; check --url"),
        (401, {"error": "Unauthorized"}, "(--api-key KEY, or the variable FOLIO_API_KEY)"),
        (403, FORBIDDEN, "this path is for operators"),
        (503, "upstream", "HTTP status 503: upstream"),
    ],
)
def test_refusals(
    arguments: list[str], status: int, content: Any, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: `folio top` took every status from 400 to 499 for a server without a dashboard."""

    async def answer(request: web.Request, body: Any) -> web.StreamResponse:
        if isinstance(content, str):
            return web.Response(text=content, status=status, content_type="text/html")
        return web.json_response(content, status=status)

    with serving(answer) as url:
        assert main([*arguments, "--url", url]) == 1
    shown = capsys.readouterr()
    assert line in shown.err
    assert (shown.out, shown.err.count("\n")) == ("", 1)


@pytest.mark.parametrize("arguments", CALLS)
@pytest.mark.parametrize("content", ["[]", "null", "5"])
def test_json_of_another_kind(arguments: list[str], content: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Regression: tracebacks."""

    async def answer(request: web.Request, body: Any) -> web.StreamResponse:
        if request.path.startswith("/dashboard"):
            return await stream(request, f"data: {content}\n\n".encode())
        return web.Response(text=content, content_type="application/json")

    with serving(answer) as url:
        assert main([*arguments, "--url", url]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_a_key_that_cannot_be_sent(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Regression: a traceback. Space around a key, such as a file's last newline, does not count."""

    async def answer(request: web.Request, body: Any) -> web.StreamResponse:
        return error(request.headers["Authorization"], 403)

    with serving(answer) as url:
        assert main(["pins", "--url", url, "--api-key", "a\nb"]) == 2
        assert capsys.readouterr().err == "--api-key has control characters; give the key alone\n"
        monkeypatch.setenv("FOLIO_API_KEY", "key\n")
        assert main(["pins", "--url", url]) == 1
        assert capsys.readouterr().err == "Bearer key\n"


def test_https_to_a_server_without_it(capsys: pytest.CaptureFixture[str]) -> None:
    """Regression: "Operation not permitted", which is the system's error of the same number."""

    async def answer(request: web.Request, body: Any) -> web.StreamResponse:
        raise AssertionError

    with serving(answer) as url:
        assert main(["pins", "--url", url.replace("http:", "https:")]) == 1
    shown = capsys.readouterr().err
    assert "cannot be reached: [SSL" in shown
    assert main(["top", "--once", "--url", "http://127.0.0.1:1"]) == 1
    assert "nothing answers at http://127.0.0.1:1: start a server" in capsys.readouterr().err
