"""Conversations of other servers' clients, over HTTP: what templates refuse, histories that are broken, errors."""

from __future__ import annotations

import asyncio
import shutil
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from folio.app.checks import check_config
from folio.app.config.checkpoint import checkpoint_faults
from folio.app.errors import ConfigError
from folio.app.models.builtin import BUILTIN_FOLDER
from tests.app.api.asking import CHAT, MESSAGES, RESPONSES, Long, prompt_of
from tests.app.models.chat_template.templates import QWEN, TEMPLATES
from tests.fakes.replicas import TOKENIZER, Engines
from tests.local_server import a_model, guarded_api, ingress_of


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content} | more


LATE = [said("user", "Hi"), said("assistant", "Hello."), said("system", "B")]
ORDERS: dict[str, list[dict[str, Any]]] = {
    "late system": [said("system", "Be terse."), *LATE, said("user", "Sky?")],
    "two systems first": [said("system", "Be terse."), said("developer", "In English."), said("user", "Hi")],
    "two users": [said("user", "Hi"), said("user", "Are you there?")],
    "assistant first": [said("assistant", "How can I help?"), said("user", "Hi")],
    "ends with assistant": LATE[:2],
    "ends with system": LATE,
    "only system": [said("system", "Say hi.")],
}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


def folder_with(template: str, folder: Path) -> Path:
    """A copy of the built-in model with another template."""
    shutil.copytree(BUILTIN_FOLDER, folder / "model")
    (folder / "model" / "chat_template.jinja").write_text(template)
    return folder / "model"


def client_with(template: str, folder: Path, engines: Engines) -> TestClient:
    model = a_model("m", model=str(folder_with(template, folder)))
    return TestClient(guarded_api(ingress_of(engines, model)), base_url="http://folio")


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != "parts"])
def test_any_order_of_messages_on_three_apis(name: str, tmp_path: Path) -> None:
    """Strict templates refused two system messages, a late one, neighbours of a role: 400 for Codex's first request."""
    client = client_with(TEMPLATES[name], tmp_path, engines := Long("x"))
    for order, messages in ORDERS.items():
        items = [{"type": "message", **message} for message in messages]
        plain = [message for message in messages if message["role"] != "developer"]
        bodies: dict[str, Any] = {
            CHAT: {"messages": messages},
            RESPONSES: {"instructions": "You are Codex.", "input": items},
            MESSAGES: {"system": "You are Claude Code.", "messages": plain, "max_tokens": 4},
        }
        for path, body in bodies.items():
            answer = client.post(path, json={"model": "m", **body})
            assert answer.status_code == 200, f"{order} {path}: {answer.text}"
            shown = prompt_of(engines)
            for message in plain if path == MESSAGES else messages:
                assert message["content"] in shown, f"{order} {path}: {shown}"


ARGUMENTS = {
    '{"city": "Paris"}': '"city": "Paris"',
    "": "{}",
    "{}": "{}",
    "null": "{}",
    '"{}"': "{}",
    '{"value": ': '{"value":',
    '"Beijing"': "Beijing",
    '["a"]': '["a"]',
    '{"a": NaN}': '{"a": NaN}',
    "{'city': 'Paris'}": "{'city': 'Paris'}",
    '{"a": "\\ud800"}': "ud800",
    '{"a":' * 150 + "1" + "}" * 150: '{"a":{"a":',
}


@pytest.mark.parametrize("name", ["qwen", "deepseek", "chatml"])
def test_arguments_that_are_no_object(name: str, tmp_path: Path) -> None:
    """A call that a model has written badly is in the history for good: each later request was answered 400."""
    client = client_with(TEMPLATES[name], tmp_path, engines := Long("x"))
    for arguments, shown in ARGUMENTS.items():
        function = {"name": "f", "arguments": arguments}
        called = said("assistant", None, tool_calls=[{"id": "c", "type": "function", "function": function}])
        messages = [said("user", "look"), called, said("tool", "bad", tool_call_id="c"), said("user", "Continue.")]
        answer = client.post(CHAT, json={"model": "m", "messages": messages, "tools": TOOLS})
        assert answer.status_code == 200, f"{arguments}: {answer.text}"
        items = [
            messages[0],
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments},
            {"type": "function_call_output", "call_id": "c", "output": "bad"},
        ]
        assert client.post(RESPONSES, json={"model": "m", "input": items}).status_code == 200
        if name == "deepseek":  # shows the text as it is
            assert shown in prompt_of(engines)


