"""`folio serve`: serve until a signal, then drain."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from folio.app.cli.sizes import parse_size
from folio.app.models.named import BUILTIN, DEFAULT_MODEL, NAMED

EXAMPLES = """
folio serve
folio serve smollm2 --replicas 1
folio serve Qwen/Qwen2.5-0.5B-Instruct --port 8001 --kv-memory 2GiB
folio serve ./my-model --replicas 1:4 --api-keys keys.yaml
folio serve --max-num-seqs 16 --print-config > folio.yaml
folio serve --config folio.yaml
"""


def parse_replicas(text: str) -> tuple[int, int | None]:
    """A fixed number of replicas, or the lowest and the highest."""
    if match := re.fullmatch(r"(\d+)(?::(\d+))?", text):
        lowest, highest = int(match[1]), None if match[2] is None else int(match[2])
        if 1 <= lowest <= (lowest if highest is None else highest):
            return lowest, highest
    raise typer.BadParameter(f"{text!r} must be a number from 1, or MIN:MAX such as 1:3 (from 0: in a file)")


def parse_adapter(text: str) -> tuple[str, str]:
    """An adapter's name and its folder or Hub id."""
    name, _, source = text.partition("=")
    if not name or not source:
        raise typer.BadParameter(f"{text!r} must be NAME=MODEL, such as legal=./adapters/legal")
    return name, _absolute(source)


def _absolute(model: str) -> str:
    """A path's absolute form, so that a configuration can be used from anywhere; other names unchanged."""
    is_name = model in (BUILTIN, DEFAULT_MODEL, *NAMED)
    return os.path.abspath(model) if not is_name and Path(model).exists() else model


def serve(
    model: Annotated[
        str | None,
        typer.Argument(
            help='A short name of `folio pull`, a checkpoint folder or GGUF file, a Hugging Face Hub id, or "builtin" '
            "(a toy of 3 million parameters). By default smollm2 where it is pulled, else the toy."
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="A configuration file, as of `serve run`; options override it.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen at; by default 127.0.0.1.")] = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port of the HTTP server; by default 8000.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="The model's name for clients; by default MODEL's last part.")
    ] = None,
    replicas: Annotated[
        Any,
        typer.Option(
            parser=parse_replicas,
            metavar="N|MIN:MAX",
            help="Engine replicas, by load; by default 1:3, on GPUs up to as many as they hold.",
        ),
    ] = None,
    tensor_parallel_size: Annotated[
        int | None, typer.Option(help="Ranks that compute each step together, with a device each.")
    ] = None,
    kv_memory: Annotated[
        int | None,
        typer.Option(
            parser=parse_size, metavar="SIZE", help="Most KV cache memory of a rank, e.g. 4GiB; taken as needed."
        ),
    ] = None,
    shared_kv_memory: Annotated[
        int | None,
        typer.Option(
            parser=parse_size, metavar="SIZE", help="Instead: most KV cache memory of all replicas on one device."
        ),
    ] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Longest prompt plus output in tokens.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Most sequences that run at once in a replica.")] = None,
    device: Annotated[
        Literal["auto", "cpu", "cuda"] | None,
        typer.Option(help="Device of the replicas; auto takes CUDA where it works."),
    ] = None,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"] | None, typer.Option(help="Type of weights and computation.")
    ] = None,
    kv_dtype: Annotated[
        Literal["auto", "fp8_e4m3", "fp8_e5m2", "int8"] | None,
        typer.Option(help="Type of the KV cache; auto is the model's."),
    ] = None,
    gpu_memory_utilization: Annotated[
        float | None, typer.Option(help="Share of a GPU's memory for everything; by default 0.9.")
    ] = None,
    quantization: Annotated[
        Literal["none", "int8", "int4"] | None, typer.Option(help="Bits of the weights of linear layers.")
    ] = None,
    speculation: Annotated[
        Literal["off", "ngram"] | None, typer.Option(help="Draft tokens from earlier text; the same outputs.")
    ] = None,
    adapter: Annotated[
        list[Any] | None,
        typer.Option(parser=parse_adapter, metavar="NAME=MODEL", help="A LoRA adapter; may be repeated."),
    ] = None,
    adapter_dir: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="Operators may load LoRA adapters from below this folder."),
    ] = None,
    api_keys: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="A file of API keys that clients need.")
    ] = None,
    grace_s: Annotated[
        float, typer.Option(min=0, help="Seconds for requests in flight after Ctrl-C; a second Ctrl-C ends them.")
    ] = 60.0,
    ray_dashboard: Annotated[
        bool, typer.Option("--ray-dashboard", help="Start Ray's dashboard, too, which `serve status` needs.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show all lines of Ray, Serve and HAProxy.")] = False,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the configuration; start nothing.")
    ] = False,
) -> int:
    """Serve a model until Ctrl-C, then finish the requests in flight.

    Without --config, the options override the packaged defaults.
    """
    begun_at = time.monotonic()
    from folio.app.cli.start.env import stay_on_this_machine
    from folio.app.cli.start.search_path import add_working_directory

    is_local = "RAY_ADDRESS" not in os.environ
    if is_local:
        stay_on_this_machine()
    from folio.app.cli.settings import compose  # which imports Ray

    options = {
        "MODEL": None if model is None else _absolute(model),
        "--host": host,
        "--port": port,
        "--name": name,
        "--replicas": replicas,
        "--tensor-parallel-size": tensor_parallel_size,
        "--kv-memory": kv_memory,
        "--shared-kv-memory": shared_kv_memory,
        "--max-model-len": max_model_len,
        "--max-num-seqs": max_num_seqs,
        "--device": device,
        "--dtype": dtype,
        "--kv-dtype": kv_dtype,
        "--gpu-memory-utilization": gpu_memory_utilization,
        "--quantization": quantization,
        "--speculation": speculation,
        "--adapter": dict(adapter) if adapter else None,
        "--adapter-dir": None if adapter_dir is None else os.path.abspath(adapter_dir),
        "--api-keys": None if api_keys is None else {"file": os.path.abspath(api_keys)},
    }
    settings = compose(config, {option: value for option, value in options.items() if value is not None})
    add_working_directory()
    checked = settings.check(is_local=is_local)
    if print_config:
        import yaml

        print(yaml.safe_dump(settings.value, sort_keys=False, allow_unicode=True), end="")
        return 0
    from folio.app.cli.start.lifetime import run  # not before: Ray takes seconds
    from folio.app.cli.start.start_log import StartLog

    return run(
        checked,
        grace_s,
        is_local=is_local,
        ray_dashboard=ray_dashboard,
        is_default_scale=config is None and replicas is None,
        start_log=StartLog(verbose=verbose, begun_at=begun_at),
    )
