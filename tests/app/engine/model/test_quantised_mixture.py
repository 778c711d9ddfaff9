"""A GGUF file of a mixture of experts in an engine: its tokens are those of the dequantised model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from folio.app.engine import LLM
from folio.app.engine.layers.experts import PackedExperts
from folio.app.models.gguf.config import model_config
from folio.app.models.gguf.files import read_gguf
from folio.app.models.quantised.gguf import GgufCheckpoint
from folio.kernels import CpuLinear, QuantisedWeight
from tests.app.engine.engines import greedy, run, tokens_of
from tests.app.engine.model.quantised_checkpoints import load, logits_of, logits_of_ranks
from tests.app.engine.model.quantised_mixtures import LAYERS, write_mixture_file
from tests.app.models.gguf.files import together


def plain_model(path: Path) -> Any:
    """transformers' model of the values, in float32."""
    header = read_gguf(path)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**model_config(header)), dtype=torch.float32).eval()
    checkpoint = GgufCheckpoint(header)
    read = {name: checkpoint.read(name) for name in checkpoint.names()}
    values = {name: w.dequantised() if isinstance(w, QuantisedWeight) else w for name, w in read.items()}
    model.load_state_dict(together(values, model))
    return model


@pytest.mark.parametrize("architecture", ["qwen2moe", "qwen3moe"])
def test_tokens_are_those_of_the_values(tmp_path: Path, architecture: str) -> None:
    """Of prompts in several chunks, of decodes together, and of prefixes that are in the cache."""
    if reason := CpuLinear().unsupported(torch.float32):
        pytest.skip(reason)
    path = tmp_path / "m.gguf"
    write_mixture_file(path, architecture)
    common = [(i * 37) % 250 for i in range(48)]
    prompts = [common + [(i * 11 + j) % 250 for i in range(5 + 30 * j)] for j in range(3)]
    model, expected = plain_model(path), []
    for prompt in prompts:
        out = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None)
        expected.append(out[0, len(prompt) :].tolist())
    with LLM(path, dtype="float32", kv_memory_bytes=8 << 20, max_num_batched_tokens=64) as llm:
        module: Any = llm.engine.model.module
        assert sum(isinstance(part, PackedExperts) for part in module.modules()) == LAYERS
        for start in range(2):
            for number, prompt in enumerate(prompts):
                llm.engine.submit(str(number), prompt, greedy(12))
            found = run(llm.engine)
            assert [tokens_of(found[str(number)]) for number in range(3)] == expected
            assert start == 0 or all(deltas[-1].num_cached_tokens >= 32 for deltas in found.values())


@pytest.mark.parametrize("architecture", ["qwen2moe", "qwen3moe"])
def test_logits_of_ranks_are_those_of_one(tmp_path: Path, architecture: str) -> None:
    path = tmp_path / "m.gguf"
    write_mixture_file(path, architecture)
    torch.testing.assert_close(logits_of_ranks(path, 2), logits_of(load(path)), rtol=1e-4, atol=1e-4)
