"""Attention: the bridge between the attention layers of a transformers model and Folio's kernels.

transformers calls the registered function once a layer. The function finds its engine's handler on the module, so that
several engines can live in one process.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn
from transformers import AttentionInterface

from app.engine.execution.batch import StepBatch
from app.errors import ModelError
from kernels import AttentionProvider, Masking, VarlenBatch
from vmem import CacheTensors, LayerSpec, View

IMPLEMENTATION = "folio"
_HANDLER = "folio_attention_handler"


class AttentionHandler(Protocol):
    """Computes the attention of a layer."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, masking: Masking
    ) -> torch.Tensor:
        """Query `[num_tokens, num_q_heads, key_dim]`, key and value of the same new tokens `[num_tokens,
        num_kv_heads, dim]`; returns `[num_tokens, num_q_heads, value_dim]`."""
        ...


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


class GeometryProbe:
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


class CachedAttention:
    """Attention over the KV cache: write the new tokens, then attend over all cached ones. Set `batch` before each
    forward."""

    batch: StepBatch

    def __init__(self, tensors: CacheTensors, provider: AttentionProvider) -> None:
        self._provider = provider
        layers = [layer for group in tensors.groups for layer in group.layers]
        self._group_of = {layer: tensors.group_of(layer) for layer in layers}
        self._caches: dict[View, dict[int, tuple[torch.Tensor, torch.Tensor]]] = {
            "region": {layer: tensors.region_view(layer) for layer in layers},
            "block_table": {layer: tensors.home_view(layer) for layer in layers},
        }

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, masking: Masking
    ) -> torch.Tensor:
        parts = [(part, *self._caches[part.view][layer]) for part in self.batch.parts[self._group_of[layer]]]
        # All writes first: a sequence may share a prefix that another one computes in this step.
        for part, keys, values in parts:
            self._provider.write(key[part.tokens], value[part.tokens], keys, values, part.slots)
        outs = [
            self._provider.attend(query[part.tokens], keys, values, part.attention, masking)
            for part, keys, values in parts
        ]
        return outs[0] if len(outs) == 1 else torch.cat(outs)
