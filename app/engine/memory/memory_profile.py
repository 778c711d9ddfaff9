"""Memory plan of a CUDA device: the parts of weights, a step, graphs, headroom and the KV cache.

    | weights | activations | graphs | headroom | KV cache            | not used: 1 - gpu_memory_utilization |
    | of this engine, in all at most gpu_memory_utilization of the device | or memory of other processes     |

Activations are measured: before the KV memory exists, the largest step runs once, with its sampling, and torch's
allocator reports its peak. With `kv_memory_bytes`, or `shared_kv_memory_bytes`, that is the bound of the KV cache, and
the rest is measured as well: the device must have both.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from folio.app.config.engine import ResolvedConfig
from folio.app.engine.execution.captured_graphs import GRAPH_BYTES
from folio.app.engine.ranks.executor import Executor
from folio.app.engine.sampling.params import SamplingParams
from folio.app.engine.sampling.sampler import sample
from folio.app.engine.sampling.state import SamplingState
from folio.app.errors import ConfigError, UnavailableError

logger = logging.getLogger(__name__)

# Memory of a process that torch's allocator does not count or cannot use: the CUDA context, kernels' code, buffers of
# NCCL, gaps between tensors, and a graph until it is charged. Models of one process have it together.
HEADROOM_BYTES = 1 << 30


class DeviceMemory(Protocol):
    """Memory of a device, and torch's part of it."""

    def free_and_total(self) -> tuple[int, int]:
        """Bytes that no process uses, and all bytes."""
        ...

    def allocated(self) -> int:
        """Bytes of this process's tensors now."""
        ...

    def reserved(self) -> int:
        """Bytes that torch's allocator has taken from the device."""
        ...

    def pinned(self) -> int:
        """Bytes of host memory that torch has pinned."""
        ...

    def restart_peak(self) -> None:
        """Forget the peak up to now."""
        ...

    def peak(self) -> int:
        """Most bytes of tensors at once since `restart_peak`."""
        ...

    def give_back(self) -> None:
        """Give memory without tensors back to the device."""
        ...


