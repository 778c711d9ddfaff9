"""Headers of GGUF files, without torch: every count and length is checked against the file's size before it is used.

GGUF, version, number of tensors, number of settings
settings: name, type, value
tensors: name, sizes (the innermost first), type, offset in the data
padding to the alignment, data
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

Setting: TypeAlias = "str | int | float | bool | tuple[Any, ...]"
# (number of bytes, offset) → bytes of the file, fewer where it ends.
Read: TypeAlias = Callable[[int, int], bytes]

MAGIC = b"GGUF"
_LFS_POINTER = b"vers"  # of "version https://git-lfs"
_VERSIONS = (2, 3)
_PIECE_BYTES = 1 << 20
# Largest header that is read; the longest known ones, of 260,000 tokens with merges, have 16 MiB.
_MOST_HEADER_BYTES = 64 << 20
_MOST_DIMENSIONS = 4
_MOST_NAME_BYTES = 1024
_MOST_SHOWN = 60
_MOST_ALIGNMENT = 1 << 20
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
_BOOL, _STRING, _ARRAY = 7, 8, 9
# Type of tensors: its name, values and bytes of a block.
_KINDS = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 36),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
}
# Of them, those whose tensors are read.
READ_KINDS = (
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ4_NL", "IQ4_XS", "MXFP4"),
)


def block_values(kind: str) -> int:
    """Neighbouring values of a row that are stored together, in a type of this name."""
    return next(values for name, values, _ in _KINDS.values() if name == kind)


def shown(value: object) -> str:
    """A value of a file for a message: in one line, and not at any length."""
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor is.

    Attributes:
        kind: name of its type, such as `Q4_K`.
        shape: the innermost size last.
        offset: in the file, in bytes.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The settings and tensors of a model.

    Attributes:
        files: of the model, the named one if it is not split.
        digest: of all headers.
        numbers: values of the tensors `rope_…`, which belong to the config.
    """

    files: tuple[Path, ...]
    settings: Mapping[str, Setting]
    tensors: Mapping[str, GgufTensor]
    digest: str
    numbers: Mapping[str, tuple[float, ...]]

    @property
    def num_values(self) -> int:
        return sum(math.prod(tensor.shape) for tensor in self.tensors.values())

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())


