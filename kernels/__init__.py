"""Attention over a KV cache, block copies and CPU products: tensors in, tensors out.

Importing the package does not import torch, as in `vmem`: routers need prefix hashing only.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from folio.kernels.compilations import note_compilation, num_compilations
from folio.kernels.errors import KernelError

if TYPE_CHECKING:
    from folio.kernels.attention import flash_attn_with_kvcache, varlen_attention
    from folio.kernels.blocks import CopyBlocks, select_block_copy
    from folio.kernels.cpu.collectives import SharedGroup, shared_group_bytes
    from folio.kernels.cpu.ops import CpuElementwise, CpuLinear
    from folio.kernels.elementwise import Activation, Elementwise, HeadNorm, RotaryWrite, select_elementwise
    from folio.kernels.product import FewRowProduct, PackedProduct, select_packed_product, select_product
    from folio.kernels.provider import AttentionProvider, CacheScales, Masking, VarlenBatch
    from folio.kernels.quantised import QuantisedWeight, quantise, rounded_scales
    from folio.kernels.select import PROVIDERS, select_provider

__all__ = [
    "PROVIDERS",
    "Activation",
    "AttentionProvider",
    "CacheScales",
    "CopyBlocks",
    "CpuElementwise",
    "CpuLinear",
    "Elementwise",
    "FewRowProduct",
    "HeadNorm",
    "KernelError",
    "Masking",
    "PackedProduct",
    "QuantisedWeight",
    "RotaryWrite",
    "SharedGroup",
    "VarlenBatch",
    "flash_attn_with_kvcache",
    "note_compilation",
    "num_compilations",
    "quantise",
    "rounded_scales",
    "select_block_copy",
    "select_elementwise",
    "select_packed_product",
    "select_product",
    "select_provider",
    "shared_group_bytes",
    "varlen_attention",
]

# Names that are imported at their first use, and their modules.
_NEED_TORCH = {
    "flash_attn_with_kvcache": "folio.kernels.attention",
    "varlen_attention": "folio.kernels.attention",
    "CopyBlocks": "folio.kernels.blocks",
    "select_block_copy": "folio.kernels.blocks",
    "SharedGroup": "folio.kernels.cpu.collectives",
    "shared_group_bytes": "folio.kernels.cpu.collectives",
    "CpuElementwise": "folio.kernels.cpu.ops",
    "CpuLinear": "folio.kernels.cpu.ops",
    "Activation": "folio.kernels.elementwise",
    "Elementwise": "folio.kernels.elementwise",
    "HeadNorm": "folio.kernels.elementwise",
    "RotaryWrite": "folio.kernels.elementwise",
    "select_elementwise": "folio.kernels.elementwise",
    "FewRowProduct": "folio.kernels.product",
    "PackedProduct": "folio.kernels.product",
    "select_packed_product": "folio.kernels.product",
    "select_product": "folio.kernels.product",
    "AttentionProvider": "folio.kernels.provider",
    "CacheScales": "folio.kernels.provider",
    "Masking": "folio.kernels.provider",
    "VarlenBatch": "folio.kernels.provider",
    "QuantisedWeight": "folio.kernels.quantised",
    "quantise": "folio.kernels.quantised",
    "rounded_scales": "folio.kernels.quantised",
    "PROVIDERS": "folio.kernels.select",
    "select_provider": "folio.kernels.select",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _NEED_TORCH:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value = getattr(import_module(_NEED_TORCH[name]), name)
        return value