NO_SYSTEM = "{% for m in messages %}{% if m.content == 'no' %}{{ raise_exception('I refuse that.') }}{% endif %}"
FAILS = "{% for m in messages %}\n{% if m.content == 'no' %}{{ m.content + 1 }}{% endif %}"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (NO_SYSTEM, "refuses the conversation at message 3 of 4 (role 'user'): I refuse that."),
        (
            FAILS,
            "fails at message 3 of 4 (role 'user'): TypeError: can only concatenate str (not \"int\") to str (line 2 ",
        ),
    ],
)
def test_an_error_names_the_message_and_the_templates_words(template: str, message: str, tmp_path: Path) -> None:
    """It said "refuses these input: I refuse that." """
    client = client_with(template + "{{ m.role }}{{ m.content }}{% endfor %}", tmp_path, Long("x"))
    messages = [said("user", "a"), said("assistant", "b"), said("user", "no"), said("assistant", "c")]
    bodies: dict[str, Any] = {
        CHAT: {"messages": messages},
        RESPONSES: {"input": messages},
        MESSAGES: {"messages": [*messages, said("user", "d")], "max_tokens": 4},
    }
    for path, body in bodies.items():
        answer = client.post(path, json={"model": "m", **body})
        assert answer.status_code == 400
        told = answer.json()["error"]["message"]
        assert told.startswith("the model's chat template ")
        assert message.replace("of 4", "of 5" if path == MESSAGES else "of 4") in told


BROKEN = {
    "type error": ("{% for m in messages %}\n{{ m.content + 1 }}{% endfor %}", "TypeError", 2),
    "division": ("{% for m in messages %}{{ 1 / 0 }}{% endfor %}", "ZeroDivisionError", 1),
    "undefined attribute": ("\n\n{{ messages[0].foo.bar }}", "has no attribute 'foo'", 3),
    "index": ("{{ messages[5].content }}", "list object has no element 5", 1),
    "syntax": ("{% for m in messages %}\n{{ m.content }", "unexpected '}'", 2),
    "unknown filter": ("{% for m in messages %}{{ m.content|tojsonx }}{% endfor %}", "No filter named 'tojsonx'", 1),
    "huge loop": ("{% for i in range(3000000) %}x{% endfor %}", "Range too big", 1),
    "endless": ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "takes more than", 1),
    "empty": ("", "does not show the user's message", None),
    "ignores messages": ("Hello", "does not show the user's message", None),
    "include": ("{% include 'x' %}", "no loader for this environment", 1),
    "index of a split": ("{{ messages[0].content.split('<think>')[1].x }}", "has no element 1", 1),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_templates_are_told_at_load_and_by_check(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`folio check` accepted them, and requests were answered 500."""
    template, words, line = BROKEN[name]
    place = "" if line is None else f"line {line} of the template"
    client = client_with(template, tmp_path, Long("x"))
    assert words in caplog.text
    [fault] = checkpoint_faults(tmp_path / "model")
    assert fault.startswith(f"{tmp_path / 'model' / 'chat_template.jinja'}: the chat template cannot be used: ")
    assert words in fault
    assert place in fault
    application = {"import_path": "folio.app.main:build", "args": {"engine": {"model": str(tmp_path / "model")}}}
    with pytest.raises(ConfigError, match="the chat template cannot be used"):
        check_config({"applications": [application]})
    body = {"model": "m", "messages": [said("user", "Hi")]}
    answer = client.post(CHAT, json=body)
    if name == "ignores messages":
        assert answer.status_code == 200
    else:
        assert answer.status_code == 400, answer.text
        assert "the model's chat template" in answer.json()["error"]["message"]
    assert client.post("/v1/completions", json={"model": "m", "prompt": "Hi"}).status_code == 200


def test_templates_that_refuse_the_simplest_conversation_are_no_fault(tmp_path: Path) -> None:
    """Some want variables of the request."""
    folder = folder_with("{{ raise_exception('no language') if not language }}{{ messages[0].content }}", tmp_path)
    assert list(checkpoint_faults(folder)) == []


async def test_a_slow_template_does_not_block_the_event_loop(tmp_path: Path) -> None:
    """A rendering begins in the loop if the body is small; one that takes long begins again in a thread."""
    slow = "{% if messages[0].content == 'slow' %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}"
    slow += "{% endfor %}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
    model = a_model("m", model=str(folder_with(slow, tmp_path)))
    transport = httpx.ASGITransport(guarded_api(ingress_of(Long("x"), model)))
    longest, done = 0.0, False

    async def watch() -> None:
        nonlocal longest
        while not done:
            begun = time.thread_time()
            await asyncio.sleep(0.005)
            longest = max(longest, time.thread_time() - begun)

    watching = asyncio.create_task(watch())
    async with httpx.AsyncClient(transport=transport, base_url="http://folio", timeout=120) as client:
        body = {"model": "m", "messages": [said("user", "slow")]}
        answer = await client.post(CHAT, json=body)
    done = True
    await watching
    assert answer.status_code == 400
    assert "(line 1 of the template)" in answer.json()["error"]["message"]
    assert longest < 1.0  # of the loop's own processor time: 0.1 s of rendering, and the request


def test_pinned_messages_are_arranged_too(tmp_path: Path) -> None:
    client = client_with(QWEN, tmp_path, Long("x"))
    messages = [said("system", "One."), said("system", "Two."), said("user", "x")]
    answer = client.post("/tokenize", json={"messages": messages})
    assert "system\nOne.\nTwo.<" in TOKENIZER.decode(answer.json()["tokens"])
