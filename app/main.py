"""The application: `serve run serve_config.yaml` calls `build` with the YAML's `args`."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, NonNegativeFloat, PositiveFloat
from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from app.config import EngineConfig
from app.edge.settings import HttpSettings
from app.errors import ConfigError
from app.fleet.policies import PolicyName
from app.serving.ingress import Ingress
from app.serving.pace import StreamPace
from app.serving.replica import EngineReplica

# In a server, requests that wait in an engine by default, for each that can run.
QUEUED_PER_SEQUENCE = 4
# Serve must never be where requests wait: nobody would count them, or refuse them. So a replica may have so many more
# than can run and wait: calls that are being refused, or have no part in the queue. And an ingress, or an engine whose
# queue has no bound, may have as many as can ever come.
MORE_ONGOING_REQUESTS, UNBOUNDED_ONGOING_REQUESTS = 1000, 100_000
# In an update a new replica starts before an old one is stopped: a quarter of them at a time, at least one. While there
# are no resources for it the old ones go on.
MAX_SURGE_PERCENT = 25
# A replica that has lost a rank, or hangs, is to be replaced soon: after three failed checks, or when its process ends.
HEALTH_CHECK_PERIOD_S, HEALTH_CHECK_TIMEOUT_S = 2.0, 10.0
# A replica that is stopped, by autoscaling or an update, finishes its streams, and is gone as soon as the last one is.
# Serve's default of 20 s would cut long ones: 4,096 tokens at 100 ms take seven minutes.
DRAIN_TIMEOUT_S = 600.0
# What Ray sets aside for a replica, and for each further rank: ranks on CPUs share the machine's cores anyway.
REPLICA_CPUS, RANK_CPUS = 1.0, 0.1


class RoutingArgs(BaseModel):
    """`args.routing` of the YAML.

    Attributes:
        policy: how requests are placed: where their prefix is cached, if that is not too busy; where the fewest are;
            one replica after the other; the same session, or the same beginning, at the same replica.
        report_period_s: how often replicas say what they have cached and how busy they are.
        stale_after_s: routers do not go by reports that are older; at least three times `report_period_s`.
        wait_for_replica_s: a request that comes when there is no replica waits so long for one, and is then refused;
            more than one takes to start, when replicas are stopped while nobody asks.
    """

    model_config = ConfigDict(extra="forbid")

    policy: PolicyName = "prefix_aware"
    report_period_s: PositiveFloat = 0.5
    stale_after_s: PositiveFloat = 5.0
    wait_for_replica_s: PositiveFloat = 10.0


class StreamingArgs(BaseModel):
    """`args.streaming` of the YAML: how often streams send (`StreamPace`).

    Attributes:
        items_per_s: of all streams of a replica; by default 30 for each core of its machine, of which that takes two
            to six percent (0.8 to 2.1 ms of processor time an item).
        min_interval_s, max_interval_s: between two items of one stream.
    """

    model_config = ConfigDict(extra="forbid")

    items_per_s: PositiveFloat | None = None
    min_interval_s: NonNegativeFloat = 0.02
    max_interval_s: NonNegativeFloat = 0.25

    @property
    def pace(self) -> StreamPace:
        """Raises `ConfigError` when there is no interval between both."""
        if self.min_interval_s > self.max_interval_s:
            raise ConfigError(
                f"streaming.min_interval_s is {self.min_interval_s}; it must not be above max_interval_s, "
                f"{self.max_interval_s}"
            )
        return StreamPace(
            self.items_per_s,
            min_interval_s=self.min_interval_s,
            max_interval_s=self.max_interval_s,
        )


class AppArgs(BaseModel):
    """`args` of the YAML.

    Attributes:
        engine: the model and how to run it.
        model_name: what clients call it; by default the last part of `engine.model`.
        shared_kv_memory_bytes: KV memory that all replicas on one device, a GPU or a node's CPUs, share: each may take
            what others do not need. None: each has `engine.kv_memory_bytes` for itself.
        routing: which replica gets a request.
        streaming: how often streams send what has been generated.
        http: who may call over HTTP, and how much.
    """

    model_config = ConfigDict(extra="forbid")

    engine: EngineConfig
    model_name: str | None = None
    shared_kv_memory_bytes: int | None = None
    routing: RoutingArgs = RoutingArgs()
    streaming: StreamingArgs = StreamingArgs()
    http: HttpSettings = HttpSettings()


def build(args: AppArgs) -> Application:
    """The deployments of one model: an ingress in front of engine replicas.

    Raises:
        ConfigError: a setting is out of bounds.
    """
    model_name = args.model_name or Path(args.engine.model).name
    if model_name in args.engine.adapters:
        raise ConfigError(f"model_name is {model_name!r}, and so is an adapter's: requests could not tell them apart")
    if args.engine.skip_tokenizer_init:
        raise ConfigError("skip_tokenizer_init is for scripts; a server needs the tokenizer")
    config = bounded(shared_engine(args))
    engine: Any = serve.deployment(
        max_ongoing_requests=max_ongoing_requests(config),
        max_surge_percent=MAX_SURGE_PERCENT,
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        health_check_timeout_s=HEALTH_CHECK_TIMEOUT_S,
        graceful_shutdown_timeout_s=DRAIN_TIMEOUT_S,
        request_router_config=router_config(args.routing, isolate_tenants=args.engine.isolate_tenants),
        **replica_resources(args.engine),
    )(EngineReplica)
    ingress: Any = serve.deployment(
        max_ongoing_requests=UNBOUNDED_ONGOING_REQUESTS,
        max_surge_percent=MAX_SURGE_PERCENT,
        graceful_shutdown_timeout_s=DRAIN_TIMEOUT_S,
    )(Ingress)
    replica = engine.bind(config, args.shared_kv_memory_bytes, args.streaming.pace)
    application: Application = ingress.bind(
        args.engine.model, model_name, replica, tuple(args.engine.adapters), args.http, config.max_num_seqs
    )
    return application


def bounded(engine: EngineConfig) -> EngineConfig:
    """The engine's settings, with the bound of its queue that a server has by default."""
    if engine.max_queued_requests != "auto":
        return engine
    return replace(engine, max_queued_requests=QUEUED_PER_SEQUENCE * engine.max_num_seqs)


