"""Weight stores: a file is written once, shared, and made again when it is not what it should be."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from folio.app.errors import ConfigError, ModelError
from folio.app.models.weights import file as weight_file
from folio.app.models.weights.arena import ModelTensors, collect
from folio.app.models.weights.file import CHUNK_BYTES
from folio.app.models.weights.key import WeightKey
from folio.app.models.weights.store import WeightStore
from folio.vmem import OutOfPages
from tests.processes import until

KEY = WeightKey("some/model", {"model": "/some/model", "dtype": "auto"}, {"files": [["a.safetensors", 10, 1]]})
NUM_PARAMETERS = 3 * CHUNK_BYTES // 4


class Model(nn.Module):
    """12 MiB and a few bytes."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(NUM_PARAMETERS), requires_grad=False)
        self.register_buffer("buffer", torch.randn(5, dtype=torch.float64), persistent=False)


def tensors() -> ModelTensors:
    return collect(Model())


def no_second_time() -> ModelTensors:
    raise AssertionError("the weights should not be made again")


def is_right(model: Model) -> bool:
    expected = Model()
    return torch.equal(model.weight, expected.weight) and torch.equal(model.buffer, expected.buffer)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def inode(folder: Path) -> int:
    (name,) = files(folder)
    return (folder / name).stat().st_ino


def moved(store: WeightStore, key: WeightKey = KEY, again: Callable[[], ModelTensors] = no_second_time):  # type: ignore[no-untyped-def]
    model = Model()
    return model, store.move(collect(model), key, again)


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