class HeaderReader:
    """Reads the header of one file, in pieces as they are needed.

    Args:
        path: for messages and the tensors.
        num_bytes: of the file.
    """

    def __init__(self, path: Path, num_bytes: int, read: Read) -> None:
        self._path, self._num_bytes, self._read = path, num_bytes, read
        self._data = bytearray()
        self._position = 0

    def header(self) -> GgufHeader:
        """Raises `ValueError` with a sentence for the user, and what `read` raises."""
        self._check_start()
        num_tensors, num_settings = self._unpack("<QQ", "its start")
        self._check_count(num_settings, 13, "settings")
        settings: dict[str, Setting] = {}
        for _ in range(num_settings):
            name = self._string("the name of a setting", _MOST_NAME_BYTES)
            if name in settings:
                raise self._fault(f"it has the setting {name!r} twice")
            settings[name] = self._value(name)
        alignment = settings.get("general.alignment", 32)
        if type(alignment) is not int or not 1 <= alignment <= _MOST_ALIGNMENT or alignment & (alignment - 1):
            raise self._fault(
                f"general.alignment is {shown(alignment)}; it must be a power of 2 up to {_MOST_ALIGNMENT}"
            )
        self._check_count(num_tensors, 24, "tensors")
        found = [self._tensor() for _ in range(num_tensors)]
        start = -(-self._position // alignment) * alignment
        digest = hashlib.sha256(memoryview(self._data)[: self._position]).hexdigest()
        tensors = dict(self._placed(found, start, alignment))
        for one, other in pairwise(sorted(tensors.values(), key=lambda tensor: tensor.offset)):
            if one.offset + one.num_bytes > other.offset:
                raise self._fault(f"its tensors {one.name!r} and {other.name!r} overlap")
        numbers = {tensor.name: self._numbers(tensor) for tensor in tensors.values() if "rope_" in tensor.name}
        return GgufHeader((self._path,), settings, tensors, digest, numbers)

    def _check_start(self) -> None:
        start = bytes(self._take(4, "its first 4 bytes"))
        if start == _LFS_POINTER:
            raise self._fault("it is a Git LFS pointer and not the file itself: run `git lfs pull` in its folder")
        if start != MAGIC:
            raise self._fault(f"it is no GGUF file: it begins with {start!r}, not {MAGIC!r}")
        (version,) = self._unpack("<I", "its version")
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            if swapped in _VERSIONS:
                raise self._fault("it is a big-endian GGUF file; Folio reads little-endian ones")
            raise self._fault(f"it has version {version} of GGUF; Folio reads versions 2 and 3")

    def _value(self, name: str) -> Setting:
        (kind,) = self._unpack("<I", f"the type of {name!r}")
        if kind == _STRING:
            return self._string(repr(name))
        if kind != _ARRAY:
            return self._scalars(kind, 1, name)[0]
        kind, count = self._unpack("<IQ", f"the length of {name!r}")
        if kind == _STRING:
            self._check_count(count, 8, f"items in {name!r}")
            what = repr(name)
            return tuple(self._string(what) for _ in range(count))
        return self._scalars(kind, count, name)

    def _scalars(self, kind: int, count: int, name: str) -> tuple[Any, ...]:
        if kind not in _SCALARS:
            raise self._fault(f"{name!r} has the unknown type {kind}")
        self._check_count(count, struct.calcsize(f"<{_SCALARS[kind]}"), f"items in {name!r}")
        values = self._unpack(f"<{count}{_SCALARS[kind]}", repr(name))
        return tuple(map(bool, values)) if kind == _BOOL else values

    def _tensor(self) -> tuple[str, int, tuple[int, ...], int]:
        """Its name, type, shape and offset in the data."""
        name = self._string("the name of a tensor", _MOST_NAME_BYTES)
        (dimensions,) = self._unpack("<I", f"the shape of {name!r}")
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise self._fault(f"the tensor {name!r} has {dimensions} dimensions; 1 to {_MOST_DIMENSIONS} are possible")
        *shape, kind, offset = self._unpack(f"<{dimensions}QIQ", f"the shape of {name!r}")
        return name, kind, tuple(reversed(shape)), offset

    def _placed(
        self, found: list[tuple[str, int, tuple[int, ...], int]], start: int, alignment: int
    ) -> Iterator[tuple[str, GgufTensor]]:
        names = set[str]()
        for name, number, shape, offset in found:
            if name in names:
                raise self._fault(f"it has the tensor {name!r} twice")
            names.add(name)
            if number not in _KINDS:
                raise self._fault(f"the tensor {name!r} has the unknown type {number}")
            kind, values, num_bytes = _KINDS[number]
            if 0 in shape or shape[-1] % values:
                raise self._fault(f"the tensor {name!r} of {kind} has the shape {list(shape)}, with rows of {values}s")
            size = math.prod(shape) // values * num_bytes
            if offset % alignment:
                raise self._fault(f"the tensor {name!r} begins at {offset} of the data, no multiple of {alignment}")
            if start + offset + size > self._num_bytes:
                raise self._fault(
                    f"the tensor {name!r} ends at byte {start + offset + size}, and the file has {self._num_bytes}: "
                    "it is truncated or damaged"
                )
            yield name, GgufTensor(name, kind, shape, self._path, start + offset, size)

    def _numbers(self, tensor: GgufTensor) -> tuple[float, ...]:
        if tensor.kind != "F32" or tensor.num_bytes > _PIECE_BYTES:
            raise self._fault(
                f"the tensor {tensor.name!r} has {tensor.num_bytes} bytes in {tensor.kind}, not a few in F32"
            )
        if len(data := self._read(tensor.num_bytes, tensor.offset)) < tensor.num_bytes:
            raise self._fault("it is truncated while it is read")
        return struct.unpack(f"<{tensor.num_bytes // 4}f", data)

    def _string(self, what: str, most_bytes: int = _MOST_HEADER_BYTES) -> str:
        length = int.from_bytes(self._take(8, what), "little")
        if most_bytes < length <= self._limit - self._position:
            raise self._fault(f"{what} has {length} bytes; at most {most_bytes} are possible")
        try:
            return self._take(length, what).decode()
        except UnicodeDecodeError:
            raise self._fault(f"{what} is no UTF-8") from None

    def _unpack(self, layout: str, what: str) -> tuple[Any, ...]:
        return struct.unpack(layout, self._take(struct.calcsize(layout), what))

    def _check_count(self, count: int, least_bytes: int, what: str) -> None:
        if count * least_bytes > self._limit - self._position:
            raise self._fault(f"it has {count} {what}, more than its {self._num_bytes} bytes can hold")

    @property
    def _limit(self) -> int:
        return min(self._num_bytes, _MOST_HEADER_BYTES)

    def _take(self, count: int, what: str) -> bytearray:
        start, end = self._position, self._position + count
        if end <= len(self._data):  # of nearly all: tokenizers have a million strings
            self._position = end
            return self._data[start:end]
        if end > self._limit:
            bound = f"the file's {self._num_bytes} bytes" if end > self._num_bytes else f"{_MOST_HEADER_BYTES} bytes"
            raise self._fault(f"{what} ends at byte {end}, beyond {bound}: it is truncated or damaged")
        while len(self._data) < end:
            wanted = max(end - len(self._data), len(self._data), _PIECE_BYTES)  # of a remote file ever more at once
            if not (part := self._read(min(wanted, self._limit - len(self._data)), len(self._data))):
                raise self._fault("it is truncated while it is read")
            self._data += part
        self._position = end
        return self._data[start:end]

    def _fault(self, reason: str) -> ValueError:
        return ValueError(f"{self._path}: {reason}")
