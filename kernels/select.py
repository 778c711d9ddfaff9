"""Choice of an attention provider: a table by device and phase, consulted for each new shape."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping, Sequence

import torch

from folio.kernels.errors import KernelError
from folio.kernels.provider import AttendLayer, AttentionCall, AttentionProvider, CacheWrite, StoreLayer

logger = logging.getLogger(__name__)

# Module and class of each provider, imported on first use.
_CLASSES = {
    "cpu": ("folio.kernels.cpu.provider", "CpuProvider"),
    "triton": ("folio.kernels.triton.provider", "TritonProvider"),
    "torch-flash": ("folio.kernels.torch_flash", "TorchFlashProvider"),
    "sdpa": ("folio.kernels.reference", "SdpaProvider"),
    "reference": ("folio.kernels.reference", "ReferenceProvider"),
}
_DEVICES = {  # the others run on any device
    "cpu": ("cpu",),
    "triton": ("cuda",),
    "torch-flash": ("cuda",),
}
# Order in which "auto" tries providers, by device and by whether the batch only decodes. On CUDA the order is not
# measured yet. Triton decodes because it reads any block size and interleaved caches; torch's flash attention prefills
# because it is the baseline for Triton.
_PREFERENCE: Mapping[tuple[str, bool], Sequence[str]] = {
    ("cpu", True): ("cpu", "sdpa", "reference"),
    ("cpu", False): ("cpu", "sdpa", "reference"),
    ("cuda", True): ("triton", "torch-flash", "sdpa", "reference"),
    ("cuda", False): ("torch-flash", "triton", "sdpa", "reference"),
}

# Those that can give each query's sums one order, whatever is computed beside it.
BATCH_INVARIANT = ("cpu", "triton")
PROVIDERS = ("auto", *_CLASSES)


def select_provider(name: str, device: torch.device, *, batch_invariant: bool = False) -> AttentionProvider:
    """The provider called `name`; "auto" chooses by shape.

    Args:
        batch_invariant: a query's result does not depend on what is computed beside it.

    Raises:
        KernelError: the name is unknown, or that provider cannot run here, or cannot be invariant.
    """
    if name not in PROVIDERS:
        raise KernelError(f"attention {name!r} is unknown; choose one of {', '.join(PROVIDERS)}")
    if batch_invariant and name not in ("auto", *BATCH_INVARIANT):
        choices = ", ".join(BATCH_INVARIANT)
        raise KernelError(f"attention {name} is not batch-invariant; choose one of {choices}")
    if name == "auto":
        return AutoProvider(device.type, batch_invariant=batch_invariant)
    if device.type not in _DEVICES.get(name, (device.type,)):
        others = ", ".join(n for n in _CLASSES if device.type in _DEVICES.get(n, (device.type,)))
        raise KernelError(f"attention {name} cannot run on {device.type}; choose one of {others}")
    return _make(name, batch_invariant)


class AutoProvider(AttentionProvider):
    """For each shape, the first available provider of the table that supports it. Logs the choice once per shape.

    Args:
        batch_invariant: only providers that are.

    Raises:
        KernelError: `device_type` is neither "cpu" nor "cuda", or no provider is available.
    """

    name = "auto"

    def __init__(self, device_type: str, *, batch_invariant: bool = False) -> None:
        self._device_type = device_type
        self._available: dict[str, AttentionProvider] = {}
        orders = [order for (device, _), order in _PREFERENCE.items() if device == device_type]
        if not orders:
            raise KernelError(f"attention auto does not know the device {device_type}; choose reference or sdpa")
        reasons = []
        for name in dict.fromkeys(name for order in orders for name in order):
            if batch_invariant and name not in BATCH_INVARIANT:
                continue
            try:
                self._available[name] = _make(name, batch_invariant)
            except KernelError as error:
                first = any(order[0] == name for order in orders)
                logger.log(
                    logging.WARNING if first else logging.DEBUG,
                    "attention provider %s is not available: %s",
                    name,
                    error,
                )
                reasons.append(f"{name}: {error}")
        if not self._available:
            raise KernelError(f"no attention provider for {device_type} is available: {'; '.join(reasons)}")
        self._writer = next(iter(self._available.values()))
        self._chosen: dict[tuple[object, ...], AttentionProvider] = {}  # by `AttentionCall.kind`

    def unsupported(self, call: AttentionCall) -> str | None:
        reasons = []
        for name in self._order(call):
            reason = self._available[name].unsupported(call)
            if reason is None:
                return None
            reasons.append(f"{name}: {reason}")
        return "; ".join(reasons)

    def run_write(self, new: CacheWrite) -> None:
        self._writer.run_write(new)

    def run_attend(self, call: AttentionCall) -> torch.Tensor:
        return self._chosen_for(call).run_attend(call)

    def prepare_write(self, new: CacheWrite) -> StoreLayer:
        return self._writer.prepare_write(new)

    def prepare_attend(self, call: AttentionCall) -> AttendLayer:
        return self._chosen_for(call).prepare_attend(call)

    def _chosen_for(self, call: AttentionCall) -> AttentionProvider:
        kind = call.kind
        if kind not in self._chosen:
            self._chosen[kind] = self._choose(call)
        return self._chosen[kind]

    def _order(self, call: AttentionCall) -> list[str]:
        order = _PREFERENCE[self._device_type, call.batch.max_seqlen_q <= 1]
        return [name for name in order if name in self._available]

    def _choose(self, call: AttentionCall) -> AttentionProvider:
        """Choose the first provider that supports the call, with a warning if it is slow."""
        name = next((name for name in self._order(call) if self._available[name].unsupported(call) is None), None)
        if name is None:
            raise KernelError(f"no attention provider supports this call: {self.unsupported(call)}")
        first = next(iter(self._available))
        reason = self._available[first].unsupported(call)
        if reason is not None and name in ("sdpa", "reference"):
            logger.warning("attention falls back to %s, many times slower than %s: %s", name, first, reason)
        else:
            logger.debug("attention provider %s for %s", name, call.kind)
        return self._available[name]


def _make(name: str, batch_invariant: bool) -> AttentionProvider:
    module, cls = _CLASSES[name]
    options = {"batch_invariant": True} if batch_invariant else {}
    provider: AttentionProvider = getattr(importlib.import_module(module), cls)(**options)
    return provider
