"""What `quantization_config` in a config.json says: the methods, formats and bits that are read. Imports no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

Config: TypeAlias = Mapping[str, Any]

READ = "GPTQ and compressed-tensors in 4 and 8 bits, AWQ (gemm), FP8, MXFP4 and NF4 of bitsandbytes"
# Values of `quant_method` that transformers can turn into bfloat16, too.
READ_AS_BFLOAT16 = ("fp8", "mxfp4")
# Inputs of the least group of 4 and of 8 bits that the kernels have.
LEAST_GROUP = 32
_CT_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_CT_KINDS = {"pack-quantized": "int", "int-quantized": "int", "float-quantized": "float"}
_CT_STRATEGIES = {"int": ("group", "channel", "tensor"), "float": ("channel", "tensor", "block")}
# After `.experts.`: the projections that are read.
_EXPERT = re.compile(r"\d+\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.")
_QUANTISED_ENDINGS = ("qweight", "weight_packed", "_scale", "_scale_inv", "quant_map")
_EXPERTS_READ = "read are those with tensors of their own, as experts.0.gate_proj or experts.0.w1"


class UnreadError(ValueError):
    """A method, format or number of bits that is not read: `kind`."""

    def __init__(self, kind: str) -> None:
        super().__init__(f"weights quantized by {kind} are not read")
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Scheme:
    """How the weights of a checkpoint are quantised.

    Attributes:
        method: `quant_method`.
        bits: of codes that are integers, of any of its weights.
        group: inputs with one scale; `None`: all of them, or what the shapes of the scales say.
        block: outputs and inputs with one scale, of codes that are floats.
        zeros_less_one: stored zero points are less by 1 (GPTQ's first format).
    """

    method: str
    bits: frozenset[int]
    group: int | None = None
    block: tuple[int, int] | None = None
    zeros_less_one: bool = False


def read_scheme(quantization: object) -> Scheme | None:
    """The scheme of a `quantization_config`; `None` if only transformers reads the weights, as bfloat16 (MXFP8).

    Raises:
        UnreadError: naming what is not read, as "GPTQ in 3 bits".
        ValueError: a value is missing, or of another kind than the method has.
    """
    if not isinstance(quantization, Mapping):
        raise UnreadError("?")
    method = quantization.get("quant_method", "an unknown method")
    if method == "mxfp8":
        return None
    if not isinstance(method, str) or method not in _METHODS:
        shown = _show(method)
        raise UnreadError(shown.upper() if len(shown) <= 4 else shown)
    return _METHODS[method](quantization)


def expert_fault(method: str, names: Iterable[str]) -> str | None:
    """Why the experts of a checkpoint with these tensors are not read; `None` if they are, or it has none."""
    if method == "mxfp4":
        return None
    for name in sorted(names):
        _, experts, rest = name.partition(".experts.")
        if experts and not _EXPERT.match(rest) and name.endswith(_QUANTISED_ENDINGS):
            return f"its experts are quantized by {method} as {name}, which is not read; {_EXPERTS_READ}"
    return None


def _gptq(config: Config) -> Scheme:
    bits, form = _bits(config, "bits", (4, 8), "GPTQ"), _format(config, ("checkpoint_format", "format"), "gptq")
    if config.get("is_marlin_format"):
        form = "marlin"
    if form not in ("gptq", "gptq_v2"):
        raise UnreadError(f"GPTQ in the format {form}")
    if config.get("pack_dtype", "int32") != "int32":
        raise UnreadError(f"GPTQ packed in {_show(config['pack_dtype'])}")
    # "-:" names modules that are not quantised; the others may have bits and groups of their own.
    dynamic = config.get("dynamic") or {}
    if not isinstance(dynamic, Mapping) or not all(pattern.startswith("-:") for pattern in dynamic):
        raise UnreadError("GPTQ with other bits or groups for some modules (dynamic)")
    return Scheme("gptq", frozenset({bits}), _group(config), zeros_less_one=form == "gptq")


def _awq(config: Config) -> Scheme:
    bits, form = _bits(config, "bits", (4,), "AWQ"), _format(config, ("version", "checkpoint_format", "format"), "gemm")
    if form != "gemm":
        raise UnreadError(f"AWQ in the version {form}")
    return Scheme("awq", frozenset({bits}), _group(config))


def _compressed_tensors(config: Config) -> Scheme:
    status = config.get("quantization_status", "compressed")
    if status != "compressed":
        raise UnreadError(f"compressed-tensors with the status {_show(status)}")
    for key in ("sparsity_config", "transform_config"):
        part = config.get(key) or {}
        if not isinstance(part, Mapping) or part.get("format", "dense") != "dense" or part.get("config_groups"):
            raise UnreadError(f"compressed-tensors with {key}")
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ValueError(f"config_groups is {_show(groups)}; it must be an object with one group at least")
    found = [_ct_group(name, group, config.get("format")) for name, group in groups.items()]
    blocks = {block for _, block in found if block is not None}
    if len(blocks) > 1:
        raise UnreadError("compressed-tensors with blocks of several sizes")
    return Scheme("compressed-tensors", frozenset().union(*(bits for bits, _ in found)), block=next(iter(blocks), None))


def _ct_group(name: str, group: object, default: object) -> tuple[frozenset[int], tuple[int, int] | None]:
    """Bits of the integers of a config group, or the block of its floats. Args: `default`: format."""
    if not isinstance(group, Mapping) or not isinstance(weights := group.get("weights"), Mapping):
        raise ValueError(f"config_groups.{_show(name)} has no weights")
    form, kind = group.get("format") or default, weights.get("type", "int")
    if form not in _CT_FORMATS:
        raise UnreadError(f"compressed-tensors in the format {_show(form)}")
    if kind not in ("int", "float") or (form in _CT_KINDS and kind != _CT_KINDS[form]):
        raise UnreadError(f"compressed-tensors of the type {_show(kind)} in the format {form}")
    title = f"compressed-tensors, {kind},"
    bits = _bits(weights, "num_bits", (4, 8) if form == "pack-quantized" else (8,), title)
    if (strategy := _ct_strategy(weights)) not in _CT_STRATEGIES[kind]:
        raise UnreadError(f"{title} with the strategy {_show(strategy)}")
    block = _block(weights.get("block_structure"), "block_structure") if strategy == "block" else None
    return frozenset({bits} if kind == "int" else ()), block


def _ct_strategy(weights: Config) -> object:
    size = _group(weights)
    default = "tensor" if "group_size" not in weights else "group" if size else "channel"
    strategy = weights.get("strategy") or default
    if strategy == "group" and size is None:
        raise ValueError("the strategy is group without a group_size")
    return strategy


def _block(value: object, key: str) -> tuple[int, int]:
    if not isinstance(value, list) or [type(size) for size in value] != [int, int] or min(value) < 1:
        raise ValueError(f"{key} is {_show(value)}; it must be a list of two positive integers")
    return value[0], value[1]


def _fp8(config: Config) -> Scheme:
    size = config.get("weight_block_size")
    return Scheme("fp8", frozenset({8}), block=None if size is None else _block(size, "weight_block_size"))


def _bitsandbytes(config: Config) -> Scheme:
    kind = config.get("bnb_4bit_quant_type", "fp4") if config.get("load_in_4bit") else "int8"
    if kind != "nf4":
        raise UnreadError(f"bitsandbytes as {_show(kind)}")
    return Scheme("bitsandbytes", frozenset({4}))


_METHODS: dict[str, Callable[[Config], Scheme]] = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "bitsandbytes": _bitsandbytes,
    "mxfp4": lambda _: Scheme("mxfp4", frozenset({4})),
}


def _bits(config: Config, key: str, read: Iterable[int], method: str) -> int:
    bits = config.get(key)
    if not isinstance(bits, int) or isinstance(bits, bool) or not 1 <= bits <= 16:
        raise ValueError(f"{key} is {_show(bits)}; it must be {' or '.join(map(str, read))}")
    if bits not in read:
        raise UnreadError(f"{method} in {bits} bits")
    return bits


def _group(config: Config) -> int | None:
    group = config.get("group_size", -1)
    if group is None or group == -1:
        return None
    if not isinstance(group, int) or isinstance(group, bool) or group <= 0 or group % LEAST_GROUP:
        raise ValueError(f"group_size is {_show(group)}; it must be a multiple of {LEAST_GROUP}, or -1")
    return group


def _format(config: Config, keys: Iterable[str], default: str) -> str:
    return _show(next((config[key] for key in keys if config.get(key) is not None), default)).lower()


def _show(value: object) -> str:
    """A value of a config in one line."""
    return (value if isinstance(value, str) and value.isprintable() else json.dumps(value))[:40]
