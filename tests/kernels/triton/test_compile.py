"""Triton kernels of production shapes, compiled for an H100 without one: registers, spills, shared memory, accesses.

`python -m tests.kernels.triton.test_compile i n` compiles every n-th shape from the i-th, and prints a line of JSON for
each. It calls the functions that launch the kernels, with caches in production layouts and a driver without a device:
Triton specialises and compiles as for a launch, and the launch does nothing. That takes a separate process, because
`tests/conftest.py` sets the interpreter for the one that runs the tests.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from folio.kernels import CacheScales, HeadNorm, Masking, RotaryWrite, VarlenBatch
from folio.kernels.experts import stacked
from folio.kernels.provider import AttentionCall, CacheWrite
from folio.kernels.quantised import Bits, QuantisedWeight
from folio.vmem.backends.host import HostBackend
from folio.vmem.layout import LayerSpec, LayoutKind, plan_layout
from tests.kernels.quantised_weights import random_weight
from tests.kernels.triton.no_device import use_no_device

SHARED_BYTES = 227 * 1024  # the most per program on an H100
REGISTERS = 255  # the most per thread
NUM_PROCESSORS = 132
PROCESSOR_REGISTERS, PROCESSOR_BYTES, PROGRAM_BYTES = 65536, 228 * 1024, 1024  # the last: taken beside a program's own
PAGE_BYTES = 2 << 20
THREADS = 128  # of a program of the write kernel
NUM_SEQS, NUM_BLOCKS, NUM_EXPERTS = 3, 8, 128
VOCAB_SIZE = 128_256
NUM_PARTS, NUM_PROCESSES, TIMEOUT_S = 6, 2, 600
ROOT = Path(__file__).parents[3]
PTXAS = "backends/nvidia/bin/ptxas"  # in Triton's package


@dataclass(frozen=True)
class Model:
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    dim: int
    masking: Masking
    max_tokens: int


LLAMA = Model(32, 32, 8, 128, Masking(128**-0.5), 131072)  # 3.1 8B: a region's stride does not fit 32 bits
QWEN = Model(24, 14, 2, 64, Masking(64**-0.5), 32768)  # 2.5 0.5B
QWEN_MOE = Model(48, 32, 4, 64, Masking(128**-0.5), 32768)  # 3 30B-A3B; heads of half the size: inputs of experts
GEMMA = Model(21, 16, 8, 256, Masking(1 / 16, window_left=4095, softcap=50.0), 8192)  # 2 9B, layers with a window


@dataclass(frozen=True)
class Shape:
    """A call of "write", "copy", "decode", "prefill", "rotary", "norm", "gate", "product", "codes", "experts", "rows",
    "round", "eight bits", "choose", "penalise" or "replace".

    Attributes:
        block_tokens: of the block-table view, 0 for as many as `plan_layout` chooses; None is the region view.
        num_queries: of the longest sequence, or the rows of a product, or of an expert on average.
        normed: heads are normed before their rotation, or the residual is added before a norm.
        offset: elements by which the caches' addresses are shifted.
        dependent: programmatic dependent launch.
        tuning: of the decode kernel.
        programs: the least that a processor must hold at once.
        bits: of a quantised weight.
        form: of `random_weight`; "floats": codes are floats; "experts": of a product in 8 bits.
    """

    call: str
    model: Model
    block_tokens: int | None = None
    dtype: torch.dtype = torch.bfloat16
    cache_dtype: torch.dtype = torch.bfloat16
    kind: LayoutKind = "interleaved"
    num_queries: int = 512
    num_splits: int = 1
    offset: int = 0
    normed: bool = False
    dependent: bool = False
    tuning: str = "five programs"
    programs: int = 1
    bits: Bits = 4
    form: str = ""

    def __str__(self) -> str:
        view = "region" if self.block_tokens is None else f"{self.kind} blocks {self.block_tokens or 'planned'}"
        work = (
            f"{self.num_queries} queries"
            if self.call in ("prefill", "product", "codes", "experts", "eight bits")
            else f"{self.num_splits} splits"
        )
        work += f", {self.tuning}" if self.call == "decode" else f", {self.bits} bits {self.form}" if self.form else ""
        work = f"{work}{', dependent' if self.dependent else ''}"
        dtypes = f"{self.dtype} {self.cache_dtype}".replace("torch.", "")
        return f"{self.call} {self.model.num_q_heads}/{self.model.num_kv_heads}/{self.model.dim} {view} {work} {dtypes}"


BF16, FP8, F32 = torch.bfloat16, torch.float8_e4m3fn, torch.float32
MISALIGNED = Shape("decode", QWEN, offset=1)
# In the layout that servers have, the first of each pair in blocks and the second in a region.
DECODES = tuple(
    Shape("decode", model, block, cache_dtype=dtype, kind="sliced", num_splits=8, tuning=tuning, programs=programs)
    for model, dtype, tuning, programs in (
        (LLAMA, BF16, "five programs", 5),
        (LLAMA, BF16, "narrow tiles", 6),
        (LLAMA, FP8, "five programs", 3),
        (LLAMA, FP8, "narrow tiles", 4),
        (QWEN, BF16, "five programs", 5),
        (QWEN, BF16, "narrow tiles", 6),
    )
    for block in (0, None)
)
# Rows of a product, the least programs that a processor holds, and the weight.
FORMS: tuple[tuple[int, int, Bits, str], ...] = (
    *((rows, programs, 4, "scales") for rows, programs in ((1, 12), (16, 7), (64, 4), (256, 3))),
    *((rows, programs, 4, "nested offsets") for rows, programs in ((1, 8), (16, 7), (256, 3))),
    *((rows, programs, 4, "offsets") for rows, programs in ((1, 8), (16, 6))),
    (1, 8, 4, "table"),
    (16, 6, 4, "wide groups"),
    (1, 8, 2, "nested offsets"),
    (16, 5, 3, "nested"),
    (64, 3, 5, "nested offsets"),
    (1, 8, 6, "nested"),
    (1, 8, 8, "scales"),
    (256, 3, 8, "scales"),
    (1, 8, 8, "floats"),
    (16, 5, 8, "floats"),
)
CODES = tuple(
    Shape("codes", LLAMA, num_queries=rows, programs=programs, bits=bits, form=form)
    for rows, programs, bits, form in FORMS
)
EXPERT_FORMS: tuple[tuple[int, int, Bits, str], ...] = (
    *((rows, programs, 4, "table") for rows, programs in ((1, 8), (16, 5), (64, 2), (256, 1))),
    *((rows, programs, 4, "nested offsets") for rows, programs in ((1, 8), (16, 5))),
    *((rows, programs, 8, "floats") for rows, programs in ((1, 8), (16, 4), (256, 2))),
)
EXPERTS = tuple(
    Shape("experts", QWEN_MOE, num_queries=rows, programs=programs, bits=bits, form=form)
    for rows, programs, bits, form in EXPERT_FORMS
)
# With one scale of an output in int8, and one of each slab in float8. The small model's tiles have 32 outputs, of which
# a warp group's instructions would need 64.
INT8 = torch.int8
EIGHT_BITS = tuple(
    Shape("eight bits", model, num_queries=rows, programs=programs, bits=8, cache_dtype=dtype)
    for model, rows, programs in ((LLAMA, 17, 3), (LLAMA, 64, 2), (LLAMA, 256, 1), (QWEN, 17, 5), (QWEN, 256, 2))
    for dtype in (INT8, FP8)
)
EIGHT_BIT_EXPERTS = tuple(
    Shape("eight bits", QWEN_MOE, num_queries=rows, programs=programs, bits=8, cache_dtype=FP8, form="experts")
    for rows, programs in ((17, 3), (256, 1))
)
SHAPES = (
    Shape("write", LLAMA),
    Shape("write", LLAMA, cache_dtype=FP8),
    Shape("write", QWEN, 0),
    Shape("copy", LLAMA, 16),
    Shape("rotary", LLAMA),
    Shape("rotary", LLAMA, 16, normed=True),
    Shape("rotary", LLAMA, cache_dtype=FP8, normed=True),
    Shape("rotary", QWEN, 0),
    Shape("rotary", GEMMA, dtype=F32, cache_dtype=F32, normed=True),
    Shape("norm", LLAMA),
    Shape("norm", LLAMA, normed=True),
    Shape("norm", QWEN, dtype=F32, normed=True),
    Shape("gate", LLAMA),
    Shape("gate", GEMMA),
    Shape("product", LLAMA, num_queries=1),
    Shape("product", LLAMA, num_queries=16),
    Shape("product", LLAMA, num_queries=64),
    Shape("product", QWEN, num_queries=16),
    Shape("product", LLAMA, num_queries=16, dependent=True),
    *CODES,
    *EXPERTS,
    Shape("round", LLAMA, cache_dtype=INT8),
    Shape("round", LLAMA, cache_dtype=FP8),
    *EIGHT_BITS,
    *EIGHT_BIT_EXPERTS,
    Shape("rows", LLAMA, bits=6, form="nested"),
    Shape("rotary", LLAMA, 16, normed=True, dependent=True),
    Shape("norm", LLAMA, normed=True, dependent=True),
    Shape("gate", LLAMA, dependent=True),
    Shape("decode", LLAMA, 16, num_splits=8),
    Shape("decode", LLAMA, 0, kind="per_layer"),
    Shape("decode", QWEN),
    Shape("decode", GEMMA, num_splits=8),
    Shape("decode", GEMMA, 16),
    Shape("decode", LLAMA, 16, cache_dtype=FP8),
    Shape("decode", LLAMA, 16, dtype=F32, cache_dtype=F32, num_splits=8),
    *DECODES,
    Shape("prefill", LLAMA),
    Shape("prefill", LLAMA, 16),
    Shape("prefill", LLAMA, 64),
    Shape("prefill", LLAMA, num_queries=16),
    Shape("prefill", LLAMA, 16, num_queries=4),
    Shape("prefill", QWEN),
    Shape("prefill", QWEN, 0, num_queries=2),
    Shape("prefill", GEMMA),
    Shape("prefill", GEMMA, 16),
    Shape("prefill", GEMMA, 16, num_queries=8),
    Shape("prefill", LLAMA, cache_dtype=FP8),
    Shape("prefill", LLAMA, 16, dtype=F32, cache_dtype=F32),
    Shape("prefill", GEMMA, dtype=F32, cache_dtype=F32),
    Shape("choose", LLAMA),
    Shape("choose", LLAMA, dtype=F32),
    Shape("penalise", LLAMA, dtype=F32),
    Shape("replace", LLAMA, dtype=F32),
    MISALIGNED,
)


@dataclass
class Compiled:
    """Compilation result: registers and spilled bytes per thread, shared bytes and warps per program, the number of
    accesses of each width in bytes, of products fused with sums, and of accesses before the wait for the kernel
    before, `None` without a wait; and tensor cores' instructions."""

    registers: int
    spilled: int
    shared: int
    warps: int
    copies: dict[int, int]  # from global to shared memory, past the registers
    loads: dict[int, int]
    stores: dict[int, int]
    num_fused: int
    early: int | None
    tensor_cores: list[str]


