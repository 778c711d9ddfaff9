"""Response bodies for operators: models, load, pins and budgets."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from folio.app.api.base import Omitted
from folio.app.fleet.status import ModelReport, ReplicaStatus
from folio.app.shelf.status import ModelState
from folio.vmem import BudgetAnswer, PinReport


class ModelCard(BaseModel):
    """A served model, or an adapter of the model `parent`.

    `max_model_len` is the context in tokens; null: the model has not been loaded yet. `description` says of the
    built-in model that it is a toy. `state`, with several models: the most ready state over the engine replicas.
    `sampling`: the parameters in the model's `generation_config`. They are not applied to requests; `folio chat` sends
    them.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "folio"
    max_model_len: int | None
    parent: str | None = None
    description: str | None = None
    state: Omitted[ModelState] = None
    sampling: Omitted[dict[str, float]] = None


class ModelDeleted(BaseModel):
    id: str
    object: Literal["model"] = "model"
    deleted: Literal[True] = True


class Version(BaseModel):
    version: str


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class _Report(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)


class LoadFigures(_Report):
    """Load of one engine replica, or of all together. Bytes are of the KV cache."""

    num_running: int
    """Sequences that have memory."""
    num_waiting: int
    """Sequences without memory: not begun yet, or preempted."""
    queued_tokens: int
    """Tokens of prompts that are not computed yet."""
    free_tokens: int
    """Further tokens that the KV cache can hold, evictable blocks included."""
    total_tokens: int
    """Tokens that the KV cache can hold within the budget."""
    budget_bytes: int
    physical_bytes: int
    """Allocated from the device."""
    active_bytes: int
    """Owned by requests and pinned prefixes."""
    cached_bytes: int
    """Evictable blocks of the prefix cache."""
    pinned_bytes: int
    swapped_bytes: int
    """Host memory of preempted requests."""
    prompt_tokens: int
    """Tokens of all prompts since the start."""
    cached_tokens: int
    """Those of them that were found in the prefix cache."""


class ModelLoad(_Report):
    """One model at one engine replica."""

    name: str
    state: ModelState
    num_running: int
    """Sequences that have memory."""
    num_waiting: int
    """Sequences without memory, also while the model sleeps or is being loaded."""
    queued_tokens: int
    """Tokens of prompts that are not computed yet."""
    queued_s: float
    """Expected time to compute them."""
    weight_bytes: int
    """Weights on the device now; 0 for a single model, which has the device alone."""
    kv_bytes: int
    """KV memory that exists now."""
    kept_bytes: int
    """Host memory of the prefixes that it keeps while it sleeps."""
    wake_s: float
    """Expected time until a new request has memory: the wake, and the turns of other models."""
    num_wakes: int
    num_evictions: int
    """Times that it was put to sleep for another model."""
    error: str | None = None
    """Why it has failed."""


class ReplicaLoad(LoadFigures):
    name: str
    queued_s: float
    """Expected time to compute the queued tokens."""
    busy_share: float
    """Share of the last seconds spent in steps with prefill."""
    max_num_seqs: int
    """Most sequences that run at once."""
    ready_s: float
    """Seconds that the engine took to start."""
    models: list[ModelLoad] = []
    """The figures of each model; the replica's are sums over them."""


class LoadReport(_Report):
    """All engine replicas that answered, in order of their names; `num_silent` did not."""

    object: Literal["load"] = "load"
    num_replicas: int
    num_silent: int
    total: LoadFigures
    least_queued_s: float | None
    """The least `queued_s` of a replica; null when none answered."""
    replicas: list[ReplicaLoad]


class PinCard(_Report):
    """A pinned prefix. Replicas that started after a request pinned it may not have it."""

    id: str
    object: Literal["pin"] = "pin"
    num_tokens: int
    num_bytes: int
    """Bytes on one replica, blocks shared with other pins included."""
    num_replicas: int
    """Replicas where it is pinned."""
    num_computed: int
    """Those of them that have it in memory. Where its model sleeps, or had no memory for it after a wake, the next wake
    computes it."""
    model: str
    """The model of the prefix."""


class PinList(BaseModel):
    object: Literal["list"] = "list"
    data: list[PinCard]


class PinDeleted(BaseModel):
    id: str
    object: Literal["pin"] = "pin"
    deleted: Literal[True] = True


class DrainReport(BaseModel):
    """The replica's requests move to others that have the same model; without any they stay."""

    object: Literal["drain"] = "drain"
    replica: str
    draining: bool


class BudgetReport(_Report):
    """The change of every engine replica's budget. Replicas that start later begin with `kv_memory_bytes`."""

    object: Literal["budget"] = "budget"
    budget_bytes: int
    revision: int
    answers: list[BudgetAnswer]
    """One for each replica: `applied`; `deferred`, until requests that hold more have ended or are preempted; or
    `stale`: the revision is old."""


def load_report(answers: Sequence[Any]) -> LoadReport:
    """The load report. Args: the `ReplicaStatus` of every replica, or the error instead of it."""
    statuses = sorted(_statuses(answers), key=lambda status: status.name)
    replicas = [_replica_load(status) for status in statuses]
    total = {name: sum(getattr(replica, name) for replica in replicas) for name in LoadFigures.model_fields}
    return LoadReport(
        num_replicas=len(answers),
        num_silent=len(answers) - len(replicas),
        total=LoadFigures(**total),
        least_queued_s=min((replica.queued_s for replica in replicas), default=None),
        replicas=replicas,
    )


def pin_list(answers: Sequence[Any]) -> PinList:
    """The pins. Args: see `load_report`. Raises the first error when no replica answered."""
    statuses = _statuses(answers)
    if answers and not statuses:
        raise answers[0]
    found: defaultdict[tuple[str, str], list[PinReport]] = defaultdict(list)
    for status in statuses:
        for model in status.models:
            for pin in () if model.memory is None else model.memory.pins:
                found[pin.name, model.name].append(pin)
    cards = [
        PinCard(
            id=name,
            num_tokens=pins[0].num_tokens,
            num_bytes=max(pin.num_bytes for pin in pins),
            num_replicas=len(pins),
            num_computed=sum(pin.num_bytes > 0 for pin in pins),
            model=model,
        )
        for (name, model), pins in sorted(found.items())
    ]
    return PinList(data=cards)


def _statuses(answers: Sequence[Any]) -> list[ReplicaStatus]:
    return [answer for answer in answers if isinstance(answer, ReplicaStatus)]


def _replica_load(status: ReplicaStatus) -> ReplicaLoad:
    """The figures of the memory's report, and those that only the load report has."""
    load, memory = status.load, status.memory
    models = [_model_load(model) for model in status.models]
    named: dict[str, Any] = {"name": status.name, "ready_s": status.ready_s, "models": models}
    named |= {"prompt_tokens": memory.queried_tokens, "cached_tokens": memory.hit_tokens}
    others = ReplicaLoad.model_fields.keys() - named
    return ReplicaLoad(**named, **{n: getattr(memory if hasattr(memory, n) else load, n) for n in others})


def _model_load(model: ModelReport) -> ModelLoad:
    """The figures of the load's report, and those that only the status has."""
    of_load, others = ("queued_tokens", "queued_s"), ModelLoad.model_fields.keys() - {"weight_bytes"}
    figures = {name: getattr(model.load if name in of_load else model.status, name) for name in others}
    return ModelLoad(weight_bytes=model.status.device_weight_bytes, **figures)
