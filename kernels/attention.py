"""Which attention provider to use."""

from __future__ import annotations

import logging

import torch

from kernels.cpu import CpuProvider
from kernels.provider import AttentionProvider, KernelError
from kernels.reference import ReferenceProvider
from kernels.sdpa import SdpaProvider

logger = logging.getLogger(__name__)

PROVIDERS = ("auto", "cpu", "sdpa", "reference")


def select_provider(name: str, device: torch.device) -> AttentionProvider:
    """The provider called `name`, or with "auto" the fastest one that runs on the device.

    Raises:
        KernelError: the name is unknown, or that provider cannot run here.
    """
    if name not in PROVIDERS:
        raise KernelError(f"attention {name!r} is unknown; choose one of {', '.join(PROVIDERS)}")
    if name == "reference":
        return ReferenceProvider()
    if name == "sdpa":
        return SdpaProvider()
    if device.type != "cpu":
        if name == "cpu":
            raise KernelError(f"attention cpu cannot run on {device.type}; choose sdpa or reference")
        logger.warning("attention on %s goes through torch's SDPA, one sequence after the other", device.type)
        return SdpaProvider()
    try:
        return CpuProvider()
    except KernelError as error:
        if name == "cpu":
            raise
        logger.warning("falling back to torch's SDPA, several times slower: %s", error)
        return SdpaProvider()
