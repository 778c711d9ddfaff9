"""Bodies of tool calls: tools of a request, and the calls in messages, answers and chunks."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, Tag, model_validator

from folio.app.api.base import (
    JsonObject,
    ListOf,
    Omitted,
    OtherKind,
    StrictBody,
    Text,
    at_most,
    by_type,
    json_text,
    none_if_empty,
)
from folio.app.errors import RequestError

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


class OtherTool(OtherKind):
    """A tool that is no function, such as one that runs on another server: it is dropped."""

    name: Any = None


Tools = Annotated[
    ListOf[Annotated[Annotated[Tool, Tag("function")] | Annotated[OtherTool, Tag("other")], by_type("function")]]
    | None,
    Field(max_length=MAX_TOOLS),
    at_most(MAX_TOOLS, "tools"),
    none_if_empty,
]


class ChosenFunction(StrictBody):
    name: FunctionName


class NamedToolChoice(StrictBody):
    """The one function to call."""

    type: Literal["function"]
    function: ChosenFunction


class AllowedTools(StrictBody):
    mode: Literal["auto", "required"]
    tools: Annotated[
        ListOf[
            Annotated[
                Annotated[NamedToolChoice, Tag("function")] | Annotated[OtherKind, Tag("other")], by_type("function")
            ]
        ],
        Field(min_length=1, max_length=MAX_TOOLS),
        at_most(MAX_TOOLS, "tools"),
    ]


class AllowedToolChoice(StrictBody):
    """The functions that may be called. The prompt shows all tools, so that its cached prefix stays the same."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


# "none": the prompt does not show tools; "auto": the model decides; "required": the model calls at least one.
ToolChoice = (
    Literal["none", "auto", "required"]
    | Annotated[
        Annotated[NamedToolChoice, Tag("function")]
        | Annotated[AllowedToolChoice, Tag("allowed_tools")]
        | Annotated[OtherKind, Tag("other")],
        by_type("function", "allowed_tools"),
    ]
)


Arguments = Annotated[Text, BeforeValidator(json_text)]
# The argument of the function that stands for a custom tool, which takes a text.
TEXT_ARGUMENT = "input"


class FunctionCall(StrictBody):
    """`arguments` is JSON as text. Unless the call was forced or the function strict, it may not follow the schema."""

    name: Text
    arguments: Arguments = ""

    dropped = frozenset({"parsed_arguments"})  # added to the calls of answers by OpenAI's client


CallId = Annotated[Text, BeforeValidator(lambda given: "" if given is None else given)]


class ToolCall(StrictBody):
    """One call, in an assistant's message of a request or of an answer."""

    id: CallId
    type: Literal["function"] = "function"
    function: FunctionCall

    dropped = frozenset({"index"})  # of a chunk's call, which clients send back in a message

    @model_validator(mode="before")
    @classmethod
    def _of_another_type(cls, fields: Any) -> Any:
        """Convert other servers' calls: of custom tools, and of functions, without a type or without `function`."""
        if not isinstance(fields, dict):
            return fields
        if fields.get("type") == "custom" and isinstance(custom := fields.get("custom"), dict):
            call = {"name": custom.get("name"), "arguments": {TEXT_ARGUMENT: custom.get("input")}}
            return {"id": fields.get("id"), "function": call}
        if "function" not in fields and "name" in fields:
            call = {"name": fields["name"], "arguments": fields.get("arguments")}
            return {"id": fields.get("id"), "function": call}
        return fields | {"type": "function"} if "function" in fields else fields


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
