"""Bodies as sampling parameters, structures and prompts, and errors that name the field."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from folio.app.api.openai.bodies import MAX_PROMPTS, CompletionRequest, ForkRequest
from folio.app.api.openai.chat_body import MAX_MESSAGES, ChatCompletionRequest
from folio.app.api.openai.token_bodies import DetokenizeRequest, TokenizeRequest
from folio.app.api.output.formats import REASONING_SYNTAXES, TOOL_SYNTAXES, OutputFormat
from folio.app.api.output.plan import OutputPlan
from folio.app.api.responses.body import ResponsesRequest
from folio.app.engine.sampling.params import SamplingParams, Structure

USER = {"role": "user", "content": "x"}


def completion(**fields: Any) -> CompletionRequest:
    return CompletionRequest.model_validate({"model": "m", "prompt": "x"} | fields)


def chat(**fields: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest.model_validate({"model": "m", "messages": [USER]} | fields)


def test_fields_that_are_left_out_or_null_have_the_default() -> None:
    assert completion().sampling_params() == SamplingParams()
    assert chat().sampling_params() == SamplingParams(max_tokens=None)
    nothing = dict.fromkeys(("n", "temperature", "top_p", "stop", "logit_bias", "seed", "logprobs", "early_stopping"))
    assert completion(**nothing).sampling_params() == SamplingParams()


def test_every_field_becomes_a_parameter() -> None:
    fields: dict[str, Any] = {
        "n": 2,
        "best_of": 3,
        "max_tokens": 7,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_k": 4,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.3,
        "bad_words": ["bad"],
        "seed": 5,
        "stop": ["a", "b"],
        "stop_token_ids": [6],
        "include_stop_str": True,
        "ignore_eos": True,
        "prompt_logprobs": 1,
        "allowed_token_ids": [3, 9],
        "skip_special_tokens": False,
    }
    expected = SamplingParams(**fields, logit_bias={12: -1.5}, structure=Structure("regex", "a+"))
    more = {"logit_bias": {"12": -1.5}, "guided_regex": "a+"}
    assert completion(**fields, **more).sampling_params() == expected
    assert chat(**fields, **more).sampling_params() == expected
    del fields["prompt_logprobs"]
    fork = ForkRequest.model_validate({"model": "m", "request_id": "r", **fields})
    assert fork.sampling_params() == SamplingParams(**fields)
    beams: dict[str, Any] = {"use_beam_search": True, "length_penalty": 0.5, "early_stopping": "never", "best_of": 4}
    assert chat(**beams).sampling_params() == SamplingParams(max_tokens=None, **beams)


@pytest.mark.parametrize(
    ("body", "of_output", "of_prompt"),
    [
        (completion(logprobs=3), 3, None),
        (completion(logprobs=3, echo=True), 3, 3),
        (completion(logprobs=3, echo=True, prompt_logprobs=5), 3, 5),
        (completion(echo=True), None, None),
        (chat(logprobs=True), 0, None),
        (chat(logprobs=True, top_logprobs=20), 20, None),
        (chat(logprobs=False), None, None),
    ],
)
def test_logprobs_of_both_kinds(body: Any, of_output: int | None, of_prompt: int | None) -> None:
    params = body.sampling_params()
    assert (params.logprobs, params.prompt_logprobs) == (of_output, of_prompt)


def test_an_echo_alone_generates_a_token() -> None:
    assert completion(echo=True, max_tokens=0).sampling_params().max_tokens == 1


@pytest.mark.parametrize(
    ("prompt", "prompts"), [("a", ["a"]), ([1, 2], [[1, 2]]), (["a", ""], ["a", ""]), ([[1], [2, 3]], [[1], [2, 3]])]
)
def test_prompts(prompt: object, prompts: object) -> None:
    assert completion(prompt=prompt).prompts == prompts


@pytest.mark.parametrize(
    ("prompt", "place"),
    [
        ([1, -1], ("prompt", "tokens", 1)),
        ([1, "a"], ("prompt", "tokens", 1)),
        ([1, 2**31], ("prompt", "tokens", 1)),
        (["a", 1], ("prompt", "texts", 1)),
        ([[1], "a"], ("prompt", "batch", 1)),
        ([[1], [True]], ("prompt", "batch", 1, 0)),
        (5, ("prompt", "text")),
    ],
)
def test_errors_of_a_prompt_describe_only_its_kind(prompt: object, place: object) -> None:
    with pytest.raises(ValidationError) as caught:
        completion(prompt=prompt)
    assert [error["loc"] for error in caught.value.errors()] == [place]


MANY = 100_000


@pytest.mark.parametrize(
    ("body", "fields"),
    [
        (CompletionRequest, {"prompt": [0] + [""] * MANY}),
        (CompletionRequest, {"prompt": ["", *([0] * MANY)]}),
        (CompletionRequest, {"prompt": [[""] * MANY]}),
        (CompletionRequest, {"prompt": [[1], *([0] * MANY)]}),
        (CompletionRequest, {"prompt": "x", "bad_words": [0] * MANY}),
        (CompletionRequest, {"prompt": "x", "stop_token_ids": [""] * MANY}),
        (CompletionRequest, {"prompt": "x", "guided_choice": [0] * MANY}),
        (CompletionRequest, {"prompt": "x", "logit_bias": {str(i): "" for i in range(MANY)}}),
        (CompletionRequest, {"prompt": "x", "metadata": {str(i): 0 for i in range(MANY)}}),
        (CompletionRequest, {"prompt": "x"} | {str(i): 0 for i in range(MANY)}),
        (ChatCompletionRequest, {"messages": [0] * MANY}),
        (ChatCompletionRequest, {"messages": [USER | {str(i): 0 for i in range(MANY)}]}),
        (ChatCompletionRequest, {"messages": [{"role": "user", "content": [0] * MANY}]}),
        (ChatCompletionRequest, {"messages": [{"role": "assistant", "tool_calls": [0] * MANY}]}),
        (ChatCompletionRequest, {"messages": [USER], "tools": [0] * MANY}),
        (ChatCompletionRequest, {"messages": [USER], "modalities": [0] * MANY}),
        (ResponsesRequest, {"input": [0] * MANY}),
        (ResponsesRequest, {"input": [{"role": "user", "content": [0] * MANY}]}),
        (ResponsesRequest, {"input": [{"type": "function_call_output", "call_id": "c", "output": [{}] * MANY}]}),
        (ResponsesRequest, {"input": "x", "tools": [0] * MANY}),
        (ResponsesRequest, {"input": "x", "include": [0] * MANY}),
        (TokenizeRequest, {"messages": [0] * MANY}),
        (DetokenizeRequest, {"tokens": [""] * MANY}),
        (CompletionRequest, {"prompt": "x", "stop": [0] * MANY}),
    ],
)
def test_many_invalid_items_are_one_error(body: type[BaseModel], fields: dict[str, Any]) -> None:
    """Each error takes about a kilobyte, and the event loop waits while they are written."""
    with pytest.raises(ValidationError) as caught:
        body.model_validate({"model": "m"} | fields)
    assert caught.value.error_count() == 1


@pytest.mark.parametrize(
    ("body", "fields", "most"),
    [
        (ChatCompletionRequest, {"messages": [None] * (MAX_MESSAGES + 1)}, MAX_MESSAGES),
        (ResponsesRequest, {"input": [None] * (MAX_MESSAGES + 1)}, MAX_MESSAGES),
        (ChatCompletionRequest, {"messages": [{"role": "user", "content": [None] * 1025}]}, 1024),
        (ChatCompletionRequest, {"messages": [USER], "tools": [None] * 513}, 512),
        (ResponsesRequest, {"input": "x", "tools": [None] * 513}, 512),
        (CompletionRequest, {"prompt": "x", "stop": [None] * 17}, 16),
        (CompletionRequest, {"prompt": "x", "guided_choice": [None] * 4097}, 4096),
        (CompletionRequest, {"prompt": [[None]] * (MAX_PROMPTS + 1)}, MAX_PROMPTS),
        (DetokenizeRequest, {"tokens": [None] * ((1 << 18) + 1)}, 1 << 18),
    ],
)
def test_bounds_are_checked_before_items(body: type[BaseModel], fields: dict[str, Any], most: int) -> None:
    """260,000 messages took three seconds to validate, and an invalid one was reported instead of their number."""
    with pytest.raises(ValidationError, match=f"at most {most} are allowed"):
        body.model_validate({"model": "m"} | fields)


def test_the_number_of_prompts_has_bounds() -> None:
    assert len(completion(prompt=["a"] * MAX_PROMPTS).prompts) == MAX_PROMPTS
    with pytest.raises(ValidationError, match=f"{MAX_PROMPTS + 1} prompts.*{MAX_PROMPTS}"):
        completion(prompt=["a"] * (MAX_PROMPTS + 1))


def schema_format(**fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n"} | fields}


TAGS: dict[str, Any] = {
    "type": "structural_tag",
    "triggers": ["<f="],
    "structures": [{"begin": "<f=a>", "schema": {"type": "null"}, "end": "</f>"}],
}
TAGGED = Structure("tags", json.dumps({"triggers": TAGS["triggers"], "structures": TAGS["structures"]}))


@pytest.mark.parametrize(
    ("fields", "structure"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Structure("json", "{}")),
        ({"response_format": schema_format()}, Structure("json", "{}")),
        (
            {"response_format": schema_format(schema={"type": "array"}, strict=True)},
            Structure("json", '{"type": "array"}'),
        ),
        ({"guided_json": '{"type": "null"}'}, Structure("json", '{"type": "null"}')),
        ({"guided_json": {"type": "null"}}, Structure("json", '{"type": "null"}')),
        ({"guided_regex": "a"}, Structure("regex", "a")),
        ({"guided_choice": ["a", "é"]}, Structure("choice", '["a", "\\u00e9"]')),
        ({"guided_grammar": "start: /a/"}, Structure("grammar", "start: /a/")),
        ({"structured_outputs": {"json": {"type": "null"}}}, Structure("json", '{"type": "null"}')),
        ({"structured_outputs": {"json": '{"type": "null"}'}}, Structure("json", '{"type": "null"}')),
        ({"structured_outputs": {"json_object": True}}, Structure("json", "{}")),
        ({"structured_outputs": {"regex": "a"}}, Structure("regex", "a")),
        ({"structured_outputs": {"choice": ["a"]}}, Structure("choice", '["a"]')),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, Structure("grammar", 'root ::= "a"')),
        ({"structured_outputs": {"structural_tag": TAGS}}, TAGGED),
        ({"structured_outputs": {"structural_tag": json.dumps(TAGS)}}, TAGGED),
        ({"response_format": TAGS}, TAGGED),
    ],
)
def test_structures(fields: dict[str, Any], structure: Structure | None) -> None:
    assert chat(**fields).sampling_params().structure == structure
    assert completion(**fields).sampling_params().structure == structure


def test_a_forced_call_is_the_only_structure() -> None:
    """A forced call has no content whose form could be decided."""
    plan = OutputPlan(OutputFormat(tools=TOOL_SYNTAXES["hermes"][1]), {"f": {"type": "object"}}, forced=True)
    forced = chat().sampling_params(plan).structure
    assert forced is not None
    assert forced.kind == "calls"
    assert chat(response_format=schema_format()).sampling_params(plan).structure == forced
    may_call = chat(response_format=schema_format()).sampling_params(replace(plan, forced=False)).structure
    assert may_call is not None
    assert (may_call.kind, may_call.frame and may_call.frame.splitlines()[0]) == ("json", "start:  (@answer | calls)")


def test_special_tokens_of_calls_are_kept() -> None:
    known = OutputFormat(REASONING_SYNTAXES["mistral"], special_tokens={"[/THINK]": 7, "[THINK]": 5, "other": 9})
    assert chat().sampling_params(OutputPlan(known)).kept_token_ids == (5, 7)
    assert chat().sampling_params().kept_token_ids == ()


@pytest.mark.parametrize(
    "fields", [{"timeout_s": float("nan")}, {"response_format": {"type": "text", "json_schema": {"name": "n"}}}]
)
def test_fields_that_are_refused(fields: dict[str, Any]) -> None:
    """Beside those of `test_refusals`, which are sent: these are no JSON, or unknown to the type of a format."""
    with pytest.raises(ValidationError):
        completion(**fields)


ON, OFF = ({"enable_thinking": is_on, "thinking": is_on} for is_on in (True, False))


@pytest.mark.parametrize(
    ("fields", "settings", "budget"),
    [
        ({}, {}, None),
        ({"reasoning_effort": "none"}, OFF | {"reasoning_effort": "none"}, None),
        ({"reasoning_effort": "high"}, ON | {"reasoning_effort": "high"}, None),
        ({"thinking": False}, OFF, None),
        ({"thinking": {"type": "disabled"}}, OFF, None),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, ON, 9),
        ({"thinking_token_budget": 0}, {}, 0),
    ],
)
def test_whether_and_how_long_the_model_reasons(fields: Any, settings: dict[str, Any], budget: int | None) -> None:
    request = chat(**fields)
    assert (request.template_settings, request.reasoning_budget) == (settings, budget)


# Fields that LangChain's ChatOpenAI, LiteLLM and OpenAI's client send by themselves, or with messages of answers.
USUAL: dict[str, Any] = {
    "stream": False,
    "n": 1,
    "store": True,
    "metadata": {"run": "1"},
    "service_tier": "flex",
    "safety_identifier": "s",
    "prompt_cache_key": "k",
    "modalities": ["text"],
    "reasoning_effort": "none",
    "verbosity": "low",
    "stream_options": {"include_usage": None, "include_obfuscation": True, "continuous_usage_stats": True},
    "tools": [],
    "tool_choice": "auto",
    "top_logprobs": 0,
    "top_k": -1,
    "documents": [],
    "prediction": {"type": "content", "content": "x"},
    "session_id": "s",
    "spaces_between_special_tokens": False,
    "skip_special_tokens": True,
    "include_stop_str_in_output": False,
}
SENT_BACK: dict[str, Any] = {
    "role": "assistant",
    "content": "y",
    "refusal": None,
    "annotations": [],
    "audio": None,
    "function_call": None,
    "tool_calls": [],
    "cache_control": {"type": "ephemeral"},
}


def test_fields_that_clients_send_change_nothing() -> None:
    assert chat(**USUAL, messages=[USER, SENT_BACK, USER]).sampling_params() == chat(n=1).sampling_params()
    nulls = dict.fromkeys(ChatCompletionRequest.model_fields.keys() - {"model", "messages"})
    assert chat(**nulls).sampling_params() == chat().sampling_params()
    nulls = dict.fromkeys(CompletionRequest.model_fields.keys() - {"model", "prompt", "max_tokens"})
    assert completion(**nulls).sampling_params() == completion().sampling_params()


@pytest.mark.parametrize(
    ("fields", "ttl_s"),
    [
        ({}, None),
        ({"prompt_cache_retention": "in_memory"}, None),
        ({"prompt_cache_retention": "24h"}, 86_400),
        ({"cache_ttl_s": 300}, 300),
        ({"cache_ttl_s": 300, "prompt_cache_retention": "24h"}, 300),
        ({"cache_ttl_s": 0, "prompt_cache_retention": "24h"}, 0),
    ],
)
def test_how_long_a_prefix_is_kept(fields: dict[str, Any], ttl_s: float | None) -> None:
    assert completion(**fields).wanted_ttl_s == ttl_s
