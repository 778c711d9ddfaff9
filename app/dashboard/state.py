"""State of the dashboard: the answer of `GET /dashboard/state`, and the data of each event of `GET /dashboard/events`.

Version 1. Fields may be added; a field that changes its meaning raises `VERSION`. Neither texts nor token ids nor API
keys are in it, only ids of requests. `DashboardState.model_validate_json` reads an event's data.

`GET /dashboard/events` sends a server-sent event each second, the whole state each time, so that a client may miss any
of them. `?replica=NAME` (up to 4 of them, or none while there are no more than 4 replicas) chooses the replicas in
`details`; `?request=ID` names requests whose sequences are to be among a replica's, however many there are;
`?fast=true` sends ten events a second.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar, get_type_hints

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, create_model

from folio.app.engine.report import ReplicaReport
from folio.app.shelf.status import DeviceStatus, ModelStatus
from folio.vmem import BlockState, MemoryReport

VERSION = 1
# Names of the values in `BlockMap.cells`, by their number. `swapped` blocks are in host memory, beside the cells.
STATES = tuple(state.name.lower() for state in BlockState)


Part = TypeVar("Part", bound="State")


class State(BaseModel):
    """Base of the parts: fields of later versions are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")


def figures_of(status: type, names: str) -> Callable[[type[Part]], type[Part]]:
    """Decorator: gives a part some fields of a status, with their types. The part is made by `from_attributes`."""
    types = get_type_hints(status)
    for name, member in vars(status).items():
        if isinstance(member, property):
            types[name] = get_type_hints(member.fget)["return"]
    fields: dict[str, Any] = {name: (types[name], ...) for name in names.split()}

    def give(part: type[Part]) -> type[Part]:
        return create_model(part.__name__, __base__=part, __doc__=part.__doc__, __module__=part.__module__, **fields)

    return give


@figures_of(
    ReplicaReport,
    "num_running num_waiting num_decodes max_num_seqs queued_tokens queued_s free_tokens total_tokens busy_share",
)
class Load(State):
    """Load of a replica, see `folio.app.engine.report.ReplicaReport`. Sequences run or wait; `busy_share` is of recent
    time in steps that compute prompts."""


@figures_of(
    MemoryReport,
    "budget_bytes physical_bytes active_bytes cached_bytes pinned_bytes parked_bytes eager_bytes swapped_bytes "
    "swap_budget_bytes mapped_bytes reserved_bytes exposed_us hidden_us map_calls unmap_calls alias_calls "
    "create_calls destroy_calls adoptions demotions copied_blocks evicted_blocks queried_tokens hit_tokens",
)
class Memory(State):
    """KV memory of a replica, see `folio.vmem.MemoryReport`. Counts and times run from the start of the replica."""


class BlockMap(State):
    """The blocks of one layer group, in the order of their ids.

    Attributes:
        counts: blocks by state; all states add up to `num_blocks`, and `swapped` comes on top.
        shown_blocks: the cells are blocks 1 … `shown_blocks`; later blocks have no pages.
        cells: base64 of one byte a cell, a number of `STATES`: the state of its block, or of several blocks the most
            common one.
        cell_counts: if a cell is several blocks, base64 of little-endian uint16 `[cells, STATES]`; in `details` only.
    """

    group: int
    block_tokens: int
    block_bytes: int
    num_blocks: int
    counts: dict[str, int]
    shown_blocks: int
    blocks_per_cell: int
    cells: str
    cell_counts: str | None = None

    def states(self) -> bytes:
        """The numbers in `cells`."""
        return base64.b64decode(self.cells)


class Steps(State):
    """The steps since the previous event, the oldest first: an entry for each, or, after more than 40 steps, an entry
    for several consecutive ones, with their number, largest values and sums.

    Attributes:
        ago_s: time from the end of the entry's last step to the event.
        num: steps that an entry stands for.
        step_ms: longest of their times.
        tokens, outputs: computed tokens and generated ones, added up.
        sequences, waiting: largest batch and queue.
        queue_s: not by entry: time in the queue of the requests that have begun; the latest 256.
    """

    ago_s: tuple[float, ...] = ()
    num: tuple[int, ...] = ()
    step_ms: tuple[float, ...] = ()
    tokens: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    sequences: tuple[int, ...] = ()
    waiting: tuple[int, ...] = ()
    queue_s: tuple[float, ...] = ()


