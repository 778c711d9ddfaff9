"""A KV cache of 8-bit floats: its scales, and engines that use it."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from folio.app.config.engine import EngineConfig
from folio.app.engine import LLM, SamplingParams
from folio.app.engine.engine import Engine
from folio.app.engine.execution.model_runner import cache_scales, forward, observe_layers
from folio.app.engine.layers.attention import AttentionHandler, GeometryProbe, bind_attention
from folio.app.engine.model.kv_scales import ScaleProbe, stored_scales
from folio.app.engine.model.loader import LoadedModel, load_model
from folio.app.engine.ranks.processes import spawn_ranks
from folio.kernels import CacheScales, Masking, select_provider
from tests.app.engine.runs import run
from tests.app.engine.tensor_parallel.thread_ranks import thread_ranks
from tests.conftest import MakeCheckpoint, tokens

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
TEXTS = ["The moon is", "Once upon a time", "How do I bake bread?", "Stars are"]
TEXTS += ["The telescope", "What is a river?", "In winter", "She said that"]
REFERENCE = select_provider("reference", torch.device("cpu"))


def prompts(*lengths: int) -> list[list[int]]:
    return [tokens(length, seed) for seed, length in enumerate(lengths)]


def settings_of(**settings: Any) -> dict[str, Any]:
    shared = {"skip_tokenizer_init": True, "num_threads": 1, "kv_memory_bytes": 4 << 20, "dtype": "float32"}
    return shared | settings


def tokens_of(folder: str | Path, asked: list[list[int]], **settings: Any) -> list[list[int]]:
    """Greedy tokens, with a check of the memory after each step."""
    with LLM(folder, **settings_of(**settings)) as llm:
        return run(llm.engine, asked, GREEDY)


class Rounding(AttentionHandler):
    """Attention over the call's own tokens, rounded as a cache of 8-bit floats would."""

    def __init__(self, scales: Mapping[int, CacheScales], dtype: torch.dtype) -> None:
        self._scales, self._dtype = scales, dtype
        self._probe = GeometryProbe(REFERENCE)

    def attend(self, layer: int, query: torch.Tensor, *new_and_masking: Any) -> torch.Tensor:
        key, value, masking = new_and_masking
        scales = self._scales[layer]
        key, value = self._rounded(key, scales.key), self._rounded(value, scales.value)
        return self._probe.attend(layer, query, key, value, masking)

    def _rounded(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        most = torch.finfo(self._dtype).max
        return (x / scale[:, None]).clamp(-most, most).to(self._dtype).float() * scale[:, None]


@torch.inference_mode()
def naive_tokens(model: LoadedModel, scales: Mapping[int, CacheScales], prompt: list[int]) -> list[int]:
    bind_attention(model.module, Rounding(scales, model.cache_dtype))
    text = list(prompt)
    for _ in range(GREEDY.max_tokens or 0):
        positions = torch.arange(len(text))
        text.append(int(forward(model.module, torch.tensor(text), positions, positions[-1:]).argmax()))
    return text[len(prompt) :]


@pytest.mark.thirds
@pytest.mark.parametrize("kind", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("layout", ["interleaved", "per_layer"])
@pytest.mark.parametrize("view", ["region", "block_table"])
def test_the_cache_holds_rounded_keys_and_values(kind: Any, layout: Any, view: Any, checkpoint: MakeCheckpoint) -> None:
    """Token for token what rounding keys and values in a forward without a cache gives."""
    folder = checkpoint("llama")
    asked = prompts(3, 40, 150)
    settings = {"kv_dtype": kind, "kv_layout": layout, "kv_view": view, "max_num_batched_tokens": 64}
    found = tokens_of(folder, asked, attention="reference", **settings)
    config = EngineConfig(model=str(folder), dtype="float32", kv_dtype=kind, skip_tokenizer_init=True)
    model = load_model(config.on_device("cpu"))
    scales = cache_scales(model, REFERENCE, observe_layers(model, REFERENCE))
    assert found == [naive_tokens(model, scales, prompt) for prompt in asked]
    assert found == tokens_of(folder, asked, **settings)  # of "auto"


@pytest.mark.thirds
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "mixtral", "bamba", "qwen3_next"])
@pytest.mark.parametrize("kind", ["fp8_e4m3", "fp8_e5m2"])
def test_architectures_pass_their_self_test(
    name: str, kind: Any, checkpoint: MakeCheckpoint, caplog: pytest.LogCaptureFixture
) -> None:
    """Windows, sinks, experts, recurrent states. The difference shows that the cache is rounded."""
    caplog.set_level(logging.INFO, "folio.app.engine")
    folder = checkpoint(name)
    for dtype in ("float32", "bfloat16"):
        caplog.clear()
        tokens_of(folder, prompts(5, 90), kv_dtype=kind, dtype=dtype)
        [rounding] = re.findall(r"relative difference of logits (\S+)", caplog.text)
        [packing] = re.findall(r"self-test passed: relative difference (\S+)", caplog.text)
        assert 1e-3 < float(rounding) < (0.4 if kind == "fp8_e4m3" else 0.8)
        assert float(packing) < 0.1
        assert "scales of 0 layers from the checkpoint" in caplog.text


