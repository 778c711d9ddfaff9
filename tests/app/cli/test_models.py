"""`folio models` against a server that notes the calls."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp import web

from folio.app.cli.main import main
from tests.app.cli.fake_server import error, serving

CARDS = (
    {"id": "one", "max_model_len": 4096, "state": "awake", "parent": None},
    {"id": "pirate", "max_model_len": 4096, "state": "awake", "parent": "one"},
    {"id": "two", "max_model_len": None, "state": "new", "parent": None},
)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str, Any]]]:
    """What reached the server of FOLIO_URL: method, path and body."""
    made: list[tuple[str, str, Any]] = []

    async def answer(request: web.Request, body: Any) -> web.StreamResponse:
        if request.headers.get("Authorization") != "Bearer a-key":
            return error("adding a model is for operators; send an operator's API key", 403)
        made.append((request.method, request.raw_path, body))
        if request.method == "POST" and body["path"] == "gone":
            return error("path is 'gone'; there is no such folder in models_dir, '/models'", 400)
        return web.json_response({"id": "org/qwen", "deleted": True})

    with serving(answer, cards=CARDS) as url:
        monkeypatch.setenv("FOLIO_URL", url)
        monkeypatch.setenv("FOLIO_API_KEY", "a-key")
        yield made


def test_models_are_listed(calls: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["models"], ["models", "list"]):
        assert main(arguments) == 0
        rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:] if line.strip()]
        assert rows == [["one", "awake", "4,096"], ["pirate", "4,096", "one"], ["two", "new"]]
    assert main(["models", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == list(CARDS)


def test_a_model_is_added_and_removed(calls: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "add", "org/qwen", "qwen"]) == 0
    assert capsys.readouterr().out == "org/qwen is served; its first request loads it\n"
    assert main(["models", "add", "q", "qwen", "--keep", "60", "--weight", "2", "--max-model-len", "512"]) == 0
    assert main(["models", "add", "q", "qwen", "--keep", "always"]) == 0
    assert main(["models", "remove", "org/qwen"]) == 0
    assert capsys.readouterr().out.endswith("org/qwen is not served any more\n")
    assert calls == [
        ("POST", "/v1/models", {"name": "org/qwen", "path": "qwen"}),
        ("POST", "/v1/models", {"name": "q", "path": "qwen", "keep": 60.0, "weight": 2.0, "max_model_len": 512}),
        ("POST", "/v1/models", {"name": "q", "path": "qwen", "keep": "always"}),
        ("DELETE", "/v1/models/org%2Fqwen", None),
    ]


def test_what_the_server_refuses(calls: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "add", "x", "gone"]) == 1
    assert "there is no such folder in models_dir" in capsys.readouterr().err
    assert main(["models", "add", "x", "y", "--api-key", "other"]) == 1
    assert "is for operators" in capsys.readouterr().err
    assert main(["models", "add", "x", "y", "--keep", "soon"]) == 2
    assert "'soon' must be auto, always, or seconds" in capsys.readouterr().err
