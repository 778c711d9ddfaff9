"""Text prefixes: the tokens that all prompts with the same beginning share."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from folio.app.config.engine import EngineConfig
from folio.app.errors import ConfigError, RequestError
from folio.app.models.chat_template.template import ChatTemplate, RenderError, chat_template_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Texts that may follow a prefix, as different as possible.
_ENDS = ("a", " Z", "\n")


def encode_pinned(config: EngineConfig, tokenizer: PreTrainedTokenizerBase | None) -> dict[str, list[int]]:
    """Name → tokens of each configured pin.

    Raises:
        ConfigError: a tokenizer or chat template is missing.
    """
    if not config.pinned_prompts and not config.pinned_system_prompts:
        return {}
    if tokenizer is None:
        raise ConfigError("pinned prompts are text and need a tokenizer, but skip_tokenizer_init is set")
    prefixes = {name: text_prefix(tokenizer, text) for name, text in config.pinned_prompts.items()}
    template = chat_template_of(tokenizer) if config.pinned_system_prompts else None
    for name, text in config.pinned_system_prompts.items():
        try:
            prefixes[name] = conversation_prefix(tokenizer, template, [{"role": "system", "content": text}])
        except RequestError as error:
            raise ConfigError(f"the system prompt {name!r} cannot be pinned: {error}") from error
    return prefixes


def text_prefix(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The tokens that all prompts with this beginning share: the last ones may merge with the text that follows, and
    some tokenizers append a token."""
    return _common([tokenizer.encode(text + end) for end in _ENDS])


def conversation_prefix(
    tokenizer: PreTrainedTokenizerBase, template: ChatTemplate | None, messages: Sequence[dict[str, Any]]
) -> list[int]:
    """The tokens that all conversations with these first messages share.

    Raises:
        RequestError: there is no chat template, or it refuses the messages.
    """
    if template is None:
        raise RequestError("this model has no chat template", "messages")
    rendered: list[list[int]] = []
    for end in _ENDS:
        shown = template.arrangement.arranged([*messages, {"role": "user", "content": end}])
        try:
            text = template.render(shown)
        except RenderError as error:
            raise RequestError(f"the model's chat template refuses these messages: {error}", "messages") from error
        rendered.append(tokenizer.encode(text, add_special_tokens=False))
    return _common(rendered)


def _common(prompts: Sequence[Sequence[int]]) -> list[int]:
    columns = itertools.takewhile(lambda column: len(set(column)) == 1, zip(*prompts, strict=False))
    return [column[0] for column in columns]
