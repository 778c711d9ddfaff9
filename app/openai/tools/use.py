"""What the tools of a request mean for its prompt and its output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from app.engine.sampling.params import Structure
from app.errors import RequestError
from app.openai.tools.bodies import NamedToolChoice, Tool, ToolChoice
from app.openai.tools.formats import ToolFormat, arguments_schema, tool_format
from app.openai.tools.parser import ToolCallParser


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How a request's output may call tools.

    Attributes:
        functions: names of those that may be called.
        structure: what the output has to look like when a call is required.
        kept_token_ids: special tokens that are part of calls: detokenisation has to keep their text.
    """

    format: ToolFormat
    functions: frozenset[str]
    structure: Structure | None
    kept_token_ids: frozenset[int]

    def parser(self) -> ToolCallParser:
        """A parser for one output."""
        return ToolCallParser(self.format, self.functions, forced=self.structure is not None)


def tool_use(
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[Tool] | None,
    choice: ToolChoice | None,
    parallel: bool | None,
) -> ToolUse | None:
    """From a body's `tools`, `tool_choice` and `parallel_tool_calls`.

    Returns:
        `None` if all of the output is content: no tools are shown, or nobody knows how the model writes its calls.

    Raises:
        RequestError: the choice has no such tool, two have the same name, parameters are not an object's schema, the
            model's template knows no tools, or a call is required of a model whose syntax is not known.
    """
    named = choice.function.name if isinstance(choice, NamedToolChoice) else None
    required = named is not None or choice == "required"
    if not tools:
        if required:
            raise RequestError("tool_choice requires a call, but there are no tools", "tool_choice")
        return None
    _check(tools, named)
    if choice == "none":
        return None
    syntax = tool_format(tokenizer)
    if syntax is None:
        if required:
            raise RequestError(
                "this model writes calls in a syntax not known here; use 'auto' or 'none'", "tool_choice"
            )
        return None
    callable_tools = [tool for tool in tools if named in (None, tool.function.name)]
    structure = None
    if required:
        structure = syntax.structure(callable_tools, parallel=parallel is not False and named is None)
    return ToolUse(
        syntax,
        frozenset(tool.function.name for tool in callable_tools),
        structure,
        frozenset(token_id for _, token_id in syntax.special_tokens),
    )


def _check(tools: Sequence[Tool], named: str | None) -> None:
    names = [tool.function.name for tool in tools]
    for tool in tools:
        arguments_schema(tool)
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise RequestError(f"two tools have the name {twice!r}; each needs its own", "tools")
    if named is not None and named not in names:
        raise RequestError(f"tool_choice names {named!r}, which is not among the tools", "tool_choice")
