"""Engine settings: defaults by device, bounds, and settings that contradict each other."""

from __future__ import annotations

import pickle
from dataclasses import fields, replace
from typing import Any

import pytest
from pydantic import TypeAdapter

from folio.app.config.engine import DEVICE_DEFAULTS, EngineConfig, KVStore, ResolvedConfig
from folio.app.errors import ConfigError


def test_defaults_follow_the_device() -> None:
    config = EngineConfig(model="builtin")
    cpu, cuda = config.on_device("cpu"), config.on_device("cuda")
    assert (cpu.max_num_seqs, cpu.max_num_batched_tokens, cpu.kv_idle_release_s) == (64, 1024, 0.5)
    assert (cuda.max_num_seqs, cuda.max_num_batched_tokens, cuda.kv_idle_release_s) == (256, 8192, 30.0)
    assert (cpu.device, cuda.device) == ("cpu", "cuda")


def test_no_value_depends_on_the_device_afterwards() -> None:
    """Every setting with defaults by device has one for each device, and a narrower type once it is known."""
    names = {name for name in EngineConfig.__dataclass_fields__ if name in ResolvedConfig.__annotations__} - {"device"}
    assert all(names == DEVICE_DEFAULTS[device].keys() for device in ("cpu", "cuda"))
    given = EngineConfig(model="m", max_num_seqs=3, max_num_batched_tokens=5, kv_idle_release_s=0.0).on_device("cuda")
    assert (given.max_num_seqs, given.max_num_batched_tokens, given.kv_idle_release_s) == (3, 5, 0.0)
    assert [field.name for field in fields(ResolvedConfig)] == [field.name for field in fields(EngineConfig)]


def test_a_resolved_config_stays_one() -> None:
    config = EngineConfig(model="m", kv_dtype="fp8_e5m2", adapters={"a": "b"}).on_device("cuda")
    for same in (replace(config, model="n"), pickle.loads(pickle.dumps(config))):  # to other ranks, and of a draft
        assert type(same) is ResolvedConfig
        assert (same.max_num_seqs, same.kv_dtype, same.adapters) == (256, "fp8_e5m2", {"a": "b"})


def test_a_file_and_a_script_name_the_store_alike() -> None:
    written = TypeAdapter(EngineConfig).validate_python({"model": "m", "kv_store": {"dir": "/d", "bytes": "2GiB"}})
    assert written.kv_store == KVStore(dir="/d", bytes=2 << 30)
    assert EngineConfig(model="m", kv_store={"dir": "/d", "bytes": 2 << 30}) == written  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "lines"),
    [
        ({"gpu_memory_utilization": 0.0}, ["gpu_memory_utilization is 0.0; it must be above 0 and at most 1"]),
        ({"gpu_memory_utilization": 1.01}, ["gpu_memory_utilization is 1.01; it must"]),
        ({"gpu_memory_utilization": float("nan")}, ["gpu_memory_utilization is nan; it must"]),
        ({"gpu_memory_utilization": 0.5, "device": "cpu"}, ["and device 'cpu'; it is for CUDA devices"]),
        ({"kv_dtype": "fp8"}, ["kv_dtype is 'fp8'; choose one of auto, fp8_e4m3, fp8_e5m2"]),
        ({"kv_dtype": "fp8_e4m3", "attention": "cpu"}, ["and attention 'cpu', which reads no 8-bit floats"]),
        ({"kv_dtype": "fp8_e5m2", "attention": "torch-flash"}, ["and attention 'torch-flash', which reads no"]),
        ({"kv_idle_release_s": -1.0}, ["kv_idle_release_s is -1.0; it must be at least 0"]),
        ({"max_mixed_step_s": "x"}, ["max_mixed_step_s is 'x'; it must be at least 0"]),
        ({"kv_dtype": 5}, ["kv_dtype is 5; choose one of"]),
        ({"kv_store": {"dir": "d", "bytes": "2GiB"}}, ["a setting has a value of the wrong type ('<' not supported"]),
        (
            {"kv_memory_bytes": "x", "kv_memory_floor_bytes": "x", "max_queued_requests": "many"},
            [
                "kv_memory_bytes is 'x'; it must be at least 1",
                "max_queued_requests is 'many'; it must be at least 1, None or 'auto'",
                "kv_memory_floor_bytes is 'x'; it must be at least 0",
            ],
        ),
        ({"kv_layout": "hole"}, ["kv_layout is 'hole'; choose one of auto, interleaved, sliced, whole, per_layer"]),
        ({"few_row_products": "off"}, ["few_row_products is 'off'; it must be true or false"]),
        ({"dependent_launch": 1}, ["dependent_launch is 1; it must be true or false"]),
        ({"mixed_graphs": True}, ["mixed_graphs is True; choose one of off, on"]),
        (
            {"mixed_graphs": "on", "decode_graphs": "off"},
            ["without which nothing is captured: use decode_graphs 'auto'"],
        ),
        ({"mixed_graphs": "on", "tensor_parallel_size": 2}, ["not captured: use mixed_graphs 'off'"]),
        ({"max_num_seqs": 0}, ["max_num_seqs is 0; it must be at least 1"]),
        (
            {"kv_store": {"dir": "", "bytes": 0}, "prefix_cache": False, "tensor_parallel_size": 2},
            [
                "kv_store.dir is empty; name a folder on a local disk",
                "kv_store.bytes is 0; it must be at least 1",
                "kv_store is set and prefix_cache false, without which no prefix is kept: leave kv_store out",
                "kv_store is set and tensor_parallel_size 2; prefixes of one rank only are kept on disk",
            ],
        ),
        (
            {"max_num_seqs": 0, "gpu_memory_utilization": 2, "kv_dtype": "fp8_e4m3", "attention": "cpu"},
            ["max_num_seqs is 0", "gpu_memory_utilization is 2", "kv_dtype is 'fp8_e4m3' and"],
        ),
        (
            {"batch_invariant": True, "attention": "sdpa", "adapter_dir": "adapters"},
            ["batch_invariant is true and attention 'sdpa'", "batch_invariant is true and there are adapters"],
        ),
    ],
)
def test_all_faults_are_named(settings: dict[str, Any], lines: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        EngineConfig(model="builtin", **settings)
    shown = str(error.value).splitlines()
    assert len(shown) == len(lines)
    assert all(part in line for part, line in zip(lines, shown, strict=True))
