"""What each token of a vocabulary adds to the text, as bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from app.errors import RequestError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_SENTENCEPIECE_SPACE = "▁"


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """A tokenizer's vocabulary.

    Attributes:
        tokens: by token id; of tokens that are no text the name, and nothing for ids without a token.
        special: ids of tokens that are no text: detokenisation drops them.
    """

    tokens: tuple[bytes, ...]
    special: frozenset[int]


def token_bytes(tokenizer: PreTrainedTokenizerBase) -> TokenBytes:
    """Read a fast tokenizer's vocabulary; for 150,000 tokens this takes most of a second.

    Raises:
        RequestError: its tokens are neither byte-level (GPT-2, Llama 3, Qwen) nor sentencepiece's (Llama 2, Gemma).
    """
    backend = tokenizer.backend_tokenizer
    decoders = list(_decoders(json.loads(backend.to_str())["decoder"]))
    kinds = {decoder["type"] for decoder in decoders}
    byte_level = "ByteLevel" in kinds
    if not byte_level and not kinds & {"ByteFallback", "Metaspace"}:
        raise RequestError(
            f"this model cannot keep to a structure: its tokenizer's decoder is {sorted(kinds) or 'missing'}, and only "
            "byte-level and sentencepiece tokens mean the same wherever they are",
            "structure",
        )
    space = next((d["replacement"] for d in decoders if d["type"] == "Metaspace"), _SENTENCEPIECE_SPACE)
    vocabulary: dict[str, int] = backend.get_vocab(with_added_tokens=True)
    added = backend.get_added_tokens_decoder()
    tokens = [b""] * (max(vocabulary.values(), default=-1) + 1)
    special = set()
    for name, token_id in vocabulary.items():
        if token_id in added:
            tokens[token_id] = name.encode()  # as it is, whatever the decoder does to others
            if added[token_id].special:
                special.add(token_id)
        elif byte_level:
            piece = byte_level_bytes(name)
            tokens[token_id] = name.encode() if piece is None else piece
            if piece is None:
                special.add(token_id)
        elif "ByteFallback" in kinds and (byte := _BYTE_TOKEN.fullmatch(name)):
            tokens[token_id] = bytes.fromhex(byte[1])
        else:
            tokens[token_id] = name.replace(space, " ").encode()
    return TokenBytes(tuple(tokens), frozenset(special))


def _decoders(decoder: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    if decoder is None:
        return
    if decoder["type"] == "Sequence":
        for inner in decoder["decoders"]:
            yield from _decoders(inner)
    else:
        yield decoder


def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: bytes that Latin-1 can print stand for themselves, the others for what comes after it."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _byte_of_character()


def byte_level_bytes(name: str) -> bytes | None:
    """What a token of GPT-2's alphabet stands for; `None` outside of it: the decoder would not give these back."""
    try:
        return bytes([_BYTE_OF[character] for character in name])
    except KeyError:
        return None
