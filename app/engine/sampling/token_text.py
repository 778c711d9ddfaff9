"""Token text: the bytes of each token, and incremental detokenisation with stop strings."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from folio.app.errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_SENTENCEPIECE_SPACE = "▁"
# Decoders whose tokens have the same bytes whatever their neighbours are.
_INDEPENDENT = {"ByteLevel", "ByteFallback", "Metaspace"}


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """A tokenizer's vocabulary.

    Attributes:
        tokens: bytes by token id; the name of special tokens, empty for unused ids.
        special: ids of tokens that detokenisation drops.
    """

    tokens: tuple[bytes, ...]
    special: frozenset[int]


def has_independent_tokens(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether each token has bytes of its own, so that outputs may have a structure."""
    return bool(_kinds(_decoders(tokenizer)) & _INDEPENDENT)


def token_bytes(tokenizer: PreTrainedTokenizerBase) -> TokenBytes:
    """Read a fast tokenizer's vocabulary, in almost a second for 150,000 tokens.

    Raises:
        RequestError: tokens are neither byte-level (GPT-2, Llama 3, Qwen) nor sentencepiece's (Llama 2, Gemma).
    """
    backend = tokenizer.backend_tokenizer
    decoders = _decoders(tokenizer)
    kinds = _kinds(decoders)
    byte_level = "ByteLevel" in kinds
    if not kinds & _INDEPENDENT:
        raise RequestError(
            f"structured output is not possible: the tokenizer's decoder is {sorted(kinds) or 'missing'}, and only "
            "byte-level and sentencepiece tokens are independent of their neighbours; send the request without a "
            "structure",
            "structure",
        )
    space = next((d["replacement"] for d in decoders if d["type"] == "Metaspace"), _SENTENCEPIECE_SPACE)
    vocabulary: dict[str, int] = backend.get_vocab(with_added_tokens=True)
    added = backend.get_added_tokens_decoder()
    tokens = [b""] * (max(vocabulary.values(), default=-1) + 1)
    special = set()
    for name, token_id in vocabulary.items():
        if token_id in added:
            tokens[token_id] = name.encode()  # unchanged by the decoder
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


def _decoders(tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """Steps of the decoder; without one, tokens are joined by spaces."""
    decoder = tokenizer.backend_tokenizer.decoder
    # Its pickled state is its JSON. The whole tokenizer's would take half a second.
    return [] if decoder is None else list(_steps(json.loads(decoder.__getstate__())))


def _steps(decoder: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if decoder["type"] == "Sequence":
        for inner in decoder["decoders"]:
            yield from _steps(inner)
    else:
        yield decoder


def _kinds(decoders: list[dict[str, Any]]) -> set[str]:
    return {decoder["type"] for decoder in decoders}


def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 bytes are themselves, the others are characters from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _byte_of_character()


def byte_level_bytes(name: str) -> bytes | None:
    """Bytes of a token in GPT-2's alphabet; `None` for other characters, which the decoder would not return."""
    try:
        return bytes([_BYTE_OF[character] for character in name])
    except KeyError:
        return None


# The context that can change the output's text is a token or two.
_CONTEXT_TOKENS = 8
# Most tokens that are held back until they complete a character, and the last of them that may be part of one.
_MOST_HELD, _OF_CHARACTER = 16, 3


class IncrementalDetokenizer:
    """Text of one output, emitted in whole characters; text that may begin a stop string is held back.

    Args:
        tokenizer: the fast tokenizer's backend.
        prompt_token_ids: context before the output; it decides, for example, whether a first space is kept.
        stop: strings that end the text.
        include_stop_str: whether the text includes the stop string.
        kept: special tokens that are part of the text.

    Attributes:
        met: the stop string that ended the text: the first complete one, or the longest of several, independent of the
            tokenisation.
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
            before = []  # cut inside a character: the stream would emit the prompt
        self._decoder = DecodeStream(ids=before, skip_special_tokens=True)
        self.met: str | None = None
        self._stop = tuple(stop)
        self._include_stop_str = include_stop_str
        self._kept = frozenset(kept)
        self._held = ""  # text that may begin a stop string
        self._incomplete: list[int] = []  # tokens whose bytes do not complete a character yet

    def push(self, token_id: int) -> tuple[str, bool]:
        """Add a token; return the text that is now certain, and whether a stop string ended it."""
        piece = self._decode(token_id)
        if piece is None:  # incomplete character
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
            name = self._tokenizer.id_to_token(token_id)
            return name if name is None or not self._incomplete else self._restart([]) + name
        try:
            piece = self._decoder.step(self._tokenizer, token_id)
        except Exception as error:
            if "Invalid prefix" not in str(error):
                raise
            # Bytes did not complete a character, and already emitted text would change: start again.
            return self._restart([token_id]) or None
        if piece is not None:
            if self._incomplete:
                self._incomplete = []
            return piece
        if self._tokenizer.decode([token_id], skip_special_tokens=True):  # else it never is text
            self._incomplete.append(token_id)
        if len(self._incomplete) <= _MOST_HELD:
            return None
        self._incomplete, last = self._incomplete[:-_OF_CHARACTER], self._incomplete[-_OF_CHARACTER:]
        return self._restart(last)

    def _restart(self, token_ids: list[int]) -> str:
        """Begin decoding again with these tokens; returns the text of the incomplete ones as they are, and of these."""
        text: str = self._tokenizer.decode(self._incomplete, skip_special_tokens=True)
        self._decoder, self._incomplete = DecodeStream(ids=[], skip_special_tokens=True), []
        for token_id in token_ids:
            piece = self._decoder.step(self._tokenizer, token_id)
            self._incomplete = [*self._incomplete, token_id] if piece is None else []
            text += piece or ""
        return text

    def flush(self) -> str:
        """Return the text held back, at the end of the output: also bytes that form no character, as U+FFFD."""
        text = self._held + self._tokenizer.decode(self._incomplete, skip_special_tokens=True)
        self._held, self._incomplete = "", []
        return text


def overlap(text: str, mark: str) -> int:
    """Length of the longest proper prefix of `mark` at the end of `text`."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
