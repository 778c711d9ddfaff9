"""Application builder: `serve run serve_config.yaml` calls `build` with the YAML's `args`."""

import warnings
from dataclasses import replace
from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from folio.app.checks import check_args
from folio.app.config.args import AppArgs
from folio.app.config.engine import EngineConfig
from folio.app.config.shelf import ShelfConfig
from folio.app.fleet.streams import StreamPace
from folio.app.serving.ingress import Ingress
from folio.app.serving.replica import EngineReplica

__all__ = ["AppArgs", "build"]

if not __name__.startswith("folio."):  # in a checkout `serve run` finds version 0.1's path, too
    warnings.warn("import_path: app.main:build is now folio.app.main:build", FutureWarning, stacklevel=2)

# Default bound of a server's waiting queue, per sequence that can run.
QUEUED_PER_SEQUENCE = 4
# Requests must never wait in Serve, where they are neither counted nor refused. Serve's bound of a replica therefore
# exceeds what can run and wait by calls that are refused or bypass the queue. An ingress, and an engine with an
# unbounded queue, are practically unbounded.
MORE_ONGOING_REQUESTS, UNBOUNDED_ONGOING_REQUESTS = 1000, 100_000
# In an update, new replicas start before old ones stop: a quarter of them at a time, at least one. The old ones go on
# while there are no resources for new ones.
MAX_SURGE_PERCENT = 25
# A replica that has lost a rank, or hangs, is replaced after three failed checks, or when its process ends.
HEALTH_CHECK_PERIOD_S, HEALTH_CHECK_TIMEOUT_S = 2.0, 10.0
# A replica stopped by autoscaling or an update finishes its streams first. Serve's default of 20 s would cut long ones:
# 4,096 tokens at 100 ms take seven minutes.
DRAIN_TIMEOUT_S = 600.0
# Its streams move to other replicas, so that it has soon none left.
DRAINED_LOOK_S = 0.25
# CPUs that Ray reserves for a replica and for each further rank. Replicas on CPUs share the cores: with a core
# reserved for each, two cores would hold neither a third replica nor the new one of an update.
REPLICA_CPUS, RANK_CPUS = 0.25, 0.1
# The ingress logs requests. Serve would log them again, and each call between replicas.
LOGGING: dict[str, Any] = {"enable_access_log": False}


def build(args: AppArgs) -> Application:
    """The deployments of a server: an ingress in front of engine replicas, each of which serves all models.

    Raises:
        ConfigError: a model's folder cannot be served; a line for each reason.
    """
    check_args(args)
    shelf = served_shelf(args)
    engines = [model.engine for model in shelf.models]
    engine: Any = serve.deployment(
        max_ongoing_requests=UNBOUNDED_ONGOING_REQUESTS
        if shelf.models_dir
        else sum(map(max_ongoing_requests, engines)),
        max_surge_percent=MAX_SURGE_PERCENT,
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        health_check_timeout_s=HEALTH_CHECK_TIMEOUT_S,
        graceful_shutdown_timeout_s=DRAIN_TIMEOUT_S,
        graceful_shutdown_wait_loop_s=DRAINED_LOOK_S,
        request_router_config=router_config(args),
        logging_config=LOGGING,
        **replica_resources(shelf.first.engine),
    )(EngineReplica)
    ingress: Any = serve.deployment(
        max_ongoing_requests=UNBOUNDED_ONGOING_REQUESTS,
        max_surge_percent=MAX_SURGE_PERCENT,
        graceful_shutdown_timeout_s=DRAIN_TIMEOUT_S,
        logging_config=LOGGING,
    )(Ingress)
    pace = StreamPace(**args.streaming.model_dump())
    application: Application = ingress.bind(
        shelf,
        engine.bind(shelf, args.shared_kv_memory_bytes, pace),
        args.http,
        min(map(most_seqs, engines)),
        args.routing.wait_for_replica_s,
        args.model_aliases,
    )
    return application


def served_shelf(args: AppArgs) -> ShelfConfig:
    """The models with a server's default bounds of their queues, and with all of the shared KV memory as the ceiling of
    a single engine."""
    shelf = args.shelf
    models = [replace(model, engine=bounded(model.engine)) for model in shelf.models]
    if args.shared_kv_memory_bytes is not None:
        models = [
            replace(model, engine=replace(model.engine, kv_memory_bytes=args.shared_kv_memory_bytes))
            for model in models
        ]
    return replace(shelf, models=tuple(models))


def bounded(engine: EngineConfig) -> EngineConfig:
    """The engine's settings with a server's default bound of the waiting queue."""
    if engine.max_queued_requests != "auto":
        return engine
    return replace(engine, max_queued_requests=QUEUED_PER_SEQUENCE * most_seqs(engine))


def max_ongoing_requests(engine: EngineConfig) -> int:
    """Serve's bound on requests at a replica: more than its engine takes."""
    most = engine.max_queued_requests
    if not isinstance(most, int):
        return UNBOUNDED_ONGOING_REQUESTS
    return most_seqs(engine) + most + MORE_ONGOING_REQUESTS


def most_seqs(engine: EngineConfig) -> int:
    """Most sequences that run at once in a replica, on the device that it asks Ray for."""
    return engine.on_device("cuda" if wants_gpu(engine) else "cpu").max_num_seqs


def wants_gpu(engine: EngineConfig) -> bool:
    """Whether replicas ask Ray for GPUs: also with device auto, in a cluster that has any."""
    if engine.device == "auto" and ray.is_initialized():
        return ray.cluster_resources().get("GPU", 0) > 0
    return engine.device == "cuda"


def router_config(args: AppArgs) -> RequestRouterConfig:
    """Serve's settings for the handles of the engine replicas."""
    routing, first = args.routing.model_dump(exclude={"report_period_s"}), args.shelf.first
    settings: dict[str, Any] = {
        "request_router_class": "folio.app.serving.router:FolioRouter",
        "request_router_kwargs": routing | {"isolate_tenants": first.engine.isolate_tenants, "first_model": first.name},
        "request_routing_stats_period_s": args.routing.report_period_s,
    }
    return RequestRouterConfig(**settings)


def replica_resources(config: EngineConfig) -> dict[str, Any]:
    """Options of the replica's deployment: resources, and a bundle on the same node for each rank."""
    gpu = {"GPU": 1.0} if wants_gpu(config) else {}
    options: dict[str, Any] = {"ray_actor_options": {"num_cpus": REPLICA_CPUS, "num_gpus": gpu.get("GPU", 0.0)}}
    if config.tensor_parallel_size > 1:
        rank = {"CPU": RANK_CPUS} | gpu
        options["placement_group_bundles"] = [{"CPU": REPLICA_CPUS} | gpu, *[rank] * (config.tensor_parallel_size - 1)]
        options["placement_group_strategy"] = "STRICT_PACK"
    return options