def max_ongoing_requests(engine: EngineConfig) -> int:
    """Requests that Serve may send to a replica at once: more than its engine takes."""
    most = engine.max_queued_requests
    if not isinstance(most, int):
        return UNBOUNDED_ONGOING_REQUESTS
    return engine.max_num_seqs + most + MORE_ONGOING_REQUESTS


def shared_engine(args: AppArgs) -> EngineConfig:
    """The engine's settings, with all of the memory that it shares as its ceiling.

    Raises:
        ConfigError: sharing goes together neither with other bounds of the memory, nor with several ranks, nor with a
            draft model.
    """
    shared_bytes, engine = args.shared_kv_memory_bytes, args.engine
    if shared_bytes is None:
        return engine
    if shared_bytes < 1:
        raise ConfigError(f"shared_kv_memory_bytes is {shared_bytes}; it must be at least 1")
    if engine.kv_memory_bytes is not None:
        raise ConfigError(
            f"shared_kv_memory_bytes is {shared_bytes} and kv_memory_bytes {engine.kv_memory_bytes}; the former is for "
            "replicas that share a device, the latter for each: leave one of them out"
        )
    if engine.kv_memory_floor_bytes:
        raise ConfigError(
            f"kv_memory_floor_bytes is {engine.kv_memory_floor_bytes}; what a replica never gives back it cannot lend: "
            "leave it out beside shared_kv_memory_bytes"
        )
    if engine.tensor_parallel_size > 1:
        raise ConfigError(
            f"tensor_parallel_size is {engine.tensor_parallel_size}; only replicas of one rank can share a device: "
            "leave out shared_kv_memory_bytes"
        )
    if engine.draft_model is not None:
        raise ConfigError(
            f"draft_model is {engine.draft_model!r}, whose KV memory is lent to nobody: use speculation 'ngram' beside "
            "shared_kv_memory_bytes"
        )
    return replace(engine, kv_memory_bytes=shared_bytes)


def router_config(routing: RoutingArgs, *, isolate_tenants: bool = True) -> RequestRouterConfig:
    """Serve's settings for the handles of the engine replicas.

    Args:
        isolate_tenants: the engines' setting.

    Raises:
        ConfigError: reports would be stale before the next ones are there.
    """
    if routing.stale_after_s < 3 * routing.report_period_s:
        raise ConfigError(
            f"routing.stale_after_s is {routing.stale_after_s}; with a report every {routing.report_period_s} s it "
            f"must be at least {3 * routing.report_period_s}"
        )
    settings: dict[str, Any] = {
        "request_router_class": "app.serving.router:FolioRouter",
        "request_router_kwargs": {
            "policy": routing.policy,
            "stale_after_s": routing.stale_after_s,
            "wait_for_replica_s": routing.wait_for_replica_s,
            "isolate_tenants": isolate_tenants,
        },
        "request_routing_stats_period_s": routing.report_period_s,
    }
    return RequestRouterConfig(**settings)


def replica_resources(config: EngineConfig) -> dict[str, Any]:
    """Options of the replica's deployment: what it asks Ray for, and a bundle on the same node for each rank."""
    gpu = {"GPU": 1.0} if config.device == "cuda" else {}
    options: dict[str, Any] = {"ray_actor_options": {"num_cpus": REPLICA_CPUS, "num_gpus": gpu.get("GPU", 0.0)}}
    if config.tensor_parallel_size > 1:
        rank = {"CPU": RANK_CPUS} | gpu
        options["placement_group_bundles"] = [{"CPU": REPLICA_CPUS} | gpu, *[rank] * (config.tensor_parallel_size - 1)]
        options["placement_group_strategy"] = "STRICT_PACK"
    return options
