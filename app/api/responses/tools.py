"""Tools and tool choices of `/v1/responses`, and the functions that the model sees instead of them.

| tool | the model sees |
|---|---|
| `function` | the function |
| `custom` | a function with one text argument, which follows the tool's grammar |
| `namespace` | its tools, the namespace before their names |
| any other | nothing: no tools run on the server. It is named in the header of ignored fields |
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr, Tag, model_validator

from folio.app.api.base import JsonObject, ListOf, OtherKind, StrictBody, Text, at_most, by_type
from folio.app.api.openai.sampling_body import TextFormat
from folio.app.api.responses.grammar import pattern_of
from folio.app.api.tools.bodies import (
    MAX_TOOLS,
    TEXT_ARGUMENT,
    AllowedToolChoice,
    AllowedTools,
    ChosenFunction,
    FunctionDefinition,
    FunctionName,
    NamedToolChoice,
    OtherTool,
    Tool,
    ToolChoice,
)

# The most characters of a qualified name, as in bodies and in parsers of calls; and those of the digest in a long one.
_MAX_NAME_CHARS, _DIGEST_CHARS = 128, 8


class _Flat(StrictBody):
    @model_validator(mode="before")
    @classmethod
    def _flatten(cls, fields: Any) -> Any:
        """Accept the form of chat completions, which has one level more."""
        if isinstance(fields, dict) and isinstance(function := fields.get("function"), dict):
            return {"type": fields.get("type")} | function
        return fields


class FunctionTool(_Flat):
    """A function that may be called: `FunctionDefinition`, one level less deep."""

    type: Literal["function"]
    name: FunctionName
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class GrammarFormat(StrictBody):
    """A text that follows a Lark grammar or a regular expression. A Lark grammar that is not regular (its rules
    refer to themselves) is shown to the model, and not enforced."""

    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: Annotated[Text, Field(max_length=64 << 10)]


class CustomTool(StrictBody):
    """A tool that takes a text instead of JSON."""

    type: Literal["custom"]
    name: FunctionName
    description: Text | None = None
    format: Annotated[TextFormat | GrammarFormat, Field(discriminator="type")] | None = None

    @cached_property
    def pattern(self) -> str | None:
        """The regular expression that its input matches; `None`: any text."""
        given = self.format
        return pattern_of(given.syntax, given.definition) if isinstance(given, GrammarFormat) else None


_Callable = Annotated[FunctionTool, Tag("function")] | Annotated[CustomTool, Tag("custom")]
_Other = Annotated[OtherTool, Tag("other")]


class NamespaceTool(StrictBody):
    """Tools under a common name."""

    type: Literal["namespace"]
    name: FunctionName
    description: Text | None = None
    tools: Annotated[ListOf[Annotated[_Callable | _Other, by_type("function", "custom")]], at_most(MAX_TOOLS, "tools")]


AnyTool = Annotated[
    _Callable | Annotated[NamespaceTool, Tag("namespace")] | _Other,
    by_type("function", "custom", "namespace"),
]


class NamedTool(_Flat):
    """A function or a custom tool."""

    type: Literal["function", "custom"]
    name: FunctionName
    namespace: FunctionName | None = None


_NamedOrOther = Annotated[
    Annotated[NamedTool, Tag("function")] | Annotated[NamedTool, Tag("custom")] | _Other,
    by_type("function", "custom"),
]


class AllowedToolSet(StrictBody):
    """The tools that may be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[ListOf[_NamedOrOther], Field(min_length=1, max_length=MAX_TOOLS), at_most(MAX_TOOLS, "tools")]


Choice = (
    Literal["none", "auto", "required"]
    | Annotated[
        Annotated[NamedTool, Tag("function")]
        | Annotated[NamedTool, Tag("custom")]
        | Annotated[AllowedToolSet, Tag("allowed_tools")]
        | Annotated[OtherKind, Tag("other")],
        by_type("function", "custom", "allowed_tools"),
    ]
)


def qualified_name(namespace: str | None, name: str) -> str:
    """The name of a function as the model sees it."""
    if not namespace:
        return name
    joint = "" if namespace.endswith(("_", ".", "-")) else "__"
    name = f"{namespace}{joint}{name}"
    if len(name) <= _MAX_NAME_CHARS:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:_DIGEST_CHARS]
    return f"{name[: _MAX_NAME_CHARS - 1 - _DIGEST_CHARS]}_{digest}"


