"""`args` of an application in the YAML. Light to import: a mistake in them shall be told before anything heavy is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel, ConfigDict, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from app.config.engine import EngineConfig, PolicyName
from app.config.http import HttpSettings
from app.errors import ConfigError


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
        items_per_s: of all streams of a replica; by default 30 for each core of its machine, of which that takes up to
            1.5 percent (0.14 to 0.5 ms of processor time an item).
        min_interval_s, max_interval_s: between two items of one stream.
    """

    model_config = ConfigDict(extra="forbid")

    items_per_s: PositiveFloat | None = None
    min_interval_s: NonNegativeFloat = 0.02
    max_interval_s: NonNegativeFloat = 0.25


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

    Raises:
        ConfigError: settings contradict each other; a line for each, which begins with the key.
    """

    model_config = ConfigDict(extra="forbid")

    engine: EngineConfig
    model_name: str | None = None
    shared_kv_memory_bytes: PositiveInt | None = None
    routing: RoutingArgs = RoutingArgs()
    streaming: StreamingArgs = StreamingArgs()
    http: HttpSettings = HttpSettings()

    @property
    def served_name(self) -> str:
        return self.model_name or Path(self.engine.model).name

    @model_validator(mode="after")
    def _check(self) -> AppArgs:
        if problems := [*self._problems(), *self._sharing_problems()]:
            raise ConfigError("\n".join(problems))
        return self

    def _problems(self) -> Iterator[str]:
        if self.served_name in self.engine.adapters:
            yield (
                f"model_name is {self.served_name!r}, and so is an adapter's: requests could not tell them apart; "
                "rename one of them"
            )
        if self.engine.skip_tokenizer_init:
            yield "engine.skip_tokenizer_init is for scripts; a server needs the tokenizer: leave it out"
        routing, streaming = self.routing, self.streaming
        if routing.stale_after_s < 3 * routing.report_period_s:
            yield (
                f"routing.stale_after_s is {routing.stale_after_s}; with a report every {routing.report_period_s} s it "
                f"must be at least {3 * routing.report_period_s}"
            )
        if streaming.min_interval_s > streaming.max_interval_s:
            yield (
                f"streaming.min_interval_s is {streaming.min_interval_s}; it must not be above max_interval_s, "
                f"{streaming.max_interval_s}"
            )

    def _sharing_problems(self) -> Iterator[str]:
        """Sharing goes together neither with other bounds of the memory, nor with several ranks or a draft model."""
        engine = self.engine
        if self.shared_kv_memory_bytes is None:
            return
        if engine.kv_memory_bytes is not None:
            yield (
                f"shared_kv_memory_bytes is {self.shared_kv_memory_bytes} and engine.kv_memory_bytes "
                f"{engine.kv_memory_bytes}; the former is for replicas that share a device, the latter for each: leave "
                "one of them out"
            )
        if engine.kv_memory_floor_bytes:
            yield (
                f"engine.kv_memory_floor_bytes is {engine.kv_memory_floor_bytes}; what a replica never gives back it "
                "cannot lend: leave it out beside shared_kv_memory_bytes"
            )
        if engine.tensor_parallel_size > 1:
            yield (
                f"engine.tensor_parallel_size is {engine.tensor_parallel_size}; only replicas of one rank can share a "
                "device: leave out shared_kv_memory_bytes"
            )
        if engine.draft_model is not None:
            yield (
                f"engine.draft_model is {engine.draft_model!r}, whose KV memory is lent to nobody: use speculation "
                "'ngram' beside shared_kv_memory_bytes"
            )
