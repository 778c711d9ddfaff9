"""Tools, choices and items that Codex CLI and other clients of OpenAI's API send to `/v1/responses`."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest
from openai.types.responses import Response

from folio.app.api.openai.chat_body import MAX_MESSAGES
from folio.app.api.responses.call_text import CallText
from folio.app.api.responses.grammar import pattern_of
from folio.app.api.responses.tools import qualified_name
from folio.app.api.tools.bodies import MAX_TOOLS
from folio.app.config.http import HttpSettings
from tests.app.api.asking import (
    FUNCTION,
    IGNORED,
    PATCH,
    RESPONSES,
    USER,
    Long,
    ask,
    call_of,
    events_of,
    prompt_of,
    transport_of,
)

NAMESPACE = {"type": "namespace", "name": "mcp__idea__", "description": "An IDE.", "tools": [FUNCTION, PATCH]}
# Codex CLI 0.171's, shortened.
PATCH_GRAMMAR = """\
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
update_hunk: "*** Update File: " filename LF change?
filename: /(.+)/
add_line: "+" /(.*)/ LF -> line
change: (change_context | change_line)+
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF

%import common.LF
"""


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "web_search", "external_web_access": False},
        {"type": "web_search_preview", "user_location": {"type": "approximate", "city": "x"}},
        {"type": "local_shell"},
        {"type": "image_generation", "output_format": "png"},
        {"type": "tool_search", "execution": "client", "description": "x", "parameters": {"type": "object"}},
        {"type": "mcp", "server_label": "s", "server_url": "https://x"},
        {"type": "code_interpreter", "container": {"type": "auto"}},
        {"type": "file_search", "vector_store_ids": ["v"]},
        {"type": "computer_use_preview", "display_width": 1, "display_height": 1, "environment": "linux"},
        {"type": "a_tool_of_2030", "name": "x"} | {f"field{i}": i for i in range(100)},
    ],
    ids=lambda tool: tool["type"],
)
def test_tools_of_openais_servers_are_dropped_and_named(tool: dict[str, Any]) -> None:
    """Regression: Codex's first request was answered 400."""
    answer = ask(engines := Long("Hello"), tools=[FUNCTION, tool])
    assert answer.status_code == 200, answer.text
    assert answer.headers[IGNORED] == f"tools[].{tool['type']}"
    assert [tool["type"] for tool in answer.json()["tools"]] == ["function"]
    ask(others := Long("Hello"), tools=[FUNCTION])
    assert engines.calls[0].prompt_token_ids == others.calls[0].prompt_token_ids
    only = ask(Long("Hello"), tools=[tool], tool_choice="required")
    assert (only.status_code, only.json()["output"][0]["type"]) == (200, "message")
    assert only.headers[IGNORED] == f"tools[].{tool['type']}, tool_choice"
    strict = transport_of(Long("x"), HttpSettings(unknown_fields="error"))
    refused = strict.post(RESPONSES, json={"model": "m", "input": "x", "tools": [tool]})
    assert (refused.status_code, tool["type"] in refused.text) == (400, True)


def test_a_custom_tool_is_called_with_its_text() -> None:
    patch = '*** Begin Patch\n+"ä"\\n\n*** End Patch\n'
    call = call_of("apply_patch", input=patch)
    pieces = [call[i : i + 5] for i in range(0, len(call), 5)]
    answer = ask(Long(*pieces), tools=[FUNCTION, PATCH])
    [item] = answer.json()["output"]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "apply_patch", patch)
    Response.model_validate_json(answer.text)
    assert IGNORED not in answer.headers
    events = events_of(ask(engines := Long(*pieces), tools=[PATCH], stream=True))
    kinds = [event["type"].removeprefix("response.") for event in events]
    name = "custom_tool_call_input"
    assert kinds[2] == "output_item.added"
    assert kinds[-3:] == [f"{name}.done", "output_item.done", "completed"]
    assert set(kinds[3:-3]) == {f"{name}.delta"}
    assert len(kinds) > 8
    assert (events[2]["item"]["input"], events[2]["item"]["status"]) == ("", "in_progress")
    assert "".join(event["delta"] for event in events[3:-3]) == events[-3]["input"] == patch
    assert events[-1]["response"]["output"] == [events[-2]["item"]]
    assert "follows this Lark grammar" in prompt_of(engines)
    assert "pattern" not in prompt_of(engines)