@pytest.mark.parametrize(("kind", "least"), [("fp8_e4m3", 0.5), ("fp8_e5m2", 0.3)])
def test_most_tokens_of_the_built_in_model_stay(kind: Any, least: float) -> None:
    """Rounding changes near ties, and what follows them: 8 prompts, 48 greedy tokens each."""
    params = replace(GREEDY, max_tokens=48)
    outputs = []
    for kv_dtype in ("auto", kind):
        with LLM("builtin", kv_memory_bytes=16 << 20, dtype="float32", kv_dtype=kv_dtype, num_threads=1) as llm:
            outputs.append([completion.token_ids for completion in llm.generate(TEXTS, params)])
    assert share_of_equal(outputs[1], outputs[0]) >= least


def share_of_equal(found: list[list[int]], expected: list[list[int]]) -> float:
    pairs = [pair for a, b in zip(found, expected, strict=True) for pair in zip(a, b, strict=True)]
    return sum(a == b for a, b in pairs) / len(pairs)


def test_prefixes_and_swapped_blocks_keep_their_bytes(checkpoint: MakeCheckpoint) -> None:
    """Other chunks give other last bits, of which a few round to other 8-bit floats; other bytes change every token."""
    folder = checkpoint("llama")
    common = prompts(96)[0]
    asked = [common + prompt for prompt in prompts(9, 40, 70, 30, 50, 60)]
    expected = tokens_of(folder, asked, kv_dtype="fp8_e4m3", prefix_cache=False)
    assert share_of_equal(tokens_of(folder, asked + asked, kv_dtype="fp8_e4m3"), expected * 2) > 0.9
    asked, params = prompts(*[60] * 6), replace(GREEDY, max_tokens=40)
    with LLM(folder, **settings_of(kv_dtype="fp8_e4m3")) as llm:
        expected = run(llm.engine, asked, params)
    with LLM(folder, **settings_of(kv_dtype="fp8_e4m3", kv_memory_bytes=88 << 10, preemption="swap")) as llm:
        assert share_of_equal(run(llm.engine, asked, params), expected) > 0.9
        assert llm.engine.load.take_activity().num_preempted["swap"] > 0


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "bamba", "deepseek_v2", "deepseek_v3"])
def test_int8_passes_the_self_test(name: str, checkpoint: MakeCheckpoint, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "folio.app.engine")
    for attention in ("cpu", "reference"):
        caplog.clear()
        tokens_of(checkpoint(name), prompts(5, 90), kv_dtype="int8", attention=attention)
        [rounding] = re.findall(r"relative difference of logits (\S+)", caplog.text)
        assert 1e-4 < float(rounding) < 0.1


def test_prefixes_swaps_and_ranks_in_int8(checkpoint: MakeCheckpoint) -> None:
    folder = checkpoint("llama")
    common = prompts(96)[0]
    asked = [common + prompt for prompt in prompts(9, 40, 70)]
    expected = tokens_of(folder, asked, kv_dtype="int8", prefix_cache=False)
    assert share_of_equal(tokens_of(folder, asked + asked, kv_dtype="int8"), expected * 2) > 0.9
    engine = Engine(
        EngineConfig(model=str(folder), **settings_of(kv_dtype="int8", tensor_parallel_size=2)), thread_ranks
    )
    try:
        assert share_of_equal(run(engine, asked, GREEDY), expected) > 0.8
    finally:
        engine.close()
    asked, params = prompts(*[60] * 6), replace(GREEDY, max_tokens=40)
    with LLM(folder, **settings_of(kv_dtype="int8")) as llm:
        expected = run(llm.engine, asked, params)
    with LLM(folder, **settings_of(kv_dtype="int8", kv_memory_bytes=88 << 10, preemption="swap")) as llm:
        assert share_of_equal(run(llm.engine, asked, params), expected) > 0.9
        assert llm.engine.load.take_activity().num_preempted["swap"] > 0


