"""Attention over cached keys and values. Knows nothing of pages, requests or Ray: tensors in, tensors out."""

from kernels.attention import PROVIDERS, select_provider
from kernels.elementwise import CpuElementwise
from kernels.provider import AttentionProvider, KernelError, Masking, VarlenBatch

__all__ = [
    "PROVIDERS",
    "AttentionProvider",
    "CpuElementwise",
    "KernelError",
    "Masking",
    "VarlenBatch",
    "select_provider",
]
