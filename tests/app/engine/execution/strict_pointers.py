"""Triton's rule about addresses, for runs over a fake CUDA driver.

Triton's launcher asks the driver about the address of each tensor argument (`cuPointerGetAttribute`) and refuses one
behind which nothing is mapped, whether or not the kernel would read it.
"""

from __future__ import annotations

from typing import Any

import torch

from folio.kernels import AttentionProvider, CopyBlocks, VarlenBatch
from folio.kernels.provider import AttendLayer, AttentionCall, CacheWrite, StoreLayer


def check_pointers(driver: Any, what: str, **tensors: torch.Tensor | None) -> None:
    """Add a violation for each tensor that begins in a range reserved from `driver` where nothing is mapped. Memory
    from elsewhere is torch's own. Nothing is raised: a traceback would print the tensors, holes included."""
    attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_POINTER
    for name, tensor in tensors.items():
        if tensor is None or not tensor.numel() or not driver.is_reserved(tensor.data_ptr()):
            continue
        status, *_ = driver.cuPointerGetAttribute(attribute, tensor.data_ptr())
        if status != driver.CUresult.CUDA_SUCCESS:
            driver.violations.append(f"{what}: nothing is mapped at {tensor.data_ptr():#x}, where {name} begins")


class StrictProvider:
    """An attention provider that records pointers that Triton would refuse, before it calls another provider."""

    name = "strict"

    def __init__(self, provider: AttentionProvider, driver: Any) -> None:
        self._provider = provider
        self._driver = driver

    def attend(self, *arguments: Any) -> torch.Tensor:
        self._check_attend(arguments[3], *arguments[:3])
        return self._provider.attend(*arguments)

    def prepare_write(self, new: CacheWrite) -> StoreLayer:
        write = self._provider.prepare_write(new)

        def checked(*tensors: torch.Tensor) -> None:
            names = ("key", "value", "key_cache", "value_cache")
            check_pointers(self._driver, "write", **dict(zip(names, tensors, strict=True)), slots=new.slots)
            write(*tensors)

        return checked

    def prepare_attend(self, call: AttentionCall) -> AttendLayer:
        attend = self._provider.prepare_attend(call)

        def checked(*tensors: torch.Tensor) -> torch.Tensor:
            self._check_attend(call.batch, *tensors)
            return attend(*tensors)

        return checked

    def _check_attend(
        self, batch: VarlenBatch, query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor
    ) -> None:
        in_batch = {name: getattr(batch, name) for name in ("cu_seqlens_q", "cache_seqlens", "block_table")}
        check_pointers(self._driver, "attend", query=query, key_cache=key_cache, value_cache=value_cache, **in_batch)


def strict_copy(copy: CopyBlocks, driver: Any) -> CopyBlocks:
    """The block copy, with a record of pointers that Triton would refuse."""

    def checked(
        source: torch.Tensor, target: torch.Tensor, source_rows: torch.Tensor, target_rows: torch.Tensor
    ) -> None:
        rows = {"source_rows": source_rows, "target_rows": target_rows}
        check_pointers(driver, "copy", source=source, target=target, **rows)
        copy(source, target, source_rows, target_rows)

    return checked
