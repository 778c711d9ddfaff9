"""Tools, choices and items that Codex CLI and other clients of OpenAI's API send to `/v1/responses`."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest
from openai.types.responses import Response
from starlette.testclient import TestClient

from folio.app.api.openai.chat_body import MAX_MESSAGES
from folio.app.api.responses.call_text import CallText
from folio.app.api.responses.grammar import pattern_of
from folio.app.api.responses.tools import qualified_name
from folio.app.api.tools.bodies import MAX_TOOLS
from folio.app.config.http import HttpSettings
from tests.app.api.responses.asking import CODEX, FUNCTION, PATCH, USER, Long, ask, call_of, prompt_of
from tests.fakes.replicas import ingress_with
from tests.local_server import guarded_api

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
    assert answer.headers["x-folio-ignored-fields"] == f"tools[].{tool['type']}"
    assert [tool["type"] for tool in answer.json()["tools"]] == ["function"]
    ask(others := Long("Hello"), tools=[FUNCTION])
    assert engines.calls[0].prompt_token_ids == others.calls[0].prompt_token_ids
    only = ask(Long("Hello"), tools=[tool], tool_choice="required")
    assert (only.status_code, only.json()["output"][0]["type"]) == (200, "message")
    assert only.headers["x-folio-ignored-fields"] == f"tools[].{tool['type']}, tool_choice"
    strict = TestClient(guarded_api(ingress_with(Long("x")), HttpSettings(unknown_fields="error")))
    refused = strict.post("/v1/responses", json={"model": "m", "input": "x", "tools": [tool]})
    assert (refused.status_code, tool["type"] in refused.text) == (400, True)


def test_a_custom_tool_is_called_with_its_text() -> None:
    patch = '*** Begin Patch\n+"ä"\\n\n*** End Patch\n'
    call = call_of("apply_patch", input=patch)
    pieces = [call[i : i + 5] for i in range(0, len(call), 5)]
    answer = ask(Long(*pieces), tools=[FUNCTION, PATCH])
    [item] = answer.json()["output"]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "apply_patch", patch)
    Response.model_validate_json(answer.text)
    assert "x-folio-ignored-fields" not in answer.headers
    ingress = ingress_with(engines := Long(*pieces))
    api = TestClient(guarded_api(ingress), base_url="http://folio")
    lines = api.post("/v1/responses", json={"model": "m", "tools": [PATCH], "stream": True} | CODEX).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
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
    ("choice", "may_call", "ignored"),
    [
        ({"type": "function", "name": "shell"}, ["shell"], None),
        ({"type": "custom", "name": "apply_patch"}, ["apply_patch"], None),
        ({"type": "function", "name": "shell", "namespace": "mcp__idea__"}, ["mcp__idea__shell"], None),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "custom", "name": "apply_patch"}, {"type": "web_search"}],
            },
            ["apply_patch"],
            "tool_choice.tools[].web_search",
        ),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "mcp", "server_label": "s"}]},
            None,
            "tool_choice.tools[].mcp",
        ),
        ({"type": "web_search_preview"}, None, "tool_choice.web_search_preview"),
        ({"type": "mcp", "server_label": "s", "name": "n"}, None, "tool_choice.mcp"),
        ("none", None, None),
    ],
)
def test_choices(choice: Any, may_call: list[str] | None, ignored: str | None) -> None:
    answer = ask(engines := Long("x"), tools=[FUNCTION, PATCH, NAMESPACE], tool_choice=choice)
    assert answer.status_code == 200, answer.text
    assert answer.headers.get("x-folio-ignored-fields") == ignored
    structure = engines.calls[0].params.structure
    # Without a forced call the structure is that of free text, in which the strict ones follow their grammar.
    called = None if structure is None else re.findall(r'function_\d+: "\\"(\w+)\\"', structure.spec) or None
    assert called == may_call


@pytest.mark.parametrize(
    ("item", "shown", "ignored"),
    [
        ({"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "*** A"}, '"*** A"', None),
        (
            {"type": "function_call", "call_id": "c1", "name": "shell", "namespace": "a", "arguments": "{}"},
            "a__sh",
            None,
        ),
        (
            {"type": "local_shell_call", "call_id": "c1", "status": "completed", "action": {"command": ["ls", "-q"]}},
            '"ls", "-q"',
            None,
        ),
        ({"type": "function_call", "call_id": "c1", "name": "shell", "arguments": {"x": "yes"}}, '"x": "yes"', None),
        ({"type": "function_call", "call_id": "c1", "name": "shell", "arguments": None}, "shell", None),
        ({"type": "apply_patch_call", "call_id": "c1", "operation": {"path": "a.txt"}}, "a.txt", None),
        ({"type": "computer_call", "call_id": "c1", "actions": [{"type": "click"}]}, '"type": "click"', None),
        ({"type": "function_call", "call_id": "c1", "name": "shell", "status": "of_2030"}, "shell", None),
        ({"type": "mcp_call", "id": "m", "name": "f_1", "arguments": "{}", "status": "calling"}, "f_1", None),
        ({"type": "reasoning", "summary": [{"type": "of_2030", "text": "so"}]}, "", None),
        ({"role": "assistant", "content": "a", "phase": "of_2030", "status": "of_2030"}, "a", None),
        (
            {"type": "mcp_call", "id": "m", "server_label": "s", "name": "n", "arguments": "{}", "output": "five"},
            "five",
            None,
        ),
        ({"type": "mcp_call", "id": "m", "name": "n", "arguments": "{}", "error": {"code": 7}}, '"code": 7', None),
        ({"type": "reasoning", "summary": [], "encrypted_content": "abc"}, "", None),
        ({"type": "reasoning", "content": [{"type": "text", "text": "so"}], "summary": []}, "", None),
        ({"type": "item_reference", "id": "rs_1"}, "", "input[].item_reference"),
        ({"id": "rs_1"}, "", "input[].item_reference"),
        ({"type": "web_search_call", "id": "w", "status": "completed"}, "", "input[].web_search_call"),
        ({"type": "mcp_list_tools", "server_label": "s", "tools": []}, "", "input[].mcp_list_tools"),
        ({"type": "mcp_approval_request", "id": "m", "name": "n"}, "", "input[].mcp_approval_request"),
        ({"type": "compaction", "encrypted_content": "x"}, "", "input[].compaction"),
        ({"type": "an_item_of_2030"} | {f"field{i}": i for i in range(100)}, "", "input[].an_item_of_2030"),
        (
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}, {"type": "of_2030", "x": 1}]},
            "No.",
            "input[].content[].of_2030",
        ),
        ({"type": "an item"}, "", "input[].an_item"),
        ({"type": "function_call", "call_id": None, "name": "shell", "arguments": {"x": 1}}, '"x": 1', None),
        ({"role": "tool", "tool_call_id": "c1", "content": "five"}, "five", None),
        (
            {"role": "assistant", "content": [{"text": "a"}, {"type": "output_image", "image_url": "x"}]},
            "a[image left out: this model reads text only]",
            "input[].content[].output_image",
        ),
    ],
    ids=lambda value: str(value.get("type")) if isinstance(value, dict) else None,
)
def test_items_of_histories(item: dict[str, Any], shown: str, ignored: str | None) -> None:
    """Regression: each of them ended the conversation."""
    given = [USER, item]
    if "call_id" in item:
        given.append({"type": f"{item['type']}_output", "call_id": "c1", "output": "ok"})
    answer = ask(engines := Long("x"), tools=[FUNCTION], input=[*given, USER])
    assert answer.status_code == 200, answer.text
    assert answer.headers.get("x-folio-ignored-fields") == ignored
    assert shown in prompt_of(engines)


def test_tools_in_the_form_of_chat_completions() -> None:
    function = {"name": "shell", "parameters": {"type": "object", "properties": {}}}
    tool, hosted = {"type": "function", "function": function}, {**NAMESPACE, "tools": [{"type": "mcp"}]}
    choice = {"type": "function", "function": {"name": "shell"}}
    answer = ask(engines := Long("x"), tools=[tool, hosted], tool_choice=choice)
    assert answer.status_code == 200, answer.text
    assert engines.calls[0].params.structure is not None
    only = ask(Long("x"), tools=[hosted], tool_choice="required")
    assert only.headers["x-folio-ignored-fields"] == "tools[].mcp, tool_choice", only.text


def test_outputs_of_tools_may_have_parts() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "shell", "arguments": "{}"}
    parts = [{"type": "input_text", "text": "one "}, {"type": "input_image", "image_url": "data:x"}]
    for kind, output, shown in (
        ("function_call_output", parts, "one [image left out: this model reads text only]"),
        ("shell_call_output", [{"stdout": "two", "outcome": {"type": "exit", "exit_code": 3}}], '"exit_code": 3'),
        ("computer_call_output", {"type": "computer_screenshot", "image_url": "data:x"}, "[image left out"),
        ("function_call_output", [], ""),
        ("function_call_output", ["a", 1], '["a", 1]'),
        ("function_call_output", True, "true"),
    ):
        result = {"type": kind, "call_id": "c", "output": output}
        answer = ask(engines := Long("x"), tools=[FUNCTION], input=[USER, call, result])
        assert answer.status_code == 200, answer.text
        assert shown in prompt_of(engines)


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
    named = answer.headers.get("x-folio-ignored-fields", "")
    assert len(named.split(", ") if named else []) == ignored


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": [USER] * MAX_MESSAGES}, "input"),
        (
            {"input": [{"type": "mcp_call", "id": f"{i}", "name": "n", "arguments": "{}"} for i in range(2100)]},
            "input",
        ),
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


def test_calls_beyond_the_most_are_left_out() -> None:
    text = "\n".join([call_of("shell"), call_of("apply_patch", input="x"), call_of("shell")])
    for most, kinds in ((1, 1), (2, 2), (3, 3), (None, 3)):
        output = ask(Long(text), tools=[FUNCTION, PATCH], max_tool_calls=most).json()["output"]
        assert len(output) == kinds
    assert ask(Long(text), max_tool_calls=0).status_code == 400


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
    assert (answer.status_code, answer.headers["x-folio-ignored-fields"]) == (200, "tools[].format")
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
    begun = time.process_time()
    assert pattern_of("lark", definition) is None
    assert time.process_time() - begun < 2


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
