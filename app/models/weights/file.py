"""Weight files: the tensors of a loaded model, laid out as they are used, to be mapped into memory.

    magic, length and CRC-32 of the header | header (JSON) | hole | contents, from a multiple of 2 MiB on

The header has a table of the tensors and the CRC-32 of each 4 MiB of the contents. A file that is truncated, damaged,
or of another layout is never used.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from folio.vmem.weights import HUGE_PAGE_BYTES

# Version of the file's layout; a file of another version is rebuilt.
LAYOUT_VERSION = 1
_MAGIC = b"FOLIOWTS"
_START = struct.Struct("<8sQI")  # magic, bytes of the header, its CRC-32
# Written at once, at multiples of it: the page cache then holds huge pages, which are mapped by one entry each.
CHUNK_BYTES = 2 * HUGE_PAGE_BYTES
# CRC-32 reads 3 GB/s on one core; more than a few cores wait for memory.
_CHECK_THREADS = 4
_MOST_HEADER_BYTES = 1 << 30


class WeightFileError(Exception):
    """A weight file is incomplete, damaged, or not the model's; the message says what is wrong."""


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """A tensor of the contents.

    Attributes:
        path: the first one by which the model refers to it.
        dtype: its name in torch.
        offset: of its first element, in bytes of the contents. Tensors may overlap.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class WeightTable:
    """The places of a model's tensors in contents of `num_bytes` bytes."""

    tensors: tuple[TensorPlace, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class WeightHeader:
    """A file's description.

    Attributes:
        key: what the contents depend on.
        facts: about the model, which its tensors do not show; plain values.
        checksums: of each `CHUNK_BYTES` of the contents.
        offset: of the contents in the file.
    """

    key: dict[str, Any]
    facts: dict[str, Any]
    table: WeightTable
    checksums: tuple[int, ...]
    offset: int

    @property
    def file_bytes(self) -> int:
        return self.offset + self.table.num_bytes


# Writes all bytes of a buffer at an offset of a file. Tests pass one that fails.
Write = Callable[[int, memoryview, int], None]


def write_all(fd: int, data: memoryview, offset: int) -> None:
    """Write all of `data`. Raises `OSError`."""
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)


def write_weights(
    fd: int,
    key: dict[str, Any],
    facts: dict[str, Any],
    table: WeightTable,
    pieces: Sequence[tuple[int, torch.Tensor]],
    write: Write = write_all,
) -> WeightHeader:
    """Write weights into an empty file. The header is written last, so that an incomplete file has none.

    Args:
        pieces: (offset in the contents, uint8 `[num_bytes]`), in order; between them are zeros.

    Raises:
        OSError: the file cannot be written.
    """
    num_chunks = -(-table.num_bytes // CHUNK_BYTES)
    longest = _encode(WeightHeader(key, facts, table, (0xFFFFFFFF,) * num_chunks, 1 << 62))
    offset = -(-len(longest) // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    checksums = []
    for start, chunk in _chunks(table.num_bytes, pieces):
        checksums.append(zlib.crc32(chunk))
        write(fd, chunk, offset + start)
    header = WeightHeader(key, facts, table, tuple(checksums), offset)
    write(fd, memoryview(_encode(header)), 0)
    return header


def _chunks(num_bytes: int, pieces: Sequence[tuple[int, torch.Tensor]]) -> Iterator[tuple[int, memoryview]]:
    """(offset, bytes) of each chunk of the contents; the bytes are valid until the next one."""
    buffer = torch.empty(min(CHUNK_BYTES, num_bytes), dtype=torch.uint8)
    bytes_of_buffer = buffer.numpy().data
    first = 0  # piece that the chunk begins in or before
    for start in range(0, num_bytes, CHUNK_BYTES):
        end = min(start + CHUNK_BYTES, num_bytes)
        buffer.zero_()
        while first < len(pieces) and pieces[first][0] + len(pieces[first][1]) <= start:
            first += 1
        for at, piece in pieces[first:]:
            if at >= end:
                break
            begin, stop = max(at, start), min(at + len(piece), end)
            buffer[begin - start : stop - start] = piece[begin - at : stop - at]
        yield start, bytes_of_buffer[: end - start]


def read_header(fd: int) -> WeightHeader:
    """Read a file's header, and check it and the file's size. Raises `WeightFileError`, `OSError`."""
    start = os.pread(fd, _START.size, 0)
    if len(start) < _START.size or not start.startswith(_MAGIC):
        raise WeightFileError("it is no file of weights, or incomplete")
    _, num_bytes, checksum = _START.unpack(start)
    encoded = os.pread(fd, min(num_bytes, _MOST_HEADER_BYTES), _START.size)
    if len(encoded) != num_bytes or zlib.crc32(encoded) != checksum:
        raise WeightFileError("its header is damaged")
    try:
        return _decode(encoded, fd)
    except (KeyError, TypeError, ValueError, AttributeError) as error:  # of a development version
        raise WeightFileError(f"its header is not of this version: {error!r}") from error


def _decode(encoded: bytes, fd: int) -> WeightHeader:
    document = json.loads(encoded)
    if document["version"] != LAYOUT_VERSION:
        raise WeightFileError(f"its layout has version {document['version']}, not {LAYOUT_VERSION}")
    places = tuple(
        TensorPlace(path, dtype, tuple(shape), tuple(stride), offset)
        for path, dtype, shape, stride, offset in document["tensors"]
    )
    table = WeightTable(places, document["num_bytes"])
    checksums, offset = tuple(document["checksums"]), document["offset"]
    header = WeightHeader(document["key"], document["facts"], table, checksums, offset)
    if (size := os.fstat(fd).st_size) != header.file_bytes:
        raise WeightFileError(f"it has {size} bytes instead of {header.file_bytes}")
    return header


def check_contents(fd: int, header: WeightHeader) -> None:
    """Compare a file's contents with their checksums, on several cores. Raises `WeightFileError`, `OSError`."""

    def checksum(start: int) -> int:
        return zlib.crc32(os.pread(fd, min(CHUNK_BYTES, header.table.num_bytes - start), header.offset + start))

    with ThreadPoolExecutor(min(_CHECK_THREADS, os.cpu_count() or 1)) as threads:
        starts = range(0, header.table.num_bytes, CHUNK_BYTES)
        actual = threads.map(checksum, starts)
        for start, expected, found in zip(starts, header.checksums, actual, strict=True):
            if expected != found:
                raise WeightFileError(f"its contents are damaged between bytes {start} and {start + CHUNK_BYTES}")


def _encode(header: WeightHeader) -> bytes:
    table = header.table
    document = {
        "version": LAYOUT_VERSION,
        "key": header.key,
        "facts": header.facts,
        "num_bytes": table.num_bytes,
        "offset": header.offset,
        "checksums": header.checksums,
        "tensors": [[place.path, place.dtype, place.shape, place.stride, place.offset] for place in table.tensors],
    }
    encoded = json.dumps(document, separators=(",", ":")).encode()
    return _START.pack(_MAGIC, len(encoded), zlib.crc32(encoded)) + encoded
