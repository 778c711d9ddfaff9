"""Weight files: what was written is read, and nothing else is."""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from folio.app.models.weights import file as weight_file
from folio.app.models.weights.file import (
    CHUNK_BYTES,
    TensorPlace,
    WeightFileError,
    WeightHeader,
    WeightTable,
    check_contents,
    read_header,
    write_weights,
)
from folio.vmem.weights import HUGE_PAGE_BYTES

KEY = {"place": {"model": "small"}, "version": {"files": [["a", 1, 2]]}}
# Pieces within a chunk, over a border of chunks, and over whole chunks.
SIZES = {0: 10, 64: 1000, CHUNK_BYTES - 4096: 8192, 2 * CHUNK_BYTES + 64: 2 * CHUNK_BYTES, 5 * CHUNK_BYTES - 128: 77}
NUM_BYTES = 5 * CHUNK_BYTES - 128 + 77
TABLE = WeightTable(
    (
        TensorPlace("a", "uint8", (10,), (1,), 0),
        TensorPlace("b.0", "bfloat16", (4, 8), (8, 1), 64),
        TensorPlace("b.1", "float32", (8, 4), (1, 8), 64),
    ),
    NUM_BYTES,
)


def pieces() -> list[tuple[int, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(at, torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)) for at, size in SIZES.items()]


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


def contents_of(fd: int, header: WeightHeader) -> torch.Tensor:
    data = os.pread(fd, header.table.num_bytes, header.offset)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def test_what_is_written_is_read(fd: int) -> None:
    written = write_weights(fd, KEY, {"dtype": "float32"}, TABLE, pieces())
    header = read_header(fd)
    assert header == replace(written, key=header.key)
    assert header.key == KEY
    assert header.offset % HUGE_PAGE_BYTES == 0
    expected = torch.zeros(NUM_BYTES, dtype=torch.uint8)
    for at, piece in pieces():
        expected[at : at + len(piece)] = piece
    contents = contents_of(fd, header)
    assert torch.equal(contents, expected)
    check_contents(fd, header)


def test_an_incomplete_file_is_none(fd: int) -> None:
    """Whichever write is the last one that happened."""
    for last in range(7):
        os.ftruncate(fd, 0)
        left = [last]

        def write(fd: int, data: memoryview, offset: int, left: list[int] = left) -> None:
            if left[0] == 0:
                raise OSError(28, "No space left on device")
            left[0] -= 1
            weight_file.write_all(fd, data, offset)

        if last == 6:  # five chunks and the header
            write_weights(fd, KEY, {"dtype": "float32"}, TABLE, pieces(), write)
            read_header(fd)
        else:
            with pytest.raises(OSError, match="No space left"):
                write_weights(fd, KEY, {"dtype": "float32"}, TABLE, pieces(), write)
            with pytest.raises(WeightFileError, match="no file of weights, or incomplete"):
                read_header(fd)


def test_every_damage_is_found(fd: int) -> None:
    written = write_weights(fd, KEY, {"dtype": "float32"}, TABLE, pieces())
    size = os.fstat(fd).st_size
    # In each chunk, at its borders, in zeros between tensors, and in the last byte.
    for at in (0, 9, 33, CHUNK_BYTES - 1, CHUNK_BYTES, 3 * CHUNK_BYTES + 5, NUM_BYTES - 1):
        (byte,) = os.pread(fd, 1, written.offset + at)
        os.pwrite(fd, bytes([byte ^ 1 << (at % 8)]), written.offset + at)
        with pytest.raises(WeightFileError, match="contents are damaged between bytes"):
            check_contents(fd, written)
        os.pwrite(fd, bytes([byte]), written.offset + at)
    for at in (0, 8, 17, 20, 100):
        byte = os.pread(fd, 1, at)
        os.pwrite(fd, bytes([byte[0] ^ 4]), at)
        with pytest.raises(WeightFileError):
            read_header(fd)
        os.pwrite(fd, byte, at)
    for other in (size - 1, size + 1, written.offset, 19, 0):
        os.ftruncate(fd, other)
        with pytest.raises(WeightFileError):
            read_header(fd)
        os.ftruncate(fd, size)
        if other < written.offset:
            write_weights(fd, KEY, {"dtype": "float32"}, TABLE, pieces())
    read_header(fd)


def test_another_layout_is_refused_before_it_is_read(fd: int) -> None:
    encoded = json.dumps({"version": weight_file.LAYOUT_VERSION + 1, "fields": "unknown"}).encode()
    os.pwrite(fd, struct.pack("<8sQI", b"FOLIOWTS", len(encoded), zlib.crc32(encoded)) + encoded, 0)
    with pytest.raises(WeightFileError, match="its layout has version 2, not 1"):
        read_header(fd)
