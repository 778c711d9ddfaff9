"""Token ids to text, piece by piece: never half a character, never part of a stop string."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

# What the text before the output can change reaches back a token or two.
_CONTEXT_TOKENS = 8


class TextStream:
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
