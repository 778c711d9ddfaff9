"""`folio pins` and `folio budget` against a server that notes the calls."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from folio.app.cli.main import main
from tests.app.cli.conftest import Stdin
from tests.app.cli.fake_server import error, serving

REPORT = {
    "budget_bytes": 1 << 30,
    "physical_bytes": 512 << 20,
    "active_bytes": 256 << 20,
    "cached_bytes": 64 << 20,
    "pinned_bytes": 0,
    "swapped_bytes": 0,
}
CARD = {"id": "rules", "num_tokens": 32, "num_bytes": 65536, "num_replicas": 2, "num_computed": 2, "model": "m"}
PARTLY = CARD | {"id": "partly", "num_computed": 1}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str, Any]]]:
    """What reached the server of FOLIO_URL: method, path and body."""
    made: list[tuple[str, str, Any]] = []

    async def answer(request: web.Request, body: Any) -> web.StreamResponse:
        if request.headers.get("Authorization") != "Bearer a-key":
            return error("this path is for operators; send an operator's API key", 403)
        made.append((request.method, request.raw_path, body))
        match request.method, request.path:
            case "GET", "/v1/load/memory":
                return web.json_response({"replica": REPORT})
            case "PUT", "/v1/budget" if body["budget_bytes"] > 1 << 30:
                return error("a budget of 2147483648 bytes must be between 1 and 1073741824", 400)
            case "PUT", "/v1/budget":
                return web.json_response({"revision": 3, "answers": ["applied", "deferred"]})
            case "GET", "/v1/pins":
                return web.json_response({"data": [CARD, PARTLY]})
            case "POST", "/v1/pins":
                return web.json_response(CARD)
        return web.json_response({"id": "rules", "deleted": True})

    with serving(answer) as url:
        monkeypatch.setenv("FOLIO_URL", url)
        monkeypatch.setenv("FOLIO_API_KEY", "a-key")
        yield made


def test_pins_are_listed(calls: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["pins"], ["pins", "list"]):
        assert main(arguments) == 0
        lines = capsys.readouterr().out.split("\n")
        assert lines[1].split() == ["rules", "32", "64", "KiB", "2", "m"]
        assert lines[2].split() == ["partly", "32", "64", "KiB", "1", "of", "2", "m"]
    assert main(["pins", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [CARD, PARTLY]


def test_pins_are_added_and_removed(
    calls: list[Any], tmp_path: Path, stdin: Stdin, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rules.txt").write_text("The rules …")
    stdin.pipe("From a pipe")
    for source in (
        ["--prompt", "A text"],
        ["--file", str(tmp_path / "rules.txt")],
        ["--file", "-"],
        ["--system", "Be brief."],
    ):
        assert main(["pins", "add", "rules", *source]) == 0
        assert capsys.readouterr().out == "rules: 32 tokens, 64 KiB a replica, on 2 replicas\n"
    assert main(["pins", "remove", "a/ü b"]) == 0
    assert main(["pins", "add", "rules", "--prompt", "A text", "--model", "m"]) == 0
    assert main(["pins", "remove", "rules", "--model", "a b"]) == 0
    assert calls.pop()[1] == "/v1/pins/rules?model=a+b"
    assert calls.pop()[2]["model"] == "m"
    capsys.readouterr()
    assert [call[2].get("prompt") for call in calls[:3]] == ["A text", "The rules …", "From a pipe"]
    assert calls[3][2]["messages"] == [{"role": "system", "content": "Be brief."}]
    assert calls[4][:2] == ("DELETE", "/v1/pins/a%2F%C3%BC%20b")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["pins", "add", "rules"], "give one of --prompt, --file and --system"),
        (["pins", "add", "rules", "--file", "no.txt"], "no.txt cannot be read: No such file"),
        (["pins", "--api-key", "wrong"], "this path is for operators"),
        (["budget", "much"], "'much' is no size; write a number and a unit"),
        (["budget", "2GiB"], "a budget of 2147483648 bytes must be between 1 and 1073741824"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], line: str, calls: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) > 0
    shown = capsys.readouterr()
    assert line in shown.err
    assert (shown.out, shown.err.count("\n")) == ("", 1)


def test_the_budget_is_shown_and_changed(calls: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["budget"]) == 0
    row = capsys.readouterr().out.split("\n")[1].split()
    assert row[:5] == ["replica", "1", "GiB", "512", "MiB"]
    assert main(["budget", "512MiB"]) == 0
    shown = capsys.readouterr().out
    assert "1 of 2 replicas: applied (within it now)\n1 of 2 replicas: deferred (will be" in shown
    assert ("PUT", "/v1/budget", {"budget_bytes": 512 << 20}) in calls
    assert main(["budget", "512MiB", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["change"]["revision"] == 3
