"""The choice among a request's tools, and tools in its prompt."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from folio.app.api.input.prompts import PromptEncoder
from folio.app.api.openai.chat_body import ChatCompletionRequest
from folio.app.api.output.formats import TOOL_SYNTAXES, output_format
from folio.app.api.tools.bodies import FunctionCallDelta, ToolCallDelta, ToolChoice, Tools
from folio.app.api.tools.choice import ChosenTools, chosen_tools
from folio.app.errors import RequestError
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
TOOLS = TypeAdapter(Tools).validate_python(
    [
        {"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": WEATHER}},
        {"type": "function", "function": {"name": "now"}},
    ]
)
TEMPLATE = "{% if tools %}{{ tools }} within <tool_call></tool_call> XML tags{% endif %}"


def model(template: str | dict[str, str] | None) -> PreTrainedTokenizerBase:
    tokenizer = byte_level()
    tokenizer.chat_template = template
    return tokenizer


def choice_of(value: Any) -> ToolChoice:
    choice: ToolChoice = TypeAdapter(ToolChoice).validate_python(value)
    return choice


def allowed(mode: str, name: str = "now") -> ToolChoice:
    tools = [{"type": "function", "function": {"name": name}}]
    return choice_of({"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}})


NAMED = choice_of({"type": "function", "function": {"name": "now"}})


def test_choices() -> None:
    names = {"get_weather", "now"}
    for choice, functions, required, several in (
        (None, names, False, True),
        ("auto", names, False, True),
        ("required", names, True, True),
        (NAMED, {"now"}, True, False),
        (allowed("auto"), {"now"}, False, True),
        (allowed("required"), {"now"}, True, True),
    ):
        chosen = chosen_tools(TOOLS, choice, None)
        assert ({*chosen.functions}, chosen.required, chosen.several) == (functions, required, several)
        assert not chosen_tools(TOOLS, choice, False).several
    assert chosen_tools(TOOLS, "none", None) == chosen_tools(None, "auto", None) == ChosenTools()


def test_invalid_choices() -> None:
    other = choice_of({"type": "function", "function": {"name": "other"}})
    for choice in (other, allowed("auto", "other")):
        with pytest.raises(RequestError, match="'other', which is not among"):
            chosen_tools(TOOLS, choice, None)
    for choice in ("required", NAMED, allowed("required")):
        with pytest.raises(RequestError, match="there are no tools"):
            chosen_tools(None, choice, None)
    with pytest.raises(RequestError, match="two tools have the name 'now'"):
        chosen_tools([*TOOLS, TOOLS[1]], None, None)
    function = TOOLS[0].function.model_copy(update={"parameters": {"type": "array"}})
    with pytest.raises(RequestError, match="it must be 'object'"):
        chosen_tools([TOOLS[0].model_copy(update={"function": function})], None, None)


def test_bodies_are_strict() -> None:
    assert TypeAdapter(Tools).validate_python([]) is None
    for bad in ([{}], [{"type": "function", "function": {"name": "a b"}}], [{"type": 7, "function": {"name": "a"}}]):
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
    tokenizer = AutoTokenizer.from_pretrained("app/models/builtin/model")
    functions = [{"name": "now"} | more for more in ({}, {"strict": True}, {"strict": False}, {"strict": None})]
    prompts = {prompt(tokenizer, tools=[{"type": "function", "function": function}]) for function in functions}
    assert len(prompts) == 1


def test_the_built_in_template_shows_tools_calls_and_answers() -> None:
    tokenizer = AutoTokenizer.from_pretrained("app/models/builtin/model")
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


NO_TOOLS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>"


def test_a_template_without_tools_gets_them_in_the_system_message() -> None:
    """They were refused, and so was every conversation with a call."""
    answered = [*CONVERSATION, {"role": "user", "content": "Thanks"}]
    for messages, system in ((answered, "Be brief.\n\n# Tools"), (answered[1:], "# Tools")):
        text = prompt(model(NO_TOOLS), messages=messages, tools=[tool.model_dump() for tool in TOOLS])
        assert text.startswith(f"<|system|>{system}")
        assert '<tools>\n{"type": "function", "function": {"name": "get_weather", ' in text
        assert text.endswith(
            '<|user|>Weather?<|assistant|><tool_call>\n{"name": "now", "arguments": {"a": "é"}}\n</tool_call>'
            "<|user|><tool_response>\nnoon\n</tool_response>\nThanks<|assistant|>"
        )
    later = prompt(model(NO_TOOLS), tools=[tool.model_dump() for tool in TOOLS], tool_choice="none")
    assert "# Tools" not in later
    assert "<tool_response>" in later
    assert output_format(model(NO_TOOLS)).tools is TOOL_SYNTAXES["hermes"][1]
    assert output_format(model("{{ tools }}{{ messages }}")).tools is TOOL_SYNTAXES["hermes"][1]
    assert output_format(model(NO_TOOLS), "none").tools is None
