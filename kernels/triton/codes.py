"""Products with quantised weights, whose codes stay packed in memory and are dequantised in registers.

A slab is 128 inputs of an output: 16 lanes with 8 inputs each, input 16 i + j in part i of lane j. Its codes are 16 low
words, then 16 high ones, each with 8 fields:

    bits      low      high
    2, 4, 8   all
    3         2 bits   1 bit
    5, 6      4 bits   1 or 2 bits

In memory all outputs of a slab are neighbours, so that a tile of any number of outputs is read at once; scales are
likewise. A part is unpacked by a shift and a mask, without moves between lanes, and has one scale. One row is
multiplied in float32, several by tensor cores, in the dtype of the rows; many, with codes of 8 bits, in 8 bits
(`eight_bits`), for which integers are stored less 128.
"""

# ruff: noqa: N803 (compile-time constants are capitals in Triton's kernels)

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from folio.kernels.cpu.ops import PackedWeight, WeightPart
from folio.kernels.quantised import QuantisedWeight
from folio.kernels.triton.code_tiles import (
    BATCH_INVARIANT_TILE,
    CodeTile,
    choose_expert_tile,
    choose_tile,
    expert_rows,
    most_tiles,
)
from folio.kernels.triton.eight_bits import LEAST_ROWS, EightBitProduct, RoundedRows
from folio.kernels.triton.launch import Kernel, Launch
from folio.kernels.triton.packed_codes import LANES, LOW_BITS, PARTS, SLAB, WORDS, form, merged, packed
from folio.kernels.triton.product import num_processors

_SLAB, _PARTS, _LANES = tl.constexpr(SLAB), tl.constexpr(PARTS), tl.constexpr(LANES)
_SUPER_SLABS = tl.constexpr(2)  # with one super scale
_WORD_BYTES = 8
_DTYPES = (torch.bfloat16, torch.float16)
_MOST_LAUNCHES = 1 << 12
LOOK_UP = CodeTile(16, 1, 8, 4, 1)


