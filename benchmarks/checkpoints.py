"""Checkpoints with random weights in published shapes, and tokenizers that have a word for each token."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerFast

_ROPE = {"rope_type": "default", "rope_theta": 1e6}
# Settings of configs. Contexts of the first two leave room for an output after the longest prompt. Some of the small
# ones have fewer layers or a smaller vocabulary than what was published.
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3-8b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-5,
    },
    "qwen2.5-0.5b": {
        "model_type": "qwen2",
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "rope_parameters": _ROPE,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
    "smollm2-135m": {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "rope_parameters": _ROPE,
        "tie_word_embeddings": True,
    },
    "smollm2-360m": {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 960,
        "intermediate_size": 2560,
        "num_hidden_layers": 32,
        "num_attention_heads": 15,
        "num_key_value_heads": 5,
        "rope_parameters": _ROPE,
        "tie_word_embeddings": True,
    },
    "pythia-160m": {
        "model_type": "gpt_neox",
        "vocab_size": 50304,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "tie_word_embeddings": False,
    },
    "gemma3-180m": {
        "model_type": "gemma3_text",
        "vocab_size": 131072,
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_hidden_layers": 18,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "tie_word_embeddings": True,
    },
    "qwen3-290m": {
        "model_type": "qwen3",
        "vocab_size": 32768,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_parameters": _ROPE,
        "tie_word_embeddings": True,
    },
    "tiny": {  # a test of programs, not a measurement
        "model_type": "llama",
        "vocab_size": 2048,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 16384,
    },
}
QWEN, QWEN_VOCABULARY = "qwen2.5-0.5b", 151936
SEED = 5


def config_of(shape: str, **changed: Any) -> PreTrainedConfig:
    """The config of a shape, with some of its fields changed."""
    settings = SHAPES[shape] | changed
    return AutoConfig.for_model(settings.pop("model_type"), **settings)


def write_checkpoint(folder: Path, config: PreTrainedConfig, *, seed: int = SEED, words: bool = True) -> int:
    """Write random weights in bfloat16, and a tokenizer of words; returns the bytes of the weights."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    if words:
        write_words(folder, config.vocab_size)
    return sum(parameter.nbytes for parameter in model.parameters())


def write_words(folder: Path, vocab_size: int, first: Sequence[str] = ()) -> None:
    """Write a tokenizer that has a word for each token: t0, t1, … With `first`, these are the first tokens; they begin
    with those of unknown words and of the end, and structured outputs can be written with them."""
    vocabulary = [*first, *(f"t{i}" for i in range(len(first), vocab_size))]
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token=vocabulary[0]))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"unk_token": vocabulary[0]}
    if first:
        words.decoder = decoders.ByteLevel()  # structured outputs, which a warm-up tries, need one
        special |= {"bos_token": first[0], "eos_token": first[1]}
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)


def write_qwen(folder: Path, num_layers: int) -> None:
    """Qwen2.5-0.5B's shape with so many layers."""
    write_checkpoint(folder, config_of(QWEN, num_hidden_layers=num_layers))


@contextmanager
def qwen(folder: str | None, num_layers: int) -> Iterator[Path]:
    """`write_qwen` in this folder, unless it is there already, or in a temporary one."""
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(folder or temporary)
        if not (path / "config.json").exists():
            write_qwen(path, num_layers)
        yield path
