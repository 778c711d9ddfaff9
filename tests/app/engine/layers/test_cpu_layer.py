"""Layers in one call give the same tokens as layer by layer of operations, and only complete ones do so."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from folio.app.config.engine import EngineConfig
from folio.app.engine import SamplingParams
from folio.app.engine.engine import Engine
from folio.app.engine.layers import cpu_layer
from folio.app.engine.layers.fused_layer import FusedLayer
from folio.app.engine.model.loader import load_model
from tests.app.engine.runs import generate_staggered, layers_in_one_call
from tests.conftest import MakeCheckpoint, tokens
from tests.kernels.marches import has_layers


@pytest.mark.parametrize(
    ("name", "settings", "layers"),
    [
        *((name, {}, 3) for name in ("llama", "qwen2", "qwen3", "mistral", "gemma2")),
        ("mixtral", {}, 0),  # experts
        ("opt", {}, 0),  # not fused, nor is Phi-3
        ("phi3", {}, 0),
        ("llama", {"dtype": "float16"}, 0),
        ("llama", {"adapter_dir": "adapters"}, 0),
    ],
)
def test_which_layers_run_in_one_call(
    checkpoint: MakeCheckpoint, name: str, settings: dict[str, Any], layers: int, tmp_path: Path
) -> None:
    if "adapter_dir" in settings:
        settings = {"adapter_dir": str(tmp_path)}
    config = EngineConfig(model=str(checkpoint(name)), skip_tokenizer_init=True, **settings)
    found = layers_in_one_call(load_model(config.on_device("cpu")).module)
    assert found == (layers if has_layers(torch.float32) else 0)


def test_angles_are_computed_by_one_thread(checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's other threads would spin on the cores of the layers' own: a stream had three quarters of its speed. Other
    threads of the process, and those that begin meanwhile, keep theirs."""
    if not has_layers(torch.float32):
        pytest.skip("no layers in one call here")
    config = EngineConfig(model=str(checkpoint("llama")), skip_tokenizer_init=True)
    rotary = load_model(config.on_device("cpu")).module.model.rotary_emb
    of_mkl: Any = getattr(ctypes.CDLL(torch._C.__file__), "MKL_Set_Num_Threads_Local", lambda _: 1)
    seen: list[int] = []
    cos = torch.Tensor.cos

    def noted(x: torch.Tensor) -> torch.Tensor:
        seen.extend((torch.get_num_threads(), of_mkl(1)))
        with ThreadPoolExecutor(1) as another:
            seen.append(another.submit(torch.get_num_threads).result())
        return cos(x)

    monkeypatch.setattr(torch.Tensor, "cos", noted)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        rotary(torch.zeros(1, 1, 8), torch.zeros(1, 1, dtype=torch.int64))
        assert seen == [1, 1, 3]
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.thirds
@pytest.mark.parametrize("name", ["qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize(
    "settings", [{}, {"dtype": "bfloat16"}, {"quantization": "int8"}, {"kv_view": "region"}], ids=str
)
def test_same_tokens(checkpoint: MakeCheckpoint, name: str, settings: dict[str, Any]) -> None:
    """Prefills meet decodes, in both views, over windows and norms of heads."""
    if not has_layers(torch.bfloat16 if "dtype" in settings else torch.float32):
        pytest.skip("no layers in one call here")
    prompts = [tokens(length, seed) for seed, length in enumerate((1, 17, 129, 300))]
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    config = EngineConfig(model=str(checkpoint(name)), skip_tokenizer_init=True, **settings)
    outputs = []
    for in_one_call in (True, False):
        engine = Engine(config)
        assert layers_in_one_call(engine.executor.model.module) == 3
        for layer in engine.executor.model.module.modules():
            if isinstance(layer, FusedLayer) and not in_one_call:
                layer.one_call = None
        outputs.append(generate_staggered(engine, prompts, params))
        engine.close()
    for prompt, one, other in zip(prompts, *outputs, strict=True):
        if one != other:  # both round, at other places: each is up to 0.26 from float32 here
            assert config.dtype == "bfloat16"
            assert gap_at_difference(replace(config, dtype="float32"), prompt, one, other) < 0.5


def gap_at_difference(config: EngineConfig, prompt: list[int], one: list[int], other: list[int]) -> float:
    """The difference of the log probabilities of the first two tokens that differ."""
    num_same = [a == b for a, b in zip(one, other, strict=True)].index(False)
    engine = Engine(config)
    engine.submit("r", [*prompt, *one[:num_same]], SamplingParams(max_tokens=1, temperature=0, logprobs=20))
    [delta] = [delta for _ in range(20) for delta in engine.step()]
    engine.close()
    known = dict(delta.logprobs[0].top)
    return abs(known[one[num_same]] - known[other[num_same]])


@pytest.mark.parametrize("reads", ["nothing", "between", "after all", "after the step"])
def test_layers_that_follow_each_other_are_one_call(
    reads: str, checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code that reads the output of a layer, at once or when later ones have run, changes no token."""
    if not has_layers(torch.float32):
        pytest.skip("no layers in one call here")
    counts: list[int] = []

    def counted(hidden: torch.Tensor, layers: Any, workspace: Any) -> torch.Tensor:
        counts.append(len(layers))
        return run_layers(hidden, layers, workspace)

    run_layers = cpu_layer.run_layers
    monkeypatch.setattr(cpu_layer, "run_layers", counted)
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    engine = Engine(EngineConfig(model=str(checkpoint("llama")), skip_tokenizer_init=True))
    expected = generate_staggered(engine, [tokens(9, 0)], params)
    model: Any = engine.executor.model.module
    kept: list[torch.Tensor] = []
    first, last = model.model.layers[0], model.model.layers[2]

    def read(*_: Any) -> None:
        for out in kept:
            out.sum()

    if reads != "nothing":
        first.register_forward_hook(lambda _, __, out: kept.append(out))
    if reads in ("between", "after all"):
        {"between": first, "after all": last}[reads].register_forward_hook(read)
    counts.clear()
    assert generate_staggered(engine, [tokens(9, 0)], params) == expected
    per_step = {"nothing": [3], "after the step": [3], "between": [1, 2], "after all": [1, 3]}[reads]
    assert counts == per_step * 4
    if reads == "after the step":
        with pytest.raises(RuntimeError, match="read after its step"):
            kept[0].sum()
    engine.close()
