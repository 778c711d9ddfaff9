"""Bytes of tokens, with tokenizers of the kinds that models have."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from app.engine.model.loader import load_tokenizer
from app.openai.logprobs import TokenTexts

TEXT = "Hello wörld, 3 € and 🙂 \n\t end"


def byte_level() -> PreTrainedTokenizerFast:
    return load_tokenizer("builtin")


def sentencepiece() -> PreTrainedTokenizerFast:
    """As Llama 2 has it: a sign for spaces, and tokens for the bytes of characters that have none."""
    pieces = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"Helo wrd,3and\n\t", "▁end", "an"]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.BPE(vocab, [("a", "n")], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")


def plain() -> PreTrainedTokenizerFast:
    """A decoder that only joins."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.train_from_iterator([TEXT], BpeTrainer(vocab_size=60, show_progress=False))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize("make", [byte_level, sentencepiece, plain])
def test_bytes_of_a_text_join_to_it(make: type) -> None:
    tokenizer = make()
    tokens = TokenTexts(tokenizer)
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    assert b"".join(map(tokens.bytes_of, ids)).decode().removeprefix(" ") == TEXT


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_a_character_in_parts(make: type) -> None:
    tokenizer = make()
    tokens = TokenTexts(tokenizer)
    parts = tokenizer.encode("🙂", add_special_tokens=False)[-4:]
    assert [tokens.chat_token(i) for i in parts] == ["\\xf0", "\\x9f", "\\x99", "\\x82"]
    assert tokens.completion_token(parts[0]) == "bytes:\\xf0"
    assert tokens.bytes_of(parts[0]) == b"\xf0"


def test_special_tokens_and_what_is_no_token() -> None:
    tokenizer = sentencepiece()
    tokens = TokenTexts(tokenizer)
    [bos] = tokenizer.encode("<s>", add_special_tokens=False)
    assert tokens.is_special(bos)
    assert tokens.chat_token(bos) == "<s>"
    assert not tokens.is_special(tokenizer.convert_tokens_to_ids("▁end"))
    assert tokens.chat_token(tokenizer.convert_tokens_to_ids("▁end")) == " end"
    assert tokens.bytes_of(10**6) == b""  # a model may have more tokens than its tokenizer
