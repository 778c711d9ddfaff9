"""Arguments of an application: `args` in the YAML. Imports nothing heavy, so that mistakes are found at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from app.config.engine import EngineConfig, PolicyName
from app.config.http import HttpSettings, Settings
from app.errors import ConfigError

# By the names of vLLM's `--tool-call-parser` and `--reasoning-parser`; `app.openai.output.formats` has the syntaxes.
ToolParserName = Literal[
    "auto",
    "none",
    "deepseek_v3",
    "deepseek_v31",
    "glm45",
    "granite",
    "hermes",
    "kimi_k2",
    "llama3_json",
    "llama4_pythonic",
    "minimax",
    "minimax_m2",
    "mistral",
    "mistral_v11",
    "openai",
    "phi4_mini_json",
    "pythonic",
    "qwen3_coder",
    "xlam",
]
ReasoningParserName = Literal[
    "auto",
    "none",
    "deepseek_r1",
    "glm45",
    "granite",
    "minimax_m2",
    "mistral",
    "nemotron",
    "openai",
    "qwen3",
    "seed_oss",
]


class RoutingArgs(Settings):
    """`args.routing` of the YAML.

    Attributes:
        policy: "prefix_aware": the replica with the cached prefix, unless it is too busy; "least_loaded": the one with
            the fewest requests; "round_robin"; "consistent_hash": one replica for each session or beginning.
        report_period_s: period of the replicas' load reports.
        stale_after_s: age from which routers ignore a load report; at least three times `report_period_s`.
        wait_for_replica_s: a request waits this long for a replica when there is none, and is then refused. If
            autoscaling goes to zero replicas, longer than a replica takes to start.
    """

    policy: PolicyName = "prefix_aware"
    report_period_s: PositiveFloat = 0.5
    stale_after_s: PositiveFloat = 5.0
    wait_for_replica_s: PositiveFloat = 10.0


class StreamingArgs(Settings):
    """`args.streaming` of the YAML: pace of streams (`StreamPace`).

    Attributes:
        items_per_s: of all streams of a replica; by default 30 for each core of its machine, which costs little of
            the core's time.
        min_interval_s, max_interval_s: between two items of one stream.
    """

    items_per_s: PositiveFloat | None = None
    min_interval_s: NonNegativeFloat = 0.02
    max_interval_s: NonNegativeFloat = 0.25


class AppArgs(Settings):
    """`args` of the YAML.

    Attributes:
        engine: settings of each replica's engine.
        model_name: the model's name in requests; by default the last part of `engine.model`.
        model_aliases: further names in requests, or patterns with `*` → `model_name` or an adapter's name. For clients
            that send names of other models, as Claude Code does: {"claude-*": my-model}.
        shared_kv_memory_bytes: KV memory shared by all replicas on one device, a GPU or a node's CPUs: each may take
            what others do not need. None: each has `engine.kv_memory_bytes` for itself.
        tool_call_parser: how the model writes calls of functions, by vLLM's names; "auto": as its chat template says;
            "none": calls are part of the text.
        reasoning_parser: how the model writes its reasoning, by vLLM's names; "auto": as its chat template says;
            "none": reasoning is part of the text.
        routing: choice of the replica.
        streaming: pace of streams.
        http: protection of the HTTP interface.

    Raises:
        ConfigError: settings contradict each other; a line for each, beginning with the key.
    """

    engine: EngineConfig
    model_name: str | None = None
    model_aliases: dict[str, str] = Field(default_factory=dict)
    shared_kv_memory_bytes: PositiveInt | None = None
    tool_call_parser: ToolParserName = "auto"
    reasoning_parser: ReasoningParserName = "auto"
    routing: RoutingArgs = RoutingArgs()
    streaming: StreamingArgs = StreamingArgs()
    http: HttpSettings = HttpSettings()

    @property
    def served_name(self) -> str:
        return self.model_name or Path(self.engine.model).name

    @model_validator(mode="after")
    def _check(self) -> AppArgs:
        if problems := [problem for applies, problem in self._problems() if applies]:
            raise ConfigError("\n".join(problems))
        return self

    def _problems(self) -> Iterator[tuple[bool, str]]:
        """(whether the problem exists, the problem)."""
        engine, routing, streaming = self.engine, self.routing, self.streaming
        shared_bytes = self.shared_kv_memory_bytes
        is_shared = shared_bytes is not None
        yield (
            self.served_name in engine.adapters,
            f"model_name is {self.served_name!r}, which is also the name of an adapter; rename one of them",
        )
        served = (self.served_name, *engine.adapters)
        for alias, name in self.model_aliases.items():
            yield (
                name not in served and engine.adapter_dir is None,
                f"model_aliases[{alias!r}] is {name!r}, which is not served; it must be one of {', '.join(served)}",
            )
            yield alias in served, f"model_aliases has {alias!r}, which is a served name itself; leave it out"
        yield (
            engine.skip_tokenizer_init,
            "engine.skip_tokenizer_init is true; a server needs the tokenizer: leave the setting out",
        )
        yield (
            routing.stale_after_s < 3 * routing.report_period_s,
            f"routing.stale_after_s is {routing.stale_after_s}; it must be at least {3 * routing.report_period_s}, "
            "three times routing.report_period_s",
        )
        yield (
            streaming.min_interval_s > streaming.max_interval_s,
            f"streaming.min_interval_s is {streaming.min_interval_s}; it must not be above max_interval_s, "
            f"{streaming.max_interval_s}",
        )
        yield (
            is_shared and engine.kv_memory_bytes is not None,
            f"shared_kv_memory_bytes is {shared_bytes} and engine.kv_memory_bytes {engine.kv_memory_bytes}; the first "
            "is for all replicas on a device, the second for each: leave one of them out",
        )
        yield (
            is_shared and engine.kv_memory_floor_bytes > 0,
            f"engine.kv_memory_floor_bytes is {engine.kv_memory_floor_bytes}; memory below the floor cannot be shared: "
            "leave it out beside shared_kv_memory_bytes",
        )
        yield (
            is_shared and engine.tensor_parallel_size > 1,
            f"engine.tensor_parallel_size is {engine.tensor_parallel_size}; only replicas of one rank can share a "
            "device: leave out shared_kv_memory_bytes",
        )
        yield (
            is_shared and engine.draft_model is not None,
            f"engine.draft_model is {engine.draft_model!r}; a draft model's KV memory cannot be shared: use "
            "speculation 'ngram' beside shared_kv_memory_bytes",
        )
