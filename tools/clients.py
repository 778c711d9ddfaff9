"""The page of other people's clients, made from what their tests recorded: `python -m tools.clients` writes it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tools.agents import agents_section

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "tests" / "clients" / "results.json"
AGENTS = ROOT / "tests" / "agents" / "results.json"
PAGE = ROOT / "docs" / "clients.md"

Record = Mapping[str, Mapping[str, Any]]

FEATURES = {
    "chat": "Chat",
    "stream": "Stream",
    "tools": "Tools",
    "structured": "Structured output",
    "reasoning": "Reasoning",
    "embeddings": "Embeddings",
}
_SHOWN = {"passed": "✓", "failed": "**✗**"}
_HEAD = """\
# Clients

<!-- Made from tests/clients/results.json and tests/agents/results.json by `python -m tools.clients`. -->

`make clients` runs other people's clients, unchanged, against a real server, and writes this page. They have an
environment of their own (`.venv-clients`), and are pointed at Folio by its base URL alone. The model is a checkpoint
whose weights are written by hand (`tests/clients/scripted_model.py`): it reasons, calls a tool and answers in each
run, and is otherwise served like any other.

✓ works · **✗** fails · – the client has no such feature · a number: see the note below.
"""
_MEANINGS = """\
| Column | What is tried |
|---|---|
| Chat | a question and its answer; completions and responses where the client has them |
| Stream | the same in pieces |
| Tools | the model calls a function, gets its result, and answers: by the client's own agent or loop if it has one |
| Structured output | an object by a JSON schema, in each way that the client has |
| Reasoning | the client shows it apart from the answer, and sends it back in the next turn |
| Embeddings | vectors of two texts |
"""


def clients_page(record: Record, agents: Record) -> str:
    """The page of two records: client → versions, outcomes, absent features and notes; agent → see `agents_section`."""
    notes: list[str] = []
    clients = [_row(name, entry, notes) for name, entry in record.items() if not _is_tool(entry)]
    tools = [_tool_row(name, entry) for name, entry in record.items() if _is_tool(entry)]
    lines = [_HEAD, "", f"| Client | Version | {' | '.join(FEATURES.values())} |", f"|---|---|{'---|' * len(FEATURES)}"]
    lines += [*clients, "", *(f"{place}. {note}" for place, note in enumerate(notes, start=1)), "", _MEANINGS]
    lines += ["## Load and evaluation tools", "", "| Tool | Version | Runs unchanged |", "|---|---|---|", *tools]
    lines += ["", agents_section(agents)]
    return "\n".join(lines).replace("\n\n\n", "\n\n") + "\n"


def failures(record: Record) -> list[str]:
    return [
        f"{name}: {what}"
        for name, entry in record.items()
        for what, how in entry["outcomes"].items()
        if how != "passed"
    ]


def _is_tool(entry: Mapping[str, Any]) -> bool:
    return "run" in entry["outcomes"]


def _row(name: str, entry: Mapping[str, Any], notes: list[str]) -> str:
    return f"| {name} | {_versions(entry)} | {' | '.join(_cells(name, entry, notes))} |"


def _tool_row(name: str, entry: Mapping[str, Any]) -> str:
    return f"| {name} | {_versions(entry)} | {_SHOWN[entry['outcomes']['run']]} |"


def _cells(name: str, entry: Mapping[str, Any], notes: list[str]) -> Iterator[str]:
    for feature in FEATURES:
        shown = _SHOWN.get(entry["outcomes"].get(feature), "–")
        if note := entry["absent"].get(feature) or entry["notes"].get(feature):
            text = f"{name}: {note}."
            if text not in notes:
                notes.append(text)
            shown += f" {notes.index(text) + 1}"
        yield shown


def _versions(entry: Mapping[str, Any]) -> str:
    own, *others = entry["versions"].items()
    more = "".join(f", {package.removeprefix('npm:')} {version}" for package, version in others)
    return own[1] + more


def main() -> None:
    record: Record = json.loads(RECORD.read_text(encoding="utf-8"))
    agents: Record = json.loads(AGENTS.read_text(encoding="utf-8"))
    PAGE.write_text(clients_page(record, agents), encoding="utf-8")


if __name__ == "__main__":
    main()
