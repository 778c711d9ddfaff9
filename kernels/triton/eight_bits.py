"""Products on tensor cores in 8 bits: rows are rounded to the dtype of a weight's codes, int8 or float8, with a scale
for each slab of 128 inputs (as in DeepSeek-V3 §3.3.2).

A slab of an output is 128 neighbouring bytes (`codes`), so codes go to the tensor cores as they are, and the rows are
put into their order. The sum of a slab is exact in int32; a Hopper's sum of 8-bit floats keeps about 14 bits, which do
not get fewer over the slabs, whose scaled sums are added in float32.

An H100 reads 3.35 TB/s, and multiplies 989 TFLOP/s in bfloat16, 1979 in 8 bits: reading codes of 8 bits is the bound
up to 150 rows, or 300. Few rows therefore gain nothing, and rounding them is another launch. But codes that are widened
in registers (`codes`) take 6 of the 8 instructions that the device has for each in the time of its reading, beside
those of the product, and again for each tile of 128 rows; here they take none. `benchmarks.gpu_day quantised` measures
16 and 32 rows, between which the choice is made. Groups of less than a slab would be scaled more often than is saved.
`torch._scaled_mm` needs the codes in another order: a second copy beside the one for few rows.
"""

# ruff: noqa: N803 (compile-time constants are capitals in Triton's kernels)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from folio.kernels.cpu.ops import WeightPart
from folio.kernels.triton.cache import to_fp8
from folio.kernels.triton.code_tiles import (
    EIGHT_BIT_TILES,
    CodeTile,
    choose_expert_tile,
    choose_tile,
    expert_rows,
    most_tiles,
)
from folio.kernels.triton.launch import Kernel, Launch
from folio.kernels.triton.product import num_processors

LEAST_ROWS = 17
DTYPES = (torch.int8, torch.float8_e4m3fn)
_ZEROS = {torch.int8: 128, torch.float8_e4m3fn: 0}  # codes without offsets
_SLAB, _PARTS, _LANES = tl.constexpr(128), tl.constexpr(8), tl.constexpr(16)
_ROW_MULTIPLE = tl.constexpr(128)  # of memory for rows: tiles of any size are read whole, without masks
_FP8_CAPABILITY = (8, 9)
_ROUNDED_ROWS = 8  # of a program
_ROW_TILES = 8  # that read the same outputs at the same time
_MOST_LAUNCHES = 1 << 12


