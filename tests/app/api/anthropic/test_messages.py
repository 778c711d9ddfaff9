"""`/v1/messages` through Anthropic's client, over an ingress with fake replicas."""

from __future__ import annotations

import json
import time
from typing import Any

import anthropic
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import BaseModel, TypeAdapter
from starlette.testclient import TestClient

from folio.app.api.anthropic.body import MessagesRequest
from folio.app.api.input.conversations import template_messages
from folio.app.config.http import HttpSettings, KeySource
from folio.app.errors import ContextLengthError, DeadlineError, EngineError, NoReplicaError, OverloadedError
from folio.app.models.chat_template.arrangement import Arrangement
from tests.fakes.replicas import CALL, TOKENIZER, Engines, Pieces, ingress_with
from tests.local_server import guarded_api

TOOL: Any = {"name": "f", "input_schema": {"type": "object", "properties": {"x": {"type": "integer"}}}}
USER: Any = {"role": "user", "content": "x"}
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
ALTERNATING = Arrangement(joins_system=True, reminds=True, joins_users=True, joins_answers=True)


class Long(Pieces):
    """Replicas with a longer context."""

    async def _max_model_len(self) -> int:
        return 4096


def transport_of(engines: Engines, http: HttpSettings | None = None, **settings: Any) -> TestClient:
    return TestClient(guarded_api(ingress_with(engines, **settings), http), base_url="http://folio")


