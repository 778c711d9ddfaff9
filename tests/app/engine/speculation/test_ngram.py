"""N-gram drafts equal those of a search through the complete text."""

from __future__ import annotations

from functools import partial

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from folio.app.engine.speculation import ngram
from folio.app.engine.speculation.ngram import NgramIndex, NgramProposer
from tests.app.engine.speculation.requests import generate, make_sequence


def searched(token_ids: list[int], least: int, most: int, count: int) -> list[int]:
    """The definition: the longest run at the end that occurred before, its last place, what followed there."""
    for n in range(min(most, len(token_ids) - 1), least - 1, -1):
        for start in range(len(token_ids) - n - 1, -1, -1):
            if token_ids[start : start + n] == token_ids[-n:]:
                text = token_ids.copy()
                while len(text) < len(token_ids) + count:
                    text.append(text[start + n + len(text) - len(token_ids)])
                return text[len(token_ids) :]
    return []


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 3), max_size=25), min_size=1, max_size=12),
    st.integers(1, 3),
    st.integers(0, 2),
    st.integers(1, 9),
)
def test_drafts_equal_those_of_a_search(added: list[list[int]], least: int, more: int, count: int) -> None:
    """The text grows by one token or many; pieces are short, so that there are several."""
    sequence, short = make_sequence([]), partial(NgramIndex, piece_tokens=16, recent_tokens=6)
    proposer = NgramProposer(min_ngram=least, max_ngram=least + more, new_index=short)
    for token_ids in added:
        sequence.token_ids += token_ids
        [guesses] = proposer.propose([sequence], [count])
        proposer.check_integrity()
        assert guesses == searched(sequence.token_ids, least, least + more, count)


def test_requests_do_not_see_each_other() -> None:
    proposer = NgramProposer()
    one, other = make_sequence([1, 2, 3, 4, 5, 1, 2]), make_sequence([9, 8, 7, 1, 2])
    assert proposer.propose([one, other], [2, 2]) == [[3, 4], []]
    generate(one, 3, 9)
    generate(other, 9, 8)
    assert proposer.propose([one, other], [2, 3]) == [[], [7, 1, 2]]


def test_a_long_prompt_is_indexed_in_several_steps() -> None:
    """No step sorts more than `STEP_TOKENS`, which would delay all requests."""
    sizes: list[int] = []
    indexes: set[NgramIndex] = set()

    class Noted(NgramIndex):
        def extend(self, token_ids: list[int], budget: int) -> int:
            sizes.append(super().extend(token_ids, budget))
            indexes.add(self)
            return sizes[-1]

    text = np.random.default_rng(0).integers(0, 1 << 17, 50_000).tolist()
    sequences = [make_sequence(text + text[n : n + 5]) for n in (100, 200)]
    proposer = NgramProposer(new_index=Noted)
    right = [text[105:108], text[205:208]]
    for _ in range(8):
        sizes.clear()
        guesses = proposer.propose(sequences, [3, 3])
        assert sum(sizes) <= ngram.STEP_TOKENS
        if guesses == right:
            break
    assert guesses == right
    assert len(indexes) == 2
    for index in indexes:
        assert len(index.pieces) <= 8
        assert sum(piece.keys.nbytes + piece.follows.nbytes for piece in index.pieces) <= 36 * 50_005


def test_a_generated_text_makes_few_pieces() -> None:
    index, text = NgramIndex(2, 4), list(range(1, 20_000))
    for end in range(100, len(text), 100):
        index.extend(text[:end], ngram.STEP_TOKENS)
    assert len(index.pieces) <= 4
    assert len(index.recent) <= 3 * ngram.RECENT_TOKENS


def test_a_forgotten_request_can_come_back() -> None:
    """With a new index."""
    made: list[NgramIndex] = []

    def new_index(*args: int) -> NgramIndex:
        made.append(NgramIndex(*args))
        return made[-1]

    proposer, sequence = NgramProposer(new_index=new_index), make_sequence([1, 2, 3, 1, 2])
    assert proposer.propose([sequence], [1]) == [[3]]
    proposer.forget_sequence(sequence)
    proposer.forget_sequence(sequence)
    assert proposer.propose([sequence], [1]) == [[3]]
    assert proposer.propose([sequence], [0]) == [[]]
    assert len(made) == 2
