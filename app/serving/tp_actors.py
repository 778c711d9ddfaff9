"""What Ray gives a replica: its device, and peers of a tensor-parallel one as actors, one in each bundle of the
placement group but the replica's."""

from __future__ import annotations

import logging
import os
import select
import signal
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import ray
import torch
from ray.actor import ActorHandle
from ray.util import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from folio.app.config.engine import EngineConfig
from folio.app.config.machine import num_threads
from folio.app.engine.model.device import resolve
from folio.app.engine.ranks.processes import Launch, RankSpec
from folio.app.engine.ranks.worker import RankWorker, run_to_the_end
from folio.app.errors import ConfigError

logger = logging.getLogger(__name__)

# Actors start in seconds; beyond this bound the cluster has no room for them.
START_TIMEOUT_S = 300.0


class RankActor:
    """One peer, in a process of its own."""

    def place(self) -> tuple[str, int]:
        """(node, process id)."""
        return ray.get_runtime_context().get_node_id(), os.getpid()

    def run(self, spec: RankSpec) -> None:
        """Run the peer until rank 0 ends it or an error does; the process ends, too."""
        logging.basicConfig(format=f"%(asctime)s %(levelname)s rank {spec.rank} %(name)s: %(message)s")
        if spec.leader_pid is None:  # rank 0 is on another node
            spec = replace(spec, host=ray.util.get_node_ip_address())
        # Ray shows this process its own GPU only, which may be another rank's, too.
        device = torch.device("cuda", 0) if spec.config.device == "cuda" else torch.device("cpu")
        run_to_the_end(RankWorker(spec, num_threads(spec.config), device))
        ray.actor.exit_actor()


class ActorProcesses:
    """`RankProcesses` as actors, which the replica owns: they die with it.

    Raises:
        ConfigError: the replica has no placement group with a bundle for each rank.
    """

    may_kill_leader = True  # a dead replica is replaced sooner than one that hangs

    def __init__(self, num_peers: int, group: Any) -> None:
        bundles = [] if group is None else group.bundle_specs
        if len(bundles) != num_peers + 1:
            raise ConfigError(
                f"{num_peers + 1} ranks need a placement group of as many bundles; the replica has {len(bundles)}: set "
                "placement_group_bundles of the deployment accordingly, or leave them out"
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
        # Processes on this node are watched and killed without Ray, even when they are stopped.
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
    """`Launch` for the calling replica."""
    return partial(ActorProcesses, group=get_current_placement_group())


def device_of_this_replica(engine: EngineConfig) -> Literal["cpu", "cuda"]:
    """The device of this replica's models. Raises `ConfigError` for "cuda" unless Ray gave the replica one GPU."""
    if engine.device == "cuda" and len(ray.get_gpu_ids()) != 1:
        raise ConfigError(
            f"Ray gave this replica the GPUs {ray.get_gpu_ids()}, it needs one: ray_actor_options in the YAML must "
            "have num_gpus: 1, or be left out"
        )
    device = resolve(engine).device
    if engine.device == "auto" and device == "cuda" and not ray.get_gpu_ids():
        logger.warning("device auto is the CPU: Ray gave this replica no GPU")
        return "cpu"
    return device
