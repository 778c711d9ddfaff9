"""`folio plan`: what a model needs and what fits, from its config.json alone."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from folio.app.cli.connection import Json
from folio.app.cli.sizes import parse_size
from folio.app.cli.text import console, table
from folio.app.config.sizes import show_size

if TYPE_CHECKING:
    from folio.app.engine.memory.memory_profile import DevicePlan
    from folio.app.engine.memory.size import ModelSize

EXAMPLES = """
folio plan smollm2 --memory 4GiB
folio plan Qwen/Qwen2.5-7B-Instruct --device h100 --tokens 8192
folio plan ./my-checkpoint --device a100-40 --tensor-parallel-size 2
folio plan Qwen/Qwen2.5-7B-Instruct --device l4 --kv-dtype fp8_e4m3 --gpu-memory-utilization 0.95
folio plan Qwen/Qwen2.5-0.5B-Instruct --memory 16GiB --json
"""

# Memory in bytes, from NVIDIA's data sheet of each; a device reports a little less or more.
DEVICES = {
    "b200": 180 * 10**9,
    "h200": 141 * 10**9,
    "h100": 80 * 10**9,
    "a100": 80 * 10**9,
    "a100-40": 40 * 10**9,
    "l40s": 48 * 10**9,
    "l4": 24 * 10**9,
    "a10": 24 * 10**9,
    "t4": 16 * 10**9,
    "rtx5090": 32 * 10**9,
    "rtx4090": 24 * 10**9,
}
_CPU, _CUDA = "cpu", "cuda"


@dataclass(frozen=True, slots=True)
class Target:
    """A machine to plan for: "cpu" or "cuda", and the memory of the machine or of each device."""

    kind: str
    name: str
    memory_bytes: int


_Dtype = Literal["auto", "float32", "bfloat16", "float16"]
_KvDtype = Literal["auto", "fp8_e4m3", "fp8_e5m2", "int8"]


def plan(
    model: Annotated[str, typer.Argument(help="A short name, a checkpoint folder or GGUF file, or a Hub id.")],
    memory: Annotated[
        int | None,
        typer.Option(parser=parse_size, metavar="SIZE", help="Memory of the machine or of each GPU, such as 80GiB."),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help=f"cpu, cuda (with --memory), or a GPU: {', '.join(DEVICES)}. By default cpu.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Length of a sequence, prompt and output.")] = 4096,
    tensor_parallel_size: Annotated[int, typer.Option(min=1, help="Ranks of a replica, a GPU each.")] = 1,
    dtype: Annotated[_Dtype, typer.Option(help="Type of weights and computation.")] = "auto",
    kv_dtype: Annotated[_KvDtype, typer.Option(help="Type of the KV cache; by default the model's.")] = "auto",
    gpu_memory_utilization: Annotated[
        float, typer.Option(help="Share of a GPU's memory for everything: weights, steps and KV cache.")
    ] = 0.9,
    kv_memory: Annotated[
        int | None, typer.Option(parser=parse_size, metavar="SIZE", help="KV cache of each rank; by default Folio's.")
    ] = None,
    block_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens in a block; by default the best.")] = None,
    kv_layout: Annotated[
        Literal["auto", "interleaved", "sliced", "whole", "per_layer"], typer.Option(help="Layout of a block's layers.")
    ] = "auto",
    kv_view: Annotated[
        Literal["auto", "region", "block_table"],
        typer.Option(help="How attention reads the cache; region: blocks of whole pages."),
    ] = "auto",
    as_json: Json = False,
) -> None:
    """Plan memory: weights, KV layout, waste, tokens of room, sequences at a length, and replicas that fit.

    Only config.json is read. The numbers are those of the planner that `folio serve` uses.
    """
    target = choose_target(device, memory)
    checked = check_model(model, tensor_parallel_size)
    # transformers reports optional kernels that it lacks, and its progress.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from folio.app.config.engine import EngineConfig
    from folio.app.engine.memory.size import ModelSize

    with _errors_only(), _as_fault(model):
        size = ModelSize(
            EngineConfig(
                model=checked,
                device=target.kind,
                dtype=dtype,
                kv_dtype=kv_dtype,
                gpu_memory_utilization=gpu_memory_utilization,
                tensor_parallel_size=tensor_parallel_size,
                kv_memory_bytes=kv_memory,
                block_tokens=block_tokens,
                kv_layout=kv_layout,
                kv_view=kv_view,
            )
        )
        figures = plan_figures(size, target, tokens) | {"model": model}
    if as_json:
        print(json.dumps(figures))
    else:
        _print(figures)


@contextmanager
def _as_fault(model: str) -> Iterator[None]:
    """A checkpoint that cannot be loaded is a fault of the argument."""
    from folio.app.errors import ConfigError, ModelError

    try:
        yield
    except ModelError as error:
        raise ConfigError(f"cannot plan {model!r}: {error}") from error


@contextmanager
def _errors_only() -> Iterator[None]:
    """Suppress the engine's warnings, which are for a replica's log."""
    ours = logging.getLogger("folio")
    before = ours.level
    ours.setLevel(logging.ERROR)
    try:
        yield
    finally:
        ours.setLevel(before)


def choose_target(device: str | None, memory: int | None) -> Target:
    """The machine to plan for. Raises `typer.BadParameter` for a device that is not known, or without memory."""
    name = (device or _CPU).lower()
    if name in DEVICES:
        return Target(_CUDA, name, DEVICES[name] if memory is None else memory)
    if name not in (_CPU, _CUDA):
        raise typer.BadParameter(f"--device is {device!r}; choose cpu, cuda, or one of {', '.join(DEVICES)}")
    if memory is not None:
        return Target(name, name, memory)
    if name == _CUDA:
        raise typer.BadParameter("--device cuda needs --memory, such as 80GiB; or name a GPU, such as h100")
    from folio.app.config.machine import Machine

    return Target(_CPU, "this machine", Machine.detect().memory_bytes)


def check_model(model: str, tensor_parallel_size: int = 1) -> str:
    """The name by which to plan the model: of a Hub's GGUF file the folder of its metadata. Raises `ConfigError` for a
    path without a model, for weights that are damaged or of other formats, and for a number of ranks that cannot share
    them; another Hub id is not looked up."""
    from folio.app.config.checkpoint import format_fault, name_fault, rank_faults
    from folio.app.errors import ConfigError
    from folio.app.models.builtin import local_folder
    from folio.app.models.gguf.names import planned_gguf

    folder = local_folder(model).expanduser()
    is_folder = os.path.isdir(folder)  # False for a name that is too long, where Path raises
    fault = format_fault(folder) if is_folder else name_fault(model)
    if is_folder and not (folder / "config.json").is_file():
        fault = fault or "it has no config.json"
    if fault is None and is_folder:
        faults = rank_faults(folder, tensor_parallel_size)
        fault = next((f"--tensor-parallel-size is {tensor_parallel_size}; {why}" for why in faults), None)
    if fault is not None:
        raise ConfigError(f"cannot plan {model!r}: {fault}")
    return planned_gguf(model) or model


def plan_figures(size: ModelSize, target: Target, num_tokens: int) -> dict[str, Any]:
    """The plan as JSON. Raises `ConfigError` if the model does not fit."""
    from folio.app.engine.memory.kv_plan import layout_kind
    from folio.app.engine.memory.size import GRANULARITY_BYTES, replicas_that_fit

    room = size.room(target.memory_bytes)
    rooms = replicas_that_fit(size, target.memory_bytes, num_tokens)
    return {
        "model": size.config.model,
        "architecture": size.model.module.config.model_type,
        "dtype": str(size.model.dtype).removeprefix("torch."),
        "kv_dtype": str(size.model.cache_dtype).removeprefix("torch."),
        "num_parameters": size.num_parameters,
        "max_model_len": size.model.max_positions,
        "device": target.kind,
        "device_name": target.name,
        "memory_bytes": target.memory_bytes,
        "tensor_parallel_size": size.config.tensor_parallel_size,
        "weight_bytes": size.weight_bytes,
        "bits_per_weight": size.bits_per_weight,
        "device_plan": _device_figures(room.device_plan),
        "granularity_bytes": GRANULARITY_BYTES[target.kind],
        "kv_layout": layout_kind(size.config),
        "groups": [_group_figures(group, size.config.expected_tokens) for group in room.groups],
        "kv_budget_bytes": room.budget_bytes,
        "num_pages": room.num_pages,
        "page_bytes": room.groups[0].layout.page_bytes,
        "longest_sequence_tokens": min(room.longest_tokens, size.model.max_positions),
        "room_tokens": room.longest_tokens,
        "tokens": num_tokens,
        "sequences": room.sequences(num_tokens),
        "num_replicas": len(rooms),
        "replicas": [
            {"num_replicas": number, "kv_budget_bytes": each.budget_bytes, "sequences": each.sequences(num_tokens)}
            for number, each in enumerate(rooms, 1)
        ],
    }


def _device_figures(plan: DevicePlan | None) -> dict[str, Any] | None:
    """Parts of a GPU's memory, in bytes."""
    if plan is None:
        return None
    return {
        "gpu_memory_utilization": plan.utilization,
        "weight_bytes": plan.weight_bytes,
        "activation_bytes": plan.activation_bytes,
        "graph_bytes": plan.graph_bytes,
        "headroom_bytes": plan.headroom_bytes,
        "kv_bytes": plan.kv_bytes,
    }


