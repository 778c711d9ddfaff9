"""Bytes of tokens, with tokenizers of the kinds that models have."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tokenizers import Tokenizer, decoders, models
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from folio.app.api.openai.logprobs import TokenTexts
from folio.app.engine.model.tokenizer import load_tokenizer
from tests.app.small_tokenizers import sentencepiece

TEXT = "Hello wörld, 3 € and 🙂 \n\t end"


def byte_level() -> PreTrainedTokenizerFast:
    return load_tokenizer("builtin")


def plain() -> PreTrainedTokenizerFast:
    """A tokenizer whose decoder only joins tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.train_from_iterator([TEXT], BpeTrainer(vocab_size=60, show_progress=False))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize("make", [byte_level, sentencepiece, plain])
def test_bytes_of_a_text_join_to_it(make: Callable[[], PreTrainedTokenizerFast]) -> None:
    tokenizer = make()
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    assert b"".join(map(TokenTexts(tokenizer).bytes_of, ids)).decode().removeprefix(" ") == TEXT


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_a_character_in_parts(make: Callable[[], PreTrainedTokenizerFast]) -> None:
    tokenizer = make()
    tokens = TokenTexts(tokenizer)
    parts = tokenizer.encode("🙂", add_special_tokens=False)[-4:]
    assert [tokens.chat_token(i) for i in parts] == ["\\xf0", "\\x9f", "\\x99", "\\x82"]
    assert tokens.completion_token(parts[0]) == "bytes:\\xf0"
    assert tokens.bytes_of(parts[0]) == b"\xf0"


def test_special_tokens_and_ids_beyond_the_vocabulary() -> None:
    tokenizer = sentencepiece()
    tokens = TokenTexts(tokenizer)
    begin, word = tokenizer.convert_tokens_to_ids(["<s>", "▁He"])
    assert (tokens.is_special(begin), tokens.chat_token(begin)) == (True, "<s>")
    assert (tokens.is_special(word), tokens.chat_token(word)) == (False, " He")
    assert tokens.bytes_of(10**6) == b""  # a model may have more tokens than its tokenizer
