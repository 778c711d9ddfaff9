"""The part of the clients' page about coding agents, from the record of `python -m tests.agents`."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

CHECKS = {
    "chat": "Chat",
    "stream": "Stream",
    "tools": "Two tools",
    "cached": "Second turn",
    "overflow": "Too long",
    "killed": "Replica killed",
    "real": "Real model",
}
_HEAD = """\
## Coding agents

`make agents` runs these programs without a terminal, unchanged, against `folio serve` with two replicas. Server and
agents are in a namespace whose only network device is the loopback. The model is a checkpoint whose weights follow a
script (`tests/agents/script.py`); the real one is SmolLM2-135M-Instruct.
"""
_MEANINGS = """\
| Column | What is tried |
|---|---|
| Chat | a question and its answer |
| Stream | an answer of 400 tokens, in at least 20 pieces |
| Two tools | a call, its result, another call, its result, an answer; aider, without tools, edits, tests, edits again |
| Second turn | the session goes on (Cline: a tool's result goes back), and 80 % of the prompt or more is cached |
| Too long | a message that exceeds the context: the agent makes room and answers, or tells its user |
| Replica killed | `kill -9` in the middle of an answer: the agent asks again, or tells its user |
| Real model | a question to SmolLM2-135M-Instruct, streamed; options shorten prompts that exceed its 8,192 tokens |
"""
_URL, _MODEL = "http://127.0.0.1:8000", "qwen3-coder"


def agents_section(record: Mapping[str, Mapping[str, Any]]) -> str:
    """The section of a record: agent → version, API, day, outcomes, environment, files and command."""
    titles = " | ".join(CHECKS.values())
    lines = [_HEAD, f"| Agent | Version | API | {titles} |", f"|---|---|---|{'---|' * len(CHECKS)}"]
    notes: list[str] = []
    for name, entry in record.items():
        cells = " | ".join(_cells(name, entry["outcomes"], notes))
        lines.append(f"| {name} | {entry['version']}, {entry['day']} | {entry['api']} | {cells} |")
    lines += ["", *(f"{place}. {note}" for place, note in enumerate(notes, start=1)), "", _MEANINGS]
    lines += ["This is how each was pointed at the server.", ""]
    for name, entry in record.items():
        lines += [f"### {name}", "", *_setup(entry)]
    return "\n".join(lines).replace("\n\n\n", "\n\n")


def agent_failures(record: Mapping[str, Mapping[str, Any]]) -> list[str]:
    return [
        f"{name}: {check}: {entry['outcomes'].get(check)}"
        for name, entry in record.items()
        for check in CHECKS
        if not entry["outcomes"].get(check, "").startswith("passed")
    ]


def _cells(name: str, outcomes: Mapping[str, str], notes: list[str]) -> Iterator[str]:
    for check in CHECKS:
        how, _, detail = outcomes.get(check, "–").partition(": ")
        if how == "passed":
            yield f"✓ {detail}".strip()
        elif check not in outcomes:
            yield "–"
        else:
            notes.append(f"{name}: {outcomes[check]}")
            yield f"**✗** {len(notes)}"


def _setup(entry: Mapping[str, Any]) -> Iterator[str]:
    def shown(text: str) -> str:
        return text.replace("{url}", _URL).replace("{model}", _MODEL).replace("{prompt}", "Say hello.")

    for path, text in entry["files"].items():
        yield f"`{path}`:\n\n```text\n{shown(text).strip()}\n```\n"
    exports = [f"export {name}={shlex.quote(shown(value))}" for name, value in entry["env"].items()]
    yield "<!-- not run: needs the agent -->\n```bash"
    yield "\n".join([*exports, shlex.join(map(shown, entry["command"]))])
    yield "```\n"
