"""Request bodies of `/tokenize` and `/detokenize` as vLLM has them, and their answers."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from folio.app.api.base import Omitted, StrictBody, Text, at_most
from folio.app.api.openai.chat_body import Messages, TemplateFields
from folio.app.api.openai.sampling_body import TokenIds
from folio.app.api.tools.bodies import Tools

# Bounded because decoding is one call, which holds the interpreter's lock part of the time.
MAX_DETOKENIZED = 1 << 18


class TokenizeRequest(TemplateFields):
    """`POST /tokenize`: either a text, or a conversation as in `/v1/chat/completions`."""

    model: Annotated[Text | None, Field(max_length=256, examples=["builtin"])] = None
    """A served model, or an adapter; by default the first model."""
    prompt: Annotated[Text | None, Field(examples=["What is Folio?"])] = None
    """A text."""
    messages: Messages | None = None
    """A conversation."""
    tools: Tools = None
    """Functions that the model may call, with `messages` only."""
    add_special_tokens: bool | None = None
    """Add the tokenizer's special tokens, such as a first token. By default true for a text, false for a conversation,
    whose template writes them."""
    return_token_strs: bool | None = None
    """Return each token's text."""


class Tokens(BaseModel):
    """`count` tokens, and with `return_token_strs` their texts: an incomplete character is written `\\xe2\\x82`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: Omitted[list[str]] = None


class DetokenizeRequest(StrictBody):
    """`POST /detokenize`."""

    model: Annotated[Text | None, Field(max_length=256, examples=["builtin"])] = None
    """A served model, or an adapter; by default the first model."""
    tokens: Annotated[TokenIds, at_most(MAX_DETOKENIZED, "tokens"), Field(examples=[[76, 77]])]
    """Token ids, at most 262,144."""


class DetokenizedText(BaseModel):
    """The text, special tokens included."""

    prompt: str
