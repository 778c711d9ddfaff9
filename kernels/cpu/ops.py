"""Operations in C++ beside attention: linear layers with packed weights, row-wise layer operations."""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass, replace
from typing import Any

import torch

from folio.kernels.cpu.build import build_name, load_function
from folio.kernels.elementwise import ACTIVATIONS, Activation, Elementwise, RotaryWrite, WriteLayer
from folio.kernels.errors import KernelError
from folio.kernels.reference import write_by_index

_POINTER, _INT64, _INT32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
_INT, _FLOAT = ctypes.c_int, ctypes.c_float

# Numbers of the dtypes in C++.
CPP_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

_TILE = 32  # outputs that the kernel computes together
_WORD_BYTES = 4
_HUGE_PAGE = 2 << 20
AVX512_PRODUCTS = "linear"
# Libraries with products, the faster first: of AVX-512, bfloat16 with BF16; in float32, of AVX2 with FMA or Arm's NEON.
_PRODUCTS = (AVX512_PRODUCTS, "linear_float")
_PACKED_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A weight `[outputs, inputs]` in the kernel's order.

    Attributes:
        scales: `[outputs]` float32, factors of 8-bit weights; `None` for weights of the dtype itself.
        dtype: of inputs, biases and results.
        library: whose products read this order.
    """

    data: torch.Tensor
    scales: torch.Tensor | None
    outputs: int
    inputs: int
    dtype: torch.dtype
    library: str

    @property
    def nbytes(self) -> int:
        """Bytes of the data and scales."""
        return self.data.nbytes + (0 if self.scales is None else self.scales.nbytes)


class _Product:
    """The functions of one library of products."""

    def __init__(self, name: str, march: str) -> None:
        self.library = name
        self.build = build_name(name, march)
        self.supports = load_function(name, "folio_linear_supports", _INT, result=_INT, march=march)
        self.pack = load_function(name, "folio_linear_pack", _INT, *[_POINTER] * 3, *[_INT64] * 2, march=march)
        self.multiply = load_function(name, "folio_linear", _INT, *[_POINTER] * 6, *[_INT64] * 3, march=march)


def address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class CpuLinear:
    """`x @ weight.T + bias`, summed in float32; weights in float32, bfloat16, or 8-bit integers with a scale per
    output. A row's result depends neither on other rows nor on the number of threads.

    Args:
        march: the compiler's name of the processor.

    Raises:
        KernelError: the library cannot be compiled.
    """

    def __init__(self, march: str = "native") -> None:
        self._products: dict[torch.dtype, _Product] = {}
        for name in _PRODUCTS:
            if missing := [dtype for dtype in _PACKED_DTYPES if dtype not in self._products]:
                product = _Product(name, march)
                self._products |= {dtype: product for dtype in missing if product.supports(CPP_DTYPES[dtype])}

    def unsupported(self, dtype: torch.dtype) -> str | None:
        """The reason why weights of this dtype cannot be packed, as a sentence; `None` if they can."""
        if dtype not in _PACKED_DTYPES:
            return f"there is no kernel for {dtype}"
        return None if dtype in self._products else "the processor lacks AVX2 with FMA"

    def build(self, dtype: torch.dtype) -> str:
        """A name of the library for a supported dtype. Weights packed under the same name have the same order."""
        return self._products[dtype].build

    def pack(self, weight: torch.Tensor, *, int8: bool = False) -> PackedWeight:
        """Copy `weight [outputs, inputs]` for `__call__`.

        Args:
            weight: on torch's meta device the result is there, too.
            int8: round to 8-bit integers, scaled so that each output's largest weight is 127.

        Raises:
            KernelError: `unsupported` gives a reason.
        """
        reason = self.unsupported(weight.dtype)
        if reason:
            raise KernelError(f"a weight of {weight.dtype} cannot be packed: {reason}")
        product, weight = self._products[weight.dtype], weight.contiguous()
        outputs, inputs = weight.shape
        num_bytes = -(-outputs // _TILE) * _TILE * _words(inputs, weight.dtype) * _WORD_BYTES
        if int8:
            num_bytes //= weight.element_size()
        data = torch.empty(num_bytes, dtype=torch.uint8, device="meta") if weight.is_meta else on_huge_pages(num_bytes)
        scales = torch.empty(outputs, device=weight.device) if int8 else None
        if not weight.is_meta:
            pointers = weight.data_ptr(), data.data_ptr(), address(scales)
            product.pack(CPP_DTYPES[weight.dtype], *pointers, outputs, inputs)
        return PackedWeight(data, scales, outputs, inputs, weight.dtype, product.library)

    def __call__(self, x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
        """`x [..., inputs]`, `bias [outputs]`; returns `[..., outputs]`, all of the weight's dtype."""
        if x.shape[-1] != weight.inputs or x.dtype != weight.dtype:
            raise ValueError(f"x {list(x.shape)} {x.dtype} for {weight.inputs} inputs of {weight.dtype}")
        if bias is not None and (bias.shape != (weight.outputs,) or bias.dtype != x.dtype or bias.stride(0) != 1):
            raise ValueError(f"bias {list(bias.shape)} {bias.dtype} for {weight.outputs} outputs of {weight.dtype}")
        x = x.contiguous()
        rows = x.numel() // weight.inputs
        out = x.new_empty(*x.shape[:-1], weight.outputs)
        if rows == 0:
            return out
        panels = torch.empty(rows * (weight.inputs + 1), dtype=torch.int32)
        pointers = (address(tensor) for tensor in (x, weight.data, weight.scales, bias, out, panels))
        self._products[x.dtype].multiply(CPP_DTYPES[x.dtype], *pointers, rows, weight.outputs, weight.inputs)
        return out


def _words(inputs: int, dtype: torch.dtype) -> int:
    return -(-inputs * dtype.itemsize // _WORD_BYTES)


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
        same_dtype: the caches have the dtype of the heads.
    """

    def __init__(self, run: Any, call: RotaryWrite) -> None:
        heads, key_cache, value_cache, slots = call.heads, call.key_cache, call.value_cache, call.slots
        cos, sin = call.cos.contiguous(), call.sin.contiguous()
        query_norm, key_norm = call.query_norm, call.key_norm
        self.same_dtype = key_cache.dtype == heads.dtype
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
            heads.element_size(),
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
        if self.same_dtype:
            fields.key_cache, fields.value_cache = key_cache.data_ptr(), value_cache.data_ptr()
        if result := self._run(fields):
            raise cache_error(result, key_cache, self.outside(key_cache))
        if not self.same_dtype:  # 8-bit floats
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
