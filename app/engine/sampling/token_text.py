"""What each token of a vocabulary adds to the text, as bytes.

Token ids to text, piece by piece: never half a character, never part of a stop string.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
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


# What the text before the output can change reaches back a token or two.
_CONTEXT_TOKENS = 8


class IncrementalDetokenizer:
    """The text of one output as it grows.

    Args:
        tokenizer: the fast tokenizer's backend.
        prompt_token_ids: what came before: it decides, for example, whether a first space is kept.
        stop: strings that end the text.
        include_stop_str: whether the one that ends it is part of it.
        kept: special tokens that are part of the text; others are not.

    Attributes:
        met: the stop string that ended it: the one that was complete first, among those the longest. It does not depend
            on how the text is cut into tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        stop: Sequence[str],
        *,
        include_stop_str: bool = False,
        kept: Collection[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        before = list(prompt_token_ids[-_CONTEXT_TOKENS:])
        if tokenizer.decode(before, skip_special_tokens=True).endswith("\ufffd"):
            before = []  # cut inside a character: the stream would take the prompt for output
        self._decoder = DecodeStream(ids=before, skip_special_tokens=True)
        self.met: str | None = None
        self._stop = tuple(stop)
        self._include_stop_str = include_stop_str
        self._kept = frozenset(kept)
        self._held = ""  # text that may turn out to be the beginning of a stop string

    def push(self, token_id: int) -> tuple[str, bool]:
        """Add a token; returns the text that is now certain, and whether a stop string was met."""
        piece = self._decode(token_id)
        if piece is None:  # in the middle of a character
            return "", False
        if not self._stop:
            return piece, False
        text = self._held + piece
        found = [(at + len(s), at, s) for at, s in ((text.find(s), s) for s in self._stop) if at >= 0]
        if found:
            end, start, self.met = min(found)
            self._held = ""
            return text[: end if self._include_stop_str else start], True
        keep = max(overlap(text, s) for s in self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def _decode(self, token_id: int) -> str | None:
        if token_id in self._kept:
            return self._tokenizer.id_to_token(token_id)
        try:
            return self._decoder.step(self._tokenizer, token_id)
        except Exception as error:
            if "Invalid prefix" not in str(error):
                raise
            # Bytes that looked like a character were none, and text already out reads differently now: start anew.
            self._decoder = DecodeStream(ids=[], skip_special_tokens=True)
            return self._decoder.step(self._tokenizer, token_id)

    def flush(self) -> str:
        """The text held back, once no more can follow."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that begins `mark` and is not all of it."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
