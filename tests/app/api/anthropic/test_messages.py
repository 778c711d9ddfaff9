"""`/v1/messages` through Anthropic's client, over an ingress with fake replicas."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import anthropic
import pytest
from anthropic.types import Message
from pydantic import BaseModel

from folio.app.api.anthropic.body import MessagesRequest
from folio.app.api.input.conversations import template_messages
from folio.app.config.http import HttpSettings, KeySource
from folio.app.models.chat_template.arrangement import Arrangement
from tests.app.api.asking import IGNORED, MESSAGES, PARAMETERS, Long, anthropic_of, post, prompt_of, transport_of
from tests.app.api.asking import X as USER
from tests.fakes.replicas import CALL, Engines, Pieces, ingress_with

TOOL: Any = {"name": "f", "input_schema": PARAMETERS}
ALTERNATING = Arrangement(joins_system=True, reminds=True, joins_users=True, joins_answers=True)


def create_of(engines: Engines, **settings: Any) -> Any:
    """`messages.create` with defaults."""
    create = anthropic_of(engines, **settings).messages.create
    return lambda **fields: create(**({"model": "m", "max_tokens": 9, "messages": [USER]} | fields))


def chat_of(**fields: Any) -> Any:
    """The chat that a body becomes."""
    return MessagesRequest.model_validate({"model": "m", "max_tokens": 9, "messages": [USER]} | fields).as_chat()


def text(shown: str) -> dict[str, str]:
    return {"type": "text", "text": shown}


def said(content: Any, role: str = "assistant") -> dict[str, Any]:
    return {"role": role, "content": content}


def test_a_message_as_the_client_reads_it() -> None:
    client = anthropic_of(engines := Engines(text="Hello"))
    answer = client.messages.with_raw_response.create(
        model="m",
        max_tokens=9,
        system="Be brief.",
        messages=[{"role": "user", "content": "Who?"}],
        extra_body={"temperature": 0.5, "top_p": 0.5, "top_k": 7},  # newer clients have no arguments for them
        metadata={"user_id": "u"},
        stop_sequences=["</a>", "b"],
        service_tier="auto",
    )
    message = answer.parse()
    assert [block.text for block in message.content if block.type == "text"] == ["Hello"]
    assert (message.type, message.role, message.model) == ("message", "assistant", "m")
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    [call] = engines.calls
    usage = message.usage
    assert usage.cache_read_input_tokens == 1
    assert usage.input_tokens == len(call.prompt_token_ids) - 1
    assert (usage.output_tokens, usage.cache_creation_input_tokens) == (1, 0)
    params = call.params
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (9, 0.5, 0.5, 7)
    assert (params.stop, call.user) == (("</a>", "b"), "u")
    assert prompt_of(engines) == "<|system|>Be brief.<|end|><|user|>Who?<|end|><|assistant|>"
    assert message.id == f"{call.request_id}.r7"  # can be forked
    Message.model_validate_json(answer.text())  # the client itself does not validate types
    assert answer.headers["request-id"]


def test_output_that_fills_the_context() -> None:
    """Claude Code asks for more tokens than the context has."""
    create = create_of(engines := Pieces("Hel", "lo", finish_reason="length"))
    assert create(max_tokens=397).stop_reason == "model_context_window_exceeded"
    assert engines.calls[0].params.max_tokens is None


def test_results_are_next_to_their_calls() -> None:
    """The content of an answer is part of the next request, unchanged."""
    create = create_of(engines := Long("Well.", f"\n{CALL}"))
    content = create(tools=[TOOL]).content
    result = {"type": "tool_result", "tool_use_id": content[1].id, "content": [text("five")]}
    for after in ([said([text("Go on."), result], "user")], [said("Go on.", "system"), said([result], "user")]):
        create(messages=[USER, said(content), *after], tools=[TOOL], tool_choice={"type": "none"})
        prompt = prompt_of(engines)
        assert "<|assistant|>Well.\n<tool_call>" in prompt
        assert "<tool_response>\nfive\n" in prompt
        assert prompt.index("five") < prompt.index("Go on.")


@pytest.mark.parametrize("texts", [("Hel", "lo"), ("<think>", "so", "</think>", "Well.", f"\n{CALL}")])
def test_the_client_adds_the_events_up(texts: tuple[str, ...]) -> None:
    engines = Long(*texts, encodes=True)
    whole = create_of(engines, reasoning_parser="qwen3")(tools=[TOOL])
    client = anthropic_of(engines, reasoning_parser="qwen3")
    with client.messages.stream(model="m", max_tokens=9, messages=[USER], tools=[TOOL]) as stream:
        final = stream.get_final_message()
    assert [b.model_dump(exclude={"id"}) for b in final.content] == [
        b.model_dump(exclude={"id"}) for b in whole.content
    ]
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


def test_one_call_only_unless_parallel_ones_are_allowed() -> None:
    create = create_of(engines := Long(CALL))
    for number in (True, False):
        create(tools=[TOOL], tool_choice={"type": "any", "disable_parallel_tool_use": number})
    one, several = (call.params.structure.spec for call in engines.calls)
    assert one != several


def test_thinking_goes_back() -> None:
    engines = Long("<think>", "so", "</think>", f"Well.{CALL}", "More.", encodes=True)
    create = create_of(engines, reasoning_parser="qwen3")
    content = create(tools=[TOOL], thinking={"type": "enabled", "budget_tokens": 1024}).content
    assert engines.calls[0].params.structure.budget.max_tokens == 1024
    result = {"type": "tool_result", "tool_use_id": content[2].id, "content": "five"}
    redacted = {"type": "redacted_thinking", "data": "abc"}
    create(messages=[USER, said([redacted, *content[:3]]), said([result], "user")], tools=[TOOL])
    [hidden, *_] = create(thinking={"type": "adaptive", "display": "omitted"}).content
    assert (hidden.type, hidden.thinking) == ("thinking", "")


@pytest.mark.parametrize(
    ("fields", "settings"),
    [
        ({}, {}),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, {"enable_thinking": True}),
        ({"thinking": {"type": "adaptive"}}, {"enable_thinking": True}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ({"output_config": {"effort": "max"}}, {"reasoning_effort": "xhigh"}),
    ],
)
def test_reasoning_reaches_the_chat_template(fields: dict[str, Any], settings: dict[str, Any]) -> None:
    thought = {"type": "thinking", "thinking": "so", "signature": "s"}
    given = said([thought, {"type": "redacted_thinking", "data": "x"}, text("Well.")])
    chat = chat_of(messages=[USER, given, USER], **fields)
    assert (chat.messages[1].reasoning_content, chat.messages[1].content) == ("so", "Well.")
    assert settings.items() <= chat.template_settings.items()
    assert bool(settings) == bool(chat.template_settings)


class Answer(BaseModel):
    x: int


def test_output_that_follows_a_schema() -> None:
    client = anthropic_of(engines := Long('{"x": 5}'))
    parsed = client.messages.parse(model="m", max_tokens=9, messages=[USER], output_format=Answer)
    assert parsed.parsed_output == Answer(x=5)
    structure = engines.calls[0].params.structure
    assert (structure.kind, json.loads(structure.spec)["required"]) == ("json", ["x"])


def test_turns_become_what_the_chat_template_accepts() -> None:
    """Messages stay as they are where it takes all; see `tests.app.models.chat_template` for those that do not."""
    create = create_of(engines := Long("x"))
    turns = ["Three.", "a", [text("b"), text("c")], "d", "e", "f", "g"]
    roles = ["system", "user", "user", "assistant", "assistant", "system", "user"]
    fields = {"system": [text("One."), text("Two.")], "messages": list(map(said, turns, roles))}
    create(**fields)
    assert prompt_of(engines) == (
        "<|system|>One.\nTwo.<|end|><|system|>Three.<|end|><|user|>a<|end|><|user|>b\nc<|end|><|assistant|>d<|end|>"
        "<|assistant|>e<|end|><|system|>f<|end|><|user|>g<|end|><|assistant|>"
    )
    arranged = ALTERNATING.arranged(template_messages(chat_of(**fields).messages))
    assert [(one["role"], one["content"]) for one in arranged] == [
        ("system", "One.\nTwo.\nThree."),
        ("user", "a\nb\nc"),
        ("assistant", "d\ne"),
        ("user", "<system-reminder>\nf\n</system-reminder>\ng"),
    ]


def test_many_texts_are_joined_in_linear_time() -> None:
    begun = time.thread_time()
    chat = chat_of(messages=[said([text("x" * 250)] * 1000, "user")] * 60)
    [message] = ALTERNATING.arranged(template_messages(chat.messages))
    assert time.thread_time() - begun < 30  # a tenth of a second; adding one by one copies 450 GB
    assert len(message["content"]) == 60_000 * 251 - 1


NONCES = [f"x-anthropic-billing-header: cc_version=2.1.{i}; cc_entrypoint=cli; cch=fa{i}90;" for i in range(2)]


@pytest.mark.parametrize("is_block", [True, False])
def test_claude_codes_nonce_is_no_part_of_the_prompt(is_block: bool) -> None:
    create = create_of(engines := Long("x"))
    client = anthropic_of(Long("x"))
    counts = set()
    for nonce in [[], *([nonce] for nonce in NONCES)]:
        texts = [*nonce, "You are Claude Code."]
        system: Any = list(map(text, texts)) if is_block else "\n\n".join(texts)
        create(system=system)
        counts.add(client.messages.count_tokens(model="m", system=system, messages=[USER]).input_tokens)
    first, *others = (call.prompt_token_ids for call in engines.calls)
    assert others == [first, first]
    assert counts == {len(first)}
    create(system=NONCES[0])
    assert prompt_of(engines) == "<|user|>x<|end|><|assistant|>"
    create(system="Explain x-anthropic-billing-header: a=b")  # elsewhere it is text
    assert "billing-header: a=b" in prompt_of(engines)


HINT = {"cache_control": {"type": "ephemeral"}}
HOUR = {"cache_control": {"type": "ephemeral", "ttl": "1h", "scope": "global"}}


@pytest.mark.parametrize(
    ("top", "system", "tool", "result", "said_last", "ttl_s"),
    [
        ({}, {}, {}, {}, {}, None),
        (HINT, {}, {}, {}, {}, 300),
        ({}, HINT, {}, {}, {}, 300),
        ({}, HINT, HOUR, {}, {}, 3600),
        ({}, {}, HINT, {}, {}, 300),
        ({}, {}, {}, HINT, {}, 300),
        ({}, {}, {}, {}, HOUR, 3600),
    ],
)
def test_cache_control_is_accepted_everywhere(
    top: Any, system: Any, tool: Any, result: Any, said_last: Any, ttl_s: float | None
) -> None:
    def body(top: Any, system: Any, tool: Any, result: Any, said_last: Any) -> dict[str, Any]:
        call = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
        answer = {"type": "tool_result", "tool_use_id": "c", "content": [text("x")]} | result
        messages = [USER, said([call]), said([answer, text("x") | said_last], "user")]
        return top | {"system": [text("x") | system], "tools": [TOOL | tool], "messages": messages}

    chat, plain = chat_of(**body(top, system, tool, result, said_last)), chat_of(**body({}, {}, {}, {}, {}))
    assert chat.wanted_ttl_s == ttl_s
    assert (chat.messages, chat.tools) == (plain.messages, plain.tools)


def test_tokens_are_counted_as_they_are_in_a_message() -> None:
    client = anthropic_of(engines := Long("x"))
    body: Any = {"model": "m", "messages": [USER], "system": "Be brief.", "tools": [TOOL]}
    count = client.messages.count_tokens(**body)
    assert engines.calls == []
    usage = client.messages.create(**body, max_tokens=9).usage
    assert count.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_names_of_other_models() -> None:
    aliases = {"claude-*": "m", "claude-haiku-4-5": "pirate"}
    client = anthropic_of(engines := Long("x"), aliases=aliases)
    for asked, answers, adapter in (
        ("claude-of-tomorrow", "m", None),
        ("claude-haiku-4-5", "pirate", "pirate"),
        ("pirate", "pirate", "pirate"),
    ):
        assert client.messages.create(model=asked, max_tokens=9, messages=[USER]).model == answers
        assert engines.calls[-1].adapter == adapter
        assert client.messages.count_tokens(model=asked, messages=[USER]).input_tokens > 0
    with pytest.raises(anthropic.NotFoundError, match="'gpt' does not exist"):
        client.messages.create(model="gpt", max_tokens=9, messages=[USER])


def test_an_api_key_in_anthropics_header(tmp_path: Any) -> None:
    key = "sk-" + "0" * 20
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"keys: [{{name: a, key: {key}, models: [m], limits: {{requests_per_minute: 3}}}}]")
    http = HttpSettings(api_keys=KeySource(file=keys))
    transport = transport_of(engines := Long("x"), http, aliases={"claude-*": "m", "other-*": "pirate"})

    def create(model: str, **named: str) -> Any:
        client: Any = anthropic.Anthropic(base_url="http://folio", max_retries=0, http_client=transport, **named)  # type: ignore[arg-type]
        return client.messages.create(model=model, max_tokens=9, messages=[USER])

    with pytest.raises(anthropic.AuthenticationError) as caught:
        create("m", api_key="sk-wrong-wrong-wrong")
    assert caught.value.type == "authentication_error"
    assert caught.value.request_id == caught.value.body["request_id"]  # type: ignore[index]
    create("claude-x", api_key=key)  # the alias's model is the one that counts
    create("m", auth_token=key)
    with pytest.raises(anthropic.PermissionDeniedError) as denied:
        create("other-x", api_key=key)
    assert denied.value.type == "permission_error"
    with pytest.raises(anthropic.RateLimitError) as limited:
        create("m", api_key=key)
    assert limited.value.type == "rate_limit_error"
    assert int(limited.value.response.headers["retry-after"]) >= 1
    assert len(engines.calls) == 2


INVALID = "invalid_request_error"


@pytest.mark.parametrize(
    ("method", "path", "content", "more", "status", "kind"),
    [
        ("POST", "", b"{", {}, 400, INVALID),
        ("POST", "", b"[]", {}, 400, INVALID),
        ("POST", "", b'{"model": "m", "max_tokens": 1, "messages": [], "system": "\\ud800"}', {}, 400, INVALID),
        ("POST", "", b"{}", {"content-type": "text/plain"}, 415, INVALID),
        ("POST", "", b" " * 2000, {}, 413, "request_too_large"),
        ("GET", "", b"", {}, 405, INVALID),
        ("GET", "/batches", b"", {}, 404, "not_found_error"),
        ("POST", "/count_tokens", b"{}", {}, 400, INVALID),
    ],
)
def test_every_error_has_anthropics_form(
    method: str, path: str, content: bytes, more: dict[str, str], status: int, kind: str
) -> None:
    transport = transport_of(Engines(), HttpSettings(max_body_bytes=1000))
    headers = {"content-type": "application/json"} | more
    answer = transport.request(method, MESSAGES + path, headers=headers, content=content)
    body = answer.json()
    assert (answer.status_code, body["type"], body["error"]["type"]) == (status, "error", kind)
    assert body["request_id"] == answer.headers["request-id"]
    assert set(body) == {"type", "error", "request_id"}
    other = transport.post("/v1/chat/completions", content=b"{", headers=headers)
    assert set(other.json()) == {"error"}  # OpenAI's routes keep their form
    assert "request-id" not in other.headers


def test_a_tool_in_openais_form_is_refused() -> None:
    """Regression: it answered 500."""
    tool = {"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}
    answer = post(Long("x"), MESSAGES, messages=[USER], tools=[tool])
    missing = "tools[0].name: is missing; tools[0].input_schema: is missing"
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, missing)


@pytest.mark.parametrize(
    ("last", "end"),
    [
        ([], "<|assistant|>"),
        (" \n", "<|assistant|>"),
        ([{"type": "tool_use", "id": "c", "name": "f", "input": {}}], "</tool_call><|end|><|assistant|>"),
        ("Well, ", "<|user|>x<|end|><|assistant|>Well, "),
    ],
)
def test_an_answer_without_text_is_not_continued(last: Any, end: str) -> None:
    """Clients end a conversation so after an empty answer, or one that was interrupted in its call: 400 for good."""
    fields = {"container": "c", "mcp_servers": [{"type": "url", "url": "http://x"}]}
    answer = post(engines := Long("x"), MESSAGES, messages=[USER, said(last)], **fields)
    assert answer.status_code == 200, answer.text
    assert answer.headers[IGNORED] == "container, mcp_servers"
    assert prompt_of(engines).replace("\n", "").endswith(end)


def test_fields_that_change_nothing_are_accepted() -> None:
    fields: dict[str, Any] = {
        "betas": ["claude-code-20250219", "interleaved-thinking-2025-05-14"],
        "service_tier": "standard_only",
        "metadata": {"user_id": None},
        "tool_choice": {"type": "auto"},
        "stop_sequences": [],
        "tools": [],
        "thinking": None,
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "mcp_servers": [],
        "speed": "standard",
    }
    client = anthropic_of(engines := Engines())
    client.beta.messages.create(model="m", max_tokens=9, messages=[USER], **fields)
    create_of(others := Engines())()
    [call], [other] = engines.calls, others.calls
    assert call.prompt_token_ids == other.prompt_token_ids
    assert replace(call.params, seed=None) == replace(other.params, seed=None)


async def test_methods_of_the_handle() -> None:
    request = MessagesRequest.model_validate({"model": "m", "max_tokens": 9, "messages": [USER]})
    whole = await ingress_with(Pieces("Hel", "lo")).messages(request)
    events = [event async for event in ingress_with(Pieces("Hel", "lo")).messages_stream(request)]
    assert whole.content[0].text == "Hello"
    assert events[2].content_block.text == ""  # events do not change after they are sent
    assert events[-1].type == "message_stop"


def test_a_thread_is_sent_again_whole() -> None:
    """Anthropic's tool runner sends results alone, as the continuation of a stored thread. The field was dropped, and
    the results were refused for want of their calls."""

    class CallsOnce(Long):
        """Replicas that call the function once, and answer then."""

        def _items(self, call: Any) -> list[Any]:
            self._texts = (CALL,) if len(self.calls) == 1 else ("It is.",)
            return super()._items(call)

    engines = CallsOnce()

    @anthropic.beta_tool
    def f(x: int) -> str:
        """A function."""
        return "found" * x

    tools: Any = [f]
    runner = anthropic_of(engines).beta.messages.tool_runner(model="m", max_tokens=9, messages=[USER], tools=tools)
    [block] = runner.until_done().content
    assert block.type == "text"
    assert block.text == "It is."
    assert "found" in prompt_of(engines)


def test_a_thread_that_is_continued_is_not_found() -> None:
    answer = post(Engines(), MESSAGES, thread={"type": "continue", "previous_message_id": "msg-1"})
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert (error["type"], error["details"]) == ("not_found_error", {"error_code": "thread_not_found"})
    assert "send the whole conversation" in error["message"]
