"""Models' needs of the device's memory and time; those of a loaded model are read from its engine between two steps."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import chain, islice

from folio.app.config.shelf import SLO
from folio.app.engine.async_engine import AsyncEngine
from folio.app.engine.engine import Engine
from folio.app.engine.request.request import Request, Sequence
from folio.app.shelf.allocation import KVNeed, ModelNeed
from folio.app.shelf.arbiter import HORIZON_S
from folio.app.shelf.shelved_model import ShelvedModel

# A request that begins gets memory for so many tokens beside its prompt, so that it does not soon wait again.
_GROWTH_TOKENS = 64
# Waiting requests whose memory is added up; more could hardly run together.
_MOST_COUNTED = 64
# Most of what a model can have beside its weights that its decode graphs take.
_GRAPH_SHARE = 0.25
# A model's share of the device's time is its weight, times this number plus its pressure, up to a bound.
LEAST_URGENCY, MOST_PRESSURE = 0.5, 3.0


def unloaded_need(model: ShelvedModel, weight_bytes: int, warm_up_bytes: int) -> ModelNeed:
    """Needs of a model that is being loaded, or is to be, with the estimated bytes of its weights and of the KV memory
    for its warm-up."""
    config, is_loading = model.config, model.state == "loading"
    kv_bytes = warm_up_bytes if is_loading else 0
    return ModelNeed(
        name=model.name,
        state="waking" if is_loading else "asleep",
        weight_bytes=weight_bytes,
        most_bytes=warm_up_bytes,
        budget_bytes=kv_bytes,
        held_bytes=kv_bytes,
        num_waiting=max(model.num_pending, 1),
        first_bytes=warm_up_bytes,
        waiting_bytes=warm_up_bytes,
        wake_s=model.usual_load_s,
        waited_s=model.pending_s,
        ttft_s=config.slo.ttft_s,
        share=config.weight,
        keep=config.keep,
    )


def loaded_need(model: ShelvedModel, engine: AsyncEngine, now: float) -> ModelNeed:
    """Needs of a model with an engine, whose share of the device's time follows them. `now`: by `time.monotonic`."""
    config, kv = model.config, engine_need(engine.driver.engine)
    urgency = LEAST_URGENCY + min(pressure(kv, config.slo, engine.driver.step_gap_s), MOST_PRESSURE)
    engine.driver.share = config.weight * urgency
    if engine.driver.engine.adapters.restoring and model.state == "awake":
        model.put_off_turn(now)
    model.note_work(now, has_work=kv.has_work, has_preempted=kv.has_preempted)
    return ModelNeed(
        **{field.name: getattr(kv, field.name) for field in fields(KVNeed)},
        name=model.name,
        state=model.state if model.state == "waking" or model.state == "awake" else "asleep",
        weight_bytes=model.weight_bytes + kv.beside_bytes,
        wake_s=model.usual_wake_s,
        waited_s=waited_s(kv, model.preempted_at),
        lost_s=math.inf if model.lost_at is None else now - model.lost_at,
        turn_s=now - model.turn_since,
        idle_s=now - model.worked_at,
        probability=model.arrivals.probability(now, HORIZON_S),
        ttft_s=config.slo.ttft_s,
        share=config.weight,
        keep=config.keep,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineNeed(KVNeed):
    """KV memory and requests of an engine; all bytes beyond those of pinned prefixes.

    Attributes:
        beside_bytes: of pinned prefixes; of adapters in memory, and of those that requests wait for; of graphs, and of
            one for which there was no memory.
        submitted_at: arrival of the request without a first token that has waited longest, by `time.perf_counter`;
            `None` if there is none.
        begun_at: the same of the requests that run.
        has_preempted: whether requests with a first token have no memory.
    """

    beside_bytes: int
    submitted_at: float | None
    begun_at: float | None
    has_preempted: bool


def engine_need(engine: Engine) -> EngineNeed:
    """Read an engine's needs, in the step thread."""
    memory, scheduler, step = engine.memory, engine.scheduler, engine.recovery.step_times
    pages, begun = memory.pages, scheduler.begun
    share = 1.0 if engine.speculation is None else engine.speculation.memory_share
    page_bytes = pages.page_bytes / share  # a draft model's part included

    def bytes_for(request: Request) -> int:
        shared_tokens = len(request.sequences[0].prompt_token_ids) if request.sequences else 0
        num_pages = memory.pages_together([_next_tokens(sequence) for sequence in request.sequences], shared_tokens)
        return int((num_pages + begun.pages_per_token * (request.num_sequences - len(request.sequences))) * page_bytes)

    waiting = list(islice(chain(begun.preempted, scheduler.waiting, engine.adapters.held_requests), _MOST_COUNTED))
    waiting_bytes = sum(map(bytes_for, waiting))
    first_bytes = 0 if (first := engine.first) is None else bytes_for(first)
    owned_bytes = int((pages.budget - memory.num_free_pages - pages.num_pinned) * page_bytes)
    pinned_bytes = engine.footprint.pinned_bytes
    held_bytes = max(engine.footprint.held_bytes - pinned_bytes, 0)
    cached_bytes = max(held_bytes - owned_bytes, 0)
    cached_tokens = cached_bytes / max(page_bytes * begun.pages_per_token, 1) * memory.prefixes.unit_tokens
    num_waiting = sum(request.max_sequences for request in waiting)
    remaining = max((r.max_tokens - r.num_output_tokens for r in begun.sequences()), default=0)
    queued_tokens = sum(
        sequence.num_uncomputed for sequence in _sequences(begun.running) if sequence.num_uncomputed > 1
    )
    beside_bytes = pinned_bytes + _adapter_bytes(engine, first_bytes + pinned_bytes)
    beside_bytes += _graph_bytes(engine, first_bytes + beside_bytes)
    return EngineNeed(
        beside_bytes=beside_bytes,
        budget_bytes=max(engine.footprint.budget_bytes - pinned_bytes, 0),
        most_bytes=max(int(pages.most * page_bytes) - pinned_bytes, 0),
        held_bytes=held_bytes,
        num_running=scheduler.num_running,
        num_waiting=num_waiting,
        running_bytes=owned_bytes + int(begun.reserve * page_bytes) if scheduler.num_running else 0,
        first_bytes=first_bytes,
        waiting_bytes=waiting_bytes,
        cached_bytes=cached_bytes,
        cached_s=cached_tokens * step.token_s,
        work_s=remaining * (step.fixed_s + step.token_s * scheduler.num_running) + queued_tokens * step.token_s,
        submitted_at=_oldest(waiting),
        begun_at=_oldest(begun.running),
        has_preempted=any(sequence.num_output_tokens for sequence in _sequences(begun.preempted)),
    )


def _adapter_bytes(engine: Engine, least_bytes: int) -> int:
    """Bytes of adapters in memory and of those that requests wait for. The latter wait while there is no room beside
    the request that runs first; and unused ones give way to both.

    Args:
        least_bytes: KV memory of that request, and of pins.
    """
    adapters = engine.adapters
    if adapters.memory is None:
        return 0
    room_bytes, wanted_bytes = adapters.memory.room_bytes - least_bytes, adapters.wanted_bytes
    if adapters.memory.charged_bytes + wanted_bytes > room_bytes:
        adapters.unload_unused()
    held_bytes = adapters.memory.charged_bytes
    # An adapter of the first request, or of one that has begun, is necessary: without it that request is refused.
    waits = held_bytes + wanted_bytes > room_bytes and not (adapters.restoring or engine.scheduler.first is None)
    return held_bytes if waits else held_bytes + wanted_bytes


def _graph_bytes(engine: Engine, least_bytes: int) -> int:
    """Bytes of graphs, and of one that a step has wanted and that had no memory. They are bounded by a share of
    what the model can ever have beside its weights, and give way to what it needs.

    Args:
        least_bytes: KV memory of the request that runs first, pins and adapters.
    """
    graphs, memory = engine.footprint.graphs, engine.adapters.memory
    if not graphs or memory is None or memory.room_bytes == math.inf:
        return engine.footprint.graph_bytes
    most_bytes = int(min(_GRAPH_SHARE * memory.room_bytes, memory.room_bytes - least_bytes))
    engine.limit_graphs(max(most_bytes, 0))
    return engine.footprint.graph_bytes + sum(captured.wanted_bytes for captured in graphs)


def pressure(need: EngineNeed, slo: SLO, step_gap_s: float) -> float:
    """How near a model is to missing its targets: 1 is at the target.

    Args:
        step_gap_s: seconds between the ends of its last steps.
    """
    since = [at for at in (need.submitted_at, need.begun_at) if at is not None]
    wait_s = time.perf_counter() - min(since) if since else 0.0
    return max(wait_s / slo.ttft_s, step_gap_s / slo.tpot_s if need.num_running else 0.0)


def waited_s(need: EngineNeed, preempted_at: float | None) -> float:
    """The longest time that one of its requests has waited for a first token, or, preempted, for the next one.

    Args:
        preempted_at: since when requests with a first token have had no memory, by `time.perf_counter`.
    """
    since = [at for at in (need.submitted_at, preempted_at) if at is not None]
    return time.perf_counter() - min(since) if since else 0.0


def _oldest(requests: list[Request]) -> float | None:
    """Arrival of the oldest request without a first token."""
    return min((r.submitted_at for r in _sequences(requests) if not r.num_output_tokens), default=None)


def _next_tokens(sequence: Sequence) -> int:
    return len(sequence.token_ids) + min(sequence.max_tokens - sequence.num_output_tokens, _GROWTH_TOKENS)


def _sequences(requests: list[Request]) -> Iterator[Sequence]:
    return (sequence for request in requests for sequence in request.sequences)
