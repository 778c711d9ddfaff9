"""Status of a shelf: of each model, and of the device's memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from folio.app.engine.report import Requests

# "new": not loaded in this process yet; "failed": it could not be loaded, or its engine has stopped.
ModelState = Literal["new", "loading", "asleep", "waking", "awake", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatus(Requests):
    """State of a model for operators, routers and metrics.

    Attributes:
        weight_bytes: of its weights, on the device while it is awake; 0: not known yet.
        kv_bytes: KV memory that exists.
        kept_bytes: host memory of its prefixes.
        num_wakes: times that it was loaded or woken.
        wake_s: expected seconds to wake it from its present state; 0 while it is awake.
        last_wake_s: seconds of the last wake or load.
        num_evictions: times that it was put to sleep for another model.
        evicted_for: the other model, the last time.
        error: why it has failed.
        idle_s: seconds since its last request ended; 0 while it has one.
    """

    name: str
    state: ModelState
    weight_bytes: int = 0
    kv_bytes: int = 0
    kept_bytes: int = 0
    num_wakes: int = 0
    wake_s: float = 0.0
    last_wake_s: float = 0.0
    num_evictions: int = 0
    evicted_for: str | None = None
    error: str | None = None
    idle_s: float = 0.0

    @property
    def device_weight_bytes(self) -> int:
        """Bytes of its weights on the device now."""
        return self.weight_bytes if self.state in ("awake", "waking") else 0


@dataclass(frozen=True, slots=True)
class DeviceStatus:
    """Memory of the device that the models share.

    Attributes:
        capacity_bytes: bound of all others together.
        used_bytes: pages of KV caches, and of weights where they are pages (CUDA).
        idle_bytes: pages between two owners: given back by one model, and kept for the next one.
        charged_bytes: mapped files of weights (CPU), decode graphs, and adapters.
        workspace_bytes: kept for the tensors of a step.
        usable_bytes: what weights, adapters and KV caches can take, beside workspace and anchor pages.
        needed_bytes: memory with which no request of any model would wait, all that is not usable included; 0 without
            requests.
        needed_weights: the part of `needed_bytes` that does not grow with the requests, by model: weights, adapters,
            graphs and pinned prefixes of the models with requests.
    """

    capacity_bytes: int
    used_bytes: int
    idle_bytes: int
    charged_bytes: int
    workspace_bytes: int
    usable_bytes: int = 0
    needed_bytes: int = 0
    needed_weights: Mapping[str, int] = field(default_factory=dict)