def client_of(engines: Engines, **settings: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(
        base_url="http://folio", api_key="none", max_retries=0, http_client=transport_of(engines, **settings)
    )


def create_of(engines: Engines, **settings: Any) -> Any:
    """`messages.create` with defaults."""
    create: Any = client_of(engines, **settings).messages.create
    return lambda **fields: create(**({"model": "m", "max_tokens": 9, "messages": [USER]} | fields))


def prompt_of(engines: Engines, number: int = -1) -> str:
    return TOKENIZER.decode(engines.calls[number].prompt_token_ids)


def test_a_message_as_the_client_reads_it() -> None:
    client = client_of(engines := Engines(text="Hello"))
    answer = client.messages.with_raw_response.create(
        model="m",
        max_tokens=9,
        system="Be brief.",
        messages=[{"role": "user", "content": "Who?"}],
        extra_body={"temperature": 0.5, "top_p": 0.5, "top_k": 7},  # newer clients have no arguments for them
        metadata={"user_id": "u"},
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
    assert call.user == "u"
    assert prompt_of(engines) == "<|system|>Be brief.<|end|><|user|>Who?<|end|><|assistant|>"
    assert message.id == f"{call.request_id}.r7"  # can be forked
    Message.model_validate_json(answer.text())  # the client itself does not validate types
    assert answer.headers["request-id"]
    assert message._request_id == answer.headers["request-id"]


def test_the_events_of_a_text() -> None:
    create = create_of(Pieces("Hel", "", "lo"))
    events: list[Any] = list(create(stream=True))
    assert [event.type for event in events] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]  # the client drops pings
    start, begun, first, second, _, ended, _ = events
    assert (start.message.content, start.message.stop_reason) == ([], None)
    assert (start.message.usage.cache_read_input_tokens, start.message.usage.output_tokens) == (2, 1)
    assert begun.content_block.text == ""
    assert (first.delta.text, second.delta.text) == ("Hel", "lo")
    assert (ended.delta.stop_reason, ended.usage.output_tokens) == ("end_turn", 3)
    with client_of(Pieces("Hel", "lo")).messages.stream(model="m", max_tokens=9, messages=[USER]) as stream:
        assert "".join(stream.text_stream) == "Hello"
        assert stream.get_final_message().content[0].text == "Hello"  # type: ignore[union-attr]


def test_events_on_the_wire() -> None:
    """Names, and a ping behind the beginning, as Anthropic's server sends them."""
    transport = transport_of(Pieces("Hel\u2028lo"))
    body = {"model": "m", "max_tokens": 9, "messages": [USER], "stream": True}
    answer = transport.post("/v1/messages", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    blocks = [block.splitlines() for block in answer.text.split("\n\n") if block]
    names = [block[0].removeprefix("event: ") for block in blocks]
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    datas = [json.loads(block[1].removeprefix("data: ")) for block in blocks]
    assert [data["type"] for data in datas] == names
    for data in datas:
        if data["type"] != "ping":
            EVENT.validate_python(data)
    assert all(len(block) == 2 for block in blocks)


def test_an_empty_answer() -> None:
    message = create_of(Pieces(""))()
    assert (message.content, message.stop_reason) == ([], "end_turn")
    assert [event.type for event in create_of(Pieces(""))(stream=True)] == [
        "message_start",
        "message_delta",
        "message_stop",
    ]


@pytest.mark.parametrize(
    ("max_tokens", "asked", "reason"), [(2, 2, "max_tokens"), (397, None, "model_context_window_exceeded")]
)
def test_output_that_is_cut_off(max_tokens: int, asked: int | None, reason: str) -> None:
    """Claude Code asks for more tokens than the context has: the output may then fill the context."""
    create = create_of(engines := Pieces("Hel", "lo", finish_reason="length"))
    assert create(max_tokens=max_tokens).stop_reason == reason
    assert engines.calls[0].params.max_tokens == asked


def test_a_prompt_that_is_too_long_is_refused_in_the_words_that_claude_code_knows() -> None:
    create = create_of(Engines())
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 63 maximum"):
        create(messages=[{"role": "user", "content": "a b c d " * 20}])
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 63 maximum"):
        create(messages=[{"role": "user", "content": "word " * 10_000}])
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: the context is 64"):
        create_of(Engines(ContextLengthError("the context is 64", "prompt")))()


def test_a_stop_sequence_is_named() -> None:
    class Stops(Pieces):
        def _items(self, call: Any) -> list[Any]:
            *items, last = super()._items(call)
            return [
                *items,
                type(last)(**{name: getattr(last, name) for name in last.__slots__} | {"stop_reason": "</a>"}),
            ]

    create = create_of(engines := Stops("Hel", "lo"))
    message = create(stop_sequences=["</a>", "b"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "</a>")
    assert engines.calls[0].params.stop == ("</a>", "b")
    *_, ended, _ = create(stop_sequences=["</a>"], stream=True)
    assert (ended.delta.stop_reason, ended.delta.stop_sequence) == ("stop_sequence", "</a>")


def test_tools_and_their_results() -> None:
    """The content of an answer is part of the next request, unchanged."""
    create = create_of(engines := Long("Well.", f"\n{CALL}"))
    first = create(tools=[TOOL])
    text, call = first.content
    assert (text.text, call.name, call.input) == ("Well.", "f", {"x": 1})
    assert first.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "five"}]}
    said = {"type": "text", "text": "Go on."}
    create(
        messages=[USER, {"role": "assistant", "content": first.content}, {"role": "user", "content": [said, result]}],
        tools=[TOOL],
        tool_choice={"type": "none"},
    )
    prompt = prompt_of(engines)
    assert "<|assistant|>Well.\n<tool_call>" in prompt
    assert "<tool_response>\nfive\n" in prompt
    assert prompt.index("five") < prompt.index("Go on.")  # results are next to their calls

    events = list(create(tools=[TOOL], stream=True))
    starts = [event for event in events if event.type == "content_block_start"]
    assert [event.content_block.type for event in starts] == ["text", "tool_use"]
    assert starts[1].content_block.input == {}
    deltas = [event for event in events if event.type == "content_block_delta" and event.index == 1]
    assert json.loads("".join(event.delta.partial_json for event in deltas)) == {"x": 1}
    assert events[-2].delta.stop_reason == "tool_use"
    client = client_of(Long("Well.", f"\n{CALL}"))
    with client.messages.stream(model="m", max_tokens=9, messages=[USER], tools=[TOOL]) as stream:
        assert stream.get_final_message().content[1].input == {"x": 1}  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("choice", "is_forced"),
    [
        ({"type": "auto"}, False),
        ({"type": "any", "disable_parallel_tool_use": True}, True),
        ({"type": "tool", "name": "f"}, True),
    ],
)
def test_tool_choice(choice: Any, is_forced: bool) -> None:
    create = create_of(engines := Long(CALL))
    create(tools=[TOOL], tool_choice=choice)
    assert (engines.calls[0].params.structure is not None) == is_forced


