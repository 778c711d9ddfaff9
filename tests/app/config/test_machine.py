"""Resources within control groups of both versions; settings that exceed them."""

from __future__ import annotations

import ast
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import folio.app.config.machine
from folio.app.config.engine import EngineConfig
from folio.app.config.machine import Machine, check_resources, num_threads, resident_bytes

GIB = 1 << 30
ROOMY = Machine(memory_bytes=24 * GIB, available_bytes=20 * GIB, limited=False, num_cores=8, max_map_count=65_530)


def machine(root: Path, cgroup: str, files: dict[str, str]) -> Machine:
    """A machine of 24 GiB with 16 available, and these files of control groups."""
    tree = {
        "proc/meminfo": "MemTotal: 25165824 kB\nMemFree: 1 kB\nMemAvailable: 16777216 kB\n",
        "proc/self/cgroup": cgroup,
        "proc/sys/vm/max_map_count": "262144\n",
    } | {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for name, text in tree.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Machine.detect(root)


def group(limit: int | str, used: int, inactive_file: int = 0, folder: str = "") -> dict[str, str]:
    """Of version 2."""
    return {
        f"{folder}memory.max": f"{limit}\n",
        f"{folder}memory.current": f"{used}\n",
        f"{folder}memory.stat": f"anon 5\ninactive_file {inactive_file}\nactive_file 7\n",
    }


def group_v1(limit: int, used: int, inactive_file: int = 0, folder: str = "memory/") -> dict[str, str]:
    return {
        f"{folder}memory.limit_in_bytes": f"{limit}\n",
        f"{folder}memory.usage_in_bytes": f"{used}\n",
        f"{folder}memory.stat": f"inactive_file 1\ntotal_inactive_file {inactive_file}\n",
    }


NONE_V1 = 9223372036854771712


@pytest.mark.parametrize(
    ("cgroup", "files", "memory_gib", "available_gib"),
    [
        ("", {}, 24, 16),
        ("0::/\n", group(2 * GIB, GIB), 2, 1),
        ("0::/\n", group(2 * GIB, GIB, inactive_file=GIB // 2), 2, 1.5),
        ("0::/\n", group("max", GIB), 24, 16),
        ("0::/\n", group(20 * GIB, GIB), 20, 16),
        ("0::/a/b\n", group(8 * GIB, GIB, folder="a/b/") | group(4 * GIB, 3 * GIB, folder="a/"), 4, 1),
        ("0::/a/b\n", group("max", GIB, folder="a/b/") | group(6 * GIB, GIB, folder="a/"), 6, 5),
        ("0::/../../host/name\n", group(2 * GIB, 3 * GIB), 2, 0),
        ("4:memory:/\n", group_v1(2 * GIB, GIB, inactive_file=GIB // 4), 2, 1.25),
        ("4:memory:/docker/77\n1:cpu:/\n", group_v1(2 * GIB, GIB), 2, 1),
        ("4:memory:/a\n", group_v1(NONE_V1, GIB, folder="memory/a/") | group_v1(3 * GIB, GIB), 3, 2),
        ("4:memory:/\n0::/\n", group_v1(NONE_V1, GIB), 24, 16),
    ],
)
def test_memory_limits_of_control_groups(
    tmp_path: Path, cgroup: str, files: dict[str, str], memory_gib: float, available_gib: float
) -> None:
    """Regression: in a container with 2 GiB on a machine with 24, the KV cache could be 6 GiB."""
    found = machine(tmp_path, cgroup, files)
    assert (found.memory_bytes / GIB, found.available_bytes / GIB) == (memory_gib, available_gib)
    assert found.limited == (memory_gib < 24)
    assert found.max_map_count == 262_144


@pytest.mark.parametrize(
    ("cgroup", "files", "num_cores"),
    [
        ("0::/\n", {"cpu.max": "max 100000\n"}, 8),
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 2),
        ("0::/a\n", {"a/cpu.max": "max 100000\n", "cpu.max": "50000 100000\n"}, 1),
        ("2:cpu,cpuacct:/\n", {"cpu,cpuacct/cpu.cfs_quota_us": "300000", "cpu,cpuacct/cpu.cfs_period_us": "100000"}, 3),
        ("2:cpuacct,cpu:/\n", {"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3),
        ("2:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
    ],
)
def test_core_quotas_of_control_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cgroup: str, files: dict[str, str], num_cores: int
) -> None:
    """Regression: a container of two cores on a machine of 64 ran 64 threads."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert machine(tmp_path, cgroup, files).num_cores == num_cores


def test_this_machine() -> None:
    here = Machine.detect()
    assert 0 < here.available_bytes <= here.memory_bytes
    assert here.num_cores >= 1
    assert 0 < resident_bytes() < here.memory_bytes


@pytest.mark.parametrize(
    ("settings", "most"),
    [
        ({"kv_memory_bytes": 1 << 40}, 24 * GIB),
        ({"tensor_parallel_size": 2, "kv_memory_bytes": 13 * GIB}, 12 * GIB),
        ({"kv_memory_bytes": 22 * GIB, "kv_memory_floor_bytes": 21 * GIB}, 20 * GIB),
        ({"swap_bytes": 1 << 40}, 24 * GIB),
        ({"device": "cuda", "swap_bytes": 1 << 40}, 24 * GIB),
        ({"max_num_seqs": 10**9}, 65_536),
        ({"max_num_batched_tokens": 10**8}, 1_048_576),
        ({"num_threads": 10_000}, 8),
    ],
)
def test_settings_beyond_the_machine_are_refused(settings: dict[str, Any], most: int) -> None:
    """Regression: `max_num_seqs: 10**9` took the memory of the whole machine."""
    [problem] = check_resources(EngineConfig(model="builtin", **settings), ROOMY)
    *_, name = settings
    assert problem.startswith(f"{name} is {settings[name]}; it must be at most {most}: ")
    allowed = EngineConfig(model="builtin", **settings | {name: most})
    assert check_resources(allowed, ROOMY) == []


def test_all_problems_are_reported_at_once_with_reasons() -> None:
    config = EngineConfig(model="builtin", kv_memory_bytes=1 << 40, num_threads=9, max_num_seqs=10**9)
    container = replace(ROOMY, memory_bytes=2 * GIB, available_bytes=GIB, limited=True)
    problems = check_resources(config, container, reserved_bytes=GIB // 2)
    assert [problem.split()[0] for problem in problems] == ["kv_memory_bytes", "num_threads", "max_num_seqs"]
    assert problems[0] == (
        "kv_memory_bytes is 1099511627776; it must be at most 1610612736: this container's memory limit is 2.0 GiB, "
        "of which 1.0 GiB are available; weights and steps take 0.5 GiB"
    )


@pytest.mark.parametrize("settings", [{"kv_memory_bytes": 1 << 40}, {"num_threads": 64}])
def test_the_memory_of_a_gpu_is_not_the_machines(settings: dict[str, Any]) -> None:
    assert check_resources(EngineConfig(model="builtin", device="cuda", **settings), ROOMY) == []


def test_a_ceiling_may_exceed_available_memory() -> None:
    """In an update the replica that has the memory is about to stop."""
    assert check_resources(EngineConfig(model="builtin", kv_memory_bytes=22 * GIB), ROOMY) == []


def test_nothing_heavy_is_imported() -> None:
    """Checks must not take as long as importing torch."""
    tree = ast.parse(Path(folio.app.config.machine.__file__).read_text())
    modules = [n.module or "" for n in tree.body if isinstance(n, ast.ImportFrom)]
    modules += [alias.name for n in tree.body if isinstance(n, ast.Import) for alias in n.names]
    assert {module.split(".")[0] for module in modules} <= sys.stdlib_module_names


def test_a_gpu_is_known_by_its_driver(tmp_path: Path) -> None:
    assert not machine(tmp_path, "", {}).has_gpu
    version = tmp_path / "proc/driver/nvidia/version"
    version.parent.mkdir(parents=True)
    version.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06")
    assert machine(tmp_path, "", {}).has_gpu


def test_a_cache_on_a_gpu_may_exceed_the_machines_memory() -> None:
    """With device auto it may become one where there is a GPU; the replica checks again once the device is known."""
    config = EngineConfig(model="builtin", kv_memory_bytes=60 * GIB)
    with_gpu = replace(ROOMY, has_gpu=True)
    assert check_resources(config, with_gpu) == []
    assert check_resources(replace(config, device="cuda"), ROOMY) == []
    for device, here in (("auto", ROOMY), ("cpu", with_gpu)):
        [problem] = check_resources(replace(config, device=device), here)
        assert problem.startswith("kv_memory_bytes is 64424509440; it must be at most")
    [problem] = check_resources(config.on_device("cpu"), with_gpu)
    assert problem.startswith("kv_memory_bytes is")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"device": "cpu"}, 8),
        ({"device": "cpu", "tensor_parallel_size": 2}, 4),
        ({"device": "cuda"}, 4),  # regression: all cores, in each replica
        ({"device": "cuda", "tensor_parallel_size": 4}, 2),
        ({"device": "cuda", "tensor_parallel_size": 16}, 1),
        ({"device": "cuda", "num_threads": 6}, 6),
    ],
)
def test_threads_of_a_rank(settings: dict[str, Any], expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Machine, "detect", lambda: ROOMY)
    config = EngineConfig(model="builtin", **settings)
    assert num_threads(config.on_device(config.device)) == expected
