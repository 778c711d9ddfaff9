"""Simulated replicas for the dashboard: pictures and costs of large fleets, without engines."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import numpy as np
from fastapi import FastAPI

from folio.app.dashboard.collector import Collector
from folio.app.dashboard.http import add_dashboard
from folio.app.dashboard.state import (
    Load,
    Memory,
    ReplicaDetail,
    ReplicaState,
    RunningSequence,
    Steps,
    Table,
    block_map,
    runs_of,
)
from folio.app.dashboard.traffic import TrafficLog
from folio.app.dashboard.views import ReplicaView, WatchCall
from folio.vmem import BlockState

_BLOCK_BYTES = 2 << 20
_STATES = [BlockState.ACTIVE, BlockState.SHARED, BlockState.CACHED, BlockState.PARKED, BlockState.FREE]


class SimulatedReplicas:
    """Replicas whose blocks come and go at random. See `folio.app.dashboard.collector.Source`."""

    def __init__(self, num_replicas: int, num_blocks: int) -> None:
        self.names = [f"r{number:02}x{number * 7919 % 9973:04}" for number in range(num_replicas)]
        self.is_open = True
        self._random = np.random.default_rng(1)
        self._blocks = [np.zeros(num_blocks, dtype=np.uint8) for _ in self.names]
        self._numbers = random.Random(1)

    async def look(self, call: WatchCall) -> tuple[Sequence[ReplicaView], int]:
        return [self._view(number, name, call) for number, name in enumerate(self.names)], 0

    async def num_starting(self) -> int:
        return 0

    def _view(self, number: int, name: str, call: WatchCall) -> ReplicaView:
        states = self._blocks[number]
        end = int(len(states) * (0.45 + 0.4 * np.sin(time.time() / 9 + number)))
        states[end:] = BlockState.UNBACKED
        holes = np.flatnonzero(states[:end] == BlockState.UNBACKED)
        states[holes] = self._random.choice(_STATES, len(holes), p=[0.5, 0.15, 0.25, 0.07, 0.03])
        counts = np.bincount(states, minlength=8).tolist()
        active, shared = counts[BlockState.ACTIVE], counts[BlockState.SHARED]
        running = max(1, end * 40 // len(states))
        load = {"num_running": running, "num_waiting": number % 3, "max_num_seqs": 64, "queued_tokens": 100 * number}
        memory = {
            "budget_bytes": len(states) * _BLOCK_BYTES,
            "physical_bytes": end * _BLOCK_BYTES,
            "active_bytes": (active + shared) * _BLOCK_BYTES,
            "cached_bytes": counts[BlockState.CACHED] * _BLOCK_BYTES,
            "parked_bytes": counts[BlockState.PARKED] * _BLOCK_BYTES,
        }
        state = ReplicaState(
            name=name,
            model="simulated",
            age_s=100.0 + number,
            load=dict.fromkeys(Load.model_fields, 0) | load,
            memory=dict.fromkeys(Memory.model_fields, 0) | memory,
            maps=(self._map(states, detailed=False),),
            steps=Steps(
                ago_s=tuple(0.025 * i for i in range(39, -1, -1)),
                num=(1,) * 40,
                step_ms=tuple(20 + self._numbers.random() * 5 for _ in range(40)),
                tokens=(running,) * 40,
                outputs=(running,) * 40,
                sequences=(running,) * 40,
                waiting=(number % 3,) * 40,
            ),
            last_step=call.since.get(name, 0) + 40,
        )
        detail = None
        if call.details is None or name in call.details:
            owned = np.flatnonzero(np.isin(states, (BlockState.ACTIVE, BlockState.SHARED))) + 1
            detail = ReplicaDetail(
                maps=(self._map(states, detailed=True),),
                sequences=tuple(self._sequence(i, owned[i * 90 : i * 90 + 20 + i * 3].tolist()) for i in range(24)),
                num_sequences=running,
                parked=(),
                num_parked=0,
                region_blocks=(8192,),
            ).model_dump_json()
        return ReplicaView(name, state.last_step, state.model_dump_json(), detail)

    def _map(self, states: np.ndarray, *, detailed: bool):  # type: ignore[no-untyped-def]
        return block_map(states, group=0, block_tokens=16, block_bytes=_BLOCK_BYTES, swapped=0, detailed=detailed)

    def _sequence(self, number: int, block_ids: list[int]) -> RunningSequence:
        table = Table(
            group=0,
            first=0,
            num_blocks=len(block_ids),
            runs=runs_of(block_ids, 128),
            slot=number,
            num_mapped=len(block_ids),
        )
        return RunningSequence(
            request_id=f"chatcmpl-{number:08x}",
            index=0,
            num_tokens=len(block_ids) * 16,
            num_prompt_tokens=64,
            num_cached_tokens=32,
            tables=(table,),
        )


def simulated_api(num_replicas: int, num_blocks: int) -> tuple[FastAPI, Collector]:
    """An application with the dashboard's routes only."""
    api = FastAPI()
    collector = Collector(SimulatedReplicas(num_replicas, num_blocks), TrafficLog(), "simulated")
    add_dashboard(api, collector)
    return api, collector
