"""Segment files: what is written is found, and nothing that is damaged, foreign, or of another user."""

from __future__ import annotations

import mmap
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from folio.vmem import VmemError
from folio.vmem.prefix.store.block_store import BlockStore
from folio.vmem.prefix.store.segment import ALIGNMENT, SUFFIX, SegmentShape, StoredUnit
from folio.vmem.prefix.token_chain import stable_hash

ROOT = Path(__file__).parents[3]
FINGERPRINT = bytes(range(16))
RECORD_BYTES, UNIT_BYTES = 2 * ALIGNMENT, 64
MOST_BYTES = 512 * RECORD_BYTES
FEW_BYTES = 64 * RECORD_BYTES  # files of two records


@contextmanager
def opened(folder: Path, most_bytes: int = MOST_BYTES, fingerprint: bytes = FINGERPRINT) -> Iterator[BlockStore]:
    store = BlockStore(folder, most_bytes, fingerprint, [RECORD_BYTES], UNIT_BYTES)
    try:
        yield store
    finally:
        store.close()


def unit(number: int, keys: str = "", parent: bytes = b"") -> StoredUnit:
    root, tokens = stable_hash(b"", keys.encode()), number.to_bytes(4, "little") * (UNIT_BYTES // 4)
    return StoredUnit(0, root, parent or root, stable_hash(parent or root, tokens), tokens)


def record(number: int) -> memoryview:
    """An aligned buffer with content of its own."""
    buffer = mmap.mmap(-1, RECORD_BYTES)
    buffer[:] = random.Random(number).randbytes(RECORD_BYTES)
    return memoryview(buffer)


def write(store: BlockStore, *numbers: int) -> None:
    for number in numbers:
        store.write(unit(number), record(number))


def read(store: BlockStore, asked: StoredUnit) -> memoryview | None:
    """The unit's record, if there is one."""
    place, buffer = store.find(asked.group, asked.digest), record(-1)
    return buffer if place is not None and store.read(place, asked, buffer) else None


def found(folder: Path, most: int = 100) -> list[int]:
    """The units that another process finds, each with the content that was written."""
    with opened(folder) as store:
        numbers = [number for number in range(most) if store.find(0, unit(number).digest) is not None]
        contents = {number: read(store, unit(number)) for number in numbers}
        assert all(content in (None, record(number)) for number, content in contents.items())
        return [number for number, content in contents.items() if content is not None]


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*/*{SUFFIX}"))


def test_records_are_found_by_the_process_and_by_the_next(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        write(store, *range(10))
        assert all(read(store, unit(number)) == record(number) for number in range(10))
        assert read(store, unit(10)) is None
    assert found(tmp_path) == list(range(10))
    assert {path.stat().st_mode & 0o777 for path in files(tmp_path)} == {0o600}
    assert {path.parent.stat().st_mode & 0o777 for path in files(tmp_path)} == {0o700}


def test_a_file_with_room_is_continued(tmp_path: Path) -> None:
    for number in range(3):
        with opened(tmp_path) as store:
            write(store, number)
    assert len(files(tmp_path)) == 1
    assert found(tmp_path) == [0, 1, 2]


def test_engines_share_a_folder(tmp_path: Path) -> None:
    """Each writes files of its own, and reads what others had written when it last made one."""
    with opened(tmp_path) as one, opened(tmp_path) as other:
        write(one, 0)
        write(other, 1)
        assert len(files(tmp_path)) == 2
        assert read(other, unit(0)) == record(0)  # its first file was made after
        assert found(tmp_path) == [0, 1]


def test_all_of_a_unit_must_be_equal(tmp_path: Path) -> None:
    """A collision of hashes is a miss."""
    with opened(tmp_path) as store:
        asked = unit(1)
        for different in (
            StoredUnit(0, unit(1, "salt").root, asked.parent, asked.digest, asked.tokens),
            StoredUnit(0, asked.root, unit(2).digest, asked.digest, asked.tokens),
            StoredUnit(0, asked.root, asked.parent, asked.digest, unit(2).tokens),
        ):
            store.write(asked, record(1))
            place = store.find(0, asked.digest)
            assert place is not None
            assert not store.read(place, different, record(-1))
        assert store.counts.refused == 3


def test_the_limit_is_kept(tmp_path: Path) -> None:
    """The files unused for longest go first, those of other models included."""
    with opened(tmp_path, FEW_BYTES, bytes(16)) as store:
        write(store, *range(10))
    for path in files(tmp_path):
        os.utime(path, (0, 0))
    with opened(tmp_path, FEW_BYTES) as store:
        for number in range(200):
            write(store, number)
            total = sum(path.stat().st_size for path in files(tmp_path))
            assert total == store.counts.disk_bytes <= FEW_BYTES
        assert 30 < sum(store.find(0, unit(number).digest) is not None for number in range(200)) <= 64
    last = found(tmp_path, 200)
    assert last == list(range(last[0], 200))
    assert len({path.parent for path in files(tmp_path)}) == 1


def test_what_was_read_last_is_deleted_last(tmp_path: Path) -> None:
    with opened(tmp_path, FEW_BYTES) as store:
        write(store, *range(40))
        for path in files(tmp_path):
            os.utime(path, (0, 0))
        assert read(store, unit(0)) is not None
        write(store, *range(100, 120))
        assert read(store, unit(0)) == record(0)
        assert any(store.find(0, unit(number).digest) is None for number in range(2, 40))


def test_files_that_others_write_to_are_not_deleted(tmp_path: Path) -> None:
    with opened(tmp_path, FEW_BYTES) as other:
        write(other, 1000)
        with opened(tmp_path, FEW_BYTES) as store:
            write(store, *range(200))
        assert read(other, unit(1000)) == record(1000)


def test_a_limit_below_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(VmemError, match=r"a file of each kind takes \d+ bytes in all, and the limit is 8192"):
        BlockStore(tmp_path, 8192, FINGERPRINT, [RECORD_BYTES], UNIT_BYTES)


def _flip(path: Path, number: random.Random) -> None:
    with path.open("r+b") as file:
        at = number.randrange(path.stat().st_size)
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << number.randrange(8)]))


def _cut(path: Path, number: random.Random) -> None:
    os.truncate(path, number.randrange(path.stat().st_size))


def _overwrite(path: Path, number: random.Random) -> None:
    with path.open("r+b") as file:
        file.seek(number.randrange(path.stat().st_size))
        file.write(number.randbytes(number.randrange(1, 3 * ALIGNMENT)))


def _move(path: Path, number: random.Random) -> None:
    """A page of the file comes to another place."""
    pages = path.stat().st_size // ALIGNMENT
    source, target = (number.randrange(pages) * ALIGNMENT for _ in range(2))
    with path.open("r+b") as file:
        file.seek(source)
        page = file.read(ALIGNMENT)
        file.seek(target)
        file.write(page)


@pytest.mark.parametrize("damage", [_flip, _cut, _overwrite, _move])
def test_damaged_files_are_misses(tmp_path: Path, damage: Callable[[Path, random.Random], None]) -> None:
    for seed in range(30):
        folder = tmp_path / str(seed)
        with opened(folder) as store:
            write(store, 0, 1, 2)
        [path] = files(folder)
        for _ in range(3):
            damage(path, random.Random(seed))
        assert set(found(folder)) <= {0, 1, 2}  # whose content is compared
        with opened(folder) as store:
            write(store, 3)
        assert 3 in found(folder)


@pytest.mark.parametrize("change", ["mode", "link", "foreign", "directory", "fingerprint"])
def test_foreign_files_are_not_used(tmp_path: Path, change: str, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path) as store:
        write(store, 0)
    [path] = files(tmp_path)
    match change:
        case "mode":
            path.chmod(0o640)
        case "link":
            path.rename(tmp_path / "elsewhere")
            path.symlink_to(tmp_path / "elsewhere")
        case "foreign":
            path.write_bytes(b"something else" * 1000)
        case "directory":
            path.unlink()
            path.mkdir()
        case "fingerprint":
            path.parent.rename(tmp_path / bytes(16).hex())
    with opened(tmp_path, fingerprint=bytes(16) if change == "fingerprint" else FINGERPRINT) as store:
        assert store.find(0, unit(0).digest) is None
    assert "is not used" in caplog.text


def test_a_full_disk_is_an_error_of_one_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path) as store:
        write(store, 0)
        with monkeypatch.context() as patched:
            patched.setattr(os, "pwritev", _full)
            with pytest.raises(OSError, match="No space left"):
                write(store, 1)
        write(store, 2)
        assert read(store, unit(1)) is None
    assert found(tmp_path) == [0, 2]


def test_a_file_that_cannot_be_made_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", _full)
    with opened(tmp_path) as store:
        with pytest.raises(OSError, match="No space left"):
            write(store, 0)
        assert files(tmp_path) == []


def _full(*args: object) -> int:
    raise OSError(28, "No space left on device")


def test_nothing_is_left_open(tmp_path: Path) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    with opened(tmp_path) as store:
        write(store, *range(200))
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_an_index_holds_what_its_header_says() -> None:
    shape = SegmentShape(FINGERPRINT, RECORD_BYTES, 5, UNIT_BYTES)
    assert SegmentShape.of_header(shape.header()) == shape
    assert shape.num_bytes % ALIGNMENT == 0


@pytest.mark.processes
def test_a_writer_that_is_killed_leaves_whole_records(tmp_path: Path) -> None:
    code = """
import itertools, sys
from pathlib import Path
from tests.vmem.store.test_block_store import opened, write
with opened(Path(sys.argv[1])) as store:
    for number in itertools.count(int(sys.argv[2])):
        write(store, number)
        print(number, flush=True)
"""
    for start in range(0, 4000, 1000):
        with subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path), str(start)], stdout=subprocess.PIPE, text=True, cwd=ROOT
        ) as writer:
            assert writer.stdout is not None
            for _ in range(5 + start // 200):
                last = int(writer.stdout.readline())
            writer.kill()
        there = found(tmp_path, 5000)
        assert set(range(start, last + 1)) <= set(there)
