"""Content blocks of Anthropic's messages, as clients send them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Tag

from folio.app.api.base import JsonObject, ListOf, StrictBody, Text, at_most, left_out_kind, only_text, text_or
from folio.app.api.openai.chat_body import MAX_PARTS


class CacheControl(StrictBody):
    """A hint that the prompt up to here will be sent again."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None
    """How long to keep the cached prefix. "5m" by default."""
    scope: Text | None = None
    """Sent by Claude Code. Ignored."""

    @property
    def ttl_s(self) -> float:
        return 3600.0 if self.ttl == "1h" else 300.0


class Cacheable(StrictBody):
    """A block or tool that may have a hint."""

    cache_control: CacheControl | None = None


class TextBlock(Cacheable):
    type: Literal["text"]
    text: Text
    citations: list[Any] | None = None
    """Citations of an earlier answer. Ignored."""


class LeftOutBlock(TextBlock):
    """A block of an unsupported type; its text tells the model what was left out."""

    kind: str


def readable(blocks: Any, *, of_user: bool = False) -> Any:
    """A client's blocks, those of unknown types as blocks of text. Images of the user are refused later."""
    return [_readable(block, of_user) for block in blocks] if isinstance(blocks, list) else blocks


def _readable(block: Any, of_user: bool) -> Any:
    kind = block.get("type", "text") if isinstance(block, dict) else "text"
    if kind in _KNOWN:
        return block
    if (text := _text_of(block, of_user)) is not None:
        return {"type": "text", "text": text}
    change = {"tool_reference": "available", "tool_addition": "available", "tool_removal": "no longer available"}
    if isinstance(kind, str) and kind in change and (name := _tool_name(block)) is not None:
        return {"type": "text", "text": f"[tool {name} is {change[kind]}]"}
    name, text = left_out_kind(block)
    return block if text and of_user else LeftOutBlock(type="text", text=text, kind=name)


def _text_of(block: dict[str, Any], of_user: bool) -> str | None:
    """The text of a document or a search result, after its title, or of a block of the user; `None` if it has none."""
    source = block.get("source")
    if of_user and isinstance(text := block.get("text"), str):
        return text
    if block.get("type") == "search_result":
        found = block.get("content")
    elif block.get("type") == "document" and isinstance(source, dict) and source.get("type") in ("text", "content"):
        found = source.get("data", source.get("content"))
    else:
        return None
    parts = [part.get("text") for part in found if isinstance(part, dict)] if isinstance(found, list) else [found]
    texts = [block.get("title"), source, block.get("context"), *parts]
    return "\n".join(text for text in texts if isinstance(text, str))


def _tool_name(block: dict[str, Any]) -> str | None:
    """The name of a tool that a conversation refers to or defines."""
    tool = block.get("tool", block)
    tool = tool.get("definition", tool) if isinstance(tool, dict) else {}
    name = tool.get("tool_name", tool.get("name"))
    return name if isinstance(name, str) else None


TextBlocks = Annotated[
    Annotated[Text, Tag("text")]
    | Annotated[ListOf[Annotated[TextBlock, only_text]], at_most(MAX_PARTS, "blocks"), Tag("blocks")],
    text_or("blocks"),
]


def _as_object(given: Any) -> Any:
    return given if isinstance(given, dict) else {} if given is None else {"input": given}


class ToolUseBlock(Cacheable):
    """A tool call of an earlier answer."""

    type: Literal["tool_use"]
    id: Text
    name: Text
    input: Annotated[JsonObject, BeforeValidator(_as_object)]
    caller: JsonObject | None = None
    """Ignored: the model itself is the only caller."""


class ToolResultBlock(Cacheable):
    """The value that a tool has returned, or its error."""

    type: Literal["tool_result"]
    tool_use_id: Text
    content: Annotated[TextBlocks | None, BeforeValidator(readable)] = None
    """Text, or a list of blocks. Images and other blocks are left out."""
    is_error: bool | None = None
    """The model sees "Error: " before the content."""


class ThinkingBlock(StrictBody):
    """Reasoning of an earlier answer. The signature is not verified."""

    type: Literal["thinking"]
    thinking: Text
    signature: Text | None = None


class RedactedThinkingBlock(StrictBody):
    """Reasoning that only Anthropic's servers can read. Ignored."""

    type: Literal["redacted_thinking"]
    data: Text


_KNOWN = ("text", "tool_use", "tool_result", "thinking", "redacted_thinking")


def _type_of(block: object) -> object:
    return block.get("type") if isinstance(block, dict) else getattr(block, "type", None)


Block = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[RedactedThinkingBlock, Tag("redacted_thinking")],
    Discriminator(
        _type_of,
        custom_error_type="unknown_block",
        custom_error_message="blocks here are of the type 'text', 'tool_use', 'tool_result', 'thinking' or "
        "'redacted_thinking'",
    ),
    only_text,
]
Blocks = Annotated[
    Annotated[Text, Tag("text")] | Annotated[ListOf[Block], at_most(MAX_PARTS, "blocks"), Tag("blocks")],
    text_or("blocks"),
]