def _group_figures(group: Any, expected_tokens: int) -> dict[str, Any]:
    layout = group.layout
    if group.is_state:
        return {
            "kind": "recurrent state",
            "bytes_per_sequence": 2 * layout.block_bytes,  # the state of the step before is kept until it is copied
            "block_bytes": layout.block_bytes,
            "padding": layout.padding,
        }
    return {
        "kind": "full attention" if group.window_tokens is None else "sliding window",
        "num_layers": len(group.layers),
        "window_tokens": group.window_tokens,
        "block_tokens": layout.block_tokens,
        "block_bytes": layout.block_bytes,
        "page_bytes": layout.page_bytes,
        "num_slices": layout.num_slices,
        "extent_blocks": layout.extent_blocks,
        "handle_bytes": layout.handle_bytes,
        "bytes_per_token": layout.payload_bytes,
        "padding": layout.padding,
        "expected_waste": layout.expected_waste(expected_tokens),
        "expected_tokens": expected_tokens,
    }


def _print(figures: dict[str, Any]) -> None:
    screen = console()
    for shown in (_model_table(figures), _layout_table(figures), _replica_table(figures)):
        screen.print(shown)
        screen.print()
    room = (
        "CUDA: what --gpu-memory-utilization leaves. Activations are estimated here, and measured at the start."
        if figures["device"] == _CUDA
        else "CPU: a quarter of the memory, or less where weights and a step leave less; --kv-memory sets it."
    )
    screen.print(
        f"KV cache on {room} Sequences are assumed to share no prefix. Replicas share the memory "
        "equally. Adapters and draft models are not counted.",
        style="dim",
    )


