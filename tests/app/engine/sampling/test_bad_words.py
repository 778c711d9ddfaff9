"""Bad words are encoded as at the beginning of a text, inside one, and after a space."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase

from app.engine.model.tokenizer import load_tokenizer
from app.engine.sampling.logits import BadWords, encode_bad_words
from app.errors import RequestError


def encoder(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


@pytest.fixture(scope="module")
def builtin() -> PreTrainedTokenizerBase:
    return load_tokenizer("builtin")


@pytest.fixture(scope="module")
def sentences() -> Tokenizer:
    """Like Llama 2's: every text begins with an implied space."""
    merges = [("w", "o"), ("wo", "r"), ("wor", "d"), ("▁", "word")]
    pieces = ["<unk>", "▁", "w", "o", "r", "d", "▁word", "word", "wo", "wor", "\n"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


@pytest.mark.parametrize("word", ["key", " key", "room", "417", "été"])
def test_a_word_cannot_be_completed_wherever_it_stands(builtin: PreTrainedTokenizerBase, word: str) -> None:
    encode = encoder(builtin.backend_tokenizer)
    words = encode_bad_words([word], encode, len(builtin))
    bare = word.strip()
    for text in (bare, f" {bare}", f"\n{bare}", f"a {bare}", f"a\n{bare}"):
        tokens = encode(text)
        met = [token in words.single or token in words.completing(tokens[:i]) for i, token in enumerate(tokens)]
        assert met == [False] * (len(tokens) - 1) + [True], text


def test_a_word_inside_a_text_of_sentence_pieces(sentences: Tokenizer) -> None:
    """Its tokens at the beginning of a text are those after a space, so a third way is needed to find the others."""
    encode = encoder(sentences)
    assert encode("word") == [6]
    words = encode_bad_words(["word"], encode, 11)
    assert set(words.single) == {6, 7}


def test_tokens_that_the_model_never_chooses_are_left_out(sentences: Tokenizer) -> None:
    words = encode_bad_words(["word"], encoder(sentences), 7)
    assert set(words.single) == {6}


def test_a_word_without_tokens_is_refused() -> None:
    with pytest.raises(RequestError, match="'ghost'") as error:
        encode_bad_words(["ghost"], lambda text: [], 10)
    assert error.value.param == "bad_words"


def test_white_space_is_a_word_too(builtin: PreTrainedTokenizerBase) -> None:
    encode = encoder(builtin.backend_tokenizer)
    assert encode_bad_words(["\n"], encode, len(builtin)).single == tuple(encode("\n"))


SEQUENCES = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=8)


@settings(deadline=None)
@given(SEQUENCES, st.lists(st.integers(0, 3), max_size=12))
def test_completing_is_what_ends_with_a_sequence(sequences: list[list[int]], output: list[int]) -> None:
    """Unless a shorter sequence ends there already."""
    words = BadWords(sequences)
    assert words.depend_on_output == any(
        len(s) > 1 and not any(s[i:] in sequences for i in range(1, len(s))) for s in sequences
    )
    forbidden = {*words.single, *words.completing(output)}
    for token in range(4):
        after = [*output, token]
        assert (token in forbidden) == any(after[-len(s) :] == s for s in sequences)


def test_half_a_character_is_refused(builtin: PreTrainedTokenizerBase) -> None:
    """The tokenizer's TypeError became status 500."""
    with pytest.raises(RequestError, match="not valid Unicode at character 1") as raised:
        encode_bad_words(["a\ud800"], encoder(builtin.backend_tokenizer), len(builtin))
    assert raised.value.param == "bad_words"
