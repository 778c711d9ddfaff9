"""The application: `serve run serve_config.yaml` calls `build` with the YAML's `args`."""

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict
from ray import serve
from ray.serve import Application

from app.config import EngineConfig
from app.errors import ConfigError
from app.serving.ingress import Ingress
from app.serving.replica import EngineReplica

# Serve's own default is 5, too few for an engine that batches. The engine's queue is where requests wait.
MAX_ONGOING_REQUESTS = 1000
# A replica that has lost a rank, or hangs, is to be replaced soon: after three failed checks, or when its process ends.
HEALTH_CHECK_PERIOD_S, HEALTH_CHECK_TIMEOUT_S = 2.0, 10.0
# What Ray sets aside for a replica, and for each further rank: ranks on CPUs share the machine's cores anyway.
REPLICA_CPUS, RANK_CPUS = 1.0, 0.1


class AppArgs(BaseModel):
    """`args` of the YAML.

    Attributes:
        engine: the model and how to run it.
        model_name: what clients call it; by default the last part of `engine.model`.
    """

    model_config = ConfigDict(extra="forbid")

    engine: EngineConfig
    model_name: str | None = None


def build(args: AppArgs) -> Application:
    """The deployments of one model: an ingress in front of engine replicas.

    Raises:
        ConfigError: a setting is out of bounds.
    """
    model_name = args.model_name or Path(args.engine.model).name
    if args.engine.skip_tokenizer_init:
        raise ConfigError("skip_tokenizer_init is for scripts; a server needs the tokenizer")
    engine: Any = serve.deployment(
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        health_check_timeout_s=HEALTH_CHECK_TIMEOUT_S,
        **replica_resources(args.engine),
    )(EngineReplica)
    ingress: Any = serve.deployment(max_ongoing_requests=MAX_ONGOING_REQUESTS)(Ingress)
    application: Application = ingress.bind(args.engine.model, model_name, engine.bind(args.engine))
    return application


def replica_resources(config: EngineConfig) -> dict[str, Any]:
    """Options of the replica's deployment: what it asks Ray for, and a bundle on the same node for each rank."""
    gpu = {"GPU": 1.0} if config.device == "cuda" else {}
    options: dict[str, Any] = {"ray_actor_options": {"num_cpus": REPLICA_CPUS, "num_gpus": gpu.get("GPU", 0.0)}}
    if config.tensor_parallel_size > 1:
        rank = {"CPU": RANK_CPUS} | gpu
        options["placement_group_bundles"] = [{"CPU": REPLICA_CPUS} | gpu, *[rank] * (config.tensor_parallel_size - 1)]
        options["placement_group_strategy"] = "STRICT_PACK"
    return options
