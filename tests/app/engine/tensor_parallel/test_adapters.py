"""LoRA adapters sharded over several ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from app.config.engine import EngineConfig
from app.engine.engine import Engine
from app.engine.lora.store import PeerAdapters
from app.engine.request import Delta
from app.engine.sampling.params import SamplingParams
from app.engine.tensor_parallel import worker
from app.errors import ModelError
from tests.app.engine.lora.adapters import Merged, make_adapter
from tests.app.engine.tensor_parallel.thread_ranks import thread_ranks
from tests.conftest import ARCHITECTURES, MakeCheckpoint

GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
PROMPT = list(range(3, 40, 2))
PATTERNS = {"llama": r"_proj$|lm_head", "mixtral": r"self_attn.*_proj$", "gemma2": r"layers.*_proj$", "phi3": r"_proj$"}


def make_engine(model: Path, folder: Path, size: int) -> Engine:
    config = EngineConfig(
        model=str(model),
        kv_memory_bytes=16 << 20,
        skip_tokenizer_init=True,
        tensor_parallel_size=size,
        num_threads=1,
        adapters={"a": str(folder / "a"), "b": str(folder / "b")},
        max_loaded_adapters=1,
    )
    return Engine(config, thread_ranks)


def run(engine: Engine) -> dict[str, list[Delta]]:
    deltas: dict[str, list[Delta]] = {}
    while engine.has_work:
        for delta in engine.step():
            deltas.setdefault(delta.request_id, []).append(delta)
    return deltas


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("name", "size"), [("llama", 2), ("llama", 4), ("mixtral", 2), ("gemma2", 2), ("phi3", 2)])
def test_ranks_give_what_merged_models_give(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, name: str, size: int
) -> None:
    """Two adapters take turns in one slot, beside the base model. Four ranks share two KV heads."""
    model = make_checkpoint(ARCHITECTURES[name][0], **ARCHITECTURES[name][1])
    expected = {"base": Merged(model).generate(PROMPT, 6)}
    for seed, key in enumerate("ab"):
        make_adapter(tmp_path / key, model, PATTERNS[name], seed=seed)
        expected[key] = Merged(model, tmp_path / key).generate(PROMPT, 6)
    engine = make_engine(model, tmp_path, size)
    for key in ("a", "base", "b"):
        engine.submit(key, PROMPT, GREEDY, adapter=None if key == "base" else key)
    outputs = {key: [token for delta in deltas for token in delta.token_ids] for key, deltas in run(engine).items()}
    engine.close()
    assert outputs == expected


def test_an_adapter_that_a_peer_cannot_read_is_refused(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_checkpoint("llama", **ARCHITECTURES["llama"][1])
    for seed, key in enumerate("ab"):
        make_adapter(tmp_path / key, model, r"_proj$", seed=seed)
    moved = {"a": str(tmp_path / "elsewhere")}
    monkeypatch.setattr(worker, "PeerAdapters", lambda sources, layers: PeerAdapters(sources | moved, layers))
    engine = make_engine(model, tmp_path, 2)
    for key in "ab":
        engine.submit(key, PROMPT, GREEDY, adapter=key)
    outputs = run(engine)
    assert isinstance(outputs["a"][0].error, ModelError)
    assert "elsewhere" in str(outputs["a"][0].error)
    assert [token for delta in outputs["b"] for token in delta.token_ids] == Merged(model, tmp_path / "b").generate(
        PROMPT, 6
    )
    engine.close()
