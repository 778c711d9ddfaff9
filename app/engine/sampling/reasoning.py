"""Reasoning budget: after a number of reasoning tokens, only the tokens that end the reasoning are allowed."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from folio.app.engine.sampling.params import ReasoningBudget
from folio.app.errors import RequestError


class Matcher(Protocol):
    """What `BudgetedMatcher` needs of a structure's matcher; see `StructureMatcher`."""

    @property
    def error(self) -> RequestError | None: ...
    @property
    def finished(self) -> bool: ...
    def fill(self, mask: np.ndarray) -> None: ...
    def accept(self, token_id: int) -> None: ...
    def fork(self) -> Matcher: ...


class BudgetedMatcher:
    """Position of an output in its reasoning and in its structure; for one thread at a time.

    Args:
        matcher: matcher of the structure, which must contain the end of the reasoning; `None`: any output.
        texts: bytes of each token.
        end_token_ids: the tokens of `budget.end`.
    """

    def __init__(
        self, matcher: Matcher | None, budget: ReasoningBudget, texts: Sequence[bytes], end_token_ids: Sequence[int]
    ) -> None:
        self._matcher = matcher
        self._texts = texts
        self._begin, self._end = budget.begin.encode(), budget.end.encode()
        self._end_token_ids = end_token_ids
        self._is_before = bool(self._begin)  # the output may still begin with reasoning
        self._text = b""  # last text, which may be part of the begin or the end
        self._num_left = budget.max_tokens
        self._forced: Sequence[int] = ()  # tokens of the end that must follow
        self._ends(budget.max_tokens == 0 and not self._is_before)

    @property
    def error(self) -> RequestError | None:
        return None if self._matcher is None else self._matcher.error

    @property
    def finished(self) -> bool:
        return self._matcher is not None and self._matcher.finished

    def fill(self, mask: np.ndarray) -> None:
        """Set the bits of allowed tokens: `[ceil(vocab_size / 32)]` int32."""
        if self._matcher is not None:
            self._matcher.fill(mask)
        else:
            mask[:] = -1
        if self._forced and self.error is None:
            mask[:] = 0
            mask.view(np.uint32)[self._forced[0] // 32] = np.uint32(1 << self._forced[0] % 32)

    def accept(self, token_id: int) -> None:
        """Advance by a token. Raises `EngineError` if the structure does not allow it."""
        if self._matcher is not None:
            self._matcher.accept(token_id)
        if self._forced:
            self._forced = self._forced[1:]
        elif self._is_before:
            self._text = (self._text + self._text_of(token_id)).lstrip()
            if self._text.startswith(self._begin):
                self._is_before, self._text = False, b""
                self._ends(self._num_left == 0)
            elif not self._begin.startswith(self._text):  # an output without reasoning
                self._is_before, self._num_left = False, 0
        elif self._num_left:
            self._text = self._text[1 - len(self._end) :] + self._text_of(token_id)
            self._num_left = 0 if self._end in self._text else self._num_left - 1
            self._ends(self._num_left == 0 and self._end not in self._text)

    def fork(self) -> BudgetedMatcher:
        """An independent copy."""
        other = copy.copy(self)
        other._matcher = None if self._matcher is None else self._matcher.fork()
        return other

    def _ends(self, now: bool) -> None:
        if now:
            self._forced = self._end_token_ids

    def _text_of(self, token_id: int) -> bytes:
        return self._texts[token_id] if token_id < len(self._texts) else b""
