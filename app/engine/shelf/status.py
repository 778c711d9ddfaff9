"""Status of a model on a shelf."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# "new": not loaded in this process yet; "failed": it could not be loaded, or its engine has stopped.
ModelState = Literal["new", "loading", "asleep", "waking", "awake", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatus:
    """State of a model for operators, routers and metrics.

    Attributes:
        weight_bytes: of its weights, on the device while it is awake; 0: not known yet.
        kv_bytes: KV memory that exists.
        num_running, num_waiting: its requests.
        num_wakes: times that it was loaded or woken.
        wake_s: expected seconds to wake it from its present state; 0 while it is awake.
        last_wake_s: seconds of the last wake or load.
        num_evictions: times that it was put to sleep for another model.
        error: why it has failed.
        idle_s: seconds since its last request ended; 0 while it has one.
    """

    name: str
    state: ModelState
    weight_bytes: int = 0
    kv_bytes: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_wakes: int = 0
    wake_s: float = 0.0
    last_wake_s: float = 0.0
    num_evictions: int = 0
    error: str | None = None
    idle_s: float = 0.0
