"""The page of clients shows the record of their tests, and the record shows that all of them work."""

from __future__ import annotations

import json
from typing import Any

from tools.agents import CHECKS, agent_failures, agents_section
from tools.clients import AGENTS, FEATURES, PAGE, RECORD, ROOT, clients_page, failures

WORKS = {"versions": {"one": "1.2", "npm:two": "3"}, "outcomes": {"chat": "passed"}, "absent": {}, "notes": {}}


def _record() -> Any:
    return json.loads(RECORD.read_text(encoding="utf-8"))


def _agents() -> Any:
    return json.loads(AGENTS.read_text(encoding="utf-8"))


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == clients_page(_record(), _agents()), "run python -m tools.clients"


def test_every_client_works() -> None:
    assert failures(_record()) + agent_failures(_agents()) == []


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
    page = clients_page({"One": entry}, {})
    assert "| One | 1.2, two 3 | ✓ 1 | **✗** | – 2 | – | – | – |" in page
    assert "1. One: slow.\n2. One: none.\n" in page
    assert failures({"One": entry}) == ["One: stream"]


def test_a_load_tool_has_a_table_of_its_own() -> None:
    page = clients_page({"Load": WORKS | {"outcomes": {"run": "passed"}}}, {})
    assert "| Load | 1.2, two 3 | ✓ |\n" in page


def test_an_agents_row_says_what_it_did_and_what_failed() -> None:
    entry = {
        "version": "1.2",
        "day": "2026-01-02",
        "api": "chat",
        "outcomes": dict.fromkeys(CHECKS, "passed") | {"overflow": "passed: says so", "real": "exit status 1"},
        "env": {"KEY": "{url}/v1"},
        "files": {"~/.one/config": "model = {model}"},
        "command": ["one", "-p", "{prompt}"],
    }
    section = agents_section({"One": entry})
    assert "| One | 1.2, 2026-01-02 | chat | ✓ | ✓ | ✓ | ✓ | ✓ says so | ✓ | **✗** 1 |" in section
    assert "1. One: exit status 1\n" in section
    assert "`~/.one/config`:\n\n```text\nmodel = qwen3-coder\n```" in section
    assert "export KEY=http://127.0.0.1:8000/v1\none -p 'Say hello.'\n" in section
    assert agent_failures({"One": entry}) == ["One: real: exit status 1"]
    assert agent_failures({"One": entry | {"outcomes": {}}})[0] == "One: chat: None"


def test_the_clients_have_the_servers_torch_and_transformers() -> None:
    """Another torch would be another download of gigabytes, and another tokenizer would count other tokens."""
    ours, theirs = (
        {line for line in (ROOT / path).read_text().splitlines() if line.startswith(("torch==", "transformers=="))}
        for path in ("constraints.txt", "tests/clients/constraints.txt")
    )
    assert ours == theirs
