"""The page of clients shows the record of their tests, and the record shows that all of them work."""

from __future__ import annotations

import json
from typing import Any

from tools.clients import FEATURES, PAGE, RECORD, ROOT, clients_page, failures

WORKS = {"versions": {"one": "1.2", "npm:two": "3"}, "outcomes": {"chat": "passed"}, "absent": {}, "notes": {}}


def _record() -> Any:
    return json.loads(RECORD.read_text(encoding="utf-8"))


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == clients_page(_record()), "run python -m tools.clients"


def test_every_client_works() -> None:
    assert failures(_record()) == []


def test_every_feature_of_a_client_was_tried_or_is_absent() -> None:
    for name, entry in _record().items():
        if "run" not in entry["outcomes"]:
            assert {*entry["outcomes"], *entry["absent"]} == {*FEATURES}, name
            assert not entry["outcomes"].keys() & entry["absent"].keys(), name


def test_a_row_has_versions_outcomes_and_numbered_notes() -> None:
    entry = WORKS | {
        "outcomes": {"chat": "passed", "stream": "failed"},
        "absent": {"tools": "none"},
        "notes": {"chat": "slow"},
    }
    page = clients_page({"One": entry})
    assert "| One | 1.2, two 3 | ✓ 1 | **✗** | – 2 | – | – | – |" in page
    assert "1. One: slow.\n2. One: none.\n" in page
    assert failures({"One": entry}) == ["One: stream"]


def test_a_load_tool_has_a_table_of_its_own() -> None:
    page = clients_page({"Load": WORKS | {"outcomes": {"run": "passed"}}})
    assert page.endswith("| Load | 1.2, two 3 | ✓ |\n")


def test_the_clients_have_the_servers_torch_and_transformers() -> None:
    """Another torch would be another download of gigabytes, and another tokenizer would count other tokens."""
    ours, theirs = (
        {line for line in (ROOT / path).read_text().splitlines() if line.startswith(("torch==", "transformers=="))}
        for path in ("constraints.txt", "tests/clients/constraints.txt")
    )
    assert ours == theirs
