"""The engine's settings: one frozen value, checked once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

from app.errors import ConfigError

# As in `vmem` and `app.fleet.policies`, which take seconds to import; a test holds them together.
LayoutKind = Literal["interleaved", "per_layer"]
ViewPolicy = Literal["auto", "region", "block_table"]
PolicyName = Literal["prefix_aware", "least_loaded", "round_robin", "consistent_hash"]

PreemptionPolicy = Literal["auto", "swap", "recompute"]
Speculation = Literal["off", "ngram", "draft"]
Quantization = Literal["none", "int8"]
LoadFormat = Literal["auto", "dummy"]

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine.

    Attributes:
        model: "builtin", a local checkpoint folder, or a Hugging Face Hub id.
        dtype: of weights and cache; "auto" takes the checkpoint's.
        device: "cpu" or "cuda"; "auto" is the CPU for now: CUDA has been tested over a fake driver and in Triton's
            interpreter only.
        max_model_len: longest prompt plus output in tokens; by default what the model was made for.
        max_num_seqs: sequences that run at once; never more than `max_num_batched_tokens`.
        max_num_batched_tokens: tokens computed in one step, decodes and prefill chunks together.
        kv_memory_bytes: ceiling of the KV cache, by default a quarter of the memory of the machine or container, less
            where less is available or vm.max_map_count allows fewer pages (the log says so); on a CUDA device most of
            what the weights leave. It is taken as needed.
        kv_memory_floor_bytes: as much of it is taken at the start and never given back.
        kv_idle_release_s: cache memory that nobody has used for this long goes back to the machine.
        expected_tokens: length of a typical request, prompt and output; blocks are chosen for it.
        prefix_cache: whether requests that begin alike share what is cached.
        prefix_cache_release_s: cached prefixes that nobody has wanted for this long go back to the machine.
        pinned_prompts: name → text; these prompts are computed at the start, and stay in the prefix cache.
        pinned_system_prompts: name → system message, pinned as the chat template writes it.
        pin_quota: share of the cache that pinned prefixes may take.
        isolate_tenants: requests with a `tenant` share cached prefixes only with those of the same one.
        preemption: how requests that give up their blocks get them back: from host memory, by computing them again, or
            whichever is expected to be faster.
        swap_bytes: host memory for that at most, less where the machine has less; beyond it requests are computed
            again.
        block_tokens: tokens in a KV block, by default what wastes least, or more if `kv_memory_bytes` would else be
            more pages than can be mapped.
        kv_layout: all layers of a token side by side, or each layer's keys and values for themselves.
        kv_view: how attention reads the cache: through contiguous regions, through block tables, or through regions
            as long as the mappings they take are within what the system allows.
        attention: which kernels: "cpu", "sdpa" or "reference" on a CPU; "triton", "torch-flash", "sdpa" or "reference"
            on CUDA. "auto" takes the first of a table that is there and can do what the model needs.
        num_threads: CPU threads of a step, by default one for each core this process may use, shared among ranks.
        tensor_parallel_size: ranks that compute each step together, with a device or a share of the cores each. All
            sizes in bytes are those of one rank.
        step_timeout_s: a rank that has not finished a step after this long is taken for dead, and the engine stops.
        speculation: how several tokens are guessed and checked in one step: "ngram": what followed the last few tokens
            earlier in the text; "draft": by `draft_model`. Outputs are the same.
        draft_model: a smaller model with the same vocabulary.
        max_draft_tokens: guessed at most; fewer where they are seldom right.
        adapters: name → folder or Hub id of a LoRA adapter; each is loaded when a request first asks for it.
        max_loaded_adapters: as many are kept in memory; beyond, the one that has been unused for longest goes.
        quantization: "int8": weights of linear layers, the output layer among them, are kept as 8-bit integers with a
            scale for each output (CPU with AVX-512, float32 or bfloat16). Embeddings keep their dtype.
        fair_tenants: requests wait in one queue for each tenant, and prompts are computed in turn.
        max_queued_requests: more, beyond those that may begin with the next step, are refused with `OverloadedError`;
            `None`: no bound. "auto": in a server four times `max_num_seqs`, enough to keep it busy; in a script none.
        warm_up: a server's engine runs, before it takes requests, what the first ones would have waited for.
        restore_prefixes_s: a new replica computes, before it takes requests and for so long at most, what others have
            pinned and what they are asked for most; 0: nothing of it.
        skip_tokenizer_init: no tokenizer: prompts are token ids and there is no text.
        load_format: "dummy": random weights, of the draft model too, made on the device, the same each time; of `model`
            only `config.json` is read, beside the tokenizer. For measuring, and on one rank only.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}  # in YAML, unknown settings are errors

    model: str
    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 1024
    kv_memory_bytes: int | None = None
    kv_memory_floor_bytes: int = 0
    kv_idle_release_s: float = 0.5
    expected_tokens: int = 1024
    prefix_cache: bool = True
    prefix_cache_release_s: float = 60.0
    pinned_prompts: Mapping[str, str] = field(default_factory=dict)
    pinned_system_prompts: Mapping[str, str] = field(default_factory=dict)
    pin_quota: float = 0.25
    isolate_tenants: bool = True
    preemption: PreemptionPolicy = "auto"
    swap_bytes: int = 1 << 30
    block_tokens: int | None = None
    kv_layout: LayoutKind = "interleaved"
    kv_view: ViewPolicy = "auto"
    attention: str = "auto"
    num_threads: int | None = None
    tensor_parallel_size: int = 1
    step_timeout_s: float = 60.0
    speculation: Speculation = "off"
    draft_model: str | None = None
    max_draft_tokens: int = 8
    adapters: Mapping[str, str] = field(default_factory=dict)
    max_loaded_adapters: int = 8
    quantization: Quantization = "none"
    fair_tenants: bool = False
    max_queued_requests: int | Literal["auto"] | None = "auto"
    warm_up: bool = True
    restore_prefixes_s: float = 10.0
    skip_tokenizer_init: bool = False
    load_format: LoadFormat = "auto"

    def __post_init__(self) -> None:
        """Raises `ConfigError` with a line for each setting that cannot work."""
        if problems := list(self._problems()):
            raise ConfigError("\n".join(problems))

    def _problems(self) -> Iterator[str]:
        """Each begins with the setting's name."""
        choices = {
            "dtype": DTYPES,
            "device": DEVICES,
            "kv_layout": get_args(LayoutKind),
            "kv_view": get_args(ViewPolicy),
            "preemption": get_args(PreemptionPolicy),
            "speculation": get_args(Speculation),
            "quantization": get_args(Quantization),
            "load_format": get_args(LoadFormat),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                yield f"{name} is {getattr(self, name)!r}; choose one of {', '.join(allowed)}"
        for name in (
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
            "max_queued_requests",
        ):
            value = getattr(self, name)
            if isinstance(value, int) and value < 1:
                yield f"{name} is {value}; it must be at least 1"
        for name in (
            "kv_memory_floor_bytes",
            "kv_idle_release_s",
            "prefix_cache_release_s",
            "swap_bytes",
            "restore_prefixes_s",
        ):
            if not getattr(self, name) >= 0:  # NaN is not
                yield f"{name} is {getattr(self, name)}; it must not be negative"
        if not self.step_timeout_s > 0:
            yield f"step_timeout_s is {self.step_timeout_s}; it must be above 0"
        if not 0 <= self.pin_quota <= 1:
            yield f"pin_quota is {self.pin_quota}; it must be between 0 and 1"
        if isinstance(self.max_queued_requests, str) and self.max_queued_requests != "auto":
            yield f"max_queued_requests is {self.max_queued_requests!r}; it must be a number, None or 'auto'"
        if self.kv_memory_bytes is not None and self.kv_memory_floor_bytes > self.kv_memory_bytes:
            yield (
                f"kv_memory_floor_bytes is {self.kv_memory_floor_bytes}; it must not be above the ceiling, "
                f"kv_memory_bytes, which is {self.kv_memory_bytes}"
            )
        if (self.speculation == "draft") != (self.draft_model is not None):
            yield (
                f"speculation is {self.speculation!r} and draft_model {self.draft_model!r}; 'draft' needs one, and "
                "nothing else can use one"
            )
        if self.load_format == "dummy" and self.tensor_parallel_size > 1:
            yield (
                f"load_format is 'dummy', which makes a whole model, and tensor_parallel_size "
                f"{self.tensor_parallel_size}; use 1"
            )
        if both := self.pinned_prompts.keys() & self.pinned_system_prompts.keys():
            yield f"pinned_prompts and pinned_system_prompts both have {', '.join(sorted(both))}; rename one of them"
