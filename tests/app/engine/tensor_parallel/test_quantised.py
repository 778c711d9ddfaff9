"""Ranks with quantised weights: each has its share of the codes, and the tokens are those of one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from folio.app.engine import SamplingParams
from folio.app.engine.engine import Engine, EngineConfig
from folio.app.engine.layers.linear import PackedEmbedding, PackedLinear
from folio.app.engine.model.loader import LoadedModel, load_model
from folio.app.engine.ranks import worker
from folio.app.errors import ModelError
from folio.kernels import CpuLinear
from tests.app.engine.model.quantised_checkpoints import KINDS, quantised_file, write_quantised
from tests.app.engine.tensor_parallel.thread_ranks import thread_ranks
from tests.conftest import MakeCheckpoint

PROMPTS = [[(i * 37 + j * 11) % 250 for j in range(5 + 7 * i)] for i in range(5)]
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


@pytest.fixture(autouse=True)
def products() -> None:
    if reason := CpuLinear().unsupported(torch.float32):
        pytest.skip(reason)


def generate(model: Path, ranks: int = 1, **settings: Any) -> dict[str, list[int]]:
    config = EngineConfig(
        model=str(model),
        tensor_parallel_size=ranks,
        kv_memory_bytes=16 << 20,
        max_model_len=100,
        skip_tokenizer_init=True,
        **{"dtype": "float32"} | settings,
    )
    engine, outputs = Engine(config, thread_ranks), dict[str, list[int]]()
    try:
        for i, prompt in enumerate(PROMPTS):
            engine.submit(str(i), prompt, GREEDY)
        while engine.has_work:
            for delta in engine.step():
                assert delta.error is None
                outputs.setdefault(delta.request_id, []).extend(delta.token_ids)
    finally:
        engine.close()
    return outputs


@pytest.mark.parametrize("untied", [False, True])
def test_gguf(tmp_path: Path, untied: bool) -> None:
    path = quantised_file(tmp_path / "m.gguf", width=128, untied=untied, plain=("blk.1.attn_v.weight",))
    expected = generate(path)
    assert generate(path, 2) == expected
    assert generate(path, 2, async_scheduling="on") == expected


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "gptq"])
def test_checkpoints(kind: str, checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """Groups of more inputs than a rank has become smaller."""
    source = checkpoint("qwen2", intermediate_size=128, tie_word_embeddings=kind == "awq")
    folder, _ = write_quantised(source, kind, tmp_path)
    assert generate(folder, 2) == generate(folder)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_made_at_load(quantization: str, checkpoint: MakeCheckpoint) -> None:
    folder = checkpoint("llama", intermediate_size=128)
    assert generate(folder, 2, quantization=quantization) == generate(folder, quantization=quantization)


def test_a_rank_has_its_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, loaded = quantised_file(tmp_path / "m.gguf", width=128), list[LoadedModel]()
    monkeypatch.setattr(worker, "load_model", lambda *args: loaded.append(load_model(*args)) or loaded[-1])

    def num_bytes(model: LoadedModel) -> int:
        modules = [m for m in model.module.modules() if isinstance(m, PackedEmbedding | PackedLinear)]
        assert len(modules) == 3 * 4 + 2
        packed = {module.packed for module in modules}
        assert all(weight.is_quantised for weight in packed)
        return sum(weight.nbytes for weight in packed)

    config = EngineConfig(model=str(path), tensor_parallel_size=2, kv_memory_bytes=16 << 20, skip_tokenizer_init=True)
    engine = Engine(config, thread_ranks)
    engine.close()
    whole = num_bytes(load_model(EngineConfig(model=str(path), skip_tokenizer_init=True).on_device("cpu")))
    shares = [num_bytes(engine.model), *map(num_bytes, loaded)]
    assert len(shares) == 2
    assert max(shares) <= 0.55 * whole


def test_what_cannot_be_shared_is_named(tmp_path: Path, checkpoint: MakeCheckpoint) -> None:
    path = quantised_file(tmp_path / "m.gguf")
    with pytest.raises(
        ModelError, match=r"2 ranks cannot share model.layers.0.mlp.down_proj.weight: inputs 0 to 47 of"
    ):
        generate(path, 2)
    with pytest.raises(ModelError, match=r"3 ranks cannot share the 4 query heads"):
        generate(path, 3)
    folder, _ = write_quantised(checkpoint("llama", intermediate_size=128), "gptq", tmp_path)
    with pytest.raises(ModelError, match=r"cannot share model.layers.0.self_attn.o_proj.weight: .*desc_act"):
        generate(folder, 2)
