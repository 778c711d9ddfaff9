"""N-gram proposer (prompt look-up): the tokens that followed an earlier occurrence of the text's last few tokens.

An index for each sequence maps each n-gram to its last position. It grows with the text:

    token_ids   | piece | piece | piece | recent |
    indexed by    sorted arrays of hashes   dict

A look-up reads the dict and then the pieces, the latest first. N-grams are compared by 64-bit hashes only: a collision
would be a rejected draft token, which costs little.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from folio.app.engine.memory.memory_profile import DevicePlan
from folio.app.engine.report import StepTimes
from folio.app.engine.request.faults import attribute_failures
from folio.app.engine.request.request import Sequence
from folio.vmem import DevicePages, IntegrityError

# Tokens of a piece. Longer pieces make look-ups in long texts faster and single steps slower.
PIECE_TOKENS = 8192
# Tokens indexed in the dict before they move to a piece.
RECENT_TOKENS = 1024
# Tokens of all sequences sorted into pieces in a step: a few milliseconds. A long prompt takes several steps.
STEP_TOKENS = 2 * PIECE_TOKENS

_MULTIPLIER = 0x9E3779B97F4A7C15  # odd, and without small factors in common with differences of token ids
_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """N-grams that are followed by one of the tokens `start … end - 1`.

    Attributes:
        keys: `[num_ngrams]` uint64, ascending distinct hashes.
        follows: `[num_ngrams]` int32, position of the token after the last n-gram with that hash.
    """

    start: int
    end: int
    keys: np.ndarray[Any, np.dtype[np.uint64]]
    follows: np.ndarray[Any, np.dtype[np.int32]]


@dataclass(slots=True, eq=False)
class NgramIndex:
    """Last positions of the n-grams of `least` to `most` tokens in one growing text: about 36 bytes per token for 2 to
    4.

    Attributes:
        pieces: indexes of the older tokens.
        recent: hash → position after the last n-gram with it, of the recent tokens.
    """

    least: int
    most: int
    pieces: list[_Piece] = field(default_factory=list)
    recent: dict[int, int] = field(default_factory=dict)
    piece_tokens: int = PIECE_TOKENS
    recent_tokens: int = RECENT_TOKENS
    _end: int = 0  # n-grams followed by tokens before it are indexed

    @property
    def _sealed(self) -> int:
        return self.pieces[-1].end if self.pieces else 0

    def extend(self, token_ids: list[int], budget: int) -> int:
        """Index added text, sorting at most `budget` tokens; the remainder waits for the next call. Returns the number
        of sorted tokens."""
        num_sorted = 0
        while len(token_ids) - self._sealed >= self.recent_tokens:
            start, end = self._sealed, min(self._sealed + self.piece_tokens, len(token_ids))
            grows = bool(self.pieces) and end - self.pieces[-1].start <= self.piece_tokens
            if grows:  # extend a short piece, to limit the number of pieces
                start = self.pieces[-1].start
            if num_sorted + end - start > budget:
                break
            num_sorted += end - start
            if grows:
                self.pieces.pop()
            self.pieces.append(_sort(token_ids, start, end, self.least, self.most))
            self.recent.clear()
            self._end = end
        if len(token_ids) - self._end <= self.recent_tokens:  # else the remainder waits to be sorted
            for follows in range(self._end, len(token_ids)):
                key = 0
                for n in range(1, min(self.most, follows) + 1):
                    key = (key * _MULTIPLIER + token_ids[follows - n] + n) & _MASK
                    if n >= self.least:
                        self.recent[key] = follows
            self._end = max(self._end, len(token_ids))
        return num_sorted

    def find(self, token_ids: abc.Sequence[int]) -> int | None:
        """Position after the last earlier occurrence of the longest indexed n-gram at the end of the text."""
        keys, key = [], 0
        for n in range(1, min(self.most, len(token_ids)) + 1):
            key = (key * _MULTIPLIER + token_ids[-n] + n) & _MASK
            if n >= self.least:
                keys.append(key)
        if not keys:
            return None
        found: list[int | None] = [self.recent.get(key) for key in keys]
        for piece in reversed(self.pieces):
            if found[-1] is not None:
                break
            hashes = np.array(keys, dtype=np.uint64)
            places = np.searchsorted(piece.keys, hashes)
            for i, place in enumerate(places.tolist()):
                if found[i] is None and place < len(piece.keys) and piece.keys[place] == hashes[i]:
                    found[i] = int(piece.follows[place])
        return next((position for position in reversed(found) if position is not None), None)

    def check_integrity(self, token_ids: abc.Sequence[int]) -> None:
        """Raise `IntegrityError` unless the pieces are contiguous within the text."""
        end = 0
        for piece in self.pieces:
            if piece.start != end or not piece.start < piece.end <= len(token_ids):
                raise IntegrityError(f"a piece of tokens {piece.start} to {piece.end} after {end}")
            end = piece.end
        if not end <= self._end <= len(token_ids):
            raise IntegrityError(f"{self._end} tokens indexed, {end} of them in pieces, of {len(token_ids)}")


class NgramProposer:
    """Proposes the continuation of the last occurrence of the last `max_ngram` to `min_ngram` tokens. At the end of the
    text it continues with its own draft tokens, so that a loop is proposed completely.

    A sequence's index is built at its first call; a prompt of more than `STEP_TOKENS` takes several steps.
    """

    share = 0.0
    memory = graphs = None
    models = ()

    def __init__(
        self, *, min_ngram: int = 2, max_ngram: int = 4, new_index: Callable[[int, int], NgramIndex] = NgramIndex
    ) -> None:
        assert 1 <= min_ngram <= max_ngram
        self._new_index = partial(new_index, min_ngram, max_ngram)
        self._indexes: dict[Sequence, NgramIndex] = {}

    def open(self, max_model_len: int, plan: DevicePlan | None = None, pages: DevicePages | None = None) -> None:
        pass

    @property
    def step_times(self) -> StepTimes:
        return StepTimes()

    def propose(self, sequences: abc.Sequence[Sequence], most: abc.Sequence[int]) -> list[list[int]]:
        budget = STEP_TOKENS
        drafts: list[list[int]] = []
        for sequence, count in zip(sequences, most, strict=True):
            if count < 1:
                drafts.append([])
                continue
            with attribute_failures(sequence):
                index = self._indexes.setdefault(sequence, self._new_index())
                budget -= index.extend(sequence.token_ids, budget)
                drafts.append(_continue(sequence.token_ids, index.find(sequence.token_ids), count))
        return drafts

    def forget_sequence(self, sequence: Sequence) -> None:
        self._indexes.pop(sequence, None)

    def forget_all(self) -> None:
        self._indexes.clear()

    def check_integrity(self) -> None:
        for sequence, index in self._indexes.items():
            index.check_integrity(sequence.token_ids)

    def close(self) -> None:
        self.forget_all()


def _continue(token_ids: abc.Sequence[int], start: int | None, count: int) -> list[int]:
    """`count` tokens from `start` on, as if the text continued with them."""
    if start is None:
        return []
    drafts = list(token_ids[start : start + count])
    period = len(token_ids) - start
    while len(drafts) < count:
        drafts.append(drafts[len(drafts) - period])
    return drafts


def _sort(token_ids: list[int], start: int, end: int, least: int, most: int) -> _Piece:
    begin = max(start - most, 0)
    text = np.array(token_ids[begin:end], dtype=np.uint64)
    key = np.zeros(end - start, dtype=np.uint64)  # of the n-gram before each position, the last token first
    keys, follows = [], []
    positions = np.arange(start, end, dtype=np.int32)
    for n in range(1, most + 1):
        missing = max(n - start, 0)  # positions with fewer than n preceding tokens
        first = start + missing - n - begin
        key[missing:] = key[missing:] * np.uint64(_MULTIPLIER) + text[first : first + len(key) - missing] + np.uint64(n)
        if n >= least:
            keys.append(key[missing:].copy())
            follows.append(positions[missing:])
    # Reversed, so that `unique` keeps the last of equal keys. N-grams of other lengths have other keys.
    found, index = np.unique(np.concatenate(keys)[::-1], return_index=True)
    return _Piece(start, end, found, np.concatenate(follows)[::-1][index])
