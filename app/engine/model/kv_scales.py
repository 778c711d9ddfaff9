"""KV caches of 8 bits. Scales of 8-bit floats: the checkpoint's, or measured in one forward.

An 8-bit float has the same relative precision at every size, so that a scale only has to keep values within the range:
the largest one measured becomes half of the largest number, which leaves room for larger ones, and far smaller values
stay above the smallest. Values beyond the range are clipped. Rows in int8 have their own scales
(`folio.kernels.int8_cache`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import safe_open

from folio.app.config.engine import KVDtype
from folio.app.engine.layers.attention import AttentionHandler
from folio.kernels import CacheScales, Masking, int8_cache
from folio.vmem import LayerSpec

FP8_DTYPES: Mapping[KVDtype, torch.dtype] = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
_DTYPES = {**FP8_DTYPES, "int8": torch.int8}
# Tokens of the measured forward: random, and always the same.
MEASURED_TOKENS = 256
_MARGIN = 2.0
# A scale of a layer's keys or values in a checkpoint, by the names of llm-compressor, ModelOpt and vLLM.
_STORED = re.compile(r"\.layers\.(\d+)\.self_attn\.(?:attn\.|[kv]_proj\.)?([kv])_scale$")

# Layer → scale of its keys, scale of its values, for all heads.
StoredScales = Mapping[int, tuple[float, float]]


def cache_dtype(kv_dtype: KVDtype, model_dtype: torch.dtype) -> torch.dtype:
    """The dtype of the KV cache."""
    return _DTYPES.get(kv_dtype, model_dtype)


def has_scales(cache_dtype: torch.dtype) -> bool:
    """True if a cache of this dtype has scales for each layer's heads."""
    return cache_dtype in FP8_DTYPES.values()


def cached_spec(spec: LayerSpec, cache_dtype: torch.dtype) -> LayerSpec:
    """A layer's geometry in the cache, from that of its keys and values."""
    if cache_dtype != torch.int8:
        return spec
    return LayerSpec(spec.num_heads, int8_cache.row_bytes(spec.key_dim), int8_cache.row_bytes(spec.value_dim))


def stored_scales(weight_files: Iterable[Path]) -> dict[int, tuple[float, float]]:
    """Scales of a checkpoint: of layers that have one number for the keys and one for the values."""
    found: dict[int, dict[str, float]] = {}
    for path in weight_files:
        if path.suffix != ".safetensors":
            continue
        with safe_open(path, "pt", backend="pread") as weights:
            for name in weights.keys():  # noqa: SIM118 - no mapping
                if (match := _STORED.search(name)) and (scale := weights.get_tensor(name)).numel() == 1:
                    found.setdefault(int(match[1]), {})[match[2]] = float(scale)
    return {layer: (scales["k"], scales["v"]) for layer, scales in found.items() if scales.keys() == {"k", "v"}}


def measured_tokens(vocab_size: int, max_positions: int) -> torch.Tensor:
    """The tokens of the forward that is measured."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocab_size, (min(MEASURED_TOKENS, max_positions),), generator=generator)


class RoundingProbe(AttentionHandler):
    """Rounds the call's keys and values as a cache of 8 bits does; another handler computes the attention."""

    def __init__(self, handler: AttentionHandler, dtype: torch.dtype, scales: Mapping[int, CacheScales]) -> None:
        self._handler, self._dtype, self._scales = handler, dtype, scales

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, masking: Masking
    ) -> torch.Tensor:
        if (scales := self._scales.get(layer)) is None:
            key, value = (int8_cache.dequantise(int8_cache.quantise(new), new.dtype) for new in (key, value))
        else:
            key, value = self._rounded(key, scales.key), self._rounded(value, scales.value)
        return self._handler.attend(layer, query, key, value, masking)

    def _rounded(self, new: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        most = torch.finfo(self._dtype).max
        cached = (new.float() / scale[:, None]).clamp(-most, most).to(self._dtype)
        return (cached.float() * scale[:, None]).to(new.dtype)


class ScaleProbe(AttentionHandler):
    """Records the largest keys and values of each layer's KV heads; another handler computes the attention."""

    def __init__(self, handler: AttentionHandler) -> None:
        self._handler = handler
        self._largest: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, masking: Masking
    ) -> torch.Tensor:
        self._largest[layer] = (key.abs().amax(dim=(0, 2)).float(), value.abs().amax(dim=(0, 2)).float())
        return self._handler.attend(layer, query, key, value, masking)

    def scales(self, dtype: torch.dtype) -> dict[int, CacheScales]:
        """Scales of each layer for a cache of this dtype; 1 for heads that were 0 or infinite throughout."""
        most = torch.finfo(dtype).max

        def scale(largest: torch.Tensor) -> torch.Tensor:
            usable = largest.isfinite() & (largest > 0)
            return torch.where(usable, largest * (_MARGIN / most), 1.0)

        return {layer: CacheScales(scale(key), scale(value)) for layer, (key, value) in self._largest.items()}
