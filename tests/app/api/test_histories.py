"""Conversations as other servers and clients have left them go on: what is shown to the model, and what is named."""

from __future__ import annotations

import re
import shutil
from functools import partial
from typing import Any

import pytest
from starlette.testclient import TestClient

from folio.app.models.builtin import BUILTIN_FOLDER
from tests.app.api.asking import (
    CHAT,
    FUNCTION,
    IGNORED,
    LEFT_OUT,
    MESSAGES,
    PARAMETERS,
    PATCH,
    RESPONSES,
    Long,
    X,
    prompt_of,
    transport_of,
)
from tests.app.models.chat_template.templates import DEEPSEEK
from tests.local_server import a_model, guarded_api, ingress_of

Asked = tuple[TestClient, Long]


@pytest.fixture(scope="module")
def asked_by(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Asked]:
    """A client of each API and its replicas; chats have a template that puts texts together and calls beside them."""
    folder = tmp_path_factory.mktemp("model") / "model"
    shutil.copytree(BUILTIN_FOLDER, folder)
    (folder / "chat_template.jinja").write_text(DEEPSEEK)
    chats, others = Long("x"), Long("x")
    strict = TestClient(guarded_api(ingress_of(chats, a_model("m", model=str(folder)))), base_url="http://folio")
    usual = transport_of(others), others
    return {CHAT: (strict, chats), RESPONSES: usual, MESSAGES: usual}


def text(shown: Any, kind: str = "text") -> dict[str, Any]:
    return {"type": kind, "text": shown}


def said(content: Any = None, role: str = "assistant", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content} | more


