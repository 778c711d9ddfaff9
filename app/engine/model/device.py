"""Device of an engine: CUDA where it works, else the CPU.

A device works if its driver maps one page at two addresses, and if the attention kernels over such pages agree with the
reference. Drivers, compilers and launchers fail in many ways; all become the reason why the device is not taken.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from folio.app.config.engine import EngineConfig, ResolvedConfig
from folio.app.config.machine import Machine
from folio.app.engine.model.tokenizer import one_line
from folio.app.errors import ConfigError
from folio.kernels import AttentionProvider, KernelError, Masking, VarlenBatch, select_provider
from folio.vmem import Backend, select_backend
from folio.vmem.backends.probe import check_mapping

logger = logging.getLogger(__name__)

# Kernel test: a head size and a number of query heads for each KV head that all kernels support.
_HEAD_DIM, _GROUP_SIZE, _NUM_KV_HEADS, _BLOCK_TOKENS = 64, 4, 2, 64
_LENGTHS = (150, 70)
# Most difference of float16 outputs of about 0.2: rounding gives a tenth of this.
_TOLERANCE = 0.01


@dataclass(frozen=True, slots=True)
class CudaProbes:
    """Steps that find out whether CUDA works here.

    Attributes:
        is_available: torch sees a device.
        open_backend: the memory backend of the device.
        make_provider: the attention kernels.
        device: where their tensors are.
    """

    is_available: Callable[[], bool]
    open_backend: Callable[[], Backend]
    make_provider: Callable[[], AttentionProvider]
    device: torch.device

    @classmethod
    def here(cls, attention: str) -> CudaProbes:
        """Probes of this machine's current device, with the configured kernels."""
        device = torch.device("cuda")
        return cls(
            torch.cuda.is_available,
            lambda: select_backend(device, capacity_bytes=1 << 30),
            lambda: select_provider(attention, device),
            device,
        )

    def fault(self) -> str | None:
        """Why CUDA cannot be used; `None` if it can."""
        if not self.is_available():
            return "torch sees no CUDA device here"
        try:
            backend = self.open_backend()
            try:
                check_mapping(backend)
            finally:
                backend.close()
            check_kernels(self.make_provider(), self.device)
        except Exception as error:
            logger.debug("CUDA cannot be used", exc_info=True)
            return one_line(error)
        return None


def resolve(config: EngineConfig, probes: CudaProbes | None = None) -> ResolvedConfig:
    """The settings for the device that they name, or for the one that works.

    Raises:
        ConfigError: the device is "cuda", and cannot be used.
    """
    if isinstance(config, ResolvedConfig):
        return config
    if config.device == "cpu":
        return config.on_device("cpu")
    fault = (probes or CudaProbes.here(config.attention)).fault()
    if fault is None:
        return config.on_device("cuda")
    if config.device == "cuda":
        raise ConfigError(f"device is cuda, but {fault}; use cpu")
    level = logging.WARNING if Machine.detect().has_gpu else logging.INFO
    logger.log(level, "device auto is the CPU: %s", fault)
    return config.on_device("cpu")


def check_kernels(provider: AttentionProvider, device: torch.device) -> None:
    """Compare kernels with the reference: two chunks of prompts and two decodes over a paged cache.

    Raises:
        KernelError: they differ, or no kernel can be used.
    """
    generator = torch.Generator().manual_seed(0)
    num_blocks = 1 + sum(-(-length // _BLOCK_TOKENS) for length in _LENGTHS)
    caches = torch.randn(2, num_blocks, _BLOCK_TOKENS, _NUM_KV_HEADS, _HEAD_DIM, generator=generator).half()
    masking = Masking(scale=_HEAD_DIM**-0.5)
    new = torch.randn(2, len(_LENGTHS), _NUM_KV_HEADS, _HEAD_DIM, generator=generator).half()
    table = torch.tensor([[1, 2, 3], [4, 5, 0]], dtype=torch.int32)
    slots = torch.tensor([3 * _BLOCK_TOKENS + _LENGTHS[0] % _BLOCK_TOKENS - 1, 5 * _BLOCK_TOKENS + 5])
    found = []
    for attend, where in ((provider, device), (select_provider("reference", torch.device("cpu")), torch.device("cpu"))):
        keys, values = (cache.to(where) for cache in caches.clone())
        attend.write(new[0].to(where), new[1].to(where), keys, values, slots.to(where))
        for counts in ((20, 7), (1, 1)):
            starts = torch.tensor([0, counts[0], sum(counts)], dtype=torch.int32)
            batch = VarlenBatch(starts, torch.tensor(_LENGTHS, dtype=torch.int32), table, max(counts), max(_LENGTHS))
            size = sum(counts), _NUM_KV_HEADS * _GROUP_SIZE, _HEAD_DIM
            query = torch.randn(size, generator=torch.Generator().manual_seed(1)).half()
            found.append(attend.attend(query.to(where), keys, values, batch.to(where), masking).float().cpu())
    half = len(found) // 2
    difference = max(float((a - b).abs().max()) for a, b in zip(found[:half], found[half:], strict=True))
    if not difference <= _TOLERANCE:  # NaN fails too
        raise KernelError(
            f"attention {provider.name} differs from the reference by {difference:.2g}; at most {_TOLERANCE} is allowed"
        )
