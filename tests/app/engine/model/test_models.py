"""Greedy tokens equal transformers' own `generate`, for every architecture of the table."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from folio.app.engine import SamplingParams
from folio.app.engine.engine import Engine, EngineConfig
from folio.vmem import LayoutKind, ViewPolicy
from tests.app.engine.runs import generate_staggered
from tests.architectures import FURTHER
from tests.conftest import ARCHITECTURES, HYBRIDS, MakeCheckpoint, tokens

LENGTHS = (1, 2, 16, 63, 129, 700)
NEW_TOKENS = 12


def own_tokens(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    """What transformers itself generates, one prompt at a time; once for each checkpoint."""
    if folder not in _own_tokens:
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
        _own_tokens[folder] = [
            model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )[0, len(prompt) :].tolist()
            for prompt in prompts
        ]
    return _own_tokens[folder]


_own_tokens: dict[Path, list[list[int]]] = {}
CASES = [
    *itertools.product(
        ARCHITECTURES, [("region", "interleaved"), ("block_table", "interleaved"), ("auto", "per_layer")]
    ),
    *itertools.product(("llama", "gemma2", "gpt2", "gpt_oss"), [("auto", "sliced")]),
    *itertools.product(HYBRIDS, [("auto", "interleaved")]),
    # One or the other of two memories that have everything in them; both for all of them would take too long.
    *zip(FURTHER, itertools.cycle([("region", "interleaved"), ("block_table", "per_layer")]), strict=False),
]


@pytest.mark.thirds
@pytest.mark.parametrize(("name", "memory"), CASES)
def test_greedy_equals_transformers(
    name: str, memory: tuple[ViewPolicy, LayoutKind], checkpoint: MakeCheckpoint
) -> None:
    folder, (view, layout) = checkpoint(name), memory
    prompts = [tokens(length, seed) for seed, length in enumerate(LENGTHS)]
    config = EngineConfig(
        model=str(folder),
        kv_memory_bytes=64 << 20,
        max_num_seqs=16,
        max_num_batched_tokens=96,
        kv_view=view,
        kv_layout=layout,
        skip_tokenizer_init=True,
    )
    engine = Engine(config)
    try:
        actual = generate_staggered(
            engine, prompts, SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
        )
    finally:
        engine.close()
    for prompt, found, expected in zip(prompts, actual, own_tokens(folder, prompts), strict=True):
        assert found == expected, f"prompt of {len(prompt)} tokens"
