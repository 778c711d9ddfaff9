"""Attention: the bridge between the attention layers of a transformers model and Folio's kernels.

transformers calls the registered function once per layer. The function finds its engine's handler on the module, so
that several engines can live in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import nn
from transformers import AttentionInterface

from folio.app.engine.layers.batch import BatchPart, StepBatch
from folio.app.errors import ModelError
from folio.kernels import AttentionProvider, CacheScales, Elementwise, HeadNorm, Masking, RotaryWrite, VarlenBatch
from folio.kernels.provider import AttendLayer, AttentionCall, CacheWrite
from folio.vmem import CacheTensors, LayerSpec, View

IMPLEMENTATION = "folio"
_HANDLER = "folio_attention_handler"
_ALIGNMENT = 16  # bytes, by which kernels are specialised


@dataclass(frozen=True, eq=False)
class RotaryLayer:
    """An attention layer whose rotation and cache write are one operation.

    Attributes:
        rotary_dim, query_norm, key_norm: as in `RotaryWrite`; both norms or neither.
    """

    layer: int
    ops: Elementwise
    num_q_heads: int
    num_kv_heads: int
    rotary_dim: int
    masking: Masking
    query_norm: HeadNorm | None = None
    key_norm: HeadNorm | None = None

    @cached_property
    def norm_weights(self) -> tuple[torch.Tensor, ...]:
        norms = (self.query_norm, self.key_norm)
        return tuple(norm.weight for norm in norms if norm is not None)

    @property
    def kind(self) -> tuple[object, ...]:
        """Equal for layers that differ only in their tensors."""
        norms = [(norm.eps, norm.offset) for norm in (self.query_norm, self.key_norm) if norm is not None]
        return self.ops, self.num_q_heads, self.num_kv_heads, self.rotary_dim, *norms, *_masking_kind(self.masking)

    def rotated(
        self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value of `AttentionHandler.attend`, from the arguments of `attend_rotary`."""
        keys, values = heads.new_empty(2, 1, len(heads), self.num_kv_heads, heads.shape[2])
        slots = torch.arange(len(heads), device=heads.device)
        call = RotaryWrite(heads, cos, sin, self.rotary_dim, keys, values, slots, self.query_norm, self.key_norm)
        self.ops.prepare_rotary_write(call)(heads, keys, values, *self.norm_weights)
        return heads[:, : self.num_q_heads], keys[0], values[0]


class AttentionHandler(Protocol):
    """Computes the attention of a layer."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, masking: Masking
    ) -> torch.Tensor:
        """Query `[num_tokens, num_q_heads, key_dim]`, key and value of the same new tokens `[num_tokens,
        num_kv_heads, dim]`; returns `[num_tokens, num_q_heads, value_dim]`."""
        ...

    def attend_rotary(
        self, layer: RotaryLayer, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        """`attend` with queries, keys and values side by side in `heads [num_tokens, num_heads, dim]`, before norms and
        rotation; `cos` and `sin` as in `RotaryWrite`. Overwrites `heads`."""
        return self.attend(layer.layer, *layer.rotated(heads, cos, sin), layer.masking)


def folio_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: query `[1, heads, tokens, dim]`; returns `[1, tokens, heads, dim]`."""
    masking = Masking(
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window_left=-1 if sliding_window is None else sliding_window - 1,  # transformers counts the query's own token
        softcap=softcap or 0.0,
        sinks=None if s_aux is None else s_aux.float().contiguous(),
    )
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    layer: int = module.layer_idx  # type: ignore[assignment]
    handler = bound(module)
    assert handler is not None
    return handler.attend(layer, query, key, value, masking)[None], None


def register() -> None:
    """Register `attn_implementation="folio"`. Without a mask function transformers builds no masks."""
    AttentionInterface.register(IMPLEMENTATION, folio_attention)


def bind_attention(model: nn.Module, handler: AttentionHandler | None) -> None:
    """Let `handler` compute the attention of every layer; `None` before transformers' own attention is used."""
    for module in model.modules():
        setattr(module, _HANDLER, handler)


def bound(module: nn.Module) -> AttentionHandler | None:
    """The handler of a layer."""
    return getattr(module, _HANDLER, None)