class TorchMemory:
    """`DeviceMemory` of torch's current CUDA device."""

    def free_and_total(self) -> tuple[int, int]:
        return torch.cuda.mem_get_info()

    def allocated(self) -> int:
        return torch.cuda.memory_allocated()

    def reserved(self) -> int:
        return torch.cuda.memory_reserved()

    def pinned(self) -> int:
        stats = torch.cuda.host_memory_stats()  # torch 2.13 has renamed the figure
        return int(stats.get("reserved_bytes.current", stats.get("allocated_bytes.current", 0)))

    def restart_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated()

    def give_back(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """Parts of a device's memory, in bytes.

    Attributes:
        total_bytes: memory of the device.
        utilization: share of them that this engine takes in all.
        weight_bytes: weights of the model, and of a draft model.
        activation_bytes: activations of the largest step.
        other_bytes: memory outside of torch: other processes, and CUDA's context.
        kv_limit_bytes: `kv_memory_bytes`, or what replicas share; the utilization does not count then.
    """

    total_bytes: int
    utilization: float
    weight_bytes: int
    activation_bytes: int
    other_bytes: int = 0
    graph_bytes: int = GRAPH_BYTES
    headroom_bytes: int = HEADROOM_BYTES
    kv_limit_bytes: int | None = None

    @property
    def beside_bytes(self) -> int:
        """What the process takes beside the KV cache."""
        return self.weight_bytes + self.activation_bytes + self.graph_bytes + self.headroom_bytes

    @property
    def kv_bytes(self) -> int:
        """What the KV cache may have; below 0 if the rest is too much already."""
        if self.kv_limit_bytes is not None:
            return self.kv_limit_bytes
        return min(int(self.utilization * self.total_bytes), self.total_bytes - self.other_bytes) - self.beside_bytes

    def check(self, config: ResolvedConfig) -> None:
        """Raise `ConfigError` if nothing is left for the KV cache, or the device could never have what is configured. A
        ceiling may exceed the free memory: other processes may be about to give memory back."""
        if self.kv_limit_bytes is not None:
            most_bytes = self.total_bytes - self.beside_bytes
            if self.kv_limit_bytes > most_bytes:
                raise ConfigError(
                    f"kv_memory_bytes or shared_kv_memory_bytes is {self.kv_limit_bytes}; at most {max(most_bytes, 0)} "
                    f"fit beside the rest: {self}; lower it, or max_num_batched_tokens "
                    f"({config.max_num_batched_tokens}) or max_num_seqs ({config.max_num_seqs})"
                )
            free_bytes = most_bytes - self.other_bytes
            if self.kv_limit_bytes > free_bytes:
                logger.warning(
                    "the KV cache may take %d bytes, of which %d are free now", self.kv_limit_bytes, max(free_bytes, 0)
                )
        elif self.kv_bytes <= 0:
            raise ConfigError(
                f"gpu_memory_utilization is {config.gpu_memory_utilization}, which leaves no memory for the KV cache: "
                f"{self}; raise it, or lower max_num_batched_tokens ({config.max_num_batched_tokens}) or max_num_seqs "
                f"({config.max_num_seqs})"
            )

    def __str__(self) -> str:
        parts = {
            "weights": self.weight_bytes,
            "activations": self.activation_bytes,
            "graphs": self.graph_bytes,
            "headroom": self.headroom_bytes,
            "KV cache": max(0, self.kv_bytes),
            "outside of torch": self.other_bytes,
        }
        shown = ", ".join(f"{name} {num_bytes / 2**30:.2f}" for name, num_bytes in parts.items())
        ours = "" if self.kv_limit_bytes is not None else f", {self.utilization:.0%} of them for this engine"
        return f"of {self.total_bytes / 2**30:.2f} GiB{ours}: {shown}"


def plan_device(
    config: ResolvedConfig, executor: Executor, new_memory: Callable[[], DeviceMemory] = TorchMemory
) -> DevicePlan | None:
    """Plan the memory of a CUDA device; `None` on a CPU.

    Raises:
        ConfigError: a step, or the cache beside it, does not fit.
        UnavailableError: a rank died.
    """
    if config.device == "cpu":
        return None

    def run_largest(num_tokens: int, num_seqs: int) -> None:
        params = SamplingParams(top_p=0.9, seed=0)
        logits = executor.run_largest(num_tokens, num_seqs)
        sample(logits, [SamplingState(params, [0]) for _ in range(num_seqs)])

    num_captured = (1 + (config.draft_model is not None)) * executor.captures
    return measure(config, new_memory(), run_largest, num_captured * GRAPH_BYTES)


def measure(
    config: ResolvedConfig,
    memory: DeviceMemory,
    run_largest: Callable[[int, int], object],
    graph_bytes: int = GRAPH_BYTES,
) -> DevicePlan:
    """Run the largest step and plan the device's memory by its peak.

    Args:
        run_largest: computes a step of this number of tokens, and samples from this number of rows of logits.
        graph_bytes: memory for the graphs of all models.

    Raises:
        ConfigError: the step, or the cache beside it, does not fit.
        UnavailableError: a rank died.
    """
    num_tokens = config.max_num_batched_tokens
    num_seqs = min(config.max_num_seqs, num_tokens)
    memory.give_back()
    weights = memory.allocated()
    memory.restart_peak()
    try:
        run_largest(num_tokens, num_seqs)
    except (torch.OutOfMemoryError, UnavailableError) as error:
        if not isinstance(error, torch.OutOfMemoryError) and not isinstance(error.__cause__, torch.OutOfMemoryError):
            raise
        free, total = memory.free_and_total()
        raise ConfigError(
            f"a step of max_num_batched_tokens {num_tokens} and max_num_seqs {num_seqs} does not fit beside "
            f"{weights / 2**30:.2f} GiB of weights on a device of {total / 2**30:.2f} GiB, of which "
            f"{(total - free - memory.reserved()) / 2**30:.2f} are outside of torch; lower these settings"
        ) from error
    activations = memory.peak() - weights
    memory.give_back()
    free, total = memory.free_and_total()
    plan = DevicePlan(
        total_bytes=total,
        utilization=config.gpu_memory_utilization,
        weight_bytes=weights,
        activation_bytes=activations,
        other_bytes=total - free - memory.reserved(),
        graph_bytes=graph_bytes,
        kv_limit_bytes=config.kv_memory_bytes,
    )
    plan.check(config)
    logger.info("device memory: %s", plan)
    return plan