@figures_of(
    ModelStatus,
    "name state device_weight_bytes kv_bytes kept_bytes num_running num_waiting num_wakes wake_s last_wake_s "
    "num_evictions evicted_for error",
)
class ModelOnDevice(State):
    """A model of a replica whose models share a device, see `folio.app.shelf.status.ModelStatus`."""


@figures_of(DeviceStatus, "capacity_bytes used_bytes idle_bytes charged_bytes workspace_bytes")
class Device(State):
    """The memory that the models of a replica share, see `folio.app.shelf.status.DeviceStatus`."""

    needed_bytes: int = 0


class Gpu(State):
    """Memory of a replica's GPU by part, see `folio.app.engine.memory.gpu_memory.GpuMemory`."""

    parts: dict[str, int]
    pinned_bytes: int


class ReplicaState(State):
    """One engine replica. Load, memory and steps are of all its models together.

    Attributes:
        name: the ids of its answers end with it.
        model: the model whose blocks `maps` and the details show: of several the one with the most requests; empty if
            none has been loaded.
        age_s: since it became ready.
        is_draining: its requests move to others, and it gets no new ones.
        memory, maps: `None` and empty if the memory was busy at that moment.
        maps: one of each layer group, in at most 256 cells.
        last_step: number of the last step in `steps`.
        models, device: of a replica whose models share a device; empty and `None` for a single model.
        gpu: `None` on a CPU.
    """

    name: str
    model: str
    age_s: float
    is_draining: bool = False
    load: Load
    memory: Memory | None
    maps: tuple[BlockMap, ...]
    steps: Steps
    last_step: int
    models: tuple[ModelOnDevice, ...] = ()
    device: Device | None = None
    gpu: Gpu | None = None


class Table(State):
    """A sequence's blocks in one layer group, in order.

    Attributes:
        first: logical index of the first of them; earlier ones have left the window.
        num_blocks: how many there are.
        runs: their ids, as runs of first id and number: `[7, 3, 20, 1]` is 7, 8, 9, 20. The first 128 runs only.
        slot: of the sequence's region; `None`: it is read through its block table.
        num_mapped: places of the region that are mapped, those after the blocks in use included.
    """

    group: int
    first: int
    num_blocks: int
    runs: tuple[int, ...]
    slot: int | None
    num_mapped: int


class RunningSequence(State):
    """An output of a request, with the blocks that it holds. `request_id` without the replica's name."""

    request_id: str
    index: int
    num_tokens: int
    num_prompt_tokens: int
    num_cached_tokens: int
    tables: tuple[Table, ...]


class Parked(State):
    """A region without a sequence whose mappings are kept for the next one."""

    group: int
    slot: int
    num_mapped: int


class ReplicaDetail(State):
    """Details of one replica.

    Attributes:
        maps: in up to 4,096 cells of one block, or 1,024 of several.
        sequences: the longest 24, and those that were asked for; `num_sequences` is the number of all.
        parked: the latest 24 of each layer group; `num_parked` is the number of all.
        region_blocks: of each layer group, the virtual extent of a region in blocks.
    """

    maps: tuple[BlockMap, ...]
    sequences: tuple[RunningSequence, ...]
    num_sequences: int
    parked: tuple[Parked, ...]
    num_parked: int
    region_blocks: tuple[int, ...]


class Percentiles(State):
    """Percentiles of `num` values, in seconds; `None` without any."""

    num: int = 0
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None


class Traffic(State):
    """Requests through this ingress while it is watched, of the last minute at most.

    Attributes:
        watched_s: time that the figures cover.
        requests_per_s: ended requests; `failed_per_s`: of them those without a whole answer.
        output_tokens_per_s: of these requests. The replicas' `steps` tell what is generated now.
        prompt_tokens, cached_tokens: of these requests; their quotient is the hit rate.
        ttft_s: of streams, time to the first token. tpot_s: of each output, mean time of its further tokens.
        whole_s: of complete answers, time from the request to the end.
    """

    watched_s: float = 0.0
    num_in_flight: int = 0
    requests_per_s: float = 0.0
    failed_per_s: float = 0.0
    output_tokens_per_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    ttft_s: Percentiles = Percentiles()
    tpot_s: Percentiles = Percentiles()
    whole_s: Percentiles = Percentiles()


class Candidate(State):
    """A replica as the router saw it for one request: its cost is `ttft_s + harm_s`, and the least one is chosen."""

    replica: str
    cached_tokens: int
    queued_s: float
    ttft_s: float
    harm_s: float