class GeometryProbe(AttentionHandler):
    """Attention over the call's own tokens only; records each layer's geometry, which configs name in many ways."""

    def __init__(self, provider: AttentionProvider) -> None:
        self._provider = provider
        self._specs: dict[int, list[LayerSpec]] = {}
        self.windows: dict[int, int] = {}  # layer → tokens that a query sees, its own included

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, masking: Masking
    ) -> torch.Tensor:
        self._specs.setdefault(layer, []).append(LayerSpec(key.shape[1], key.shape[2], value.shape[2]))
        if masking.window_left >= 0:
            self.windows[layer] = masking.window_left + 1
        num_tokens = torch.tensor([len(query)], dtype=torch.int32)
        starts = torch.tensor([0, len(query)], dtype=torch.int32)
        batch = VarlenBatch(starts, num_tokens, torch.zeros(1, 1, dtype=torch.int32), len(query), len(query))
        return self._provider.attend(query, key[None], value[None], batch.to(query.device), masking)

    def layers(self, *, required: frozenset[int], allowed: frozenset[int]) -> dict[int, LayerSpec]:
        """The geometry of every attention layer, after one forward.

        Raises `ModelError` unless all `required` layers and only `allowed` ones attended, each once.
        """
        calls = {layer: len(specs) for layer, specs in sorted(self._specs.items())}
        if not required <= calls.keys() <= allowed or any(count > 1 for count in calls.values()):
            raise ModelError(
                f"{sum(calls.values())} attention calls from layers {sorted(calls)} in one forward of a model that "
                f"should attend in layers {sorted(required)}: it does not run all of its attention through "
                "transformers' AttentionInterface"
            )
        return {layer: specs[0] for layer, specs in sorted(self._specs.items())}


# (tensors of a layer's new tokens, key cache, value cache)
_Write = Callable[..., None]


@dataclass(frozen=True, slots=True)
class PreparedPart:
    """A part of a step, prepared for all layers of one kind.

    Attributes:
        tokens: the part's tokens in the step; `None` for all of them.
    """

    view: View
    tokens: slice | None
    write: _Write
    attend: AttendLayer

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.tokens is None else tensor[self.tokens]


