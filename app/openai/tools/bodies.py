"""Bodies of tool calls: tools of a request, and the calls in messages, answers and chunks."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field

from app.errors import RequestError
from app.openai.base import JsonObject, ListOf, Omitted, StrictBody, Text, at_most, none_if_empty

MAX_TOOLS = 512

# The characters that OpenAI's API allows, and the length that Anthropic's does. They need no escaping in JSON or in a
# grammar.
FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]


class FunctionDefinition(StrictBody):
    """A function that may be called. `parameters` is the JSON schema of its arguments, of type object; a function
    without `parameters` takes none. Forced calls follow the schema, and with `strict` all calls do."""

    name: FunctionName
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None

    def arguments_schema(self) -> dict[str, Any]:
        """The schema of the arguments. Raises `RequestError` unless its type is object."""
        kinds = None if self.parameters is None else self.parameters.get("type") or "object"
        if kinds in (None, "null"):
            return {"type": "object", "properties": {}, "additionalProperties": False}
        if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
            raise RequestError(f"the parameters of {self.name} have the type {kinds!r}; it must be 'object'", "tools")
        return (self.parameters or {}) | {"type": "object"}


class Tool(StrictBody):
    type: Literal["function"]
    function: FunctionDefinition


Tools = Annotated[ListOf[Tool] | None, Field(max_length=MAX_TOOLS), at_most(MAX_TOOLS, "tools"), none_if_empty]


class ChosenFunction(StrictBody):
    name: FunctionName


class NamedToolChoice(StrictBody):
    """The one function to call."""

    type: Literal["function"]
    function: ChosenFunction


class AllowedTools(StrictBody):
    mode: Literal["auto", "required"]
    tools: Annotated[ListOf[NamedToolChoice], Field(min_length=1, max_length=MAX_TOOLS), at_most(MAX_TOOLS, "tools")]


class AllowedToolChoice(StrictBody):
    """The functions that may be called. The prompt shows all tools, so that its cached prefix stays the same."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


# "none": the prompt does not show tools; "auto": the model decides; "required": the model calls at least one.
ToolChoice = (
    Literal["none", "auto", "required"] | Annotated[NamedToolChoice | AllowedToolChoice, Field(discriminator="type")]
)


def _as_json(arguments: object) -> object:
    """Arguments as text: some clients send the object itself, or null for none."""
    return arguments if isinstance(arguments, str) else "" if arguments is None else json.dumps(arguments)


Arguments = Annotated[Text, BeforeValidator(_as_json)]


class FunctionCall(StrictBody):
    """`arguments` is JSON as text. Unless the call was forced or the function strict, it may not follow the schema."""

    name: Text
    arguments: Arguments

    dropped = frozenset({"parsed_arguments"})  # added to the calls of answers by OpenAI's client


class ToolCall(StrictBody):
    """One call, in an assistant's message of a request or of an answer."""

    id: Text
    type: Literal["function"] = "function"
    function: FunctionCall

    dropped = frozenset({"index"})  # of a chunk's call, which clients send back in a message


class FunctionCallDelta(BaseModel):
    """`arguments` continues those of earlier chunks."""

    name: Omitted[str] = None
    arguments: Omitted[str] = None


class ToolCallDelta(BaseModel):
    """A chunk's part of call number `index`: first id, type and name, then pieces of the arguments."""

    index: int
    id: Omitted[str] = None
    type: Omitted[Literal["function"]] = None
    function: FunctionCallDelta
