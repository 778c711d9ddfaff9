"""Paths of Serve's proxies, with keys that only the application knows."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from app.edge.settings import HttpSettings
from app.openai.http import build_api
from app.serving.serve_paths import GuardsRoutes
from tests.app.edge.asgi import bearer, call
from tests.app.openai.test_http import FakeService

KEY = "sk-0123456789abcdef"


def like_serve(app: ASGIApp | None) -> ASGIApp:
    async def proxy(scope: Scope, receive: Receive, send: Send) -> None:
        answers = {"/-/routes": JSONResponse({"/": "folio"}), "/-/healthz": PlainTextResponse("success")}
        await answers.get(scope["path"], app or PlainTextResponse("no such path", 404))(scope, receive, send)

    return GuardsRoutes(proxy)


@pytest.fixture
def app(tmp_path: Path) -> ASGIApp:
    (tmp_path / "keys").write_text(KEY)
    return build_api(FakeService(), HttpSettings.model_validate({"api_keys": {"file": str(tmp_path / "keys")}}))


def test_routes_need_a_key_when_others_do(app: ASGIApp) -> None:
    """Serve's proxy told them to everybody."""

    async def run() -> None:
        serve = like_serve(app)
        for method, body in (("GET", b""), ("POST", b"{}")):
            refused = await call(serve, method, "/-/routes", body=body)
            assert (refused.status, refused.error["code"]) == (401, "invalid_api_key")
            assert b"folio" not in refused.body
            assert (await call(serve, method, "/-/routes", bearer(KEY), body=body)).body == b'{"/":"folio"}'
        assert (await call(serve, "GET", "/-/healthz")).body == b"success"

    asyncio.run(run())


def test_routes_are_open_where_all_else_is() -> None:
    for app in (build_api(FakeService()), None):
        assert asyncio.run(call(like_serve(app), "GET", "/-/routes")).status == 200
