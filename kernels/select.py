"""Which attention provider to use: a table by device and phase, asked for each new shape."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping, Sequence

import torch

from kernels.provider import (
    AttentionProblem,
    AttentionProvider,
    CacheScales,
    KernelError,
    Masking,
    Rotary,
    VarlenBatch,
    describe_problem,
)

logger = logging.getLogger(__name__)

# Where each provider is; nothing of it is imported before somebody wants it.
_CLASSES = {
    "cpu": ("kernels.cpu.provider", "CpuProvider"),
    "triton": ("kernels.triton.provider", "TritonProvider"),
    "torch-flash": ("kernels.torch_flash", "TorchFlashProvider"),
    "sdpa": ("kernels.reference", "SdpaProvider"),
    "reference": ("kernels.reference", "ReferenceProvider"),
}
_DEVICES = {  # the others run anywhere
    "cpu": ("cpu",),
    "triton": ("cuda",),
    "torch-flash": ("cuda",),
}
# What "auto" tries, best first, by device and by whether every sequence has one query. On CUDA the order is not
# measured yet: Triton decodes because it reads any block size and interleaved caches, torch's flash attention prefills
# because it is the one that Triton would have to equal.
_PREFERENCE: Mapping[tuple[str, bool], Sequence[str]] = {
    ("cpu", True): ("cpu", "sdpa", "reference"),
    ("cpu", False): ("cpu", "sdpa", "reference"),
    ("cuda", True): ("triton", "torch-flash", "sdpa", "reference"),
    ("cuda", False): ("torch-flash", "triton", "sdpa", "reference"),
}

PROVIDERS = ("auto", *_CLASSES)


def select_provider(name: str, device: torch.device) -> AttentionProvider:
    """The provider called `name`; with "auto" one that asks the table for each shape.

    Raises:
        KernelError: the name is unknown, or that provider cannot run here.
    """
    if name not in PROVIDERS:
        raise KernelError(f"attention {name!r} is unknown; choose one of {', '.join(PROVIDERS)}")
    if name == "auto":
        return AutoProvider(device.type)
    if device.type not in _DEVICES.get(name, (device.type,)):
        others = ", ".join(n for n in _CLASSES if device.type in _DEVICES.get(n, (device.type,)))
        raise KernelError(f"attention {name} cannot run on {device.type}; choose one of {others}")
    return _make(name)


class AutoProvider:
    """Takes, for each shape, the first provider of the table that is there and supports it; says once what it takes.

    Args:
        device_type: "cpu" or "cuda".

    Raises:
        KernelError: it is neither.
    """

    name = "auto"

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._available: dict[str, AttentionProvider] = {}
        orders = [order for (device, _), order in _PREFERENCE.items() if device == device_type]
        if not orders:
            raise KernelError(f"there is no attention for {device_type}; choose reference or sdpa by name")
        for name in dict.fromkeys(name for order in orders for name in order):
            try:
                self._available[name] = _make(name)
            except KernelError as error:
                first = any(order[0] == name for order in orders)
                logger.log(logging.WARNING if first else logging.DEBUG, "no attention %s: %s", name, error)
        self._writer = next(iter(self._available.values()))
        self._chosen: dict[AttentionProblem, AttentionProvider] = {}

    def unsupported(self, problem: AttentionProblem) -> str | None:
        reasons = []
        for name in _PREFERENCE[self._device_type, problem.decode]:
            if name in self._available:
                reason = self._available[name].unsupported(problem)
                if reason is None:
                    return None
                reasons.append(f"{name}: {reason}")
        return "; ".join(reasons)

    def write(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slots: torch.Tensor,
        *,
        rotary: Rotary | None = None,
        scales: CacheScales | None = None,
    ) -> None:
        self._writer.write(key, value, key_cache, value_cache, slots, rotary=rotary, scales=scales)

    def attend(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        batch: VarlenBatch,
        masking: Masking,
        *,
        scales: CacheScales | None = None,
        lse: torch.Tensor | None = None,
        num_splits: int = 0,
    ) -> torch.Tensor:
        problem = describe_problem(query, key_cache, value_cache, batch, masking, lse)
        provider = self._chosen.get(problem) or self._choose(problem)
        return provider.attend(
            query, key_cache, value_cache, batch, masking, scales=scales, lse=lse, num_splits=num_splits
        )

    def _choose(self, problem: AttentionProblem) -> AttentionProvider:
        """The first that can; a warning if it is not the first of the table."""
        for name in _PREFERENCE[self._device_type, problem.decode]:
            provider = self._available.get(name)
            if provider is not None and provider.unsupported(problem) is None:
                break
        else:
            raise KernelError(f"no attention for this: {self.unsupported(problem)}")
        first = next(iter(self._available))
        reason = self._available[first].unsupported(problem)
        if reason is not None and name in ("sdpa", "reference"):
            logger.warning("attention goes through %s, many times slower than %s: %s", name, first, reason)
        else:
            logger.debug("attention %s for %s", name, problem)
        self._chosen[problem] = provider
        return provider


def _make(name: str) -> AttentionProvider:
    module, cls = _CLASSES[name]
    provider: AttentionProvider = getattr(importlib.import_module(module), cls)()
    return provider
