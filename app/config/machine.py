"""Machine resources that this process may use, and settings that exceed them. Imports nothing heavy."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from folio.app.config.engine import EngineConfig

# The scheduler visits every running sequence in each step, and each may have a region of its own.
MOST_SEQS = 1 << 16
# A step of more tokens takes seconds on any device, during which no request begins or ends.
MOST_STEP_TOKENS = 1 << 20
# Variables by which libgomp binds threads to cores. The thread that loads torch is bound to one core at once.
_BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY")
# Share of the memory left to the interpreter, requests and page tables, beside weights, steps and the KV cache.
SPARE_SHARE = 1 / 16
# Threads of torch beside a GPU. One thread launches the steps; sampling and masks are kernels there; tokenizers and
# grammars have threads of their own. Left are copies into pinned memory and, while a model loads, conversions of
# weights, which a few threads do at the memory's speed.
CUDA_THREADS = 4
DEFAULT_MAP_COUNT = 65_530  # Linux's vm.max_map_count


@dataclass(frozen=True, slots=True)
class Machine:
    """Resources of this machine that the process may use.

    Attributes:
        memory_bytes: all memory, or the lowest limit of the control groups that the process is in.
        available_bytes: available now without swapping: free, or in the page cache.
        limited: a control group limits the memory.
        num_cores: by affinity and by the control groups' processor quota, rounded up.
        max_map_count: most memory mappings of one process (vm.max_map_count).
        has_gpu: NVIDIA's driver is loaded.
    """

    memory_bytes: int
    available_bytes: int
    limited: bool
    num_cores: int
    max_map_count: int
    has_gpu: bool = False

    @classmethod
    def detect(cls, root: Path = Path("/")) -> Self:
        """Read /proc and the control groups of versions 1 and 2.

        Args:
            root: the folder of `proc` and `sys`.

        Raises:
            OSError: there is no /proc.
        """
        meminfo = _fields((root / "proc/meminfo").read_text())
        memory, available = (meminfo[name] << 10 for name in ("MemTotal:", "MemAvailable:"))
        groups = list(_limits(root))
        lowest = min((limit for limit, _ in groups), default=memory)
        return cls(
            memory_bytes=min(memory, lowest),
            available_bytes=max(0, min([available, *(limit - used for limit, used in groups)])),
            limited=lowest < memory,
            num_cores=min([len(usable_cores()), *_quotas(root)]),
            max_map_count=_number(root / "proc/sys/vm/max_map_count") or DEFAULT_MAP_COUNT,
            has_gpu=(root / "proc/driver/nvidia/version").exists(),
        )

    def __str__(self) -> str:
        limit = "this container's memory limit is" if self.limited else "this machine has"
        return f"{limit} {_gib(self.memory_bytes)}, of which {_gib(self.available_bytes)} are available"


def resident_bytes() -> int:
    """Resident memory of this process without shared memory, where a KV cache counts at each of its addresses."""
    status = _fields(Path("/proc/self/status").read_text())
    return (status["RssAnon:"] + status["RssFile:"]) << 10


def num_threads(config: EngineConfig) -> int:
    """CPU threads of one rank: on CPUs all cores, divided among the ranks; beside a GPU as many as have work."""
    most = max(1, Machine.detect().num_cores // config.tensor_parallel_size)
    return config.num_threads or (min(most, CUDA_THREADS) if config.device == "cuda" else most)


def usable_cores() -> set[int]:
    """Cores that this process may use: the thread's, and where libgomp has bound the thread to one of its places, those
    of all places, which are the cores that the process was started with."""
    cores = os.sched_getaffinity(0)
    for library in _loaded("libgomp") if binding_variables() else ():
        for place in range(library.omp_get_num_places()):
            count = library.omp_get_place_num_procs(place)
            found = (ctypes.c_int * count)()
            library.omp_get_place_proc_ids(place, found)
            cores.update(found)
    return cores


def unbind_thread() -> None:
    """Let this thread, and those that it starts, run on all usable cores. Raises `OSError`."""
    os.sched_setaffinity(0, usable_cores())


def describe_threads(config: EngineConfig) -> str:
    """How many threads of a rank compute, and why."""
    count, cores = num_threads(config), Machine.detect().num_cores
    reason = f"this process may use {cores} core{'s' * (cores > 1)}"
    if config.num_threads:
        reason = f"num_threads is {config.num_threads}, and {reason}"
    elif config.tensor_parallel_size > 1:
        reason += f", and {config.tensor_parallel_size} ranks share them"
    return f"{count} thread{'s' * (count > 1)} compute{'s' * (count == 1)}: {reason}"


def _loaded(name: str) -> Iterator[ctypes.CDLL]:
    """Libraries of this process whose file names begin with `name`."""
    paths = {line.split(maxsplit=5)[-1].strip() for line in Path("/proc/self/maps").read_text().splitlines()}
    for path in sorted(paths):
        if Path(path).name.startswith(name):
            yield ctypes.CDLL(path)


def binding_variables() -> list[str]:
    """Variables of this process that bind the engine's threads to cores, with their values."""
    if os.environ.get("OMP_PROC_BIND", "").lower() == "false":  # it overrides the others
        return []
    return [f"{name}={os.environ[name]}" for name in _BINDING if os.environ.get(name)]


