"""Weight ranges over files: mapped or a hole, at one address, and counted."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from folio.vmem import IntegrityError, MapError, OutOfPages
from folio.vmem.backends import host_calls
from folio.vmem.weights import HUGE_PAGE_BYTES, FileRange, read_ahead

OFFSET = HUGE_PAGE_BYTES
NUM_BYTES = 3 * mmap.PAGESIZE - 100


class Memory:
    """A device's memory of so many bytes."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes, self.charged_bytes = capacity_bytes, 0

    def charge(self, num_bytes: int) -> None:
        if self.charged_bytes + num_bytes > self.capacity_bytes:
            raise OutOfPages(num_bytes, self.capacity_bytes - self.charged_bytes)
        self.charged_bytes += num_bytes

    def discharge(self, num_bytes: int) -> None:
        self.charged_bytes -= num_bytes
        assert self.charged_bytes >= 0


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    """A file with `NUM_BYTES` bytes 0, 1, … 250, 0, … after `OFFSET`."""
    path = tmp_path / "file"
    with path.open("wb") as written:
        written.seek(OFFSET)
        written.write(bytes(i % 251 for i in range(NUM_BYTES)))
    fd = os.open(path, os.O_RDONLY)
    yield fd
    os.close(fd)


def protection(address: int) -> str:
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= address < end:
            return line.split()[1]
    return "unmapped"


def test_the_same_tensor_reads_the_file_whenever_it_is_mapped(file: int) -> None:
    weights, memory = FileRange(NUM_BYTES), Memory(1 << 20)
    assert weights.reserved.address % HUGE_PAGE_BYTES == 0
    tensor = weights.tensor()
    expected = torch.arange(NUM_BYTES).remainder(251).to(torch.uint8)
    for _ in range(3):
        assert protection(weights.reserved.address) == "---p"
        weights.map(file, OFFSET)
        assert protection(weights.reserved.end - 1) == "r--s"
        assert torch.equal(tensor, expected)
        weights.unmap()
    weights.close()
    weights.close()
    assert memory.charged_bytes == 0
    assert protection(weights.reserved.address) != "r--s"


def test_mapped_bytes_are_charged_in_whole_pages(file: int) -> None:
    memory = Memory(4 * mmap.PAGESIZE)
    first, second = FileRange(NUM_BYTES, memory), FileRange(NUM_BYTES, memory)
    assert memory.charged_bytes == 0
    first.map(file, OFFSET)
    assert memory.charged_bytes == 3 * mmap.PAGESIZE
    with pytest.raises(OutOfPages):
        second.map(file, OFFSET)
    assert not second.is_mapped
    assert protection(second.reserved.address) == "---p"
    first.unmap()
    second.map(file, OFFSET)
    second.close()
    first.close()
    assert memory.charged_bytes == 0


def test_what_cannot_be_mapped_is_a_hole_and_not_charged(tmp_path: Path) -> None:
    """A file that ends too early is an error when it is mapped, and not a SIGBUS in a step."""
    memory = Memory(1 << 20)
    weights = FileRange(NUM_BYTES, memory)
    with pytest.raises(MapError, match="mmap of"):
        weights.map(-1, OFFSET)
    short = os.open(tmp_path / "short", os.O_RDWR | os.O_CREAT)
    with pytest.raises(MapError, match=r"madvise\(POPULATE_READ\) of 12288 bytes at 0x.* Bad address"):
        weights.map(short, OFFSET)
    os.close(short)
    assert not weights.is_mapped
    assert memory.charged_bytes == 0
    assert protection(weights.reserved.address) == "---p"
    weights.close()


def test_wrong_order(file: int) -> None:
    weights = FileRange(NUM_BYTES)
    with pytest.raises(IntegrityError, match="not mapped"):
        weights.unmap()
    weights.map(file, OFFSET)
    with pytest.raises(IntegrityError, match="which is mapped"):
        weights.map(file, OFFSET)
    weights.close()
    assert protection(weights.reserved.address) not in ("r--s", "---p"), "the addresses are still reserved"
    with pytest.raises(IntegrityError, match="which is closed"):
        weights.map(file, OFFSET)


def test_a_process_maps_and_unmaps_many_times_without_leftovers(file: int) -> None:
    def num_mappings() -> int:
        return len(Path("/proc/self/maps").read_text().splitlines())

    FileRange(NUM_BYTES).close()
    before = num_mappings()
    for _ in range(50):
        weights = FileRange(NUM_BYTES)
        weights.map(file, OFFSET)
        weights.close()
    assert num_mappings() <= before + 5


def test_new_kernels_populate_mappings(file: int) -> None:
    weights = FileRange(NUM_BYTES)
    weights.map(file, OFFSET)
    assert host_calls.populate(weights.reserved) == ([int(n) for n in platform.release().split(".")[:2]] >= [5, 14])
    weights.close()


def test_read_ahead_without_populate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: before Linux 5.14 it counted bytes as read, and had read none."""
    path, num_bytes = tmp_path / "file", 5 * HUGE_PAGE_BYTES + 100
    path.write_bytes(os.urandom(OFFSET + num_bytes))
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    monkeypatch.setattr(host_calls.libc, "madvise", lambda *_: ctypes.set_errno(errno.EINVAL) or -1)
    read_bytes = sum(read_ahead(fd, OFFSET, num_bytes))
    if read_bytes == 0:
        pytest.skip(f"files of {tmp_path} cannot leave the page cache")
    assert read_bytes > num_bytes // 2
    assert sum(read_ahead(fd, OFFSET, num_bytes)) == 0
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.truncate(path, OFFSET + num_bytes - 1)
    with pytest.raises(MapError, match="the file ends 1 bytes too early"):
        list(read_ahead(fd, OFFSET, num_bytes))
    os.close(fd)


@pytest.mark.processes
def test_a_touch_of_a_hole_and_a_write_kill_the_process(file: int) -> None:
    code = f"""
import os
from folio.vmem.weights import FileRange

for is_mapped, touch in ((False, "tensor[5].item()"), (True, "tensor[5] = 1"), (True, "tensor[5].item()")):
    child = os.fork()
    if not child:
        weights = FileRange(8192)
        tensor = weights.tensor()
        if is_mapped:
            weights.map({file}, {OFFSET})
        exec(touch)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, env=environment, pass_fds=[file], text=True)
    assert result.stdout.split() == ["-11", "-11", "0"], result.stderr
