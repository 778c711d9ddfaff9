"""Attention over a KV cache, block copies and CPU products: tensors in, tensors out.

Importing the package does not import torch, as in `vmem`: routers need prefix hashing only.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from kernels.compilations import note_compilation, num_compilations
from kernels.cpu.build import has_matrix_tiles
from kernels.errors import KernelError

if TYPE_CHECKING:
    from kernels.attention import flash_attn_with_kvcache, varlen_attention
    from kernels.blocks import CopyBlocks, select_block_copy
    from kernels.cpu.collectives import SharedGroup, shared_group_bytes
    from kernels.cpu.ops import CpuElementwise, CpuLinear
    from kernels.elementwise import Activation, Elementwise, HeadNorm, RotaryWrite, select_elementwise
    from kernels.product import FewRowProduct, select_product
    from kernels.provider import AttentionProvider, CacheScales, Masking, VarlenBatch
    from kernels.select import PROVIDERS, select_provider

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
    "RotaryWrite",
    "SharedGroup",
    "VarlenBatch",
    "flash_attn_with_kvcache",
    "has_matrix_tiles",
    "note_compilation",
    "num_compilations",
    "select_block_copy",
    "select_elementwise",
    "select_product",
    "select_provider",
    "shared_group_bytes",
    "varlen_attention",
]

# Names that are imported at their first use, and their modules.
_NEED_TORCH = {
    "flash_attn_with_kvcache": "kernels.attention",
    "varlen_attention": "kernels.attention",
    "CopyBlocks": "kernels.blocks",
    "select_block_copy": "kernels.blocks",
    "SharedGroup": "kernels.cpu.collectives",
    "shared_group_bytes": "kernels.cpu.collectives",
    "CpuElementwise": "kernels.cpu.ops",
    "CpuLinear": "kernels.cpu.ops",
    "Activation": "kernels.elementwise",
    "Elementwise": "kernels.elementwise",
    "HeadNorm": "kernels.elementwise",
    "RotaryWrite": "kernels.elementwise",
    "select_elementwise": "kernels.elementwise",
    "FewRowProduct": "kernels.product",
    "select_product": "kernels.product",
    "AttentionProvider": "kernels.provider",
    "CacheScales": "kernels.provider",
    "Masking": "kernels.provider",
    "VarlenBatch": "kernels.provider",
    "PROVIDERS": "kernels.select",
    "select_provider": "kernels.select",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _NEED_TORCH:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value = getattr(import_module(_NEED_TORCH[name]), name)
        return value
