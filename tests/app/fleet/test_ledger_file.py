"""The file of a ledger: only this user can write it, and members that are killed at any moment leave it whole."""

from __future__ import annotations

import fcntl
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from folio.app.errors import ConfigError
from folio.app.fleet.ledger import MemberUsage, ProcessId
from folio.app.fleet.ledger_file import LedgerFile, this_process
from tests.processes import until

CAPACITY = 1 << 20
USAGE = MemberUsage(5, 7, 1, 100)


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_each_ledger_has_a_file_while_it_has_members(temporary: Path) -> None:
    file = LedgerFile("folio-ledger:app:cpu")
    with file.locked() as ledger:
        ledger.exchange("a", this_process(), 100, USAGE, 1.0)
    with LedgerFile("folio-ledger:app:cpu").locked() as again:
        assert again == ledger
    with LedgerFile("folio-ledger:app:cuda").locked() as other:
        assert not other.members
    [folder] = temporary.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    with file.locked() as ledger:
        del ledger.members["a"]
    assert not list(folder.iterdir())


def test_an_exchange_that_fails_changes_nothing() -> None:
    file = LedgerFile("x")
    with file.locked() as ledger:
        ledger.exchange("a", this_process(), 100, USAGE, 1.0)
    with pytest.raises(KeyError), file.locked() as broken:
        broken.members.update(a=broken.members.pop("a"), b=broken.members["a"])
    with file.locked() as found:
        assert found == ledger


def test_another_process_with_the_id_of_a_member_is_not_the_member() -> None:
    file = LedgerFile("x")
    with file.locked() as ledger:
        ledger.exchange("a", ProcessId(os.getpid(), this_process().started - 1), 100, USAGE, 1.0)
    with file.locked() as ledger:
        assert not ledger.members


@pytest.mark.processes
@pytest.mark.parametrize(
    ("program", "lives"),
    [
        ("import time; print(flush=True); time.sleep(60)", True),
        (  # its first thread ends, and another one goes on with the memory
            "import ctypes, threading, time; threading.Thread(target=time.sleep, args=(60,)).start();"
            "print(flush=True); ctypes.CDLL(None).pthread_exit(None)",
            True,
        ),
        ("print()", False),  # nobody waits for it
    ],
)
def test_a_member_lives_as_long_as_one_of_its_threads(
    program: str, lives: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: Pythons of uv and conda have no `os.pidfd_open`: the second exchange failed there."""
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        file, stat = LedgerFile("x"), Path(f"/proc/{process.pid}/stat")
        with file.locked() as ledger:
            started = int(stat.read_text().rpartition(")")[2].split()[19])
            ledger.exchange("a", ProcessId(process.pid, started), 100, USAGE, 1.0)
        assert process.stdout is not None
        process.stdout.readline()
        if "sleep(60)" not in program or "pthread_exit" in program:
            until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "Z")
        with file.locked() as ledger:
            assert bool(ledger.members) == lives
        process.kill()
        process.wait()
        with file.locked() as ledger:
            assert not ledger.members


def test_a_member_that_is_stopped_with_the_lock_is_not_waited_for_forever(temporary: Path) -> None:
    file = LedgerFile("x", lock_timeout_s=0.05)
    [folder] = temporary.iterdir()
    fd = os.open(folder, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(TimeoutError, match="another process"), file.locked():
        pass
    os.close(fd)
    with file.locked():
        pass


@pytest.mark.parametrize("made", ["link", "file", "open to others"])
def test_the_folder_must_be_private(temporary: Path, made: str) -> None:
    """Regression: the file's name in /tmp can be guessed; another user's link was followed, and its target replaced."""
    LedgerFile("x")
    [folder] = temporary.iterdir()
    folder.rmdir()
    elsewhere = temporary / "elsewhere"
    elsewhere.mkdir()
    if made == "link":
        folder.symlink_to(elsewhere)
    elif made == "file":
        folder.write_text("{}")
    else:
        folder.mkdir()
        folder.chmod(0o777)
    with pytest.raises(ConfigError, match="remove it"):
        LedgerFile("x")
    assert not list(elsewhere.iterdir())


@pytest.mark.processes
def test_members_that_are_killed_at_any_moment_lose_no_memory_and_take_none(temporary: Path) -> None:
    """Budgets add up whenever one looks, and at the end a single member has all of them."""
    shared, rng = temporary / "held", random.Random(0)
    shared.write_bytes(bytes(8 * 16))

    def start(slot: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tests.app.fleet.ledger_process", f"m{slot}", str(slot), str(CAPACITY), shared]
        return subprocess.Popen(command, env={**os.environ, "TMPDIR": str(temporary)})

    def held() -> list[int]:
        return [int.from_bytes(shared.read_bytes()[8 * i : 8 * i + 8], sys.byteorder) for i in range(16)]

    members = {slot: start(slot) for slot in range(3)}
    file = LedgerFile("shared")
    try:
        for next_slot in range(3, 13):
            ends_at = time.monotonic() + rng.uniform(0.05, 0.3)
            while time.monotonic() < ends_at:
                with file.locked() as ledger:
                    by_slot = held()
                    counted = {int(name[1:]): member.counted_bytes for name, member in ledger.members.items()}
                    assert sum(counted.values()) <= CAPACITY
                    assert all(by_slot[slot] <= counted.get(slot, 0) for slot in members), (by_slot, counted)
                time.sleep(0.001)
            victim = members.pop(rng.choice(list(members)))
            victim.kill()
            victim.wait()
            members[next_slot] = start(next_slot)
        while len(members) > 1:
            _, victim = members.popitem()
            victim.kill()
            victim.wait()
        until(lambda: _counted(file) == [CAPACITY])
    finally:
        for member in members.values():
            member.kill()
            member.wait()


def _counted(file: LedgerFile) -> list[int]:
    with file.locked() as ledger:
        return [member.counted_bytes for member in ledger.members.values()]
