"""File of a budget ledger, which the members' processes on a machine share under a file lock.

A member that finds no file makes one. Nothing is left of a process that has ended: the kernel gives its lock back, its
half-written file never takes the ledger's name, and the next exchange takes its memory off the account.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from folio.app.errors import ConfigError
from folio.app.fleet.ledger import BudgetLedger, LedgerMember, MemberUsage, ProcessId

logger = logging.getLogger(__name__)

# An exchange takes milliseconds; but a process may be stopped in the middle of one.
LOCK_TIMEOUT_S, _LOCK_POLL_S = 5.0, 0.005


class LedgerFile:
    """The file of the ledger of this name. It must not be removed while a member lives.

    Raises:
        ConfigError: its folder belongs to another user, or is open to others.
    """

    def __init__(self, name: str, lock_timeout_s: float = LOCK_TIMEOUT_S) -> None:
        self._folder, self._lock_timeout_s = _private_folder(), lock_timeout_s
        self._path = self._folder / f"{re.sub(r'[^A-Za-z0-9.-]', '_', name)}.ledger"

    @contextmanager
    def locked(self) -> Iterator[BudgetLedger]:
        """The ledger, without members whose processes have ended; written at the end, unless there was an error.

        Raises:
            TimeoutError: another process has kept the lock.
            OSError: the file cannot be read or written.
        """
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _lock(folder, self._lock_timeout_s)
            ledger = self._read()
            for name, member in list(ledger.members.items()):
                if not _is_running(member.process):
                    logger.warning("%s has died; its KV memory goes to the other replicas", name)
                    del ledger.members[name]
            yield ledger
            self._write(ledger)
        finally:
            os.close(folder)

    def _read(self) -> BudgetLedger:
        try:
            text = self._path.read_text()
        except FileNotFoundError:
            return BudgetLedger()
        ledger: dict[str, Any] = json.loads(text)
        members = {name: _member(**fields) for name, fields in ledger.pop("members").items()}
        return BudgetLedger(**ledger, members=members)

    def _write(self, ledger: BudgetLedger) -> None:
        if not ledger.members:
            self._path.unlink(missing_ok=True)
            return
        written = self._path.with_suffix(".new")
        written.write_text(json.dumps(asdict(ledger)))
        written.replace(self._path)


def this_process() -> ProcessId:
    return ProcessId(os.getpid(), _started(os.getpid()))


def _member(process: list[int], usage: dict[str, int], **fields: Any) -> LedgerMember:
    return LedgerMember(ProcessId(*process), MemberUsage(**usage), **fields)


def _lock(fd: int, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError(f"another process has kept the ledger's lock for {timeout_s:g} s") from None
            time.sleep(_LOCK_POLL_S)


def _is_running(process: ProcessId) -> bool:
    """Whether a process has memory: the leader of its threads may have ended before the others. By `/proc`, since
    Python has `os.pidfd_open` only where it was built on a new system."""
    try:
        state, num_threads, started = _stat(process.pid)
    except (FileNotFoundError, ProcessLookupError):
        return False
    return started == process.started and (state not in "ZX" or num_threads > 1)


def _started(pid: int) -> int:
    return _stat(pid)[2]


def _stat(pid: int) -> tuple[str, int, int]:
    """(state of the leading thread, number of threads, an ended leader included, start time) of a process: fields 3, 20
    and 22 of `/proc/PID/stat`. The second field, a name in brackets, may contain anything."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[17]), int(fields[19])


def _private_folder() -> Path:
    """A folder in which no other user can place a link. Raises `ConfigError` if another user owns it or may write to
    it."""
    folder = Path(tempfile.gettempdir()) / f"folio-{os.geteuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    info = folder.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o077:
        raise ConfigError(f"{folder} is not a private folder of this user (mode 700): remove it, or change TMPDIR")
    return folder
