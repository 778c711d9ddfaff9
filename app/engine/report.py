"""What an engine replica says about itself to routers and to the autoscaling policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

Amount = TypeVar("Amount", int, np.ndarray[Any, np.dtype[np.float64]])


def attended_tokens(num_tokens: Amount, num_cached: Amount) -> Amount:
    """Cached tokens that the queries of so many new tokens behind `num_cached` see, all together."""
    return num_tokens * num_cached + num_tokens * (num_tokens + 1) // 2


@dataclass(frozen=True, slots=True)
class StepTimes:
    """What a step takes on a replica, as it has measured so far: `fixed_s`, and for each token of it `token_s`, and for
    each cached token that one of its queries sees `attended_s`. All 0 before the first step."""

    fixed_s: float = 0.0
    token_s: float = 0.0
    attended_s: float = 0.0

    def prefill_s(self, num_tokens: int, num_cached: int, step_tokens: int) -> float:
        """Seconds to compute the prompt's last `num_tokens` tokens behind `num_cached`, in steps of `step_tokens`."""
        num_steps = -(-num_tokens // step_tokens)
        attended = attended_tokens(num_tokens, num_cached)
        return num_steps * self.fixed_s + num_tokens * self.token_s + attended * self.attended_s


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """The load of a replica and what its prefix cache has, at one moment.

    Attributes:
        made_at: seconds of the replica's monotonic clock, which no other clock can be compared with.
        unit_tokens: prefixes are shared in multiples of so many tokens; a key stands for as many.
        keys, changes, stride, keys_version: which prefixes are cached, see `vmem.CachedKeys`.
        step: times of its steps.
        step_tokens: tokens of a step at most.
        max_num_seqs: sequences that run at once.
        num_running: sequences of the groups that run, with their coming forks.
        num_waiting: the same of groups that have not begun, or were preempted.
        queued_tokens: of prompts, not computed yet.
        queued_s: expected time to compute these.
        num_decodes: running sequences that generate.
        decode_s: what their next tokens add to a step.
        free_tokens: the KV cache has room for so many more, cached ones given up.
        total_tokens: tokens that it holds within the budget.
        freed_tokens_per_s: room that finished requests have made lately.
        busy_share: of the last seconds, in steps that compute prompts.
        budget_bytes: bound of the KV cache.
        expected_cached_tokens, cached_tokens, missed_tokens: of all prompts that routers made a guess for: cached
            tokens that were expected, that there were, and by how many both differ, request by request.
    """

    made_at: float
    unit_tokens: int
    keys: bytes
    changes: bytes
    stride: int
    keys_version: int
    step: StepTimes
    step_tokens: int
    max_num_seqs: int
    num_running: int
    num_waiting: int
    queued_tokens: int
    queued_s: float
    num_decodes: int
    decode_s: float
    free_tokens: int
    total_tokens: int
    freed_tokens_per_s: float
    busy_share: float
    budget_bytes: int
    expected_cached_tokens: int
    cached_tokens: int
    missed_tokens: int
