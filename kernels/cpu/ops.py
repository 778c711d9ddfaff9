"""Operations in C++ beside attention: linear layers with packed weights, row-wise layer operations."""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from folio.kernels.cpu.build import build_name, load_function
from folio.kernels.elementwise import ACTIVATIONS, Activation, Elementwise, RotaryWrite, WriteLayer
from folio.kernels.errors import KernelError
from folio.kernels.quantised import LEAST_GROUP, QuantisedWeight, as_integers
from folio.kernels.reference import write_by_index

_POINTER, _INT64, _INT32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
_INT, _FLOAT = ctypes.c_int, ctypes.c_float

# Numbers of the dtypes in C++.
CPP_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

_WORD_BYTES = 4
_HUGE_PAGE = 2 << 20
_PLAIN_DTYPES = (torch.float32, torch.bfloat16)
_SLAB, _LANE_BYTES = 32, 4  # inputs and bytes of an output in a word, see csrc/codes.h
_CODES = -1  # in place of a dtype
# Tensors of a `WeightPart` that differ among experts.
BY_EXPERT = ("codes", "scales", "supers", "factors")


@dataclass(frozen=True, slots=True, eq=False)
class WeightPart:
    """Neighbouring outputs of a weight, packed in one way.

    Attributes:
        codes: codes in the kernel's order (csrc/codes.h), or the values of the dtype if `bits` is 0.
        scales: and `supers`, in the kernel's order.
        factors: see `QuantisedWeight`.
        table: 16 bytes, 128 added to each value.
        every: least groups of inputs with one scale.
    """

    codes: torch.Tensor
    outputs: int
    bits: int = 0
    scales: torch.Tensor | None = None
    supers: torch.Tensor | None = None
    factors: torch.Tensor | None = None
    table: torch.Tensor | None = None
    zero: int = 0
    every: int = 1
    has_offsets: bool = False


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class PackedWeight:
    """A weight `[outputs, inputs]` in the kernel's order.

    Attributes:
        parts: several only if it is quantised.
        order: `[inputs]` int32, see `QuantisedWeight`.
        dtype: of inputs, biases and results.
        batch_invariant: a row's sums have one order, whatever the number of rows.
    """

    parts: tuple[WeightPart, ...]
    inputs: int
    dtype: torch.dtype
    order: torch.Tensor | None = None
    batch_invariant: bool = False

    @property
    def outputs(self) -> int:
        return sum(part.outputs for part in self.parts)

    @property
    def is_quantised(self) -> bool:
        return self.parts[0].bits > 0

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and the rest."""
        tensors = [self.order, *(t for p in self.parts for t in (p.codes, p.scales, p.supers, p.factors, p.table))]
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


class PartFields(ctypes.Structure):
    """`WeightPart` of weight.h, field by field."""

    _fields_ = [
        *((name, _POINTER) for name in ("codes", "scales", "supers", "factors", "table")),
        ("outputs", _INT64),
        *((name, _INT32) for name in ("bits", "zero", "every", "has_offsets")),
    ]


class WeightFields(ctypes.Structure):
    """`ProductWeight` of weight.h, field by field. Has the addresses of the tensors, which must not move."""

    _fields_ = [
        ("parts", ctypes.POINTER(PartFields)),
        *((name, _POINTER) for name in ("bias", "order")),
        *((name, _INT64) for name in ("outputs", "inputs")),
        *((name, _INT32) for name in ("num_parts", "batch_invariant")),
    ]

    @classmethod
    def of(cls, weight: PackedWeight, bias: torch.Tensor | None = None) -> WeightFields:
        parts = (PartFields * len(weight.parts))(
            *(
                PartFields(
                    *map(address, (part.codes, part.scales, part.supers, part.factors, part.table)),
                    *(part.outputs, part.bits, part.zero, part.every, part.has_offsets),
                )
                for part in weight.parts
            )
        )
        # The structure keeps `parts`, as an object, alive.
        pointers = parts, address(bias), address(weight.order)
        return cls(*pointers, weight.outputs, weight.inputs, len(parts), weight.batch_invariant)


def address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class CpuLinear:
    """`x @ weight.T + bias`, summed in float32; weights in float32 or bfloat16, or quantised. A row's result depends
    neither on other rows nor on the number of threads.

    In bfloat16 a quantised weight is multiplied with inputs that are rounded to 8 bits, with a scale for each 32 of a
    row, or to 16 if their largest is above 1.5 times the mean of those; in float32 they are not rounded.

    Args:
        march: the compiler's name of the processor.

    Raises:
        KernelError: the library cannot be compiled.
    """

    int8_group = LEAST_GROUP[8]

    def __init__(self, march: str = "native") -> None:
        self.build = build_name("linear", march)  # weights packed under the same name have the same order
        load = partial(load_function, "linear", march=march)
        self._tile = load("folio_linear_tile", _INT, result=_INT)
        self._pack = load("folio_linear_pack", _INT, *[_POINTER] * 2, *[_INT64] * 2)
        self._pack_codes = load("folio_codes_pack", _INT, *[_POINTER] * 2, *[_INT64] * 2)
        fields = ctypes.POINTER(WeightFields)
        self._rows = load("folio_codes_rows", _INT, fields, *[_POINTER] * 2, _INT64)
        self._panel_bytes = load("folio_linear_panel_bytes", _INT, fields, _INT64, result=_INT64)
        self._multiply = load("folio_linear", _INT, fields, *[_POINTER] * 2, _INT, _POINTER, _INT64)
        self._by_expert = load("folio_experts", _INT, fields, *[_POINTER] * 2, _INT64, *[_POINTER] * 3)

    def unsupported(self, dtype: torch.dtype) -> str | None:
        """The reason why weights of this dtype cannot be packed, as a sentence; `None` if they can."""
        if dtype not in _PLAIN_DTYPES:
            return f"there is no kernel for {dtype}"
        return None if self._tile(CPP_DTYPES[dtype]) else "the processor lacks AVX2 with FMA"

    def pack(self, weight: torch.Tensor) -> PackedWeight:
        """Copy `weight [outputs, inputs]` for `__call__`; on torch's meta device the result is there, too. Raises
        `KernelError` where `unsupported` gives a reason."""
        if reason := self.unsupported(weight.dtype):
            raise KernelError(f"a weight of {weight.dtype} cannot be packed: {reason}")
        weight = weight.contiguous()
        (outputs, inputs), dtype = weight.shape, CPP_DTYPES[weight.dtype]
        words = -(-inputs * weight.element_size() // _WORD_BYTES)
        codes = packed_memory(-(-outputs // (tile := self._tile(dtype))) * tile * words * _WORD_BYTES, weight.device)
        if not weight.is_meta:
            self._pack(dtype, weight.data_ptr(), codes.data_ptr(), outputs, inputs)
        return PackedWeight((WeightPart(codes, outputs),), inputs, weight.dtype)

    def pack_quantised(self, weight: QuantisedWeight, dtype: torch.dtype) -> PackedWeight:
        """Pack a weight for inputs and results of a dtype: float32 or bfloat16. Several with the same inputs can be
        joined by their `parts`."""
        if dtype not in _PLAIN_DTYPES:
            raise ValueError(f"a quantised weight for {dtype}")
        weight = as_integers(weight)
        (outputs, inputs), bits, device = weight.shape, weight.bits, weight.codes.device
        lanes = self._tile(_CODES)
        slabs, tiles = -(-inputs // _SLAB), -(-outputs // lanes)
        codes = packed_memory(tiles * slabs * bits * lanes * _LANE_BYTES, device)
        if not weight.codes.is_meta:
            unpacked = weight.codes.contiguous()
            self._pack_codes(bits, unpacked.data_ptr(), codes.data_ptr(), outputs, inputs)
        nested = weight.super_scales is not None
        table = None if weight.table is None else torch.tensor(weight.table, device=device).add(128).byte()
        part = WeightPart(
            codes,
            outputs,
            bits,
            _by_tile(lanes, torch.int8 if nested else torch.float16, weight.scales, weight.offsets),
            _by_tile(lanes, torch.float16, weight.super_scales, weight.super_offsets) if nested else None,
            None if weight.factors is None else weight.factors.float().contiguous(),
            table,
            weight.zero,
            weight.group // LEAST_GROUP[bits],
            weight.offsets is not None,
        )
        return PackedWeight((part,), inputs, dtype, None if weight.order is None else weight.order.int())

    def merged(self, weight: PackedWeight) -> PackedWeight:
        """The weight itself: its parts are multiplied in one call."""
        return weight

    def rows(self, weight: PackedWeight, outputs: torch.Tensor) -> torch.Tensor:
        """The values `[..., inputs]` of these outputs, int64 `[...]`, of a quantised weight, such as those of an
        embedding. Raises `IndexError` if one is not there."""
        indices = outputs.contiguous()
        if indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < weight.outputs:
            raise IndexError(f"outputs {int(indices.min())} to {int(indices.max())} of {weight.outputs}")
        out = torch.empty(*indices.shape, weight.inputs, dtype=weight.dtype)
        pointers = indices.data_ptr(), out.data_ptr()
        self._rows(CPP_DTYPES[weight.dtype], WeightFields.of(weight), *pointers, indices.numel())
        return out

    def __call__(
        self, x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None, *, unrounded: bool = False
    ) -> torch.Tensor:
        """`x [..., inputs]`, `bias [outputs]`; returns `[..., outputs]`, all of the weight's dtype. Unrounded results
        are float32."""
        if x.shape[-1] != weight.inputs or x.dtype != weight.dtype:
            raise ValueError(f"x {list(x.shape)} {x.dtype} for {weight.inputs} inputs of {weight.dtype}")
        outputs, dtype = weight.outputs, CPP_DTYPES[x.dtype]
        if bias is not None and (bias.shape != (outputs,) or bias.dtype != x.dtype or bias.stride(0) != 1):
            raise ValueError(f"bias {list(bias.shape)} {bias.dtype} for {outputs} outputs of {weight.dtype}")
        x = x.contiguous()
        rows = x.numel() // weight.inputs
        out = x.new_empty(*x.shape[:-1], outputs, dtype=torch.float32 if unrounded else None)
        if rows == 0:
            return out
        fields = WeightFields.of(weight, bias)
        panels = torch.empty(self._panel_bytes(dtype, fields, rows), dtype=torch.uint8)
        self._multiply(dtype, fields, *map(address, (x, out)), int(unrounded), address(panels), rows)
        return out

    def by_expert(
        self, x: torch.Tensor, weight: PackedWeight, ends: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The products of each expert's rows: see `PackedProduct`."""
        if x.shape[1:] != (weight.inputs,) or x.dtype != weight.dtype or int(ends[-1]) != len(x):
            raise ValueError(f"x {list(x.shape)} {x.dtype} for {weight.inputs} inputs of {weight.dtype}")
        if len(ends) != len(weight.parts[0].codes):
            raise ValueError(f"ends of {len(ends)} experts, not {len(weight.parts[0].codes)}")
        x, dtype, out = x.contiguous(), CPP_DTYPES[x.dtype], x.new_empty(len(x), weight.outputs)
        if not len(x):
            return out
        tensors = [bias, weight.order, *(getattr(part, name) for part in weight.parts for name in BY_EXPERT)]
        strides = (_INT64 * len(tensors))(*(0 if t is None else t.stride(0) * t.element_size() for t in tensors))
        fields, most = WeightFields.of(weight, bias), int(ends.diff(prepend=ends.new_zeros(1)).max())
        panels = torch.empty(self._panel_bytes(dtype, fields, most), dtype=torch.uint8)
        self._by_expert(dtype, fields, strides, ends.data_ptr(), len(ends), *map(address, (x, out, panels)))
        return out


