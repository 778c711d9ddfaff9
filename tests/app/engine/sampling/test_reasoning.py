"""The end of the reasoning is forced at its budget, and what follows has the structure."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import numpy as np
import pytest

from folio.app.engine.sampling.params import ReasoningBudget, Structure
from folio.app.engine.sampling.reasoning import Matcher
from folio.app.engine.sampling.structure import StructureCompiler
from tests.app.small_tokenizers import byte_level

TOKENIZER: Any = byte_level()


@cache
def compiler() -> StructureCompiler:
    return StructureCompiler(TOKENIZER, len(TOKENIZER), {TOKENIZER.eos_token_id})


END = TOKENIZER.encode("</think>", add_special_tokens=False)


def matcher_of(num_tokens: int, begin: str = "", structure: Structure | None = None) -> Matcher:
    budget = ReasoningBudget(num_tokens, begin, "</think>")
    given = structure or Structure("any", "")
    framed = Structure(given.kind, given.spec, given.frame, budget)
    compiler().check_structure(framed)
    return compiler().matcher(framed)


def allowed(matcher: Matcher) -> list[int]:
    mask = np.empty((len(TOKENIZER) + 31) // 32, np.int32)
    matcher.fill(mask)
    tokens: list[int] = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
    return tokens


def accept(matcher: Matcher, text: str) -> None:
    for token_id in TOKENIZER.encode(text, add_special_tokens=False):
        matcher.accept(token_id)


@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_the_end_is_forced_at_the_budget(num_tokens: int) -> None:
    matcher = matcher_of(num_tokens)
    for _ in range(num_tokens):
        assert len(allowed(matcher)) >= len(TOKENIZER)
        accept(matcher, "x")
    for token_id in END:
        assert allowed(matcher) == [token_id]
        matcher.accept(token_id)
    assert len(allowed(matcher)) >= len(TOKENIZER)
    assert not matcher.finished
    for _ in range(20):
        accept(matcher, "x")
    assert len(allowed(matcher)) >= len(TOKENIZER)


@pytest.mark.parametrize(
    ("budget", "begin", "text", "is_forced"),
    [
        (20, "", "ab</think>", False),  # it ends in time
        (2, "<think>", "x", False),  # there is no reasoning
        (2, "<think>", "\n<think>", True),  # the budget counts from the begin
    ],
)
def test_only_reasoning_has_a_budget(budget: int, begin: str, text: str, is_forced: bool) -> None:
    matcher = matcher_of(budget, begin)
    accept(matcher, text)
    for _ in range(2 if is_forced else 30):
        assert len(allowed(matcher)) > 1
        accept(matcher, "x")
    assert (allowed(matcher) == END[:1]) == is_forced


def test_forks_are_independent() -> None:
    matcher = matcher_of(2)
    accept(matcher, "x")
    fork = matcher.fork()
    accept(fork, "x")
    assert allowed(fork) == END[:1]
    assert len(allowed(matcher)) > 1


def test_a_structure_follows_the_forced_end() -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    frame = 'start: reasoning @answer\nreasoning[suffix="</think>"]: /(?s:.*)/'
    matcher = matcher_of(3, structure=Structure("json", json.dumps(schema), frame))
    accept(matcher, "x{x")
    for token_id in END:
        assert allowed(matcher) == [token_id]
        matcher.accept(token_id)
    accept(matcher, '{"a": 1}')
    assert allowed(matcher) == [TOKENIZER.eos_token_id]
    assert matcher.finished
    assert matcher.error is None
