"""What docs/coming-from.md says of Folio's options, routes and fields is so."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import typer
from fastapi.routing import APIRoute

from folio.app.api.http import build_api
from folio.app.api.openai.bodies import CompletionRequest
from folio.app.api.openai.chat_body import ChatCompletionRequest
from folio.app.api.unknown_fields import UnknownFields
from folio.app.cli.main import folio
from tests.docs.blocks import ROOT

TEXT = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")
_CODE = re.compile(r"`([^`]+)`")
_CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
# A value that is not null, of fields that are refused.
_SAMPLES: dict[str, Any] = {
    "suffix": "x",
    "audio": {},
    "functions": [{}],
    "function_call": "auto",
    "chat_template": "x",
}


def _rows(title: str) -> Iterator[tuple[list[str], str]]:
    """(code in the first cell, the second cell) of a section's table."""
    _, _, section = TEXT.partition(f"\n{title}\n")
    for line in re.split(r"\n#+ ", section)[0].splitlines():
        if line.startswith("| ") and "|---" not in line:
            theirs, ours = (cell.strip() for cell in line.strip("|").split(" | ")[:2])
            yield _CODE.findall(theirs), ours


FIELDS = [(name, ours) for names, ours in _rows("### Fields") for name in names]
ROUTES = [(name, ours) for names, ours in _rows("### Routes") for name in names]


@cache
def _routes() -> set[str]:
    api = build_api(object())
    routes = [route for route in api.routes if isinstance(route, APIRoute)]
    return {path.partition("/{")[0] for path in [*(route.path for route in routes), *api.openapi()["paths"]]}


def _ours() -> list[str]:
    """All code in second cells, and in first cells that say "the same"."""
    found = []
    for line in TEXT.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| ") and len(cells) > 1:
            found += _CODE.findall(cells[0] if cells[1].startswith("the same") else cells[1])
    return found


@pytest.mark.parametrize("option", sorted({name.split()[0] for name in _ours() if name.startswith("--")}))
def test_the_option_exists(option: str) -> None:
    group: Any = typer.main.get_command(folio)
    assert option in {name for parameter in group.commands["serve"].params for name in parameter.opts}


@pytest.mark.parametrize("route", sorted({name for name in _ours() if name.startswith("/v1/")}))
def test_the_route_exists(route: str) -> None:
    assert route in _routes()


@pytest.mark.parametrize(("route", "ours"), ROUTES)
def test_the_route_is_the_same_or_missing(route: str, ours: str) -> None:
    assert (route in _routes()) == (ours == "same")


@pytest.mark.parametrize(("field", "ours"), FIELDS)
def test_the_field_is_known_dropped_or_refused(field: str, ours: str) -> None:
    known = {*ChatCompletionRequest.model_fields, *CompletionRequest.model_fields}
    assert ours in ("same", "no effect", "dropped", "refused")
    assert (field in known) == (ours != "dropped")
    kind, body = (
        (CompletionRequest, {"model": "m", "prompt": "x"}) if field == "suffix" else (ChatCompletionRequest, _CHAT)
    )
    if ours == "refused":
        with pytest.raises(ValueError, match=field):
            kind.model_validate(body | {field: _SAMPLES[field]})
    elif ours == "dropped":
        with pytest.raises(ValueError, match=r"Extra inputs") as raised:
            kind.model_validate(body | {field: 1})
        _, dropped = UnknownFields().resolve(kind, body | {field: 1}, raised.value.errors())  # type: ignore[attr-defined]
        assert dropped == [field]


def test_the_tables_are_not_empty() -> None:
    assert len(FIELDS) > 40
    assert len(ROUTES) > 20
