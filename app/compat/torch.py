"""Private interfaces of torch. Seen to work: 2.11.0 and 2.13.0."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed
from torch.utils import _python_dispatch

# Sees every operation of torch in its thread. Private, although torch's documentation of extending it names it.
DispatchMode: Any = _python_dispatch.TorchDispatchMode

_Kind = TypeVar("_Kind", bound=torch.Tensor)

_dist: Any = torch.distributed  # only partly annotated


def tensor_without_memory(cls: type[_Kind], like: torch.Tensor) -> _Kind:
    """A tensor of a subclass, with the shape, dtype and device of another one, which must define what functions of it
    do. Private, although torch's documentation of subclasses names it: `Tensor._make_wrapper_subclass`."""
    made: Any = torch.Tensor
    tensor: _Kind = made._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)
    return tensor


def onednn_supports(dtype: torch.dtype) -> bool:
    """Whether this processor has oneDNN products of the dtype.

    Private: `torch.ops.mkldnn._is_mkldnn_bf16_supported` and its sibling for float16; `torch.backends.mkldnn` tells
    only whether oneDNN was built in.
    """
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype == torch.float32


def onednn_pack(weight: torch.Tensor) -> Any:
    """A weight `[outputs, inputs]` in oneDNN's own layout, for `onednn_linear`.

    Private: `torch.ops.mkldnn._reorder_linear_weight`. The public `torch.utils.mkldnn.to_mkldnn` also converts the
    activations, at every call.
    """
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())


def onednn_linear(x: torch.Tensor, packed: Any, bias: torch.Tensor | None) -> torch.Tensor:
    """`x @ weight.T + bias`. Private: `torch.ops.mkldnn._linear_pointwise`, for the reason of `onednn_pack`."""
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return out


def gloo_group(store: Any, rank: int, size: int, host: str, *, join_timeout: timedelta, timeout: timedelta) -> Any:
    """A gloo process group that listens at `host`, apart from torch's default group: a process may have several
    engines.

    Private: `ProcessGroupGloo._Options`, the only way to name the address, and `_set_default_timeout` (2.11 lacks the
    public `set_timeout`), because joining has a shorter timeout than collectives have.
    """
    options = _dist.ProcessGroupGloo._Options()
    options._devices = [_dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = join_timeout
    options._threads = 1
    group = _dist.ProcessGroupGloo(store, rank, size, options)
    group._set_default_timeout(timeout)
    return group


def nccl_group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """An NCCL process group apart from torch's default one. Private: `ProcessGroupNCCL.Options._timeout`."""
    options = _dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return _dist.ProcessGroupNCCL(store, rank, size, options)
