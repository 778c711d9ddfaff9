"""Fields of vLLM, over HTTP and with a real engine: each has vLLM's meaning."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest
from starlette.testclient import TestClient

from folio.app.api.openai.bodies import CompletionRequest
from tests.app.api.asking import CHAT, COMPLETIONS, events_of
from tests.local_server import LocalServer

USER = {"role": "user", "content": "What is Folio?"}


@pytest.fixture
def client(server: LocalServer) -> TestClient:
    return TestClient(server.api, raise_server_exceptions=False)


def send(client: TestClient, path: str, **fields: Any) -> Any:
    answer = client.post(path, json={"model": "builtin", "temperature": 0} | fields)
    assert answer.status_code == 200, answer.text
    assert "x-folio-ignored-fields" not in answer.headers
    return answer


def complete(client: TestClient, **fields: Any) -> Any:
    return send(client, COMPLETIONS, **{"prompt": "The key of room", "max_tokens": 8} | fields).json()


def chat(client: TestClient, **fields: Any) -> Any:
    return send(client, CHAT, **{"messages": [USER], "max_tokens": 8} | fields).json()


def events(client: TestClient, path: str, **fields: Any) -> list[Any]:
    answer = send(client, path, stream=True, **fields)
    assert answer.text.endswith("data: [DONE]\n\n")
    return events_of(answer)


def text_of(chunks: list[Any]) -> str:
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)


# The same for completions and chats.
PROMPTS: Any = ((COMPLETIONS, {"prompt": "The key"}), (CHAT, {"messages": [USER]}))


def refused(client: TestClient, path: str = CHAT, **fields: Any) -> tuple[str, str]:
    """(Field, message)."""
    answer = client.post(path, json={"model": "builtin", "messages": [USER]} | fields)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]["param"], answer.json()["error"]["message"]


def tokens(client: TestClient, **fields: Any) -> list[int]:
    return client.post("/tokenize", json=fields).json()["tokens"]  # type: ignore[no-any-return]


def test_token_ids_of_whole_answers(client: TestClient) -> None:
    two = complete(client, prompt=["The key", "Folio is"], return_token_ids=True)
    for choice, prompt in zip(two["choices"], ("The key", "Folio is"), strict=True):
        assert choice["prompt_token_ids"] == tokens(client, prompt=prompt)
        text = client.post("/detokenize", json={"tokens": choice["token_ids"]}).json()["prompt"]
        assert text == choice["text"]
    answer = chat(client, return_token_ids=True, n=2)
    assert answer["prompt_token_ids"] == tokens(client, messages=[USER])
    assert sum(len(choice["token_ids"]) for choice in answer["choices"]) == answer["usage"]["completion_tokens"]
    plain = chat(client)
    assert "prompt_token_ids" not in plain
    assert "token_ids" not in plain["choices"][0]


def test_token_ids_of_streams(client: TestClient) -> None:
    for path, prompt in PROMPTS:
        whole = send(client, path, **prompt, max_tokens=12, return_token_ids=True).json()
        chunks = events(client, path, **prompt, max_tokens=12, return_token_ids=True)
        joined = [token_id for chunk in chunks for token_id in chunk["choices"][0]["token_ids"]]
        assert joined == whole["choices"][0]["token_ids"]
        prompts = [chunk.get("prompt_token_ids", chunk["choices"][0].get("prompt_token_ids")) for chunk in chunks]
        expected = whole.get("prompt_token_ids", whole["choices"][0].get("prompt_token_ids"))
        assert prompts == [expected] + [None] * (len(chunks) - 1)


def test_token_ids_of_tool_calls_come_with_the_call(client: TestClient) -> None:
    """The parser holds text back; its tokens are not lost."""
    tool = {"type": "function", "function": {"name": "find_key", "parameters": {"type": "object", "properties": {}}}}
    fields = {"messages": [USER], "tools": [tool], "tool_choice": "required", "max_tokens": 200}
    chunks = events(client, CHAT, **fields, return_token_ids=True, parallel_tool_calls=False)
    joined = [token_id for chunk in chunks for token_id in chunk["choices"][0]["token_ids"]]
    whole = chat(client, **fields, return_token_ids=True, parallel_tool_calls=False)
    assert joined == whole["choices"][0]["token_ids"]


def test_an_echo_alone_has_no_token_ids(client: TestClient) -> None:
    answer = complete(client, echo=True, max_tokens=0, return_token_ids=True)
    assert answer["choices"][0]["token_ids"] == []


def test_tokens_written_as_ids(client: TestClient) -> None:
    fields: dict[str, Any] = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    choice = complete(client, logprobs=1, **fields)["choices"][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token_id}" for token_id in choice["token_ids"]]
    assert all(re.fullmatch(r"token_id:\d+", token) for top in choice["logprobs"]["top_logprobs"] for token in top)
    choice = chat(client, logprobs=True, top_logprobs=2, **fields)["choices"][0]
    assert [token["token"] for token in choice["logprobs"]["content"]] == [f"token_id:{i}" for i in choice["token_ids"]]
    assert choice["logprobs"]["content"][0]["bytes"]  # still the text's


def test_usage_in_every_chunk(client: TestClient) -> None:
    """GuideLLM always asks for it; all of its requests were refused."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    for path, prompt in PROMPTS:
        *chunks, last = events(client, path, **prompt, max_tokens=12, stream_options=options)
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert (counts[-1], last["choices"]) == (last["usage"]["completion_tokens"], [])
        assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {last["usage"]["prompt_tokens"]}
        *chunks, last = events(client, path, **prompt, max_tokens=12, stream_options={"include_usage": True})
        assert {json.dumps(chunk["usage"]) for chunk in chunks} == {"null"}
        chunks = events(client, path, **prompt, max_tokens=12, stream_options={"continuous_usage_stats": True})
        assert {json.dumps(chunk["usage"]) for chunk in chunks} == {"null"}  # as in vLLM: only with include_usage