def check_resources(config: EngineConfig, machine: Machine, *, reserved_bytes: int = 0) -> list[str]:
    """A line for each setting that exceeds the machine: name, value, bound, reason.

    A ceiling may exceed what is available now: it is taken as needed, and the replica that has the memory may be about
    to stop. A floor may not. Defaults shrink to what is available.

    Args:
        reserved_bytes: memory for weights and steps of each rank, if known.
    """
    problems: list[str] = []
    defaults = {field.name: field.default for field in fields(config)}

    def at_most(name: str, most: int, why: str) -> None:
        value = getattr(config, name)
        if value != defaults[name] and value > most:
            problems.append(f"{name} is {value}; it must be at most {max(most, 0)}: {why}")

    ranks = config.tensor_parallel_size
    why = f"{machine}" if ranks == 1 else f"{machine}, and {ranks} ranks share them"
    most_bytes = machine.memory_bytes // ranks
    if config.device == "cpu" or (config.device == "auto" and not machine.has_gpu):
        taken = f"; weights and steps take {_gib(reserved_bytes)}" if reserved_bytes else ""
        at_most("kv_memory_bytes", most_bytes - reserved_bytes, why + taken)
        at_most("kv_memory_floor_bytes", machine.available_bytes // ranks, why)
        cores = f"this process may use {machine.num_cores} cores, and further threads would wait"
        at_most("num_threads", machine.num_cores, cores)
    at_most("swap_bytes", most_bytes, why)
    at_most("max_num_seqs", MOST_SEQS, "every step visits each running sequence")
    at_most("max_num_batched_tokens", MOST_STEP_TOKENS, "a step would take too long")
    return problems


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, used) in bytes of each control group that limits this process's memory. Inactive page cache does not
    count as used (nor does it in `kubectl top`)."""
    for folder, unified in _groups(root, "memory"):
        limit_name, used_name, cache_name = (
            ("memory.max", "memory.current", "inactive_file")
            if unified
            else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        )
        limit, used = _number(folder / limit_name), _number(folder / used_name)
        if limit is None or used is None:
            continue
        try:
            cached = _fields((folder / "memory.stat").read_text()).get(cache_name, 0)
        except OSError:
            cached = 0
        yield limit, max(0, used - cached)


def _quotas(root: Path) -> Iterator[int]:
    """Cores that each control group with a quota allows, rounded up."""
    for folder, unified in _groups(root, "cpu"):
        if unified:
            quota, period = _words(folder / "cpu.max", 2)
        else:
            [quota], [period] = _words(folder / "cpu.cfs_quota_us", 1), _words(folder / "cpu.cfs_period_us", 1)
        if quota.isdigit() and period.isdigit() and int(period):  # "max" or -1: none
            yield max(1, -(-int(quota) // int(period)))


def _groups(root: Path, controller: str) -> Iterator[tuple[Path, bool]]:
    """(folder, whether of version 2) of the visible control groups above this process. In a container the topmost is
    the container's own, whatever its name in /proc."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    mounts = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = mounts / controllers if controllers else mounts
        if controllers and not top.is_dir():
            top = mounts / controller  # "cpu" may be mounted together with "cpuacct", under either name
        names = [name for name in path.split("/") if name not in ("", "..")]
        for depth in range(len(names), -1, -1):
            folder = top.joinpath(*names[:depth])
            if folder.is_dir():
                yield folder, not controllers


def _number(path: Path) -> int | None:
    [word] = _words(path, 1)
    return int(word) if word.isdigit() else None


def _words(path: Path, count: int) -> list[str]:
    """The file's first words, empty where there are none."""
    try:
        words = path.read_text().split()
    except OSError:
        words = []
    return (words + [""] * count)[:count]


def _fields(text: str) -> dict[str, int]:
    """First word → second of the lines where that is a number."""
    lines = map(str.split, text.splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
