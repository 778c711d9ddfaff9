"""How models write tool calls: told from their chat templates, and forced by grammars."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from app.engine.sampling.params import Structure
from app.errors import RequestError
from app.openai.tools.bodies import Tool

# A forced answer calls at most so many.
MAX_PARALLEL_CALLS = 16
# What templates write: JSON with one space after commas and colons. Nothing else is allowed where a call is forced.
_AS_TEMPLATES_WRITE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Syntax that begins like a known one and goes on differently.
_OTHER_SYNTAX = ("<function=", "<arg_key>", "[ARGS]", "<tool_call_begin>", "<|tool_call_begin|>")


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A syntax of calls.

    Attributes:
        name: "hermes": `<tool_call>{"name": …, "arguments": …}</tool_call>` for each call (Hermes, Qwen); "llama":
            `{"name": …, "parameters": …}` and nothing else (Llama 3); "mistral": `[TOOL_CALLS][{"name": …,
            "arguments": …}, …]`.
        marker: what comes before a call; "llama" does without it.
        end: what comes after a call.
        arguments: what the arguments are called.
        special_tokens: ids of marker and end as far as they are special tokens. They are part of the text that has to
            be parsed, though detokenisation drops special tokens.
    """

    name: Literal["hermes", "llama", "mistral"]
    marker: str
    end: str = ""
    arguments: str = "arguments"
    special_tokens: tuple[tuple[str, int], ...] = ()

    @property
    def is_bare(self) -> bool:
        """Whether an answer that begins like a call is one without a marker."""
        return self.name == "llama"

    @property
    def opening(self) -> str:
        """What a call's JSON begins with."""
        return "[" if self.name == "mistral" else "{"

    def structure(self, tools: Sequence[Tool], parallel: bool) -> Structure:
        """An answer of nothing but calls of these functions: one, or also several if `parallel`.

        Raises:
            RequestError: a function's parameters are not an object's schema.
        """
        rules = [f"function: {' | '.join(f'function_{number}' for number in range(len(tools)))}"]
        for number, tool in enumerate(tools):
            begin = f'{json.dumps(tool.function.name)}, "{self.arguments}": '
            schema = json.dumps(closed(arguments_schema(tool)) | {"x-guidance": _AS_TEMPLATES_WRITE})
            rules.append(f"function_{number}: {json.dumps(begin)} %json {schema}")
        rules.append('call: "{\\"name\\": " function "}"')
        more = MAX_PARALLEL_CALLS - 1
        if self.name == "hermes":
            rules.append(f'marked: {self._terminal(self.marker)} "\\n" call "\\n" {self._terminal(self.end)}')
            start = f'start: marked ("\\n" marked)~0..{more}' if parallel else "start: marked"
        elif self.name == "mistral":
            others = f'(", " call)~0..{more}' if parallel else ""
            start = f'start: {self._terminal(self.marker)} "[" call {others} "]"'
        else:  # the model was not taught to make several
            start = "start: call"
        return Structure("grammar", "\n".join([start, *rules]))

    def _terminal(self, text: str) -> str:
        """A text in a grammar; a special token is no text there."""
        token_id = dict(self.special_tokens).get(text)
        return json.dumps(text) if token_id is None else f"<[{token_id}]>"


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """The schema of a function's arguments: an object's. Raises `RequestError` if it is another's."""
    if tool.function.parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    schema = {"type": "object"} | tool.function.parameters
    if schema["type"] != "object":
        raise RequestError(
            f"the parameters of {tool.function.name} have the type {schema['type']!r}; arguments are an object", "tools"
        )
    return schema


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with no properties but those it names, where it does not say otherwise.

    JSON schema allows any others, and a model that has to go on may invent some for ever, which nobody who declares a
    function means. Objects put together of several schemas stay as they are: none of these has all properties.
    """
    if schema.keys() & {"allOf", "anyOf", "oneOf", "not", "if", "$ref", "patternProperties", "unevaluatedProperties"}:
        return schema
    result = dict(schema)
    if isinstance(properties := schema.get("properties"), dict):
        result["properties"] = {name: closed(v) if isinstance(v, dict) else v for name, v in properties.items()}
        required = schema.get("required")
        if not isinstance(required, list) or all(name in properties for name in required):
            result.setdefault("additionalProperties", False)
    if isinstance(items := schema.get("items"), dict):
        result["items"] = closed(items)
    return result


def tool_format(tokenizer: PreTrainedTokenizerBase) -> ToolFormat | None:
    """How the model writes its calls, as its chat template says; `None` if that is a syntax not known here.

    Raises:
        RequestError: there is no template, or it has no place for tools.
    """
    template = tool_template(tokenizer)
    known: ToolFormat | None = None
    if any(other in template for other in _OTHER_SYNTAX):
        return None
    if "<tool_call>" in template:
        known = ToolFormat("hermes", "<tool_call>", "</tool_call>")
    elif "[TOOL_CALLS]" in template:
        known = ToolFormat("mistral", "[TOOL_CALLS]")
    elif '"parameters": dictionary' in template:  # what Llama's say is wanted
        known = ToolFormat("llama", "<|python_tag|>", arguments="parameters")
    if known is None:
        return None
    return ToolFormat(known.name, known.marker, known.end, known.arguments, _special(tokenizer, known))


def tool_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """The chat template for conversations with tools. Raises `RequestError` if there is none that shows them."""
    if tokenizer.chat_template is None:
        raise RequestError("this model has no chat template, so no tools can be shown to it", "tools")
    # A model may have several, one of them for tools.
    template: str = tokenizer.get_chat_template(tools=[{}])
    if not re.search(r"\btools\b", template):
        raise RequestError("this model's chat template knows no tools; leave tools out", "tools")
    return template


def _special(tokenizer: PreTrainedTokenizerBase, known: ToolFormat) -> tuple[tuple[str, int], ...]:
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
    return tuple(
        (token.content, token_id)
        for token_id, token in added.items()
        if token.special and token.content in (known.marker, known.end)
    )
