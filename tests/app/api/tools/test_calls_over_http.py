"""Calls over HTTP with a real engine, on the three APIs: strict functions, calls that are cut, schemas of agents."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from starlette.testclient import TestClient

from tests.app.api.asking import CHAT, IGNORED, MESSAGES, RESPONSES
from tests.local_server import LocalServer

LIGHT: dict[str, Any] = {
    "type": "object",
    "properties": {"state": {"enum": ["on", "off"]}, "level": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["state", "level"],
    "additionalProperties": False,
}
NOTE = {"type": "object", "properties": {"text": {"type": "string", "minLength": 200, "if": {}}}, "required": ["text"]}
BEGUN = 'Well. <tool_call>\n{"name": "set_light", "arguments": {'
USER = {"role": "user", "content": "Light on please"}
ASSISTANT = {"role": "assistant", "content": BEGUN}


@pytest.fixture
def client(server: LocalServer) -> TestClient:
    return TestClient(server.api, raise_server_exceptions=False)


def calls_of(client: TestClient, name: str, schema: dict[str, Any], choice: Any, tokens: int, **more: Any) -> list[Any]:
    """On each API: (content, arguments or input, the reason of the end, ignored fields)."""
    tool = {"name": name, "strict": True, "parameters": schema}
    begun = [ASSISTANT] if choice == "auto" else []
    common = {"tool_choice": choice, "tools": [{"type": "function"} | tool]} | more
    chat = {"messages": [USER, *begun], "max_tokens": tokens, "tools": [{"type": "function", "function": tool}]}
    response = {"input": [USER, *begun], "max_output_tokens": tokens}
    message = {
        "messages": [USER, *begun],
        "tools": [{"name": name, "strict": True, "input_schema": schema}],
        "tool_choice": {"type": "auto" if choice == "auto" else "any"},
        "max_tokens": tokens,
    } | {name: 1 for name, value in more.items() if name == "temperature" and value > 1}
    found = []
    for path, body in ((CHAT, chat), (RESPONSES, response), (MESSAGES, message)):
        continued = {"continue_final_message": True} if begun and path != MESSAGES else {}
        answer = client.post(path, json={"model": "builtin"} | common | body | continued)
        assert answer.status_code == 200, answer.text
        told = answer.json()
        if path == CHAT:
            [one] = told["choices"]
            content, end = one["message"]["content"], one["finish_reason"]
            arguments = one["message"]["tool_calls"][0]["function"]["arguments"]
        else:
            content, end = None, told["status" if path == RESPONSES else "stop_reason"]
            [item, *_] = [
                i for i in told.get("output") or told["content"] if i["type"] in ("function_call", "tool_use")
            ]
            arguments = item.get("arguments", item.get("input"))
        found.append((content, arguments, end, answer.headers.get(IGNORED)))
    return found


@pytest.mark.parametrize("seed", range(3))
def test_a_strict_function_that_the_model_calls_follows_its_schema(client: TestClient, seed: int) -> None:
    """`strict` had no effect with "auto", and a call that a message had begun was content."""
    ends = calls_of(client, "set_light", LIGHT, "auto", 60, seed=seed, temperature=1.5)
    assert "tool_call>" not in (ends[0][0] or "")
    for _, arguments, reason, ignored in ends:
        jsonschema.validate(json.loads(arguments) if isinstance(arguments, str) else arguments, LIGHT)
        assert reason in ("tool_calls", "completed", "tool_use", "length", "incomplete", "max_tokens")
        assert ignored is None


@pytest.mark.parametrize("tokens", [1, 12, 40])
def test_a_forced_call_that_max_tokens_cuts_off(client: TestClient, tokens: int) -> None:
    """Raw syntax was the content."""
    ends = calls_of(client, "note", NOTE, "required", tokens, temperature=0)
    assert [end[0] for end in ends] == [None] * 3
    assert [end[2] for end in ends] == ["length", "incomplete", "max_tokens"]
    assert {end[3] for end in ends} == {"tools[].function.parameters.if"}
    assert ends[0][1] == ends[1][1]
    assert isinstance(ends[2][1], dict)
    with pytest.raises(ValueError, match=r"Expecting|Unterminated"):
        json.loads(ends[0][1])


def test_structures_with_half_a_character(client: TestClient) -> None:
    """They are 400 or replaced, and never 500."""
    texts = ("[f(x='\\ud800')]", '{"const": "\\ud800"}', "\\ud800", "\ud800")
    for text in texts:
        for field in ("guided_json", "guided_regex", "guided_grammar", "guided_choice", "stop", "bad_words"):
            value = [text] if field in ("guided_choice", "stop", "bad_words") else text
            body = json.dumps({"model": "builtin", "messages": [USER], "max_tokens": 3, field: value})
            answer = client.post(CHAT, content=body, headers={"content-type": "application/json"})
            assert answer.status_code in (200, 400), (field, text, answer.text)