def test_one_call_only_unless_parallel_ones_are_allowed() -> None:
    create = create_of(engines := Long(CALL))
    for number in (True, False):
        create(tools=[TOOL], tool_choice={"type": "any", "disable_parallel_tool_use": number})
    one, several = (call.params.structure.spec for call in engines.calls)
    assert one != several


def test_the_input_of_a_call_that_was_cut_off() -> None:
    half = '<tool_call>\n{"name": "f", "arguments": {"x": 1, "y": "ab'
    [call] = create_of(Long(half, finish_reason="length"))(tools=[TOOL]).content
    assert call.input == {"x": 1, "y": "ab"}


def test_results_that_are_errors() -> None:
    create = create_of(engines := Long("x"))
    call = {"type": "tool_use", "id": "c", "name": "f", "input": {"x": "ü"}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": "no such file", "is_error": True}
    reminder = {"role": "system", "content": "Soon."}
    create(messages=[USER, {"role": "assistant", "content": [call]}, reminder, {"role": "user", "content": [result]}])
    assert "<tool_response>\nError: no such file\n" in prompt_of(engines)
    assert prompt_of(engines).index("no such file") < prompt_of(engines).index("Soon.")  # results are next to calls
    assert '{"x": "ü"}' in prompt_of(engines)


def test_thinking_is_a_block_and_goes_back() -> None:
    engines = Long("<think>", "so", "</think>", f"Well.{CALL}", "More.", encodes=True)
    create = create_of(engines, reasoning_parser="qwen3")
    events = list(create(tools=[TOOL], thinking={"type": "enabled", "budget_tokens": 1024}, stream=True))
    starts = [event.content_block.type for event in events if event.type == "content_block_start"]
    assert starts == ["thinking", "text", "tool_use", "text"]
    deltas = [event.delta for event in events if event.type == "content_block_delta" and event.index == 0]
    assert [delta.type for delta in deltas] == ["thinking_delta", "signature_delta"]
    assert deltas[0].thinking == "so"
    num_tokens = sum(len(TOKENIZER.encode(text)) for text in ("<think>", "so", "</think>"))
    assert events[-2].usage.output_tokens_details.thinking_tokens == num_tokens
    structure = engines.calls[0].params.structure
    assert structure.budget.max_tokens == 1024

    message = create(tools=[TOOL], thinking={"type": "adaptive"})
    assert (message.content[0].thinking, message.content[0].signature) == ("so", deltas[1].signature)
    result = {"type": "tool_result", "tool_use_id": message.content[2].id, "content": "five"}
    redacted = {"type": "redacted_thinking", "data": "abc"}
    answered = {"role": "assistant", "content": [redacted, *message.content[:3]]}
    create(messages=[USER, answered, {"role": "user", "content": [result]}], tools=[TOOL])
    hidden = create(thinking={"type": "adaptive", "display": "omitted"})
    assert (hidden.content[0].type, hidden.content[0].thinking) == ("thinking", "")


async def test_reasoning_reaches_the_chat_template() -> None:
    given = {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "so", "signature": "s"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "Well."},
        ],
    }
    body = {"model": "m", "max_tokens": 9, "messages": [USER, given, USER]}
    chat = MessagesRequest.model_validate(body).as_chat()
    assert (chat.messages[1].reasoning_content, chat.messages[1].content) == ("so", "Well.")
    for thinking, settings in (
        ({"type": "enabled", "budget_tokens": 5}, True),
        ({"type": "adaptive"}, True),
        ({"type": "disabled"}, False),
    ):
        chat = MessagesRequest.model_validate(body | {"thinking": thinking}).as_chat()
        assert chat.template_settings["enable_thinking"] is settings
    assert MessagesRequest.model_validate(body).as_chat().template_settings == {}
    chat = MessagesRequest.model_validate(body | {"output_config": {"effort": "max"}}).as_chat()
    assert chat.template_settings["reasoning_effort"] == "xhigh"


