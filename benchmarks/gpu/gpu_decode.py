"""Tunings of the decode kernel, compared: `python -m benchmarks.gpu_decode` on a device, in turn.

Layouts are those of servers on CUDA, in blocks and in regions, and a measurement reads more than the L2 cache holds.
Each fact has the microseconds of a call and the bytes of cached keys and values a second. The tunings are
`folio.kernels.triton.decode.TUNINGS`; the first is the default.

--compile prints registers, spills, shared memory and the programs that a processor holds at once, as Triton's compiler
gives them for an H100. It needs no device. --fake runs everything small in Triton's interpreter, and measures nothing.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.engine.device_time import compare
from benchmarks.facts import record
from benchmarks.gpu.parts import Parts, arguments
from folio.kernels import CacheScales, Masking, VarlenBatch
from folio.kernels.provider import FP8_DTYPES, AttentionCall
from folio.vmem.layout import KVLayout, LayerSpec, plan_layout

if TYPE_CHECKING:
    from folio.kernels.triton.tiles import AttendInto

GRANULE_BYTES = 2 << 20
READ_BYTES = 512 << 20  # of one measurement, at least: many times an L2 cache
MOST_TOKENS = 131_072  # bounds the grid, as the longest context of a captured decode does
BUDGET_S = 50.0  # after which no further case is begun
BF16, FP8 = torch.bfloat16, FP8_DTYPES[0]


@dataclass(frozen=True)
class Model:
    name: str
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    dim: int


LLAMA, QWEN, TINY = (
    Model("llama-3-8b", 32, 32, 8, 128),
    Model("qwen2.5-0.5b", 24, 14, 2, 64),
    Model("tiny", 4, 2, 1, 16),
)


@dataclass(frozen=True)
class Case:
    model: Model
    batch: int
    length: int
    cache_dtype: torch.dtype = BF16
    region: bool = True

    def __str__(self) -> str:
        dtype, view = str(self.cache_dtype).removeprefix("torch."), "region" if self.region else "blocks"
        return f"decode {self.model.name} {self.batch} x {self.length} {dtype} {view}"

    @property
    def num_bytes(self) -> int:
        """Keys and values that one call reads."""
        return 2 * self.batch * self.length * self.model.num_kv_heads * self.model.dim * self.cache_dtype.itemsize

    @property
    def layout(self) -> KVLayout:
        model = self.model
        layers = [LayerSpec(model.num_kv_heads, model.dim, model.dim)] * model.num_layers
        return plan_layout(
            layers, self.cache_dtype, granularity_bytes=GRANULE_BYTES, kind="sliced", shares_handles=not self.region
        )


# Cases that decide most come first, in case time runs out.
CASES = tuple(
    Case(model, batch, length, dtype, region)
    for dtype, region in ((BF16, True), (BF16, False), (FP8, True), (FP8, False))
    for model, batch, length in (
        *((LLAMA, batch, 1024) for batch in (1, 16, 64, 256)),
        (LLAMA, 8, 4096),
        (LLAMA, 32, 4096),
        (LLAMA, 1, 32768),
        *((QWEN, batch, 1024) for batch in (1, 64, 256)),
    )
)
FAKE_CASES = Case(TINY, 1, 70), Case(TINY, 2, 20, FP8, region=False)


def calls(case: Case, device: torch.device, memory: torch.Tensor, read_bytes: int) -> Iterator[AttentionCall]:
    """Calls over different keys and values: the layers of one slice, for several groups of sequences.

    Args:
        memory: uint8, of `memory_bytes` at least.
    """
    layout, model, batch = case.layout, case.model, case.batch
    num_layers = sum(row.slice == 0 for row in layout.keys)
    run_blocks = layout.num_blocks(case.length)
    run_tokens = run_blocks * layout.block_tokens if case.region else layout.block_tokens
    columns = 1 if case.region else run_blocks
    groups = num_groups(case, read_bytes)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randperm(groups * batch * columns, generator=generator).view(groups, batch, columns).int().to(device)
    query = torch.randn(batch, model.num_q_heads, model.dim, dtype=BF16, device=device)
    lengths = torch.full((batch,), case.length, dtype=torch.int32, device=device)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=device)
    ones = torch.ones(model.num_kv_heads, device=device)
    scales = CacheScales(ones, ones) if case.cache_dtype == FP8 else None
    used = memory[: groups * batch * run_blocks * layout.page_bytes]
    for layer in range(num_layers):
        key, value = layout.view([used] * layout.num_slices, layer, run_tokens)
        for table in rows:
            attended = VarlenBatch(starts, lengths, table.contiguous(), 1, MOST_TOKENS)
            yield AttentionCall(query, key, value, attended, Masking(model.dim**-0.5), scales)


def num_groups(case: Case, read_bytes: int) -> int:
    """Groups of `batch` sequences, so that all calls together read `read_bytes`."""
    num_layers = sum(row.slice == 0 for row in case.layout.keys)
    return max(1, -(-read_bytes // (num_layers * case.num_bytes)))


def memory_bytes(case: Case, read_bytes: int) -> int:
    layout = case.layout
    return num_groups(case, read_bytes) * case.batch * layout.num_blocks(case.length) * layout.page_bytes


def cases(fake: bool) -> tuple[Case, ...]:
    return FAKE_CASES if fake else CASES


def compile_all(index: int, count: int) -> None:
    """Compile the kernels of every `count`-th case from the `index`-th for an H100, into Triton's cache, and record
    what they need."""
    from folio.kernels.triton.decode import TUNINGS, SplitDecode
    from folio.vmem.backends.host import HostBackend
    from tests.kernels.triton.no_device import use_no_device

    use_no_device()
    cpu, backend, seen = torch.device("cpu"), HostBackend(GRANULE_BYTES), set[str]()
    for case in CASES[index::count]:
        memory = backend.tensor(backend.reserve(memory_bytes(case, 0)))  # addresses without memory
        call = next(calls(case, cpu, memory, 0))
        for name, tuning in TUNINGS.items():
            decode = SplitDecode(tuning)
            decode._num_processors[cpu] = 132
            decode.prepare(call)
            [kernel] = decode._kernel._compiled.values()
            if kernel.hash not in seen:
                seen.add(kernel.hash)
                # No line of gpu_day's table, which more than a hundred of them would fill.
                record(f"{name}, {case}", needs=resources(kernel))


def resources(kernel: Any) -> dict[str, int]:
    """Registers a thread, bytes of spilled registers a thread, shared bytes a program, programs a processor."""
    import triton

    from tests.kernels.triton.test_compile import programs_at_once

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None, text
    registers, shared, warps = int(found[1]), kernel.metadata.shared, kernel.metadata.num_warps
    return {
        "registers": registers,
        "spilled": int(found[2]),
        "shared": shared,
        "programs": programs_at_once(registers, shared, warps),
    }


def warm_cache(num_processes: int, limit_s: float = 30.0) -> None:
    """Compile in several processes at once, as if without a device, so that the first launches read Triton's cache."""
    argv = (sys.executable, "-m", "benchmarks.gpu_decode", "--compile")
    processes = [subprocess.Popen((*argv, f"{i}/{num_processes}")) for i in range(num_processes)]
    end = time.monotonic() + limit_s
    try:
        for process in processes:
            process.wait(max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        print("compilation is not complete: first launches will compile", flush=True)
    finally:
        for process in processes:
            process.kill()


def measure(parts: Parts, device: torch.device, fake: bool) -> None:
    from folio.kernels.triton.decode import TUNINGS, SplitDecode

    read_bytes, end = (0, math.inf) if fake else (READ_BYTES, time.monotonic() + BUDGET_S)
    memory = torch.empty(max(memory_bytes(case, read_bytes) for case in cases(fake)), dtype=torch.uint8, device=device)
    filled: torch.dtype | None = None
    skipped = []
    for case in cases(fake):
        if time.monotonic() > end:
            skipped.append(str(case))
            continue
        if case.cache_dtype != filled:
            fill(memory, case.cache_dtype)
            filled = case.cache_dtype
        attended = list(calls(case, device, memory, read_bytes))
        out = attended[0].query.new_empty(len(attended), *attended[0].query.shape)

        def work(launches: list[AttendInto], attended: list[AttentionCall], out: torch.Tensor) -> torch.Tensor:
            for launch, call, result in zip(launches, attended, out, strict=True):
                launch(call.query, call.key_cache, call.value_cache, result)
            return out

        variants = {}
        for name, tuning in TUNINGS.items():
            decode = SplitDecode(tuning)
            variants[name] = partial(work, [decode.prepare(call) for call in attended], attended, out)
        measured = partial(
            compare,
            str(case),
            variants,
            device,
            num_bytes=case.num_bytes,
            num_calls=len(attended),
            repeats=1 if fake else 5,
            least_s=0.0 if fake else 0.005,
        )
        parts.run(f"{case}, tunings", measured)
    if skipped:
        record("decode cases without time", f"{len(skipped)}: {', '.join(skipped)}", skipped=skipped)


def fill(memory: torch.Tensor, dtype: torch.dtype) -> None:
    """Normal values: any bytes would have NaN among them."""
    for part in memory.view(dtype).split(1 << 27):
        part.copy_(torch.randn(part.shape, dtype=BF16, device=memory.device))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--compile", nargs="?", const="0/1", metavar="I/N", help="every N-th case from the I-th")
    args = parser.parse_args()
    if args.compile:
        compile_all(*map(int, args.compile.split("/")))
        return
    if args.fake:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    else:
        warm_cache(min(len(CASES), len(os.sched_getaffinity(0))))
    parts = Parts(math.inf)  # a tuning that fails costs its case only
    measure(parts, torch.device("cpu" if args.fake else "cuda"), args.fake)
    parts.finish()


if __name__ == "__main__":
    main()
