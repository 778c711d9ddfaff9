"""GPUs of a server's cluster: those that Ray does not find, and the replicas that they hold.

Each rank of a replica has a GPU of its own. Fractions are the user's choice (docs/guides/sharing.md): replicas on one
GPU need `shared_kv_memory_bytes`, hold the weights once each, and do not make the GPU faster.
"""

from __future__ import annotations

import ctypes
import logging
import math
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from folio.app.checks import FOLIO
from folio.app.config.args import AppArgs
from folio.app.config.engine import EngineConfig
from folio.app.errors import ConfigError

if TYPE_CHECKING:
    from ray.serve.schema import ServeDeploySchema

logger = logging.getLogger(__name__)

_REPLICA = "EngineReplica"
_COUNT = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
# torch is imported in seconds, and in a minute from a cold disk.
_COUNT_TIMEOUT_S = 300.0
_HOW_RAY_COUNTS = "Ray counts GPUs by libnvidia-ml; without it, start nodes with `ray start --num-gpus`"


def unseen_gpus(load: Callable[[str], Any] = ctypes.CDLL) -> int | None:
    """Number of GPUs that torch sees and Ray does not, for lack of a working libnvidia-ml; `None` if there are none.

    torch is asked in a process of its own: here it would take seconds of every start, and memory of the GPU.
    """
    if _library(load, "libcuda.so.1") is None or _nvml_sees_gpus(load):
        return None
    try:
        asked = subprocess.run(
            [sys.executable, "-c", _COUNT], capture_output=True, text=True, timeout=_COUNT_TIMEOUT_S, check=True
        )
        number = int(asked.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        logger.warning("Ray sees no GPU by libnvidia-ml, and torch cannot be asked for their number: %s", error)
        return None
    if number:
        logger.info("Ray sees no GPU by libnvidia-ml, and is given the number that torch sees: %d", number)
    return number or None


def _nvml_sees_gpus(load: Callable[[str], Any]) -> bool:
    nvml, count = _library(load, "libnvidia-ml.so.1"), ctypes.c_uint()
    try:
        if nvml is None or nvml.nvmlInit_v2() != 0:
            return False
        return nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0 and count.value > 0
    except AttributeError:  # a stand-in without functions
        return False


def _library(load: Callable[[str], Any], name: str) -> Any:
    try:
        return load(name)
    except OSError:
        return None


def gpus_of_nodes(nodes: Sequence[Mapping[str, Any]]) -> list[float]:
    """GPUs of each living node of `ray.nodes()`."""
    return [node["Resources"].get("GPU", 0.0) for node in nodes if node["Alive"]]


def fit_replicas(config: ServeDeploySchema, gpus: Sequence[float], *, is_default: bool, is_local: bool) -> None:
    """Set the default's largest number of replicas to what the GPUs hold; warn if they do not hold a number given.

    Args:
        gpus: of each node.
        is_default: the user has not chosen the number of replicas.
        is_local: the cluster is this machine alone, and gets no further nodes.

    Raises:
        ConfigError: not even one replica can be placed, and `is_local`.
    """
    for application in config.applications:
        if application.import_path != FOLIO:
            continue
        engine = AppArgs.model_validate(application.args).shelf.first.engine
        deployment = next((d for d in application.deployments if d.name == _REPLICA), None)
        explicit = {} if deployment is None else deployment.model_dump(exclude_unset=True)
        if engine.device == "auto" and not any(gpus) and not is_local:
            logger.info("the cluster has no GPUs, so device auto is the CPU; %s", _HOW_RAY_COUNTS)
        need = _gpus_of_replica(engine, explicit, has_gpus=any(gpus))
        if not need:
            continue
        room = sum(_replicas_on(node, need) for node in gpus)
        if not room:
            _refuse(application.name, need, gpus, is_local=is_local)
        elif is_default and deployment is not None:
            scaling: Any = deployment.autoscaling_config
            scaling["max_replicas"] = room
            logger.info("GPUs: %g, for each replica: %g; max_replicas is %d", sum(gpus), need, room)
        elif (most := _most_replicas(explicit)) > room:
            logger.warning(
                "%s may have %d replicas, and the cluster's GPUs (%g, for each replica %g) hold %d: further ones wait "
                "until others have stopped; set max_replicas, num_replicas or --replicas to %d, or let replicas share "
                "a GPU (docs/guides/sharing.md)",
                *(application.name, most, sum(gpus), need, room, room),
            )


def _gpus_of_replica(engine: EngineConfig, explicit: Mapping[str, Any], *, has_gpus: bool) -> float:
    """GPUs that a replica and its ranks ask Ray for (`folio.app.main.replica_resources`)."""
    if (bundles := explicit.get("placement_group_bundles")) is not None:
        return math.fsum(bundle.get("GPU", 0.0) for bundle in bundles)
    options = explicit.get("ray_actor_options")
    if options is not None and engine.tensor_parallel_size == 1:  # they replace the defaults
        return float(options.get("num_gpus") or 0.0)
    wants = has_gpus if engine.device == "auto" else engine.device == "cuda"
    return float(engine.tensor_parallel_size) if wants else 0.0


def _replicas_on(node_gpus: float, need: float) -> int:
    """Replicas that fit on a node. A fraction of a GPU is never split over two GPUs."""
    if need >= 1:
        return int(node_gpus // need)
    return int(node_gpus) * int(1 / need + 1e-6)


def _most_replicas(explicit: Mapping[str, Any]) -> int:
    scaling = explicit.get("autoscaling_config") or {}
    most = scaling.get("max_replicas", explicit.get("num_replicas", 1))
    return most if isinstance(most, int) else 1  # "auto" is Serve's choice


def _refuse(name: str, need: float, gpus: Sequence[float], *, is_local: bool) -> None:
    have = ", ".join(f"{number:g}" for number in gpus)
    reason = f"a replica of {name} needs GPUs on one node: {need:g}; the nodes have: {have}"
    remedy = "lower tensor_parallel_size or num_gpus, or set device to cpu"
    if is_local:
        raise ConfigError(f"{reason}; {remedy}")
    logger.warning("%s: it waits for a node that has them; %s; %s", reason, remedy, _HOW_RAY_COUNTS)