class Answer(BaseModel):
    x: int


def test_output_that_follows_a_schema() -> None:
    client = client_of(engines := Long('{"x": 5}'))
    parsed = client.messages.parse(model="m", max_tokens=9, messages=[USER], output_format=Answer)
    assert parsed.parsed_output == Answer(x=5)
    structure = engines.calls[0].params.structure
    assert (structure.kind, json.loads(structure.spec)["required"]) == ("json", ["x"])


def test_turns_become_what_the_chat_template_accepts() -> None:
    """Messages stay as they are where it takes all; see `tests.app.models.chat_template` for those that do not."""
    create = create_of(engines := Long("x"))
    fields: Any = {
        "system": [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}],
        "messages": [
            {"role": "system", "content": "Three."},
            {"role": "user", "content": "a"},
            {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]},
            {"role": "assistant", "content": "d"},
            {"role": "assistant", "content": "e"},
            {"role": "system", "content": "f"},
            {"role": "user", "content": "g"},
        ],
    }
    create(**fields)
    assert prompt_of(engines) == (
        "<|system|>One.\nTwo.<|end|><|system|>Three.<|end|><|user|>a<|end|><|user|>b\nc<|end|><|assistant|>d<|end|>"
        "<|assistant|>e<|end|><|system|>f<|end|><|user|>g<|end|><|assistant|>"
    )
    chat = MessagesRequest.model_validate({"model": "m", "max_tokens": 9} | fields).as_chat().messages
    assert [(one["role"], one["content"]) for one in ALTERNATING.arranged(template_messages(chat))] == [
        ("system", "One.\nTwo.\nThree."),
        ("user", "a\nb\nc"),
        ("assistant", "d\ne"),
        ("user", "<system-reminder>\nf\n</system-reminder>\ng"),
    ]


def test_a_last_message_of_the_assistant_is_continued() -> None:
    create = create_of(engines := Long("x"))
    create(messages=[USER, {"role": "assistant", "content": "Well, "}])
    assert prompt_of(engines) == "<|user|>x<|end|><|assistant|>Well, "


def test_many_texts_are_joined_in_linear_time() -> None:
    text = {"type": "text", "text": "x" * 250}
    messages = [{"role": "user", "content": [text] * 1000}] * 30
    request = MessagesRequest.model_validate({"model": "m", "max_tokens": 1, "messages": messages})
    begun = time.perf_counter()
    chat = request.as_chat().messages
    [message] = ALTERNATING.arranged(template_messages(chat))
    assert time.perf_counter() - begun < 5.0  # adding one by one copies 110 GB
    assert len(message["content"]) == 30_000 * 251 - 1


NONCES = [f"x-anthropic-billing-header: cc_version=2.1.{i}; cc_entrypoint=cli; cch=fa{i}90;" for i in range(2)]


