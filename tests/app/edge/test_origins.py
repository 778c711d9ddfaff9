"""Hosts and origins: what a browser sends for a stranger's page is refused, what programs and own pages send is not."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from folio.app.config.http import HttpSettings
from folio.app.edge.origins import is_loopback
from tests.app.api.fake_service import FakeService
from tests.app.edge.asgi import Answer, call
from tests.local_server import guarded_api

LOOPBACK = "127.0.0.1"


def api_with(bound_to: str | None = LOOPBACK, **settings: Any) -> Any:
    return guarded_api(FakeService(), HttpSettings.model_validate(settings), bound_to=bound_to)


def ask(
    app: Any, headers: dict[str, str] | list[tuple[str, str]], method: str = "GET", path: str = "/health"
) -> Answer:
    pairs = list(headers.items()) if isinstance(headers, dict) else headers
    return asyncio.run(call(app, method, path, pairs))


def test_every_route_refuses_an_unknown_host_and_a_strangers_page() -> None:
    """Regression: DNS rebinding let any web page read and change a server without keys. Anthropic's routes refuse in
    Anthropic's JSON; also paths that have no route."""
    app = api_with()
    paths = {route.path for route in app.routes} | {"/dashboard/static/page.js", "/nowhere"}
    assert {"/docs", "/openapi.json", "/metrics", "/ready", "/v1/models", "/v1/messages", "/v1/budget"} <= paths
    page = {"host": LOOPBACK, "origin": "http://evil.example", "content-type": "text/plain"}
    for path in sorted(paths):
        for method in ("GET", "POST", "OPTIONS"):
            for headers in ({"host": "evil.example"}, page | {"sec-fetch-site": "cross-site"}, page):
                answer = ask(app, headers, method, path)
                assert answer.status == 403, (method, path, headers)
                error = json.loads(answer.body)["error"]
                assert "evil.example" in error["message"]
                kind = "permission_error" if path.startswith("/v1/messages") else "invalid_request_error"
                assert error["type"] == kind


KNOWN = ["localhost", "LocalHost:8000", "localhost.", "localhost.:8000", "127.0.0.1:8000", "[::1]:8000", "[::1]", "::1"]
UNKNOWN = ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "localhost:evil"]
UNKNOWN += ["evil@localhost", "10.0.0.7", "[::2]", ""]
SEVERAL: list[list[str]] = [[], ["localhost"] * 2, ["localhost", "evil.example"], ["evil.example", "localhost"]]


@pytest.mark.parametrize(
    ("hosts", "is_known"),
    [
        *(([host], True) for host in (*KNOWN, socket.gethostname().upper())),
        *(([host], False) for host in UNKNOWN),
        *((hosts, False) for hosts in SEVERAL),
    ],
)
def test_names_of_the_host(hosts: list[str], is_known: bool) -> None:
    assert ask(api_with(), [("host", host) for host in hosts]).status == (200 if is_known else 403)


def test_when_hosts_are_checked(tmp_path: Path) -> None:
    """By default on a loopback address without keys; with a list of one's own always; with "*" never."""
    keys = tmp_path / "keys.json"
    keys.write_text('{"keys": [{"name": "a", "key": "sk-a-0123456789012"}]}')
    own = {"allowed_hosts": ["LLM.example.com", "[fd00::7]"]}
    for bound_to, settings, host, status in (
        ("127.0.0.2", {}, "127.0.0.2", 200),
        ("::1", {}, "evil.example", 403),
        ("localhost", {}, "evil.example", 403),
        ("0.0.0.0", {}, "10.0.0.7", 200),
        ("::", {}, "evil.example", 200),
        (None, {}, "evil.example", 200),
        (LOOPBACK, {"api_keys": {"file": str(keys)}}, "evil.example", 200),
        (LOOPBACK, {"allowed_hosts": ["*"]}, "evil.example", 200),
        (LOOPBACK, own, "llm.example.com:443", 200),
        (LOOPBACK, own, "[FD00::7]:8000", 200),
        (LOOPBACK, own, socket.gethostname(), 403),
        ("0.0.0.0", own, "llm.example.com", 200),
        ("0.0.0.0", own, "localhost", 200),
        ("0.0.0.0", own, "10.0.0.7", 403),
        ("0.0.0.0", own | {"api_keys": {"file": str(keys)}}, "10.0.0.7", 403),
    ):
        assert ask(api_with(bound_to, **settings), {"host": host}).status == status, (bound_to, settings, host)


@pytest.mark.parametrize(
    ("headers", "is_taken"),
    [
        ({}, True),  # programs
        ({"origin": "http://localhost:8000"}, True),  # the own dashboard in an old browser
        ({"origin": "http://localhost:8000", "sec-fetch-site": "same-origin"}, True),
        ({"origin": "https://proxy.example", "sec-fetch-site": "same-origin"}, True),  # a proxy has changed the host
        ({"origin": "vscode-webview://a1", "sec-fetch-site": "cross-site"}, True),
        ({"origin": "http://own.example", "sec-fetch-site": "cross-site"}, True),
        ({"sec-fetch-site": "none", "sec-fetch-mode": "navigate"}, True),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}, True),  # a link
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "iframe"}, False),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "image"}, False),
        ({"sec-fetch-site": "same-site", "sec-fetch-mode": "cors", "sec-fetch-dest": "empty"}, False),
        ({"origin": "http://localhost:3000", "sec-fetch-site": "same-site"}, False),
        ({"origin": "http://localhost"}, False),
        ({"origin": "http://localhost:8000.evil.example"}, False),
        ({"origin": "null", "sec-fetch-site": "cross-site"}, False),
        ({"origin": "null"}, False),
        ({"origin": "HTTP://evil.example"}, False),
        ({"origin": "http://[evil"}, False),
        ({"origin": ""}, False),
    ],
)
def test_pages(headers: dict[str, str], is_taken: bool) -> None:
    app = api_with(cors_origins=["http://own.example"])
    assert ask(app, {"host": "localhost:8000"} | headers).status == (200 if is_taken else 403)
    assert ask(api_with(cors_origins=["*"]), {"host": "localhost"} | headers).status == 200


def test_a_form_of_another_page_is_no_link() -> None:
    link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
    assert ask(api_with(), {"host": "localhost"} | link, "POST", "/ping").status == 403


def test_settings_that_are_no_names() -> None:
    for host in ("http://llm.example.com", "llm.example.com:8000", "llm.example.com/v1", "*.example.com", ""):
        with pytest.raises(ValidationError, match="write the name alone"):
            HttpSettings(allowed_hosts=(host,))


def test_loopback_addresses() -> None:
    for host, expected in {"127.0.0.9": True, "::1": True, "0.0.0.0": False, "::": False, "10.1.2.3": False}.items():
        assert is_loopback(host) == expected
    assert not is_loopback("no-such-host.invalid")