class _TextFunction(FunctionDefinition):
    """The function of a custom tool. Its calls follow the grammar, which the model reads in the description."""

    _pattern: str | None = PrivateAttr(None)

    @classmethod
    def of(cls, tool: CustomTool, name: str, description: str | None) -> _TextFunction:
        given = tool.format
        about = "The text, as it is."
        if isinstance(given, GrammarFormat):
            kind = "Lark grammar" if given.syntax == "lark" else "regular expression"
            about = f"The text, as it is. It follows this {kind}:\n{given.definition}"
        text = {"type": "string", "description": about}
        function = cls(
            name=name,
            description=description,
            parameters={"type": "object", "properties": {TEXT_ARGUMENT: text}, "required": [TEXT_ARGUMENT]},
            strict=tool.pattern is not None or None,
        )
        function._pattern = tool.pattern  # of this class
        return function

    def arguments_schema(self) -> dict[str, Any]:
        text = {"type": "string"} if self._pattern is None else {"type": "string", "pattern": self._pattern}
        return {
            "type": "object",
            "properties": {TEXT_ARGUMENT: text},
            "required": [TEXT_ARGUMENT],
            "additionalProperties": False,
        }


@dataclass(frozen=True, slots=True)
class ShownTool:
    """The tool behind a function that the model sees."""

    tool: FunctionTool | CustomTool
    namespace: str | None


class ShownTools:
    """The tools of a request as the model sees them.

    Attributes:
        tools: for a chat completion.
        kept: the tools of the request, without those that are dropped.
        ignored: what is dropped here, as in the header of ignored fields. Other tools are left to `GivenTools`.
    """

    def __init__(self, given: Sequence[AnyTool], choice: Choice | None) -> None:
        self.tools: list[Tool | OtherTool] = []
        self.kept: list[FunctionTool | CustomTool | NamespaceTool] = []
        self.ignored: list[str] = []
        self._by_name: dict[str, ShownTool] = {}
        self._choice = choice  # of the request
        for tool in given:
            if isinstance(tool, OtherTool):
                self.tools.append(tool)
            elif isinstance(tool, NamespaceTool):
                self._show_namespace(tool)
                self.kept.append(tool)
            else:
                self._show(tool, None, tool.description)
                self.kept.append(tool)
        self.choice = self._chosen()

    def behind(self, name: str) -> ShownTool:
        """The tool behind a function that the model has called."""
        return self._by_name[name]

    def _show_namespace(self, namespace: NamespaceTool) -> None:
        about = namespace.description
        for tool in namespace.tools:
            if isinstance(tool, OtherTool):
                self.tools.append(tool)
                continue
            description = "\n".join(filter(None, (about, tool.description))) or None
            about = None  # the first function says what all of them are for
            self._show(tool, namespace.name, description)

    def _show(self, tool: FunctionTool | CustomTool, namespace: str | None, description: str | None) -> None:
        name = qualified_name(namespace, tool.name)
        if isinstance(tool, CustomTool):
            function: FunctionDefinition = _TextFunction.of(tool, name, description)
            if isinstance(tool.format, GrammarFormat) and tool.pattern is None:
                self.ignored.append("tools[].format")
        else:
            function = FunctionDefinition(
                name=name, description=description, parameters=tool.parameters, strict=tool.strict
            )
        self.tools.append(Tool(type="function", function=function))
        self._by_name[name] = ShownTool(tool, namespace)

    def _chosen(self) -> ToolChoice | None:
        """The choice of a chat completion. Clients send "auto" and "none" also without tools."""
        choice = self._choice
        if isinstance(choice, AllowedToolSet):
            tools: list[NamedToolChoice | OtherKind] = [
                self._named(tool) if isinstance(tool, NamedTool) else tool for tool in choice.tools
            ]
            return AllowedToolChoice(type="allowed_tools", allowed_tools=AllowedTools(mode=choice.mode, tools=tools))
        return self._named(choice) if isinstance(choice, NamedTool) else choice

    def _named(self, choice: NamedTool) -> NamedToolChoice:
        """The choice by the name that the model sees. Clients may leave out the namespace."""
        known = (
            name
            for name, shown in self._by_name.items()
            if shown.tool.name == choice.name and choice.namespace in (None, shown.namespace)
        )
        name = next(known, choice.name)
        return NamedToolChoice(type="function", function=ChosenFunction(name=name))
