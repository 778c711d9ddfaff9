"""`/v1/responses` through OpenAI's client, over an ingress with fake replicas."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from openai.types.responses import Response
from pydantic import BaseModel

from folio.app.api.responses.body import ResponsesRequest
from tests.app.api.asking import SMALL_FUNCTION, X, openai_of, prompt_of
from tests.fakes.replicas import CALL, TOKENIZER, Engines, Pieces, ingress_with


def test_a_response_as_the_client_reads_it() -> None:
    client = openai_of(engines := Engines(text="Hello", context=400))
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
    raw = client.responses.with_raw_response.create(model="m", input="Who?", tools=[SMALL_FUNCTION]).text
    Response.model_validate_json(raw)


async def test_a_part_begins_without_log_probabilities() -> None:
    request = ResponsesRequest.model_validate({"model": "m", "input": "x", "top_logprobs": 0})
    events = [event async for event in ingress_with(Pieces("Hel", "lo")).responses_stream(request)]
    [begun] = [event for event in events if event.type == "response.content_part.added"]
    [ended] = [event for event in events if event.type == "response.content_part.done"]
    assert (len(begun.part.logprobs), len(ended.part.logprobs)) == (0, 2)


@pytest.mark.parametrize("texts", [("Hel", "lo"), ("Well.", f"\n{CALL}")])
def test_the_client_adds_the_events_up(texts: tuple[str, ...]) -> None:
    client = openai_of(Pieces(*texts))
    whole = client.responses.create(model="m", input="x", tools=[SMALL_FUNCTION])
    with client.responses.stream(model="m", input="x", tools=[SMALL_FUNCTION]) as stream:
        final = stream.get_final_response()
    assert (final.output_text, final.status) == (whole.output_text, whole.status)
    assert [item.type for item in final.output] == [item.type for item in whole.output]


def test_output_goes_back() -> None:
    """The output of an answer is part of the next input, unchanged."""
    engines = Pieces("<think>", "so", "</think>", "Well.", f"\n{CALL}", "More.", encodes=True)
    create = openai_of(engines, reasoning_parser="qwen3").responses.create
    first = create(model="m", input=[X], tools=[SMALL_FUNCTION])
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call", "message"]
    result = {"type": "function_call_output", "call_id": first.output[2].call_id, "output": "five"}
    create(model="m", input=[X, *first.output[:3], result, X], tools=[SMALL_FUNCTION], tool_choice="none")
    assert "<|assistant|>Well.\n<tool_call>" in prompt_of(engines)  # one message, as the model wrote it
    assert "<tool_response>\nfive\n" in prompt_of(engines)


class Answer(BaseModel):
    x: int


def test_output_that_follows_a_schema() -> None:
    client = openai_of(engines := Engines(text='{"x": 5}'))
    assert client.responses.parse(model="m", input="x", text_format=Answer).output_parsed == Answer(x=5)
    structure = engines.calls[0].params.structure
    assert (structure.kind, json.loads(structure.spec)["required"]) == ("json", ["x"])


def test_reasoning_is_the_summary_that_a_request_asks_for() -> None:
    """Regression: Codex and the AI SDK show summaries alone."""
    engines = Pieces("<think>", "so", "</think>", "Well.", encodes=True)
    create = openai_of(engines, reasoning_parser="qwen3").responses.create
    events = list(create(model="m", input=[X], stream=True, reasoning={"summary": "auto"}))
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
    create(model="m", input=[X, reasoning, message, X])
    with_summary = engines.calls[-1].prompt_token_ids
    [whole] = [item for item in create(model="m", input=[X]).output if item.type == "reasoning"]
    create(model="m", input=[X, whole, message, X])
    assert engines.calls[-1].prompt_token_ids == with_summary


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
    client = openai_of(engines := Engines())
    client.responses.create(model="m", input="x", prompt_cache_key="k", **fields, **nulls)
    plain = openai_of(others := Engines())
    plain.responses.create(model="m", input="x")
    [call], [other] = engines.calls, others.calls
    assert call.prompt_token_ids == other.prompt_token_ids
    assert replace(call.params, seed=None) == replace(other.params, seed=None)
    assert (call.session, other.session) == ("k", None)
