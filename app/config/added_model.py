"""Models that operators add at run time, from folders below `models_dir`. Imports nothing heavy."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from folio.app.config.checkpoint import checkpoint_faults, weight_bytes
from folio.app.config.engine import EngineConfig
from folio.app.config.shelf import ModelConfig, ShelfConfig
from folio.app.errors import RequestError

# Settings that concern the process or all its models: added models take them from the first one.
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


# The sample of a model's files: a file up to this size is read whole; of others the beginning, which has the header,
# and this number of pages, evenly spaced.
_WHOLE_BYTES, _START_BYTES = 16 << 20, 1 << 20
_NUM_SAMPLES, _SAMPLE_BYTES = 1024, 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedModel(ModelConfig):
    """A model that was added.

    Attributes:
        version: digest of its files, see `files_sample`.
        revision: of the table that added it: a model that was removed and added again is another one.
    """

    version: str = ""
    revision: int = 0


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


def check_added(config: ModelConfig, shelf: ShelfConfig) -> tuple[AddedModel, tuple[tuple[str, int], ...]]:
    """The model with its folder's path, links followed, and its version; and names and sizes of its files.

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
        version = files_sample(files)
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
    settings = {field.name: getattr(config, field.name) for field in fields(ModelConfig)}
    settings["engine"] = replace(config.engine, model=str(folder))
    return AddedModel(**settings, version=version), sizes


def files_sample(files: Sequence[Path]) -> str:
    """Digest of names, sizes and samples of files, in bounded time. Other weights nearly always have another digest,
    but equal digests prove nothing: a load uses `FileDigests`. Raises `OSError`."""
    digest = hashlib.sha256()
    per_file = max(1, _NUM_SAMPLES // max(1, len(files)))
    for path in files:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(f"{path.name}\0{size}\0".encode())
            digest.update(file.read(size if size <= _WHOLE_BYTES else _START_BYTES))
            for i in range(per_file if size > _WHOLE_BYTES else 0):
                file.seek((size - _SAMPLE_BYTES) * i // per_file)
                digest.update(file.read(_SAMPLE_BYTES))
            digest.update(os.pread(file.fileno(), _SAMPLE_BYTES, max(0, size - _SAMPLE_BYTES)))
    return digest.hexdigest()


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
