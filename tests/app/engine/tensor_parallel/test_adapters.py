"""LoRA adapters sharded over several ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from folio.app.engine.engine import Engine
from folio.app.engine.lora.layers import LoRALayers, Updates
from folio.app.engine.lora.rank import RankAdapters
from folio.app.engine.lora.source import AdapterSource, files_version
from folio.app.engine.ranks import worker
from folio.app.engine.sampling.params import SamplingParams
from folio.app.errors import EngineError, ModelError
from tests.app.engine.engines import engine_of, run
from tests.app.engine.engines import tokens_of as tokens
from tests.app.engine.lora.adapters import Merged, make_adapter, one_thread
from tests.app.engine.tensor_parallel.thread_ranks import thread_ranks
from tests.conftest import ARCHITECTURES, MakeCheckpoint

pytestmark = pytest.mark.usefixtures(one_thread.__name__)

GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
PROMPT = list(range(3, 40, 2))
PATTERNS = {"llama": r"_proj$|lm_head", "mixtral": r"self_attn.*_proj$", "gemma2": r"layers.*_proj$", "phi3": r"_proj$"}


def make_engine(model: Path, folders: dict[str, Path], **settings: Any) -> Engine:
    sources = {name: str(folder) for name, folder in folders.items()}
    return engine_of(model, thread_ranks, adapters=sources, **settings)


class PeerElsewhere(RankAdapters):
    """A peer for which the adapter "a" is in another folder."""

    def __init__(self, layers: LoRALayers | None, folder: Path) -> None:
        super().__init__(layers)
        self._folder = folder

    def read(self, source: AdapterSource) -> Updates:
        return super().read(replace(source, path=str(self._folder)) if source.name == "a" else source)


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
    settings = {"tensor_parallel_size": size, "max_loaded_adapters": 1}
    engine = make_engine(model, {key: tmp_path / key for key in "ab"}, **settings)
    for key in ("a", "base", "b"):
        engine.submit(key, PROMPT, GREEDY, adapter=None if key == "base" else key)
    outputs = {key: tokens(deltas) for key, deltas in run(engine).items()}
    engine.close()
    assert outputs == expected


def test_an_adapter_that_a_peer_cannot_read_is_refused(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_checkpoint("llama", **ARCHITECTURES["llama"][1])
    for seed, key in enumerate("ab"):
        make_adapter(tmp_path / key, model, r"_proj$", seed=seed)
    monkeypatch.setattr(worker, "RankAdapters", lambda layers: PeerElsewhere(layers, tmp_path / "elsewhere"))
    settings = {"tensor_parallel_size": 2, "max_loaded_adapters": 1}
    engine = make_engine(model, {key: tmp_path / key for key in "ab"}, **settings)
    for key in "ab":
        engine.submit(key, PROMPT, GREEDY, adapter=key)
    outputs = run(engine)
    assert isinstance(outputs["a"][0].error, ModelError)
    assert "elsewhere" in str(outputs["a"][0].error)
    assert tokens(outputs["b"]) == Merged(model, tmp_path / "b").generate(PROMPT, 6)
    engine.close()


def test_an_adapter_that_rank_0_cannot_insert_is_on_no_rank(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the peers kept it, and failed when the next adapter came into its slot."""
    model = make_checkpoint("llama", **ARCHITECTURES["llama"][1])
    for seed, key in enumerate("ab"):
        make_adapter(tmp_path / key, model, r"_proj$", seed=seed)
    settings = {"tensor_parallel_size": 2, "max_loaded_adapters": 1}
    engine = make_engine(model, {key: tmp_path / key for key in "ab"}, **settings)
    original = LoRALayers.insert

    def insert(layers: LoRALayers, slot: int, updates: Updates) -> None:
        original(layers, slot, updates)
        if layers is engine.model.adapters:
            raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(LoRALayers, "insert", insert)
        engine.submit("a", PROMPT, GREEDY, adapter="a")
        assert isinstance(run(engine)["a"][0].error, EngineError)
    engine.submit("b", PROMPT, GREEDY, adapter="b")
    assert tokens(run(engine)["b"]) == Merged(model, tmp_path / "b").generate(PROMPT, 6)
    engine.close()


def test_adapters_are_checked_and_loaded_on_all_ranks(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check fails if a peer's does, and leaves nothing on any rank. Replaced adapters give the new outputs."""
    model = make_checkpoint("llama", **ARCHITECTURES["llama"][1])
    for seed, key in enumerate("ab"):
        make_adapter(tmp_path / key, model, r"_proj$", seed=seed)
    peers: list[RankAdapters] = []

    def peer(layers: LoRALayers | None) -> RankAdapters:
        peers.append(PeerElsewhere(layers, tmp_path / "elsewhere"))
        return peers[-1]

    monkeypatch.setattr(worker, "RankAdapters", peer)
    engine = make_engine(model, {}, tensor_parallel_size=2, adapter_dir=str(tmp_path))
    for name, folder in (("a", "a"), ("legal", "a"), ("legal", "b"), ("legal", "a")):
        source = AdapterSource(name, str(tmp_path / folder), files_version(tmp_path / folder))
        number, reading = engine.adapters.begin_check(source)
        reading.result()
        error = engine.adapters.end_check(number, source)
        if name == "a":
            assert isinstance(error, ModelError)
            assert "elsewhere" in str(error)
        else:
            assert error is None
            engine.adapters.set_loaded([source])
            engine.submit("r", PROMPT, GREEDY, adapter=name)
            assert tokens(run(engine)["r"]) == Merged(model, tmp_path / folder).generate(PROMPT, 6)
    engine.adapters.set_loaded([])
    assert not engine.adapters.slots
    engine.close()
    assert [rank.reading for rank in peers] == [{}]
    assert [rank._found for rank in peers] == [{}]
