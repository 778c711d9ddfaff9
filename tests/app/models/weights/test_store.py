"""Weight stores: a file is written once, shared, and made again when it is not what it should be."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from folio.app.errors import ConfigError, ModelError
from folio.app.models.weights import file as weight_file
from folio.app.models.weights.arena import ModelTensors
from folio.app.models.weights.store import WeightStore
from folio.vmem import OutOfPages
from tests.app.models.weights import stored
from tests.app.models.weights.stored import KEY, files, is_right, moved, no_second_time, others, tensors
from tests.processes import until

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload([stored.__name__])  # torch is imported once
SIZE = 12 << 20
OTHER_VERSION = replace(KEY, version={"files": [["a.safetensors", 11, 1]]})


def inode(folder: Path) -> int:
    (name,) = files(folder)
    return (folder / name).stat().st_ino


def test_a_file_is_written_once_and_shared(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "weights"
    first, arena = moved(WeightStore(folder))
    assert files(folder) == [KEY.file_name]
    assert (folder / KEY.file_name).stat().st_mode & 0o777 == 0o400
    assert folder.stat().st_mode & 0o777 == 0o700
    own = inode(folder)
    second, other = moved(WeightStore(folder))
    assert inode(folder) == own
    lines = Path("/proc/self/maps").read_text().splitlines()
    shared = [line.split() for line in lines if line.endswith(KEY.file_name)]
    assert [line[1] for line in shared] == ["r--s", "r--s"], "the file itself should be the memory of both"
    assert is_right(first)
    assert is_right(second)
    addresses = first.weight.data_ptr(), first.buffer.data_ptr()
    for _ in range(3):
        arena.unmap()
        arena.map()
    assert (first.weight.data_ptr(), first.buffer.data_ptr()) == addresses
    assert is_right(first)
    arena.close()
    other.close()
    assert KEY.file_name not in Path("/proc/self/maps").read_text()


def flipped(good: bytes, at: int) -> bytes:
    return good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :]


def others_write(path: Path, good: bytes) -> None:
    path.write_bytes(good)
    path.chmod(0o620)


def link_to_another(path: Path, good: bytes) -> None:
    another = path.with_name("another")
    another.write_bytes(good)
    path.symlink_to(another)


def of_another_checkpoint(path: Path, good: bytes) -> None:
    moved(WeightStore(path.parent), OTHER_VERSION)[1].close()
    path.with_name(OTHER_VERSION.file_name).rename(path)


@pytest.mark.parametrize(
    ("reason", "damage"),
    [
        ("no file of weights", lambda path, good: path.write_bytes(b"")),
        ("instead of", lambda path, good: path.write_bytes(good[:-1])),
        ("instead of", lambda path, good: path.write_bytes(good + b"0")),
        ("header is damaged", lambda path, good: path.write_bytes(flipped(good, 40))),
        ("contents are damaged", lambda path, good: path.write_bytes(flipped(good, len(good) - SIZE + 5000))),
        ("contents are damaged", lambda path, good: path.write_bytes(flipped(good, len(good) - 1))),
        ("others could change it", others_write),
        ("others could change it", lambda path, good: os.mkfifo(path)),
        ("Too many levels of symbolic links", link_to_another),
        ("of another checkpoint", of_another_checkpoint),
        (
            "its tensors are not those of the model",
            lambda path, good: WeightStore(path.parent).move(others(), KEY, no_second_time).close(),
        ),
    ],
)
def test_a_wrong_file_is_made_again(
    reason: str, damage: Callable[[Path, bytes], object], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Truncated, damaged, foreign, or of another kind: never served."""
    path = tmp_path / KEY.file_name
    moved(WeightStore(tmp_path))[1].close()
    good = path.read_bytes()
    path.unlink()
    damage(path, good)
    model, arena = moved(WeightStore(tmp_path))
    assert reason in caplog.text
    assert "rebuilding it from the checkpoint" in caplog.text
    assert is_right(model)
    assert path.read_bytes() == good
    assert not path.is_symlink()
    assert all(other.read_bytes() == good for other in tmp_path.glob("another"))
    arena.close()


