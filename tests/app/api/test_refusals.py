"""Bodies that are refused: the error names the field, and says what is allowed. Over an ingress with fake replicas."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient

from folio.app.engine.sampling.params import MAX_LOGPROBS
from tests.app.api.asking import BODIES, CHAT, COMPLETIONS, MESSAGES, PARAMETERS, RESPONSES, Long, transport_of

FORKS = "/v1/forks"
TEXT_PART = {"type": "text", "text": "x"}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aaaa"}}
IMAGE_URL = {"type": "image_url", "image_url": {"url": "x"}}
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": "x"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL: Any = {"name": "f", "input_schema": PARAMETERS}
JSON_OBJECT = {"type": "json_object"}
NAMES = {f"top_p{' ' * i}": 1 for i in range(1, 10)}


def said(content: Any, role: str = "user", **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} | more]}


def form(**fields: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": fields}}


@pytest.fixture(scope="module")
def client() -> TestClient:
    return transport_of(Long("x"))


@pytest.mark.parametrize(
    ("path", "fields", "param", "message"),
    [
        (COMPLETIONS, {"prompt": None}, "prompt", "prompt: is missing"),
        (COMPLETIONS, {"max_tokens": "10"}, "max_tokens", "must be an integer"),
        (COMPLETIONS, {"max_tokens": True}, "max_tokens", "must be an integer"),
        (COMPLETIONS, {"max_tokens": -1}, "max_tokens", "at least 1"),
        (COMPLETIONS, {"max_tokens": 0}, "max_tokens", "max_tokens is 0"),
        (COMPLETIONS, {"max_token": 1}, "max_token", "unknown field; the nearest is max_tokens"),
        (COMPLETIONS, NAMES, "top_p ", "and 4 more"),
        (COMPLETIONS, {"temperature": "hot"}, "temperature", "must be a number"),
        (COMPLETIONS, {"temperature": 2.5}, "temperature", "must be less than or equal to 2"),
        (COMPLETIONS, {"top_p": 2}, "top_p", "between 0 and 1"),
        (COMPLETIONS, {"top_k": -2}, "top_k", "between 0"),
        (COMPLETIONS, {"n": 0}, "n", "between 1"),
        (COMPLETIONS, {"n": 3, "best_of": 2}, "best_of", "between 3"),
        (COMPLETIONS, {"suffix": "y"}, "suffix", "leave it out"),
        (COMPLETIONS, {"logit_bias": {"a": 1}}, "logit_bias", "token ids"),
        (COMPLETIONS, {"logit_bias": {"x": 1.0}}, "logit_bias", "'x'"),
        (COMPLETIONS, {"logit_bias": {"-1": 1.0}}, "logit_bias", "token ids"),
        (COMPLETIONS, {"logit_bias": {"1": 101.0}}, "logit_bias", "between -100 and 100"),
        (COMPLETIONS, {"logprobs": MAX_LOGPROBS + 1}, "logprobs", f"between 0 and {MAX_LOGPROBS}"),
        (COMPLETIONS, {"guided_regex": "a", "guided_choice": ["a"]}, "guided_regex", "only one of"),
        (COMPLETIONS, {"response_format": JSON_OBJECT, "guided_json": {}}, "response_format", "only one of"),
        (COMPLETIONS, {"prompt": [0] + ["x"] * 9}, "prompt", "prompt[1]: must be an integer"),
        (COMPLETIONS, {"prompt": []}, "prompt", "at least one"),
        (COMPLETIONS, {"store": 0}, "store", "must be true or false"),
        (COMPLETIONS, {"service_tier": "x"}, "service_tier", "'flex'"),
        (COMPLETIONS, {"metadata": {"a": 1}}, "metadata", "metadata.a: must be a string"),
        (COMPLETIONS, {"timeout_s": 0}, "timeout_s", "greater than 0"),
        (COMPLETIONS, {"tenant": ""}, "tenant", "at least 1"),
        (COMPLETIONS, {"cache_ttl_s": -1}, "cache_ttl_s", "greater than or equal to 0"),
        (COMPLETIONS, {"cache_ttl_s": 86_401}, "cache_ttl_s", "less than or equal to 86400"),
        (COMPLETIONS, {"cache_ttl_s": "5m"}, "cache_ttl_s", "must be a number"),
        (COMPLETIONS, {"prompt_cache_retention": "1h"}, "prompt_cache_retention", "'24h'"),
        (FORKS, {"prompt_logprobs": 1}, "prompt_logprobs", "computed already"),
        (CHAT, {"messages": None}, "messages", "messages: is missing"),
        (CHAT, said([TEXT_PART, {"type": "text"}]), "messages", "messages[0].content[1].text: is missing"),
        (CHAT, said([IMAGE_URL]), "messages", "text only; leave out the part of type 'image_url'"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages", "messages[0]: content is missing"),
        (CHAT, said(5), "messages", "messages[0].content: must be a string"),
        (CHAT, said("x", "king"), "messages", ".role: must be 'system', 'developer', 'user', 'assistant' or 'tool'"),
        (CHAT, said("x", reasoning="y"), "messages", "only an assistant's message"),
        (CHAT, said("x", tool_call_id="call_1"), "messages", "tool_call_id"),
        (CHAT, said("x", tool_calls=[CALL]), "messages", "tool_calls"),
        (CHAT, {"tool_choice": "x"}, "tool_choice", "must be 'none', 'auto' or 'required' or an object"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs", "logprobs is not true"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "between 0 and 20"),
        (CHAT, {"response_format": JSON_OBJECT, "guided_json": {}}, "response_format", "only one of"),
        (CHAT, {"response_format": {"type": "xml"}}, "response_format", "response_format"),
        (CHAT, {"response_format": {"type": "json_schema"}}, "response_format", "json_schema: is missing"),
        (CHAT, form(schema={}), "response_format", "name: is missing"),
        (CHAT, form(name="n", schema="{}"), "response_format", "schema: must be an object"),
        (CHAT, {"structured_outputs": {"regex": "a"}, "guided_regex": "a"}, "guided_regex", "only one of"),
        (CHAT, {"structured_outputs": {}}, "structured_outputs", "exactly one"),
        (CHAT, {"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "exactly one"),
        (CHAT, {"structured_outputs": {"json_object": False}}, "structured_outputs", "exactly one"),
        (CHAT, {"structured_outputs": {"structural_tag": "{"}}, "structured_outputs", "EOF"),
        (
            CHAT,
            {"structured_outputs": {"structural_tag": {"triggers": ["<"], "structures": []}}},
            "structured_outputs",
            "at least 1",
        ),
        (CHAT, {"functions": []}, "functions", "use tools"),
        (CHAT, {"function_call": "auto"}, "function_call", "use tool_choice"),
        (CHAT, {"audio": {}}, "audio", "answers are text"),
        (CHAT, {"modalities": ["text", "audio"]}, "modalities", "answers are text"),
        (CHAT, {"reasoning_effort": "huge"}, "reasoning_effort", "'none'"),
        (CHAT, {"verbosity": "loud"}, "verbosity", "'high'"),
        (CHAT, {"temperature": 2.01}, "temperature", "less than or equal to 2"),
        (CHAT, {"temperature": -0.1}, "temperature", "greater than or equal to 0"),
        (CHAT, {"chat_template": "{{ messages }}"}, "chat_template", "own template"),
        (CHAT, {"chat_template_kwargs": {str(i): i for i in range(65)}}, "chat_template_kwargs", "at most 64"),
        (CHAT, {"documents": ["x"]}, "documents", "object"),
        (CHAT, {"request_id": "a\r\nb"}, "request_id", "match"),
        (CHAT, {"request_id": ""}, "request_id", "match"),
        (CHAT, {"request_id": "a" * 129}, "request_id", "match"),
        (CHAT, {"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "greater than or equal to -1"),
        (CHAT, {"allowed_token_ids": []}, "allowed_token_ids", "at least 1"),
        (CHAT, {"allowed_token_ids": [0] * 4097}, "allowed_token_ids", "at most 4096"),
        (CHAT, {"priority": 2**31}, "priority", "less than"),
        (CHAT, {"metadata": {"k" * 65: "v"}}, "metadata", "at most 64"),
        (CHAT, {"thinking": {"type": "adaptive?"}}, "thinking", "thinking"),
        (CHAT, {"thinking": 1}, "thinking", "thinking"),
        (CHAT, {"thinking_token_budget": -1}, "thinking_token_budget", "greater than or equal to 0"),
        (
            CHAT,
            {"thinking": {"type": "enabled", "budget_tokens": 9}, "thinking_token_budget": 8},
            "thinking_token_budget",
            "leave one out",
        ),
        (RESPONSES, {"input": []}, "input", "it needs an item, or send instructions"),
        (RESPONSES, {"input": [{"type": "item_reference", "id": "i"}]}, "input", "with `store: false`"),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "input_image"),
        (RESPONSES, {"input": [{"type": {"x": 1}}]}, "input", "type"),
        (RESPONSES, {"input": [7]}, "input", "object"),
        (RESPONSES, {"store": "yes"}, "store", "true or false"),
        (RESPONSES, {"previous_response_id": "resp-1"}, "previous_response_id", "not stored here"),
        (RESPONSES, {"conversation": "c"}, "conversation", "use previous_response_id"),
        (RESPONSES, {"background": True}, "background", "lives as long as its connection"),
        (RESPONSES, {"truncation": "some"}, "truncation", "'auto' or 'disabled'"),
        (RESPONSES, {"tools": [{"type": "function"}]}, "tools", "name: is missing"),
        (RESPONSES, {"tools": [{"type": {"x": 1}}]}, "tools", "type"),
        (RESPONSES, {"tool_choice": "required"}, "tool_choice", "no tools"),
        (RESPONSES, {"reasoning": {"effort": "huge"}}, "reasoning", "'none'"),
        (RESPONSES, {"max_tool_calls": 0}, "max_tool_calls", "greater than or equal to 1"),
        (RESPONSES, {"n": 2}, "n", "less than or equal to 1"),
        (RESPONSES, {"guided_json": {}, "text": {"format": JSON_OBJECT}}, "text", "only one of text"),
        (MESSAGES, {"messages": []}, None, "messages: must have at least 1"),
        (MESSAGES, said([]), None, "messages have no content"),
        (MESSAGES, {"max_tokens": 0}, None, "max_tokens: must be greater than or equal to 1"),
        (MESSAGES, {"temperature": 1.5}, None, "temperature: must be less than or equal to 1"),
        (MESSAGES, said("x", "king"), None, "role: must be 'user', 'assistant' or 'system'"),
        (MESSAGES, said([IMAGE]), None, "takes text only; leave out the part of type 'image'"),
        (MESSAGES, said([RESULT, IMAGE]), None, "text only"),
        (MESSAGES, said([{"type": "document"}]), None, "takes text only"),
        (MESSAGES, said([{"text": "x"}]), None, "blocks here are of the type"),
        (MESSAGES, said([RESULT], "assistant"), None, "belongs to a message of the user"),
        (MESSAGES, said([{"type": "thinking", "thinking": "x"}]), None, "of the assistant"),
        (MESSAGES, {"system": [{"type": "image"}]}, None, "takes text only"),
        (MESSAGES, {"tools": [{"name": "f"}]}, None, "tools[0].input_schema: is missing"),
        (MESSAGES, {"tools": [TOOL, TOOL]}, None, "two tools have the name 'f'"),
        (MESSAGES, {"tool_choice": {"type": "any"}}, None, "there are no tools"),
        (MESSAGES, {"tools": [TOOL], "tool_choice": {"type": "tool"}}, None, "needs a name"),
        (
            MESSAGES,
            {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}},
            None,
            "'g', which is not among the",
        ),
        (MESSAGES, {"stop_sequences": [""]}, None, "stop_sequences takes at most 16 strings, none of them empty"),
        (MESSAGES, {"stop_sequences": ["x"] * 17}, None, "at most 16"),
        (MESSAGES, {"output_config": {"format": {"type": "text"}}}, None, "must be 'json_schema'"),
        (MESSAGES, {"stop": ["x"]}, None, "stop_sequences here"),
        (MESSAGES, {"n": 2}, None, "less than or equal to 1"),
        (MESSAGES, {"prompt_logprobs": 1}, None, "use /v1/completions"),
    ],
)
def test_a_refusal(client: TestClient, path: str, fields: dict[str, Any], param: str | None, message: str) -> None:
    """pydantic's own places were such as `messages.0.content.parts.1.type`."""
    least = BODIES.get(path, {"request_id": "cmpl-1.r"})
    body = {name: value for name, value in ({"model": "m"} | least | fields).items() if value is not None}
    answer = client.post(path, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error.get("param")) == (400, "invalid_request_error", param)
    assert message in error["message"]


def test_a_body_is_an_object(client: TestClient) -> None:
    for path in BODIES:
        answer = client.post(path, json=[1, 2])
        assert (answer.status_code, "must be an object" in answer.json()["error"]["message"]) == (400, True)
