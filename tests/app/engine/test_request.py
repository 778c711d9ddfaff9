"""What ends an output, and what is said about it."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerBase

from folio.app.engine.model.tokenizer import load_tokenizer
from folio.app.engine.request.delta import Delta
from folio.app.engine.request.request import Request, Sequence
from folio.app.engine.sampling.params import SamplingParams, Structure
from folio.app.engine.sampling.state import SamplingState
from folio.app.engine.sampling.token_text import IncrementalDetokenizer
from folio.vmem import TokenChain
from tests.app.engine.sampling.helpers import Allowed

EOS = frozenset({0})


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer("builtin")


def sequence(
    tokenizer: PreTrainedTokenizerBase | None, max_tokens: int, sampling: SamplingState | None = None, **params: object
) -> Sequence:
    settings = SamplingParams(max_tokens=max_tokens, **params)  # type: ignore[arg-type]
    text = None
    if tokenizer is not None:
        include = settings.include_stop_str
        text = IncrementalDetokenizer(tokenizer.backend_tokenizer, [1], settings.stop, include_stop_str=include)
    made = Sequence(Request("r", settings), [1], settings, max_tokens, text, TokenChain(1), [1])
    if sampling is not None:
        made.sampling = sampling
    return made


def run(one: Sequence, tokens: list[int]) -> Delta:
    """Append until it ends; the last delta, with all the tokens and text."""
    token_ids: list[int] = []
    text = ""
    for token in tokens:
        delta = one.append([token], EOS)
        token_ids += delta.token_ids
        text += delta.text
        if delta.finished:
            break
    return Delta("r", tuple(token_ids), text, delta.finish_reason, stop_reason=delta.stop_reason)


@pytest.mark.parametrize(
    ("params", "tokens", "num_taken", "finish", "stop_reason"),
    [
        ({}, [5, 0, 6], 2, "stop", None),
        ({"ignore_eos": True}, [5, 0, 6, 7], 4, "length", None),
        ({"stop_token_ids": [6]}, [5, 6, 7], 2, "stop", 6),
        ({"stop_token_ids": [0]}, [5, 0, 7], 2, "stop", None),
        ({"stop_token_ids": [0], "ignore_eos": True}, [5, 0, 7], 2, "stop", 0),
        ({"stop_token_ids": [6], "min_tokens": 2}, [6, 6, 6, 6], 3, "stop", 6),
        ({"min_tokens": 1}, [0, 0, 5], 2, "stop", None),
        ({"min_tokens": 4, "stop_token_ids": [6]}, [6, 0, 6, 0], 4, "length", None),
        ({"stop_token_ids": [9]}, [5, 6, 7, 9], 4, "stop", 9),  # with the last token there may be
    ],
)
def test_tokens_that_end(
    params: dict[str, object], tokens: list[int], num_taken: int, finish: str, stop_reason: int | None
) -> None:
    delta = run(sequence(None, 4, **params), tokens)
    assert (len(delta.token_ids), delta.finish_reason, delta.stop_reason) == (num_taken, finish, stop_reason)


@pytest.mark.parametrize("include", [False, True])
def test_strings_that_end(tokenizer: PreTrainedTokenizerBase, include: bool) -> None:
    """min_tokens does not keep them from it."""
    tokens = tokenizer.encode("one two three")
    one = sequence(tokenizer, 50, stop=["zero", "two"], include_stop_str=include, min_tokens=40)
    delta = run(one, tokens)
    assert delta.text == ("one two" if include else "one ")
    assert (delta.finish_reason, delta.stop_reason) == ("stop", "two")


@pytest.mark.parametrize("include", [False, True])
def test_the_token_that_ends_is_no_text(tokenizer: PreTrainedTokenizerBase, include: bool) -> None:
    """Like a stop string: it is among the tokens, and not in the text unless that is asked for. What was held back for
    a stop string that did not come is."""
    *tokens, last = tokenizer.encode("one two")
    word = tokenizer.decode([last])
    before = tokenizer.decode(tokens)
    one = sequence(tokenizer, 50, stop_token_ids=[last], stop=[f"{before}x"], include_stop_str=include)
    delta = run(one, [*tokens, last])
    assert delta.token_ids == (*tokens, last)
    assert delta.text == (before + word if include else before)
    assert (delta.finish_reason, delta.stop_reason) == ("stop", last)


def test_a_structure_that_is_complete_ends(tokenizer: PreTrainedTokenizerBase) -> None:
    """Nothing can follow, and a model may have no token that says so; the last token is text."""
    tokens = tokenizer.encode("one two")
    params = SamplingParams(structure=Structure("choice", '["one two"]'))
    matcher = Allowed(tokens)
    one = sequence(tokenizer, 50, SamplingState(params, [1], matcher=matcher), structure=params.structure)
    assert not run(one, tokens[:-1]).finished
    matcher.finished = True
    delta = one.append(tokens[-1:], EOS)
    assert (delta.finish_reason, delta.stop_reason) == ("stop", None)
    assert delta.text
