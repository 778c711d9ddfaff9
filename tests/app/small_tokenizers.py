"""Tokenizers of the kinds that models have, small enough to be made in a test."""

from __future__ import annotations

import functools

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

_TEXT = ['{"name": "get_weather", "arguments": {"city": "Paris"}} true false null 0123456789, the quick brown fox'] * 3


@functools.cache
def byte_level() -> PreTrainedTokenizerFast:
    """Like GPT-2's, Llama 3's and Qwen's: two ends, special markers, and markers that are text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        special_tokens=["<|endoftext|>"],
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<|im_end|>", "[TOOL_CALLS]")])
    markers = ("<tool_call>", "</tool_call>")
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in markers])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")


@functools.cache
def sentencepiece() -> PreTrainedTokenizerFast:
    """Like Llama 2's: spaces are ▁, one is put in front, and other characters are bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *map(chr, range(33, 127)), "▁"]
    vocabulary = {piece: token_id for token_id, piece in enumerate(pieces)}
    merges = []
    for piece in ("▁H", "▁He", "el", "lo", "▁w", "or", "ld", "▁{", '{"', '":', "▁true"):
        if piece[:-1] in vocabulary:
            merges.append((piece[:-1], piece[-1]))
            vocabulary[piece] = len(vocabulary)
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


@functools.cache
def wordpiece() -> PreTrainedTokenizerFast:
    """Like BERT's: what a token is in the text depends on the one before."""
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")


@functools.cache
def word_level() -> PreTrainedTokenizerFast:
    """Words without a decoder, which joins them by spaces."""
    words = ["[UNK]", "the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")
