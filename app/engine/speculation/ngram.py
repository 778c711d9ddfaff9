"""Guesses from the text itself (prompt look-up): the last few tokens, where they were before, and what followed there.

An index for each request says where each run of n tokens last was. It grows with the text:

    token_ids   | piece | piece | piece | recent |
    indexed by    sorted arrays of hashes   dict

A look-up asks the dict and then the pieces, the latest first. Runs are known by hashes of 64 bits and not compared:
a collision would be a wrong guess, which costs next to nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from app.engine.faults import attribute_failures
from app.engine.report import StepTimes
from app.engine.request import Request
from vmem import IntegrityError

# Tokens of a piece. Longer ones make look-ups in long texts faster, and single steps slower.
PIECE_TOKENS = 8192
# So many tokens are indexed in a dict before they become a piece, or part of one.
RECENT_TOKENS = 1024
# Tokens sorted into pieces in a step, all requests together: a few milliseconds. A long prompt takes several steps.
STEP_TOKENS = 2 * PIECE_TOKENS

_MULTIPLIER = 0x9E3779B97F4A7C15  # odd, and without small factors in common with differences of token ids
_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """Runs of tokens that are followed by one of the tokens `start … end - 1`.

    Attributes:
        keys: `[num_runs]` uint64, hashes, ascending, each once.
        follows: `[num_runs]` int32, position of the token that followed the last run of that hash.
    """

    start: int
    end: int
    keys: np.ndarray[Any, np.dtype[np.uint64]]
    follows: np.ndarray[Any, np.dtype[np.int32]]


@dataclass(slots=True, eq=False)
class NgramIndex:
    """Where runs of `least` to `most` tokens last were in one growing text. Takes about 36 bytes a token with 2 to 4.

    Args:
        least, most: lengths of the runs.
    """

    least: int
    most: int
    _pieces: list[_Piece] = field(default_factory=list)
    _recent: dict[int, int] = field(default_factory=dict)
    _end: int = 0  # runs followed by tokens before it are indexed

    @property
    def _sealed(self) -> int:
        return self._pieces[-1].end if self._pieces else 0

    def extend(self, token_ids: list[int], budget: int) -> int:
        """Index what has been added to the text.

        Args:
            budget: tokens that may be sorted now. What is left over waits for the next call.

        Returns:
            Tokens that were.
        """
        num_sorted = 0
        while len(token_ids) - self._sealed >= RECENT_TOKENS:
            start, end = self._sealed, min(self._sealed + PIECE_TOKENS, len(token_ids))
            grows = bool(self._pieces) and end - self._pieces[-1].start <= PIECE_TOKENS
            if grows:  # too short to be left alone: there would be ever more of them
                start = self._pieces[-1].start
            if num_sorted + end - start > budget:
                break
            num_sorted += end - start
            if grows:
                self._pieces.pop()
            self._pieces.append(_sort(token_ids, start, end, self.least, self.most))
            self._recent.clear()
            self._end = end
        if len(token_ids) - self._end <= RECENT_TOKENS:  # else it waits to be sorted
            for follows in range(self._end, len(token_ids)):
                key = 0
                for n in range(1, min(self.most, follows) + 1):
                    key = (key * _MULTIPLIER + token_ids[follows - n] + n) & _MASK
                    if n >= self.least:
                        self._recent[key] = follows
            self._end = max(self._end, len(token_ids))
        return num_sorted

    def find(self, token_ids: Sequence[int]) -> int | None:
        """Position of the token that followed the last earlier place of the longest run that the text ends with."""
        keys, key = [], 0
        for n in range(1, min(self.most, len(token_ids)) + 1):
            key = (key * _MULTIPLIER + token_ids[-n] + n) & _MASK
            if n >= self.least:
                keys.append(key)
        if not keys:
            return None
        wanted = np.array(keys, dtype=np.uint64)
        found: list[int | None] = [self._recent.get(key) for key in keys]
        for piece in reversed(self._pieces):
            if found[-1] is not None:
                break
            places = np.searchsorted(piece.keys, wanted)
            for i, place in enumerate(places.tolist()):
                if found[i] is None and place < len(piece.keys) and piece.keys[place] == wanted[i]:
                    found[i] = int(piece.follows[place])
        return next((position for position in reversed(found) if position is not None), None)

    def check_integrity(self, token_ids: Sequence[int]) -> None:
        """Raise `IntegrityError` unless the pieces lie side by side within the text."""
        end = 0
        for piece in self._pieces:
            if piece.start != end or not piece.start < piece.end <= len(token_ids):
                raise IntegrityError(f"a piece of tokens {piece.start} to {piece.end} behind {end}")
            end = piece.end
        if not end <= self._end <= len(token_ids):
            raise IntegrityError(f"{self._end} tokens indexed, {end} of them in pieces, of {len(token_ids)}")


class NgramProposer:
    """Continues the last `max_ngram` tokens, or fewer but at least `min_ngram`, as they were continued when they last
    occurred. Where that reaches the end of the text it goes on with its own guesses, so that a loop is guessed whole.

    A request's index is made when it first asks, for a prompt of more than `STEP_TOKENS` over several steps.
    """

    name = "ngram"

    def __init__(self, *, min_ngram: int = 2, max_ngram: int = 4) -> None:
        assert 1 <= min_ngram <= max_ngram
        self._least, self._most = min_ngram, max_ngram
        self._indexes: dict[Request, NgramIndex] = {}

    @property
    def step_times(self) -> StepTimes:
        return StepTimes()

    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> list[list[int]]:
        budget = STEP_TOKENS
        guesses: list[list[int]] = []
        for request, count in zip(requests, most, strict=True):
            if count < 1:
                guesses.append([])
                continue
            with attribute_failures(request):
                index = self._indexes.setdefault(request, NgramIndex(self._least, self._most))
                budget -= index.extend(request.token_ids, budget)
                guesses.append(_continue(request.token_ids, index.find(request.token_ids), count))
        return guesses

    def forget_request(self, request: Request) -> None:
        self._indexes.pop(request, None)

    def check_integrity(self) -> None:
        for request, index in self._indexes.items():
            index.check_integrity(request.token_ids)

    def close(self) -> None:
        self._indexes.clear()


def _continue(token_ids: Sequence[int], start: int | None, count: int) -> list[int]:
    """What follows from `start` on, as if the text went on with it."""
    if start is None:
        return []
    guesses = list(token_ids[start : start + count])
    period = len(token_ids) - start
    while len(guesses) < count:
        guesses.append(guesses[len(guesses) - period])
    return guesses


def _sort(token_ids: list[int], start: int, end: int, least: int, most: int) -> _Piece:
    begin = max(start - most, 0)
    text = np.array(token_ids[begin:end], dtype=np.uint64)
    key = np.zeros(end - start, dtype=np.uint64)  # of the run before each position, the last token first
    keys, follows = [], []
    positions = np.arange(start, end, dtype=np.int32)
    for n in range(1, most + 1):
        missing = max(n - start, 0)  # at the beginning of the text runs are not that long yet
        first = start + missing - n - begin
        key[missing:] = key[missing:] * np.uint64(_MULTIPLIER) + text[first : first + len(key) - missing] + np.uint64(n)
        if n >= least:
            keys.append(key[missing:].copy())
            follows.append(positions[missing:])
    # Reversed, so that of equal keys the first is the last in the text. Runs of another length have other keys.
    found, index = np.unique(np.concatenate(keys)[::-1], return_index=True)
    return _Piece(start, end, found, np.concatenate(follows)[::-1][index])
