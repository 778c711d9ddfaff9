"""Operations between the matrix products of a layer: their interface, and its values."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from folio.kernels.errors import KernelError
from folio.kernels.provider import CacheScales, CacheWrite

Activation = Literal["silu", "gelu", "gelu_tanh"]
ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu", "gelu_tanh")


class WriteLayer(Protocol):
    """`RotaryWrite` for another layer; with weights of the query's and the key's norm if the call has norms."""

    def __call__(
        self, heads: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, *norm_weights: torch.Tensor
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """RMS norm of each head, `x / rms(x) * (weight + offset)`; `weight [head_dim]`."""

    weight: torch.Tensor
    eps: float
    offset: float = 0.0


@dataclass(frozen=True, slots=True)
class RotaryWrite:
    """Arguments of `Elementwise.prepare_rotary_write`. Raises `ValueError` unless they fit together.

    Attributes:
        heads: `[num_tokens, num_q_heads + 2 * num_kv_heads, head_dim]`, stride 1 along the head: queries, keys, values.
        cos, sin: `[..., num_tokens, rotary_dim]`, or `[..., num_tokens, rotary_dim / 2]` where both elements of a pair
            have the same.
        rotary_dim: the first elements of each head that are rotated, pairs `rotary_dim / 2` apart.
        key_cache, value_cache, slots, scales: as in `AttentionProvider.write`.
        query_norm, key_norm: norms before the rotation; both or neither.
    """

    heads: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    rotary_dim: int
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    slots: torch.Tensor
    query_norm: HeadNorm | None = None
    key_norm: HeadNorm | None = None
    scales: CacheScales | None = None

    def __post_init__(self) -> None:
        heads, cos, sin, dim = self.heads, self.cos, self.sin, self.rotary_dim
        if heads.ndim != 3 or heads.stride(2) != 1:
            raise ValueError(f"heads {list(heads.shape)} with strides {heads.stride()} are not [tokens, heads, dim]")
        if self.num_q_heads < 1:
            raise ValueError(f"heads {list(heads.shape)} leave no query beside {self.num_kv_heads} keys and values")
        self.as_write()  # checks keys, values, caches and slots
        if dim % 2 or not 0 < dim <= heads.shape[2]:
            raise ValueError(f"rotary_dim {dim} must be even and within 2 … {heads.shape[2]}, the size of a head")
        if cos.shape != sin.shape or cos.shape[-1] not in (dim, dim // 2) or cos[..., 0].numel() != len(heads):
            raise ValueError(
                f"cos {list(cos.shape)} and sin {list(sin.shape)} are not for {len(heads)} tokens and rotary_dim {dim}"
            )
        if cos.dtype != heads.dtype or sin.dtype != heads.dtype:
            raise ValueError(f"cos {cos.dtype} and sin {sin.dtype} for heads of {heads.dtype}")
        if (self.query_norm is None) != (self.key_norm is None):
            raise ValueError("only one of query_norm and key_norm is given; give both or neither")
        for norm in (self.query_norm, self.key_norm):
            if norm is not None and (norm.weight.shape != heads.shape[2:] or norm.weight.dtype != heads.dtype):
                raise ValueError(
                    f"a norm's weight {list(norm.weight.shape)} {norm.weight.dtype} for heads {list(heads.shape)} "
                    f"{heads.dtype}"
                )

    @property
    def num_kv_heads(self) -> int:
        return self.key_cache.shape[2]

    @property
    def num_q_heads(self) -> int:
        return self.heads.shape[1] - 2 * self.num_kv_heads

    def as_write(self) -> CacheWrite:
        """The write of these keys and values as they are."""
        key, value = self.heads[:, self.num_q_heads :].split(self.num_kv_heads, dim=1)
        return CacheWrite(key, value, self.key_cache, self.value_cache, self.slots, self.scales)


class Elementwise(Protocol):
    """Norms, gated activations, and the rotary embedding with the cache write. Each is one launch, computed in float32
    and rounded once. Tensors of a call have one dtype: float32, bfloat16 or float16.

    Methods raise `ValueError` if tensors do not fit, and `KernelError` for other dtypes.
    """

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0) -> torch.Tensor:
        """`x / rms(x) * (weight + offset)` over the last dimension; `x [..., size]`, `weight [size]`."""
        ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum `residual + x`, rounded, and its `rms_norm`; both inputs `[..., size]`."""
        ...

    def rms_norm_add(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0
    ) -> torch.Tensor:
        """`residual + rms_norm(x)`; both inputs `[..., size]`."""
        ...

    def gate(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        """`activation(gate) * up` of `gate_up [..., 2 * size]`, gates first; returns `[..., size]`."""
        ...

    def prepare_rotary_write(self, call: RotaryWrite) -> WriteLayer:
        """A function that norms and rotates queries and keys, queries in place, and stores keys and values at the
        call's slots. Keys in `heads` may or may not change.

        The function takes tensors of any of one step's layers, with the shapes, strides and dtypes of the call's, and
        does not check them again. It keeps the call's other tensors.

        Raises:
            KernelError: by the function too, which may check that the slots are within the cache.
        """
        ...


def select_elementwise(device: torch.device, *, dependent: bool = False) -> Elementwise:
    """The operations for a device, Triton's or C++.

    Args:
        dependent: a kernel's programs start while the kernel before drains (`folio.kernels.triton.dependent`).

    Raises:
        KernelError: Triton is not installed, there is no compiler, or the device has no dependent launches.
    """
    if device.type == "cpu" and not dependent:
        cpu: Elementwise = importlib.import_module("folio.kernels.cpu.ops").CpuElementwise()
        return cpu
    try:
        if dependent and (reason := importlib.import_module("folio.kernels.triton.dependent").unsupported(device)):
            raise KernelError(f"there are no dependent launches: {reason}")
        ops: Elementwise = importlib.import_module("folio.kernels.triton.elementwise").TritonElementwise(
            dependent=dependent
        )
    except ImportError as error:
        raise KernelError(f"fused layers on {device.type} need the package triton: {error}") from error
    return ops