@triton.jit(do_not_specialize=["num_rows"])
def _round_kernel(
    x_ptr: tl.tensor,  # [num_rows, num_inputs]
    codes_ptr: tl.tensor,  # [all rows, num_slabs, 128]
    scales_ptr: tl.tensor,  # [num_slabs, all rows] float32
    num_rows: tl.tensor,
    num_inputs: tl.tensor,
    BLOCK_ROWS: tl.constexpr,
    EMULATED: tl.constexpr,
) -> None:
    """One program per slab of `BLOCK_ROWS` rows."""
    rows, slab = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS), tl.program_id(1)
    places = tl.arange(0, _SLAB)
    inputs = (slab * _SLAB + places % _PARTS * _LANES + places // _PARTS)[None, :]
    there = (rows < num_rows)[:, None] & (inputs < num_inputs)
    x = tl.load(x_ptr + rows.to(tl.int64)[:, None] * num_inputs + inputs, mask=there, other=0.0).to(tl.float32)
    LIMIT: tl.constexpr = 127.0 if codes_ptr.dtype.element_ty == tl.int8 else 448.0  # noqa: N806
    # NaN, which a maximum may lose, and infinity make the scale NaN.
    scales = tl.div_rn(tl.max(tl.abs(x), 1), LIMIT) + tl.sum(x * 0.0, 1)
    divisors = tl.where(scales > 0, scales, 1.0)[:, None]
    if codes_ptr.dtype.element_ty == tl.int8:
        # The low byte of 1.5 · 2 ** 23 + value, rounded to nearest even.
        codes = (tl.div_rn(x, divisors) + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)
    else:
        codes = to_fp8(x, divisors, codes_ptr.dtype.element_ty, EMULATED)
    to = codes_ptr + (rows.to(tl.int64) * tl.num_programs(1) + slab)[:, None] * _SLAB + places[None, :]
    tl.store(to, codes)
    all_rows = tl.cdiv(num_rows, _ROW_MULTIPLE) * _ROW_MULTIPLE
    tl.store(scales_ptr + slab * all_rows + rows, scales)


@triton.jit(do_not_specialize=["num_rows"])
def _eight_bit_kernel(
    x_ptr: tl.tensor,  # as `_round_kernel` writes it
    x_scales_ptr: tl.tensor,
    ends_ptr: tl.tensor,  # [EXPERTS] int64: of rows; or None. All tensors of weights are by expert first
    codes_ptr: tl.tensor,  # [num_slabs, num_outputs, 128]
    scales_ptr: tl.tensor,  # [num_slabs / SLABS_A_SCALE, num_outputs] float16
    factors_ptr: tl.tensor,  # [num_outputs] float32 or None
    bias_ptr: tl.tensor,  # [num_outputs] or None; by expert with out_stride
    out_ptr: tl.tensor,  # [num_rows, num_outputs], with out_stride
    num_rows: tl.tensor,
    num_outputs: tl.tensor,
    num_slabs: tl.tensor,
    out_stride: tl.tensor,
    SLABS_A_SCALE: tl.constexpr,
    ONE_SCALE: tl.constexpr,  # for all slabs
    EXPERTS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
) -> None:
    """One program per `BLOCK_OUTPUTS` outputs of `BLOCK_ROWS` rows. Neighbours have the same outputs and other rows, so
    that these outputs are read from memory once."""
    row_tile = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
    all_rows = tl.cdiv(num_rows, _ROW_MULTIPLE) * _ROW_MULTIPLE
    rows = tl.arange(0, BLOCK_ROWS)
    if ends_ptr is not None:
        expert, first_row, num_rows = expert_rows(ends_ptr, row_tile, EXPERTS, BLOCK_ROWS)
        if num_rows == 0:
            return
        expert, first_row = expert.to(tl.int64), first_row.to(tl.int64)
        x_ptr += first_row * num_slabs * _SLAB
        x_scales_ptr += first_row
        out_ptr += first_row * out_stride
        codes_ptr += expert * num_slabs * num_outputs * _SLAB
        scales_ptr += expert * tl.cdiv(num_slabs, SLABS_A_SCALE) * num_outputs
        if factors_ptr is not None:
            factors_ptr += expert * num_outputs
        if bias_ptr is not None:
            bias_ptr += expert * out_stride
    else:
        if row_tile * BLOCK_ROWS >= num_rows:
            return
        rows += row_tile * BLOCK_ROWS
    outputs = tl.program_id(1) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    # Programs beyond the last output read it again: masks would narrow the reads.
    safe, places = tl.minimum(outputs, num_outputs - 1), tl.arange(0, _SLAB)
    weights = codes_ptr + safe[:, None] * _SLAB + places[None, :]
    xs = x_ptr + rows.to(tl.int64)[None, :] * (num_slabs * _SLAB) + places[:, None]
    sums = tl.zeros([BLOCK_OUTPUTS, BLOCK_ROWS], tl.float32)
    for slab in tl.range(0, num_slabs, num_stages=NUM_STAGES):
        weight = tl.load(weights)
        x = tl.load(xs + slab * _SLAB)
        scale = tl.load(x_scales_ptr + slab * all_rows + rows)[None, :]
        if not ONE_SCALE:
            scales = tl.load(scales_ptr + slab // SLABS_A_SCALE * num_outputs + safe)
            scale = scale * scales.to(tl.float32)[:, None]
        if x.dtype == tl.int8:
            sums += tl.dot(weight, x, out_dtype=tl.int32).to(tl.float32) * scale
        else:
            sums += tl.dot(weight, x) * scale
        weights += num_outputs * _SLAB
    if ONE_SCALE:
        sums *= tl.load(scales_ptr + safe).to(tl.float32)[:, None]
    if factors_ptr is not None:
        sums *= tl.load(factors_ptr + safe)[:, None]
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + safe).to(tl.float32)[:, None]
    out = out_ptr + rows.to(tl.int64)[None, :] * out_stride + outputs[:, None]
    there = (rows < num_rows)[None, :] & (outputs < num_outputs)[:, None]
    tl.store(out, sums.to(out_ptr.dtype.element_ty), mask=there)


@dataclass(frozen=True, slots=True)
class RoundedRows:
    """Rows in 8 bits.

    Attributes:
        codes: `[all rows, slabs, 128]` int8 or float8, in the order of a weight's codes.
        scales: `[slabs, all rows]` float32.
        num_rows: without those that fill the last tiles, which have any values. Behind both tensors is memory for the
            largest tile, which may begin at any row.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    num_rows: int


class EightBitProduct:
    """The products in Triton, for parts of weights that `TritonCodes` packed.

    Args:
        tile: instead of those that are chosen by the number of rows.
    """

    def __init__(self, tile: CodeTile | None = None) -> None:
        self._tile = tile
        self._interpreted = not isinstance(_eight_bit_kernel, JITFunction)
        self._round, self._multiply = Kernel(_round_kernel), Kernel(_eight_bit_kernel)
        self._launches: dict[tuple[object, ...], Launch] = {}

    def fits(self, part: WeightPart) -> bool:
        """Whether there is a product with this part: of 8 bits, whole slabs to a scale, and no offsets."""
        codes, scales = part.codes, part.scales
        if scales is None or part.zero != _ZEROS.get(codes.dtype) or part.supers is not None or scales.shape[-1] > 1:
            return False
        floats = codes.is_floating_point() and codes.device.type == "cuda"
        return not floats or torch.cuda.get_device_capability(codes.device) >= _FP8_CAPABILITY

    def round(self, x: torch.Tensor, dtype: torch.dtype) -> RoundedRows:
        """Rows `[num_rows, inputs]`, contiguous, in one of `DTYPES`."""
        num_rows, num_inputs = x.shape
        slabs = triton.cdiv(num_inputs, _SLAB.value)
        rows = triton.cdiv(num_rows, _ROW_MULTIPLE.value) * _ROW_MULTIPLE.value
        codes = torch.empty(rows + _ROW_MULTIPLE.value, slabs, _SLAB.value, dtype=dtype, device=x.device)[:rows]
        scales = torch.empty(slabs * rows + _ROW_MULTIPLE.value, dtype=torch.float32, device=x.device)
        scales = scales[: slabs * rows].view(slabs, rows)
        tensors = {"x_ptr": x, "codes_ptr": codes, "scales_ptr": scales}
        key = num_inputs, x.dtype, dtype, x.device
        launch = self._launches.get(key)
        if launch is None:
            numbers = {"num_rows": num_rows, "num_inputs": num_inputs, "BLOCK_ROWS": _ROUNDED_ROWS}
            arguments = {**tensors, **numbers, "EMULATED": self._interpreted}
            launch = self._prepared(key, self._round, arguments, list(tensors), 4)
        launch((triton.cdiv(num_rows, _ROUNDED_ROWS), slabs, 1), *tensors.values(), num_rows=num_rows)
        return RoundedRows(codes, scales, num_rows)

    def __call__(
        self,
        x: RoundedRows,
        part: WeightPart,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        ends: torch.Tensor | None = None,
    ) -> None:
        """Write the product, plus `bias [outputs]`, to `out [num_rows, outputs]`, whose rows may be apart.

        Args:
            ends: of the rows of each expert, whose biases are as far apart as the rows of `out`.
        """
        processors = num_processors(out.device)
        if ends is None:
            tile = self._tile or choose_tile(x.num_rows, part.outputs, processors, EIGHT_BIT_TILES)
            row_tiles = triton.cdiv(x.num_rows, tile.rows)
        else:
            sizes = x.num_rows, len(ends)
            tile = self._tile or choose_expert_tile(*sizes, part.outputs, processors, EIGHT_BIT_TILES)
            row_tiles = most_tiles(*sizes, tile)
        tensors = {
            "x_ptr": x.codes,
            "x_scales_ptr": x.scales,
            "ends_ptr": ends,
            "codes_ptr": part.codes,
            "scales_ptr": part.scales,
            "factors_ptr": part.factors,
            "bias_ptr": bias,
            "out_ptr": out,
        }
        given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        slabs, stride, experts = x.codes.shape[1], out.stride(0), 0 if ends is None else len(ends)
        key = (*given, part.outputs, slabs, part.every, stride, part.codes.dtype, out.dtype, tile, out.device, experts)
        launch = self._launches.get(key)
        if launch is None:
            others = {
                "num_rows": x.num_rows,
                "num_outputs": part.outputs,
                "num_slabs": slabs,
                "out_stride": stride,
                "SLABS_A_SCALE": part.every,
                "ONE_SCALE": part.every >= slabs,
                "EXPERTS": experts,
                "BLOCK_OUTPUTS": tile.outputs,
                "BLOCK_ROWS": tile.rows,
                "NUM_STAGES": tile.num_stages,
            }
            launch = self._prepared(key, self._multiply, {**tensors, **others}, list(given), tile.num_warps)
        together = min(row_tiles, _ROW_TILES)
        grid = together, triton.cdiv(part.outputs, tile.outputs), triton.cdiv(row_tiles, together)
        launch(grid, *given.values(), num_rows=x.num_rows)

    def _prepared(
        self, key: tuple[object, ...], kernel: Kernel, arguments: dict[str, Any], changing: list[str], num_warps: int
    ) -> Launch:
        if len(self._launches) >= _MOST_LAUNCHES:
            self._launches.clear()
        launch = self._launches[key] = kernel.prepare(arguments, changing, num_warps=num_warps)
        return launch
