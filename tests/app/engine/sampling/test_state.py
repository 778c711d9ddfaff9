"""Sampling state: the noise key of each position, and the state of forks."""

from __future__ import annotations

import pytest

from folio.app.engine.sampling.params import SamplingParams, Structure
from folio.app.engine.sampling.settings import gather_settings
from folio.app.engine.sampling.state import SamplingState, check_token_ids
from folio.app.errors import RequestError
from tests.app.engine.sampling.helpers import Allowed, bad_words_of

EOS = frozenset({2})


def key_of(state: SamplingState, position: int = 0) -> int:
    return int(gather_settings([state], [position], 100)["key"][0])


def keys(state: SamplingState, count: int) -> list[int]:
    """The keys of the next tokens, one after the other."""
    drawn = []
    for _ in range(count):
        drawn.append(key_of(state))
        state.append(7)
    return drawn


def test_a_key_belongs_to_a_position() -> None:
    """Keys do not depend on which keys were read before."""
    plain = keys(SamplingState(SamplingParams(seed=3), [1]), 300)
    assert len(set(plain)) == 300
    ahead = SamplingState(SamplingParams(seed=3), [1])
    seen = []
    for step in range(60):
        assert key_of(ahead, 5) == plain[len(seen) + 5]
        accepted = step % 6 + 1
        seen += [key_of(ahead, i) for i in range(accepted)]
        for _ in range(accepted):
            ahead.append(7)
    assert seen == plain[: len(seen)]
    late = SamplingState(SamplingParams(seed=3), [1])
    for _ in range(200):
        late.append(7)
    assert keys(late, 50) == plain[200:250]


def test_every_output_has_keys_of_its_own() -> None:
    """A fork has the keys of its output index from its position on."""
    first = SamplingState(SamplingParams(seed=3), [1])
    output = SamplingState(SamplingParams(seed=3), [1], index=2)
    keys(output, 80)
    assert keys(output.fork(), 20) == keys(output, 20), "the same output, unless another is asked for"
    third = keys(SamplingState(SamplingParams(seed=3), [1], index=2), 100)
    assert keys(first, 40) != third[:40]
    fork = first.fork(index=2)
    assert fork.num_output_tokens == 40
    assert keys(fork, 60) == third[40:]
    assert keys(first.fork(), 60) == keys(SamplingState(SamplingParams(seed=3), [1]), 100)[40:]
    unseeded = SamplingState(SamplingParams(), [1])
    assert keys(unseeded.fork(), 5) != keys(unseeded, 5)


def test_a_fork_is_independent() -> None:
    structure = Structure("choice", '["a"]')
    params = SamplingParams(structure=structure, bad_words=["x"], repetition_penalty=1.1, min_tokens=4, seed=1)
    parent = SamplingState(
        params, [1], matcher=Allowed([5, 6]), bad_words=bad_words_of([[5, 6], [9]]), eos_token_ids=EOS
    )
    parent.append(5)
    assert parent.counts.token_ids.tolist() == [1, 5]
    child = parent.fork(index=1)
    child.append(6)
    assert parent.matcher is not child.matcher
    assert isinstance(parent.matcher, Allowed)
    assert isinstance(child.matcher, Allowed)
    assert (parent.matcher.accepted, child.matcher.accepted) == ([5], [5, 6])
    assert (parent.num_output_tokens, child.num_output_tokens) == (1, 2)
    assert sorted(parent.forbidden()) == [2, 6]
    assert sorted(child.forbidden()) == [2]
    for state in (parent, child):
        assert (state.allowed(32) == [~(1 << 9)]).all()
    assert parent.counts.in_output.tolist() == [0, 1]
    assert child.counts.in_output.tolist() == [0, 1, 1]


