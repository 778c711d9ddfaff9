"""Attention over a KV cache, block copies and CPU products: tensors in, tensors out."""

from kernels.attention import flash_attn_with_kvcache, varlen_attention
from kernels.blocks import CopyBlocks, select_block_copy
from kernels.cpu.build import has_matrix_tiles
from kernels.cpu.ops import CpuElementwise, CpuLinear
from kernels.provider import AttentionProvider, CacheScales, KernelError, Masking, VarlenBatch
from kernels.select import PROVIDERS, select_provider

__all__ = [
    "PROVIDERS",
    "AttentionProvider",
    "CacheScales",
    "CopyBlocks",
    "CpuElementwise",
    "CpuLinear",
    "KernelError",
    "Masking",
    "VarlenBatch",
    "flash_attn_with_kvcache",
    "has_matrix_tiles",
    "select_block_copy",
    "select_provider",
    "varlen_attention",
]
