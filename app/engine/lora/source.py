"""Adapter sources: where the files of a LoRA adapter are, and which version of them is meant."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from folio.app.errors import RequestError, UnknownModelError
from folio.app.models.weights.file_digests import FileDigests

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
FILES = CONFIG_FILE, WEIGHTS_FILE
_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """An adapter's name and files.

    Attributes:
        path: a folder, or a Hub id.
        version: `files_version` of the files; `None` for an adapter of the settings, whose files may not change.
        model: the name of its model among those of a replica; empty: the first one.
    """

    name: str
    path: str
    version: str | None = None
    model: str = ""

    @property
    def id(self) -> str:
        """Identifies the weights, in the engine and in the keys of cached prefixes: the name alone does not, because
        other weights may be loaded under it later."""
        return self.name if self.version is None else f"{self.name}@{self.version}"


def folder_below(directory: str, path: str) -> Path:
    """The folder of an adapter, with links followed.

    Args:
        directory: `adapter_dir`, where relative paths begin.

    Raises:
        RequestError: the folder, or one of its files, is not below `directory`.
        UnknownModelError: there is no such folder, or a file is missing.
    """
    root = Path(directory).expanduser().resolve()
    try:
        folder = (root / path).resolve()
        outside = [
            place for place in (folder, *((folder / file).resolve() for file in FILES)) if root not in _up(place)
        ]
        if outside:
            raise RequestError(f"lora_path is {path!r}, which is not below adapter_dir, {str(root)!r}", "lora_path")
        missing = [file for file in FILES if not (folder / file).is_file()]
    except (OSError, ValueError, RuntimeError) as error:  # too long, a null character, a cycle of links
        raise RequestError(f"lora_path is {path!r}, which is not a path: {error}", "lora_path") from error
    if missing:
        raise UnknownModelError(f"no adapter: {path!r} in adapter_dir has no {' and no '.join(missing)}", "lora_path")
    return folder


def _up(place: Path) -> tuple[Path, ...]:
    return (place, *place.parents)


def files_version(folder: Path, digests: FileDigests | None = None) -> str:
    """Digest of the content of an adapter's files; `digests` remembers those of single files. Raises `OSError`."""
    of_file = (digests or FileDigests()).of
    content = "".join(of_file(folder / file) for file in FILES)
    return hashlib.blake2b(content.encode(), digest_size=_DIGEST_BYTES).hexdigest()
