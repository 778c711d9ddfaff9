"""Tool use: how the output of one request may call tools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from app.engine.sampling.params import Structure
from app.errors import RequestError
from app.openai.tools.bodies import NamedToolChoice, Tool, ToolChoice
from app.openai.tools.formats import ToolFormat, tool_format
from app.openai.tools.parser import ToolCallParser


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How a request's output may call tools.

    Attributes:
        functions: names of the functions that may be called.
        structure: the grammar of the output when a call is required.
    """

    format: ToolFormat
    functions: frozenset[str]
    structure: Structure | None

    @property
    def kept_token_ids(self) -> frozenset[int]:
        """Special tokens that are part of calls: detokenisation keeps their text."""
        return frozenset(token_id for _, token_id in self.format.special_tokens)

    def parser(self) -> ToolCallParser:
        """A parser for one output."""
        return ToolCallParser(self.format, self.functions, forced=self.structure is not None)


def tool_use(
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[Tool] | None,
    choice: ToolChoice | None,
    parallel: bool | None,
) -> ToolUse | None:
    """Validate a body's `tools`, `tool_choice` and `parallel_tool_calls`.

    Returns:
        `None` if all output is content: there are no tools to call, or the model's format is not supported.

    Raises:
        RequestError: the choice is not among the tools, two tools have one name, parameters are not the schema of an
            object, the template does not use tools, or a call is required in a format that is not supported.
    """
    named = choice.function.name if isinstance(choice, NamedToolChoice) else None
    required = named is not None or choice == "required"
    if not tools:
        if required:
            raise RequestError("tool_choice requires a call, but there are no tools", "tool_choice")
        return None
    names = [tool.function.name for tool in tools]
    for tool in tools:
        tool.function.arguments_schema()
        if names.count(tool.function.name) > 1:
            raise RequestError(f"two tools have the name {tool.function.name!r}; names must be unique", "tools")
    if named is not None and named not in names:
        raise RequestError(f"tool_choice names {named!r}, which is not among the tools", "tool_choice")
    if choice == "none":
        return None
    syntax = tool_format(tokenizer)
    if syntax is None:
        if required:
            raise RequestError("this model's format of calls is not supported; use 'auto' or 'none'", "tool_choice")
        return None
    callable_tools = [tool for tool in tools if named in (None, tool.function.name)]
    parallel = parallel is not False and named is None
    structure = syntax.structure(callable_tools, parallel) if required else None
    return ToolUse(syntax, frozenset(tool.function.name for tool in callable_tools), structure)
