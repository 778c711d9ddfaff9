"""Models for servers on a GPU machine without a network: a config, a tokenizer of words, random weights."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, PreTrainedTokenizerFast

from benchmarks.engine import sweep
from folio.app.engine.model.checkpoint_module import random_model

# The first tokens: with them any JSON without spaces can be written.
_CHARACTERS = string.digits + string.ascii_letters + string.punctuation
FIRST_WORD = len(_CHARACTERS) + 2


def write_model(
    folder: Path,
    shape: str,
    *,
    device: str = "cpu",
    weights: bool = False,
    roll: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    **changed: Any,
) -> int:
    """Write a checkpoint's folder; returns the size of its vocabulary.

    Args:
        shape: of `benchmarks.sweep.SHAPES`.
        device: makes the weights.
        weights: save them; otherwise the folder is for `load_format` "dummy".
        roll: the weights of each parameter are shifted by so many, so that models give other tokens.
        changed: fields of the config.
    """
    settings = sweep.SHAPES[shape] | changed
    config = AutoConfig.for_model(
        settings.pop("model_type"),
        **settings,
        initializer_range=sweep.WEIGHT_STD,
        dtype=dtype,
        bos_token_id=0,
        eos_token_id=1,
    )
    if weights:
        module: Any = random_model(config, torch.device(device), dtype=dtype, attn_implementation="eager")
        for parameter in module.parameters():
            parameter.data = parameter.data.roll(roll)
        module.save_pretrained(folder)
    else:
        config.save_pretrained(folder)
    vocabulary = ["<s>", "</s>", *_CHARACTERS]
    vocabulary += [f"t{i}" for i in range(len(vocabulary), config.vocab_size)]
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<s>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.decoder = decoders.ByteLevel()  # structured outputs, which a warm-up tries, need one
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<s>", bos_token="<s>", eos_token="</s>").save_pretrained(
        folder
    )
    return int(config.vocab_size)
