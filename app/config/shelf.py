"""Settings of a shelf: the models of one engine replica. Imports nothing heavy."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Literal

from folio.app.config.engine import DeviceName, EngineConfig
from folio.app.config.parsers import ReasoningParserName, ToolParserName
from folio.app.errors import ConfigError

NEEDS_TOKENIZER = "a server needs the tokenizer: leave the setting out"

Keep = Literal["auto", "always"] | float

# Beyond these a model would have all of the device's time, or none, and sums of weights would round the others away.
LEAST_WEIGHT, MOST_WEIGHT = 1e-3, 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class SLO:
    """Latency targets of a model; the one that is nearest to missing them gets the device first.

    Attributes:
        ttft_s: time to first token.
        tpot_s: time per output token after it.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}  # for the YAML

    ttft_s: float = 1.0
    tpot_s: float = 0.1

    def __post_init__(self) -> None:
        """Raise `ConfigError` with a line for each setting that cannot work."""
        _raise(
            f"{name} is {value}; it must be above 0 and finite"
            for name, value in (("ttft_s", self.ttft_s), ("tpot_s", self.tpot_s))
            if not 0 < value < math.inf
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One model of a shelf.

    Attributes:
        name: the model's name in requests.
        engine: its engine. `kv_memory_bytes` is a ceiling within the shelf's `device_memory_bytes`.
        keep: when its weights leave the device. "auto": when other models can use the memory better; "always": never;
            seconds: after this time without a request, or earlier when others need the memory. Its cached prefixes
            leave the device with them, for host memory (`engine.swap_bytes`), whatever `keep` is.
        weight: its share of the device's time while several models have work, relative to the others, from 0.001 to
            1000.
        slo: its latency targets.
        tool_call_parser, reasoning_parser: as beside `engine`.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}  # for the YAML

    name: str
    engine: EngineConfig
    keep: Keep = "auto"
    weight: float = 1.0
    slo: SLO = field(default_factory=SLO)
    tool_call_parser: ToolParserName = "auto"
    reasoning_parser: ReasoningParserName = "auto"

    def __post_init__(self) -> None:
        """Raise `ConfigError` with a line for each setting that cannot work."""
        _raise(self._problems())

    def on_device(self, device: DeviceName) -> ModelConfig:
        return replace(self, engine=self.engine.on_device(device))

    def _problems(self) -> Iterator[str]:
        """A line for each setting that cannot work, beginning with the setting's name."""
        if not self.name or not self.name.isprintable() or self.name != self.name.strip():
            yield f"name is {self.name!r}; it must be printable characters, without space around them"
        if isinstance(self.keep, str):
            if self.keep not in ("auto", "always"):
                yield f"keep is {self.keep!r}; it must be 'auto', 'always' or seconds"
        elif not 0 <= self.keep < math.inf:
            yield f"keep is {self.keep}; it must be at least 0 and finite; to keep a model for ever, use 'always'"
        if not LEAST_WEIGHT <= self.weight <= MOST_WEIGHT:
            yield f"weight is {self.weight}; it must be from {LEAST_WEIGHT:g} to {MOST_WEIGHT:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShelfConfig:
    """The models of each engine replica, at least one, and what they share. Calls that name no model are for the first
    one. The other settings are those of `AppArgs`.
    """

    models: tuple[ModelConfig, ...]
    device_memory_bytes: int | None = None
    host_memory_bytes: int | None = None
    weights_dir: Path | None = None
    weights_dir_bytes: int | None = None
    models_dir: Path | None = None

    @property
    def first(self) -> ModelConfig:
        return self.models[0]

    @property
    def names(self) -> frozenset[str]:
        """Names of models and adapters."""
        return frozenset(name for model in self.models for name in (model.name, *model.engine.adapters))

    @property
    def grows(self) -> bool:
        """Whether models or adapters can be added at run time."""
        return self.models_dir is not None or any(model.engine.adapter_dir is not None for model in self.models)


def shelf_problems(models: tuple[ModelConfig, ...]) -> Iterator[str]:
    """Reasons why models cannot be served together; each begins with the key, such as `models[2].name`."""
    seen: dict[str, str] = {}  # name of a model or adapter → its key
    first = models[0].engine
    for i, model in enumerate(models):
        key, engine = f"models[{i}]", model.engine
        named = {model.name: f"{key}.name"} | {name: f"{key}.engine.adapters.{name}" for name in engine.adapters}
        if model.name in engine.adapters:
            yield f"{key}.name is {model.name!r}, which is also the name of its adapter; rename one of them"
        for name, where in named.items():
            if name in seen:
                yield f"{where} is {name!r}, which {seen[name]} is, too; rename one of them"
            seen.setdefault(name, where)
        for setting in ("device", "isolate_tenants"):
            if (value := getattr(engine, setting)) != (other := getattr(first, setting)):
                yield (
                    f"{key}.engine.{setting} is {value!r} and models[0].engine.{setting} {other!r}; models of one "
                    "replica have the same"
                )
        if engine.skip_tokenizer_init:
            yield f"{key}.engine.skip_tokenizer_init is true; {NEEDS_TOKENIZER}"
        if engine.tensor_parallel_size > 1:
            yield (
                f"{key}.engine.tensor_parallel_size is {engine.tensor_parallel_size}; models that share a device have "
                "one rank: serve this model by engine in an application of its own"
            )
        if engine.kv_memory_floor_bytes:
            yield (
                f"{key}.engine.kv_memory_floor_bytes is {engine.kv_memory_floor_bytes}; a model that sleeps holds no "
                "memory: leave it out"
            )


def _raise(problems: Iterator[str]) -> None:
    if lines := list(problems):
        raise ConfigError("\n".join(lines))