def test_a_fork_with_other_parameters() -> None:
    """Its penalties see the output from before; its bad words must be its own."""
    parent = SamplingState(SamplingParams(presence_penalty=1.0, temperature=0, min_tokens=2), [1], eos_token_ids=EOS)
    for token in (5, 5, 6):
        parent.append(token)
    assert parent.counts.token_ids.tolist() == [5, 6]
    child = parent.fork(SamplingParams(repetition_penalty=1.2, frequency_penalty=0.1))
    assert child.counts.token_ids.tolist() == [1, 5, 6]
    assert child.counts.in_output.tolist() == [0, 2, 1]
    assert not child.is_greedy
    words = SamplingParams(bad_words=["x"])
    assert parent.fork(words, bad_words=bad_words_of([[6, 8]])).forbidden().tolist() == [8]
    with pytest.raises(AssertionError):
        parent.fork(words).forbidden()
    assert parent.fork(SamplingParams(temperature=0)).is_plain_greedy
    assert not parent.fork(SamplingParams(temperature=0, min_tokens=4)).is_plain_greedy


def test_min_tokens_by_position() -> None:
    state = SamplingState(
        SamplingParams(min_tokens=3, stop_token_ids=[8], temperature=0), [1], eos_token_ids=frozenset({2, 4})
    )
    assert not state.is_plain_greedy
    assert [sorted(state.forbidden(i)) for i in range(5)] == [[2, 4, 8]] * 3 + [[]] * 2
    state.append(7)
    assert [bool(len(state.forbidden(i))) for i in range(4)] == [True, True, False, False]
    for _ in range(2):
        assert not state.is_plain_greedy
        state.append(7)
    assert state.is_plain_greedy
    assert not len(state.forbidden())


@pytest.mark.parametrize(
    ("params", "words", "expected"),
    [
        ({}, None, True),
        ({"top_p": 0.5, "logit_bias": {3: 1.0}, "logprobs": 2, "min_tokens": 5}, None, True),
        ({"bad_words": ["x"]}, [[4]], True),
        ({"bad_words": ["x"]}, [[4], [5, 6]], False),
        ({"repetition_penalty": 1.1}, None, False),
        ({"presence_penalty": 0.1}, None, False),
        ({"frequency_penalty": -0.1}, None, False),
    ],
)
def test_looks_ahead_only_where_earlier_tokens_do_not_matter(
    params: dict[str, object], words: list[list[int]] | None, expected: bool
) -> None:
    bad_words = None if words is None else bad_words_of(words)
    state = SamplingState(SamplingParams(**params), [1], bad_words=bad_words)  # type: ignore[arg-type]
    assert state.can_look_ahead == expected
    assert not SamplingState(SamplingParams(), [1], matcher=Allowed([1])).can_look_ahead


def test_plain_greedy() -> None:
    """Every sampling parameter takes a state off the fast path."""
    plain = {"temperature": 0.0}
    assert SamplingState(SamplingParams(**plain), [1]).is_plain_greedy
    for more in (
        {"temperature": 0.1},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 1.0},
        {"frequency_penalty": 1.0},
        {"logit_bias": {1: 1.0}},
        {"bad_words": ["x"]},
        {"min_tokens": 1},
        {"logprobs": 0},
        {"structure": Structure("json", "{}")},
    ):
        state = SamplingState(SamplingParams(**(plain | more)), [1])  # type: ignore[arg-type]
        assert not state.is_plain_greedy, more
        assert state.takes_likeliest == ("logprobs" in more), more


@pytest.mark.parametrize(
    ("params", "field"), [({"logit_bias": {512: 1.0}}, "logit_bias"), ({"stop_token_ids": [3, -1]}, "stop_token_ids")]
)
def test_unknown_tokens_are_refused(params: dict[str, object], field: str) -> None:
    check_token_ids(SamplingParams(logit_bias={511: 1.0}, stop_token_ids=[0]), 512)
    with pytest.raises(RequestError, match="between 0 and 511") as error:
        check_token_ids(SamplingParams(**params), 512)  # type: ignore[arg-type]
    assert error.value.param == field