@pytest.mark.parametrize("is_block", [True, False])
def test_claude_codes_nonce_is_no_part_of_the_prompt(is_block: bool) -> None:
    create = create_of(engines := Long("x"))
    client = client_of(Long("x"))
    counts = set()
    for nonce in [None, *NONCES]:
        texts = [text for text in (nonce, "You are Claude Code.") if text is not None]
        system: Any = [{"type": "text", "text": text} for text in texts] if is_block else "\n\n".join(texts)
        create(system=system)
        counts.add(client.messages.count_tokens(model="m", system=system, messages=[USER]).input_tokens)
    first, *others = (call.prompt_token_ids for call in engines.calls)
    assert others == [first, first]
    assert counts == {len(first)}
    create(system=NONCES[0])
    assert prompt_of(engines) == "<|user|>x<|end|><|assistant|>"
    create(system="Explain x-anthropic-billing-header: a=b")  # elsewhere it is text
    assert "billing-header: a=b" in prompt_of(engines)


def test_cache_control_is_accepted_everywhere() -> None:
    hint = {"type": "ephemeral"}
    hour = hint | {"ttl": "1h", "scope": "global"}
    text = {"type": "text", "text": "x"}
    call = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [text]}
    body: dict[str, Any] = {
        "model": "m",
        "max_tokens": 9,
        "system": [text],
        "tools": [TOOL],
        "messages": [
            {"role": "user", "content": [text]},
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result, text]},
        ],
    }
    assert MessagesRequest.model_validate(body).retention_s() is None
    plain = MessagesRequest.model_validate(body).as_chat()
    system, tool = [text | {"cache_control": hint}], [TOOL | {"cache_control": hint}]
    for given, ttl_s in (
        (body | {"cache_control": hint}, 300),
        (body | {"system": system}, 300),
        (body | {"system": system, "tools": [TOOL | {"cache_control": hour}]}, 3600),
        (body | {"tools": tool}, 300),
        (body | {"messages": [{"role": "user", "content": [text | {"cache_control": hour}]}]}, 3600),
        (
            body
            | {"messages": [*body["messages"][:2], {"role": "user", "content": [result | {"cache_control": hint}]}]},
            300,
        ),
    ):
        request = MessagesRequest.model_validate(given)
        assert request.retention_s() == ttl_s
        assert request.as_chat().wanted_ttl_s == ttl_s
        if "messages" not in given or given["messages"] == body["messages"]:
            assert request.as_chat().messages == plain.messages
            assert request.as_chat().tools == plain.tools


def test_tokens_are_counted_as_they_are_in_a_message() -> None:
    client = client_of(engines := Long("x"))
    body: Any = {"model": "m", "messages": [USER], "system": "Be brief.", "tools": [TOOL]}
    count = client.messages.count_tokens(**body)
    assert engines.calls == []
    usage = client.messages.create(**body, max_tokens=9).usage
    assert count.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_names_of_other_models() -> None:
    aliases = {"claude-*": "m", "claude-haiku-4-5": "pirate"}
    client = client_of(engines := Long("x"), aliases=aliases)
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


KEY = "sk-" + "0" * 20


