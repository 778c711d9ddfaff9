"""Texts to tokens, where texts of clients never become control tokens."""

from __future__ import annotations

import itertools
import secrets
from typing import Any

from transformers import PreTrainedTokenizerBase

from app.errors import RequestError

# Each splits the text once more.
MAX_SPELLED = 4096


class TextEncoder:
    """Tokenises without holding the interpreter's lock.

    A chat template renders messages and its own control tokens into one text, and a tokenizer takes each `<|end|>` in
    it for the token, whoever wrote it. So clients' texts are *shielded* before they are rendered: a mark goes into
    every control token that they spell. The rendered text is cut at the marks, and its parts are tokenised one by one:
    in none of them is such a token whole. Texts that spell none are tokenised as ever.

    Args:
        tokenizer: of the tokenizers library.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        tokenizer.encode("")  # sets how its backend truncates and pads: not at all
        self._backend = tokenizer.backend_tokenizer
        special = [token for token in self._backend.get_added_tokens_decoder().values() if token.special]
        # Nobody can guess it, and templates that quote, trim or change case leave digits as they are.
        self._mark = f"{secrets.randbelow(10**32):032}"
        self._spelled = sorted({token.content for token in special}, key=len)
        self._begins = {content[0] for content in self._spelled}
        # These are looked for after normalisation, where other texts may have become them.
        normalizer = self._backend.normalizer
        self._normalized = [t.content for t in special if t.normalized] if normalizer is not None else []

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The tokens of a text; control tokens that it spells included."""
        return self._encode([text], add_special_tokens)

    def shielded(self, value: Any, param: str) -> Any:
        """A client's text, or what is made of lists, dicts and texts, as a template may have it. Raises `RequestError`
        when it spells too many control tokens, or one that cannot be cut."""
        if isinstance(value, str):
            return self._shielded(value, param)
        if isinstance(value, dict):
            return {self.shielded(name, param): self.shielded(item, param) for name, item in value.items()}
        return [self.shielded(item, param) for item in value] if isinstance(value, list) else value

    def unshielded(self, text: str) -> str:
        """As it would be rendered without shielding."""
        return text.replace(self._mark, "")

    def encode_shielded(self, text: str) -> list[int]:
        """The tokens of what a template has rendered."""
        return self._encode(text.split(self._mark), add_special_tokens=False)

    def _encode(self, parts: list[str], add_special_tokens: bool) -> list[int]:
        encodings = self._backend.encode_batch_fast(parts, add_special_tokens=add_special_tokens)
        return list(itertools.chain.from_iterable(encoding.ids for encoding in encodings))

    def _shielded(self, text: str, param: str) -> str:
        if self._normalized:
            normal = self._backend.normalizer.normalize_str(text)
            if any(content in normal and content not in text for content in self._normalized):
                raise RequestError(f"{param} spells a control token of this model in other characters", param)
        if not any(begin in text for begin in self._begins):
            return text
        for content in self._spelled:
            while content in text:  # again where it overlaps itself
                if len(content) == 1 or text.count(content) > MAX_SPELLED:
                    most = MAX_SPELLED if len(content) > 1 else 0
                    raise RequestError(f"{param} spells the control token {content!r} more than {most} times", param)
                text = text.replace(content, content[0] + self._mark + content[1:])
        return text