@pytest.mark.parametrize(
    ("change", "is_lost"),
    [
        (Path.unlink, False),  # its bytes stay until they are unmapped for good
        (lambda path: (path.unlink(), path.write_bytes(b"something else")), False),
        *((lambda path, size=size: os.truncate(path, size), True) for size in (0, 5 << 20, 20 << 20)),
    ],
)
def test_a_file_that_changes_while_the_model_sleeps_is_made_again(
    change: Callable[[Path], object], is_lost: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made: list[ModelTensors] = []

    def again() -> ModelTensors:
        made.append(tensors())
        return made[-1]

    model, arena = moved(WeightStore(tmp_path), again=again)
    arena.unmap()
    change(tmp_path / KEY.file_name)
    for _ in range(2):
        arena.map()
        assert is_right(model)
        arena.unmap()
    assert len(made) == is_lost
    assert ("their file was changed or truncated" in caplog.text) == is_lost
    arena.close()
    second, other = moved(WeightStore(tmp_path))
    assert is_right(second)
    other.close()


def test_weights_that_cannot_be_made_again_are_an_error(tmp_path: Path) -> None:
    """The model stays asleep."""
    _, arena = moved(WeightStore(tmp_path), again=others)
    arena.unmap()
    os.truncate(tmp_path / KEY.file_name, 100)
    with pytest.raises(ModelError, match="'some/model' has other tensors than when it was loaded"):
        arena.map()
    assert not arena.is_mapped
    arena.close()


@pytest.mark.parametrize("fails", [0, 1, 2, 3, "link", "fsync", "mkdir"])
def test_a_file_that_cannot_be_written(
    fails: int | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whichever write or call fails, the model runs from memory, and nothing incomplete is left."""
    num_writes, folder = 0, tmp_path / "folder"

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write(fd: int, data: memoryview, offset: int) -> None:
        nonlocal num_writes
        if num_writes == fails:
            weight_file.write_all(fd, data[: len(data) // 2], offset)
            full()
        num_writes += 1
        weight_file.write_all(fd, data, offset)

    if isinstance(fails, str):
        monkeypatch.setattr(os, fails, full)
    store = WeightStore(folder, write=write, host_memory_bytes=1 << 30)
    model, arena = moved(store)
    reason = "No such file or directory" if fails == "mkdir" else "No space left on device"
    assert f"cannot be written to {folder} ({reason})" in caplog.text
    assert not folder.exists() or files(folder) == []
    assert is_right(model)
    arena.unmap()
    arena.map()
    assert is_right(model)
    arena.close()
    caplog.clear()
    moved(store)[1].close()
    assert "cannot be written" not in caplog.text, "once is enough"


def test_weights_in_memory_take_host_memory_while_their_models_sleep(tmp_path: Path) -> None:
    """Without room they are made again from the checkpoint."""
    folder = tmp_path / "file"
    folder.write_text("no folder")
    made: list[str] = []

    def again(name: str) -> Callable[[], ModelTensors]:
        return lambda: made.append(name) or tensors()  # type: ignore[func-returns-value]

    size = tensors().table.num_bytes
    store = WeightStore(folder, host_memory_bytes=size + 100)
    models = {name: moved(store, replace(KEY, name=name), again(name)) for name in "ab"}
    for _ in range(2):
        for name in "ab":
            models[name][1].unmap()
        for name in "ab":
            models[name][1].map()
            assert is_right(models[name][0])
    assert made == ["b", "b"]
    for _, arena in models.values():
        arena.unmap()
        arena.close()
    assert store.take_host_bytes(size + 100)
    assert not store.take_host_bytes(1)


class Charged:
    """Memory of a device, which is full or not."""

    def __init__(self) -> None:
        self.num_bytes, self.is_full = 0, False

    def charge(self, num_bytes: int) -> None:
        if self.is_full:
            raise OutOfPages(num_bytes, 0)
        self.num_bytes += num_bytes

    def discharge(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes


@pytest.mark.parametrize("is_lost", [False, True])
def test_host_memory_is_accounted_where_a_map_fails(is_lost: bool, tmp_path: Path) -> None:
    """It was given back although the copy in it stayed."""
    folder, device, size = tmp_path / "file", Charged(), tensors().table.num_bytes
    folder.write_text("no folder")
    store = WeightStore(folder, charges=device, host_memory_bytes=size)
    if is_lost:
        assert store.take_host_bytes(1)
    model, arena = moved(store, again=tensors)
    arena.unmap()
    assert store.take_host_bytes(1) == is_lost
    if is_lost:
        store.return_host_bytes(2)
    device.is_full = True
    for _ in range(2):
        with pytest.raises(OutOfPages):
            arena.map()
        assert not store.take_host_bytes(1)
    device.is_full = False
    arena.map()
    assert is_right(model)
    assert store.take_host_bytes(size)
    store.return_host_bytes(size)
    arena.close()
    assert store.take_host_bytes(size)
    assert device.num_bytes == 0


def test_read_ahead_of_a_sleeping_model(tmp_path: Path) -> None:
    """The whole file, once, while nothing is mapped; weights in memory have none."""
    store = WeightStore(tmp_path)
    model, arena = moved(store)
    arena.unmap()
    with (tmp_path / KEY.file_name).open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    missing = sum(arena.read_ahead())
    if missing == 0:
        pytest.skip(f"files of {tmp_path} cannot leave the page cache")
    assert missing >= 12 << 20
    assert sum(arena.read_ahead()) == 0
    assert KEY.file_name not in Path("/proc/self/maps").read_text()
    arena.map()
    assert is_right(model)
    arena.close()
    assert list(arena.read_ahead()) == []
    store = WeightStore(tmp_path / KEY.file_name, host_memory_bytes=1 << 30)
    _, arena = moved(store)
    arena.unmap()
    assert list(arena.read_ahead()) == []
    arena.close()


def test_weights_that_do_not_fit_into_the_device(tmp_path: Path) -> None:
    device = Charged()
    device.is_full = True
    before = Path("/proc/self/maps").read_text().count("---p")
    with pytest.raises(OutOfPages):
        moved(WeightStore(tmp_path, charges=device))
    assert device.num_bytes == 0
    assert Path("/proc/self/maps").read_text().count("---p") <= before, "the range should be released"


def test_folders_of_others_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o770)
    with pytest.raises(ConfigError, match=r"weights_dir is .* with mode 770: others could change weights there"):
        WeightStore(tmp_path)
    tmp_path.chmod(0o700)
    WeightStore(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(ConfigError, match=f"of user {os.getuid()} with mode 700"):
        WeightStore(tmp_path)


def test_outdated_files_are_removed_with_a_new_one(tmp_path: Path) -> None:
    others = [replace(KEY, place=KEY.place | {"dtype": "float32"}), replace(KEY, name="another")]
    for key in (KEY, *others):
        moved(WeightStore(tmp_path), key)[1].close()
    new = replace(KEY, version={"files": [["a.safetensors", 10, 2]]})
    moved(WeightStore(tmp_path), new)[1].close()
    assert files(tmp_path) == sorted(key.file_name for key in (new, *others))


def test_files_used_longest_ago_make_room(tmp_path: Path) -> None:
    """Use is not the same as the time of writing."""
    keys = [replace(KEY, name=f"model-{i}") for i in range(4)]
    store = WeightStore(tmp_path, most_bytes=3 * (15 << 20))
    for key in keys[:3]:
        moved(store, key)[1].close()
        time.sleep(0.02)
    moved(store, keys[0])[1].close()
    moved(store, keys[3])[1].close()
    assert files(tmp_path) == [keys[i].file_name for i in (0, 2, 3)]


def test_files_in_use_stay_and_weights_beyond_the_bound_are_kept_in_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Asleep or awake, of this process or another one."""
    keys = [replace(KEY, name=f"model-{i}") for i in range(4)]
    store = WeightStore(tmp_path, most_bytes=2 * (15 << 20), host_memory_bytes=1 << 30)
    (first, used), (_, asleep) = moved(store, keys[0]), moved(WeightStore(tmp_path), keys[1])
    asleep.unmap()
    model, arena = moved(store, keys[2])
    assert "in use would exceed weights_dir_bytes, 31457280" in caplog.text
    assert files(tmp_path) == [key.file_name for key in keys[:2]]
    assert is_right(model)
    assert is_right(first)
    asleep.close()
    moved(store, keys[3])[1].close()
    assert files(tmp_path) == [keys[0].file_name, keys[3].file_name]
    used.close()
    arena.close()


def test_without_a_bound_files_take_a_share_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, free_bytes = os.statvfs(tmp_path), 30 << 20

    def small(folder: Path) -> os.statvfs_result:
        taken = sum(path.stat().st_size for path in tmp_path.glob("*.weights"))
        fields = list(disk)
        fields[1], fields[4] = 1, free_bytes - taken
        return os.statvfs_result(fields)

    monkeypatch.setattr(os, "statvfs", small)
    for name in "ab":
        moved(WeightStore(tmp_path), replace(KEY, name=name))[1].close()
    assert files(tmp_path) == [replace(KEY, name="b").file_name]


def test_two_writers_share_the_file_of_the_first_one(tmp_path: Path) -> None:
    """The second one finds it when its own is complete."""
    others: list[int] = []

    def write(fd: int, data: memoryview, offset: int) -> None:
        if not others:
            moved(WeightStore(tmp_path))[1].close()
            others.append((tmp_path / KEY.file_name).stat().st_ino)
        weight_file.write_all(fd, data, offset)

    model, arena = moved(WeightStore(tmp_path, write=write))
    assert files(tmp_path) == [KEY.file_name]
    assert [inode(tmp_path)] == others
    (line,) = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(KEY.file_name)]
    assert line.split()[4] == str(others[0])
    assert is_right(model)
    arena.close()


def test_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    """Not what others write now."""
    (tmp_path / "killed.tmp").write_bytes(b"a part")
    with (tmp_path / "writing.tmp").open("wb") as writing:
        fcntl.flock(writing, fcntl.LOCK_EX)
        store = WeightStore(tmp_path)
        assert files(tmp_path) == ["writing.tmp"]
        (tmp_path / "killed later.tmp").write_bytes(b"a part")
        moved(store)[1].close()
        assert files(tmp_path) == [KEY.file_name, "writing.tmp"]


@pytest.mark.processes
def test_kill_in_the_middle_of_writing(tmp_path: Path) -> None:
    """Whenever it comes, there is no file, and the next process writes one."""
    for last in (0, 2, 4):  # the fifth write is the header's
        mine, its = PROCESSES.Pipe()
        process = PROCESSES.Process(target=stored.write_a_part, args=(tmp_path, last, its))
        process.start()
        assert mine.recv() == "writing"
        process.kill()
        process.join()
        assert [name.endswith(".tmp") for name in files(tmp_path)] == [True]
        model, arena = moved(WeightStore(tmp_path))
        assert files(tmp_path) == [KEY.file_name]
        assert is_right(model)
        arena.close()
        (tmp_path / KEY.file_name).unlink()


@pytest.mark.processes
def test_processes_that_write_the_same_file(tmp_path: Path) -> None:
    """All of them have the right weights, from one file."""
    processes = [PROCESSES.Process(target=stored.use_again_and_again, args=(tmp_path,)) for _ in range(3)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + 120
    while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
        for name in files(tmp_path):  # damage it in turns
            if name.endswith(".weights"):
                (tmp_path / name).unlink(missing_ok=True)
        time.sleep(0.05)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    until(lambda: not [name for name in files(tmp_path) if name.endswith(".tmp")])