def programs_at_once(registers: int, shared: int, warps: int) -> int:
    """Programs that a processor holds at once; a thread's registers are given by eight."""
    by_registers = PROCESSOR_REGISTERS // (-(-registers // 8) * 8 * 32 * warps)
    return min(by_registers, PROCESSOR_BYTES // (shared + PROGRAM_BYTES), 64 // warps)


@pytest.mark.processes
@pytest.mark.daily(1)
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_production_shapes_use_the_gpu_well(part: int, tmp_path: Path) -> None:
    """The interpreter does not show spills, reads of less than 16 bytes per thread, or too much shared memory."""
    triton = importlib.util.find_spec("triton")
    if triton is None or triton.origin is None or not (Path(triton.origin).parent / PTXAS).exists():
        pytest.skip("the installed Triton has no ptxas")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    shapes = sorted({*range(part, len(SHAPES), NUM_PARTS), SHAPES.index(MISALIGNED)})
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.kernels.triton.test_compile", *map(str, shapes[i::NUM_PROCESSES])],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(NUM_PROCESSES)
    ]
    try:
        outputs = [process.communicate(timeout=TIMEOUT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors
    found: dict[int, Compiled] = {}
    for line in "".join(output for output, _ in outputs).splitlines():
        index, fields = json.loads(line)
        widths = {name: {int(k): v for k, v in fields[name].items()} for name in ("copies", "loads", "stores")}
        found[index] = Compiled(**(fields | widths))
    complaints = {SHAPES[i]: list(_complaints(SHAPES[i], found[i])) for i in shapes}
    narrow = complaints.pop(MISALIGNED)
    table = "\n".join(f"{SHAPES[i]}: {found[i]} {complaints.get(SHAPES[i]) or ''}" for i in shapes)
    assert narrow, f"loads from a misaligned cache count as wide\n{table}"
    assert not any(complaints.values()), f"\n{table}"


def _complaints(shape: Shape, compiled: Compiled) -> list[str]:
    """Violated bounds of a kernel of that shape."""
    wrong = []
    if compiled.spilled:
        wrong.append(f"spills {compiled.spilled} bytes")
    if compiled.shared > SHARED_BYTES:
        wrong.append(f"{compiled.shared} bytes of shared memory, the most is {SHARED_BYTES}")
    if compiled.registers > REGISTERS:
        wrong.append(f"{compiled.registers} registers")
    if compiled.early != (0 if shape.dependent else None):
        wrong.append(f"{compiled.early} accesses before it waits for the kernel before")
    programs = programs_at_once(compiled.registers, compiled.shared, compiled.warps)
    if programs < shape.programs:
        wrong.append(f"a processor holds {programs} programs, not {shape.programs}")
    if shape.call == "write":  # a program writes one token's heads
        row_bytes = shape.model.num_kv_heads * shape.model.dim * shape.cache_dtype.itemsize
        if min(compiled.stores) < min(16, row_bytes // THREADS):
            wrong.append(f"stores rows of {row_bytes} bytes by {min(compiled.stores)}")
    elif shape.call == "rotary":  # a program stores half of one token's keys at a time
        half_bytes = shape.model.num_kv_heads * shape.model.dim * shape.cache_dtype.itemsize // 2
        if min(compiled.stores) < min(4, half_bytes // THREADS) or max(compiled.loads) < 8:
            wrong.append(f"loads heads by {sorted(compiled.loads)} bytes, and stores them by {sorted(compiled.stores)}")
    elif shape.call in ("norm", "gate"):
        if {*compiled.loads, *compiled.stores} != {16}:
            wrong.append(f"loads by {sorted(compiled.loads)} bytes, and stores by {sorted(compiled.stores)}")
    elif shape.call == "product":
        # A program's results, by warps of 32 threads, are 8 or 16 bytes of outputs in each thread.
        if set(compiled.copies) != {16} or min(compiled.stores) < 8:
            wrong.append(f"copies by {sorted(compiled.copies)} bytes, and stores by {sorted(compiled.stores)}")
        if compiled.shared * 2 > SHARED_BYTES and shape.num_queries <= 16:
            wrong.append(f"{compiled.shared} bytes of shared memory leave no room for a second program")
    elif shape.call in ("codes", "experts", "rows"):
        if 16 not in {*compiled.copies, *compiled.loads}:
            wrong.append(f"copies codes by {sorted(compiled.copies)} bytes, and loads them by {sorted(compiled.loads)}")
    elif shape.call == "eight bits":
        name = "s8.s8" if shape.cache_dtype == INT8 else "e4m3.e4m3"
        if shape.model is not QWEN and not all(
            "wgmma" in n and n.endswith(name) for n in compiled.tensor_cores or [""]
        ):
            wrong.append(f"multiplies by {compiled.tensor_cores}")
        if compiled.copies.get(16, 0) < 4 or min(compiled.copies) < 4:
            wrong.append(f"copies by {sorted(compiled.copies)} bytes")
    elif shape.call == "round":
        if max(compiled.stores) < 2:
            wrong.append(f"stores by {sorted(compiled.stores)} bytes")
    elif shape.call == "copy":
        if compiled.loads.get(16, 0) < 4 or set(compiled.stores) != {16}:
            wrong.append("does not copy by 16 bytes")
    elif shape.call == "penalise":
        if compiled.num_fused:
            wrong.append(f"fuses {compiled.num_fused} products with sums, which CPUs round alone")
    elif shape.call == "replace":
        if set(compiled.stores) != {8}:
            wrong.append(f"stores entries of 8 bytes by {sorted(compiled.stores)}")
    elif shape.call == "choose":  # 4,096 logits by 512 threads
        if compiled.loads.get(16, 0) < 5:
            wrong.append(f"reads logits by {dict(compiled.loads)} bytes")
    else:
        # As the second factor of a product of few rows, 8-bit values are copied to shared memory by 8 bytes.
        least = 8 if shape.call == "decode" and shape.cache_dtype == FP8 else 16
        if sum(compiled.copies.values()) < 2 or 16 not in compiled.copies or min(compiled.copies) < least:
            wrong.append(f"reads the cache by {sorted(compiled.copies)} bytes")
        if min(compiled.loads) < 4:
            wrong.append(f"loads {min(compiled.loads)} bytes a thread")
    return wrong


# --- in a process without the interpreter ---------------------------------------------------------------------------


def compile_shapes(indexes: Iterable[int]) -> None:
    """Print the index in `SHAPES` and the `Compiled` of each of these shapes."""
    import triton

    use_no_device()
    triton.knobs.nvidia.dump_ptxas_log = True
    kernels: list[tuple[dict[str, Any], dict[str, str]]] = []

    def note(
        *, src: Any, metadata: dict[str, Any], metadata_group: dict[str, str], times: Any, cache_hit: bool
    ) -> None:
        kernels.append((metadata, metadata_group))

    triton.knobs.compilation.listener = note
    for i in indexes:
        kernels.clear()
        log = io.StringIO()
        with contextlib.redirect_stdout(log):
            _call(SHAPES[i])
        (metadata, files), *_ = kernels  # "replace" is followed by "penalise"
        [ptx] = (Path(path).read_text() for name, path in files.items() if name.endswith(".ptx"))
        compiled = Compiled(
            registers=int(re.findall(r"Used (\d+) registers", log.getvalue())[0]),
            spilled=sum(map(int, re.findall(r"(\d+) bytes spill", log.getvalue()))),
            shared=metadata["shared"],
            warps=metadata["num_warps"],
            copies=_copies(ptx),
            loads=_accesses(ptx, "ld"),
            stores=_accesses(ptx, "st"),
            num_fused=len(re.findall(r"\bfma\.rn\.f32", ptx)),
            early=_early(ptx),
            tensor_cores=sorted(set(re.findall(r"\b(?:wgmma\.mma_async|mma)\.sync[\w.]*", ptx))),
        )
        print(json.dumps((i, vars(compiled))), flush=True)


def _copies(ptx: str) -> dict[int, int]:
    sizes = re.findall(r"cp\.async\.c[ag]\.shared\.global\S* *\[[^]]*\], *\[[^]]*\], *(\w+)", ptx)
    return Counter(int(size, 0) for size in sizes)


def _early(ptx: str) -> int | None:
    before, wait, _ = ptx.partition("griddepcontrol.wait")
    return len(re.findall(r"\b(?:ld|st|red|atom)\.global|cp\.async\.c[ag]", before)) if wait else None


def _accesses(ptx: str, operation: str) -> dict[int, int]:
    """Of instructions such as `ld.global.L1::evict_last.v4.b32`."""
    widths: Counter[int] = Counter()
    for modifiers in re.findall(rf"\b{operation}\.global((?:\.[\w:]+)+)", ptx):
        vector, element = re.search(r"\.v(\d)", modifiers), re.search(r"\.[bfus](\d+)$", modifiers)
        assert element is not None, modifiers
        widths[(int(vector[1]) if vector else 1) * int(element[1]) // 8] += 1
    return widths


def _call_eight_bits(shape: Shape) -> None:
    from folio.kernels.triton.code_tiles import EIGHT_BIT_TILES, choose_expert_tile, choose_tile
    from folio.kernels.triton.codes import TritonCodes
    from folio.kernels.triton.eight_bits import EightBitProduct, RoundedRows

    inputs, rows = shape.model.num_q_heads * shape.model.dim, shape.num_queries
    if shape.call == "round":
        EightBitProduct().round(torch.empty(rows, inputs, dtype=shape.dtype), shape.cache_dtype)
        return
    outputs = 4 * inputs if shape.model is LLAMA else inputs
    tile = choose_tile(rows, outputs, NUM_PROCESSORS, EIGHT_BIT_TILES)
    weight = _floats(outputs, inputs)
    if shape.cache_dtype == INT8:
        codes, one = torch.zeros(outputs, inputs, dtype=torch.uint8), torch.ones(outputs, 1).half()
        weight = QuantisedWeight(codes, 8, inputs, one, zero=128)
    packed = TritonCodes(torch.device("cpu")).pack_quantised(weight, shape.dtype)
    ends: torch.Tensor | None = None
    if shape.form == "experts":
        packed, ends = stacked([packed] * NUM_EXPERTS), torch.zeros(NUM_EXPERTS, dtype=torch.int64)
        rows *= NUM_EXPERTS
        tile = choose_expert_tile(rows, NUM_EXPERTS, outputs, NUM_PROCESSORS, EIGHT_BIT_TILES)
    slabs, all_rows = inputs // 128, -(-rows // 128) * 128
    x = RoundedRows(torch.empty(all_rows, slabs, 128, dtype=shape.cache_dtype), torch.empty(slabs, all_rows), rows)
    EightBitProduct(tile)(x, packed.parts[0], None, torch.empty(rows, outputs, dtype=shape.dtype), ends)


def _call_codes(shape: Shape) -> None:
    from folio.kernels.triton.code_tiles import choose_expert_tile, choose_tile
    from folio.kernels.triton.codes import TritonCodes

    rows, size = shape.num_queries, shape.model.num_q_heads * shape.model.dim  # of outputs of attention
    if shape.call == "experts":
        rows *= NUM_EXPERTS if rows > 1 else 1
        tile = choose_expert_tile(rows, NUM_EXPERTS, size, NUM_PROCESSORS)
    else:
        tile = choose_tile(rows, size, NUM_PROCESSORS)
    linear, x = TritonCodes(torch.device("cpu"), tile), torch.empty(rows, size, dtype=shape.dtype)
    floats = shape.form == "floats"
    weight = _floats(size, size) if floats else random_weight(shape.bits, shape.form, size, size)
    packed = linear.pack_quantised(replace(weight, order=None), shape.dtype)
    if shape.call == "rows":
        linear.rows(packed, torch.zeros(NUM_SEQS, dtype=torch.int64))
    elif shape.call == "experts":
        linear.by_expert(x, stacked([packed] * NUM_EXPERTS), torch.zeros(NUM_EXPERTS, dtype=torch.int64))
    else:
        linear(x, packed)


def _floats(outputs: int, inputs: int) -> QuantisedWeight:
    scales = torch.ones(outputs, inputs // 128).half()
    return QuantisedWeight(torch.zeros(outputs, inputs).to(FP8), 8, 128, scales)


def _call(shape: Shape) -> None:
    from folio.kernels.triton.cache import copy_blocks, prepare_write
    from folio.kernels.triton.decode import TUNINGS, SplitDecode
    from folio.kernels.triton.elementwise import TritonElementwise
    from folio.kernels.triton.penalties import penalise
    from folio.kernels.triton.prefill import prepare_prefill
    from folio.kernels.triton.product import TritonProduct, choose_tile
    from folio.kernels.triton.sampling import choose

    if shape.call in ("penalise", "replace"):
        rows, logits = torch.zeros(2, dtype=torch.int64), torch.empty(2, VOCAB_SIZE)
        changed = rows if shape.call == "replace" else rows[:0]
        penalise(logits, 1, rows, rows, rows.int(), torch.zeros(2, 3), changed, changed)
        return
    if shape.call == "choose":
        integers, numbers = torch.zeros(2, dtype=torch.int64), torch.zeros(2)
        logits = torch.empty(2, VOCAB_SIZE, dtype=shape.dtype)
        choose(logits, integers, integers, numbers.double(), numbers, numbers, integers.int())
        return
    model = shape.model
    ops = TritonElementwise(dependent=shape.dependent)
    if shape.call == "product":  # of queries, keys and values
        num_outputs, num_inputs = (
            (model.num_q_heads + 2 * model.num_kv_heads) * model.dim,
            model.num_q_heads * model.dim,
        )
        x, weight = (torch.empty(rows, num_inputs, dtype=shape.dtype) for rows in (shape.num_queries, num_outputs))
        tile = choose_tile(num_outputs, NUM_PROCESSORS)
        TritonProduct(dependent=shape.dependent, tile=tile)(x, weight, x[0, :1].expand(num_outputs).contiguous())
        return
    if shape.call in ("codes", "experts", "rows"):
        _call_codes(shape)
        return
    if shape.call in ("round", "eight bits"):
        _call_eight_bits(shape)
        return
    if shape.call in ("norm", "gate"):
        x = torch.empty(NUM_SEQS, 2 * model.num_q_heads * model.dim, dtype=shape.dtype)
        if shape.call == "gate":
            ops.gate(x, "silu" if model is LLAMA else "gelu_tanh")
        elif shape.normed:
            ops.add_rms_norm(x, x, x[0], 1e-5)
        else:
            ops.rms_norm_add(x, x, x[0], 1e-5)
        return
    heads, dim = model.num_kv_heads, model.dim
    layout = plan_layout(
        [LayerSpec(heads, dim, dim)] * model.num_layers,
        shape.cache_dtype,
        granularity_bytes=PAGE_BYTES,
        kind=shape.kind,
        block_tokens=shape.block_tokens or None,
    )
    run_tokens, num_runs = layout.block_tokens, NUM_BLOCKS
    if shape.block_tokens is None:
        run_tokens, num_runs = layout.num_blocks(model.max_tokens) * layout.block_tokens, NUM_SEQS
    backend = HostBackend(PAGE_BYTES)  # addresses without memory: nothing is touched
    memory = [
        backend.tensor(backend.reserve(num_runs * run_tokens * layout.token_bytes)) for _ in range(layout.num_slices)
    ]
    if shape.call == "copy":
        words = memory[0].view(torch.int64).view(num_runs, -1)
        rows = torch.zeros(2, dtype=torch.int64)
        copy_blocks(words, words, rows, rows)
        return
    key, value = (
        cache.as_strided(cache.shape, cache.stride(), cache.storage_offset() + shape.offset)
        for cache in layout.view(memory, model.num_layers // 2, run_tokens)
    )
    scales = CacheScales(torch.ones(heads), torch.ones(heads)) if shape.cache_dtype == FP8 else None
    num_queries = 1 if shape.call == "decode" else shape.num_queries
    num_tokens = NUM_SEQS * num_queries
    if shape.call == "write":
        new = torch.empty(2, num_tokens, heads, dim, dtype=shape.dtype)
        places = torch.zeros(num_tokens, dtype=torch.int64)
        prepare_write(CacheWrite(new[0], new[1], key, value, places, scales))(new[0], new[1], key, value)
        return
    if shape.call == "rotary":
        new = torch.empty(num_tokens, model.num_q_heads + 2 * heads, dim, dtype=shape.dtype)
        tables, places = torch.empty(num_tokens, dim, dtype=shape.dtype), torch.zeros(num_tokens, dtype=torch.int64)
        norm = HeadNorm(torch.empty(dim, dtype=shape.dtype), 1e-5) if shape.normed else None
        rotary = RotaryWrite(new, tables, tables, dim, key, value, places, norm, norm, scales)
        weights = () if norm is None else (norm.weight, norm.weight)
        ops.prepare_rotary_write(rotary)(new, key, value, *weights)
        return
    query = torch.empty(num_tokens, model.num_q_heads, dim, dtype=shape.dtype)
    width = 1 if shape.block_tokens is None else NUM_BLOCKS
    batch = VarlenBatch(
        torch.arange(NUM_SEQS + 1, dtype=torch.int32) * num_queries,
        torch.full((NUM_SEQS,), run_tokens, dtype=torch.int32),
        torch.zeros(NUM_SEQS, width, dtype=torch.int32),
        num_queries,
        width * run_tokens,
    )
    call = AttentionCall(query, key, value, batch, model.masking, scales, num_splits=shape.num_splits)
    out = torch.empty_like(query)
    decode = SplitDecode(TUNINGS[shape.tuning])
    attend = decode.prepare(call) if shape.call == "decode" else prepare_prefill(call, skip_single=True)
    attend(query, key, value, out)


if __name__ == "__main__":
    compile_shapes(map(int, sys.argv[1:]))
