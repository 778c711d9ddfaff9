"""The text of an output never contains a bad word, however it is cut into tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from folio.app.engine import LLM
from folio.app.engine.model.vocabulary import Vocabulary
from folio.app.engine.sampling.bad_words import BadWords, TokenSearch, encode_word
from folio.app.engine.sampling.params import SamplingParams
from folio.app.engine.sampling.token_text import token_bytes
from folio.app.errors import RequestError
from tests.app.small_tokenizers import byte_level, sentencepiece, wordpiece
from tests.nightly import examples

PIECES = st.lists(st.text("ab c", min_size=1, max_size=4), min_size=1, max_size=12, unique=True)


@settings(max_examples=examples(150, nightly=5000), deadline=None)
@given(PIECES, st.lists(st.text("ab c", min_size=1, max_size=5), min_size=1, max_size=4), st.data())
def test_exactly_the_tokens_that_complete_a_word_are_forbidden(
    pieces: list[str], words: list[str], data: st.DataObject
) -> None:
    """At every step a token is forbidden if and only if the text would contain a word with it."""
    texts = [piece.encode() for piece in pieces] + [b""]
    bad = BadWords(map(str.encode, words), TokenSearch(texts))
    state, text = 0, b""
    for _ in range(12):
        bits = np.unpackbits(bad.mask(len(texts)).view(np.uint8), bitorder="little")
        forbidden = {*np.flatnonzero(bits[: len(texts)] == 0).tolist(), *bad.completing(state).tolist()}
        assert forbidden == {i for i, more in enumerate(texts) if any(word.encode() in text + more for word in words)}
        token_id = data.draw(st.sampled_from(sorted({*range(len(texts))} - forbidden)))
        state, text = bad.advance(state, token_id), text + texts[token_id]
    assert bad.depend_on_output == any(len(word) > 1 for word in words)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("builtin", kv_memory_bytes=16 << 20) as llm:
        yield llm


@pytest.mark.parametrize("words", [["e"], ["the", " a"], ["ey of ro", "lo", "é€"], ["\n", " "]])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_no_text_has_a_bad_word(llm: LLM, words: list[str], temperature: float) -> None:
    """`["e"]` left every "e" that was part of a longer token, and a word that began in the token before."""
    params = SamplingParams(max_tokens=60, temperature=temperature, seed=1, ignore_eos=True, bad_words=words)
    prompts = ["The key of room", "Once upon a"]
    for output in llm.generate(prompts, params):
        assert not [word for word in words if word in output.text]
    if words == ["e"]:
        assert "e" in llm.generate(prompts, dataclasses.replace(params, bad_words=()))[0].text


def test_a_word_of_a_sentencepiece_tokenizer() -> None:
    """Spaces are part of tokens, and bytes are tokens."""
    tokenizer = sentencepiece()
    bad = BadWords([b" w", "é".encode()], TokenSearch(token_bytes(tokenizer).tokens))
    for begin, end in (("▁", "w"), ("<0xC3>", "<0xA9>")):
        first, second = tokenizer.convert_tokens_to_ids([begin, end])
        assert second in bad.completing(bad.advance(0, first))
        assert second not in bad.completing(0)
    whole = tokenizer.convert_tokens_to_ids("▁w")
    assert not bad.mask(len(tokenizer))[whole // 32] >> whole % 32 & 1


@pytest.mark.parametrize("tokenizer", [byte_level, wordpiece])
def test_a_tokenizer_whose_tokens_depend_on_their_neighbours_is_refused(llm: LLM, tokenizer: Any) -> None:
    vocabulary = Vocabulary(dataclasses.replace(llm.engine.model, tokenizer=tokenizer()))
    is_refused = tokenizer is wordpiece
    with pytest.raises(RequestError, match="bytes of their own") if is_refused else nullcontext():
        vocabulary.check_params(SamplingParams(bad_words=["a"]))


def test_half_a_character_is_refused() -> None:
    """The tokenizer's TypeError became status 500."""
    with pytest.raises(RequestError, match="not valid Unicode at character 1") as raised:
        encode_word("a\ud800")
    assert raised.value.param == "bad_words"