def _by_tile(lanes: int, dtype: torch.dtype, *values: torch.Tensor | None) -> torch.Tensor:
    """`[outputs, groups]` of scales, and of offsets if there are any, as `[tiles, groups, 1 or 2, lanes]`."""
    given = torch.stack([value.to(dtype) for value in values if value is not None], 2)
    outputs, groups, width = given.shape
    padded = torch.nn.functional.pad(given, (0, 0, 0, 0, 0, -outputs % lanes))
    return padded.view(-1, lanes, groups, width).permute(0, 2, 3, 1).contiguous()


def packed_memory(num_bytes: int, device: torch.device) -> torch.Tensor:
    return (
        on_huge_pages(num_bytes) if device.type == "cpu" else torch.empty(num_bytes, dtype=torch.uint8, device=device)
    )


def on_huge_pages(num_bytes: int) -> torch.Tensor:
    """Memory, on huge pages if it is larger than one: reading weights would else spend time on address translation."""
    if num_bytes < _HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(num_bytes, dtype=torch.uint8)
    memory = mmap.mmap(-1, num_bytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    data = torch.frombuffer(memory, dtype=torch.uint8)
    start = -data.data_ptr() % _HUGE_PAGE
    return data[start : start + num_bytes]


class RotaryFields(ctypes.Structure):
    """`RotaryCall` of rotary.cpp, field by field."""

    _fields_ = [
        *((name, _POINTER) for name in ("heads", "key_cache", "value_cache", "query_weight", "key_weight")),
        *((name, _POINTER) for name in ("cos", "sin", "slots")),
        *((name, _INT64) for name in ("token_stride", "head_stride")),
        *((f"{side}_{name}_stride", _INT64) for side in ("key", "value") for name in ("block", "token", "head")),
        *((name, _INT64) for name in ("num_blocks", "block_tokens")),
        *((name, _INT32) for name in ("num_tokens", "num_q_heads", "num_kv_heads", "dim", "rotary_dim", "columns")),
        *((name, _INT32) for name in ("dtype", "element_bytes")),
        *((name, _FLOAT) for name in ("query_eps", "query_offset", "key_eps", "key_offset")),
    ]


class CpuElementwise(Elementwise):
    """Each operation in one pass over memory (`csrc/elementwise.cpp`, `csrc/rotary.cpp`).

    Raises:
        KernelError: the library cannot be compiled.
    """

    def __init__(self) -> None:
        self._rms_norm = load_function(
            "elementwise", "folio_rms_norm", _INT, *[_POINTER] * 5, *[_INT64] * 2, *[_FLOAT] * 2
        )
        self._gate = load_function("elementwise", "folio_gate", *[_INT] * 2, *[_POINTER] * 2, *[_INT64] * 2)
        self._rotary_write = load_function("rotary", "folio_rotary_write", ctypes.POINTER(RotaryFields), result=_INT)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0) -> torch.Tensor:
        return self._norm(x, None, weight, None, eps, offset)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = torch.empty_like(residual, memory_format=torch.contiguous_format)
        return total, self._norm(x, residual, weight, total, eps, offset)

    def rms_norm_add(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0
    ) -> torch.Tensor:
        return self._norm(x, residual, weight, None, eps, offset)

    def _norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        total: torch.Tensor | None,
        eps: float,
        offset: float,
    ) -> torch.Tensor:
        if weight.shape != x.shape[-1:] or weight.dtype != x.dtype:
            raise ValueError(f"weight {list(weight.shape)} {weight.dtype} for x {list(x.shape)} {x.dtype}")
        if residual is not None:
            if residual.shape != x.shape or residual.dtype != x.dtype:
                raise ValueError(f"residual {list(residual.shape)} {residual.dtype} for x {list(x.shape)} {x.dtype}")
            residual = residual.contiguous()
        x = x.contiguous()
        out, size = torch.empty_like(x), x.shape[-1]
        pointers = x.data_ptr(), address(residual), weight.data_ptr(), out.data_ptr(), address(total)
        self._rms_norm(_dtype_number(x.dtype), *pointers, x.numel() // size, size, eps, offset)
        return out

    def gate(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        if gate_up.shape[-1] % 2:
            raise ValueError(f"the last dimension of {list(gate_up.shape)} must be even: gates, then ups")
        number = ACTIVATIONS.index(activation)
        gate_up = gate_up.contiguous()
        size = gate_up.shape[-1] // 2
        out = gate_up.new_empty(*gate_up.shape[:-1], size)
        pointers = gate_up.data_ptr(), out.data_ptr()
        self._gate(_dtype_number(gate_up.dtype), number, *pointers, out.numel() // size, size)
        return out

    def prepare_rotary_write(self, call: RotaryWrite) -> WriteLayer:
        return CpuRotaryWrite(self._rotary_write, call)


class CpuRotaryWrite:
    """A prepared `RotaryWrite`.

    Attributes:
        fields: the call in C++ without the addresses of heads, caches and norm weights.
        stores: the call in C++ writes the caches: they have the dtype of the heads, or int8.
    """

    def __init__(self, run: Any, call: RotaryWrite) -> None:
        heads, key_cache, value_cache, slots = call.heads, call.key_cache, call.value_cache, call.slots
        cos, sin = call.cos.contiguous(), call.sin.contiguous()
        query_norm, key_norm = call.query_norm, call.key_norm
        self.stores = key_cache.dtype in (heads.dtype, torch.int8)
        self.fields = RotaryFields(
            *map(address, (None, None, None, None, None, cos, sin, slots)),
            *heads.stride()[:2],
            *key_cache.stride()[:3],
            *value_cache.stride()[:3],
            *key_cache.shape[:2],
            len(heads),
            call.num_q_heads,
            call.num_kv_heads,
            heads.shape[2],
            call.rotary_dim,
            cos.shape[-1],
            _dtype_number(heads.dtype),
            key_cache.element_size(),
            *(0.0, 0.0) if query_norm is None else (query_norm.eps, query_norm.offset),
            *(0.0, 0.0) if key_norm is None else (key_norm.eps, key_norm.offset),
        )
        self._run, self._call, self._tables = run, call, (cos, sin)  # kept: the fields have their addresses

    def __call__(
        self, heads: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, *norm_weights: torch.Tensor
    ) -> None:
        fields = self.fields
        fields.heads = heads.data_ptr()
        if norm_weights:
            fields.query_weight, fields.key_weight = (weight.data_ptr() for weight in norm_weights)
        if self.stores:
            fields.key_cache, fields.value_cache = key_cache.data_ptr(), value_cache.data_ptr()
        if result := self._run(fields):
            raise cache_error(result, key_cache, self.outside(key_cache))
        if not self.stores:  # 8-bit floats
            call = replace(self._call, heads=heads, key_cache=key_cache, value_cache=value_cache)
            write_by_index(call.as_write())

    def outside(self, key_cache: torch.Tensor) -> str:
        """The numbers that may be outside of the cache."""
        return slots_outside(self._call.slots, key_cache)


def _dtype_number(dtype: torch.dtype) -> int:
    if dtype not in CPP_DTYPES:
        raise KernelError(f"there is no kernel for {dtype}")
    return CPP_DTYPES[dtype]


def slots_outside(slots: torch.Tensor, key_cache: torch.Tensor) -> str:
    return f"slots from {int(slots.min())} to {int(slots.max())}, of {len(key_cache) * key_cache.shape[1]}"


_UNSUPPORTED, _OUTSIDE = 1, 2  # `Result` of call.h


def cache_error(result: int, key_cache: torch.Tensor, wrong: str) -> KernelError:
    """The error of a call of C++ that read and wrote nothing."""
    if result == _UNSUPPORTED:
        return KernelError(f"attention provider cpu: this processor lacks instructions for {key_cache.dtype}")
    if result == _OUTSIDE:
        return KernelError(f"attention provider cpu: the call exceeds its cache {list(key_cache.shape)}: {wrong}")
    return KernelError(
        f"attention provider cpu: no memory is mapped at {key_cache.data_ptr():#x} for the cache "
        f"{list(key_cache.shape)}; its memory has been closed"
    )