def test_ids_of_clients(client: TestClient) -> None:
    assert chat(client, request_id="run-7.a:b_c")["id"] == "chatcmpl-run-7.a:b_c"
    assert complete(client, request_id="x", prompt=["a", "b"])["id"] == "cmpl-x"
    assert {chunk["id"] for chunk in events(client, COMPLETIONS, prompt="a", request_id="x")} == {"cmpl-x"}
    answer = client.post("/v1/responses", json={"model": "builtin", "input": "x", "request_id": "y"})
    assert answer.json()["id"] == "resp-y"
    assert refused(client, request_id="a b")[0] == "request_id"


async def test_equal_ids_of_clients_do_not_meet(server: LocalServer) -> None:
    """The engine has ids of its own."""
    requests = [
        CompletionRequest(model="builtin", prompt=f"Room {i} is", max_tokens=20, temperature=0, request_id="same")
        for i in range(8)
    ]
    together = await asyncio.gather(*(server.ingress.generate(request) for request in requests))
    for request, answer in zip(requests, together, strict=True):
        alone = await server.ingress.generate(request)
        assert (answer.id, answer.choices[0].text) == ("cmpl-same", alone.choices[0].text)


def test_only_allowed_tokens_appear(client: TestClient) -> None:
    allowed = tokens(client, prompt="abc")
    for temperature in (0, 1):
        answer = complete(client, allowed_token_ids=allowed, temperature=temperature, return_token_ids=True, seed=1)
        assert set(answer["choices"][0]["token_ids"]) <= set(allowed)
        assert answer["choices"][0]["finish_reason"] == "length"
    param, message = refused(client, allowed_token_ids=[10**6])
    assert (param, "must be between 0 and" in message) == ("allowed_token_ids", True)
    contradiction = refused(client, allowed_token_ids=tokens(client, prompt="x")[:1], guided_choice=["y"])
    assert "allowed_token_ids" in contradiction[1]


def test_special_tokens_appear_if_asked_for(client: TestClient) -> None:
    fields: dict[str, Any] = {"messages": [USER], "max_tokens": 60, "ignore_eos": True}
    hidden, shown = chat(client, **fields), chat(client, **fields, skip_special_tokens=False)
    assert shown["usage"] == hidden["usage"]
    text = shown["choices"][0]["message"]["content"]
    assert "<|" in text
    assert "<|" not in hidden["choices"][0]["message"]["content"]
    streamed = events(client, CHAT, **fields, skip_special_tokens=False)
    assert text_of(streamed) == text


