"""Names of GGUF models: a file, a folder with one, and a file of a Hub repository (see `hub`)."""

from __future__ import annotations

import os
import tempfile
from functools import lru_cache
from pathlib import Path

from folio.app.errors import ModelError
from folio.app.models.gguf.files import SUFFIX, parts_of, read_gguf
from folio.app.models.gguf.folder import metadata_folder
from folio.app.models.gguf.header import MAGIC
from folio.app.models.gguf.hub import downloaded, is_downloaded, is_hub_file, models_among, remote_header
from folio.app.models.named import cache_folder


def resolve_gguf(model: str) -> str | None:
    """The folder of a GGUF model's metadata, see `metadata_folder`; `None` for other names. A file of the Hub is
    downloaded first. Raises `ModelError`."""
    try:
        if (file := local_file(model)) is None:
            if not is_hub_file(model):
                return None
            file = downloaded(model)
        states = [path.stat() for path in parts_of(file)]
        return _folder(file, tuple((one.st_ino, one.st_size, one.st_mtime_ns, one.st_ctime_ns) for one in states))
    except (OSError, ValueError) as error:
        raise ModelError(str(error)) from None


def planned_gguf(model: str) -> str | None:
    """The same folder for what needs no weights: of a Hub's file that is not on this machine its header is read, and
    the rest not downloaded. Raises `ModelError`."""
    try:
        if local_file(model) is None and is_hub_file(model) and not is_downloaded(model):
            return str(metadata_folder(remote_header(model), _parents()))
    except (OSError, ValueError) as error:
        raise ModelError(str(error)) from None
    return resolve_gguf(model)


def local_file(model: str) -> Path | None:
    """The (first) file of a GGUF model on this machine, by its absolute path; `None` for other names. Raises
    `ValueError`."""
    path = Path(os.path.abspath(Path(model).expanduser()))
    if path.is_file():
        return path if path.suffix.lower() == SUFFIX or _has_magic(path) else None
    if not path.is_dir() or (path / "config.json").exists():
        return None
    files = [file for file in sorted(path.iterdir()) if file.suffix.lower() == SUFFIX]
    found = models_among(files) or files
    if len(found) > 1:
        raise ValueError(f"{path} has {len(found)} GGUF models; name one: {', '.join(file.name for file in found[:5])}")
    return found[0] if found else None


def _has_magic(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


@lru_cache
def _folder(file: Path, states: object) -> str:
    """Args: states: of all files; others are another model."""
    return str(metadata_folder(read_gguf(file), _parents()))


def _parents() -> tuple[Path, Path]:
    return cache_folder() / "gguf", Path(tempfile.gettempdir()) / f"folio-gguf-{os.geteuid()}"
