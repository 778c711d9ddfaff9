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
from folio.app.engine.model.tokenizer import load_tokenizer
from folio.app.errors import ConfigError
from folio.app.models.builtin import BUILTIN_FOLDER
from tests.app.chat_template.templates import DEEPSEEK, QWEN, TEMPLATES
from tests.fakes.replicas import Engines, Pieces
from tests.local_server import a_model, guarded_api, ingress_of

LATE = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello."},
    {"role": "system", "content": "B"},
]
ORDERS: dict[str, list[dict[str, str]]] = {
    "late system": [{"role": "system", "content": "Be terse."}, *LATE, {"role": "user", "content": "Sky?"}],
    "two systems first": [
        {"role": "system", "content": "Be terse."},
        {"role": "developer", "content": "In English."},
        {"role": "user", "content": "Hi"},
    ],
    "two users": [{"role": "user", "content": "Hi"}, {"role": "user", "content": "Are you there?"}],
    "assistant first": [{"role": "assistant", "content": "How can I help?"}, {"role": "user", "content": "Hi"}],
    "ends with assistant": LATE[:2],
    "ends with system": LATE,
    "only system": [{"role": "system", "content": "Say hi."}],
}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


class Long(Pieces):
    """Replicas with a longer context."""

    async def _max_model_len(self) -> int:
        return 4096


def folder_with(template: str, folder: Path) -> Path:
    """A copy of the built-in model with another template."""
    shutil.copytree(BUILTIN_FOLDER, folder / "model")
    (folder / "model" / "chat_template.jinja").write_text(template)
    return folder / "model"


def client_with(template: str, folder: Path, engines: Engines) -> TestClient:
    model = a_model("m", model=str(folder_with(template, folder)))
    return TestClient(guarded_api(ingress_of(engines, model)), base_url="http://folio")


def prompt_of(engines: Engines) -> str:
    return str(TOKENIZER.decode(engines.calls[-1].prompt_token_ids))


TOKENIZER = load_tokenizer("builtin")


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != "parts"])
def test_any_order_of_messages_on_three_apis(name: str, tmp_path: Path) -> None:
    """Strict templates refused two system messages, a late one, neighbours of a role: 400 for Codex's first request."""
    client = client_with(TEMPLATES[name], tmp_path, engines := Long("x"))
    for order, messages in ORDERS.items():
        items = [{"type": "message", **message} for message in messages]
        plain = [message for message in messages if message["role"] != "developer"]
        bodies: dict[str, Any] = {
            "/v1/chat/completions": {"messages": messages},
            "/v1/responses": {"instructions": "You are Codex.", "input": items},
            "/v1/messages": {"system": "You are Claude Code.", "messages": plain, "max_tokens": 4},
        }
        for path, body in bodies.items():
            answer = client.post(path, json={"model": "m", **body})
            assert answer.status_code == 200, f"{order} {path}: {answer.text}"
            shown = prompt_of(engines)
            for message in plain if path == "/v1/messages" else messages:
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
        messages = [
            {"role": "user", "content": "look"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c", "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": "c", "content": "bad"},
            {"role": "user", "content": "Continue."},
        ]
        answer = client.post("/v1/chat/completions", json={"model": "m", "messages": messages, "tools": TOOLS})
        assert answer.status_code == 200, f"{arguments}: {answer.text}"
        items = [
            messages[0],
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments},
            {"type": "function_call_output", "call_id": "c", "output": "bad"},
        ]
        assert client.post("/v1/responses", json={"model": "m", "input": items}).status_code == 200
        if name == "deepseek":  # shows the text as it is
            assert shown in prompt_of(engines)


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLS = {"role": "assistant", "tool_calls": [CALL]}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aaaa"}}
LEFT_OUT = "[image left out: this model reads text only]"


