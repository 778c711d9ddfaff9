"""Ray's `KVAwareRouter` as a policy of the simulator: the decisions of the Dynamo service that it asks, written again.

`ray.llm`'s router (2.58 and later) hands each prompt to Dynamo's selection service (ai-dynamo/dynamo,
`lib/kv-router/src/scheduling/selector.rs`, `DefaultWorkerSelector`). For each worker, in blocks:

    cost = prefill_load_scale * (active prefill + prompt - overlap_score_credit * cached)
           + blocks in use by active requests, this one included, each counted once

The least cost wins; with a temperature, softmax over the costs' range draws the winner. Defaults are Dynamo's: scale
and credit 1, temperature 0. Requests count as active prefill from the decision until their first token, by what was not
cached then, and hold the blocks of their prompts until they end (`router_track_output_blocks` is off).

Here all routers know all of it exactly and at once: what is cached, what others have sent, and what has ended. Ray's
broadcast it to each other. Dynamo's queue, for when all workers have 16 steps of prefill waiting, is left out.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from benchmarks.simulator.replica import SimulatedReplica
from folio.app.fleet.directory import PrefixDirectory
from folio.app.fleet.fleet import RoutedRequest


class KvIndex:
    """Exact index of cached prefixes by replica, as from KV events."""

    def __init__(self) -> None:
        self._directory = PrefixDirectory()

    def cached_units(self, keys: Sequence[bytes], replicas: Sequence[SimulatedReplica]) -> list[int]:
        """Number of units of a prompt that each replica has cached."""
        for replica in replicas:
            cached = replica.cached_keys()
            self._directory.apply_keys(replica.index, cached.keys, cached.changes, cached.stride, cached.version)
        found = dict.fromkeys((replica.index for replica in replicas), 0)
        for units, slots in self._directory.match(keys, sum(1 << index for index in found)):
            found |= {index: units for index in found if slots >> index & 1}
        return list(found.values())


class KvAware:
    """The policy of the module's docstring.

    Args:
        index: shared by all routers.
        replica: the present state of a replica, by name.
    """

    def __init__(
        self,
        index: KvIndex,
        replica: Callable[[str], SimulatedReplica],
        rng: random.Random,
        *,
        unit_tokens: int,
        prefill_load_scale: float = 1.0,
        overlap_score_credit: float = 1.0,
        temperature: float = 0.0,
    ) -> None:
        self._index = index
        self._replica = replica
        self._rng = rng
        self._unit_tokens = unit_tokens
        self._prefill_load_scale = prefill_load_scale
        self._overlap_score_credit = overlap_score_credit
        self._temperature = temperature

    def rank_replicas(self, request: RoutedRequest, replica_ids: Sequence[str], now: float) -> list[str]:
        replicas = [self._replica(name) for name in replica_ids]
        cached = self._index.cached_units(request.keys, replicas)
        costs = [self._cost(request, replica, units) for replica, units in zip(replicas, cached, strict=True)]
        chosen = self._rng.choices(replica_ids, self._chances(costs))[0]
        return [chosen, *(name for name in replica_ids if name != chosen)]

    def _cost(self, request: RoutedRequest, replica: SimulatedReplica, cached_units: int) -> float:
        waiting = (replica.prefill_due_tokens + request.num_tokens) / self._unit_tokens
        prefill = self._prefill_load_scale * max(waiting - self._overlap_score_credit * cached_units, 0.0)
        return prefill + replica.active_units_with(request.keys)

    def _chances(self, costs: Sequence[float]) -> list[float]:
        """Weight of each replica, not normalised; without a temperature, only those of least cost have one."""
        least, most = min(costs), max(costs)
        if not self._temperature or least == most:
            return [float(cost == least) for cost in costs]
        return [math.exp((least - cost) / ((most - least) * self._temperature)) for cost in costs]
