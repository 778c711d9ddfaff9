"""`/v1/responses` through OpenAI's client, over an ingress with fake replicas."""

from __future__ import annotations

import json
import logging
from typing import Any

import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel
from starlette.testclient import TestClient

from folio.app.api.responses.body import ResponsesRequest
from folio.app.errors import ContextLengthError, EngineError, OverloadedError, RequestError
from tests.app.api.responses.asking import SMALL_FUNCTION
from tests.fakes.replicas import CALL, TOKENIZER, Engines, Pieces, ingress_with
from tests.local_server import guarded_api

USER = {"role": "user", "content": "x"}


def client_of(engines: Engines, **settings: Any) -> openai.OpenAI:
    api = TestClient(guarded_api(ingress_with(engines, **settings)), base_url="http://folio")
    return openai.OpenAI(base_url="http://folio/v1", api_key="none", max_retries=0, http_client=api)


def test_a_response_as_the_client_reads_it() -> None:
    client = client_of(engines := Engines(text="Hello", context=400))
    answer = client.responses.create(
        model="m", input="Who?", instructions="Be brief.", metadata={"a": "b"}, max_output_tokens=9, top_p=0.5
    )
    assert answer.output_text == "Hello"
    assert (answer.status, answer.store, answer.metadata, answer.top_p) == ("completed", False, {"a": "b"}, 0.5)
    assert answer.usage is not None
    [call] = engines.calls
    assert answer.usage.input_tokens == len(call.prompt_token_ids)
    assert answer.usage.input_tokens_details.cached_tokens == 1
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert (call.params.max_tokens, call.params.top_p) == (9, 0.5)
    assert TOKENIZER.decode(call.prompt_token_ids) == "<|system|>Be brief.<|end|><|user|>Who?<|end|><|assistant|>"
    assert answer.id == f"{call.request_id}.r7"  # can be forked
    # The client itself does not validate types.
    raw = client.responses.with_raw_response.create(model="m", input="Who?", tools=[SMALL_FUNCTION]).text  # type: ignore[list-item]
    Response.model_validate_json(raw)


def test_the_events_of_a_text() -> None:
    client = client_of(Pieces("Hel", "", "lo"))
    events: list[Any] = list(client.responses.create(model="m", input=[USER], stream=True))  # type: ignore[list-item]
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "Hello"
    assert (events[2].item.status, events[2].item.content) == ("in_progress", [])
    assert events[-2].item == events[-1].response.output[0]
    assert len({event.item_id for event in events if hasattr(event, "item_id")}) == 1
    with client.responses.stream(model="m", input="x") as stream:
        assert stream.get_final_response().output_text == "Hello"


async def test_a_part_begins_without_log_probabilities() -> None:
    request = ResponsesRequest.model_validate({"model": "m", "input": "x", "top_logprobs": 0})
    events = [event async for event in ingress_with(Pieces("Hel", "lo")).responses_stream(request)]
    [begun] = [event for event in events if event.type == "response.content_part.added"]
    [ended] = [event for event in events if event.type == "response.content_part.done"]
    assert (len(begun.part.logprobs), len(ended.part.logprobs)) == (0, 2)


@pytest.mark.parametrize(("text", "status"), [('{"x": 1', "incomplete"), ('{"x": 1}}\n', "completed")])
def test_a_stop_string_within_a_call(text: str, status: str) -> None:
    """Regression: a client ran the call without the rest of its arguments."""
    engines = Pieces('<tool_call>\n{"name": "f", "arguments": ' + text, stop_reason="STOP")
    answer = client_of(engines).responses.create(model="m", input="x", tools=[SMALL_FUNCTION])  # type: ignore[list-item]
    assert (answer.status, answer.output[0].type, answer.output[0].status) == ("completed", "function_call", status)


def test_output_that_is_cut_off() -> None:
    client = client_of(Pieces("Hel", finish_reason="length"))
    answer = client.responses.create(model="m", input="x", max_output_tokens=1)
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output[0].status == "incomplete"  # type: ignore[union-attr]