def test_a_forced_custom_call_follows_its_grammar() -> None:
    tool = PATCH | {"format": {"type": "grammar", "syntax": "lark", "definition": PATCH_GRAMMAR}}
    ask(engines := Long("x"), tools=[tool, FUNCTION], tool_choice={"type": "custom", "name": "apply_patch"})
    structure = engines.calls[0].params.structure
    pattern = pattern_of("lark", PATCH_GRAMMAR)
    assert json.dumps(pattern) in structure.spec
    assert "shell" not in structure.spec


def test_the_tools_of_a_namespace() -> None:
    """Names that a namespace repeats are apart."""
    answer = ask(engines := Long(call_of("mcp__idea__shell")), tools=[FUNCTION, NAMESPACE])
    [item] = answer.json()["output"]
    assert (item["type"], item["namespace"], item["name"]) == ("function_call", "mcp__idea__", "shell")
    Response.model_validate_json(answer.text)
    assert "An IDE.\\nfreeform" not in prompt_of(engines)  # once, with the first tool
    [item] = ask(Long(call_of("shell")), tools=[FUNCTION, NAMESPACE]).json()["output"]
    assert (item["name"], "namespace" in item) == ("shell", False)
    call = call_of("mcp__idea__apply_patch", input="x")
    [item] = ask(Long(call), tools=[NAMESPACE]).json()["output"]
    assert (item["type"], item["namespace"], item["input"]) == ("custom_tool_call", "mcp__idea__", "x")
    back = [USER, item, {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "ok"}]
    ask(again := Long("x"), tools=[NAMESPACE], input=back)
    assert call in prompt_of(again)  # as the model wrote it


def test_names_in_namespaces_are_bounded() -> None:
    assert [qualified_name(space, "f") for space in (None, "a", "a__", "a.")] == ["f", "a__f", "a__f", "a.f"]
    names = {qualified_name("n" * 90, "f" * 90 + end) for end in "ab"}
    assert len(names) == 2
    assert all(re.fullmatch("[a-z_0-9]{128}", name) for name in names)