@pytest.mark.parametrize(
    ("history", "shown", "ignored"),
    [
        ([CALLS, {"role": "tool", "tool_call_id": "c", "content": None}], "<output></output>", None),
        ([CALLS, {"role": "tool", "tool_call_id": "c"}], "<output></output>", None),
        ([CALLS, {"role": "tool", "content": "five"}], "<output>five</output>", None),
        ([{"role": "tool", "tool_call_id": "gone", "name": "f", "content": "five"}], "<output>five</output>", None),
        ([CALLS, *[{"role": "tool", "tool_call_id": "c", "content": "five"}] * 2], "five</output><output>five", None),
        (
            [CALLS, {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "see"}, IMAGE]}],
            f"<output>see{LEFT_OUT}</output>",
            "messages[].content[].image_url",
        ),
        (
            [
                CALLS | {"tool_calls": [CALL | {"id": None}]},
                {"role": "tool", "tool_call_id": None, "content": {"x": 5}},
            ],
            '<output>{"x": 5}</output>',
            None,
        ),
        ([CALLS, {"role": "tool", "content": ["a", 1]}], '<output>["a", 1]</output>', None),
        (
            [{"role": "assistant", "tool_calls": [{"id": "c", "name": "f", "arguments": {"x": 1}}]}],
            '<call>f<sep>{"x": 1}',
            None,
        ),
        ([{"role": "user", "content": None}], "<User>", None),
        (
            [
                {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
                {"role": "function", "name": "f", "content": "five"},
            ],
            "<output>five</output>",
            None,
        ),
        (
            [
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "c", "type": "custom", "custom": {"name": "p", "input": "x"}}],
                }
            ],
            '<call>p<sep>{"input": "x"}',
            None,
        ),
        ([{"role": "user", "content": [{"type": "input_text", "text": "a"}, {"text": "b"}]}], "<User>ab", None),
        (
            [{"role": "user", "content": [{"type": "txt", "text": "a"}, {"type": "of 2030", "x": "b"}]}],
            "<User>a",
            "messages[].content[].of_2030",
        ),
        ([{"role": "assistant", "content": None}], "<Assistant><eos>", None),
        ([{"role": "assistant", "content": ""}], "<Assistant><eos>", None),
        ([{"role": "assistant"}], "<Assistant><eos>", None),
        ([{"role": "assistant", "content": [{"type": "output_text", "text": "a"}]}], "<Assistant>a<eos>", None),
        ([{"role": "assistant", "refusal": "No."}], "<Assistant>No.<eos>", None),
        ([{"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}], "<Assistant>No.<eos>", None),
        (
            [{"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "thinking", "thinking": "b"}]}],
            "<Assistant>a<eos>",
            "messages[].content[].thinking",
        ),
        ([{"role": "assistant", "content": "a", "annotations": [{"type": "url_citation"}]}], "<Assistant>a<eos>", None),
        ([{"role": "assistant", "content": "a", "tool_call_id": ""}], "<Assistant>a<eos>", None),
        ([{"role": "assistant", "audio": {"id": "audio_1"}}], "<Assistant><eos>", "messages[].audio"),
        ([{"role": "assistant", "content": [{"type": "text", "text": None}]}], "<Assistant><eos>", None),
        ([CALLS, {"role": "tool", "content": [{"type": "text", "text": {"x": 5}}]}], '<output>{"x": 5}</output>', None),
        ([{"role": "assistant", "tool_calls": [CALL | {"type": None}]}], "<call>f<sep>", None),
        ([{"role": "assistant", "tool_calls": [CALL | {"type": "builtin_function"}]}], "<call>f<sep>", None),
        ([{"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f"}}]}], "<call>f<sep>{}", None),
        (
            [{"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": {"x": 1}}}]}],
            '<call>f<sep>{"x": 1}',
            None,
        ),
    ],
)
def test_histories_heal(history: Any, shown: str, ignored: str | None, tmp_path: Path) -> None:
    client = client_with(DEEPSEEK, tmp_path, engines := Long("x"))
    messages = [{"role": "user", "content": "a"}, *history, {"role": "user", "content": "b"}]
    answer = client.post("/v1/chat/completions", json={"model": "m", "messages": messages})
    assert answer.status_code == 200, answer.text
    assert shown in prompt_of(engines)
    assert answer.headers.get("x-folio-ignored-fields") == ignored
    image = [*messages, {"role": "user", "content": [IMAGE]}]
    assert client.post("/v1/chat/completions", json={"model": "m", "messages": image}).status_code == 400


CUSTOM = {"type": "custom", "custom": {"name": "p"}}


@pytest.mark.parametrize(
    ("tools", "choice", "ignored"),
    [
        ([CUSTOM], "required", "tools[].custom, tool_choice"),
        ([*TOOLS, {"type": "web_search"}], "auto", "tools[].web_search"),
        ([*TOOLS, CUSTOM], CUSTOM, "tools[].custom, tool_choice.custom"),
        (
            [{"type": "mcp", "name": ["a"]}, {"type": "mcp", "name": "f"}],
            {"type": "function", "function": {"name": "f"}},
            "tools[].mcp, tool_choice",
        ),
        (
            [*TOOLS, CUSTOM],
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [CUSTOM]}},
            "tools[].custom, tool_choice.tools[].custom",
        ),
    ],
)
def test_tools_that_are_no_functions_are_dropped(tools: Any, choice: Any, ignored: str, tmp_path: Path) -> None:
    client = client_with(DEEPSEEK, tmp_path, engines := Long("x"))
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}], "tools": tools, "tool_choice": choice}
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-folio-ignored-fields"] == ignored
    assert engines.calls[-1].params.structure is None


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
    texts = [("user", "a"), ("assistant", "b"), ("user", "no"), ("assistant", "c")]
    messages = [{"role": role, "content": text} for role, text in texts]
    bodies: dict[str, Any] = {
        "/v1/chat/completions": {"messages": messages},
        "/v1/responses": {"input": messages},
        "/v1/messages": {"messages": [*messages, {"role": "user", "content": "d"}], "max_tokens": 4},
    }
    for path, body in bodies.items():
        answer = client.post(path, json={"model": "m", **body})
        assert answer.status_code == 400
        said = answer.json()["error"]["message"]
        assert said.startswith("the model's chat template ")
        assert message.replace("of 4", "of 5" if path == "/v1/messages" else "of 4") in said


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
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
    answer = client.post("/v1/chat/completions", json=body)
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
        body = {"model": "m", "messages": [{"role": "user", "content": "slow"}]}
        answer = await client.post("/v1/chat/completions", json=body)
    done = True
    await watching
    assert answer.status_code == 400
    assert "(line 1 of the template)" in answer.json()["error"]["message"]
    assert longest < 1.0  # of the loop's own processor time: 0.1 s of rendering, and the request


def test_pinned_messages_are_arranged_too(tmp_path: Path) -> None:
    client = client_with(QWEN, tmp_path, Long("x"))
    system = [{"role": "system", "content": "One."}, {"role": "system", "content": "Two."}]
    answer = client.post("/tokenize", json={"messages": [*system, {"role": "user", "content": "x"}]})
    assert "system\nOne.\nTwo.<" in TOKENIZER.decode(answer.json()["tokens"])