@triton.jit
def _group(words: tl.tensor, GROUP: tl.constexpr, HALVES: tl.constexpr) -> tl.tensor:
    """A scale or an offset, float32."""
    if HALVES:
        return (words >> (16 * GROUP)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return (words >> (8 * GROUP)).to(tl.int8).to(tl.float32)


@triton.jit
def _values(
    low: tl.tensor,
    high: tl.tensor,
    first: tl.tensor,  # 8 entries of the table, a byte each
    second: tl.tensor,
    PART: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    ZERO: tl.constexpr,
    TABLE: tl.constexpr,
    FLOATS: tl.constexpr,
) -> tl.tensor:
    """The codes of a part, less their zero, or what the table has for them: float32."""
    code = (low >> (LOW * PART)).to(tl.int32) & (2**LOW - 1)
    if HIGH:
        code |= ((high >> (HIGH * PART)).to(tl.int32) & (2**HIGH - 1)) << LOW
    if TABLE:
        return (tl.where(code < 8, first, second) >> ((code & 7) * 8).to(tl.int64)).to(tl.int8).to(tl.float32)
    if FLOATS:  # sign, exponent and mantissa of e4m3 in their places: less by 2 ** 120, subnormal ones too
        return (((code & 128) << 24) | ((code & 127) << 20)).to(tl.float32, bitcast=True) * 2.0**120
    # The bits of 2 ** 23 + code: twice as fast as a conversion.
    bits = code ^ 0x4B000080 if LOW == 8 else code | 0x4B000000
    return bits.to(tl.float32, bitcast=True) - (8388608.0 + ZERO)


@triton.jit(do_not_specialize=["num_rows", "first_output"])
def _codes_kernel(
    x_ptr: tl.tensor,  # [num_rows, num_inputs] or None: the values of outputs are looked up
    ids_ptr: tl.tensor,  # [num_rows] int64: these outputs, or None
    ends_ptr: tl.tensor,  # [EXPERTS] int64: of rows; or None. All tensors of weights and the order are by expert first
    low_ptr: tl.tensor,  # [num_slabs, num_outputs, 2 * BITS * 8 / LOW] words of LOW * 8 bits
    high_ptr: tl.tensor,  # the same memory as words of HIGH * 8 bits, or None
    scales_ptr: tl.tensor,  # [num_slabs / SLABS_A_SCALE, num_outputs, KINDS, WORDS]
    supers_ptr: tl.tensor,  # [num_slabs / 2, num_outputs, KINDS] float16 or None
    factors_ptr: tl.tensor,  # [num_outputs] float32 or None
    table_ptr: tl.tensor,  # [2] int64 or None
    bias_ptr: tl.tensor,  # [num_outputs] or None; by expert with out_stride
    order_ptr: tl.tensor,  # [num_inputs] int32 or None: of outputs that are looked up, and of rows of experts
    out_ptr: tl.tensor,  # [num_rows, num_outputs] or [num_rows, num_inputs], with out_stride
    num_rows: tl.tensor,
    first_output: tl.tensor,  # subtracted from ids
    num_outputs: tl.tensor,
    num_inputs: tl.tensor,
    out_stride: tl.tensor,
    BITS: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    ZERO: tl.constexpr,
    KINDS: tl.constexpr,  # 2: there are offsets
    WORDS: tl.constexpr,
    GROUP_PARTS: tl.constexpr,
    WORD_PARTS: tl.constexpr,
    SLABS_A_SCALE: tl.constexpr,
    HALVES: tl.constexpr,
    FLOATS: tl.constexpr,  # codes are float8
    EVEN: tl.constexpr,  # whole slabs, and whole tiles of them
    EXPERTS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SLABS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    UPCAST_DOT: tl.constexpr,
) -> None:
    """One program per `BLOCK_OUTPUTS` outputs of `BLOCK_ROWS` rows, of one expert, or per `BLOCK_OUTPUTS` looked up."""
    outputs = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    asked = outputs.to(tl.int64)
    if ids_ptr is not None:
        outputs = (tl.load(ids_ptr + asked, mask=asked < num_rows, other=-1) - first_output).to(tl.int32)
    # Programs beyond the last output read it again: masks would narrow the reads.
    safe = tl.maximum(tl.minimum(outputs, num_outputs - 1), 0)
    num_slabs, lanes = tl.cdiv(num_inputs, _SLAB), tl.arange(0, _LANES)
    rows = tl.arange(0, BLOCK_ROWS)
    if ends_ptr is not None:
        expert, first_row, num_rows = expert_rows(ends_ptr, tl.program_id(1), EXPERTS, BLOCK_ROWS)
        if num_rows == 0:
            return
        expert, first_row = expert.to(tl.int64), first_row.to(tl.int64)
        x_ptr += first_row * num_inputs
        out_ptr += first_row * out_stride
        low_ptr += expert * num_slabs * num_outputs * (2 * BITS * 8 // LOW)
        scales_ptr += expert * tl.cdiv(num_slabs, SLABS_A_SCALE) * num_outputs * (KINDS * WORDS)
        if HIGH:
            high_ptr += expert * num_slabs * num_outputs * (2 * BITS * 8 // HIGH)
        if supers_ptr is not None:
            supers_ptr += expert * tl.cdiv(num_slabs, _SUPER_SLABS) * num_outputs * KINDS
        if factors_ptr is not None:
            factors_ptr += expert * num_outputs
        if bias_ptr is not None:
            bias_ptr += expert * out_stride
        if order_ptr is not None:
            order_ptr += expert * num_inputs
    else:
        rows += tl.program_id(1) * BLOCK_ROWS
    table, second = 0, 0
    if table_ptr is not None:
        table, second = tl.load(table_ptr), tl.load(table_ptr + 1)
    if BLOCK_ROWS > 1:
        sums = tl.zeros([BLOCK_OUTPUTS, BLOCK_ROWS], tl.float32)
        here = safe
    else:
        sums = tl.zeros([BLOCK_OUTPUTS, BLOCK_SLABS, _LANES], tl.float32)
        here = safe[:, None]
    for slab in tl.range(0, num_slabs, BLOCK_SLABS, num_stages=NUM_STAGES):
        if BLOCK_ROWS > 1:
            slabs = slab
            read = slab
            starts = slab * _SLAB + lanes
        else:
            slabs = slab + tl.arange(0, BLOCK_SLABS)[None, :]
            read = slabs if EVEN else tl.minimum(slabs, num_slabs - 1)
            starts = (slab + tl.arange(0, BLOCK_SLABS)[:, None]) * _SLAB + lanes[None, :]
        words = tl.expand_dims(read * num_outputs + here, -1)
        low = tl.load(low_ptr + words * (2 * BITS * 8 // LOW) + lanes)
        high = low
        if HIGH:
            high = tl.load(high_ptr + words * (2 * BITS * 8 // HIGH) + LOW * _LANES // HIGH + lanes)
        scales = scales_ptr + (read // SLABS_A_SCALE * num_outputs + here) * (KINDS * WORDS)
        if supers_ptr is not None:
            supers = supers_ptr + (read // _SUPER_SLABS * num_outputs + here) * KINDS
            super_scale = tl.load(supers).to(tl.float32)
            if KINDS > 1:
                super_offset = tl.load(supers + 1).to(tl.float32)
        for part in tl.static_range(_PARTS):
            if part % WORD_PARTS == 0:
                scale_words = tl.load(scales + part // WORD_PARTS)
                if KINDS > 1:
                    offset_words = tl.load(scales + part // WORD_PARTS + WORDS)
            if part % GROUP_PARTS == 0:
                scale = _group(scale_words, part % WORD_PARTS // GROUP_PARTS, HALVES)
                if KINDS > 1:
                    offset = _group(offset_words, part % WORD_PARTS // GROUP_PARTS, HALVES)
                if supers_ptr is not None:
                    scale *= super_scale
                    if KINDS > 1:
                        offset *= super_offset
            values = _values(low, high, table, second, part, LOW, HIGH, ZERO, table_ptr is not None, FLOATS)
            values *= tl.expand_dims(scale, -1)
            if KINDS > 1:
                values += tl.expand_dims(offset, -1)
            inputs = starts + part * _LANES
            columns = inputs
            if order_ptr is not None:
                columns = tl.load(order_ptr + inputs, mask=inputs < num_inputs, other=0)
            if x_ptr is None:
                if factors_ptr is not None:
                    values *= tl.load(factors_ptr + safe)[:, None, None]
                there = ((outputs >= 0) & (outputs < num_outputs))[:, None, None] & (inputs < num_inputs)[None]
                out = out_ptr + asked[:, None, None] * out_stride + columns[None]
                tl.store(out, values.to(out_ptr.dtype.element_ty), mask=there)
            elif BLOCK_ROWS > 1:
                xs = x_ptr + rows.to(tl.int64)[None, :] * num_inputs + columns[:, None]
                inside = (rows < num_rows)[None, :]
                if not EVEN:
                    inside &= (inputs < num_inputs)[:, None]
                x = tl.load(xs, mask=inside, other=0.0)
                if UPCAST_DOT:
                    sums += tl.dot(values.to(x.dtype).to(tl.float32), x.to(tl.float32), input_precision="ieee")
                else:
                    sums = tl.dot(values.to(x.dtype), x, sums)
            else:
                x = tl.load(x_ptr + columns) if EVEN else tl.load(x_ptr + columns, mask=inputs < num_inputs, other=0.0)
                sums += values * x.to(tl.float32)[None]
    if x_ptr is not None:
        if BLOCK_ROWS == 1:
            sums = tl.sum(tl.sum(sums, 2), 1)[:, None]
        if factors_ptr is not None:
            sums *= tl.load(factors_ptr + safe)[:, None]
        if bias_ptr is not None:
            sums += tl.load(bias_ptr + safe).to(tl.float32)[:, None]
        out = out_ptr + rows.to(tl.int64)[None, :] * out_stride + outputs[:, None]
        there = (rows < num_rows)[None, :] & (outputs < num_outputs)[:, None]
        tl.store(out, sums.to(out_ptr.dtype.element_ty), mask=there)


class TritonCodes:
    """The products in Triton, with rows that are not rounded, or by `EightBitProduct`. A kernel is compiled for each
    form and size of a weight on first use, which takes seconds.

    Args:
        device: of packed weights.
        tile: instead of those that are chosen by the number of rows, none of which is rounded then.
    """

    int8_group = SLAB

    def __init__(self, device: torch.device, tile: CodeTile | None = None) -> None:
        self._device, self._tile = device, tile
        self._kernel, self._eight_bits = Kernel(_codes_kernel), EightBitProduct()
        self._launches: dict[tuple[object, ...], Launch] = {}

    def unsupported(self, dtype: torch.dtype) -> str | None:
        """The reason why there are no products in this dtype, as a sentence; `None` if there are."""
        return None if dtype in _DTYPES else f"there is no kernel for {dtype}"

    def pack(self, weight: torch.Tensor) -> None:
        """None: a plain weight stays as it is."""

    def pack_quantised(self, weight: QuantisedWeight, dtype: torch.dtype) -> PackedWeight:
        """Pack a weight for inputs and results of a dtype, on the device, or on torch's meta device."""
        if reason := self.unsupported(dtype):
            raise ValueError(f"a quantised weight for {dtype}: {reason}")
        return packed(weight, dtype, torch.device("meta") if weight.codes.is_meta else self._device)

    def merged(self, weight: PackedWeight) -> PackedWeight:
        """The same weight, with one part for neighbouring ones of the same form: each costs a launch."""
        return merged(weight)

    def rows(self, weight: PackedWeight, outputs: torch.Tensor) -> torch.Tensor:
        """The values `[..., inputs]` of these outputs, int64 `[...]`, such as those of an embedding. Those of outputs
        that are not there are undefined."""
        out = torch.empty(*outputs.shape, weight.inputs, dtype=weight.dtype, device=outputs.device)
        if outputs.numel():
            grid, first = (triton.cdiv(outputs.numel(), LOOK_UP.outputs), 1, 1), 0
            tensors = {"ids_ptr": outputs.contiguous(), "order_ptr": weight.order, "out_ptr": out}
            for part in weight.parts:
                numbers = {"num_rows": outputs.numel(), "first_output": first}
                self._launch(weight, part, LOOK_UP, grid, tensors, weight.inputs, **numbers)
                first += part.outputs
        return out

    def __call__(self, x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
        """`x [..., inputs]`, `bias [outputs]`; returns `[..., outputs]`, all of the weight's dtype."""
        if x.shape[-1] != weight.inputs or x.dtype != weight.dtype:
            raise ValueError(f"x {list(x.shape)} {x.dtype} for {weight.inputs} inputs of {weight.dtype}")
        num_outputs = weight.outputs
        if bias is not None and (bias.shape != (num_outputs,) or bias.dtype != x.dtype):
            raise ValueError(f"bias {list(bias.shape)} {bias.dtype} for {num_outputs} outputs of {weight.dtype}")
        out = x.new_empty(*x.shape[:-1], num_outputs)
        num_rows = x.numel() // weight.inputs
        if not num_rows:
            return out
        x = x.contiguous() if weight.order is None else x.index_select(-1, weight.order)
        flat, start = out.view(num_rows, num_outputs), 0
        choose, fixed = self._tile is None and not weight.batch_invariant, self._tile or BATCH_INVARIANT_TILE
        rounded: dict[torch.dtype, RoundedRows] = {}
        for part in weight.parts:
            here = slice(start, start := start + part.outputs)
            part_bias = None if bias is None else bias[here]
            if choose and num_rows >= LEAST_ROWS and self._eight_bits.fits(part):
                if (dtype := part.codes.dtype) not in rounded:
                    rounded[dtype] = self._eight_bits.round(x.view(num_rows, weight.inputs), dtype)
                self._eight_bits(rounded[dtype], part, part_bias, flat[:, here])
                continue
            tile = choose_tile(num_rows, part.outputs, num_processors(x.device)) if choose else fixed
            tensors = {"x_ptr": x, "bias_ptr": part_bias, "out_ptr": flat[:, here]}
            grid = triton.cdiv(part.outputs, tile.outputs), triton.cdiv(num_rows, tile.rows), 1
            self._launch(weight, part, tile, grid, tensors, num_outputs, num_rows=num_rows)
        return out

    def by_expert(
        self, x: torch.Tensor, weight: PackedWeight, ends: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The products of each expert's rows: see `PackedProduct`. Launches depend on the number of all rows only:
        there are programs for as many tiles as experts can have, and those without rows end."""
        (num_rows, inputs), experts, outputs = x.shape, len(ends), weight.outputs
        if inputs != weight.inputs or x.dtype != weight.dtype:
            raise ValueError(f"x {list(x.shape)} {x.dtype} for {weight.inputs} inputs of {weight.dtype}")
        if experts != len(weight.parts[0].codes):
            raise ValueError(f"ends of {experts} experts, not {len(weight.parts[0].codes)}")
        if bias is not None and (bias.shape != (experts, outputs) or bias.dtype != x.dtype):
            raise ValueError(f"bias {list(bias.shape)} {bias.dtype} for {outputs} outputs of {weight.dtype}")
        x, out, start = x.contiguous(), x.new_empty(num_rows, outputs), 0
        choose, fixed = self._tile is None and not weight.batch_invariant, self._tile or BATCH_INVARIANT_TILE
        many = choose and weight.order is None and num_rows >= LEAST_ROWS * experts
        rounded: dict[torch.dtype, RoundedRows] = {}
        for part in weight.parts if num_rows else ():
            here = slice(start, start := start + part.outputs)
            part_bias = None if bias is None else bias[:, here]
            if many and self._eight_bits.fits(part):
                if (dtype := part.codes.dtype) not in rounded:
                    rounded[dtype] = self._eight_bits.round(x, dtype)
                self._eight_bits(rounded[dtype], part, part_bias, out[:, here], ends)
                continue
            processors = num_processors(x.device)
            tile = choose_expert_tile(num_rows, experts, part.outputs, processors) if choose else fixed
            others = {"x_ptr": x, "ends_ptr": ends, "bias_ptr": part_bias, "order_ptr": weight.order}
            grid = triton.cdiv(part.outputs, tile.outputs), most_tiles(num_rows, experts, tile), 1
            self._launch(weight, part, tile, grid, others | {"out_ptr": out[:, here]}, outputs, num_rows=num_rows)
        return out

    def _launch(
        self,
        weight: PackedWeight,
        part: WeightPart,
        tile: CodeTile,
        grid: tuple[int, int, int],
        others: dict[str, torch.Tensor | None],
        out_stride: int,
        **numbers: int,
    ) -> None:
        """Launch for a part of a weight. Args: `others`: tensors that are not of the part."""
        low = LOW_BITS[part.bits]
        high = part.bits - low
        groups = part.scales.shape[-1] // (1 + part.has_offsets)  # type: ignore[union-attr]  # quantised ones have them
        word_groups = min(groups, _WORD_BYTES // part.scales.element_size())  # type: ignore[union-attr]
        word = WORDS[word_groups * part.scales.element_size()]  # type: ignore[union-attr]
        tensors = {
            "low_ptr": part.codes.view(WORDS[low]),
            "high_ptr": part.codes.view(WORDS[high]) if high else None,
            "scales_ptr": part.scales.view(word),  # type: ignore[union-attr]
            "supers_ptr": part.supers,
            "factors_ptr": part.factors,
            "table_ptr": part.table,
            **others,
        }
        given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        key = (*given, *form(part), part.outputs, weight.inputs, weight.dtype, tile, out_stride, part.codes.device)
        launch = self._launches.get(key)
        if launch is None:
            if len(self._launches) >= _MOST_LAUNCHES:
                self._launches.clear()
            arguments: dict[str, Any] = {
                **dict.fromkeys(("x_ptr", "ids_ptr", "ends_ptr", "bias_ptr", "order_ptr")),
                **tensors,
                "first_output": 0,
                **numbers,
                "num_outputs": part.outputs,
                "num_inputs": weight.inputs,
                "out_stride": out_stride,
                "BITS": part.bits,
                "LOW": low,
                "HIGH": high,
                "ZERO": part.zero,
                "KINDS": 1 + part.has_offsets,
                "WORDS": groups // word_groups,
                "GROUP_PARTS": PARTS // groups,
                "WORD_PARTS": PARTS // groups * word_groups,
                "SLABS_A_SCALE": part.every,
                "HALVES": part.supers is None,
                "FLOATS": part.codes.is_floating_point(),
                "EVEN": weight.inputs % (SLAB * tile.slabs) == 0,
                "EXPERTS": len(part.codes) if "ends_ptr" in given else 0,
                "BLOCK_OUTPUTS": tile.outputs,
                "BLOCK_ROWS": tile.rows,
                "BLOCK_SLABS": tile.slabs,
                "NUM_STAGES": tile.num_stages,
                "UPCAST_DOT": not isinstance(_codes_kernel, JITFunction),
            }
            launch = self._launches[key] = self._kernel.prepare(arguments, list(given), num_warps=tile.num_warps)
        launch(grid, *given.values(), **numbers)
