"""Several ranks give the tokens of one rank, for every architecture with a plan, with preemption, forks and shared
prefixes."""

from __future__ import annotations

import itertools
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
from tests.app.engine.tensor_parallel.thread_ranks import socket_ranks, thread_ranks
from tests.architectures import FURTHER
from tests.conftest import ARCHITECTURES, HYBRIDS, VOCAB_SIZE, MakeCheckpoint
from tests.nightly import examples

# Of the further ones: experts beside a shared one, and latent attention. `docs/reference/models.md` has the others.
OF_FURTHER = ("qwen2_moe", "deepseek_v3")
ALL = ARCHITECTURES | {name: (name, settings) for name, settings in HYBRIDS.items()} | FURTHER
WITHOUT_PLAN = {"opt", "gpt2", "bamba", "falcon_h1", "lfm2", "gpt_bigcode", "stablelm"}
PLANNED = [name for name in (ARCHITECTURES | HYBRIDS) if name not in WITHOUT_PLAN]
# On two ranks and on four: nightly all of them, and each time one of each kind; the others are on two or four in turns.
BOTH = PLANNED if examples(0, nightly=1) else ["llama", "mixtral", "qwen3_next"]
CASES = [
    *((name, size) for i, name in enumerate(PLANNED) for size in (2, 4) if name in BOTH or size == (2, 4)[i % 2]),
    *itertools.product(OF_FURTHER, (2,)),
]
NEW_TOKENS = 14
_expected: dict[str, dict[str, list[int]]] = {}  # of one rank
GREEDY = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)


def prompts() -> list[list[int]]:
    """With and without common prefixes."""
    generator = torch.Generator().manual_seed(7)

    def tokens(count: int) -> list[int]:
        return torch.randint(1, VOCAB_SIZE - 1, (count,), generator=generator).tolist()

    common = tokens(100)
    return [common + tokens(20), tokens(1), common + tokens(33), tokens(64), common[:70] + tokens(9), tokens(150)]


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
@pytest.mark.parametrize(("name", "size"), CASES)
def test_greedy_tokens_are_those_of_one_rank(name: str, size: int, make_checkpoint: MakeCheckpoint) -> None:
    model_type, settings = ALL[name]
    folder = make_checkpoint(model_type, **settings)
    if name not in _expected:
        _expected[name], _ = generate(folder)
    actual, engine = generate(folder, tensor_parallel_size=size, preemption="swap" if size == 2 else "recompute")
    assert actual == _expected[name]
    report = engine.report()
    assert report.hit_tokens > 100
    assert report.copied_blocks > 0
    assert sum(engine.load.take_activity().num_preempted.values()) > 0


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_tokens_of_a_step_in_flight_reach_all_ranks(name: str, make_checkpoint: MakeCheckpoint) -> None:
    model_type, settings = ALL[name]
    folder = make_checkpoint(model_type, **settings)
    expected, _ = generate(folder)
    actual, _ = generate(folder, tensor_parallel_size=2, preemption="swap", async_scheduling="on")
    assert actual == expected


@pytest.mark.parametrize("launch", [socket_ranks, pytest.param(spawn_ranks, marks=pytest.mark.processes)])
def test_peers_over_tcp_and_in_processes(launch: Launch, make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint("mixtral", **ARCHITECTURES["mixtral"][1])
    expected, _ = generate(folder)
    actual, _ = generate(folder, launch, tensor_parallel_size=2, preemption="swap")
    assert actual == expected


@pytest.mark.parametrize("name", sorted(WITHOUT_PLAN))
def test_a_model_without_a_plan_is_refused(name: str, make_checkpoint: MakeCheckpoint) -> None:
    model_type, settings = ALL[name]
    with pytest.raises(ModelError, match="no tensor-parallel plan for its layers"):
        generate(make_checkpoint(model_type, **settings), tensor_parallel_size=2)


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
    settings: dict[str, int], size: int, reason: str, make_checkpoint: MakeCheckpoint
) -> None:
    folder = make_checkpoint("llama", **(ARCHITECTURES["llama"][1] | settings))
    with pytest.raises(ModelError, match=reason):
        generate(folder, tensor_parallel_size=size)


def test_a_vocabulary_need_not_be_even(make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint("llama", **(ARCHITECTURES["llama"][1] | {"vocab_size": VOCAB_SIZE + 3}))
    expected, _ = generate(folder)
    for size in (2, 4):
        assert generate(folder, tensor_parallel_size=size)[0] == expected


def test_tied_embeddings_and_one_kv_head(make_checkpoint: MakeCheckpoint) -> None:
    settings = ARCHITECTURES["llama"][1] | {"num_key_value_heads": 1, "tie_word_embeddings": True}
    folder = make_checkpoint("llama", **settings)
    expected, _ = generate(folder)
    for size in (2, 4):
        assert generate(folder, tensor_parallel_size=size)[0] == expected


def test_a_rank_has_its_share_of_weights_and_cache(
    make_checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint("llama", **ARCHITECTURES["llama"][1])
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
    make_checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer's device has half of the budget."""
    folder = make_checkpoint("llama", **ARCHITECTURES["llama"][1])
    expected, _ = generate(folder)

    def small_backend(device: torch.device, *, capacity_bytes: int, headroom_bytes: int) -> Backend:
        return select_backend(device, capacity_bytes=min(capacity_bytes, 120 << 10), headroom_bytes=headroom_bytes)

    monkeypatch.setattr(worker, "select_backend", small_backend)
    actual, engine = generate(folder, tensor_parallel_size=2, preemption="recompute")
    assert actual == expected
    assert sum(engine.load.take_activity().num_preempted.values()) > 0