def called(**changes: Any) -> dict[str, Any]:
    """An assistant's message with a call."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}} | changes
    return {"role": "assistant", "tool_calls": [call]}


def result(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "c", "content": content} | more


FUNCTION_CALL = {"type": "function_call", "call_id": "c1", "name": "shell", "arguments": "{}"}
MCP_CALL = {"type": "mcp_call", "id": "m", "name": "n", "arguments": "{}"}


def item(kind: str | None = None, **fields: Any) -> list[dict[str, Any]]:
    """An item, and the output of a call."""
    one = fields if kind is None else {"type": kind} | fields
    output = {"type": f"{one.get('type')}_output", "call_id": "c1", "output": "ok"}
    return [one, output] if "call_id" in one else [one]


function_call = partial(item, **FUNCTION_CALL)  # type: ignore[arg-type]
mcp_call = partial(item, **MCP_CALL)  # type: ignore[arg-type]


def output(given: Any, kind: str = "function_call_output") -> list[dict[str, Any]]:
    """A call and its output."""
    return [FUNCTION_CALL, {"type": kind, "call_id": "c1", "output": given}]


SENT_IMAGE = {"type": "input_image", "image_url": "data:x"}
SHELL_OUTPUT = {"stdout": "two", "outcome": {"type": "exit", "exit_code": 3}}
SHOT = {"type": "computer_screenshot", "image_url": "data:x"}
TOOL_USE = {"type": "tool_use", "id": "c", "name": "f", "input": {"x": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": "x"}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aaaa"}}
IMAGE_URL = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aaaa"}}


def block(role: str, kind: str | dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    """A block behind a call."""
    one = {"type": kind} if isinstance(kind, str) else kind
    return [said([TOOL_USE]), said([one | fields], role)]


reference = {"type": "tool_reference", "tool_name": "g"}
PLAIN_DOCUMENT = {"type": "text", "media_type": "text/plain", "data": "read"}
PART, ITEM, OUTPUT = "messages[].content[]", "input[]", "input[].output[]"


@pytest.mark.parametrize(
    ("path", "history", "shown", "ignored"),
    [
        (CHAT, [called(), result(None)], "<output></output>", None),
        (CHAT, [called(), {"role": "tool", "tool_call_id": "c"}], "<output></output>", None),
        (CHAT, [called(), {"role": "tool", "content": "five"}], "<output>five</output>", None),
        (CHAT, [result("five", tool_call_id="gone", name="f")], "<output>five</output>", None),
        (CHAT, [called(), *[result("five")] * 2], "five</output><output>five", None),
        (CHAT, [called(), result([text("see"), IMAGE_URL])], f"see{LEFT_OUT}</output>", f"{PART}.image_url"),
        (CHAT, [called(id=None), result({"x": 5}, tool_call_id=None)], '<output>{"x": 5}</output>', None),
        (CHAT, [called(), {"role": "tool", "content": ["a", 1]}], '<output>["a", 1]</output>', None),
        (CHAT, [said(tool_calls=[{"id": "c", "name": "f", "arguments": {"x": 1}}])], '<call>f<sep>{"x": 1}', None),
        (CHAT, [said(role="user")], "<User>", None),
        (
            CHAT,
            [said(function_call={"name": "f", "arguments": "{}"}), said("five", "function", name="f")],
            "<output>five</output>",
            None,
        ),
        (CHAT, [called(type="custom", custom={"name": "p", "input": "x"})], '<call>p<sep>{"input": "x"}', None),
        (CHAT, [said([text("a", "input_text"), {"text": "b"}], "user")], "<User>ab", None),
        (CHAT, [said([text("a", "txt"), {"type": "of 2030", "x": "b"}], "user")], "<User>a", f"{PART}.of_2030"),
        (CHAT, [said(None)], "<Assistant><eos>", None),
        (CHAT, [said("")], "<Assistant><eos>", None),
        (CHAT, [{"role": "assistant"}], "<Assistant><eos>", None),
        (CHAT, [said([text("a", "output_text")])], "<Assistant>a<eos>", None),
        (CHAT, [said(refusal="No.")], "<Assistant>No.<eos>", None),
        (CHAT, [said([{"type": "refusal", "refusal": "No."}])], "<Assistant>No.<eos>", None),
        (CHAT, [said([text("a"), {"type": "thinking", "thinking": "b"}])], "<Assistant>a<eos>", f"{PART}.thinking"),
        (CHAT, [said("a", annotations=[{"type": "url_citation"}])], "<Assistant>a<eos>", None),
        (CHAT, [said("a", tool_call_id="")], "<Assistant>a<eos>", None),
        (CHAT, [said(audio={"id": "audio_1"})], "<Assistant><eos>", "messages[].audio"),
        (CHAT, [said([text(None)])], "<Assistant><eos>", None),
        (CHAT, [called(), result([text({"x": 5})])], '<output>{"x": 5}</output>', None),
        (CHAT, [called(type=None)], "<call>f<sep>", None),
        (CHAT, [called(type="builtin_function")], "<call>f<sep>", None),
        (CHAT, [said(tool_calls=[{"id": "c", "function": {"name": "f"}}])], "<call>f<sep>{}", None),
        (CHAT, [called(function={"name": "f", "arguments": {"x": 1}})], '<call>f<sep>{"x": 1}', None),
        (RESPONSES, item("custom_tool_call", call_id="c1", name="apply_patch", input="*** A"), '"*** A"', None),
        (RESPONSES, function_call(namespace="a"), "a__sh", None),
        (
            RESPONSES,
            item("local_shell_call", call_id="c1", status="completed", action={"command": ["ls", "-q"]}),
            '"ls", "-q"',
            None,
        ),
        (RESPONSES, function_call(arguments={"x": "yes"}), '"x": "yes"', None),
        (RESPONSES, function_call(arguments=None), "shell", None),
        (RESPONSES, item("apply_patch_call", call_id="c1", operation={"path": "a.txt"}), "a.txt", None),
        (RESPONSES, item("computer_call", call_id="c1", actions=[{"type": "click"}]), '"type": "click"', None),
        (RESPONSES, function_call(status="of_2030"), "shell", None),
        (RESPONSES, function_call(call_id=None, arguments={"x": 1}), '"x": 1', None),
        (RESPONSES, mcp_call(name="f_1", status="calling"), "f_1", None),
        (RESPONSES, mcp_call(server_label="s", output="five"), "five", None),
        (RESPONSES, mcp_call(error={"code": 7}), '"code": 7', None),
        (RESPONSES, item("reasoning", summary=[text("so", "of_2030")]), "", None),
        (RESPONSES, item("reasoning", summary=[], encrypted_content="abc"), "", None),
        (RESPONSES, item("reasoning", summary=[], content=[text("so")]), "", None),
        (RESPONSES, [said("a", phase="of_2030", status="of_2030")], "a", None),
        (RESPONSES, item("item_reference", id="rs_1"), "", f"{ITEM}.item_reference"),
        (RESPONSES, item(id="rs_1"), "", f"{ITEM}.item_reference"),
        (RESPONSES, item("web_search_call", id="w", status="completed"), "", f"{ITEM}.web_search_call"),
        (RESPONSES, item("mcp_list_tools", server_label="s", tools=[]), "", f"{ITEM}.mcp_list_tools"),
        (RESPONSES, item("mcp_approval_request", id="m", name="n"), "", f"{ITEM}.mcp_approval_request"),
        (RESPONSES, item("compaction", encrypted_content="x"), "", f"{ITEM}.compaction"),
        (RESPONSES, item("of_2030", **{f"field{i}": i for i in range(100)}), "", f"{ITEM}.of_2030"),
        (RESPONSES, item("an item"), "", f"{ITEM}.an_item"),
        (
            RESPONSES,
            [said([{"type": "refusal", "refusal": "No."}, {"type": "of_2030", "x": 1}])],
            "No.",
            f"{ITEM}.content[].of_2030",
        ),
        (RESPONSES, [result("five", tool_call_id="c1")], "five", None),
        (
            RESPONSES,
            [said([{"text": "a"}, {"type": "output_image", "image_url": "x"}])],
            f"a{LEFT_OUT}",
            f"{ITEM}.content[].output_image",
        ),
        (RESPONSES, output([text("one ", "input_text"), SENT_IMAGE]), f"one {LEFT_OUT}", f"{OUTPUT}.input_image"),
        (RESPONSES, output([SHELL_OUTPUT], "shell_call_output"), '"exit_code": 3', None),
        (RESPONSES, output(SHOT, "computer_call_output"), "[image left out", f"{OUTPUT}.computer_screenshot"),
        (RESPONSES, output([]), "", None),
        (RESPONSES, output(["a", 1]), '["a", 1]', None),
        (RESPONSES, output(True), "true", None),
        (MESSAGES, block("user", RESULT), "<tool_response>\nx\n", None),
        (MESSAGES, block("user", RESULT, content=None), "<tool_response>\n\n", None),
        (MESSAGES, block("user", RESULT, content="none", is_error=True), "<tool_response>\nError: none\n", None),
        (MESSAGES, block("user", RESULT, content=[IMAGE]), LEFT_OUT, f"{PART}.content[].image"),
        (
            MESSAGES,
            block("user", RESULT, content=[text("see"), IMAGE, {"type": "x\n", "y": 1}]),
            f"<tool_response>\nsee\n{LEFT_OUT}\n</tool_response>",
            f"{PART}.content[].image, {PART}.content[].x_",
        ),
        (MESSAGES, block("user", RESULT, content=[reference]), "[tool g is available]", None),
        (MESSAGES, block("system", "tool_addition", tool=reference), "<|system|>[tool g is available]", None),
        (MESSAGES, block("system", "tool_removal", tool=reference), "g is no longer", None),
        (
            MESSAGES,
            block("assistant", "server_tool_use", id="s", name="web_search", input={}),
            "",
            f"{PART}.server_tool_use",
        ),
        (
            MESSAGES,
            block("user", "search_result", source="s", title="t", content=[text("found")]),
            "<|user|>t\ns\nfound",
            None,
        ),
        (MESSAGES, block("user", "document", title="t", source=PLAIN_DOCUMENT), "<|user|>t\nread", None),
        (MESSAGES, block("user", "mcp_tool_result", tool_use_id="c", content=[]), "", f"{PART}.mcp_tool_result"),
        (MESSAGES, block("assistant", TOOL_USE, input="broken"), '{"input": "broken"}', None),
        (MESSAGES, block("assistant", TOOL_USE, input=None), '"arguments": {}', None),
        (MESSAGES, block("assistant", TOOL_USE, input={"x": "ü"}), '{"x": "ü"}', None),
    ],
)
def test_a_history(asked_by: dict[str, Asked], path: str, history: list[Any], shown: str, ignored: str | None) -> None:
    """Regression: each of them ended the conversation, since it is sent again with every request."""
    client, engines = asked_by[path]
    if path == RESPONSES:
        body: dict[str, Any] = {"input": [X, *history, X], "tools": [FUNCTION]}
    else:
        body = {"messages": [X, *history, X]}
    if path == MESSAGES:
        body |= {"max_tokens": 9, "thinking": {"type": "adaptive", "display": "updates"}}
    answer = client.post(path, json={"model": "m"} | body)
    assert answer.status_code == 200, answer.text
    assert shown in prompt_of(engines)
    assert answer.headers.get(IGNORED) == ignored
    if path == MESSAGES:  # without the call
        assert client.post(path, json={"model": "m"} | body | {"messages": [history[1], X]}).status_code == 200


CHAT_FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CUSTOM = {"type": "custom", "custom": {"name": "p"}}
NAMED = {"type": "function", "function": {"name": "f"}}
NAMESPACE = {"type": "namespace", "name": "mcp__idea__", "description": "An IDE.", "tools": [FUNCTION, PATCH]}
SPACES = [FUNCTION, PATCH, NAMESPACE]
TOOL: Any = {"name": "f", "input_schema": PARAMETERS}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
SEARCHES = "tools[].web_search_20250305"
CHOSEN = "tool_choice.tools[]"
PATCHES, MCP = {"type": "custom", "name": "apply_patch"}, {"type": "mcp", "server_label": "s"}


def allowed(*tools: Any) -> dict[str, Any]:
    return {"type": "allowed_tools", "mode": "required", "tools": list(tools)}


@pytest.mark.parametrize(
    ("path", "tools", "choice", "may_call", "ignored"),
    [
        (CHAT, [CUSTOM], "required", None, "tools[].custom, tool_choice"),
        (CHAT, [CHAT_FUNCTION, {"type": "web_search"}], "auto", None, "tools[].web_search"),
        (CHAT, [CHAT_FUNCTION, CUSTOM], CUSTOM, None, "tools[].custom, tool_choice.custom"),
        (CHAT, [{"type": "mcp", "name": ["a"]}, {"type": "mcp", "name": "f"}], NAMED, None, "tools[].mcp, tool_choice"),
        (
            CHAT,
            [CHAT_FUNCTION, CUSTOM],
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [CUSTOM]}},
            None,
            "tools[].custom, tool_choice.tools[].custom",
        ),
        (RESPONSES, SPACES, {"type": "function", "name": "shell"}, ["shell"], None),
        (RESPONSES, SPACES, PATCHES, ["apply_patch"], None),
        (
            RESPONSES,
            SPACES,
            {"type": "function", "name": "shell", "namespace": "mcp__idea__"},
            ["mcp__idea__shell"],
            None,
        ),
        (RESPONSES, SPACES, allowed(PATCHES, {"type": "web_search"}), ["apply_patch"], f"{CHOSEN}.web_search"),
        (RESPONSES, SPACES, allowed(MCP), None, f"{CHOSEN}.mcp"),
        (RESPONSES, SPACES, {"type": "web_search_preview"}, None, "tool_choice.web_search_preview"),
        (RESPONSES, SPACES, MCP | {"name": "n"}, None, "tool_choice.mcp"),
        (RESPONSES, SPACES, "none", None, None),
        (RESPONSES, [CHAT_FUNCTION], NAMED, ["f"], None),  # in the form of chat completions
        (RESPONSES, [NAMESPACE | {"tools": [{"type": "mcp"}]}], "required", None, "tools[].mcp, tool_choice"),
        (MESSAGES, [SEARCH], {"type": "tool", "name": "web_search"}, None, f"{SEARCHES}, tool_choice"),
        (MESSAGES, [SEARCH], {"type": "any"}, None, f"{SEARCHES}, tool_choice"),
        (MESSAGES, [TOOL, SEARCH], {"type": "tool", "name": "web_search"}, None, f"{SEARCHES}, tool_choice"),
        (MESSAGES, [TOOL, SEARCH], {"type": "auto"}, None, SEARCHES),
        (MESSAGES, [TOOL | {"type": "function"}, SEARCH], {"type": "auto"}, None, SEARCHES),
        (MESSAGES, [TOOL], {"type": "any", "disable_parallel_tool_use": True}, ["f"], None),
        (MESSAGES, [TOOL], {"type": "tool", "name": "f"}, ["f"], None),
    ],
)
def test_a_choice_among_tools(
    asked_by: dict[str, Asked], path: str, tools: Any, choice: Any, may_call: list[str] | None, ignored: str | None
) -> None:
    """Tools that run on other servers are dropped and named: they were 400, and the end of an agent's turn."""
    client, engines = asked_by[path]
    body = {"input": [X]} if path == RESPONSES else {"messages": [X], "max_tokens": 9}
    answer = client.post(path, json={"model": "m", "tools": tools, "tool_choice": choice} | body)
    assert answer.status_code == 200, answer.text
    assert answer.headers.get(IGNORED) == ignored
    assert "web_search" not in prompt_of(engines)
    structure = engines.calls[-1].params.structure
    # Without a forced call the structure is that of free text, in which the strict ones follow their grammar.
    called = None if structure is None else re.findall(r'function_\d+: "\\"(\w+)\\"', structure.spec) or None
    assert called == may_call
    assert structure is None or may_call or path == RESPONSES