def test_ranks_have_the_scales_of_their_heads(checkpoint: MakeCheckpoint) -> None:
    config = EngineConfig(model=str(checkpoint("llama")), **settings_of(kv_dtype="fp8_e4m3", attention="reference"))
    outputs = []
    for ranks, launch in ((1, spawn_ranks), (2, thread_ranks)):
        engine = Engine(replace(config, tensor_parallel_size=ranks), launch)
        try:
            outputs.append(run(engine, prompts(7, 60), GREEDY))
        finally:
            engine.close()
    assert share_of_equal(outputs[1], outputs[0]) > 0.8  # sums of two ranks differ in the last bits


def probe_of(*layers: tuple[list[float], list[float]]) -> ScaleProbe:
    """A probe that has seen two tokens: keys and values of each layer's heads, and their half."""
    probe = ScaleProbe(GeometryProbe(REFERENCE))
    for i, (key, value) in enumerate(layers):
        new = [torch.tensor([[[x, 0.0] for x in side], [[-x / 2, 0.0] for x in side]]) for side in (key, value)]
        probe.attend(i, torch.zeros(2, len(key), 2), *new, Masking(1.0))
    return probe


def test_scales_leave_a_factor_of_two() -> None:
    """Heads without a size have scale 1."""
    probe = probe_of(([448.0, -7.0], [0.5, 1.0]), ([1.0], [2.0]), ([0.0, torch.inf, torch.nan], [1e-3, 0.0, 0.0]))
    found = [[side.tolist() for side in (scales.key, scales.value)] for scales in probe.scales(E4M3).values()]
    assert found == [
        [pytest.approx([2.0, 7 / 224]), pytest.approx([0.5 / 224, 1 / 224])],
        [pytest.approx([1 / 224]), pytest.approx([2 / 224])],
        [[1.0] * 3, pytest.approx([1e-3 / 224, 1.0, 1.0])],
    ]
    assert probe.scales(E4M3)[1].key.dtype == torch.float32
    assert probe.scales(E5M2)[0].key.tolist() == pytest.approx([448 * 2 / 57344, 14 / 57344])


def test_scales_of_checkpoints(tmp_path: Path) -> None:
    """By the names of several tools; only of layers with both, as single numbers."""
    first = {
        "model.layers.0.self_attn.k_scale": torch.tensor(0.5),
        "model.layers.0.self_attn.v_scale": torch.tensor([0.25]),
        "model.layers.1.self_attn.k_proj.k_scale": torch.tensor([2.0], dtype=torch.bfloat16),
        "model.layers.2.self_attn.attn.k_scale": torch.tensor(1.5),
        "model.layers.2.self_attn.attn.v_scale": torch.tensor(3.0),
        "model.layers.3.self_attn.k_scale": torch.tensor(1.0),  # without one for the values
        "model.layers.4.self_attn.k_scale": torch.tensor([1.0, 2.0]),  # of each head: not read
        "model.layers.4.self_attn.v_scale": torch.tensor(1.0),
        "model.layers.5.self_attn.k_proj.weight_scale": torch.tensor(1.0),
    }
    save_file(first, tmp_path / "a.safetensors")
    save_file({"model.layers.1.self_attn.v_proj.v_scale": torch.tensor(4.0)}, tmp_path / "b.safetensors")
    (tmp_path / "c.bin").write_bytes(b"not read")
    found = stored_scales(sorted(tmp_path.iterdir()))
    assert found == {0: (0.5, 0.25), 1: (2.0, 4.0), 2: (1.5, 3.0)}


def test_scales_of_a_checkpoint_come_first(
    tmp_path: Path, checkpoint: MakeCheckpoint, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "folio.app.engine")
    folder = shutil.copytree(checkpoint("llama"), tmp_path / "scaled")  # others use the original
    weights = load_file(folder / "model.safetensors")
    stored = {
        f"model.layers.1.self_attn.{side}_scale": torch.tensor(scale) for side, scale in (("k", 0.5), ("v", 0.25))
    }
    save_file(weights | stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = EngineConfig(model=str(folder), kv_dtype="fp8_e4m3", skip_tokenizer_init=True).on_device("cpu")
    model = load_model(config)
    scales = cache_scales(model, REFERENCE, observe_layers(model, REFERENCE))
    assert (scales[1].key.tolist(), scales[1].value.tolist()) == ([0.5, 0.5], [0.25, 0.25])
    assert scales[0].key.tolist() != [1.0, 1.0]
    assert "scales of 1 layers from the checkpoint, of 2 measured" in caplog.text
    assert load_model(replace(config, kv_dtype="auto")).stored_scales == {}
    tokens_of(folder, prompts(20), kv_dtype="fp8_e4m3")
