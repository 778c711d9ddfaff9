"""Ray Serve application on a free port of this machine, for benchmarks and tests of the whole server."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from folio.app.engine.report import ReplicaReport
from folio.app.fleet.messages import reports_from_stats
from folio.app.fleet.status import summed_load

_POLL_S = 0.1
_METRICS_PERIOD_S = 10.0  # Ray's
# Between Ray's range for workers and the systems' ranges for any free port.
_PORTS = range(20_000, 30_000)


@dataclass(frozen=True, slots=True)
class Served:
    """A running application.

    Attributes:
        args: of `folio.app.main.build`, as in the YAML.
    """

    name: str
    url: str
    args: Mapping[str, Any]

    def deploy(self, timeout_s: float = 120.0, num_ingresses: int = 1, **engine_replica: Any) -> None:
        """Deploy, or change, the application; returns when it runs.

        Args:
            engine_replica: options of that deployment, such as `num_replicas` or `autoscaling_config`.
        """
        from ray.serve.context import _get_global_client
        from ray.serve.schema import ServeDeploySchema

        application = {
            "name": self.name,
            "route_prefix": "/",
            "import_path": "folio.app.main:build",
            "args": dict(self.args),
            "deployments": [
                {"name": "Ingress", "num_replicas": num_ingresses, "ray_actor_options": {"num_cpus": 0.1}},
                {"name": "EngineReplica"} | engine_replica,
            ],
        }
        client: Any = _get_global_client()
        client.deploy_apps(ServeDeploySchema.model_validate({"applications": [application]}))
        self.wait_until(lambda: self._status() in ("RUNNING", "DEPLOY_FAILED"), timeout_s)
        if self._status() == "DEPLOY_FAILED":
            raise RuntimeError(f"{self.name} could not be deployed: {_applications()[self.name].message}")

    @property
    def ingress(self) -> Any:
        """A handle of the application's ingress."""
        from ray import serve

        return serve.get_app_handle(self.name)

    @property
    def engines(self) -> Any:
        """A handle of its engine replicas."""
        from ray import serve

        return serve.get_deployment_handle("EngineReplica", self.name)

    @property
    def num_running(self) -> int:
        """Number of running engine replicas."""
        return self.running("EngineReplica")

    def running(self, deployment: str) -> int:
        """Running replicas of a deployment."""
        states: Any = _applications()[self.name].deployments[deployment].replica_states
        return int(states.get("RUNNING", 0))

    def reports(self) -> list[ReplicaReport]:
        """Memory reports of all engine replicas."""
        stats = self.engines.broadcast("record_routing_stats").results()
        reports = [reports_from_stats(s) for s in stats]
        assert None not in reports, "this process and the replicas run different versions"
        return [summed_load(list(of_models.values())) for of_models in reports if of_models is not None]

    def counted(self, name: str) -> int:
        """The sum of a metric's counter over all living processes, as Prometheus would read it from Ray."""
        import httpx
        import ray

        time.sleep(2 * _METRICS_PERIOD_S)
        [node] = ray.nodes()
        text = httpx.get(f"http://127.0.0.1:{node['MetricsExportPort']}/metrics").text
        return int(sum(map(float, re.findall(rf"^ray_{name}\S* (\S+)$", text, re.M))))

    def processes(self) -> list[int]:
        """Process ids of the engine replicas, stopped ones included."""
        return processes_called(f"ray::ServeReplica:{self.name}:EngineReplica")

    def kill_one(self) -> int:
        """Kill an engine replica's process; returns its id."""
        pid = self.processes()[0]
        os.kill(pid, signal.SIGKILL)
        return pid

    def wait_until(self, condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
        """Wait for a condition. Raises `TimeoutError`."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.name}: not within {timeout_s} s; {_applications()}")
            time.sleep(_POLL_S)

    def _status(self) -> str:
        applications = _applications()
        return str(applications[self.name].status.value) if self.name in applications else "NOT_STARTED"


def _applications() -> Any:
    from ray import serve

    return serve.status().applications


@contextmanager
def cluster(num_cpus: int = 4, num_gpus: int | None = None) -> Iterator[str]:
    """A Ray cluster of this process, with Serve on a free port of this machine; yields its URL.

    Args:
        num_cpus: CPUs that Ray assumes; replicas share the cores that exist.
        num_gpus: GPUs that Ray assumes; `None`: those that it finds.
    """
    import ray
    from ray import serve

    from folio.app.cli.start.env import prepared_environment

    port = free_port()
    with prepared_environment():
        ray.init(num_cpus=num_cpus, num_gpus=num_gpus, include_dashboard=False, log_to_driver=False)
        try:
            servicers = ["folio.app.proto.folio_pb2_grpc.add_FolioServicer_to_server"]
            serve.start(
                http_options={"host": "127.0.0.1", "port": port},
                grpc_options={"port": free_port(), "grpc_servicer_functions": servicers},
            )
            yield f"http://127.0.0.1:{port}"
        finally:
            serve.shutdown()
            ray.shutdown()


@contextmanager
def served(name: str, args: Mapping[str, Any], *, num_cpus: int = 8) -> Iterator[Served]:
    """A cluster for an application, which is not deployed yet.

    Args:
        args: see `Served`.
    """
    with cluster(num_cpus) as url:
        yield Served(name, url, args)


def free_port() -> int:
    """A free port of this machine, outside of the range from which the system gives any free port, as to Ray's
    processes."""
    for port in random.sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"no port from {_PORTS.start} to {_PORTS.stop - 1} is free")


def processes_called(title: str) -> list[int]:
    """Process ids of this cluster's workers whose title begins with this text, stopped ones included."""
    import ray

    found = []
    node: Any = ray._private.worker._global_node
    raylet = node.all_processes["raylet"][0].process.pid
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            actual = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            state, parent, *_ = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # ended meanwhile
            continue
        if state != "Z" and int(parent) == raylet and actual.startswith(title):
            found.append(int(folder.name))
    return found