def test_the_end_is_shown_with_both_fields(client: TestClient) -> None:
    """The text of the token that ends an output is shown by vLLM only with both."""
    fields: dict[str, Any] = {"messages": [USER], "max_tokens": 200, "skip_special_tokens": False}
    without = chat(client, **fields)["choices"][0]
    with_end = chat(client, **fields, include_stop_str_in_output=True)["choices"][0]
    assert (without["finish_reason"], with_end["finish_reason"]) == ("stop", "stop")
    assert with_end["message"]["content"].startswith(without["message"]["content"])
    assert re.fullmatch(r"<\|\w+\|>", with_end["message"]["content"].removeprefix(without["message"]["content"]))


def test_stop_strings_in_the_output(client: TestClient) -> None:
    text = complete(client)["choices"][0]["text"]
    stop = text[2:4]
    assert complete(client, stop=stop)["choices"][0]["text"] == text[: text.index(stop)]
    shown = complete(client, stop=stop, include_stop_str_in_output=True)["choices"][0]["text"]
    assert shown == text[: text.index(stop) + 2]


def test_truncated_prompts(client: TestClient) -> None:
    prompt = "one two three four five six seven"
    whole = tokens(client, prompt=prompt)
    answer = complete(client, prompt=prompt, truncate_prompt_tokens=3, return_token_ids=True)
    assert answer["choices"][0]["prompt_token_ids"] == whole[-3:]
    assert answer["usage"]["prompt_tokens"] == 3
    answer = complete(client, prompt=whole, truncate_prompt_tokens=3, return_token_ids=True, echo=True)
    assert answer["choices"][0]["prompt_token_ids"] == whole[-3:]
    kept = client.post("/detokenize", json={"tokens": whole[-3:]}).json()["prompt"]
    assert answer["choices"][0]["text"].startswith(kept)
    assert chat(client, truncate_prompt_tokens=5)["usage"]["prompt_tokens"] == 5
    assert chat(client, truncate_prompt_tokens=1000)["usage"] == chat(client)["usage"]


def test_prompts_as_long_as_the_context(client: TestClient) -> None:
    most = client.get("/v1/models/builtin").json()["max_model_len"]
    fields: dict[str, Any] = {"max_tokens": 4, "prompt": "word " * (2 * most)}
    assert complete(client, **fields, truncate_prompt_tokens=-1)["usage"]["prompt_tokens"] == most - 4
    assert refused(client, COMPLETIONS, **fields)[0] == "prompt"
    for number in (0, most + 1):
        assert refused(client, truncate_prompt_tokens=number)[0] == "truncate_prompt_tokens"
    far_too_long = [USER | {"content": "a" * ((8 << 20) - 1000)}]
    assert refused(client, messages=far_too_long, truncate_prompt_tokens=-1)[0] == "messages"


def test_special_tokens_of_prompts(client: TestClient) -> None:
    for add in (True, False):
        fields: dict[str, Any] = {"add_special_tokens": add}
        [choice] = complete(client, **fields, return_token_ids=True)["choices"]
        assert choice["prompt_token_ids"] == tokens(client, prompt="The key of room", **fields)
        answer = chat(client, **fields, return_token_ids=True)
        assert answer["prompt_token_ids"] == tokens(client, messages=[USER], **fields)


def test_a_message_that_is_continued(client: TestClient) -> None:
    messages = [USER, {"role": "assistant", "content": "Folio is"}]
    fields: dict[str, Any] = {"messages": messages, "continue_final_message": True}
    answer = chat(client, **fields, return_token_ids=True)
    open_ended = tokens(client, messages=messages, continue_final_message=True)
    assert answer["prompt_token_ids"] == open_ended
    text = client.post("/detokenize", json={"tokens": open_ended}).json()["prompt"]
    assert text.endswith("Folio is")
    content = answer["choices"][0]["message"]["content"]
    echoed = chat(client, **fields, echo=True)
    assert echoed["choices"][0]["message"]["content"] == "Folio is" + content
    streamed = events(client, CHAT, **fields, echo=True, max_tokens=8)
    assert text_of(streamed) == "Folio is" + content
    assert chat(client, echo=True)["choices"] == chat(client)["choices"]  # the last message is the user's


