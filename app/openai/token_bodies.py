"""Bodies of `/tokenize` and `/detokenize`, shaped as vLLM's."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from app.openai.bodies import Messages
from app.openai.lean import LeanReply
from app.openai.sampling_body import TokenIds
from app.openai.strict import StrictBody, Text, at_most
from app.openai.tool_bodies import Tools

# Their text is made in one call, during which some of the time nothing else runs.
MAX_DETOKENIZED = 1 << 18


class TokenizeRequest(StrictBody):
    """`POST /tokenize`: either a text, or a conversation as `/v1/chat/completions` would write it."""

    model: Annotated[Text | None, Field(max_length=256, examples=["builtin"])] = None
    """The served model, or an adapter of it; by default the model."""
    prompt: Annotated[Text | None, Field(examples=["What is Folio?"])] = None
    """A text."""
    messages: Messages | None = None
    """A conversation."""
    tools: Tools | None = None
    """With messages: functions that the model may call."""
    add_special_tokens: bool | None = None
    """What the tokenizer puts around a text, such as a first token; true by default. A conversation's template writes
    them itself."""
    add_generation_prompt: bool | None = None
    """With messages: what an answer follows. True by default."""
    return_token_strs: bool | None = None
    """Add each token's text."""


class Tokens(LeanReply):
    """`count` tokens; `token_strs` if they were asked for: what is no whole character is written `\\xe2\\x82`."""

    _left_out = frozenset({"token_strs"})

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(StrictBody):
    """`POST /detokenize`."""

    model: Annotated[Text | None, Field(max_length=256, examples=["builtin"])] = None
    """The served model, or an adapter of it; by default the model."""
    tokens: Annotated[TokenIds, at_most(MAX_DETOKENIZED, "tokens"), Field(examples=[[76, 77]])]
    """262,144 at most."""


class DetokenizedText(BaseModel):
    """The text, with special tokens as they are written."""

    prompt: str
