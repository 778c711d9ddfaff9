"""Arguments of an application: `args` in the YAML. Imports nothing heavy, so that mistakes are found at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, model_validator

from folio.app.config.engine import EngineConfig, PolicyName
from folio.app.config.http import HttpSettings, NonNegativeBytes, PositiveBytes, Settings
from folio.app.config.parsers import ReasoningParserName, ToolParserName
from folio.app.config.shelf import NEEDS_TOKENIZER, ModelConfig, ShelfConfig, shelf_problems
from folio.app.errors import ConfigError
from folio.app.models.gguf.files import default_name


class RoutingArgs(Settings):
    """`args.routing` of the YAML.

    Attributes:
        policy: "prefix_aware": the replica with the cached prefix, unless it is too busy; "least_loaded": the one with
            the fewest requests; "round_robin"; "consistent_hash": one replica for each session or beginning.
        report_period_s: period of the replicas' load reports.
        stale_after_s: age from which routers ignore a load report; at least three times `report_period_s`.
        wait_for_replica_s: a request waits this long for a replica when there is none, and is then refused. Once
            replicas have started, it waits for the next one as long as starts take.
        prefill_share: share of the replicas that compute prompts only; the others decode them, with the blocks of the
            first (docs/guides/replicas.md). 0: all replicas do both.
        prefill_from_tokens: with a `prefill_share`, a prompt of which a decode replica has cached all but fewer tokens
            is computed there.
    """

    policy: PolicyName = "prefix_aware"
    report_period_s: PositiveFloat = 0.5
    stale_after_s: PositiveFloat = 5.0
    wait_for_replica_s: PositiveFloat = 10.0
    prefill_share: float = Field(default=0.0, ge=0, lt=1)
    prefill_from_tokens: NonNegativeInt = 256


class StreamingArgs(Settings):
    """`args.streaming` of the YAML: pace of streams (`StreamPace`).

    Attributes:
        items_per_s: of all streams of a replica; by default 30 for each core of its machine, which costs little of
            the core's time; on a GPU 5,000, and fewer while the replica's event loop is busy.
        min_interval_s, max_interval_s: bounds of the time between two items of one stream.
    """

    items_per_s: PositiveFloat | None = None
    min_interval_s: NonNegativeFloat = 0.02
    max_interval_s: NonNegativeFloat = 0.25


class AppArgs(Settings):
    """`args` of the YAML.

    Attributes:
        engine: settings of each replica's engine. Set `engine` or `models`.
        models: the models of a shelf: every replica serves all of them on one device, and a model's weights and KV
            cache are there only while they are used.
        device_memory_bytes: of each replica, for weights, KV caches and steps of all `models` together.
        host_memory_bytes: of each replica, for copies of the weights of `models` that sleep; on CUDA pinned. By default
            a quarter of the machine's memory, which on CUDA all replicas of the machine have together. Weights of other
            models that sleep come from files.
        weights_dir: the folder for files of weights as the kernels read them, from which `models` wake. By default
            below the user's cache folder.
        weights_dir_bytes: of all files there. The least recently used are removed for a new one, unless a process uses
            them; weights beyond the bound stay in memory. By default four fifths of the disk's space that is free or
            theirs.
        models_dir: the folder below which operators add models at run time, at the same path for all replicas. `None`:
            only `models` are served.
        model_name: the model's name in requests; by default the last part of `engine.model`, without `.gguf`.
        model_aliases: further names in requests, or patterns with `*` → a model's or adapter's name. For clients that
            send names of other models, as Claude Code does: {"claude-*": my-model}.
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

    engine: EngineConfig | None = None
    models: list[ModelConfig] | None = None
    device_memory_bytes: PositiveBytes | None = None
    host_memory_bytes: NonNegativeBytes | None = None
    weights_dir: Path | None = None
    weights_dir_bytes: PositiveBytes | None = None
    models_dir: Path | None = None
    model_name: str | None = None
    model_aliases: dict[str, str] = Field(default_factory=dict)
    shared_kv_memory_bytes: PositiveBytes | None = None
    tool_call_parser: ToolParserName = "auto"
    reasoning_parser: ReasoningParserName = "auto"
    routing: RoutingArgs = RoutingArgs()
    streaming: StreamingArgs = StreamingArgs()
    http: HttpSettings = HttpSettings()

    @property
    def shelf(self) -> ShelfConfig:
        """The models of each replica. `engine` is a shelf of one model, which never sleeps."""
        if self.engine is not None:
            only = ModelConfig(
                name=self.model_name or default_name(self.engine.model),
                engine=self.engine,
                keep="always",
                tool_call_parser=self.tool_call_parser,
                reasoning_parser=self.reasoning_parser,
            )
            return ShelfConfig(models=(only,))
        return ShelfConfig(
            models=tuple(self.models or ()),
            device_memory_bytes=self.device_memory_bytes,
            host_memory_bytes=self.host_memory_bytes,
            weights_dir=self.weights_dir,
            weights_dir_bytes=self.weights_dir_bytes,
            models_dir=self.models_dir,
        )

    @model_validator(mode="after")
    def _check(self) -> AppArgs:
        if self.engine is None and not self.models:
            raise ConfigError("engine is missing; set engine, or models for several on one device")
        if self.engine is not None and self.models is not None:
            raise ConfigError("engine and models are both set; leave one of them out")
        if lines := [problem for applies, problem in self._problems() if applies]:
            raise ConfigError("\n".join(lines))
        return self

    def _problems(self) -> Iterator[tuple[bool, str]]:
        """Pairs: whether the problem exists, and its description."""
        routing, streaming = self.routing, self.streaming
        served = [name for model in self.shelf.models for name in (model.name, *model.engine.adapters)]
        for alias, name in self.model_aliases.items():
            yield (
                name not in served and not self.shelf.grows,
                f"model_aliases[{alias!r}] is {name!r}, which is not served; it must be one of {', '.join(served)}",
            )
            yield alias in served, f"model_aliases has {alias!r}, which is a served name itself; leave it out"
        yield from self._problems_of_models() if self.engine is None else self._problems_of_engine(self.engine)
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

    def _problems_of_engine(self, engine: EngineConfig) -> Iterator[tuple[bool, str]]:
        shared_bytes, model = self.shared_kv_memory_bytes, self.shelf.first
        is_shared = shared_bytes is not None
        yield (
            model.name in engine.adapters,
            f"model_name is {model.name!r}, which is also the name of an adapter; rename one of them",
        )
        yield engine.skip_tokenizer_init, f"engine.skip_tokenizer_init is true; {NEEDS_TOKENIZER}"
        for setting in ("device_memory_bytes", "host_memory_bytes", "weights_dir", "weights_dir_bytes", "models_dir"):
            value = getattr(self, setting)
            yield (
                value is not None,
                f"{setting} is {str(value)!r}; it is for models: write the engine as the only one of models, or leave "
                "the setting out",
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
            self.routing.prefill_share > 0 and engine.tensor_parallel_size > 1,
            f"routing.prefill_share is {self.routing.prefill_share:g} and engine.tensor_parallel_size "
            f"{engine.tensor_parallel_size}; only replicas of one rank hand their blocks over: leave prefill_share out",
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

    def _problems_of_models(self) -> Iterator[tuple[bool, str]]:
        yield from ((True, problem) for problem in shelf_problems(self.shelf.models))
        yield (
            self.device_memory_bytes is None,
            "device_memory_bytes is missing; models share it for their weights, KV caches and steps",
        )
        yield (
            self.shared_kv_memory_bytes is not None,
            f"shared_kv_memory_bytes is {self.shared_kv_memory_bytes}; models share device_memory_bytes: leave it out",
        )
        for setting in ("model_name", "tool_call_parser", "reasoning_parser"):
            value = getattr(self, setting)
            key = "name" if setting == "model_name" else setting
            yield value not in (None, "auto"), f"{setting} is {value!r}; it is for engine: set models[].{key}"
