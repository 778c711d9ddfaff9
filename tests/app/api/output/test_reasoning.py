"""Tokens of the reasoning, however the marks are cut into tokens."""

from __future__ import annotations

import pytest

from folio.app.api.output.reasoning import ReasoningTokens


@pytest.mark.parametrize(
    ("begin", "tokens", "count"),
    [
        ("<think>", ["<think>", "a", "b", "</think>", "c", "</think>"], 4),
        ("<think>", ["\n", "<th", "ink>a", "b</thi", "nk> c", "d"], 5),
        ("<think>", ["Yes", "<think>", "a", "</think>"], 0),
        ("<think>", ["<thi"], 0),
        ("<think>", ["<think>", "a"], 2),
        ("", ["a", "b</think>c", "d"], 2),
        ("", ["</think>", "a"], 1),
    ],
)
def test_counts(begin: str, tokens: list[str], count: int) -> None:
    texts = [token.encode() for token in tokens]
    whole, one_by_one = (ReasoningTokens(begin, "</think>", texts.__getitem__) for _ in range(2))
    whole.push(range(len(tokens)))
    for token_id in range(len(tokens)):
        one_by_one.push([token_id])
    assert whole.count == one_by_one.count == count
