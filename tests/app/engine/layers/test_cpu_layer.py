"""Layers in one call give the same tokens as layer by layer of operations, and only complete ones do so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from folio.app.config.engine import EngineConfig
from folio.app.engine import SamplingParams
from folio.app.engine.engine import Engine
from folio.app.engine.layers.fused_layer import FusedLayer
from folio.app.engine.model.loader import load_model
from tests.app.engine.model.test_models import generate_staggered
from tests.conftest import ARCHITECTURES, MakeCheckpoint, tokens
from tests.kernels.cpu.test_ops import has_layers


def layers_in_one_call(module: torch.nn.Module) -> int:
    return sum(isinstance(layer, FusedLayer) and layer.one_call is not None for layer in module.modules())


@pytest.mark.parametrize(
    ("name", "layers"),
    [("llama", 3), ("qwen2", 3), ("qwen3", 3), ("mistral", 3), ("gemma2", 0), ("mixtral", 0), ("opt", 0), ("phi3", 0)],
)
def test_which_layers_run_in_one_call(make_checkpoint: MakeCheckpoint, name: str, layers: int) -> None:
    """Gemma has norms after attention and MLP, Mixtral experts; OPT's and Phi-3's layers are not fused. All need
    AVX-512."""
    model_type, settings = ARCHITECTURES[name]
    folder = str(make_checkpoint(model_type, **settings))
    assert layers_in_one_call(
        load_model(EngineConfig(model=folder, skip_tokenizer_init=True).on_device("cpu")).module
    ) == (layers if has_layers(torch.float32) else 0)
    assert (
        layers_in_one_call(
            load_model(EngineConfig(model=folder, dtype="float16", skip_tokenizer_init=True).on_device("cpu")).module
        )
        == 0
    )


def test_layers_that_adapters_change_do_not_run_in_one_call(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    model_type, settings = ARCHITECTURES["llama"]
    folder = str(make_checkpoint(model_type, **settings))
    config = EngineConfig(model=folder, adapter_dir=str(tmp_path), skip_tokenizer_init=True)
    assert layers_in_one_call(load_model(config.on_device("cpu")).module) == 0


@pytest.mark.thirds
@pytest.mark.parametrize("name", ["qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize(
    "settings", [{}, {"dtype": "bfloat16"}, {"quantization": "int8"}, {"kv_view": "region"}], ids=str
)
def test_same_tokens(
    make_checkpoint: MakeCheckpoint, name: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefills meet decodes, in both views, over windows and norms of heads."""
    monkeypatch.setattr(
        "folio.app.engine.layers.linear.has_matrix_tiles", lambda: False
    )  # products that oneDNN would take
    if not has_layers(torch.bfloat16 if "dtype" in settings else torch.float32):
        pytest.skip("no layers in one call here")
    model_type, of_model = ARCHITECTURES[name]
    prompts = [tokens(length, seed) for seed, length in enumerate((1, 17, 129, 300))]
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    folder = str(make_checkpoint(model_type, **of_model))
    config = EngineConfig(model=folder, skip_tokenizer_init=True, **settings)
    outputs = []
    for in_one_call in (True, False):
        engine = Engine(config)
        assert layers_in_one_call(engine.executor.model.module) == 3
        for layer in engine.executor.model.module.modules():
            if isinstance(layer, FusedLayer) and not in_one_call:
                layer.one_call = None
        outputs.append(generate_staggered(engine, prompts, params))
        engine.close()
    assert outputs[0] == outputs[1]
