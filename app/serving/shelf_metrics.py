"""Prometheus metrics of a shelf: its models' states and wakes, and the device's memory. Names:
docs/reference/metrics.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from ray.serve import metrics

from folio.app.engine.shelf.status import DeviceStatus, ModelState, ModelStatus
from folio.app.serving.engine_metrics import SteadyGauge, TotalCounter

_WAKE_S: list[float] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300]


class ShelfMeter:
    """Statuses of a shelf, recorded with the load reports. One thread at a time."""

    def __init__(self) -> None:
        self._state = SteadyGauge(
            metrics.Gauge(
                "folio_model_state",
                "1 for the present state of a model, 0 for each other state.",
                ("model", "state"),  # type: ignore[arg-type]
            )
        )
        self._bytes = SteadyGauge(
            metrics.Gauge(
                "folio_model_bytes",
                "Memory of the device that a model has now.",
                ("model", "kind"),  # type: ignore[arg-type]
            )
        )
        self._wake_s = metrics.Histogram(
            "folio_model_wake_seconds",
            "Time to wake or load a model, once there was memory for it.",
            boundaries=_WAKE_S,
            tag_keys=("model",),
        )
        self._evictions = TotalCounter(
            metrics.Counter("folio_model_evictions", "Times that a model was put to sleep for another one.", ("model",))
        )
        self._device = SteadyGauge(
            metrics.Gauge("folio_device_bytes", "Memory of the device that the models share.", ("kind",))
        )
        self._needed = SteadyGauge(
            metrics.Gauge("folio_device_needed_bytes", "Memory with which no request of any model would wait.")
        )
        self._num_wakes: dict[str, int] = {}

    def note(self, statuses: Sequence[ModelStatus], device: DeviceStatus) -> None:
        for status in statuses:
            tags = {"model": status.name}
            for state in get_args(ModelState):
                self._state.set(state == status.state, tags | {"state": state})
            self._bytes.set(status.device_weight_bytes, tags | {"kind": "weights"})
            self._bytes.set(status.kv_bytes, tags | {"kind": "kv"})
            self._evictions.rise_to(status.num_evictions, tags)
            before = self._num_wakes.get(status.name, 0)
            # A model that was removed and added again counts from 0. Two wakes between two reports are too rare to
            # keep each one's time.
            for _ in range(status.num_wakes - before if status.num_wakes >= before else status.num_wakes):
                self._wake_s.observe(status.last_wake_s, tags)
            self._num_wakes[status.name] = status.num_wakes
        for kind in ("capacity", "used", "idle", "charged", "workspace"):
            self._device.set(getattr(device, f"{kind}_bytes"), {"kind": kind})
        self._needed.set(device.needed_bytes, {})
