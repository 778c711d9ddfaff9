"""Models that operators add at run time, from folders below `models_dir`. Imports nothing heavy."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from app.config.checkpoint import checkpoint_faults, weight_bytes
from app.config.engine import EngineConfig
from app.config.shelf import ModelConfig, ShelfConfig
from app.errors import RequestError

# Settings that concern the process or all its models, which added models have from the first one.
_OF_FIRST = (
    "device",
    "num_threads",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_queued_requests",
    "isolate_tenants",
    "fair_tenants",
    "adapter_dir",
    "step_timeout_s",
    "warm_up",
    "restore_prefixes_s",
)


def added_engine(
    shelf: ShelfConfig, path: str, max_model_len: int | None, dtype: str, quantization: str
) -> EngineConfig:
    """The engine of an added model, with the first model's settings as far as they concern the process. Raises
    `ConfigError`."""
    shared = {name: getattr(shelf.first.engine, name) for name in _OF_FIRST}
    return EngineConfig(
        model=path,
        max_model_len=max_model_len,
        dtype=dtype,
        quantization=quantization,  # type: ignore[arg-type]  # checked by the constructor
        **shared,
    )


def check_added(config: ModelConfig, shelf: ShelfConfig) -> tuple[ModelConfig, tuple[tuple[str, int], ...]]:
    """The model with its folder's path, links followed; and names and sizes of its files.

    Args:
        config: `engine.model` is the folder, relative to `models_dir`.

    Raises:
        RequestError: the folder or a file is not below `models_dir`, or the model cannot be served.
    """
    assert shelf.models_dir is not None
    given, root = config.engine.model, shelf.models_dir.expanduser().resolve()
    try:
        folder = (root / given).resolve()
        if root not in folder.parents:
            raise RequestError(f"path is {given!r}, which is not below models_dir, {str(root)!r}", "path")
        if not folder.is_dir():
            raise RequestError(f"path is {given!r}; there is no such folder in models_dir, {str(root)!r}", "path")
        files = sorted(file for file in folder.iterdir() if file.is_file())
        if outside := [file.name for file in files if root not in file.resolve().parents]:
            raise RequestError(f"path is {given!r}, where {', '.join(outside)} links out of models_dir", "path")
        sizes = tuple((file.name, file.stat().st_size) for file in files)
        faults = [*checkpoint_faults(folder), *_shards_elsewhere(folder)]
    except (OSError, ValueError, RuntimeError) as error:  # too long, a null character, a circle of links
        raise RequestError(f"path is {given!r}, which cannot be read: {error}", "path") from error
    if faults:
        raise RequestError(f"path is {given!r}: {'; '.join(faults)}", "path")
    size, most = weight_bytes(folder), shelf.device_memory_bytes
    if most is not None and config.engine.quantization == "none" and config.engine.dtype == "auto" and size >= most:
        raise RequestError(
            f"path is {given!r}, whose weights take {size} bytes; device_memory_bytes is {most}, and must have room "
            "for them and the KV cache of a request",
            "path",
        )
    return replace(config, engine=replace(config.engine, model=str(folder))), sizes


def _shards_elsewhere(folder: Path) -> Iterator[str]:
    """Faults of indices that name files of other folders, which may be outside of `models_dir`: transformers follows
    them. Raises `ValueError` if an index is not JSON."""
    for index in folder.glob("*.index.json"):
        if not index.is_file():
            continue
        content = json.loads(index.read_text(encoding="utf-8"))
        names = content.get("weight_map") if isinstance(content, dict) else None
        for name in sorted(set(map(str, names.values()))) if isinstance(names, dict) else ():
            if "/" in name:
                yield f"{index.name} names {name!r}; the weights must be in the model's folder"
