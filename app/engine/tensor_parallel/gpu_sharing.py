"""GPU sharing: ranks that share GPUs, if the environment asks for it.

A GPU for each rank is the rule. `FOLIO_RANKS_SHARE_GPUS` lets ranks that see too few GPUs share them, to test or try
tensor parallelism without as many; a single rank is faster. Its value says what the collectives use:

- `gloo`: the host's memory.
- `nccl`: NCCL 2.30 or later, which needs a variable of its own. Earlier versions refuse such ranks.

Rank 0 reads the variable, and sends it to the peers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Literal, cast, get_args

import torch

from folio.app.config.engine import ResolvedConfig
from folio.app.errors import ConfigError

SWITCH = "FOLIO_RANKS_SHARE_GPUS"
_NCCL_SWITCH, _LEAST_NCCL = "NCCL_MULTI_RANK_GPU_ENABLE", (2, 30)

Sharing = Literal["gloo", "nccl"]


def _nccl_version() -> tuple[int, ...]:
    version: tuple[int, ...] = torch.cuda.nccl.version()
    return version


def read_sharing(
    config: ResolvedConfig,
    environment: Mapping[str, str] = os.environ,
    nccl_version: Callable[[], tuple[int, ...]] = _nccl_version,
) -> Sharing | None:
    """How the engine's ranks share GPUs; `None`: each has one of its own.

    Raises:
        ConfigError: the value is unknown, this NCCL cannot do it, or the ranks' KV memory is not bounded.
    """
    value = environment.get(SWITCH)
    if not value or config.device != "cuda":
        return None
    if value not in get_args(Sharing):
        raise ConfigError(f"{SWITCH} is {value!r}; it must be gloo or nccl, or not set")
    if value == "nccl" and (version := nccl_version()) < _LEAST_NCCL:
        raise ConfigError(
            f"{SWITCH} is nccl, and NCCL is {'.'.join(map(str, version))}, which refuses ranks that share a GPU; it "
            f"must be {'.'.join(map(str, _LEAST_NCCL))} or later: install it, or use gloo"
        )
    if config.kv_memory_bytes is None:
        raise ConfigError(
            f"kv_memory_bytes is not set, and by default each rank plans with the whole GPU; {SWITCH} needs a value "
            "that all ranks on a GPU have room for"
        )
    return cast(Sharing, value)


def rank_device(config: ResolvedConfig, rank: int, sharing: Sharing | None) -> torch.device:
    """The device of a rank whose process sees the GPUs of all ranks."""
    if config.device != "cuda":
        return torch.device("cpu")
    return torch.device("cuda", rank % torch.cuda.device_count() if sharing else rank)


def allow_sharing_in_nccl() -> None:
    """Make NCCL accept ranks that share a GPU. Call it before the first group: NCCL reads the variable once."""
    os.environ[_NCCL_SWITCH] = "1"
