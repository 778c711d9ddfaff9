"""Greedy tokens equal transformers' own `generate`, for every architecture of the table."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from folio.app.engine import SamplingParams
from folio.app.engine.engine import Engine, EngineConfig
from folio.app.engine.schedule.mixed_steps import MixedSteps
from folio.vmem import LayoutKind, ViewPolicy
from tests.architectures import FURTHER
from tests.conftest import ARCHITECTURES, HYBRIDS, VOCAB_SIZE, MakeCheckpoint

LENGTHS = (1, 2, 16, 17, 63, 129, 300, 700)
NEW_TOKENS = 24


def generate_staggered(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    """Outputs of prompts that arrive two steps apart, so that prefills meet decodes. Chunks of prompts do not follow
    measured times here: bfloat16 rounds each division of a prompt differently."""
    engine.scheduler.mixed_steps = MixedSteps(engine.recovery, math.inf)
    outputs: list[list[int]] = [[] for _ in prompts]
    arriving = list(enumerate(prompts))
    while arriving or engine.has_work:
        if arriving:
            i, prompt = arriving.pop(0)
            engine.submit(str(i), prompt, params)
        for _ in range(2):
            for delta in engine.step():
                outputs[int(delta.request_id)].extend(delta.token_ids)
    return outputs


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
ALL = ARCHITECTURES | {name: (name, settings) for name, settings in HYBRIDS.items()} | FURTHER
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
    name: str, memory: tuple[ViewPolicy, LayoutKind], make_checkpoint: MakeCheckpoint
) -> None:
    model_type, settings = ALL[name]
    view, layout = memory
    folder = make_checkpoint(model_type, **settings)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(1, VOCAB_SIZE - 1, (n,), generator=generator).tolist() for n in LENGTHS]

    engine = Engine(
        EngineConfig(
            model=str(folder),
            kv_memory_bytes=64 << 20,
            max_num_seqs=16,
            max_num_batched_tokens=96,
            kv_view=view,
            kv_layout=layout,
            skip_tokenizer_init=True,
        )
    )
    try:
        params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
        actual = generate_staggered(engine, prompts, params)
        engine.check_integrity()
    finally:
        engine.close()

    for prompt, tokens, expected in zip(prompts, actual, own_tokens(folder, prompts), strict=True):
        assert tokens == expected, f"prompt of {len(prompt)} tokens"
