"""Tensors of a checkpoint's safetensors files, read one at a time."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from folio.app.config.checkpoint_sizes import Header, read_header
from folio.app.errors import ModelError
from folio.app.models.quantised.share import Share

# Of tensors of which rows are read.
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "U8": torch.uint8}
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


class TensorFiles:
    """Reads only headers until a tensor is asked for. Raises `ModelError` for what is missing or damaged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # As in transformers, the single file comes first.
        files = [folder / _SINGLE] if (folder / _SINGLE).is_file() else _indexed(folder)
        self._files = {path: _opened(path) for path in files}
        self._path_of = {name: path for path, file in self._files.items() for name in file.keys()}  # noqa: SIM118
        self._headers: dict[Path, Header] = {}

    def names(self) -> frozenset[str]:
        return frozenset(self._path_of)

    def read(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._get(name, lambda file: file.get_tensor(name))
        return tensor

    def share(self, name: str, share: Share | None) -> torch.Tensor:
        """A rank's rows of a tensor; all of it if the share is of columns, or of another shape."""
        if share is None or share.dim or tuple(self.shape(name)) != share.whole or self._dtype(name) not in _DTYPES:
            return self.read(name)
        return self._rows(name, share.spans)

    def bytes_of(self, name: str, index: int) -> torch.Tensor:
        """The entry `index` of the outermost dimension of a tensor of bytes."""
        dtype, shape = self._dtype(name), self.shape(name)
        if dtype != "U8" or not 0 <= index < (*shape, 0)[0]:
            raise ModelError(f"{self._path_of[name]}: {name} has the dtype {dtype} and the shape {shape}")
        return self._rows(name, ((index, index + 1),))[0]

    def _rows(self, name: str, spans: Sequence[tuple[int, int]]) -> torch.Tensor:
        """They are read alone: a slice of safetensors reads the whole tensor of a file that is not mapped."""
        dtype, path = _DTYPES[self._dtype(name)], self._path_of[name]
        try:
            if path not in self._headers:
                self._headers[path] = read_header(path)
            shape, end = self._headers[path][name]
        except (ValueError, KeyError, OSError) as error:
            raise ModelError(f"{path}: {name} cannot be read: {error}") from None
        size = math.prod(shape[1:]) * dtype.itemsize
        return read_spans(path, end - shape[0] * size, size, spans, name).view(dtype).view(-1, *shape[1:])

    def _dtype(self, name: str) -> str:
        dtype: str = self._get(name, lambda file: file.get_slice(name).get_dtype())
        return dtype

    def shape(self, name: str) -> list[int]:
        shape: list[int] = self._get(name, lambda file: file.get_slice(name).get_shape())
        return shape

    def _get(self, name: str, get: Callable[[Any], Any]) -> Any:
        path = self._path_of.get(name)
        if path is None:
            raise ModelError(f"{self.folder} has no tensor {name}")
        try:
            return get(self._files[path])
        except (SafetensorError, OSError, IndexError) as error:
            raise ModelError(f"{path}: {name} cannot be read: {error}") from None


def read_spans(path: Path, offset: int, size: int, spans: Sequence[tuple[int, int]], name: str) -> torch.Tensor:
    """Bytes of spans of rows, see `read_bytes`. Args: `size`: bytes of a row."""
    parts = [read_bytes(path, offset + start * size, (end - start) * size, name) for start, end in spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def read_bytes(path: Path, offset: int, num_bytes: int, name: str) -> torch.Tensor:
    """Bytes of a file, which is not mapped: truncation would end the process. Args: `name`: of their tensor, for the
    error. Raises `ModelError`."""
    data = torch.empty(num_bytes, dtype=torch.uint8)
    rest = data.numpy().data
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            while rest:
                if not (count := os.preadv(fd, [rest], offset)):
                    raise ModelError(f"{path} was truncated: it ends at byte {offset} within {name!r}")
                rest, offset = rest[count:], offset + count
        finally:
            os.close(fd)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    return data


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", backend="pread")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is missing, truncated or damaged ({error}); copy it again") from None


def _indexed(folder: Path) -> list[Path]:
    path = folder / _INDEX
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{folder} has neither {_SINGLE} nor {_INDEX}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
    table = content.get("weight_map") if isinstance(content, Mapping) else None
    if not isinstance(table, Mapping) or not all(isinstance(name, str) for name in table.values()):
        raise ModelError(f"{path} has no weight_map")
    return [folder / name for name in sorted(set(table.values()))]