def test_a_wrong_file_is_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Truncated, damaged, foreign, or of another kind: never served."""
    path = tmp_path / KEY.file_name
    moved(WeightStore(tmp_path))[1].close()
    good = path.read_bytes()
    offset = len(good) - (12 << 20)

    def flipped(at: int) -> bytes:
        return good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :]

    def others_write(path: Path) -> None:
        path.write_bytes(good)
        path.chmod(0o620)

    another = tmp_path / "another"
    another.write_bytes(good)
    wrong: list[tuple[str, Callable[[Path], object]]] = [
        ("no file of weights", lambda path: path.write_bytes(b"")),
        ("instead of", lambda path: path.write_bytes(good[:-1])),
        ("instead of", lambda path: path.write_bytes(good + b"0")),
        ("header is damaged", lambda path: path.write_bytes(flipped(40))),
        ("contents are damaged", lambda path: path.write_bytes(flipped(offset + 5000))),
        ("contents are damaged", lambda path: path.write_bytes(flipped(len(good) - 1))),
        ("others could change it", others_write),
        ("Too many levels of symbolic links", lambda path: path.symlink_to(another)),
        ("others could change it", os.mkfifo),
    ]
    for reason, damage in wrong:
        caplog.clear()
        path.unlink()
        damage(path)
        model, arena = moved(WeightStore(tmp_path))
        assert reason in caplog.text
        assert "rebuilding it from the checkpoint" in caplog.text
        assert is_right(model)
        assert path.read_bytes() == good
        assert not path.is_symlink()
        arena.close()
    assert another.read_bytes() == good
    assert files(tmp_path) == ["another", KEY.file_name]


def test_a_file_of_another_checkpoint_under_the_same_name_is_made_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key = replace(KEY, version={"files": [["a.safetensors", 11, 1]]})
    moved(WeightStore(tmp_path), key)[1].close()
    (tmp_path / key.file_name).rename(tmp_path / KEY.file_name)
    model, arena = moved(WeightStore(tmp_path))
    assert "of another checkpoint" in caplog.text
    assert is_right(model)
    arena.close()


def test_a_file_with_other_tensors_is_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    smaller = Model()
    smaller.buffer = smaller.buffer[:4]
    WeightStore(tmp_path).move(collect(smaller), KEY, no_second_time).close()
    model, arena = moved(WeightStore(tmp_path))
    assert "its tensors are not those of the model" in caplog.text
    assert is_right(model)
    arena.close()


def test_contents_are_checked_once_in_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved(WeightStore(tmp_path))[1].close()
    checked: list[int] = []
    check = weight_file.check_contents
    monkeypatch.setattr(
        "folio.app.models.weights.store.check_contents", lambda *args: checked.append(1) or check(*args)
    )
    store = WeightStore(tmp_path)
    for _ in range(2):
        arena = moved(store)[1]
        arena.unmap()
        arena.map()
        arena.close()
    assert checked == [1]


def test_files_that_are_removed_or_replaced_while_they_are_mapped(tmp_path: Path) -> None:
    """Their bytes stay until they are unmapped for good."""
    model, arena = moved(WeightStore(tmp_path))
    (tmp_path / KEY.file_name).unlink()
    assert is_right(model)
    arena.unmap()
    arena.map()
    assert is_right(model)
    (tmp_path / KEY.file_name).write_bytes(b"something else")
    arena.unmap()
    arena.map()
    assert is_right(model)
    arena.close()


@pytest.mark.parametrize("size", [0, 5 << 20, 20 << 20])
def test_a_file_that_changes_while_the_model_sleeps_is_made_again(
    size: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made: list[ModelTensors] = []

    def again() -> ModelTensors:
        made.append(tensors())
        return made[-1]

    model, arena = moved(WeightStore(tmp_path), again=again)
    arena.unmap()
    os.truncate(tmp_path / KEY.file_name, size)
    arena.map()
    assert "changed or truncated: they are made again" in caplog.text
    assert len(made) == 1
    assert is_right(model)
    arena.unmap()
    arena.map()
    assert len(made) == 1
    arena.close()
    second, other = moved(WeightStore(tmp_path))
    assert is_right(second)
    other.close()


def test_weights_that_cannot_be_made_again_are_an_error(tmp_path: Path) -> None:
    """The model stays asleep."""

    def others() -> ModelTensors:
        model = Model()
        model.buffer = model.buffer[:4]
        return collect(model)

    _, arena = moved(WeightStore(tmp_path), again=others)
    arena.unmap()
    os.truncate(tmp_path / KEY.file_name, 100)
    with pytest.raises(ModelError, match="'some/model' has other tensors than when it was loaded"):
        arena.map()
    assert not arena.is_mapped
    arena.close()


def test_a_full_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whichever write fails, the model runs from memory, and nothing incomplete is left."""
    for last in range(4):
        left = last

        def write(fd: int, data: memoryview, offset: int) -> None:
            nonlocal left
            if left == 0:
                weight_file.write_all(fd, data[: len(data) // 2], offset)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            left -= 1
            weight_file.write_all(fd, data, offset)

        caplog.clear()
        folder = tmp_path / str(last)
        store = WeightStore(folder, write=write, host_memory_bytes=1 << 30)
        model, arena = moved(store)
        assert f"cannot be written to {folder} (No space left on device)" in caplog.text
        assert files(folder) == []
        assert is_right(model)
        arena.unmap()
        arena.map()
        assert is_right(model)
        arena.close()
        caplog.clear()
        moved(store)[1].close()
        assert "cannot be written" not in caplog.text, "once is enough"


@pytest.mark.parametrize("call", ["link", "fsync", "mkdir"])
def test_a_folder_where_a_step_is_not_possible(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, call, fail)
    model, arena = moved(WeightStore(tmp_path / "folder", host_memory_bytes=1 << 30))
    assert "(Read-only file system)" in caplog.text or call == "mkdir"
    assert is_right(model)
    arena.close()
    assert not (tmp_path / "folder").exists() or files(tmp_path / "folder") == []


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
    class Full:
        def charge(self, num_bytes: int) -> None:
            raise OutOfPages(num_bytes, 0)

        def discharge(self, num_bytes: int) -> None:
            raise AssertionError("nothing was charged")

    before = Path("/proc/self/maps").read_text().count("---p")
    with pytest.raises(OutOfPages):
        WeightStore(tmp_path, charges=Full()).move(tensors(), KEY, no_second_time)
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
    assert "in use would be above weights_dir_bytes, 31457280" in caplog.text
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
    code = f"""
import sys, time
from pathlib import Path
import tests.app.models.weights.test_store as of_tests
from folio.app.models.weights.file import write_all
from folio.app.models.weights.store import WeightStore

left = int(sys.argv[1])
def write(fd, data, offset):
    global left
    if left == 0:
        print("writing", flush=True)
        time.sleep(600)
    left -= 1
    write_all(fd, data, offset)

of_tests.moved(WeightStore(Path({str(tmp_path)!r}), write=write))
"""
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    for last in (0, 2, 4):  # the fifth write is the header's
        with subprocess.Popen(
            [sys.executable, "-c", code, str(last)], stdout=subprocess.PIPE, env=environment
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"writing\n"
            process.send_signal(signal.SIGKILL)
        assert [name.endswith(".tmp") for name in files(tmp_path)] == [True]
        model, arena = moved(WeightStore(tmp_path))
        assert files(tmp_path) == [KEY.file_name]
        assert is_right(model)
        arena.close()
        (tmp_path / KEY.file_name).unlink()


@pytest.mark.processes
def test_processes_that_write_the_same_file(tmp_path: Path) -> None:
    """All of them have the right weights, from one file."""
    code = f"""
from pathlib import Path
import tests.app.models.weights.test_store as of_tests
from folio.app.models.weights.store import WeightStore

for _ in range(8):
    model, arena = of_tests.moved(WeightStore(Path({str(tmp_path)!r})))
    assert of_tests.is_right(model)
    arena.unmap()
    arena.map()
    assert of_tests.is_right(model)
    arena.close()
"""
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    processes = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(3)]
    deadline = time.monotonic() + 120
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        for name in files(tmp_path):  # damage it in turns
            if name.endswith(".weights"):
                (tmp_path / name).unlink(missing_ok=True)
        time.sleep(0.05)
    assert [process.wait(timeout=1) for process in processes] == [0, 0, 0]
    until(lambda: not [name for name in files(tmp_path) if name.endswith(".tmp")])