@pytest.mark.parametrize(
    ("fields", "ignored"),
    [
        ({"include": ["web_search_call.action.sources", "file_search_call.results"]}, 2),
        ({"include": ["web_sé\r\nx-evil: 1"]}, 1),
        ({"truncation": "auto"}, 1),
        ({"input": [], "instructions": "Be brief."}, 0),
        ({"input": None, "instructions": "Be brief."}, 0),
        ({"input": [{"role": "assistant", "content": None}, {"role": "user"}]}, 0),
        ({"reasoning": {"effort": "low", "summary": "detailed"}, "text": {"verbosity": "low"}}, 0),
        ({"safety_identifier": "s", "service_tier": "flex", "prompt_cache_retention": "24h"}, 0),
    ],
)
def test_settings_are_accepted_or_named(fields: dict[str, Any], ignored: int) -> None:
    answer = ask(Long("x"), **fields)
    assert answer.status_code == 200, answer.text
    named = answer.headers.get(IGNORED, "")
    assert len(named.split(", ") if named else []) == ignored


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": [USER] * MAX_MESSAGES}, "input"),
        ({"input": [{"type": "mcp_call", "id": f"{i}", "name": "n", "arguments": "{}"} for i in range(2100)]}, "input"),
        (
            {
                "tools": [
                    NAMESPACE | {"name": f"n{n}", "tools": [FUNCTION | {"name": f"f{i}"} for i in range(MAX_TOOLS)]}
                    for n in range(2)
                ]
            },
            "tools",
        ),
    ],
    ids=["messages", "calls with results", "namespaces"],
)
def test_what_becomes_too_much_is_refused(fields: dict[str, Any], param: str) -> None:
    """Regression: 4,096 items with instructions were answered 500."""
    answer = ask(Long("x"), **fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize(("most", "number"), [(1, 1), (2, 2), (3, 3), (None, 3)])
def test_calls_beyond_the_most_are_left_out(most: int | None, number: int) -> None:
    text = "\n".join([call_of("shell"), call_of("apply_patch", input="x"), call_of("shell")])
    assert len(ask(Long(text), tools=[FUNCTION, PATCH], max_tool_calls=most).json()["output"]) == number


@pytest.mark.parametrize(
    ("definition", "right", "wrong"),
    [
        (
            PATCH_GRAMMAR,
            [
                "*** Begin Patch\n*** Add File: a\n+x\n+\n*** End Patch",
                "*** Begin Patch\n*** Update File: a\n@@ f\n-x\n*** End Patch\n",
            ],
            ["*** Begin Patch\n*** End Patch", "*** Begin Patch\n*** Add File: \n+x\n*** End Patch"],
        ),
        (
            'start: expr\nexpr: term (SP ADD SP term)* -> add\n | term\nterm: INT\nSP: " "\nADD: "+"\n'
            "%import common.INT",
            ["1", "12 + 3 + 4"],
            ["1+2", "", "+"],
        ),
        ('start: "a"i~2..3 ["x"] "0".."9" /[/"]+\\//  // end', ['aA5/"/', "aaax0//"], ["a0//", "aaaa0//", "aaxx0//"]),
    ],
)
def test_lark_grammars_are_regular_expressions(definition: str, right: list[str], wrong: list[str]) -> None:
    pattern = pattern_of("lark", definition)
    assert pattern is not None
    assert [text for text in right if not re.search(pattern, text)] == []
    assert [text for text in wrong if re.search(pattern, text)] == []


@pytest.mark.parametrize(
    ("syntax", "definition"),
    [
        ("lark", 'start: "a" start | "b"'),
        ("lark", '%ignore " "\nstart: "a"'),
        ("lark", "start: missing"),
        ("lark", 'start: ("a"'),
        ("lark", "%import common.X\nstart: X"),
        ("lark", "\x00"),
        ("lark", 'start: "a"~'),
        (
            "lark",
            "a: b b\n"
            + "\n".join(f"{x}: {y} {y}" for x, y in zip("bcdefghijklmnop", "cdefghijklmnopq", strict=True))
            + '\nq: "x"\nstart: a',
        ),
        ("regex", "a(?=b)"),
        ("regex", "["),
    ],
)
def test_grammars_that_cannot_be_enforced_are_named(syntax: Any, definition: str) -> None:
    assert pattern_of(syntax, definition) is None
    tool = PATCH | {"format": {"type": "grammar", "syntax": syntax, "definition": definition}}
    answer = ask(engines := Long("x"), tools=[tool], tool_choice="required")
    assert (answer.status_code, answer.headers[IGNORED]) == (200, "tools[].format")
    assert engines.calls[0].params.structure is not None  # a text


@pytest.mark.parametrize(
    "definition",
    [
        "start: /" + "[a]" * 10_000,
        "a: /" + "x" * 30_000 + "/\nstart: " + "a " * 14_000,
        "start: missing" + "\n" * 60_000,
    ],
    ids=["no end", "a rule used often", "empty lines"],
)
def test_grammars_are_read_in_linear_time(definition: str) -> None:
    """Regression: these took from seconds to hours, in the event loop."""
    begun = time.thread_time()
    assert pattern_of("lark", definition) is None
    assert time.thread_time() - begun < 5


def text_of(arguments: str, step: int) -> str:
    call = CallText()
    return "".join([*(call.push(arguments[i : i + step]) for i in range(0, len(arguments), step)), call.finish()])


@pytest.mark.parametrize("text", ["", 'q"\\\n\t/', "😀é\u2028", '{"input": "x"}'])
@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
def test_the_text_of_a_call_in_pieces(text: str, step: int) -> None:
    for ensure_ascii in (True, False):
        assert text_of(json.dumps({"input": text}, ensure_ascii=ensure_ascii), step) == text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a\\d+b"}', "a\\d+b"),
        ('{"input": "cut\\u00', "cut"),
        ('{"patch": "x"}', "x"),
        ('{"a": 1, "b": 2}', '{"a": 1, "b": 2}'),
        ('{"x": 1, "input": "late"}', "late"),
    ],
)
def test_arguments_that_are_not_one_text(arguments: str, text: str) -> None:
    assert text_of(arguments, 1) == text_of(arguments, 100) == text
