"""Texts that cannot fit are refused before they are tokenised, and no others."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer, normalizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from app.engine.model.loader import load_tokenizer
from app.errors import ContextLengthError
from app.openai.text_encoder import TextBounds
from tests.app.small_tokenizers import byte_level, sentencepiece, wordpiece


@pytest.mark.parametrize("tokenizer", [load_tokenizer("builtin"), byte_level(), sentencepiece()])
def test_what_cannot_fit_is_refused_and_what_fits_is_not(tokenizer: PreTrainedTokenizerBase) -> None:
    bounds = TextBounds(tokenizer)
    with pytest.raises(ContextLengthError, match="the context is 10 tokens, and prompt has 100000 bytes") as refused:
        bounds.check_length("a" * 100_000, 10, "prompt")
    assert refused.value.param == "prompt"
    for name in tokenizer.get_vocab():
        text = tokenizer.decode([tokenizer.get_vocab()[name]]) * 10
        bounds.check_length(text, len(tokenizer.encode(text, add_special_tokens=False)), "prompt")
    for text in ("é" * 50, "\N{GRINNING FACE}" * 50, " " * 50, "▁" * 50):
        bounds.check_length(text, len(tokenizer.encode(text, add_special_tokens=False)), "prompt")


def test_what_nfc_makes_shorter() -> None:
    backend = Tokenizer.from_str(byte_level().backend_tokenizer.to_str())
    backend.normalizer = normalizers.NFC()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    text = "\u1fbe\u0308\u0301" * 50
    TextBounds(tokenizer).check_length(text, len(tokenizer.encode(text)), "prompt")
    with pytest.raises(ContextLengthError):
        TextBounds(tokenizer).check_length("é" * 100_000, 10, "prompt")


def test_tokens_without_a_bound() -> None:
    """One word may be anything, and a special token may take any number of spaces."""
    TextBounds(wordpiece()).check_length("x" * 100_000, 1, "prompt")
    backend = Tokenizer.from_str(byte_level().backend_tokenizer.to_str())
    backend.add_special_tokens([AddedToken("<x>", rstrip=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    TextBounds(tokenizer).check_length("<x>" + " " * 100_000, 1, "prompt")
