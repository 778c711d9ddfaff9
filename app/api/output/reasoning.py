"""Reasoning tokens: how many tokens of an output are its reasoning, marks included."""

from __future__ import annotations

from collections.abc import Callable, Iterable


class ReasoningTokens:
    """Counts the tokens of the reasoning with which one output begins.

    Args:
        begin: text before the reasoning; empty: the prompt has begun it.
        end: text after the reasoning.
        bytes_of: bytes of a token.
    """

    def __init__(self, begin: str, end: str, bytes_of: Callable[[int], bytes]) -> None:
        self._begin, self._end = begin.encode(), end.encode()
        self._bytes_of = bytes_of
        self._text = b""  # which may be part of `begin` or `end`
        self._num_tokens = 0
        self._is_before = bool(begin)
        self._is_over = False

    @property
    def count(self) -> int:
        """Reasoning tokens so far; 0 while the output may have no reasoning."""
        return 0 if self._is_before else self._num_tokens

    def push(self, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            if self._is_over:
                return
            self._num_tokens += 1
            self._text += self._bytes_of(token_id)
            if self._is_before:
                self._await_begin()
            if not self._is_before:
                self._is_over |= self._end in self._text
                self._text = self._text[1 - len(self._end) :]

    def _await_begin(self) -> None:
        self._text = self._text.lstrip()
        if self._text.startswith(self._begin):
            self._is_before, self._text = False, self._text[len(self._begin) :]
        elif not self._begin.startswith(self._text):
            self._is_before, self._is_over, self._num_tokens = False, True, 0