def test_an_api_key_in_anthropics_header(tmp_path: Any) -> None:
    (tmp_path / "keys.yaml").write_text(
        f"keys: [{{name: a, key: {KEY}, models: [m], limits: {{requests_per_minute: 3}}}}]"
    )
    http = HttpSettings(api_keys=KeySource(file=tmp_path / "keys.yaml"))
    transport = transport_of(engines := Long("x"), http, aliases={"claude-*": "m", "other-*": "pirate"})

    def client(**key: str | None) -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url="http://folio", max_retries=0, http_client=transport, **key)  # type: ignore[arg-type]

    ask: Any = {"max_tokens": 9, "messages": [USER]}
    with pytest.raises(anthropic.AuthenticationError) as caught:
        client(api_key="sk-wrong-wrong-wrong").messages.create(model="m", **ask)
    assert caught.value.type == "authentication_error"
    assert caught.value.request_id == caught.value.body["request_id"]  # type: ignore[index]
    client(api_key=KEY).messages.create(model="claude-x", **ask)  # the alias's model is the one that counts
    client(auth_token=KEY).messages.create(model="m", **ask)
    with pytest.raises(anthropic.PermissionDeniedError) as denied:
        client(api_key=KEY).messages.create(model="other-x", **ask)
    assert denied.value.type == "permission_error"
    with pytest.raises(anthropic.RateLimitError) as limited:
        client(api_key=KEY).messages.create(model="m", **ask)
    assert limited.value.type == "rate_limit_error"
    assert int(limited.value.response.headers["retry-after"]) >= 1
    assert len(engines.calls) == 2


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (EngineError("a step failed"), 500, "api_error"),
        (OverloadedError("too many", 30.0), 429, "overloaded_error"),
        (NoReplicaError("gone", 2.0), 503, "overloaded_error"),
        (DeadlineError("too late"), 408, "timeout_error"),
        (ContextLengthError("too long", "prompt"), 400, "invalid_request_error"),
    ],
)
def test_errors_at_once_and_in_a_stream(error: Exception, status: int, kind: str) -> None:
    for stream in (False, True):
        with pytest.raises(anthropic.APIStatusError) as caught:
            create_of(Engines(error))(stream=stream)
        body: Any = caught.value.body
        assert (caught.value.status_code, body["type"], body["error"]["type"]) == (status, "error", kind)
        assert ("retry-after" in caught.value.response.headers) == (getattr(error, "retry_after_s", None) is not None)
    events = []
    with pytest.raises(anthropic.APIStatusError, match=str(error)) as late:
        events += create_of(Pieces("Hel", error=error))(stream=True)
    assert late.value.body["error"]["type"] == kind  # type: ignore[index]


def test_an_internal_error_is_not_explained() -> None:
    with pytest.raises(anthropic.InternalServerError) as caught:
        create_of(Engines(RuntimeError("secret")))()
    assert caught.value.type == "api_error"
    assert "secret" not in caught.value.message