class Decision(State):
    """Why a request went to a replica. `reason`: cost, session, fork, retry, continued (it was at another one),
    prefill, decode (roles), fetch (it gets a prompt's blocks while another one computes them), no report, first was
    full, or the policy's name; `candidates`: the best four."""

    ago_s: float
    request_id: str
    num_tokens: int
    chosen: str
    reason: str
    candidates: tuple[Candidate, ...] = ()


class FleetEvent(State):
    """A replica came, went, has fallen silent, or is heard of again."""

    ago_s: float
    kind: Literal["came", "went", "silent", "back"]
    replica: str


class DashboardState(State):
    """The whole state at one moment, as one ingress sees it.

    Attributes:
        at: seconds since 1970.
        num_viewers: of this ingress.
        num_starting: replicas that Serve is starting now.
        num_silent: replicas that have not answered in time.
        num_continued: calls through this ingress that went on at another replica, in the last minute.
        links: name → URL, of `http.dashboard_links`.
        details: by name of the replica.
        decisions, events: the latest, the newest first.
    """

    version: int = VERSION
    at: float
    period_s: float
    model: str
    states: tuple[str, ...] = STATES
    num_viewers: int
    num_starting: int
    num_silent: int
    num_continued: int = 0
    links: dict[str, str] = Field(default_factory=dict)
    traffic: Traffic
    decisions: tuple[Decision, ...]
    events: tuple[FleetEvent, ...]
    replicas: tuple[ReplicaState, ...]
    details: dict[str, ReplicaDetail] = Field(default_factory=dict)


# Cells of a map: in an overview, of one block each in a detailed one, and of several.
OVERVIEW_CELLS, DETAIL_CELLS, COUNTED_CELLS = 256, 4096, 1024
_LEAST_SHOWN = 64


def block_map(
    states: np.ndarray[tuple[int], np.dtype[np.uint8]],
    *,
    group: int,
    block_tokens: int,
    block_bytes: int,
    swapped: int,
    detailed: bool,
) -> BlockMap:
    """The map of one layer group.

    Args:
        states: the `BlockState` of every block.
        swapped: its blocks in host memory.
    """
    num_blocks = len(states)
    totals = np.bincount(states, minlength=len(STATES))
    backed = states.nonzero()[0]
    # A power of two: the scale of the picture changes seldom.
    shown = 1 << max(int(backed[-1]) if len(backed) else 0, _LEAST_SHOWN - 1).bit_length()
    shown = min(shown, num_blocks)
    cells, counts = states[:shown], None
    per_cell = 1
    if shown > (DETAIL_CELLS if detailed else OVERVIEW_CELLS):
        per_cell = -(-shown // (COUNTED_CELLS if detailed else OVERVIEW_CELLS))
        num_cells = -(-shown // per_cell)
        padded = np.full(num_cells * per_cell, len(STATES), dtype=np.int64)  # after the last block: no state
        padded[:shown] = cells
        padded += np.repeat(np.arange(num_cells), per_cell) * (len(STATES) + 1)
        table = np.bincount(padded, minlength=num_cells * (len(STATES) + 1)).reshape(num_cells, -1)[:, : len(STATES)]
        # A cell with a few pages in it is not shown as empty.
        visible = table.copy()
        visible[:, BlockState.UNBACKED] = np.minimum(visible[:, BlockState.UNBACKED], visible[:, 1:].sum(axis=1) == 0)
        cells = visible.argmax(axis=1).astype(np.uint8)
        counts = table.astype("<u2") if detailed else None
    return BlockMap(
        group=group,
        block_tokens=block_tokens,
        block_bytes=block_bytes,
        num_blocks=num_blocks,
        counts=dict(zip(STATES, totals.tolist(), strict=True)) | {"swapped": swapped},
        shown_blocks=shown,
        blocks_per_cell=per_cell,
        cells=base64.b64encode(cells.tobytes()).decode(),
        cell_counts=None if counts is None else base64.b64encode(counts.tobytes()).decode(),
    )


def runs_of(block_ids: Sequence[int], most: int) -> tuple[int, ...]:
    """The first `most` runs of consecutive ids: first id, number, first id, …"""
    runs: list[int] = []
    for block_id in block_ids:
        if runs and block_id == runs[-2] + runs[-1]:
            runs[-1] += 1
        elif len(runs) < 2 * most:
            runs += (block_id, 1)
        else:
            break
    return tuple(runs)
