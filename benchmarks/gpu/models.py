"""Models for servers on a GPU machine without a network: a config, a tokenizer of words, random weights."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import torch

from benchmarks import checkpoints
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
        shape: of `checkpoints.SHAPES`.
        device: makes the weights.
        weights: save them; otherwise the folder is for `load_format` "dummy".
        roll: the weights of each parameter are shifted by so many, so that models give other tokens.
        changed: fields of the config.
    """
    config = checkpoints.config_of(
        shape,
        initializer_range=sweep.WEIGHT_STD,
        dtype=dtype,
        bos_token_id=0,
        eos_token_id=1,
        **changed,
    )
    if weights:
        module: Any = random_model(config, torch.device(device), dtype=dtype, attn_implementation="eager")
        for parameter in module.parameters():
            parameter.data = parameter.data.roll(roll)
        module.save_pretrained(folder)
    else:
        config.save_pretrained(folder)
    checkpoints.write_words(folder, config.vocab_size, ("<s>", "</s>", *_CHARACTERS))
    return int(config.vocab_size)
