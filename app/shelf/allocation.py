"""Models' needs of a device's memory, and the allocation that the arbiter gives them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from folio.app.config.shelf import Keep
from folio.app.engine.report import Requests


@dataclass(frozen=True, slots=True, kw_only=True)
class KVNeed(Requests):
    """Requests and KV memory of a model. All bytes are of the device.

    Attributes:
        num_running, num_waiting: requests with computed tokens in memory, and all others, preempted ones included.
        most_bytes: bound of its KV budget.
        budget_bytes: its KV budget now; 0 while asleep.
        held_bytes: KV memory that exists now, possibly above the budget; while asleep, all memory that has not been
            given back yet.
        running_bytes: KV memory of the running requests, with that of their next steps and the rest of their prompts.
        first_bytes: the least KV memory with which one of its requests can run: the first running one, which is
            preempted last, else the first one that waits.
        waiting_bytes: KV memory of those of the waiting requests that could run together.
        cached_bytes, cached_s: evictable KV memory, and the seconds that all of it would save requests.
        work_s: seconds until all of its requests have ended, if no others arrive; 0: unknown.
    """

    most_bytes: int
    budget_bytes: int = 0
    held_bytes: int = 0
    running_bytes: int = 0
    first_bytes: int = 0
    waiting_bytes: int = 0
    cached_bytes: int = 0
    cached_s: float = 0.0
    work_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelNeed(KVNeed):
    """A model's state and needs. All times are in seconds.

    Attributes:
        state: "waking" also while it is loaded; "asleep" also before that.
        weight_bytes: what it holds whenever it is awake, used or not: weights, adapters and pinned prefixes; estimated
            before it has been loaded; while it is awake, graphs, too. KV bytes are beyond that.
        wake_s: expected seconds to wake or load it.
        waited_s: longest time that one of its requests has waited for a first token, or, preempted, for the next one.
        lost_s: time since it was put to sleep, or all of its requests were preempted, while it had requests; infinite
            once it has memory again, and for a model to which this has not happened.
        turn_s: time since it woke, or, if all of its requests have been preempted since, since its budget was raised
            again.
        idle_s: time since it last had a request; 0 while it has one.
        probability: of a request within `arbiter.HORIZON_S`.
        ttft_s, share, keep: `slo.ttft_s`, `weight` and `keep` of its configuration.
    """

    name: str
    state: Literal["asleep", "waking", "awake"]
    weight_bytes: int
    wake_s: float = 0.0
    waited_s: float = 0.0
    lost_s: float = math.inf
    turn_s: float = 0.0
    idle_s: float = 0.0
    probability: float = 0.0
    ttft_s: float = 1.0
    share: float = 1.0
    keep: Keep = "auto"

    @property
    def needed_bytes(self) -> int:
        """Memory with which none of its requests waits."""
        return self.weight_bytes + min(self.running_bytes + self.waiting_bytes, self.most_bytes)


@dataclass(frozen=True, slots=True)
class Wait:
    """Why a model's waiting requests do not run yet, and for how long about.

    Attributes:
        reason: "waking": its weights are being loaded, or memory for them is being given back; "turn": other models
            have the memory until their turns end.
    """

    reason: Literal["waking", "turn"]
    expected_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """The changes to make now, see `Arbiter`.

    Attributes:
        budgets: KV budget in bytes of each model that is awake, waking or in `wake`, and not in `sleep`.
        preempt: models whose running requests need more than they are to have: the latest of these requests are
            preempted until the memory of the rest is within the budget, which is 0 for a model that is put to sleep.
        sleep: models to put to sleep, and the model that needs the memory; `None`: none does.
        wake: models to wake now, in this order.
        prefetch: models without requests whose weights are worth reading ahead, the best first, and those that the
            device has no memory for last; one that is also in `wake` has memory.
        waits: of models with requests that cannot run yet.
        refused: why requests of a model can never run, for those models.
    """

    budgets: Mapping[str, int]
    preempt: tuple[str, ...]
    sleep: Mapping[str, str | None]
    wake: tuple[str, ...]
    prefetch: tuple[str, ...]
    waits: Mapping[str, Wait]
    refused: Mapping[str, str]
