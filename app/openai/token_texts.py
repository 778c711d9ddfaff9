"""What tokens are by themselves: bytes, and how these are written in log probabilities."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from app.engine.sampling.token_text import byte_level_bytes

# SentencePiece's sign for a space.
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


class TokenTexts:
    """The texts of a tokenizer's tokens. A decoder would take a token's first space, and write what is no whole
    character as one that replaces it: so their bytes are read from the vocabulary."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._backend: Tokenizer = tokenizer.backend_tokenizer
        self._added = self._backend.get_added_tokens_decoder()
        decoders = set(_decoder_types(self._backend))
        self._is_byte_level = "ByteLevel" in decoders
        self._has_space_sign = bool(decoders & {"Metaspace", "Replace", "ByteFallback"})

    def is_special(self, token_id: int) -> bool:
        """Whether it is not part of any text."""
        added = self._added.get(token_id)
        return added is not None and added.special

    def bytes_of(self, token_id: int) -> bytes:
        """Its text in UTF-8, perhaps part of a character; nothing when the model has more tokens than the tokenizer."""
        if token_id in self._added:
            return self._added[token_id].content.encode()
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._is_byte_level and (content := byte_level_bytes(token)) is not None:
            return content
        if self._has_space_sign:
            if len(token) == 6 and token.startswith("<0x"):
                return bytes([int(token[3:5], 16)])
            return token.replace(_SPACE, " ").encode()
        return self._backend.decode([token_id], skip_special_tokens=False).encode()

    def chat_token(self, token_id: int) -> str:
        """As chat completions write it: `\\xe2\\x82` when it is no whole character."""
        return _written(self.bytes_of(token_id), "")

    def completion_token(self, token_id: int) -> str:
        """As completions write it: `bytes:\\xe2\\x82` when it is no whole character."""
        return _written(self.bytes_of(token_id), "bytes:")


def _written(content: bytes, mark: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError:
        return mark + "".join(f"\\x{byte:02x}" for byte in content)


def _decoder_types(tokenizer: Tokenizer) -> Iterator[str]:
    """Names of the tokenizer's decoders, those of a sequence one after the other."""
    if tokenizer.decoder is None:
        return
    state: Mapping[str, Any] = json.loads(tokenizer.decoder.__getstate__())
    yield state["type"]
    for part in state.get("decoders", ()):
        # "Replace" is a sign for a space, or anything else
        if part["type"] != "Replace" or part["pattern"] == {"String": _SPACE}:
            yield part["type"]