def test_an_empty_answer_is_a_message() -> None:
    answer = client_of(Pieces("")).responses.create(model="m", input="x")
    assert (len(answer.output), answer.output_text) == (1, "")


class Answer(BaseModel):
    x: int


def test_output_that_follows_a_schema() -> None:
    client = client_of(engines := Engines(text='{"x": 5}'))
    assert client.responses.parse(model="m", input="x", text_format=Answer).output_parsed == Answer(x=5)
    structure = engines.calls[0].params.structure
    assert (structure.kind, json.loads(structure.spec)["required"]) == ("json", ["x"])


def test_calls_of_functions_and_their_outputs() -> None:
    """The output of an answer is part of the next input, unchanged."""
    client = client_of(engines := Pieces("Well.", f"\n{CALL}"))
    create: Any = client.responses.create
    first = create(model="m", input=[USER], tools=[SMALL_FUNCTION])
    message, call = first.output
    assert message.content[0].text == "Well."
    assert (call.name, json.loads(call.arguments), call.status) == ("f", {"x": 1}, "completed")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "five"}
    create(model="m", input=[USER, *first.output, result, USER], tools=[SMALL_FUNCTION], tool_choice="none")
    prompt = TOKENIZER.decode(engines.calls[1].prompt_token_ids)
    assert "<|assistant|>Well.\n<tool_call>" in prompt  # one message, as the model wrote it
    assert "<tool_response>\nfive\n" in prompt
    create(model="m", input="x", tools=[SMALL_FUNCTION], tool_choice={"type": "function", "name": "f"})
    assert engines.calls[2].params.structure is not None

    events = list(create(model="m", input="x", tools=[SMALL_FUNCTION], stream=True))
    deltas = [event for event in events if event.type == "response.function_call_arguments.delta"]
    [done] = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert json.loads("".join(event.delta for event in deltas)) == json.loads(done.arguments) == {"x": 1}
    final = events[-1].response
    assert [item.type for item in final.output] == ["message", "function_call"]
    assert {event.output_index for event in deltas} == {1}
    added = [event.item.id for event in events if event.type == "response.output_item.added"]
    assert added == [item.id for item in final.output]


def test_reasoning_is_an_item_and_goes_back() -> None:
    engines = Pieces("<think>", "so", "</think>", f"Well.{CALL}", "More.", encodes=True)
    create: Any = client_of(engines, reasoning_parser="qwen3").responses.create
    events = list(create(model="m", input=[USER], tools=[SMALL_FUNCTION], stream=True))
    deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    [done] = [event for event in events if event.type == "response.reasoning_text.done"]
    assert ("".join(deltas), done.text) == ("so", "so")
    final = events[-1].response
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "message"]
    assert [event.item.type for event in events if event.type == "response.output_item.done"] == [
        item.type for item in final.output
    ]
    assert final.output[0].content[0].text == "so"
    num_tokens = sum(len(TOKENIZER.encode(text)) for text in ("<think>", "so", "</think>"))
    assert final.usage.output_tokens_details.reasoning_tokens == num_tokens
    result = {"type": "function_call_output", "call_id": final.output[2].call_id, "output": "five"}
    create(model="m", input=[USER, *final.output[:3], result], tools=[SMALL_FUNCTION])
    Response.model_validate(final.model_dump())