@pytest.mark.parametrize(
    ("method", "path", "sent", "status", "kind"),
    [
        ("POST", "/v1/messages", {"content": b"{"}, 400, "invalid_request_error"),
        ("POST", "/v1/messages", {"json": []}, 400, "invalid_request_error"),
        (
            "POST",
            "/v1/messages",
            {"json": {"model": "m", "max_tokens": 1, "messages": [], "system": "\ud800"}},
            400,
            "invalid_request_error",
        ),
        (
            "POST",
            "/v1/messages",
            {"content": b"{}", "headers": {"content-type": "text/plain"}},
            415,
            "invalid_request_error",
        ),
        ("POST", "/v1/messages", {"content": b" " * 2000}, 413, "request_too_large"),
        ("GET", "/v1/messages", {}, 405, "invalid_request_error"),
        ("GET", "/v1/messages/batches", {}, 404, "not_found_error"),
        ("POST", "/v1/messages/count_tokens", {"json": {}}, 400, "invalid_request_error"),
    ],
)
def test_every_error_has_anthropics_form(method: str, path: str, sent: Any, status: int, kind: str) -> None:
    transport = transport_of(Engines(), HttpSettings(max_body_bytes=1000))
    headers = {"content-type": "application/json"} | sent.pop("headers", {})
    if "json" in sent:
        sent = {"content": json.dumps(sent["json"]).encode()}
    answer = transport.request(method, path, headers=headers, **sent)
    body = answer.json()
    assert (answer.status_code, body["type"], body["error"]["type"]) == (status, "error", kind)
    assert body["request_id"] == answer.headers["request-id"]
    assert set(body) == {"type", "error", "request_id"}
    other = transport.post("/v1/chat/completions", content=b"{", headers=headers)
    assert set(other.json()) == {"error"}  # OpenAI's routes keep their form
    assert "request-id" not in other.headers


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aaaa"}}
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": "x"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": []}, "messages: must have at least 1"),
        ({"messages": [{"role": "user", "content": []}]}, "messages have no content"),
        ({"max_tokens": 0}, "max_tokens: must be greater than or equal to 1"),
        ({"extra_body": {"temperature": 1.5}}, "temperature: must be less than or equal to 1"),
        ({"messages": [{"role": "king", "content": "x"}]}, "role: must be 'user', 'assistant' or 'system'"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "takes text only; leave out the part of type 'image'"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "takes text only"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "blocks here are of the type"),
        ({"messages": [{"role": "assistant", "content": [RESULT]}]}, "belongs to a message of the user"),
        ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]}, "of the assistant"),
        ({"tools": [{"name": "f"}]}, r"tools\[0\].input_schema: is missing"),
        ({"tools": [TOOL, TOOL]}, "two tools have the name 'f'"),
        ({"tool_choice": {"type": "any"}}, "there are no tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "needs a name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "'g', which is not among the tools"),
        ({"stop_sequences": [""]}, "stop_sequences takes at most 16 strings, none of them empty"),
        ({"stop_sequences": ["x"] * 17}, "at most 16"),
        ({"output_config": {"format": {"type": "text"}}}, "must be 'json_schema'"),
        ({"extra_body": {"stop": ["x"]}}, "stop_sequences here"),
        ({"extra_body": {"n": 2}}, "less than or equal to 1"),
        ({"extra_body": {"prompt_logprobs": 1}}, "use /v1/completions"),
        ({"system": [{"type": "image"}]}, "takes text only"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(anthropic.BadRequestError, match=message) as caught:
        create_of(Long("x"))(**fields)
    assert caught.value.type == "invalid_request_error"


TOOL_USE = {"type": "tool_use", "id": "c", "name": "f", "input": {"x": 1}}
LEFT_OUT = "[image left out: this model reads text only]"


@pytest.mark.parametrize(
    ("message", "shown", "ignored"),
    [
        (RESULT, "<tool_response>\nx\n", None),
        (RESULT | {"content": None}, "<tool_response>\n\n", None),
        (RESULT | {"content": [IMAGE]}, LEFT_OUT, "messages[].content[].content[].image"),
        (
            RESULT | {"content": [{"type": "text", "text": "see"}, IMAGE, {"type": "x\n", "y": 1}]},
            f"<tool_response>\nsee\n{LEFT_OUT}\n</tool_response>",
            "messages[].content[].content[].image, messages[].content[].content[].x_",
        ),
        (RESULT | {"content": [{"type": "tool_reference", "tool_name": "g"}]}, "[tool g is available]", None),
        (
            {"type": "tool_addition", "tool": {"type": "tool_reference", "tool_name": "g"}},
            "<|system|>[tool g is available]",
            None,
        ),
        ({"type": "tool_removal", "tool": {"type": "tool_reference", "tool_name": "g"}}, "g is no longer", None),
        (
            {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
            "",
            "messages[].content[].server_tool_use",
        ),
        (
            {"type": "search_result", "source": "s", "title": "t", "content": [{"type": "text", "text": "found"}]},
            "<|user|>t\ns\nfound",
            None,
        ),
        (
            {"type": "document", "title": "t", "source": {"type": "text", "media_type": "text/plain", "data": "read"}},
            "<|user|>t\nread",
            None,
        ),
        ({"type": "mcp_tool_result", "tool_use_id": "c", "content": []}, "", "messages[].content[].mcp_tool_result"),
        (TOOL_USE | {"input": "broken"}, '{"input": "broken"}', None),
        (TOOL_USE | {"input": None}, '"arguments": {}', None),
    ],
)
def test_histories_of_other_servers_are_shown(message: Any, shown: str, ignored: str | None) -> None:
    """An image that a tool has read, and blocks of newer clients, ended the conversation."""
    transport = transport_of(engines := Long("x"))
    kind = message["type"]
    role = (
        "user"
        if kind in ("tool_result", "search_result", "document", "mcp_tool_result")
        else "system"
        if kind.startswith("tool_") and kind != "tool_use"
        else "assistant"
    )
    body: dict[str, Any] = {
        "model": "m",
        "max_tokens": 9,
        "thinking": {"type": "adaptive", "display": "updates"},
        "messages": [USER, {"role": "assistant", "content": [TOOL_USE]}, {"role": role, "content": [message]}, USER],
    }
    answer = transport.post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    assert shown in prompt_of(engines)
    assert answer.headers.get("x-folio-ignored-fields") == ignored
    orphan = transport.post("/v1/messages", json=body | {"messages": body["messages"][2:]})
    assert orphan.status_code == 200, orphan.text


@pytest.mark.parametrize(
    ("tools", "choice", "ignored"),
    [
        ([], {"type": "tool", "name": "web_search"}, ", tool_choice"),
        ([], {"type": "any"}, ", tool_choice"),
        ([TOOL], {"type": "tool", "name": "web_search"}, ", tool_choice"),
        ([TOOL], {"type": "auto"}, ""),
        ([TOOL | {"type": "function"}], {"type": "auto"}, ""),
    ],
)
def test_tools_of_anthropics_servers_are_left_out(tools: list[Any], choice: Any, ignored: str) -> None:
    """Claude Code's search asks for one that nobody here runs: 400, and the end of its turn."""
    transport = transport_of(engines := Long("x"))
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
    body = {"model": "m", "max_tokens": 9, "messages": [USER], "tools": [*tools, search], "tool_choice": choice}
    answer = transport.post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-folio-ignored-fields"] == f"tools[].web_search_20250305{ignored}"
    assert "web_search" not in prompt_of(engines)
    assert engines.calls[-1].params.structure is None


@pytest.mark.parametrize(
    ("last", "end"),
    [
        ([], "<|assistant|>"),
        (" \n", "<|assistant|>"),
        ([TOOL_USE], "</tool_call><|end|><|assistant|>"),
        ("So", "<|assistant|>So"),
    ],
)
def test_an_answer_without_text_is_not_continued(last: Any, end: str) -> None:
    """Clients end a conversation so after an empty answer, or one that was interrupted in its call: 400 for good."""
    body = {"model": "m", "max_tokens": 9, "messages": [USER, {"role": "assistant", "content": last}]}
    answer = transport_of(engines := Long("x")).post(
        "/v1/messages", json=body | {"container": "c", "mcp_servers": [{"type": "url", "url": "http://x"}]}
    )
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-folio-ignored-fields"] == "container, mcp_servers"
    assert prompt_of(engines).replace("\n", "").endswith(end)


def test_an_image_of_the_user_is_refused_also_beside_a_result() -> None:
    answer = transport_of(Long("x")).post(
        "/v1/messages", json={"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": [RESULT, IMAGE]}]}
    )
    assert answer.status_code == 400
    assert "text only" in answer.json()["error"]["message"]


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
    client = client_of(engines := Engines())
    create: Any = client.beta.messages.create
    create(model="m", max_tokens=9, messages=[USER], **fields)
    create_of(others := Engines())()
    [call], [other] = engines.calls, others.calls
    assert (call.prompt_token_ids, call.params) == (other.prompt_token_ids, other.params)


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
    runner = client_of(engines).beta.messages.tool_runner(model="m", max_tokens=9, messages=[USER], tools=tools)
    [block] = runner.until_done().content
    assert block.type == "text"
    assert block.text == "It is."
    assert "found" in prompt_of(engines)


def test_a_thread_that_is_continued_is_not_found() -> None:
    thread = {"type": "continue", "previous_message_id": "msg-1"}
    answer = transport_of(Engines()).post(
        "/v1/messages", json={"model": "m", "max_tokens": 9, "messages": [USER], "thread": thread}
    )
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert (error["type"], error["details"]) == ("not_found_error", {"error_code": "thread_not_found"})
    assert "send the whole conversation" in error["message"]
