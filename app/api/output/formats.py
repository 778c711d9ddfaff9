"""Formats of known models: how they write reasoning and calls, found in the chat template or named in the settings."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from folio.app.api.output.parser import HARMONY_LITERALS, ReasoningSyntax
from folio.app.api.output.python_calls import PythonCalls
from folio.app.api.output.syntaxes import NAME, JsonCalls, NamedJson, ToolSyntax
from folio.app.api.output.tagged_calls import TaggedParameters

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_DEEPSEEK = ("<｜tool▁calls▁begin｜>",), "<｜tool▁call▁begin｜>"
_DEEPSEEK_END, _DEEPSEEK_CLOSE = "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"

# Value of the setting `tool_call_parser` → a text by which templates with this syntax are recognised, and the syntax.
# The first entry whose text a template contains decides.
TOOL_SYNTAXES: dict[str, tuple[str, ToolSyntax]] = {
    "qwen3_coder": (
        "<function=",
        TaggedParameters(
            ("<tool_call>",),
            re.compile(rf"\s*<function={NAME}>"),
            re.compile(r"<parameter=(?P<key>[^>\n]{1,128})>"),
            "</parameter>",
            "</function>",
            ("<tool_call>\n<function={name}>\n", "<parameter={key}>\n", "\n</parameter>\n"),
            "</tool_call>",
        ),
    ),
    "glm45": (
        "<arg_key>",
        TaggedParameters(
            ("<tool_call>",),
            re.compile(rf"\s*{NAME}(?=\n|<arg_key>|</tool_call>)"),
            re.compile(r"<arg_key>(?P<key>[^<\n]{1,128})</arg_key>\s*<arg_value>"),
            "</arg_value>",
            "</tool_call>",
            ("<tool_call>{name}\n", "<arg_key>{key}</arg_key>\n<arg_value>", "</arg_value>\n"),
        ),
    ),
    "minimax_m2": (
        "<minimax:tool_call>",
        TaggedParameters(
            ("<minimax:tool_call>",),
            re.compile(rf'\s*<invoke name="{NAME}">'),
            re.compile(r'<parameter name="(?P<key>[^"\n]{1,128})">'),
            "</parameter>",
            "</invoke>",
            ('<invoke name="{name}">\n', '<parameter name="{key}">', "</parameter>\n"),
            "</minimax:tool_call>",
        ),
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|>",
        NamedJson(
            ("<|tool_calls_section_begin|>",),
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            ("<|tool_call_end|>",),
            "<|tool_calls_section_end|>",
            rf"(?:functions\.)?{NAME.replace('128}', '128}?')}(?::\d+)?",
            "functions.{name}:#",
        ),
    ),
    "deepseek_v3": (
        "```json",
        NamedJson(
            *_DEEPSEEK,
            "```json",
            ("```", _DEEPSEEK_END),
            _DEEPSEEK_CLOSE,
            rf"(?:function)?<｜tool▁sep｜>{NAME}",
            "function<｜tool▁sep｜>{name}",
            "\n",
        ),
    ),
    "deepseek_v31": (
        "<｜tool▁calls▁begin｜>",
        NamedJson(*_DEEPSEEK, "<｜tool▁sep｜>", (_DEEPSEEK_END,), _DEEPSEEK_CLOSE),
    ),
    "mistral_v11": ("[ARGS]", NamedJson(("[TOOL_CALLS]",), "", "[ARGS]")),
    "mistral": ("[TOOL_CALLS]", JsonCalls(("[TOOL_CALLS]",), as_list=True)),
    "minimax": ("<tool_calls>", JsonCalls(("<tool_calls>",), "</tool_calls>", space="\n", together=True)),
    "granite": ("<|tool_call|>", JsonCalls(("<|tool_call|>",), as_list=True)),
    "hermes": ("<tool_call>", JsonCalls(("<tool_call>",), "</tool_call>", space="\n")),
    "phi4_mini_json": ("functools", JsonCalls(("functools",), as_list=True)),
    "llama4_pythonic": ("<|python_start|>", PythonCalls(("<|python_start|>",), "<|python_end|>")),
    "pythonic": ("[func_name1(params_name1=", PythonCalls()),
    "llama3_json": (
        '"parameters": dictionary',
        JsonCalls(("<|python_tag|>",), bare="{", arguments="parameters", single=True),
    ),
    "xlam": ("", JsonCalls(("[TOOL_CALLS]", "<tool_call>", "```json"), "```", bare="[", as_list=True)),
}
_THINK = ReasoningSyntax("<think>", "</think>")
# Value of the setting `reasoning_parser` → syntax. Of equal syntaxes a template is recognised as the first.
REASONING_SYNTAXES: dict[str, ReasoningSyntax] = {
    "qwen3": _THINK,
    "glm45": _THINK,
    "nemotron": _THINK,
    "deepseek_r1": replace(_THINK, implied=True),
    "minimax_m2": replace(_THINK, implied=True),
    "mistral": ReasoningSyntax("[THINK]", "[/THINK]"),
    "granite": ReasoningSyntax("Here is my thought process:", "Here is my response:"),
    "seed_oss": ReasoningSyntax("<seed:think>", "</seed:think>"),
}
# gpt-oss: reasoning, calls and content are messages in channels.
HARMONY = "openai"
_HARMONY_MARK = "<|channel|>"


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """How a model writes reasoning and calls.

    Attributes:
        reasoning: `None`: the model does not reason, or writes it in the channels of harmony.
        tools: `None`: calls are not found, except in the channels of harmony.
        special_tokens: text → id, of the literals that are special tokens. Detokenisation must keep their text.
        short_call_ids: ids of calls have nine letters and digits, as Mistral's templates require.
    """

    reasoning: ReasoningSyntax | None = None
    tools: ToolSyntax | None = None
    is_harmony: bool = False
    special_tokens: Mapping[str, int] = field(default_factory=dict)
    short_call_ids: bool = False

    @property
    def reasons(self) -> bool:
        return self.is_harmony or self.reasoning is not None

    @property
    def knows_calls(self) -> bool:
        return self.is_harmony or self.tools is not None

    def terminal(self, text: str) -> str:
        """A text as terminals of a grammar, which refers to special tokens by id."""
        if not text:
            return ""
        special = "|".join(map(re.escape, sorted(self.special_tokens, key=len, reverse=True)))
        parts = [part for part in re.split(f"({special})", text) if part] if special else [text]
        return " ".join(
            json.dumps(part) if part not in self.special_tokens else f"<[{self.special_tokens[part]}]>"
            for part in parts
        )

    def new_call_id(self) -> str:
        number = uuid.uuid4().hex
        return number[:9] if self.short_call_ids else f"call_{number[:24]}"


def output_format(tokenizer: PreTrainedTokenizerBase, tools: str = "auto", reasoning: str = "auto") -> OutputFormat:
    """The format of a model.

    Args:
        tools, reasoning: a name of `TOOL_SYNTAXES` and `REASONING_SYNTAXES`, `HARMONY`, "none", or "auto": by the chat
            template; calls of an unknown syntax are those of "hermes".
    """
    templates = tokenizer.chat_template
    template = "\n".join(templates.values()) if isinstance(templates, dict) else templates or ""
    is_harmony = HARMONY in (tools, reasoning) or ("auto" in (tools, reasoning) and _HARMONY_MARK in template)
    tools = _tools_in(template) if tools == "auto" else tools
    reasoning = _reasoning_in(template) if reasoning == "auto" else reasoning
    syntax = TOOL_SYNTAXES[tools][1] if tools in TOOL_SYNTAXES and not is_harmony else None
    between = REASONING_SYNTAXES.get(reasoning) if not is_harmony else None
    literals = {*HARMONY_LITERALS} if is_harmony else {*(syntax.literals if syntax is not None else ())}
    literals |= {between.begin, between.end} if between is not None else set()
    return OutputFormat(between, syntax, is_harmony, _special(tokenizer, literals), tools.startswith("mistral"))


def _tools_in(template: str) -> str:
    known = (name for name, (mark, _) in TOOL_SYNTAXES.items() if mark and mark in template)
    # Models with an unknown syntax see the tools described in this one, and can be forced to it.
    return next(known, "hermes" if template else "none")


def _reasoning_in(template: str) -> str:
    known = (name for name, one in REASONING_SYNTAXES.items() if one.begin in template or one.end in template)
    return next(known, "none")


def _special(tokenizer: PreTrainedTokenizerBase, literals: set[str]) -> dict[str, int]:
    """Literal → token id, of the literals that are special tokens."""
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
    return {t.content: token_id for token_id, t in added.items() if t.special and t.content in literals}


def shows_tools(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the model's chat template, or the one for conversations with tools if it has several, shows tools."""
    if tokenizer.chat_template is None:
        return False
    return re.search(r"\btools\b", tokenizer.get_chat_template(tools=[{}])) is not None
