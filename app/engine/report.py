"""Reports of an engine: its load and prefix cache, the times of its steps and of its start."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

Amount = TypeVar("Amount", int, np.ndarray[Any, np.dtype[np.float64]])


def attended_tokens(num_tokens: Amount, num_cached: Amount) -> Amount:
    """Sum of the cached tokens that each of `num_tokens` queries after `num_cached` tokens attends to."""
    return num_tokens * num_cached + num_tokens * (num_tokens + 1) // 2


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Measured cost of a step: `fixed_s`, plus `token_s` per token, plus `attended_s` per attended token, plus
    `verify_s` if it verifies draft tokens. All 0 before the first step."""

    fixed_s: float = 0.0
    token_s: float = 0.0
    attended_s: float = 0.0
    verify_s: float = 0.0

    def prefill_s(self, num_tokens: int, num_cached: int, step_tokens: int) -> float:
        """Seconds to compute the prompt's last `num_tokens` tokens behind `num_cached`, in steps of `step_tokens`."""
        return self.seconds(-(-num_tokens // step_tokens), num_tokens, attended_tokens(num_tokens, num_cached))

    def seconds(self, num_steps: float, num_tokens: float, num_attended: float) -> float:
        return num_steps * self.fixed_s + num_tokens * self.token_s + num_attended * self.attended_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """Requests in an engine, counted in sequences, those still to be forked included.

    Attributes:
        num_running: sequences of the requests that have memory.
        num_waiting: sequences of requests that have not begun, or were preempted.
    """

    num_running: int = 0
    num_waiting: int = 0

    @property
    def num_requests(self) -> int:
        return self.num_running + self.num_waiting

    @property
    def has_work(self) -> bool:
        return self.num_requests > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReport(Requests):
    """Load report: the load and the cached prefixes of a replica at one moment.

    Attributes:
        made_at: seconds of the replica's monotonic clock; not comparable with other clocks.
        unit_tokens: prefixes are shared in multiples of this many tokens; a key stands for one multiple.
        keys, changes, stride, keys_version: the cached prefixes, see `folio.vmem.CachedKeys`.
        step_tokens: most tokens of a step.
        max_num_seqs: most sequences that run at once.
        queued_tokens: prompt tokens to compute.
        queued_s: expected time to compute them.
        num_decodes: running sequences that decode.
        decode_s: seconds that their next tokens add to a step.
        free_tokens: tokens for which the KV cache has room, cached blocks evicted.
        total_tokens: tokens that fit into the budget.
        freed_tokens_per_s: recent rate at which requests that ended have freed tokens.
        busy_share: share of recent time in steps that compute prompts.
        budget_bytes: budget of the KV cache.
        expected_cached_tokens, cached_tokens, missed_tokens: over all prompts with a router's expectation: the cached
            tokens expected, those found, and the sum of absolute differences per request.
        wake_s: expected time until the model is awake, for routers (`shelf_load`); 0 if it is awake, or on no shelf.
        is_waking: whether the model becomes awake without a further request.
        others_s: expected time to compute the queued prompts of other models on the device.
        num_others: other models on the device that have requests.
    """

    made_at: float
    unit_tokens: int = 0
    keys: bytes = b""
    changes: bytes = b""
    stride: int = 1
    keys_version: int = 0
    step: StepTimes = StepTimes()
    step_tokens: int
    max_num_seqs: int
    queued_tokens: int = 0
    queued_s: float = 0.0
    num_decodes: int = 0
    decode_s: float = 0.0
    free_tokens: int = 0
    total_tokens: int = 0
    freed_tokens_per_s: float = 0.0
    busy_share: float = 0.0
    budget_bytes: int = 0
    expected_cached_tokens: int = 0
    cached_tokens: int = 0
    missed_tokens: int = 0
    wake_s: float = 0.0
    is_waking: bool = False
    others_s: float = 0.0
    num_others: int = 0


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Memory of the device, and host memory for it, at about one moment.

    Attributes:
        parts: bytes by part, which add up to the device's. "weights"; "kv": pages of KV caches, anchor pages included;
            "graphs": CUDA graphs with their buffers; "activations": what torch has beside these, in use or kept for
            the next step; "idle": pages that one model has given back and the next one takes; "other": CUDA contexts,
            kernels and other processes; "free".
        pinned_bytes: host memory that this process has pinned: copies of weights, swapped sequences, transfers.
    """

    parts: Mapping[str, int]
    pinned_bytes: int


@dataclass(frozen=True, slots=True)
class Progress:
    """A request before its first token.

    Attributes:
        queue: its place in the queue, 1 for the request that begins next; 0: its prompt is being computed.
        expected_s: expected seconds until its first token, at the recent rates.
        computed_tokens: computed ones of the prompt's `prompt_tokens`, cached ones included.
    """

    queue: int
    expected_s: float
    computed_tokens: int
    prompt_tokens: int


@dataclass(slots=True)
class StartTimes:
    """Seconds of each phase of a start, in order; `lap` ends a phase.

    Attributes:
        model_s: loading the checkpoint, packing it for the kernels, starting the other ranks.
        memory_s: reserving the addresses of the KV cache.
        budget_s: waiting for memory beside other replicas on the device.
        self_test_s: compiling kernels, and the self-test of the model.
        store_s: the digest of the weights, and opening the prefixes on disk.
        pins_s: measuring swaps, and computing the configured pins.
        warm_up_s: the warm-up requests.
        prefixes_s: asking peer replicas for their prefixes, and computing these.
        process_s: age of the process before the first phase: imports, and waiting for a processor.
    """

    model_s: float = 0.0
    memory_s: float = 0.0
    budget_s: float = 0.0
    self_test_s: float = 0.0
    store_s: float = 0.0
    pins_s: float = 0.0
    warm_up_s: float = 0.0
    prefixes_s: float = 0.0
    process_s: float = 0.0
    _lap_began: float = field(default_factory=time.perf_counter, repr=False, compare=False)

    def lap(self, phase: str) -> None:
        """End a phase, named by its field, now."""
        now = time.perf_counter()
        setattr(self, phase, getattr(self, phase) + now - self._lap_began)
        self._lap_began = now

    @property
    def ready_s(self) -> float:
        """The engine's whole start, without `process_s`."""
        return sum(seconds for phase, seconds in self.phases().items() if phase != "process")

    def phases(self) -> dict[str, float]:
        """Name of each phase → its seconds."""
        return {f.name.removesuffix("_s"): getattr(self, f.name) for f in fields(self) if f.name.endswith("_s")}

    def __str__(self) -> str:
        parts = [
            f"{name.replace('_', ' ')} {seconds:.2f}" for name, seconds in self.phases().items() if seconds >= 0.005
        ]
        return f"{self.ready_s:.2f} s ({', '.join(parts)})"


def process_age_s() -> float:
    """Seconds since this process was started."""
    after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started_s = int(after_name[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
