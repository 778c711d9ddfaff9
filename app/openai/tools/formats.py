"""Tool formats: the syntax in which a model writes calls, detected in its chat template and forced by a grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from app.engine.sampling.params import Structure
from app.errors import RequestError
from app.openai.tools.bodies import Tool

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The most calls of a forced answer.
MAX_PARALLEL_CALLS = 16
# JSON as templates write it, with one space after commas and colons. Forced calls allow no other white space.
_AS_TEMPLATES_WRITE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Marks of syntaxes that begin like a supported one and continue differently.
_OTHER_SYNTAX = ("<function=", "<arg_key>", "[ARGS]", "<tool_call_begin>", "<|tool_call_begin|>")


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A syntax of calls.

    Attributes:
        name: "hermes": `<tool_call>{"name": …, "arguments": …}</tool_call>` for each call (Hermes, Qwen); "llama":
            `{"name": …, "parameters": …}` and nothing else (Llama 3); "mistral": `[TOOL_CALLS][{"name": …,
            "arguments": …}, …]`.
        marker: precedes a call; "llama" also writes calls without it.
        end: follows a call.
        arguments: the key of the arguments.
        special_tokens: (text, id) of marker and end where they are special tokens. The parser needs their text, so
            detokenisation must keep it.
    """

    name: Literal["hermes", "llama", "mistral"]
    marker: str
    end: str = ""
    arguments: str = "arguments"
    special_tokens: tuple[tuple[str, int], ...] = ()

    @property
    def is_bare(self) -> bool:
        """Whether a call may begin an answer without the marker."""
        return self.name == "llama"

    @property
    def opening(self) -> str:
        """The first character of a call's JSON."""
        return "[" if self.name == "mistral" else "{"

    def structure(self, tools: Sequence[Tool], parallel: bool) -> Structure:
        """The grammar of an answer that only calls these functions: once, or also several times if `parallel`.

        Raises:
            RequestError: a function's parameters are not the schema of an object.
        """
        rules = [f"function: {' | '.join(f'function_{number}' for number in range(len(tools)))}"]
        for number, tool in enumerate(tools):
            begin = f'{json.dumps(tool.function.name)}, "{self.arguments}": '
            schema = json.dumps(closed(tool.function.arguments_schema()) | {"x-guidance": _AS_TEMPLATES_WRITE})
            rules.append(f"function_{number}: {json.dumps(begin)} %json {schema}")
        rules.append('call: "{\\"name\\": " function "}"')
        more = MAX_PARALLEL_CALLS - 1
        if self.name == "hermes":
            rules.append(f'marked: {self._terminal(self.marker)} "\\n" call "\\n" {self._terminal(self.end)}')
            start = f'start: marked ("\\n" marked)~0..{more}' if parallel else "start: marked"
        elif self.name == "mistral":
            others = f'(", " call)~0..{more}' if parallel else ""
            start = f'start: {self._terminal(self.marker)} "[" call {others} "]"'
        else:  # Llama 3 is trained to make one call
            start = "start: call"
        return Structure("grammar", "\n".join([start, *rules]))

    def _terminal(self, text: str) -> str:
        """A text as a terminal of the grammar, which refers to special tokens by id."""
        token_id = dict(self.special_tokens).get(text)
        return json.dumps(text) if token_id is None else f"<[{token_id}]>"


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema, with `additionalProperties` false where it is not given.

    JSON schema allows additional properties, and a model that must continue may invent them without end. Objects
    that combine several schemas stay unchanged, since none of these names all properties.
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
    """The format of the model's chat template; `None` if it is not supported.

    Raises:
        RequestError: there is no template, or the template does not use tools.
    """
    template = tool_template(tokenizer)
    if any(other in template for other in _OTHER_SYNTAX):
        return None
    if "<tool_call>" in template:
        known = ToolFormat("hermes", "<tool_call>", "</tool_call>")
    elif "[TOOL_CALLS]" in template:
        known = ToolFormat("mistral", "[TOOL_CALLS]")
    elif '"parameters": dictionary' in template:  # the instruction in Llama's templates
        known = ToolFormat("llama", "<|python_tag|>", arguments="parameters")
    else:
        return None
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
    texts = (known.marker, known.end)
    special = tuple((t.content, token_id) for token_id, t in added.items() if t.special and t.content in texts)
    return replace(known, special_tokens=special)


def tool_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """The chat template for conversations with tools. Raises `RequestError` if there is none that shows them."""
    if tokenizer.chat_template is None:
        raise RequestError("this model has no chat template for tools; leave tools out", "tools")
    # A model may have several, one of them for tools.
    template: str = tokenizer.get_chat_template(tools=[{}])
    if not re.search(r"\btools\b", template):
        raise RequestError("this model's chat template does not use tools; leave tools out", "tools")
    return template
