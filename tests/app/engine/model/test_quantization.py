"""8-bit weights: nearly the same logits in a fraction of the memory, and errors where they are not possible."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from folio.app.config.engine import EngineConfig
from folio.app.engine import LLM, SamplingParams
from folio.app.engine.layers.linear import PackedLinear
from folio.app.engine.model.loader import load_model
from folio.app.errors import ConfigError
from folio.kernels import CpuLinear
from tests.conftest import MakeCheckpoint

needs_products = pytest.mark.usefixtures("products")


@pytest.fixture(scope="module")
def products() -> None:
    """Not at import: that compiles the kernel, and fails on a machine without a compiler."""
    if CpuLinear().unsupported(torch.float32) is not None:
        pytest.skip("8-bit weights need a processor with AVX2 or NEON")


def load(folder: Path, quantization: str) -> tuple[torch.Tensor, int]:
    """Logits of some tokens, and the bytes of all linear layers."""
    config = EngineConfig(model=str(folder), quantization=quantization, skip_tokenizer_init=True)  # type: ignore[arg-type]
    module = load_model(config.on_device("cpu")).module
    module.set_attn_implementation("eager")
    with torch.inference_mode():
        logits = module(input_ids=torch.arange(3, 90)[None], use_cache=False).logits[0]
    return logits, sum(part.packed.nbytes for part in module.modules() if isinstance(part, PackedLinear))


@needs_products
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2"])
def test_logits_are_nearly_the_same(name: str, checkpoint: MakeCheckpoint) -> None:
    """Random weights are the hard case: no logits stand out."""
    folder = checkpoint(name)
    (expected, whole_bytes), (actual, quantized_bytes) = load(folder, "none"), load(folder, "int8")
    difference = ((actual - expected).norm(dim=-1) / expected.norm(dim=-1)).median().item()
    assert 1e-4 < difference < 0.05, f"relative difference {difference:.3f}"
    assert quantized_bytes < 0.3 * whole_bytes, "float32 weights should have become bytes, and a scale for each output"


@needs_products
def test_the_builtin_model_answers_the_same() -> None:
    """The greedy tokens of 8-bit weights are those of float32."""
    prompts = ["The key of room 417 is 93. The key of room 417 is", "What is Folio?", "Hello"]
    params = SamplingParams(max_tokens=8, temperature=0)
    with LLM("builtin", dtype="float32", kv_memory_bytes=16 << 20) as llm:
        expected = [completion.text for completion in llm.generate(prompts, params)]
    with LLM("builtin", dtype="float32", kv_memory_bytes=16 << 20, quantization="int8") as llm:
        assert [completion.text for completion in llm.generate(prompts, params)] == expected


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_outputs_are_independent_of_the_batch_in_half_precision(quantization: str, checkpoint: MakeCheckpoint) -> None:
    """Rounding depended on the number of rows, which changed tokens with nearly equal logits."""
    if CpuLinear().unsupported(torch.bfloat16) or "amx_bf16" in Path("/proc/cpuinfo").read_text():
        pytest.skip("the products that torch has, and those in matrix tiles, depend on the number of rows")
    prompts = [[(i * 37 + j * 11) % 500 for j in range(5 + i)] for i in range(20)]
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    folder = checkpoint("llama")
    settings = {"dtype": "bfloat16", "quantization": quantization, "prefix_cache": False, "skip_tokenizer_init": True}
    with LLM(folder, kv_memory_bytes=8 << 20, **settings) as llm:  # type: ignore[arg-type]
        crowd = [completion.token_ids for completion in llm.generate(prompts, params)]
        assert [llm.generate([prompt], params)[0].token_ids for prompt in prompts[::3]] == crowd[::3]


def test_a_dtype_without_8_bit_products_is_refused(checkpoint: MakeCheckpoint) -> None:
    folder = checkpoint("llama")
    config = EngineConfig(model=str(folder), dtype="float16", quantization="int8", skip_tokenizer_init=True)
    with pytest.raises(ConfigError, match=r"'int8'.*float16.*use 'none'"):
        load_model(config.on_device("cpu"))
