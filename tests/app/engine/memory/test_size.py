"""The size of a model from its config, against the engine that loads the same model."""

from __future__ import annotations

from typing import Any

import pytest
from safetensors.torch import load_file

from folio.app.config.engine import EngineConfig
from folio.app.engine.engine import Engine
from folio.app.engine.memory.size import GRANULARITY_BYTES, ModelSize, replicas_that_fit
from folio.app.errors import ConfigError, ModelError
from tests.conftest import MakeCheckpoint

GIB = 1 << 30


@pytest.mark.thirds
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "mixtral", "bamba", "qwen3_next"])
def test_the_plan_is_that_of_the_engine(name: str, use_machine: Any, checkpoint: MakeCheckpoint) -> None:
    config = EngineConfig(
        model=str(checkpoint(name)),
        dtype="float32",
        skip_tokenizer_init=True,
        num_threads=1,
        max_num_batched_tokens=64,
        swap_bytes=0,
    )
    size = ModelSize(config)
    room = size.room(GIB)
    room_bytes = GIB - size.weight_bytes
    machine = {"memory_bytes": GIB, "available_bytes": room_bytes, "limited": False, "max_map_count": 65_530}
    use_machine(resident_bytes=size.weight_bytes, num_cores=8, **machine)
    engine = Engine(config)
    try:
        assert room.groups == tuple(engine.memory.groups)
        assert room.budget_bytes == engine.report().budget_bytes
        assert room.sequences(200) == room.num_pages // engine.memory.pages_for(200)
    finally:
        engine.close()
    stored = sum(tensor.numel() for tensor in load_file(f"{config.model}/model.safetensors").values())
    assert size.num_parameters == stored
    assert size.weight_bytes == 4 * stored


def test_weights_of_half_precision_take_half(checkpoint: MakeCheckpoint) -> None:
    folder = str(checkpoint("llama"))
    single, half = (ModelSize(EngineConfig(model=folder, dtype=dtype)) for dtype in ("float32", "bfloat16"))
    assert single.weight_bytes == 2 * half.weight_bytes == 4 * single.num_parameters


def test_ranks_share_weights_and_heads(checkpoint: MakeCheckpoint) -> None:
    folder = str(checkpoint("llama"))
    one, two = (ModelSize(EngineConfig(model=folder, device="cuda", tensor_parallel_size=ranks)) for ranks in (1, 2))
    assert one.num_parameters == two.num_parameters
    assert two.weight_bytes < 0.6 * one.weight_bytes
    assert {spec.num_heads for spec in one.layers.attention.values()} == {2}
    assert {spec.num_heads for spec in two.layers.attention.values()} == {1}
    with pytest.raises(ModelError, match="3 ranks cannot share"):
        ModelSize(EngineConfig(model=folder, tensor_parallel_size=3))


def test_pages_are_whole_granules_of_the_device(checkpoint: MakeCheckpoint) -> None:
    folder = str(checkpoint("llama"))
    for device, granularity in GRANULARITY_BYTES.items():
        room = ModelSize(EngineConfig(model=folder, device=device)).room(16 * GIB)
        assert all(group.layout.handle_bytes % granularity == 0 for group in room.groups)
    assert room.device_plan is not None
    assert room.budget_bytes == pytest.approx(room.device_plan.kv_bytes, rel=0.01)
    assert room.device_plan.kv_bytes == pytest.approx((0.9 * 16 - 2.1) * GIB, rel=0.01)


def test_8_bit_floats_take_half_the_cache(checkpoint: MakeCheckpoint) -> None:
    folder = str(checkpoint("llama", head_dim=32))
    shared = {"model": folder, "dtype": "bfloat16", "device": "cuda"}
    own, fp8 = (ModelSize(EngineConfig(**shared, kv_dtype=kind)).room(16 * GIB) for kind in ("auto", "fp8_e5m2"))  # type: ignore[arg-type]
    assert 2 * fp8.groups[0].layout.payload_bytes == own.groups[0].layout.payload_bytes
    assert fp8.longest_tokens == pytest.approx(2 * own.longest_tokens, rel=0.01)


def test_int8_rows_have_their_scales(checkpoint: MakeCheckpoint) -> None:
    shared = {"model": str(checkpoint("llama", head_dim=32)), "dtype": "bfloat16", "device": "cpu"}
    own, int8 = (ModelSize(EngineConfig(**shared, kv_dtype=kind)) for kind in ("auto", "int8"))  # type: ignore[arg-type]
    assert int8.token_bytes * 64 == own.token_bytes * 36
    with pytest.raises(ConfigError, match=r"int8 is read on CPUs only: use kv_dtype 'fp8_e4m3'"):
        EngineConfig(**shared | {"device": "cuda"}, kv_dtype="int8")  # type: ignore[arg-type]


def test_utilization_is_of_the_whole_device(checkpoint: MakeCheckpoint) -> None:
    folder = str(checkpoint("llama"))
    rooms = [
        ModelSize(EngineConfig(model=folder, device="cuda", gpu_memory_utilization=share)).room(16 * GIB)
        for share in (0.5, 1.0)
    ]
    assert rooms[1].budget_bytes - rooms[0].budget_bytes == pytest.approx(8 * GIB, rel=0.01)
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization is 0.1, which leaves no memory .* lower max_num_b"):
        ModelSize(EngineConfig(model=folder, device="cuda", gpu_memory_utilization=0.1)).room(16 * GIB)


def test_replicas_share_the_memory(checkpoint: MakeCheckpoint) -> None:
    folder = str(checkpoint("llama"))
    size = ModelSize(EngineConfig(model=folder, device="cuda"))
    rooms = replicas_that_fit(size, 16 * GIB, 1000)
    assert len(rooms) == 6  # each needs 2.1 GiB for steps, graphs and headroom, of 0.9 of its part
    budgets = [room.budget_bytes for room in rooms]
    assert budgets == sorted(budgets, reverse=True)
    with pytest.raises(ConfigError, match="leaves no memory for the KV cache"):
        size.room(2 * GIB)


@pytest.mark.parametrize(
    ("settings", "memory_bytes", "message"),
    [
        ({"max_model_len": 2048}, GIB, "beyond the 1024 positions"),
        ({}, 1000, "the weights take"),
        ({"kv_memory_bytes": 2 * GIB}, GIB, "kv_memory_bytes is 2147483648; it must be at most"),
        ({"kv_memory_bytes": 2 * GIB, "device": "cuda"}, GIB, "kv_memory_bytes is 2147483648; weights"),
    ],
)
def test_what_does_not_fit_is_said(
    settings: dict[str, Any], memory_bytes: int, message: str, checkpoint: MakeCheckpoint
) -> None:
    config = EngineConfig(model=str(checkpoint("llama")), **settings)
    with pytest.raises(ConfigError, match=message):
        ModelSize(config).room(memory_bytes)
