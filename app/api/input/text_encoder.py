"""Encodes texts as tokens. A client's control tokens stay text; too long texts are refused before tokenisation."""

from __future__ import annotations

import itertools
import json
import secrets
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from tokenizers import Encoding
from tokenizers.pre_tokenizers import ByteLevel

from folio.app.errors import ContextLengthError, RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The most control tokens that a text may spell; the text is cut at each.
MAX_SPELLED = 4096
# NFC shortens some texts, at most to 2/7 of their bytes (U+1FBE, U+0308, U+0301 become U+0390).
_NFC_SHRINKS = 4


class TextEncoder:
    """Tokenises without holding the interpreter's lock.

    A chat template renders messages and its own control tokens into one text, in which a tokenizer reads every
    `<|end|>` as the token. Clients' texts are therefore *shielded* before they are rendered: a mark is put into every
    control token that they spell. The rendered text is cut at the marks and its parts are tokenised one by one, so that
    no part contains a client's control token. Texts that spell none are tokenised as usual.

    Args:
        tokenizer: of the tokenizers library.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        tokenizer.encode("")  # switches off the backend's truncation and padding
        self._backend = tokenizer.backend_tokenizer
        special = [token for token in self._backend.get_added_tokens_decoder().values() if token.special]
        # Clients cannot guess the mark, and templates that quote, trim or change case leave digits unchanged.
        self._mark = f"{secrets.randbelow(10**32):032}"
        self._spelled = sorted({token.content for token in special}, key=len)
        self._begins = {content[0] for content in self._spelled}
        # Tokens that are matched after normalisation, which may turn other texts into them.
        normalizer = self._backend.normalizer
        self._normalized = [t.content for t in special if t.normalized] if normalizer is not None else []

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The tokens of a text, perhaps a rendered one. Control tokens that it spells without marks become tokens."""
        parts = text.split(self._mark)
        only = len(parts) == 1
        encodings = self._backend.encode_batch_fast(parts, add_special_tokens=add_special_tokens and only)
        if add_special_tokens and not only:
            return self._backend.post_process(Encoding.merge(encodings)).ids
        return list(itertools.chain.from_iterable(encoding.ids for encoding in encodings))

    def encode_pair(self, first: str, second: str) -> list[int]:
        """The tokens of two texts, as the tokenizer joins them."""
        [encoding] = self._backend.encode_batch_fast([(first, second)], add_special_tokens=True)
        return list(encoding.ids)

    def without_end(self, text: str, num_tokens: int) -> str:
        """The text without its last tokens, shorter by at least one character."""
        [encoding] = self._backend.encode_batch([text], add_special_tokens=False)
        start, _ = encoding.offsets[-num_tokens] if num_tokens < len(encoding.offsets) else (0, 0)
        return text[: min(start, len(text) - 1)]

    def shielded(self, value: Any, param: str) -> Any:
        """Shield all texts of a client's value of texts, lists and dicts. Raises `RequestError` for a text that spells
        too many control tokens, or one that cannot be cut."""
        if isinstance(value, str):
            return self._shielded(value, param)
        if isinstance(value, dict):
            return {self.shielded(name, param): self.shielded(item, param) for name, item in value.items()}
        return [self.shielded(item, param) for item in value] if isinstance(value, list) else value

    def unshielded(self, text: str) -> str:
        """The rendered text without marks."""
        return text.replace(self._mark, "")

    def _shielded(self, text: str, param: str) -> str:
        if self._normalized:
            normal = self._backend.normalizer.normalize_str(text)
            if any(content in normal and content not in text for content in self._normalized):
                raise RequestError(f"{param} spells a control token of this model in other characters", param)
        if not any(begin in text for begin in self._begins):
            return text
        for content in self._spelled:
            while content in text:  # repeatedly, as occurrences may overlap
                if len(content) == 1 or text.count(content) > MAX_SPELLED:
                    most = MAX_SPELLED if len(content) > 1 else 0
                    raise RequestError(f"{param} spells the control token {content!r} more than {most} times", param)
                text = text.replace(content, content[0] + self._mark + content[1:])
        return text


class TextBounds:
    """Lower bound on the tokens of a text, from the bytes of the tokenizer's longest token. Tokenizers that leave out
    text, or have one token for all unknown text, have no such bound."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        state: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str())
        self._longest = _longest_token(state)
        self._shrinks = any(part["type"] == "NFC" for part in _parts(state["normalizer"], "normalizers"))

    def check_length(self, text: str, max_model_len: int, param: str) -> None:
        """Raise `ContextLengthError` if the text must have more than `max_model_len` tokens."""
        if self._longest is None:
            return
        num_bytes = len(text) if text.isascii() else len(text.encode())
        longest = self._longest * (_NFC_SHRINKS if self._shrinks and not text.isascii() else 1)
        if num_bytes > max_model_len * longest:
            raise ContextLengthError.of_prompt(-(-num_bytes // longest), max_model_len, param, num_bytes=num_bytes)


def _longest_token(state: Mapping[str, Any]) -> int | None:
    """Bytes of the longest token, from a tokenizer's serialised state; `None` if tokens are not parts of the text."""
    model, added = state["model"], state["added_tokens"]
    before = list(_parts(state["pre_tokenizer"], "pretokenizers"))
    if model.get("type") != "BPE" or any(token["lstrip"] or token["rstrip"] for token in added):
        return None
    if not all(_keeps_length(part) for part in _parts(state["normalizer"], "normalizers")):
        return None
    if not all(_keeps_all(part) for part in before):
        return None
    # Every byte must have a token: then no text is left out or unknown. A character of GPT-2's alphabet is a byte.
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
    """Whether the normalised text has at least as many bytes, except for NFC."""
    if normalizer["type"] == "Replace":
        replaced = normalizer["pattern"].get("String")
        return replaced is not None and len(normalizer["content"].encode()) >= len(replaced.encode())
    return normalizer["type"] in {"NFC", "Prepend"}


def _keeps_all(pre_tokenizer: Mapping[str, Any]) -> bool:
    """Whether all text becomes tokens."""
    if pre_tokenizer["type"] in {"Split", "Punctuation"}:
        return pre_tokenizer["behavior"] != "Removed"
    return pre_tokenizer["type"] in {"ByteLevel", "Digits", "Metaspace"}


def _parts(state: Mapping[str, Any] | None, name: str) -> Iterator[Mapping[str, Any]]:
    """The parts of a component, with nested sequences flattened."""
    if state is None:
        return
    if state["type"] != "Sequence":
        yield state
        return
    for part in state[name]:
        yield from _parts(part, name)
