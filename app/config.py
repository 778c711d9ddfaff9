"""The engine's settings: one frozen value, checked once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, get_args

from app.errors import ConfigError
from vmem import View

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine.

    Attributes:
        model: "builtin", a local checkpoint folder, or a Hugging Face Hub id.
        dtype: of weights and cache; "auto" takes the checkpoint's.
        device: "auto" takes the best there is.
        max_model_len: longest prompt plus output in tokens; by default what the model was made for.
        max_num_seqs: sequences that run at once; never more than `max_num_batched_tokens`.
        max_num_batched_tokens: tokens computed in one step, decodes and prefill chunks together.
        kv_memory_bytes: ceiling of the KV cache, by default a quarter of the machine's memory. It is taken as needed.
        block_tokens: tokens in a KV block.
        kv_view: how attention reads the cache: through contiguous regions or through block tables.
        attention: which kernel; "auto" takes the fastest for the device.
        num_threads: CPU threads of a step, by default one for each core this process may use.
        skip_tokenizer_init: no tokenizer: prompts are token ids and there is no text.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}  # in YAML, unknown settings are errors

    model: str
    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 1024
    kv_memory_bytes: int | None = None
    block_tokens: int = 16
    kv_view: View = "region"
    attention: str = "auto"
    num_threads: int | None = None
    skip_tokenizer_init: bool = False

    def __post_init__(self) -> None:
        for name, allowed in (("dtype", DTYPES), ("device", DEVICES), ("kv_view", get_args(View))):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; choose one of {', '.join(allowed)}")
        for name in (
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "kv_memory_bytes",
            "block_tokens",
            "num_threads",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1")
