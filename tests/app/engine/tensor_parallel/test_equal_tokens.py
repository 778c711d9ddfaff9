"""Several ranks give the tokens of one rank, for every architecture with a plan, with preemption, forks and shared
prefixes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hypothesis")
import torch

from folio.app.engine import SamplingParams
from folio.app.engine.engine import Engine, EngineConfig
from folio.app.engine.layers.linear import PackedLinear
from folio.app.engine.model.loader import LoadedModel, load_model
from folio.app.engine.ranks import worker
from folio.app.engine.ranks.processes import Launch, spawn_ranks
from folio.app.errors import ModelError
from folio.vmem import Backend, select_backend
from tests.app.engine.tensor_parallel.decoding import prompts
from tests.app.engine.tensor_parallel.thread_ranks import socket_ranks, thread_ranks
from tests.conftest import ARCHITECTURES, HYBRIDS, VOCAB_SIZE, MakeCheckpoint
from tests.nightly import examples

# Of the further ones: experts beside a shared one, and latent attention. `docs/reference/models.md` has the others.
OF_FURTHER = ("qwen2_moe", "deepseek_v3")
WITHOUT_PLAN = {"opt", "gpt2", "bamba", "falcon_h1", "lfm2", "gpt_bigcode", "stablelm"}
PLANNED = [name for name in (ARCHITECTURES | HYBRIDS) if name not in WITHOUT_PLAN]
# On two ranks and on four: nightly all of them, and each time one of each kind; the others are on two or four in turns.
BOTH = PLANNED if examples(0, nightly=1) else ["llama", "mixtral", "qwen3_next"]
SWAP, RECOMPUTE = {"preemption": "swap"}, {"preemption": "recompute"}
UNEVEN = {"vocab_size": VOCAB_SIZE + 3}
ONE_HEAD = {"num_key_value_heads": 1, "tie_word_embeddings": True}
IN_PROCESSES = pytest.param("mixtral", {}, 2, spawn_ranks, SWAP, marks=pytest.mark.processes)
# name, changes of it, ranks, launch, settings
CASES = [
    *(
        (name, {}, size, thread_ranks, RECOMPUTE if size == 4 else SWAP)
        for i, name in enumerate(PLANNED)
        for size in (2, 4)
        if name in BOTH or size == (2, 4)[i % 2]
    ),
    *((name, {}, 2, thread_ranks, SWAP) for name in OF_FURTHER),
    *(("llama", changes, size, thread_ranks, SWAP) for changes in (UNEVEN, ONE_HEAD) for size in (2, 4)),
    *((name, {}, 2, thread_ranks, SWAP | {"async_scheduling": "on"}) for name in ("llama", "qwen3_next")),
    ("mixtral", {}, 2, socket_ranks, SWAP),
    IN_PROCESSES,
]
NEW_TOKENS = 14
_expected: dict[Path, dict[str, list[int]]] = {}  # of one rank
GREEDY = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)


def generate(folder: Path, launch: Launch = thread_ranks, **settings: Any) -> tuple[dict[str, list[int]], Engine]:
    """Outputs of all prompts and of two forks, in a memory that becomes too small for them; and the engine, closed."""
    engine = Engine(
        EngineConfig(
            model=str(folder),
            max_num_seqs=16,
            max_model_len=200,
            max_num_batched_tokens=64,
            skip_tokenizer_init=True,
            dtype="float32",
            **({"kv_memory_bytes": 16 << 20} | settings),
        ),
        launch,
    )
    outputs: dict[str, list[int]] = {}
    try:
        arriving = list(enumerate(prompts()))
        while arriving or engine.has_work:
            if arriving:
                i, prompt = arriving.pop(0)
                engine.submit(str(i), prompt, GREEDY)
            for _ in range(2):
                for delta in engine.step():
                    assert delta.error is None
                    outputs.setdefault(delta.request_id, []).extend(delta.token_ids)
                for i in ("1", "3"):
                    fork = f"fork of {i}"
                    if len(outputs.get(i, ())) == 6 and fork not in outputs:
                        engine.fork(i, fork, SamplingParams(max_tokens=NEW_TOKENS - 6, temperature=0))
                        [child] = engine.requests[fork].sequences
                        outputs[fork] = child.token_ids[len(child.prompt_token_ids) :]
            if "fork of 3" in outputs:
                engine.set_budget(engine.memory.least_budget_bytes, revision=1)
            engine.check_integrity()
        return {name: tokens[:NEW_TOKENS] for name, tokens in outputs.items()}, engine
    finally:
        engine.close()


@pytest.mark.thirds
@pytest.mark.parametrize(("name", "changes", "size", "launch", "settings"), CASES)
def test_greedy_tokens_are_those_of_one_rank(
    name: str,
    changes: dict[str, Any],
    size: int,
    launch: Launch,
    settings: dict[str, Any],
    checkpoint: MakeCheckpoint,
) -> None:
    """Over threads, TCP and processes; a vocabulary need not be even, and ranks may share a head. Tokens of a step in
    flight reach all ranks."""
    folder = checkpoint(name, **changes)
    if folder not in _expected:
        _expected[folder], _ = generate(folder)
    actual, engine = generate(folder, launch, tensor_parallel_size=size, **settings)
    assert actual == _expected[folder]
    report = engine.report()
    assert report.hit_tokens > 100
    assert report.copied_blocks > 0
    assert sum(engine.load.take_activity().num_preempted.values()) > 0


@pytest.mark.thirds
@pytest.mark.parametrize("name", sorted(WITHOUT_PLAN))
def test_a_model_without_a_plan_is_refused(name: str, checkpoint: MakeCheckpoint) -> None:
    with pytest.raises(ModelError, match="no tensor-parallel plan for its layers"):
        generate(checkpoint(name), tensor_parallel_size=2)


@pytest.mark.parametrize(
    ("settings", "size", "reason"),
    [
        ({}, 3, "cannot share the 4 query heads"),
        (
            {"hidden_size": 192, "num_attention_heads": 12, "num_key_value_heads": 3, "head_dim": 16},
            2,
            "cannot share the 3 KV heads",
        ),
        ({"num_key_value_heads": 4, "num_attention_heads": 4}, 8, "cannot share the 4 query heads"),
        ({"intermediate_size": 97}, 2, "cannot share the 97 rows or columns of model.layers.0.mlp.gate_proj"),
    ],
)
def test_indivisible_dimensions_are_refused(
    settings: dict[str, int], size: int, reason: str, checkpoint: MakeCheckpoint
) -> None:
    with pytest.raises(ModelError, match=reason):
        generate(checkpoint("llama", **settings), tensor_parallel_size=size)


def test_a_rank_has_its_share_of_weights_and_cache(checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoint("llama")
    loaded: list[LoadedModel] = []
    monkeypatch.setattr(worker, "load_model", lambda *args: loaded.append(load_model(*args)) or loaded[-1])

    def num_parameters(module: torch.nn.Module) -> int:
        """Parameters, with the weights of packed linear layers by their shapes."""
        return sum(
            part.in_features * part.out_features if isinstance(part, PackedLinear) else sum(p.numel() for p in own)
            for part in module.modules()
            for own in [list(part.parameters(recurse=False))]
        )

    _, whole = generate(folder)
    _, engine = generate(folder, tensor_parallel_size=2)
    shares = [num_parameters(model.module) for model in (engine.model, *loaded)]
    norms = 7 * 64
    assert shares[0] == shares[1]
    assert sum(shares) == num_parameters(whole.model.module) + norms
    assert engine.memory.groups[0].layout.payload_bytes * 2 == whole.memory.groups[0].layout.payload_bytes


def test_requests_are_preempted_when_a_peer_lacks_memory(
    checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer's device has half of the budget."""
    folder = checkpoint("llama")
    expected, _ = generate(folder)

    def small_backend(device: torch.device, *, capacity_bytes: int, headroom_bytes: int) -> Backend:
        return select_backend(device, capacity_bytes=min(capacity_bytes, 120 << 10), headroom_bytes=headroom_bytes)

    monkeypatch.setattr(worker, "select_backend", small_backend)
    actual, engine = generate(folder, tensor_parallel_size=2, preemption="recompute")
    assert actual == expected
    assert sum(engine.load.take_activity().num_preempted.values()) > 0
