"""Tool choice: the functions that a request's output may call, and whether it must."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from folio.app.api.base import OtherKind
from folio.app.api.output.schemas import enforceable
from folio.app.api.tools.bodies import AllowedToolChoice, NamedToolChoice, OtherTool, Tool, ToolChoice
from folio.app.errors import RequestError


@dataclass(frozen=True, slots=True)
class ChosenTools:
    """The tools of a request.

    Attributes:
        functions: name of each function that may be called → schema of its arguments.
        required: the output must be a call.
        several: a required output may have several calls.
        strict: functions whose arguments follow their schema although the model decides whether to call.
    """

    functions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    required: bool = False
    several: bool = False
    strict: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class GivenTools:
    """A body's tools and tool choice, without tools that are no functions.

    Attributes:
        ignored: what was dropped, as in the header of ignored fields.
    """

    functions: Sequence[Tool] | None
    choice: Literal["none", "auto", "required"] | NamedToolChoice | AllowedToolChoice | None
    ignored: Sequence[str]

    @staticmethod
    def of(tools: Sequence[Tool | OtherTool] | None, choice: ToolChoice | None) -> GivenTools:
        """Drop the tools that are no functions. If the choice is one of them, the model decides."""
        tools = tools or ()
        others = [tool for tool in tools if isinstance(tool, OtherTool)]
        functions = [tool for tool in tools if isinstance(tool, Tool)] or None
        ignored = [f"tools[].{tool.type}" for tool in others]
        if isinstance(choice, AllowedToolChoice):
            allowed = choice.allowed_tools
            dropped = [tool.type for tool in allowed.tools if not isinstance(tool, NamedToolChoice)]
            ignored += [f"tool_choice.tools[].{kind}" for kind in dropped]
            return GivenTools(functions, "none" if len(dropped) == len(allowed.tools) else choice, ignored)
        is_of_other = isinstance(choice, NamedToolChoice) and choice.function.name in [tool.name for tool in others]
        if isinstance(choice, OtherKind):
            return GivenTools(functions, None, [*ignored, f"tool_choice.{choice.type}"])
        if is_of_other or (choice == "required" and 0 < len(others) == len(tools)):
            return GivenTools(functions, None, [*ignored, "tool_choice"])
        return GivenTools(functions, choice, ignored)


def chosen_tools(tools: Sequence[Tool] | None, choice: ToolChoice | None, parallel: bool | None) -> ChosenTools:
    """Validate a body's `tools`, `tool_choice` and `parallel_tool_calls`.

    Raises:
        RequestError: the choice is not among the tools, two tools have one name, or parameters are not the schema of
            an object.
    """
    allowed, required = _allowed(choice)
    if not tools:
        if required:
            raise RequestError("tool_choice requires a call, but there are no tools", "tool_choice")
        return ChosenTools()
    schemas = _schemas_of(tools)
    if unknown := next((name for name in allowed or () if name not in schemas), None):
        raise RequestError(f"tool_choice names {unknown!r}, which is not among the tools", "tool_choice")
    if choice == "none":
        return ChosenTools()
    functions = {name: schema for name, schema in schemas.items() if allowed is None or name in allowed}
    strict = {tool.function.name for tool in tools if tool.function.strict} & functions.keys()
    # Schemas of other functions are used only to tell texts from JSON.
    for name in functions if required else strict:
        functions[name] = enforceable(functions[name], "tools[].function.parameters")
    several = parallel is not False and not isinstance(choice, NamedToolChoice)
    return ChosenTools(functions, required, several, frozenset(strict))


def _allowed(choice: object) -> tuple[Sequence[str] | None, bool]:
    """(Names that may be called, or `None` for all; whether one must be.)"""
    if isinstance(choice, NamedToolChoice):
        return [choice.function.name], True
    if isinstance(choice, AllowedToolChoice):
        allowed = choice.allowed_tools
        named = [tool.function.name for tool in allowed.tools if isinstance(tool, NamedToolChoice)]
        return named, allowed.mode == "required"
    return None, choice == "required"


def _schemas_of(tools: Sequence[Tool]) -> dict[str, Any]:
    schemas = {tool.function.name: tool.function.arguments_schema() for tool in tools}
    if len(schemas) < len(tools):
        names = [tool.function.name for tool in tools]
        twice = next(name for name in names if names.count(name) > 1)
        raise RequestError(f"two tools have the name {twice!r}; names must be unique", "tools")
    return schemas