class CachedAttention:
    """Attention over the KV cache: write the new tokens, then attend over all cached ones. Set `batch` before each
    forward.

    Calls are checked and prepared once per step for all layers of one kind: with tensors of equal shapes, strides and
    alignment, and with equal masks. Each layer with scales is a kind of its own.

    Args:
        scales: scales of each layer's cache of 8-bit floats.
    """

    def __init__(
        self, tensors: CacheTensors, provider: AttentionProvider, scales: Mapping[int, CacheScales] | None = None
    ) -> None:
        self._provider = provider
        self._scales = scales or {}
        layers = [layer for group in tensors.groups for layer in group.layers]
        self._group_of = {layer: tensors.group_of(layer) for layer in layers}
        self._caches: dict[View, dict[int, tuple[torch.Tensor, torch.Tensor]]] = {
            "region": {layer: tensors.region_view(layer) for layer in layers},
            "block_table": {layer: tensors.home_view(layer) for layer in layers},
        }
        self._numbers: dict[tuple[object, ...], int] = {}
        self._cache_kinds = {layer: self._number(self._cache_kind(layer)) for layer in layers}
        self._rotary_kinds: dict[int, int] = {}
        self._prepared: dict[tuple[object, ...], list[PreparedPart]] = {}

    @property
    def batch(self) -> StepBatch:
        return self._batch

    @batch.setter
    def batch(self, batch: StepBatch) -> None:
        self._batch = batch
        self._prepared.clear()

    def forget_calls(self) -> None:
        """Drop the calls prepared for this step, which keep some of its tensors."""
        self._prepared.clear()

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, masking: Masking
    ) -> torch.Tensor:
        shapes = query.shape, query.stride(), key.shape, key.stride(), value.shape, value.stride()
        kind = self._cache_kinds[layer], query.dtype, *shapes, *_masking_kind(masking)
        parts = self._prepared.get(kind)
        if parts is None:

            def prepare_write(part: BatchPart, keys: torch.Tensor, values: torch.Tensor) -> _Write:
                new = CacheWrite(
                    key[part.tokens], value[part.tokens], keys, values, part.slots, self._scales.get(layer)
                )
                return self._provider.prepare_write(new)

            parts = self._prepared[kind] = self._prepare(layer, query, masking, prepare_write)
        # All writes first: a sequence may share a prefix that another one computes in this step.
        for part in parts:
            part.write(part.of(key), part.of(value), *self._caches[part.view][layer])
        return _joined([part.attend(part.of(query), *self._caches[part.view][layer]) for part in parts])

    def attend_rotary(
        self, layer: RotaryLayer, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        query = heads[:, : layer.num_q_heads]
        parts = self.rotary_parts(layer, heads, cos, sin)
        caches = [self._caches[part.view][layer.layer] for part in parts]
        for part, (keys, values) in zip(parts, caches, strict=True):
            part.write(part.of(heads), keys, values, *layer.norm_weights)
        return _joined([part.attend(part.of(query), *cache) for part, cache in zip(parts, caches, strict=True)])

    def rotary_parts(
        self, layer: RotaryLayer, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> list[PreparedPart]:
        """The prepared parts of `attend_rotary`, one object for all layers of a kind in a step."""
        at = layer.layer
        number = self._rotary_kinds.get(at)
        if number is None:
            number = self._rotary_kinds[at] = self._number((self._cache_kinds[at], *layer.kind))
        kind = number, heads.dtype, heads.shape, heads.stride(), cos.data_ptr()  # layers may have other angles
        parts = self._prepared.get(kind)
        if parts is None:

            def prepare_write(part: BatchPart, keys: torch.Tensor, values: torch.Tensor) -> _Write:
                call = RotaryWrite(
                    heads[part.tokens],
                    cos.reshape(-1, cos.shape[-1])[part.tokens],
                    sin.reshape(-1, sin.shape[-1])[part.tokens],
                    layer.rotary_dim,
                    keys,
                    values,
                    part.slots,
                    layer.query_norm,
                    layer.key_norm,
                    self._scales.get(at),
                )
                return layer.ops.prepare_rotary_write(call)

            query = heads[:, : layer.num_q_heads]
            parts = self._prepared[kind] = self._prepare(at, query, layer.masking, prepare_write)
        return parts

    def cache(self, view: View, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's keys and values in a view."""
        return self._caches[view][layer]

    def _prepare(
        self,
        layer: int,
        query: torch.Tensor,
        masking: Masking,
        prepare_write: Callable[[BatchPart, torch.Tensor, torch.Tensor], _Write],
    ) -> list[PreparedPart]:
        parts = self.batch.parts[self._group_of[layer]]
        prepared = []
        for part in parts:
            keys, values = self._caches[part.view][layer]
            scales = self._scales.get(layer)
            call = AttentionCall(query[part.tokens], keys, values, part.attention, masking, scales)
            write, attend = prepare_write(part, keys, values), self._provider.prepare_attend(call)
            prepared.append(PreparedPart(part.view, part.tokens if len(parts) > 1 else None, write, attend))
        return prepared

    def _number(self, kind: tuple[object, ...]) -> int:
        """A number for each kind: hashing a long key would take microseconds per layer."""
        return self._numbers.setdefault(kind, len(self._numbers))

    def _cache_kind(self, layer: int) -> tuple[object, ...]:
        caches = [cache for view in self._caches.values() for cache in view[layer]]
        geometry = ((cache.dtype, cache.shape, cache.stride(), cache.data_ptr() % _ALIGNMENT) for cache in caches)
        return self._group_of[layer], layer if layer in self._scales else -1, *geometry


def _masking_kind(masking: Masking) -> tuple[object, ...]:
    """Equal for equal masks. Tensors are compared by identity, because prepared calls keep them."""
    numbers = masking.scale, masking.window_left, masking.window_right, masking.softcap
    return *numbers, id(masking.sinks), id(masking.alibi_slopes)


def _joined(outs: list[torch.Tensor]) -> torch.Tensor:
    return outs[0] if len(outs) == 1 else torch.cat(outs)
