"""Control of a shelf: asks the arbiter how much memory each model gets, and carries the answer out.

One thread computes the steps of all engines, in turns, and controls between two steps. Other threads load models and
map their weights, so that steps go on meanwhile:

    new ── loading ── awake ⇄ asleep, by way of waking        failed: not loaded, or its engine has stopped
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from folio.app.engine.async_engine import AsyncEngine
from folio.app.engine.driver import STOPPED
from folio.app.engine.memory.footprint import Footprint, set_budget_within
from folio.app.engine.memory.kv_plan import estimated_activations
from folio.app.engine.memory.memory_profile import DevicePlan
from folio.app.engine.memory.size import ModelSize
from folio.app.engine.model.device import resolve
from folio.app.engine.request.faults import device_fault
from folio.app.engine.startup import PeerPrefixes
from folio.app.engine.step.step_thread import StepThread
from folio.app.errors import EngineError, ModelError, UnavailableError
from folio.app.models.weights.pinned_share import default_folder
from folio.app.shelf.allocation import Allocation, ModelNeed
from folio.app.shelf.arbiter import Arbiter
from folio.app.shelf.device import ShelfDevice
from folio.app.shelf.hung_loads import HungLoads
from folio.app.shelf.measure import loaded_need, unloaded_need
from folio.app.shelf.moves import Moves, longest_load_s
from folio.app.shelf.read_ahead import ReadAhead
from folio.app.shelf.shelved_model import Estimate, ShelvedModel
from folio.vmem import IntegrityError, KVMemory, OutOfPages

logger = logging.getLogger(__name__)

# Time between two plans: while requests wait for memory, while there is work, and without any.
_WAITING_S, _WORKING_S, _IDLE_S = 0.02, 0.25, 1.0
# A model that has just been loaded, perhaps to be asked for its context's length, is about to get a request.
_LEAST_AWAKE_S = 1.0
# Pages that no model has had for this long go back to the machine.
_TRIM_S = 2.0
# The longest time that steps wait for that, each time.
_TRIM_STEP_S = 0.01
# A load that found too little memory is not tried again before this time.
_RELOAD_S = 0.5
# A model is too large for the device if so many loads in a row found too little memory although all of it was free.
_MOST_SHORT = 3
# A model whose load hung in another process is refused for at most so long at a time: its note may be removed.
_HUNG_LOOK_S = 5.0
# The thread hangs if requests wait and it has done nothing for this long.
_HANGS_S = 120.0
# KV memory for the warm-up of a model that is loaded, beyond a step's tokens: rounding to pages, and decodes.
_WARM_UP_TOKENS, _WARM_UP_BYTES, _ROUNDING = 1024, 8 << 20, 1.25
_MOST_OF_ROOM = 0.9  # the remainder is for the model's anchor page


class Control:
    """Decides about the models of a shelf, in the thread of their steps.

    Args:
        device: closed by `close`.
        models: returns the models of the shelf now.
        prefixes_of_others: see `AsyncEngine`.
    """

    def __init__(
        self,
        device: ShelfDevice,
        models: Callable[[], Sequence[ShelvedModel]],
        prefixes_of_others: PeerPrefixes | None,
    ) -> None:
        self._device = device
        self._models = models
        self._prefixes_of_others = prefixes_of_others
        self._capacity_bytes = device.capacity_bytes  # for weights and KV caches
        self._has_changed = True
        self._planned_at = self._plan_at = 0.0  # the last and the next plan
        self._busy_at = time.monotonic()
        self._read_ahead = ReadAhead(device.has_page_cache, device.read_ahead_bytes_per_s)
        self._hung = HungLoads(default_folder().parent)  # in memory
        self._moves = Moves(self._call, self._attempt, self._fail, self._hung)
        self._thread = StepThread(self._control)

    # ---- from any thread ----

    def failure(self) -> str | None:
        """Why no model can be served any more; `None` while they can. Does not block."""
        if not self._thread.is_alive or self._thread.device_lost:
            return STOPPED
        if time.monotonic() - self._thread.progress_at > _HANGS_S and any(map(_is_asked_for, self._models())):
            return f"the thread of the steps has done nothing for {_HANGS_S:.0f} s; send the request again"
        return self._moves.check()

    def note_change(self) -> None:
        """Plan soon."""
        self._has_changed = True
        self._thread.wake()

    def wait_for_moves(self, model: ShelvedModel) -> None:
        """Wait until no other thread loads or wakes a model that is no longer the shelf's."""
        self._thread.call(lambda: None).result()  # no plan counts on the model any more
        self._moves.wait(model)
        self._thread.call(lambda: None).result()  # the shelf's thread has run what the move returned

    def check_integrity(self) -> Future[None]:
        """Check that memory adds up."""
        return self._thread.call(self._check_integrity)

    def close(self) -> None:
        """End the thread, once the models are closed, and give the device back."""
        self._thread.close()
        self._read_ahead.close()
        self._device.close()

    # ---- the thread ----

    def _control(self) -> float:
        """Plan again if it is time; returns the seconds until the next plan."""
        models = self._models()  # others may be added or removed meanwhile
        try:
            return self._plan(models)
        except Exception as error:  # whatever failed, the thread goes on, and every request ends
            logger.exception("planning the shelf's memory failed; its models stop, and are loaded again when requested")
            for model in models:
                if model not in self._moves:
                    self._fail(model, error)
            self._plan_at = time.monotonic() + _IDLE_S
            return _IDLE_S

    def _plan(self, models: Sequence[ShelvedModel]) -> float:
        now = time.monotonic()
        if any(map(_waits_for_memory, models)):
            self._plan_at = min(self._plan_at, self._planned_at + _WAITING_S)
        if not self._has_changed and now < self._plan_at:
            return self._plan_at - now
        self._has_changed, self._planned_at = False, now
        self._count_capacity(models)
        needs = [self._need(model, now) for model in models if self._is_planned(model)]
        self._device.note_needs(needs, self._capacity_bytes)
        for model in models:
            if model.engine is not None:
                self._limit_requests(model, model.engine)
        by_name = {model.name: model for model in models}
        allocation = Arbiter(self._capacity_bytes).plan(needs)
        self._carry_out(allocation, by_name)
        self._read_ahead.want(_sleeping(by_name, allocation), beside_steps=any(need.num_running for need in needs))
        self._plan_at = now + self._pause_s(needs, now)
        return self._plan_at - now

    def _count_capacity(self, models: Sequence[ShelvedModel]) -> None:
        """Memory for weights and KV caches: beside a step's workspace and the models' anchor pages."""
        self._device.take_workspace(max((m.workspace_bytes for m in models if m.state != "failed"), default=0))
        anchors = sum(m.engine.driver.engine.footprint.anchor_bytes for m in models if m.engine is not None)
        self._capacity_bytes = self._device.capacity_bytes - anchors

    def _pause_s(self, needs: Sequence[ModelNeed], now: float) -> float:
        """Seconds until the next plan if nothing changes. Gives pages that no model has had for a time back."""
        has_work = any(need.has_work for need in needs)
        if has_work:
            self._busy_at = now
        pages, trims = self._device.shared.pages, False
        if now - self._busy_at > _TRIM_S and pages.idle_bytes:
            pages.trim(_TRIM_STEP_S)
            trims = pages.idle_bytes > 0
        if trims or any(need.num_waiting or need.held_bytes > need.budget_bytes for need in needs):
            return _WAITING_S
        return _WORKING_S if has_work else _IDLE_S

    def _is_planned(self, model: ShelvedModel) -> bool:
        """Whether the arbiter decides about a model now. Measures one that is wanted and whose size is not known."""
        engine = model.engine
        if engine is not None and engine.driver.closed.done():
            model.set_failed(UnavailableError("its engine has failed, see the log"))
        model.try_again()
        is_unknown = engine is None and model.estimate is None and model.is_wanted and model.state == "new"
        if is_unknown and model not in self._moves:  # an earlier load may still run after a failure or refusal
            self._begin_load(model)
        if model.state == "failed" or (engine is None and model.estimate is None):
            return False
        return engine is not None or model.is_wanted or model.state == "loading"

    def _begin_load(self, model: ShelvedModel) -> None:
        """Measure a model, unless its files did not answer a short time ago."""
        if refused_s := self._hung.refused_s(model.config):
            error = UnavailableError(f"its load hung and ended its process; it is tried again in {refused_s:.0f} s")
            model.set_failed(error, min(refused_s, _HUNG_LOOK_S))
            return
        model.state = "loading"
        self._moves.load(model, partial(self._measure, model))

    def _need(self, model: ShelvedModel, now: float) -> ModelNeed:
        if model.engine is not None:
            return loaded_need(model, model.engine, now)
        assert model.estimate is not None
        return unloaded_need(model, model.estimate.weight_bytes, self._warm_up_bytes(model, model.estimate))

    def _warm_up_bytes(self, model: ShelvedModel, estimate: Estimate) -> int:
        """KV memory for the warm-up, or most of what the device has beside the weights, which may do for requests."""
        room_bytes = self._room_bytes(model, estimate.weight_bytes)
        return max(min(estimate.kv_bytes, int(_MOST_OF_ROOM * room_bytes)), 0)

    def _room_bytes(self, model: ShelvedModel, weight_bytes: int) -> int:
        """Memory that a model with these weights can have beside them and beside models that are kept always."""
        others = (other for other in self._models() if other.config.keep == "always" and other is not model)
        return self._capacity_bytes - weight_bytes - sum(other.kept_bytes for other in others)

    def _limit_requests(self, model: ShelvedModel, engine: AsyncEngine) -> None:
        """Refuse requests from now on that could never run, by the same sum as `turns.refusals`."""
        engine.driver.engine.set_room(max(self._room_bytes(model, model.weight_bytes), 0))

    def _carry_out(self, allocation: Allocation, models: Mapping[str, ShelvedModel]) -> None:
        """In the order that `arbiter` asks for."""
        given = allocation.budgets.items()
        budgets = {models[name]: budget for name, budget in given if models[name].engine is not None}
        for model, budget in budgets.items():
            self._set_budget(model, budget, lower=True)
        _note_lost(allocation, models)
        for name, other in allocation.sleep.items():
            if other is not None or time.monotonic() - models[name].turn_since > _LEAST_AWAKE_S:
                self._put_to_sleep(models[name], other)
        for model, budget in budgets.items():
            self._set_budget(model, budget, lower=False)
        for name in allocation.wake:
            self._wake(models[name])
        for model in models.values():
            wait = allocation.waits.get(model.name)
            model.turn_wait_s = 0.0 if wait is None else wait.expected_s
        for name, reason in allocation.refused.items():
            models[name].refuse(UnavailableError(reason))
            self._has_changed = True  # the next request may do with less

    def _set_budget(self, model: ShelvedModel, budget_bytes: int, *, lower: bool) -> None:
        if model.engine is None:
            return
        engine = model.engine.driver.engine
        pinned_bytes = engine.footprint.pinned_bytes
        now_bytes = engine.footprint.budget_bytes - pinned_bytes
        if budget_bytes == now_bytes or (budget_bytes < now_bytes) != lower:
            return
        if not lower and model.lost_at is not None and model.state == "awake":
            model.turn_since, model.lost_at = time.monotonic(), None
        self._attempt(model, partial(engine.set_kv_budget, budget_bytes + pinned_bytes))

    def _put_to_sleep(self, model: ShelvedModel, other: str | None) -> None:
        if model.engine is None:  # it has just failed
            return
        engine, began = model.engine.driver.engine, time.monotonic()
        footprint, num_running = engine.footprint, engine.scheduler.num_running
        num_bytes = footprint.held_bytes + footprint.graph_bytes + model.weight_bytes

        def sleep() -> None:
            engine.sleep()
            engine.set_kv_budget(0)

        if not self._attempt(model, sleep):
            return
        model.state = "asleep"
        reason = f" after {began - model.worked_at:.0f} s without a request"
        if other is not None:
            model.num_evictions, model.evicted_for = model.num_evictions + 1, other
            reason = f" for {other!r}" + (f", preempting its {num_running} running sequences" if num_running else "")
        seconds = time.monotonic() - began
        logger.info("put %r to sleep%s: %.1f MiB in %.0f ms", model.name, reason, num_bytes / 2**20, 1e3 * seconds)
        self._has_changed = True  # its memory can be given out

    def _attempt(self, model: ShelvedModel, call: Callable[[], None]) -> bool:
        """Call a function of one model; if it raises, the model fails. Returns whether it succeeded."""
        try:
            call()
        except Exception as error:
            logger.exception("the model %r failed; stopping its engine", model.name)
            self._fail(model, error)
            return False
        return True

    def _wake(self, model: ShelvedModel) -> None:
        """Begin to load or wake a model, for which there is memory."""
        if model in self._moves or model.state == "failed":  # an earlier part of this plan may have failed it
            return
        if model.engine is not None:
            model.state = "waking"
            self._moves.wake(model, partial(self._map, model, model.engine))
        elif self._device.has_workspace and time.monotonic() >= model.load_after:
            model.state = "loading"
            estimate = model.estimate
            assert estimate is not None
            self._moves.load(model, partial(self._load, model, estimate), estimate.weight_bytes)

    def _check_integrity(self) -> None:
        self._device.shared.pages.check_integrity()
        for model in self._models():
            if model.engine is not None and not model.engine.driver.closed.done() and model not in self._moves:
                engine = model.engine.driver.engine
                engine.check_integrity()
                held = engine.footprint.held_bytes, engine.footprint.graph_bytes
                if model.state == "asleep" and (any(held) or not engine.asleep):
                    raise IntegrityError(
                        f"{model.name!r} is asleep and holds {held[0]} bytes of KV memory, {held[1]} of graphs"
                    )

    def _call(self, function: Callable[[], None]) -> None:
        def call() -> None:
            self._has_changed = True
            function()

        self._thread.call(call)

    # ---- other threads ----

    def _measure(self, model: ShelvedModel) -> Callable[[], None]:
        """Estimate the size of a model from its config."""
        config = resolve(model.config.engine)
        size = ModelSize(config)
        tokens = min(config.max_num_batched_tokens, config.max_model_len or size.model.max_positions) + _WARM_UP_TOKENS
        estimate = Estimate(
            weight_bytes=size.weight_bytes,
            kv_bytes=int(_ROUNDING * tokens * size.token_bytes) + _WARM_UP_BYTES,
        )
        workspace_bytes = estimated_activations(config, size.model)
        needed, capacity = estimate.weight_bytes + workspace_bytes, self._device.shared.pages.capacity_bytes
        if needed > capacity:
            raise ModelError(
                f"its weights take {estimate.weight_bytes} bytes and a step {workspace_bytes}; device_memory_bytes is "
                f"{capacity}: raise it"
            )

        def then() -> None:
            model.workspace_bytes = workspace_bytes
            model.measured(estimate)

        return then

    def _load(self, model: ShelvedModel, estimate: Estimate) -> Callable[[], None]:
        kv_bytes, began = self._warm_up_bytes(model, estimate), time.monotonic()
        pages, most_bytes = self._device.shared.pages, self._room_bytes(model, 0)
        has_all = pages.available_bytes >= most_bytes

        def admit(memory: KVMemory, _: DevicePlan | None) -> None:
            set_budget_within(memory, kv_bytes, 1)

        try:
            engine = AsyncEngine(
                model.config.engine,
                admit=admit,
                prefixes_of_others=self._prefixes_of_others,
                loaded=model.loaded_adapters,
                thread=self._thread,
                device=self._device.shared,
                most_s=longest_load_s(estimate.weight_bytes),
            )
        except OutOfPages as error:  # the weights take more than was estimated, or the memory is not there yet
            has_all = has_all and pages.available_bytes >= most_bytes and error.needed <= estimate.weight_bytes
            model.num_short = model.num_short + 1 if has_all else 0
            if model.num_short >= _MOST_SHORT:
                model.num_short = 0
                raise ModelError(
                    f"the device has {most_bytes} bytes for weights and KV memory of {model.name!r}, which is too few: "
                    f"{error}; raise device_memory_bytes"
                ) from error
            logger.info("%r waits for memory: %s", model.name, error)
            model.load_after = time.monotonic() + _RELOAD_S
            weight_bytes = max(error.needed, estimate.weight_bytes)
            return partial(model.measured, replace(estimate, weight_bytes=weight_bytes))
        self._hung.forget(model.config)

        def then() -> None:
            if model not in self._models():  # it was removed meanwhile
                engine.stop()
                return
            footprint = engine.driver.engine.footprint
            model.weight_bytes = footprint.weight_bytes
            self._capacity_bytes -= footprint.anchor_bytes
            self._limit_requests(model, engine)
            model.engine = engine  # from here on the engine is given later adapters; now those that have come meanwhile
            engine.driver.engine.adapters.set_loaded(model.loaded_adapters)
            model.set_loaded(engine, time.monotonic() - began)
            engine.driver.closed.add_done_callback(lambda _: self.note_change())
            loaded = [m.engine.driver.engine for m in self._models() if m.engine is not None]
            self._device.give_back_cached(sum(each.footprint.graph_bytes for each in loaded))
            logger.info("loaded %r: %.1f MiB in %.2f s", model.name, model.weight_bytes / 2**20, model.load_s)

        return then

    def _map(self, model: ShelvedModel, engine: AsyncEngine) -> Callable[[], None]:
        began = time.monotonic()
        try:
            engine.driver.engine.footprint.map_weights()
        except OutOfPages as error:  # the memory that the plan counted on is not there yet
            logger.debug("%r waits for memory: %s", model.name, error)

            def back() -> None:
                if model.engine is engine:  # else it has failed meanwhile
                    model.state = "asleep"

            return back
        seconds = time.monotonic() - began  # without the time until the step in progress ends

        def then() -> None:
            if engine.driver.closed.done() or model.engine is not engine:  # it has failed meanwhile
                return
            engine.driver.engine.wake()
            model.note_awake(seconds)
            logger.info("woke %r: %.1f MiB in %.0f ms", model.name, model.weight_bytes / 2**20, 1e3 * model.last_wake_s)

        return then

    def _fail(self, model: ShelvedModel, error: BaseException) -> None:
        if device_fault(self._device.device) is not None:
            self._thread.device_lost = True
        reason = error if isinstance(error, Exception) else EngineError(f"{type(error).__name__}: {error}")
        if model.engine is not None:
            model.engine.stop(f"the model {model.name!r} cannot be served now: {reason}")
        model.set_failed(reason, None if model in self._models() else math.inf)


def _is_asked_for(model: ShelvedModel) -> bool:
    """Whether requests wait for its load, or for the thread."""
    return model.is_wanted or (model.engine is not None and bool(model.engine.driver.arriving))


def _sleeping(models: Mapping[str, ShelvedModel], allocation: Allocation) -> dict[str, Footprint]:
    """Models whose weights are worth reading ahead, the next ones first."""
    return {
        name: engine.driver.engine.footprint
        for name in (*allocation.waits, *allocation.prefetch)
        if models[name].state == "asleep" and (engine := models[name].engine) is not None
    }


def _waits_for_memory(model: ShelvedModel) -> bool:
    """Whether a loaded model has requests and no memory for them."""
    if model.engine is None:
        return False
    engine = model.engine.driver.engine
    return engine.starved or bool(engine.adapters.wanted_bytes) or (model.state == "asleep" and engine.has_work)


def _note_lost(allocation: Allocation, models: Mapping[str, ShelvedModel]) -> None:
    """Note when models with requests lose their memory."""
    for name in (*allocation.sleep, *allocation.preempt):
        engine = models[name].engine
        if not allocation.budgets.get(name) and engine is not None and engine.driver.engine.has_work:
            models[name].lost_at = time.monotonic()
