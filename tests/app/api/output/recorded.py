"""Outputs as models write them, by the published chat templates: one call of each function, in every syntax."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from folio.app.api.output.parser import Part

CITY = 'São "P" {x}'
FUNCTIONS: Mapping[str, Mapping[str, Any]] = {
    "weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}
CALLS = [("weather", {"city": CITY, "days": 3}), ("now", {})]

_ARGUMENTS = '{"city": "São \\"P\\" {x}", "days": 3}'
_WEATHER = f'{{"name": "weather", "arguments": {_ARGUMENTS}}}'
_NOW = '{"name": "now", "arguments": {}}'
# Name of the syntax → (content before the calls, the calls).
OUTPUTS: Mapping[str, tuple[str, str]] = {
    "hermes": ("Let me see.", f"\n<tool_call>\n{_WEATHER}\n</tool_call>\n<tool_call>\n{_NOW}\n</tool_call>"),
    "qwen3_coder": (
        "Let me see.",
        f"\n\n<tool_call>\n<function=weather>\n<parameter=city>\n{CITY}\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
    ),
    "llama3_json": ("", f'{{"name": "weather", "parameters": {_ARGUMENTS}}}; {{"name": "now", "parameters": {{}}}}'),
    "pythonic": ("", f"[weather(city='{CITY}', days=3), now()]"),
    "llama4_pythonic": ("", f"<|python_start|>[weather(city='{CITY}', days=3), now()]<|python_end|>"),
    "mistral": ("Sure.", f"[TOOL_CALLS] [{_WEATHER}, {_NOW}]"),
    "mistral_v11": ("Sure.", f"[TOOL_CALLS]weather[ARGS]{_ARGUMENTS}[TOOL_CALLS]now[ARGS]{{}}"),
    "deepseek_v3": (
        "",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
        f"{_ARGUMENTS}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{{}}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": (
        "Let me see.",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{_ARGUMENTS}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "glm45": (
        "Let me see.",
        f"\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>{CITY}</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
    ),
    "granite": ("", f"<|tool_call|>[{_WEATHER}, {_NOW}]"),
    "kimi_k2": (
        "Let me see.",
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{_ARGUMENTS}"
        "<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
    ),
    "phi4_mini_json": ("", f"functools[{_WEATHER},{_NOW}]"),
    "xlam": ("", f'[{_WEATHER}, {{"name": "now"}}]'),
    "minimax": ("", f"<tool_calls>\n{_WEATHER}\n{_NOW}\n</tool_calls>"),
    "minimax_m2": (
        "Let me see.",
        f'\n<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">{CITY}</parameter>\n'
        '<parameter name="days">3</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
    ),
    "openai": (
        "Let me see.",
        "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.weather <|constrain|>json<|message|>{_ARGUMENTS}<|call|>"
        "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>",
    ),
}
# gpt-oss writes all of its output in channels, content included.
TEXTS = {name: calls if name == "openai" else content + calls for name, (content, calls) in OUTPUTS.items()}
REASONING = {
    "qwen3": ("<think>\n", "\n</think>\n\n"),
    "mistral": ("[THINK]", "[/THINK]"),
    "granite": ("Here is my thought process:\n", "\nHere is my response:\n"),
    "seed_oss": ("<seed:think>", "</seed:think>"),
    "openai": ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
}


def text_of(parts: Sequence[Part], kind: str) -> str:
    return "".join(part.text for part in parts if part.kind == kind)


def calls_of(parts: Sequence[Part]) -> list[tuple[str, Any]]:
    """Raises if arguments are not JSON."""
    calls: list[list[str]] = []
    for part in parts:
        if part.kind == "call":
            calls.append([part.text, ""])
        elif part.kind == "arguments":
            calls[-1][1] += part.text
    return [(name, json.loads(arguments)) for name, arguments in calls]