def test_what_cannot_be_continued(client: TestClient) -> None:
    both = refused(client, continue_final_message=True, add_generation_prompt=True)
    assert (both[0], "exclude each other" in both[1]) == ("continue_final_message", True)
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    for message in ({"role": "assistant", "content": " "}, {"role": "assistant", "tool_calls": [call]}):
        assert refused(client, continue_final_message=True, messages=[USER, message])[1].startswith("the last message")


def test_the_prompt_before_an_answer_can_be_left_out(client: TestClient) -> None:
    answer = chat(client, add_generation_prompt=False, return_token_ids=True)
    assert answer["prompt_token_ids"] == tokens(client, messages=[USER], add_generation_prompt=False)
    assert len(answer["prompt_token_ids"]) < chat(client)["usage"]["prompt_tokens"]


SCHEMA = {"type": "object", "properties": {"a": {"enum": [7]}}, "required": ["a"], "additionalProperties": False}


def tags(begin: str) -> dict[str, Any]:
    structure = {"begin": begin, "schema": SCHEMA, "end": "!"}
    return {"type": "structural_tag", "triggers": [begin[:3]], "structures": [structure]}


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"json": SCHEMA}}, r'\{"a": ?7\}'),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, r'\{"a": ?7\}'),
        ({"structured_outputs": {"regex": "[xy]{3}z"}}, "[xy]{3}z"),
        ({"structured_outputs": {"choice": ["red", "blue"]}}, "red|blue"),
        ({"structured_outputs": {"grammar": 'start: "key" NUMBER\nNUMBER: /[0-9]{2}/'}}, "key[0-9]{2}"),
        ({"structured_outputs": {"grammar": 'root ::= "key" digit digit\ndigit ::= [0-9]'}}, "key[0-9]{2}"),
        ({"structured_outputs": {"structural_tag": json.dumps(tags("Folio is"))}}, r'Folio is\{"a": ?7\}!.*'),
        ({"response_format": tags("Folio is")}, r'Folio is\{"a": ?7\}!.*'),
        ({"response_format": tags("<f=a>")}, "Folio is a.*"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}, r'\{"a": ?7\}'),
        ({"response_format": {"type": "text"}}, "Folio is a.*"),
    ],
)
def test_structured_outputs(client: TestClient, fields: dict[str, Any], pattern: str) -> None:
    assert re.fullmatch(pattern, chat(client, **fields, max_tokens=30)["choices"][0]["message"]["content"], re.DOTALL)
    if "Folio" not in pattern:
        assert re.fullmatch(pattern, complete(client, **fields, max_tokens=30)["choices"][0]["text"])


@pytest.mark.parametrize(
    "structure",
    [
        {"grammar": "root ::= missing"},
        {"grammar": "root ::= " + "(" * 5000},
        {"grammar": 'first ::= "a"'},
        {"structural_tag": {"triggers": ["<x"], "structures": [{"begin": "<f=a>", "schema": {}, "end": ""}]}},
        {"structural_tag": {"triggers": [""], "structures": [{"begin": "<f=a>", "schema": {}, "end": ""}]}},
    ],
)
def test_structures_that_cannot_be_used(client: TestClient, structure: dict[str, Any]) -> None:
    param, message = refused(client, structured_outputs=structure)
    assert param == "structure"
    assert len(message) < 1000


def test_the_tier_is_the_default(client: TestClient) -> None:
    assert chat(client, service_tier="flex")["service_tier"] == "default"
    chunks = events(client, CHAT, messages=[USER], max_tokens=4, service_tier="auto")
    assert {chunk["service_tier"] for chunk in chunks} == {"default"}
    assert "service_tier" not in chat(client)


def test_responses_repeat_what_they_were_asked_for(client: TestClient) -> None:
    body = {"model": "builtin", "input": "x", "max_output_tokens": 4, "truncation": "auto", "store": True}
    answer = client.post("/v1/responses", json=body | {"text": {"verbosity": "low"}}).json()
    assert (answer["truncation"], answer["store"], answer["text"]["verbosity"]) == ("auto", False, "low")
    long = client.post("/v1/responses", json=body | {"input": "word " * 10_000})
    assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded")