def _model_table(figures: dict[str, Any]) -> Any:
    shown = table(f"{figures['model']} on {figures['device_name']}, {show_size(figures['memory_bytes'])}")
    shown.show_header = False
    shown.add_column(style="dim")
    shown.add_column(overflow="fold")
    ranks = figures["tensor_parallel_size"]
    a_rank = f" on each of {ranks} ranks" if ranks > 1 else ""
    millions = figures["num_parameters"] / 1e6
    parameters = f"{millions / 1e3:.2f} billion" if millions >= 1e3 else f"{millions:.1f} million"
    pages = f"{figures['num_pages']:,} pages of {show_size(figures['page_bytes'])}"
    longest = figures["longest_sequence_tokens"]
    by = "the model's context" if longest == figures["max_model_len"] else "by memory"
    shown.add_row("model", f"{figures['architecture']}, {parameters} parameters, {figures['dtype']}")
    bits = figures["bits_per_weight"]
    packed = "" if bits is None else f", packed: {bits:.1f} bits each"
    shown.add_row("weights", show_size(figures["weight_bytes"]) + a_rank + packed)
    if (device := figures["device_plan"]) is not None:
        for name in ("activations", "graphs", "headroom"):
            shown.add_row(name, show_size(device[f"{name.removesuffix('s')}_bytes"]) + a_rank)
    shown.add_row("KV cache", f"{show_size(figures['kv_budget_bytes'])}{a_rank}: {pages} of {figures['kv_dtype']}")
    shown.add_row("room", f"{figures['room_tokens']:,} tokens")
    shown.add_row("longest sequence", f"{longest:,} tokens ({by})")
    shown.add_row(f"sequences of {figures['tokens']:,}", f"{figures['sequences']:,} at once")
    return shown


def _layout_table(figures: dict[str, Any]) -> Any:
    title = f"KV layout: {figures['kv_layout']}, memory in whole {show_size(figures['granularity_bytes'])}"
    shown = table(title, "layers", "block", "bytes a token", "padding", "waste")
    for group in figures["groups"]:
        padding = f"{group['padding']:.1%}"
        if group["kind"] == "recurrent state":
            shown.add_row("recurrent states", f"{show_size(group['bytes_per_sequence'])} a sequence", "", padding, "")
            continue
        if group["extent_blocks"] > 1:
            shown.caption = (
                f"A block has {group['num_slices']} pages of {show_size(group['page_bytes'])}. Pages of "
                f"{group['extent_blocks']} blocks share {show_size(group['handle_bytes'])}, and are read through block "
                "tables (--kv-view region: larger blocks of whole pages)."
            )
        window = "" if group["window_tokens"] is None else f" of {group['window_tokens']}"
        shown.add_row(
            f"{group['num_layers']} × {group['kind']}{window}",
            f"{group['block_tokens']} tokens, {show_size(group['block_bytes'])}",
            f"{group['bytes_per_token']:,}",
            padding,
            f"{group['expected_waste']:.1%} at {group['expected_tokens']:,}",
        )
    return shown


def _replica_table(figures: dict[str, Any]) -> Any:
    most, tokens = figures["num_replicas"], f"{figures['tokens']:,}"
    where = "machine" if figures["device"] == _CPU else "device"
    title = f"Replicas on one {where}: {most} fit" if most else f"No sequence of {tokens} tokens fits"
    shown = table(title, "replicas", "KV cache of each", f"sequences of {tokens} of each", "of all")
    for row in figures["replicas"]:
        number, sequences = row["num_replicas"], row["sequences"]
        if number in (1, 2, 3, 4, 8, 16, 32, most):
            shown.add_row(str(number), show_size(row["kv_budget_bytes"]), f"{sequences:,}", f"{number * sequences:,}")
    return shown