def test_reasoning_is_the_summary_that_a_request_asks_for() -> None:
    """Regression: Codex and the AI SDK show summaries alone."""
    engines = Pieces("<think>", "so", "</think>", "Well.", encodes=True)
    create: Any = client_of(engines, reasoning_parser="qwen3").responses.create
    events = list(create(model="m", input=[USER], stream=True, reasoning={"summary": "auto"}))
    assert [event.type.removeprefix("response.") for event in events[2:8]] == [
        "output_item.added",
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
        "output_item.done",
    ]
    assert (events[3].part.text, events[4].delta, events[5].text, events[6].part.text) == ("", "so", "so", "so")
    reasoning, message = events[-1].response.output
    assert (reasoning.summary[0].text, reasoning.content, message.content[0].text) == ("so", [], "Well.")
    Response.model_validate(events[-1].response.model_dump())
    create(model="m", input=[USER, reasoning, message, USER])
    with_summary = engines.calls[-1].prompt_token_ids
    [whole] = [item for item in create(model="m", input=[USER]).output if item.type == "reasoning"]
    create(model="m", input=[USER, whole, message, USER])
    assert engines.calls[-1].prompt_token_ids == with_summary


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (EngineError("a step failed"), "server_error"),
        (OverloadedError("too many"), "rate_limit_exceeded"),
        (RequestError("wrong", "prompt"), "invalid_prompt"),
        (ContextLengthError("too long", "prompt"), "context_length_exceeded"),
    ],
)
def test_a_stream_that_fails_later_ends_with_a_failed_response(
    error: Exception, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    client = client_of(Pieces("Hel", error=error))
    *_, last = client.responses.create(model="m", input="x", stream=True)
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert (last.response.error.code, last.response.error.message) == (code, str(error))
    assert (last.response.status, last.response.output_text) == ("failed", "Hel")
    assert last.response.output[0].status == "incomplete"  # type: ignore[union-attr]
    [record] = [record for record in caplog.records if "failed" in record.getMessage()]
    unexpected = code == "server_error"
    assert (record.levelno, record.exc_info is not None) == (logging.ERROR if unexpected else logging.INFO, unexpected)


def test_a_stream_refused_at_once_has_a_status() -> None:
    client = client_of(Engines(OverloadedError("too many", 30.0)))
    with pytest.raises(openai.RateLimitError) as caught:
        client.responses.create(model="m", input="x", stream=True)
    assert int(caught.value.response.headers["retry-after"]) >= 1


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"input": []}, "input", "it needs an item, or send instructions"),
        ({"input": [{"type": "item_reference", "id": "i"}]}, "input", "with `store: false`"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "input_image"),
        ({"store": "yes"}, "store", "true or false"),
        ({"previous_response_id": "resp-1"}, "previous_response_id", "not stored here"),
        ({"conversation": "c"}, "conversation", "use previous_response_id"),
        ({"background": True}, "background", "lives as long as its connection"),
        ({"truncation": "some"}, "truncation", "'auto' or 'disabled'"),
        ({"tools": [{"type": "function"}]}, "tools", "name: is missing"),
        ({"tools": [{"type": {"x": 1}}]}, "tools", "type"),
        ({"input": [{"type": {"x": 1}}]}, "input", "type"),
        ({"input": [7]}, "input", "object"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"reasoning": {"effort": "huge"}}, "reasoning", "'none'"),
        ({"extra_body": {"n": 2}}, "n", "less than or equal to 1"),
        ({"extra_body": {"guided_json": {}}, "text": {"format": {"type": "json_object"}}}, "text", "only one of text"),
    ],
)
def test_errors_name_the_field(fields: dict[str, Any], param: str, message: str) -> None:
    client = client_of(Engines())
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        client.responses.create(**({"model": "m", "input": "x"} | fields))
    assert caught.value.param == param


def test_fields_that_change_nothing_are_accepted() -> None:
    fields: dict[str, Any] = {
        "store": True,
        "background": False,
        "truncation": "auto",
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": "none"},
        "service_tier": "auto",
        "safety_identifier": "s",
        "max_tool_calls": 3,
        "tools": [],
        "tool_choice": "auto",
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "stream_options": {"include_obfuscation": False},
    }
    nulls = dict.fromkeys(("conversation", "previous_response_id", "temperature", "metadata", "user", "prompt"))
    client = client_of(engines := Engines())
    client.responses.create(model="m", input="x", prompt_cache_key="k", **fields, **nulls)
    plain = client_of(others := Engines())
    plain.responses.create(model="m", input="x")
    [call], [other] = engines.calls, others.calls
    assert (call.prompt_token_ids, call.params) == (other.prompt_token_ids, other.params)
    assert (call.session, other.session) == ("k", None)
