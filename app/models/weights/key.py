"""Weight key: everything that the bytes of a loaded model depend on. It gives the weight file its name."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import try_to_load_from_cache

from folio.app import VERSION
from folio.app.config.engine import ResolvedConfig
from folio.app.models.builtin import resolve_model
from folio.app.models.gguf.folder import gguf_files
from folio.app.models.weights.file import LAYOUT_VERSION
from folio.app.models.weights.folder import SUFFIX
from folio.kernels import CpuLinear, KernelError
from folio.kernels.cpu.build import build_name

# Files of a checkpoint that decide about its module, by pattern; its tokenizer's do not, and may come later.
_CONFIG = ("config.json", "generation_config.json", "*.index.json")
_MOST_NAME_CHARACTERS = 60


@dataclass(frozen=True, slots=True)
class WeightKey:
    """Everything that the weights in a file depend on.

    Attributes:
        name: the model's name, for the log and file names.
        place: path of the checkpoint, settings and kernels. Files of other versions at the same place are outdated.
        version: versions of the checkpoint's files, and of the programs that make tensors of them.
    """

    name: str
    place: dict[str, Any]
    version: dict[str, Any]

    @property
    def file_prefix(self) -> str:
        """Start of the names of all versions at this place."""
        name = re.sub(r"[^A-Za-z0-9.-]+", "-", self.name)[-_MOST_NAME_CHARACTERS:].lstrip(".-") or "model"
        return f"{name}-{_digest(self.place)}-"

    @property
    def file_name(self) -> str:
        return f"{self.file_prefix}{_digest(self.version)}{SUFFIX}"

    @property
    def document(self) -> dict[str, Any]:
        return {"place": self.place, "version": self.version}


def _digest(document: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:16]


def weight_key(config: ResolvedConfig, digest: Callable[[Path], str], *, pools: bool = False) -> WeightKey:
    """The key of a model's weights as these settings load them. Raises `OSError`.

    A model of the Hub that is not downloaded yet has the key of the files that are there.

    Args:
        digest: of a file's whole content: `FileDigests.of`.
        pools: the model is loaded for embeddings or scores, and may lack its output layer.
    """
    folder = resolve_model(config.model)
    downloaded = _checkpoint_folder(folder)
    files: list[Path] = []
    if downloaded is not None:
        read = config.load_format == "auto"
        files = [path for pattern in (_CONFIG if read else _CONFIG[:1]) for path in downloaded.glob(pattern)]
        files += weight_files(folder) if read else []
    path = next(iter(gguf_files(Path(folder))), Path(folder))
    return WeightKey(
        name=path.name,
        place={
            "model": str(path.resolve()) if Path(folder).is_dir() else folder,
            "load_format": config.load_format,
            "dtype": config.dtype,
            "quantization": config.quantization,
            "device": config.device,
            "pools": pools,
            "kernels": _kernels(),
        },
        version={
            "files": sorted([path.name, digest(path)] for path in files),
            "folio": VERSION,
            "layout": LAYOUT_VERSION,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    )


def _kernels() -> list[str]:
    """Names of the kernels' libraries, as built for this processor, that decide the order of packed weights or have
    been compared with fused modules."""
    try:
        return [CpuLinear().build, *(build_name(name) for name in ("elementwise", "rotary"))]
    except KernelError:
        return []


def weight_files(model: str) -> list[Path]:
    """Weight files in a folder, those of GGUF that it stands for, or the downloaded ones of a Hub id."""
    folder = _checkpoint_folder(model)
    if folder is None:
        return []
    return list(gguf_files(folder)) or sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))


def _checkpoint_folder(model: str) -> Path | None:
    """The folder itself, or that of a downloaded Hub id."""
    if Path(model).is_dir():
        return Path(model)
    config = try_to_load_from_cache(model, "config.json")
    return Path(config).parent if isinstance(config, str) else None
