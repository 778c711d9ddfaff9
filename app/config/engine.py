"""Engine settings: one frozen value, checked once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from folio.app.config.sizes import Bytes
from folio.app.errors import ConfigError
from folio.app.models.named import DEFAULT_MODEL, default_model

# Copies from `vmem` and `folio.app.fleet.policies`, which take seconds to import; a test compares them.
LayoutKind = Literal["interleaved", "sliced", "whole", "per_layer"]
ViewPolicy = Literal["auto", "region", "block_table"]
PolicyName = Literal["prefix_aware", "least_loaded", "round_robin", "consistent_hash"]

PreemptionPolicy = Literal["auto", "swap", "recompute"]
Speculation = Literal["off", "ngram", "draft"]
Quantization = Literal["none", "int8", "int4"]
AsyncScheduling = Literal["auto", "on", "off"]
DecodeGraphs = Literal["auto", "on", "off"]
MixedGraphs = Literal["off", "on"]
KVDtype = Literal["auto", "fp8_e4m3", "fp8_e5m2", "int8"]
DeviceName = Literal["cpu", "cuda"]
LoadFormat = Literal["auto", "dummy"]
Pooling = Literal["auto", "none", "last", "mean"]

# Device → values of settings that are `None`.
DEVICE_DEFAULTS: Mapping[DeviceName, Mapping[str, Any]] = {
    "cpu": {"max_num_seqs": 64, "max_num_batched_tokens": 1024, "kv_idle_release_s": 0.5},
    "cuda": {"max_num_seqs": 256, "max_num_batched_tokens": 8192, "kv_idle_release_s": 30.0},
}
# Kernels that read no cache of 8-bit floats.
_WITHOUT_FP8 = ("cpu", "torch-flash")
# Kernels whose results depend on the batch, see `folio.kernels.select.BATCH_INVARIANT`.
_VARIANT = ("torch-flash", "sdpa", "reference")
# Kernels for CUDA.
_ON_CUDA = ("triton", "torch-flash")

_AT_LEAST_1 = (
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "kv_memory_bytes",
    "block_tokens",
    "expected_tokens",
    "num_threads",
    "tensor_parallel_size",
    "max_draft_tokens",
    "max_loaded_adapters",
)
_AT_LEAST_0 = (
    "max_mixed_step_s",
    "kv_memory_floor_bytes",
    "kv_idle_release_s",
    "prefix_cache_release_s",
    "swap_bytes",
    "max_cache_ttl_s",
    "restore_prefixes_s",
)
# (settings, whether a value is within the bound, the bound). NaN is within none.
_BOUNDS: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (_AT_LEAST_1, lambda value: value is None or value >= 1, "be at least 1"),
    (("max_queued_requests",), lambda value: value in (None, "auto") or value >= 1, "be at least 1, None or 'auto'"),
    (_AT_LEAST_0, lambda value: value is None or value >= 0, "be at least 0"),
    (("step_timeout_s",), lambda value: value > 0, "be above 0"),
    (("gpu_memory_utilization",), lambda value: 0 < value <= 1, "be above 0 and at most 1"),
    (("pin_quota", "retain_quota"), lambda value: 0 <= value <= 1, "be between 0 and 1"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVStore:
    """Where cached prefixes are kept on disk.

    Attributes:
        dir: the folder, on a local disk; made if it is missing. Replicas and models of a machine may share it.
        bytes: of all files there. Those unused for longest are deleted for new ones, also those of other models.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}  # for the YAML

    dir: str
    bytes: Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine.

    Attributes:
        model: a short name of `folio pull` (smollm2), a checkpoint folder or GGUF file, a Hugging Face Hub id, or
            "builtin", a toy. "default" is smollm2 where it is pulled, else the toy; it is decided once, at the start.
        dtype: of weights and computation; "auto" takes the checkpoint's.
        device: "cpu" or "cuda"; "auto" takes a CUDA device on which mapping and kernels pass a test at the start, else
            the CPU, with the reason in the log.
        max_model_len: longest prompt plus output in tokens; by default the model's own limit.
        max_num_seqs: sequences that run at once; never more than `max_num_batched_tokens`. By default 64, on CUDA 256.
        max_num_batched_tokens: token budget of a step, decodes and prefill chunks together. By default 1,024, on CUDA
            8,192.
        max_mixed_step_s: prompts are computed in chunks so small that the tokens of other requests come at least this
            often, in seconds, or after 4 times as long as they take without a prompt beside them if that is longer;
            `None`: chunks are bounded by `max_num_batched_tokens` alone. Smaller: smoother streams and later first
            tokens.
        gpu_memory_utilization: share of a CUDA device's memory that the engine takes in all: weights, a step, graphs,
            headroom, and the KV cache with what they leave. Memory of other processes is never counted in.
        kv_memory_bytes: ceiling of the KV cache, taken as needed. By default a quarter of the memory of the machine or
            container, less where less is available or vm.max_map_count allows fewer pages (the log says so); on a CUDA
            device by `gpu_memory_utilization`, after a measured step; what is set must fit beside that step.
        kv_memory_floor_bytes: the part of it that is taken at the start and never given back.
        kv_idle_release_s: cache memory unused for this long goes back to the machine. By default 0.5, on CUDA 30.
        kv_dtype: type of the KV cache: the model's ("auto"); 8-bit floats, with scales for each layer's KV heads: the
            checkpoint's, or measured at the start; or "int8", on CPUs only, with a scale for each token's KV head.
            About half the memory of bfloat16, slightly other outputs. 8-bit floats are slow on CPUs.
        expected_tokens: length of a typical request, prompt and output; decides the size of blocks.
        prefix_cache: share cached prefixes between requests.
        prefix_cache_release_s: cached prefixes without a hit for this long go back to the machine.
        kv_store: keep cached prefixes on disk, too, so that they outlive the process. Read where that takes less time
            than computing. Their tokens can be read there by this user.
        pinned_prompts: name → text; computed at the start and pinned in the prefix cache.
        pinned_system_prompts: name → system message, pinned as the chat template writes it.
        pin_quota: share of the cache that pinned prefixes may take.
        retain_quota: share of the cache that prefixes of requests with `cache_ttl_s` may take while they are retained.
            Running requests that need memory evict them all the same.
        max_cache_ttl_s: longer `cache_ttl_s` are reduced to this one; 0: prefixes are not retained.
        isolate_tenants: requests with a `tenant` share cached prefixes only within that tenant.
        preemption: how preempted requests get their blocks back: by swap, by recompute, or by the one that is expected
            to be faster.
        swap_bytes: most host memory for swapped blocks, and for cached prefixes of a model that sleeps, less where the
            machine has less; beyond it requests are recomputed. Models that share a device take at most the largest
            one's together; 0: nothing of this model.
        block_tokens: tokens in a KV block; by default the size that wastes least, or a larger one if `kv_memory_bytes`
            would otherwise be more pages than can be mapped.
        kv_layout: "interleaved": all layers of a token side by side; "sliced": 4 to 8 layers side by side, in blocks of
            64 tokens; "whole": all layers side by side, in blocks of 64 tokens, with the fewest calls of the driver;
            "per_layer": keys and values of each layer apart. "auto": interleaved on a CPU, sliced on CUDA.
        kv_view: how attention reads the cache: through regions, through block tables, or ("auto") through regions as
            long as the system allows their number of mappings.
        attention: kernels: "cpu", "sdpa" or "reference" on a CPU; "triton", "torch-flash", "sdpa" or "reference" on
            CUDA. "auto" takes the first that is installed and supports the model.
        num_threads: CPU threads of a step; by default the cores that this process may use, divided among ranks, on
            CUDA no more than 4.
        batch_invariant: a request's tokens depend on nothing else: neither on the requests beside it, nor on the chunks
            of its prompt, cached prefixes, draft tokens, or a preemption; so a request that goes on elsewhere, with its
            tokens as part of the prompt, goes on with the same ones. Attention of single tokens is slower. Models with
            recurrent layers or experts, adapters and other attention than "cpu" and "triton" are refused.
        tensor_parallel_size: ranks that compute each step together, with a device or a share of the cores each. All
            sizes in bytes are those of one rank.
        step_timeout_s: a rank that has not finished a step after this long counts as dead, and the engine stops.
        async_scheduling: schedule and launch each step before the tokens of the last one are known, so that the device
            does not wait for the host. Outputs are the same. "auto": on CUDA.
        decode_graphs: replay steps of single tokens as CUDA graphs, padded to a few numbers of sequences. "auto": on
            CUDA, on one rank, for models that can be captured. "on": any other model is an error.
        few_row_products: on CUDA, another kernel for attention's products of queries, keys, values and outputs with at
            most 16 rows; off until it has been measured. Needs Triton.
        dependent_launch: on CUDA of compute capability 9.0, Folio's own kernels start while the kernel before drains
            (programmatic dependent launch); off until it has been measured. Needs Triton 3.6.
        mixed_graphs: replay steps with prompts, up to 640 tokens in all, as CUDA graphs, too, in pieces between which
            attention is launched; where `decode_graphs` captures anything. "on": models that cannot be captured are an
            error if they are for `decode_graphs`, too. Not timed on a device yet.
        speculation: source of draft tokens: "ngram": the continuation of the last few tokens earlier in the text;
            "draft": `draft_model`. Outputs are the same.
        draft_model: a smaller model with the same vocabulary.
        max_draft_tokens: most draft tokens in a step; fewer while the acceptance rate is low.
        adapters: name → folder or Hub id of a LoRA adapter, loaded at its first request.
        adapter_dir: the folder below which operators load LoRA adapters at run time, at the same path for all replicas.
            `None`: only `adapters` are served.
        max_loaded_adapters: adapters kept in memory; the least recently used one goes first.
        quantization: "int8" or "int4": weights of linear layers, the output layer included, as integers of 8 or 4 bits
            with a scale for each 32 inputs, of int8 on GPUs for each 128 (dtype bfloat16; float32 on CPUs, float16 on
            GPUs). Embeddings keep their dtype. "none": as the checkpoint has them; one that is quantised stays so.
        fair_tenants: deficit round robin over tenants in the waiting queue.
        max_queued_requests: bound of the waiting queue, beyond the requests that may begin with the next step; more
            are refused with `OverloadedError`. `None`: no bound. "auto": four times `max_num_seqs` in a server, no
            bound in a script.
        warm_up: before its first request, a server's engine runs what that request would wait for.
        restore_prefixes_s: most time in which a new replica gets, before its first request, the pinned and hot
            prefixes of other replicas; 0: none.
        skip_tokenizer_init: no tokenizer: prompts are token ids and there is no text.
        load_format: "dummy": random weights, of the draft model too, made on the device, the same each time; of `model`
            only `config.json` and the tokenizer are read. For benchmarks, on one rank.
        pooling: how embeddings are made of a prompt's hidden states: "last": that of the last token; "mean": the mean
            over all tokens; "none": the model makes none. "auto": as the checkpoint says, in the `modules.json` of
            sentence-transformers or as a sequence classifier; others make none.
        matryoshka: embeddings may be cut to fewer `dimensions`; by default only if the checkpoint's `config.json` says
            so.
        score_tokens: two texts of one token each, such as "no" and "yes": the score of a pair is the probability of the
            second one after `score_template`.
        score_template: the prompt of a pair of texts for a model that scores, with `{query}` and `{document}` in their
            places. By default the tokenizer joins them.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}  # for the YAML

    model: str
    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_mixed_step_s: float | None = 0.25
    gpu_memory_utilization: float = 0.9
    kv_memory_bytes: Bytes | None = None
    kv_memory_floor_bytes: Bytes = 0
    kv_idle_release_s: float | None = None
    kv_dtype: KVDtype = "auto"
    expected_tokens: int = 1024
    prefix_cache: bool = True
    prefix_cache_release_s: float = 60.0
    kv_store: KVStore | None = None
    pinned_prompts: Mapping[str, str] = field(default_factory=dict)
    pinned_system_prompts: Mapping[str, str] = field(default_factory=dict)
    pin_quota: float = 0.25
    retain_quota: float = 0.25
    max_cache_ttl_s: float = 3600.0
    isolate_tenants: bool = True
    preemption: PreemptionPolicy = "auto"
    swap_bytes: Bytes = 1 << 30
    block_tokens: int | None = None
    kv_layout: Literal["auto", LayoutKind] = "auto"
    kv_view: ViewPolicy = "auto"
    attention: str = "auto"
    num_threads: int | None = None
    batch_invariant: bool = False
    tensor_parallel_size: int = 1
    step_timeout_s: float = 60.0
    async_scheduling: AsyncScheduling = "auto"
    decode_graphs: DecodeGraphs = "auto"
    few_row_products: bool = False
    dependent_launch: bool = False
    mixed_graphs: MixedGraphs = "off"
    speculation: Speculation = "off"
    draft_model: str | None = None
    max_draft_tokens: int = 8
    adapters: Mapping[str, str] = field(default_factory=dict)
    adapter_dir: str | None = None
    max_loaded_adapters: int = 8
    quantization: Quantization = "none"
    fair_tenants: bool = False
    max_queued_requests: int | Literal["auto"] | None = "auto"
    warm_up: bool = True
    restore_prefixes_s: float = 10.0
    skip_tokenizer_init: bool = False
    load_format: LoadFormat = "auto"
    pooling: Pooling = "auto"
    matryoshka: bool = False
    score_tokens: tuple[str, str] | None = None
    score_template: str | None = None

    def __post_init__(self) -> None:
        """Raise `ConfigError` with a line for each setting that cannot work."""
        if self.model == DEFAULT_MODEL:  # here: all replicas of a server have the same model, whatever is pulled later
            object.__setattr__(self, "model", default_model())
        if isinstance(self.kv_store, Mapping):  # a script's
            object.__setattr__(self, "kv_store", KVStore(**self.kv_store))
        problems = list(self._problems())
        try:
            problems += [problem for contradicts, problem in self._contradictions() if contradicts]
        except (AttributeError, TypeError) as error:  # often of a value that is named already
            problems = problems or [f"a setting has a value of the wrong type ({error})"]
        if problems:
            raise ConfigError("\n".join(problems))

    def on_device(self, device: DeviceName) -> ResolvedConfig:
        """The settings for a device, with its defaults."""
        given = {setting.name: getattr(self, setting.name) for setting in fields(self)}
        defaults = {name: value for name, value in DEVICE_DEFAULTS[device].items() if given[name] is None}
        return ResolvedConfig(**(given | defaults | {"device": device}))

    def _problems(self) -> Iterator[str]:
        """A line for each setting that cannot work, beginning with the setting's name."""
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                yield f"{name} is {getattr(self, name)!r}; choose one of {', '.join(allowed)}"
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                yield f"{name} is {getattr(self, name)!r}; it must be true or false"
        for names, is_within, bound in _BOUNDS:
            for name in names:
                with suppress(TypeError):  # of what is no number
                    if is_within(getattr(self, name)):
                        continue
                yield f"{name} is {getattr(self, name)!r}; it must {bound}"

    def _contradictions(self) -> Iterator[tuple[bool, str]]:
        """Pairs: whether two settings contradict each other, and the problem."""
        most = self.kv_memory_bytes
        yield (
            most is not None and self.kv_memory_floor_bytes > most,
            f"kv_memory_floor_bytes is {self.kv_memory_floor_bytes}; it must not be above the ceiling, "
            f"kv_memory_bytes, which is {most}",
        )
        yield (
            self.device == "cpu" and self.gpu_memory_utilization != 0.9,
            f"gpu_memory_utilization is {self.gpu_memory_utilization} and device 'cpu'; it is for CUDA devices: set "
            "kv_memory_bytes",
        )
        yield (
            self.kv_dtype.startswith("fp8") and self.attention in _WITHOUT_FP8,
            f"kv_dtype is {self.kv_dtype!r} and attention {self.attention!r}, which reads no 8-bit floats; choose "
            "attention 'auto', 'triton' (CUDA), 'sdpa' or 'reference', or on a CPU kv_dtype 'int8'",
        )
        yield (
            self.kv_dtype == "int8" and (self.device == "cuda" or self.attention in _ON_CUDA),
            f"kv_dtype is 'int8', device {self.device!r} and attention {self.attention!r}; int8 is read on CPUs only: "
            "use kv_dtype 'fp8_e4m3'",
        )
        yield (
            (self.speculation == "draft") != (self.draft_model is not None),
            f"speculation is {self.speculation!r} and draft_model {self.draft_model!r}; set both speculation 'draft' "
            "and draft_model, or neither",
        )
        yield (
            self.load_format == "dummy" and self.tensor_parallel_size > 1,
            f"load_format is 'dummy' and tensor_parallel_size {self.tensor_parallel_size}; dummy weights are for one "
            "rank: use tensor_parallel_size 1",
        )
        yield (
            self.decode_graphs == "on" and self.tensor_parallel_size > 1,
            f"decode_graphs is 'on' and tensor_parallel_size {self.tensor_parallel_size}; steps of several ranks are "
            "not captured: use decode_graphs 'auto'",
        )
        yield (
            self.mixed_graphs == "on" and self.decode_graphs == "off",
            "mixed_graphs is 'on' and decode_graphs 'off', without which nothing is captured: use decode_graphs 'auto'",
        )
        yield (
            self.mixed_graphs == "on" and self.tensor_parallel_size > 1,
            f"mixed_graphs is 'on' and tensor_parallel_size {self.tensor_parallel_size}; steps of several ranks are "
            "not captured: use mixed_graphs 'off'",
        )
        yield from self._store_contradictions()
        yield (
            self.batch_invariant and self.attention in _VARIANT,
            f"batch_invariant is true and attention {self.attention!r}, whose results depend on the batch; use "
            "attention 'auto'",
        )
        yield (
            self.batch_invariant and (bool(self.adapters) or self.adapter_dir is not None),
            "batch_invariant is true and there are adapters, whose products depend on the batch; leave one of them out",
        )
        yield from self._score_contradictions()

    def _store_contradictions(self) -> Iterator[tuple[bool, str]]:
        if (store := self.kv_store) is None:
            return
        yield not store.dir, "kv_store.dir is empty; name a folder on a local disk"
        yield store.bytes < 1, f"kv_store.bytes is {store.bytes}; it must be at least 1"
        yield (
            not self.prefix_cache,
            "kv_store is set and prefix_cache false, without which no prefix is kept: leave kv_store out",
        )
        yield (
            self.tensor_parallel_size > 1,
            f"kv_store is set and tensor_parallel_size {self.tensor_parallel_size}; prefixes of one rank only are kept "
            "on disk: leave kv_store out",
        )

    def _score_contradictions(self) -> Iterator[tuple[bool, str]]:
        template = self.score_template
        yield (
            template is not None and not ("{query}" in template and "{document}" in template),
            f"score_template is {template!r}; it must have {{query}} and {{document}} in the texts' places",
        )
        yield (
            self.score_tokens is not None and template is None,
            f"score_tokens is {self.score_tokens} and score_template is missing; set the template that they answer",
        )
        yield (
            self.score_tokens is not None and self.pooling not in ("auto", "last"),
            f"score_tokens is {self.score_tokens} and pooling {self.pooling!r}; scores are of the last token: leave "
            "pooling out",
        )
        yield (
            self.score_tokens is not None and self.skip_tokenizer_init,
            "score_tokens needs a tokenizer; leave skip_tokenizer_init out",
        )
        both = self.pinned_prompts.keys() & self.pinned_system_prompts.keys()
        yield (
            bool(both),
            f"pinned_prompts and pinned_system_prompts both have {', '.join(sorted(both))}; rename one of them",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig(EngineConfig):
    """Settings of an engine on a known device, made by `EngineConfig.on_device`: no value depends on the device."""

    device: DeviceName
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_idle_release_s: float


_CHOICES: dict[str, tuple[str, ...]] = {
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "device": ("auto", "cpu", "cuda"),
    **{name: get_args(kind) for name, kind in get_type_hints(EngineConfig).items() if get_origin(kind) is Literal},
}
_SWITCHES = tuple(name for name, kind in get_type_hints(EngineConfig).items() if kind is bool)
