"""How much text a number of tokens can be at most: what is longer need not be tokenised to be refused."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerBase

from app.errors import ContextLengthError

# NFC makes other characters shorter, at most to 2/7 of their bytes (U+1FBE, U+0308, U+0301 are U+0390).
_NFC_SHRINKS = 4


class TextBounds:
    """The longest token of a tokenizer in bytes, if each token is a bounded part of the text: not so when it may leave
    out something, or has one token for all that it does not know. Then nothing is refused."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        state: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str())
        self._longest = _longest_token(state)
        self._shrinks = any(part["type"] == "NFC" for part in _parts(state["normalizer"], "normalizers"))

    def check(self, text: str, max_model_len: int, param: str) -> None:
        """Raises `ContextLengthError` when it has more tokens than that for sure."""
        if self._longest is None:
            return
        num_bytes = len(text) if text.isascii() else len(text.encode())
        longest = self._longest * (_NFC_SHRINKS if self._shrinks and not text.isascii() else 1)
        if num_bytes > max_model_len * longest:
            raise ContextLengthError(
                f"the context is {max_model_len} tokens, and {param} has {num_bytes} bytes: more than so many tokens "
                "can be",
                param,
            )


def _longest_token(state: Mapping[str, Any]) -> int | None:
    """Of a tokenizer as it is written to a file."""
    model, added = state["model"], state["added_tokens"]
    before = list(_parts(state["pre_tokenizer"], "pretokenizers"))
    if model.get("type") != "BPE" or any(token["lstrip"] or token["rstrip"] for token in added):
        return None
    if not all(_keeps_length(part) for part in _parts(state["normalizer"], "normalizers")):
        return None
    if not all(_keeps_all(part) for part in before):
        return None
    # Every byte has a token, so that nothing is left out or unknown; in GPT-2's alphabet a character is a byte.
    is_byte_level = any(part["type"] == "ByteLevel" for part in before)
    names = model["vocab"].keys()
    if is_byte_level:
        if not names >= set(ByteLevel.alphabet()):
            return None
        longest = max(map(len, names))
    else:
        if not model["byte_fallback"] or not all(f"<0x{byte:02X}>" in names for byte in range(256)):
            return None
        longest = max(len(name.encode()) for name in names)
    return max(longest, *(len(token["content"].encode()) for token in added), 1)


def _keeps_length(normalizer: Mapping[str, Any]) -> bool:
    """Whether the text has at least as many bytes afterwards, but for NFC."""
    if normalizer["type"] == "Replace":
        replaced = normalizer["pattern"].get("String")
        return replaced is not None and len(normalizer["content"].encode()) >= len(replaced.encode())
    return normalizer["type"] in {"NFC", "Prepend"}


def _keeps_all(pre_tokenizer: Mapping[str, Any]) -> bool:
    """Whether all of the text becomes tokens."""
    if pre_tokenizer["type"] in {"Split", "Punctuation"}:
        return pre_tokenizer["behavior"] != "Removed"
    return pre_tokenizer["type"] in {"ByteLevel", "Digits", "Metaspace"}


def _parts(state: Mapping[str, Any] | None, name: str) -> Iterator[Mapping[str, Any]]:
    """Those of a sequence, one after the other, also within each other."""
    if state is None:
        return
    if state["type"] != "Sequence":
        yield state
        return
    for part in state[name]:
        yield from _parts(part, name)
