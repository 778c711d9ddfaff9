"""LoRA adapters sharded over several ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

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
from tests.conftest import MakeCheckpoint

pytestmark = pytest.mark.usefixtures(one_thread.__name__)

GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
PROMPT = list(range(3, 40, 2))
PATTERNS = {"llama": r"_proj$|lm_head", "mixtral": r"self_attn.*_proj$", "gemma2": r"layers.*_proj$", "phi3": r"_proj$"}


class PeerElsewhere(RankAdapters):
    """A peer for which the adapter "a" is in another folder."""

    def __init__(self, layers: LoRALayers | None, folder: Path) -> None:
        super().__init__(layers)
        self._folder = folder

    def read(self, source: AdapterSource) -> Updates:
        return super().read(replace(source, path=str(self._folder)) if source.name == "a" else source)


def with_adapters(checkpoint: MakeCheckpoint, folder: Path, name: str = "llama") -> Path:
    """A model and its adapters "a" and "b" in the folder."""
    model = checkpoint(name)
    for seed, key in enumerate("ab"):
        make_adapter(folder / key, model, PATTERNS[name], seed=seed)
    return model


def make_engine(model: Path, folder: Path, size: int) -> Engine:
    """With one slot for the two adapters."""
    sources = {key: str(folder / key) for key in "ab"}
    return engine_of(model, thread_ranks, adapters=sources, tensor_parallel_size=size, max_loaded_adapters=1)


@pytest.mark.parametrize(("name", "size"), [("llama", 2), ("llama", 4), ("mixtral", 2), ("gemma2", 2), ("phi3", 2)])
def test_ranks_give_what_merged_models_give(checkpoint: MakeCheckpoint, tmp_path: Path, name: str, size: int) -> None:
    """Two adapters take turns in one slot, beside the base model. Four ranks share two KV heads."""
    model = with_adapters(checkpoint, tmp_path, name)
    expected = {key: Merged(model, tmp_path / key).generate(PROMPT, 6) for key in "ab"}
    expected["base"] = Merged(model).generate(PROMPT, 6)
    engine = make_engine(model, tmp_path, size)
    for key in ("a", "base", "b"):
        engine.submit(key, PROMPT, GREEDY, adapter=None if key == "base" else key)
    outputs = {key: tokens(deltas) for key, deltas in run(engine).items()}
    engine.close()
    assert outputs == expected


@pytest.fixture
def peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[RankAdapters]:
    """Adapters of peers on another machine."""
    peers: list[RankAdapters] = []

    def peer(layers: LoRALayers | None) -> RankAdapters:
        peers.append(PeerElsewhere(layers, tmp_path / "elsewhere"))
        return peers[-1]

    monkeypatch.setattr(worker, "RankAdapters", peer)
    return peers


def test_an_adapter_that_a_peer_cannot_read_is_refused(
    checkpoint: MakeCheckpoint, tmp_path: Path, peers: list[RankAdapters]
) -> None:
    model = with_adapters(checkpoint, tmp_path)
    engine = make_engine(model, tmp_path, 2)
    for key in "ab":
        engine.submit(key, PROMPT, GREEDY, adapter=key)
    outputs = run(engine)
    assert isinstance(outputs["a"][0].error, ModelError)
    assert "elsewhere" in str(outputs["a"][0].error)
    assert tokens(outputs["b"]) == Merged(model, tmp_path / "b").generate(PROMPT, 6)
    engine.close()


def test_an_adapter_that_rank_0_cannot_insert_is_on_no_rank(
    checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the peers kept it, and failed when the next adapter came into its slot."""
    model = with_adapters(checkpoint, tmp_path)
    engine = make_engine(model, tmp_path, 2)
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
    checkpoint: MakeCheckpoint, tmp_path: Path, peers: list[RankAdapters]
) -> None:
    """A check fails if a peer's does, and leaves nothing on any rank. Replaced adapters give the new outputs."""
    model = with_adapters(checkpoint, tmp_path)
    engine = engine_of(model, thread_ranks, tensor_parallel_size=2, adapter_dir=str(tmp_path))
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
