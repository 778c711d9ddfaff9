"""Crashes at every write, and SIGKILL of the process: every request is answered once."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from folio.app.api.batches.answer_log import AnswerLog
from folio.app.api.batches.runner import Intervals
from folio.app.errors import RequestError

from .fake import (
    ALICE,
    FakeService,
    add_batch,
    check_answered_once,
    ended,
    eventually,
    jsonl,
    request_line,
    running,
    store_in,
)

IDS = [f"r{i}" for i in range(6)]
CONTENT = jsonl(*(request_line(name, name) for name in IDS))


class Dead(OSError):
    pass


class Disk:
    """Dies at write number `dies_at`, and does nothing afterwards."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, dies_at: int) -> None:
        self._dies_at = dies_at
        self.num_writes = 0
        for owner, name in ((Path, "replace"), (Path, "unlink"), (os, "fsync")):
            monkeypatch.setattr(owner, name, self._mortal(getattr(owner, name)))
        append = AnswerLog.append

        def torn(log: AnswerLog, custom_id: str, line: bytes, *, is_error: bool) -> None:
            try:
                self._count()
            except Dead:
                if self.num_writes == dies_at:  # half of the line
                    append(log, custom_id, line[: len(line) // 2], is_error=is_error)
                raise
            append(log, custom_id, line, is_error=is_error)

        monkeypatch.setattr(AnswerLog, "append", torn)

    @property
    def is_dead(self) -> bool:
        return self.num_writes >= self._dies_at

    def _count(self) -> None:
        self.num_writes += 1
        if self.is_dead:
            raise Dead("the machine is off")

    def _mortal(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def write(*args: Any, **kwargs: Any) -> Any:
            self._count()
            return call(*args, **kwargs)

        return write


QUICK = Intervals(look_s=0.01, save_s=0.005)


async def test_a_crash_at_every_write(tmp_path: Path) -> None:
    """The first server dies at its k-th write; the second one finishes the batch. For all k until none dies."""
    dies_at, has_died = 0, True
    while has_died:
        dies_at += 1
        store = store_in(tmp_path / str(dies_at))
        batch_id = add_batch(store, ALICE, CONTENT)
        first, second = (FakeService(r2=RequestError("never")) for _ in range(2))
        with pytest.MonkeyPatch.context() as patch:
            disk = Disk(patch, dies_at)
            async with running(store, first, intervals=QUICK):
                await eventually(lambda: disk.is_dead or store.batch(ALICE, batch_id).has_ended)  # noqa: B023
                await asyncio.sleep(0.02)
            has_died = disk.is_dead
        store = store_in(tmp_path / str(dies_at))  # as after a restart
        async with running(store, second, intervals=QUICK):
            batch = await ended(store, batch_id)
            await eventually(lambda: not store.open_batches())  # noqa: B023
        assert batch.status == "completed", dies_at
        assert batch.request_counts.model_dump() == {"total": 6, "completed": 5, "failed": 1}, dies_at
        check_answered_once(store, batch, IDS)
        assert (first.asked + second.asked).keys() == set(IDS)
    assert dies_at > 15


_SERVER = """
import asyncio, sys
from pathlib import Path
from folio.app.api.batches.runner import Intervals
from tests.app.api.batches.fake import FakeService, running, store_in
async def main():
    store, service = store_in(Path(sys.argv[1])), FakeService()
    async with running(store, service, concurrent_lines=4, intervals=Intervals(look_s=0.01, lock_s=0.01)):
        while store.open_batches():
            await asyncio.sleep(0.01)
asyncio.run(main())
"""


@pytest.mark.processes
def test_sigkill_at_any_time(tmp_path: Path) -> None:
    """The process is killed again and again until it finishes two batches in spite of that."""
    store = store_in(tmp_path)
    ids = [f"r{i}" for i in range(300)]
    batches = [add_batch(store, ALICE, jsonl(*(request_line(name, "x" * 2000) for name in ids))) for _ in range(2)]
    rng, num_killed, ends_at = random.Random(3), 0, time.monotonic() + 240
    while store.open_batches():
        assert time.monotonic() < ends_at
        server = subprocess.Popen([sys.executable, "-c", _SERVER, str(tmp_path)])
        try:
            until_log = time.monotonic() + 60
            before = store.used_bytes()
            while server.poll() is None and store.used_bytes() == before and time.monotonic() < until_log:
                time.sleep(0.005)  # it imports
            server.wait(rng.uniform(0.0, 0.15) * (1 + num_killed))
        except subprocess.TimeoutExpired:
            num_killed += 1
        finally:
            server.send_signal(signal.SIGKILL)
            server.wait()
    assert num_killed >= 1
    for batch_id in batches:
        batch = store.batch(ALICE, batch_id)
        assert batch.status == "completed"
        assert batch.request_counts.completed == 300
        check_answered_once(store, batch, ids)
