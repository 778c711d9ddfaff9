"""Tools in a request's prompt, in the masks of its output, and in the parsed output."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from app.engine.sampling.structure import StructureCompiler
from app.errors import RequestError
from app.openai.bodies import ChatCompletionRequest
from app.openai.prompts import PromptEncoder
from app.openai.tools.bodies import FunctionCallDelta, ToolCallDelta, ToolChoice, Tools
from app.openai.tools.formats import closed, tool_format
from app.openai.tools.parser import tool_use
from tests.app.small_tokenizers import byte_level

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"$ref": "#/$defs/unit"},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"unit": {"enum": ["°C", "</tool_call>"]}},
}
SCHEMAS = {"get_weather": WEATHER, "now": {"type": "object", "maxProperties": 0}}
TOOLS = TypeAdapter(Tools).validate_python(
    [
        {"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": WEATHER}},
        {"type": "function", "function": {"name": "now"}},
    ]
)
# The marks by which formats are detected, from the models' own templates.
TEMPLATES = {
    "hermes": "{% if tools %}{{ tools }} within <tool_call></tool_call> XML tags{% endif %}",
    "llama": '{% if tools %}Respond in the format {"name": function name, "parameters": dictionary of argument name '
    "and its value}. {{ tools }}{% endif %}",
    "mistral": '{% if tools %}{{ "[AVAILABLE_TOOLS] " + tools | tojson }}{% endif %}{{ "[TOOL_CALLS] [" }}',
}


def model(template: str | dict[str, str] | None) -> PreTrainedTokenizerBase:
    tokenizer = byte_level()
    tokenizer.chat_template = template
    return tokenizer


def choice_of(value: Any) -> ToolChoice:
    choice: ToolChoice = TypeAdapter(ToolChoice).validate_python(value)
    return choice


NAMED = choice_of({"type": "function", "function": {"name": "now"}})


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_format_is_detected_in_the_template(name: str) -> None:
    found = tool_format(model(TEMPLATES[name]))
    assert found is not None
    assert found.name == name
    assert [text for text, _ in found.special_tokens] == (["[TOOL_CALLS]"] if name == "mistral" else [])
    both = model({"default": "{{ messages }}", "tool_use": TEMPLATES[name]})
    assert tool_format(both) == found


def test_unsupported_formats_are_detected() -> None:
    for template in ("{{ tools }}<tool_call>\n<function=name>", "{{ tools }}[TOOL_CALLS]name[ARGS]{}", "{{ tools }}"):
        tokenizer = model(template)
        assert tool_format(tokenizer) is None
        assert tool_use(tokenizer, TOOLS, "auto", None) is None
        with pytest.raises(RequestError, match="not supported"):
            tool_use(tokenizer, TOOLS, "required", None)


@pytest.mark.parametrize("template", [None, "{{ messages }} tools_of_trade"])
def test_a_template_without_tools_is_an_error(template: str | None) -> None:
    with pytest.raises(RequestError, match=r"no chat template|does not use tools") as raised:
        tool_use(model(template), TOOLS, None, None)
    assert raised.value.param == "tools"
    assert tool_use(model(template), TOOLS, "none", None) is None
    assert tool_use(model(template), None, "auto", None) is None


@pytest.mark.parametrize("parallel", [None, False])
@pytest.mark.parametrize("kind", ["required", "named"])
@pytest.mark.parametrize("name", [*TEMPLATES, "builtin"])
def test_forced_calls_are_valid_whatever_the_model_prefers(name: str, kind: str, parallel: bool | None) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained("app/builtin/model") if name == "builtin" else model(TEMPLATES[name])
    eos = tokenizer.eos_token_id
    use = tool_use(tokenizer, TOOLS, "required" if kind == "required" else NAMED, parallel)
    assert use is not None
    assert use.structure is not None
    compiler = StructureCompiler(tokenizer, len(tokenizer), {eos})
    rng = np.random.default_rng(0)
    mask = np.empty((len(tokenizer) + 31) // 32, np.int32)
    numbers = set()
    for _ in range(12):
        matcher = compiler.matcher(use.structure)
        output: list[int] = []
        while not output or output[-1] != eos:
            matcher.fill(mask)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            # The end is made likely, or outputs would have very many calls.
            output.append(eos if eos in allowed and rng.random() < 0.3 else int(rng.choice(allowed)))
            matcher.accept(output[-1])
        assert use.kept_token_ids <= {output[0]}  # Mistral's marker is a token of its own
        text = tokenizer.decode(output[:-1], skip_special_tokens=False)
        for shown in (text, tokenizer.decode(output, skip_special_tokens=True)):
            parser = use.parser()
            outcomes = [parser.push(shown), parser.finish()]
            assert [content for content, _ in outcomes] == ["", ""], text
            calls = [call for _, some in outcomes for call in some]
            numbers.add(len(calls))
            for call in calls:
                arguments = json.loads(call.function.arguments or "")
                jsonschema.validate(arguments, SCHEMAS[call.function.name or ""])
                if kind == "named":
                    assert (call.function.name, call.function.arguments) == ("now", "{}")  # and no white space
    single = kind == "named" or parallel is False or name == "llama"
    assert numbers == {1} if single else max(numbers) > 1


def test_invalid_choices() -> None:
    tokenizer = model(TEMPLATES["hermes"])
    other = choice_of({"type": "function", "function": {"name": "other"}})
    with pytest.raises(RequestError, match="'other', which is not among"):
        tool_use(tokenizer, TOOLS, other, None)
    with pytest.raises(RequestError, match="there are no tools"):
        tool_use(tokenizer, None, "required", None)
    with pytest.raises(RequestError, match="two tools have the name 'now'"):
        tool_use(tokenizer, [*TOOLS, TOOLS[1]], None, None)
    function = TOOLS[0].function.model_copy(update={"parameters": {"type": "array"}})
    with pytest.raises(RequestError, match="it must be 'object'"):
        tool_use(tokenizer, [TOOLS[0].model_copy(update={"function": function})], None, None)


def test_bodies_are_strict() -> None:
    for bad in ([], [{"type": "function", "function": {"name": "a b"}}], [{"type": "x", "function": {"name": "a"}}]):
        with pytest.raises(ValidationError):
            TypeAdapter(Tools).validate_python(bad)
    with pytest.raises(ValidationError):
        choice_of("sometimes")
    delta = ToolCallDelta(index=1, function=FunctionCallDelta(arguments="{}"))
    assert delta.model_dump() == {"index": 1, "function": {"arguments": "{}"}}


CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "now", "arguments": '{"a": "é"}'}}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "noon"},
]


def prompt(tokenizer: PreTrainedTokenizerBase, **fields: Any) -> str:
    messages = fields.pop("messages", CONVERSATION)
    body = ChatCompletionRequest.model_validate({"model": "m", "messages": messages, **fields})
    text = tokenizer.decode(PromptEncoder(tokenizer).encode_chat(body, 4096))
    assert isinstance(text, str)
    return text


def test_strict_does_not_change_the_prompt() -> None:
    tokenizer = AutoTokenizer.from_pretrained("app/builtin/model")
    functions = [{"name": "now"} | more for more in ({}, {"strict": True}, {"strict": False}, {"strict": None})]
    prompts = {prompt(tokenizer, tools=[{"type": "function", "function": function}]) for function in functions}
    assert len(prompts) == 1


def test_the_built_in_template_shows_tools_calls_and_answers() -> None:
    tokenizer = AutoTokenizer.from_pretrained("app/builtin/model")
    tools = [tool.model_dump() for tool in TOOLS]
    text = prompt(tokenizer, tools=tools)
    assert text.count("Be brief.") == 1
    assert '{"type": "function", "function": {"name": "now"}}' in text
    assert '<tool_call>\n{"name": "now", "arguments": {"a": "é"}}\n</tool_call><|end|>' in text
    assert "<|user|><tool_response>\nnoon\n</tool_response><|end|><|assistant|>" in text
    assert "<tools>" not in prompt(tokenizer, tools=tools, tool_choice="none")
    plain = [{"role": "user", "content": "hi"}]
    assert prompt(tokenizer, messages=plain) == "<|user|>hi<|end|><|assistant|>"


def test_messages_as_templates_expect_them() -> None:
    """Arguments as an object, no content as an empty one, and the function's name beside its answer."""
    text = prompt(model("{{ tools }} {{ messages | tojson }}"))
    calls = [{"id": "c1", "type": "function", "function": {"name": "now", "arguments": {"a": "é"}}}]
    assert json.loads(text.removeprefix("None "))[2:] == [
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "noon", "tool_call_id": "c1", "name": "now"},
    ]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"role": "tool", "tool_call_id": "c2", "content": "x"}], "no earlier message has the tool call 'c2'"),
        ([{**CONVERSATION[2], "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{"}}]}], "not JSON"),
        ([{**CONVERSATION[2], "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "1"}}]}], "object"),
    ],
)
def test_invalid_calls_and_answers_are_refused(messages: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        prompt(model(TEMPLATES["hermes"]), messages=messages)


def test_calls_need_a_template_with_tools() -> None:
    with pytest.raises(RequestError, match="does not use tools"):
        prompt(model("{{ messages }}"))


def test_forced_arguments_are_the_declared_ones() -> None:
    """A forced call with additional properties might never end."""
    inner = {"type": "object", "properties": {"b": {"type": "string"}}}
    either = {"anyOf": [{"type": "object", "properties": {"c": {}}}]}
    open_ = {"type": "object", "properties": {}, "additionalProperties": True}
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": inner}, "d": either, "e": open_}}
    assert closed(schema) == {
        "type": "object",
        "properties": {
            "a": {"type": "array", "items": inner | {"additionalProperties": False}},
            "d": either,
            "e": open_,
        },
        "additionalProperties": False,
    }
    for unchanged in ({"type": "object"}, {"type": "object", "properties": {}, "required": ["undeclared"]}):
        assert closed(unchanged) == unchanged
