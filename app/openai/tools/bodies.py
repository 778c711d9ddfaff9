"""Bodies of tool calls: what a request says of its tools, and the calls in messages, answers and chunks."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from app.openai.base import JsonObject, ListOf, OmitNoneModel, StrictBody, Text, at_most

MAX_TOOLS = 128


# What OpenAI's API allows; so a name needs no escaping in JSON or in a grammar.
FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


class FunctionDefinition(StrictBody):
    """A function that may be called. `parameters` is the JSON schema of its arguments, an object's; without one it
    takes none. `strict` is accepted: calls that are forced follow the schema anyway, others never do for sure."""

    name: FunctionName
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class Tool(StrictBody):
    type: Literal["function"]
    function: FunctionDefinition


Tools = Annotated[ListOf[Tool], Field(min_length=1, max_length=MAX_TOOLS), at_most(MAX_TOOLS, "tools")]


class ChosenFunction(StrictBody):
    name: FunctionName


class NamedToolChoice(StrictBody):
    """The one function to call."""

    type: Literal["function"]
    function: ChosenFunction


# "none": tools are not shown; "auto": the model decides; "required": it calls at least one.
ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice


class FunctionCall(StrictBody):
    """`arguments` is JSON as text; from a model that was not forced it may be anything."""

    name: Text
    arguments: Text

    @model_validator(mode="before")
    @classmethod
    def _without_parsed_arguments(cls, fields: Any) -> Any:
        """The official client adds them to calls of answers, and sends them back."""
        if not isinstance(fields, dict):
            return fields
        return {name: value for name, value in fields.items() if name != "parsed_arguments"}


class ToolCall(StrictBody):
    """One call, in an assistant's message of a request or of an answer."""

    id: Text
    type: Literal["function"] = "function"
    function: FunctionCall


class FunctionCallDelta(OmitNoneModel):
    """`arguments` continues what chunks before have brought of it."""

    _left_out = frozenset({"name", "arguments"})

    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(OmitNoneModel):
    """What a chunk adds to call number `index`: first its id, type and name, then pieces of its arguments."""

    _left_out = frozenset({"id", "type"})

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCallDelta
