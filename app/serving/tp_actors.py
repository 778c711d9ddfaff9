"""Peers of a tensor-parallel replica as Ray actors, one in each further bundle of the replica's placement group."""

from __future__ import annotations

import logging
import os
import select
import signal
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ray
import torch
from ray.actor import ActorHandle
from ray.util import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from app.config.machine import num_threads
from app.engine.tensor_parallel.processes import Launch, RankProcesses, RankSpec
from app.engine.tensor_parallel.worker import RankWorker, run_to_the_end
from app.errors import ConfigError

# Actors start in seconds; more than this means that the cluster has no room for them after all.
START_TIMEOUT_S = 300.0


class RankActor:
    """A peer. Its process does nothing else."""

    def place(self) -> tuple[str, int]:
        """(node, process id)."""
        return ray.get_runtime_context().get_node_id(), os.getpid()

    def run(self, spec: RankSpec) -> None:
        """Ends, and the process with it, when rank 0 says so or something fails."""
        logging.basicConfig(format=f"%(asctime)s %(levelname)s rank {spec.rank} %(name)s: %(message)s")
        if spec.leader_pid is None:  # rank 0 is on another node
            spec = replace(spec, host=ray.util.get_node_ip_address())
        device = torch.device("cuda", 0) if spec.config.device == "cuda" else torch.device("cpu")  # Ray shows it one
        run_to_the_end(RankWorker(spec, num_threads(spec.config), device))
        ray.actor.exit_actor()


class ActorProcesses:
    """`RankProcesses` that are actors. They die with the replica, which owns them.

    Raises:
        ConfigError: the replica has no placement group with a bundle for each rank.
    """

    may_kill_leader = True  # a replica that hangs is replaced sooner when it is dead

    def __init__(self, num_peers: int, group: Any) -> None:
        bundles = [] if group is None else group.bundle_specs
        if len(bundles) != num_peers + 1:
            raise ConfigError(
                f"{num_peers + 1} ranks need a placement group of as many bundles, the replica has {len(bundles)}: "
                "set placement_group_bundles of the deployment accordingly, or leave them out"
            )
        self._actors: list[ActorHandle[Any]] = []
        for peer in range(num_peers):
            resources = dict(bundles[peer + 1])
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=peer + 1)
            options = {
                "num_cpus": resources.pop("CPU", 0),
                "num_gpus": resources.pop("GPU", 0),
                "resources": {name: amount for name, amount in resources.items() if name != "memory"},
                "scheduling_strategy": strategy,
                "max_restarts": 0,
            }
            actor: Any = ray.remote(**options)(RankActor)
            self._actors.append(actor.remote())
        places: list[tuple[str, int]] = ray.get(
            [actor.place.remote() for actor in self._actors], timeout=START_TIMEOUT_S
        )
        node = ray.get_runtime_context().get_node_id()
        self.on_one_machine = all(place == node for place, _ in places)
        self.host = "127.0.0.1" if self.on_one_machine else ray.util.get_node_ip_address()
        # Of processes on this node: they can be watched and killed without asking Ray, even when they are stopped.
        self._pidfds = [os.pidfd_open(pid) if place == node else None for place, pid in places]
        self._runs: list[Any] = []

    def run(self, specs: Sequence[RankSpec]) -> None:
        self._runs = [actor.run.remote(spec) for actor, spec in zip(self._actors, specs, strict=True)]

    def is_alive(self, peer: int) -> bool:
        pidfd = self._pidfds[peer]
        if pidfd is not None:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            return not poll.poll(0)
        if not self._runs:
            return True
        ended, _ = ray.wait([self._runs[peer]], timeout=0)
        return not ended

    def kill(self, peer: int) -> None:
        pidfd = self._pidfds[peer]
        if pidfd is not None and self.is_alive(peer):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        ray.kill(self._actors[peer])

    def close(self) -> None:
        pidfds, self._pidfds = self._pidfds, [None] * len(self._actors)
        for pidfd in pidfds:
            if pidfd is not None:
                os.close(pidfd)


def actors_of_this_replica() -> Launch:
    """`Launch` for the replica that this is called in."""
    group = get_current_placement_group()

    def launch(num_peers: int) -> RankProcesses:
        return ActorProcesses(num_peers, group)

    return launch
