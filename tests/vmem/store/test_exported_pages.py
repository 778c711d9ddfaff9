"""Prefixes pass between two memories on a device by exported pages, or through host memory, or are computed."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from folio.vmem import KVMemory
from folio.vmem.prefix.store import exported_pages, handover
from folio.vmem.prefix.store.handover import PrefixGiver, PrefixReceiver
from folio.vmem.prefix.store.installer import FoundPrefix
from folio.vmem.prefix.store.link import connect
from folio.vmem.prefix.store.records import Records
from folio.vmem.prefix.token_chain import encode_tokens
from tests.vmem.backends.stand_in_driver import StandInDriver, build, skip_without_stand_in
from tests.vmem.sequences import compute, run, serve, submit
from tests.vmem.small_memory import BLOCK_TOKENS, PAGE_BYTES, FlakyCuda, Tokens, make_memory
from tests.vmem.store.stores import IDS, SHAPES, wait_for

NUM_PAGES = 40


class Pair:
    """Two memories on one device, of which the second gets the first one's prefixes."""

    def __init__(self, **shape: Any) -> None:
        self.driver = StandInDriver(3 * NUM_PAGES * PAGE_BYTES)
        self.first, self.second = (self._memory(**shape) for _ in range(2))
        self.giver = PrefixGiver(self.first, Records(self.first), lambda: "f")
        self.receiver = PrefixReceiver(self.second, Records(self.second), lambda: "f")
        serve(self.first, IDS, 0)
        self.driver.finish_work()

    def fetch(self) -> FoundPrefix:
        prefix = self.begin()
        wait_for(lambda: prefix.is_done)
        return prefix

    def begin(self) -> FoundPrefix:
        prefix = self.receiver.find(self.second.prefixes.chain(()), [*IDS, 1])
        assert prefix is not None
        self.receiver.read(prefix, str(self.giver.address))
        return prefix

    def evict(self, num_blocks: int = NUM_PAGES) -> None:
        with self.first.lock.exclusive():
            self.first.tree.evict(0, num_blocks)

    def _memory(self, **shape: Any) -> KVMemory:
        return make_memory(device=FlakyCuda(0, fake=self.driver), num_pages=NUM_PAGES, **shape)[0]

    def close(self) -> None:
        self.driver.fail_at = -1
        self.receiver.close()
        self.giver.close()
        self.driver.finish_work()
        for memory in (self.first, self.second):
            for sequence in list(memory.tables.sequences):
                memory.free(sequence)
            memory.check_idle()
            memory.close()
        assert (self.driver.leftovers, self.driver.violations) == ((0, 0, 0, 0, 0), [])


@contextmanager
def pair(**shape: Any) -> Iterator[Pair]:
    """Nothing is left of it, and no descriptor."""
    skip_without_stand_in()
    made = Pair(**shape)
    before = num_descriptors()
    try:
        yield made
    finally:
        made.close()
    assert num_descriptors() <= before


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def no_host_memory(*args: Any) -> Any:
    raise AssertionError("blocks were copied to host memory")


@pytest.mark.parametrize("part_pages", [2, 16])
@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_are_copied_on_the_device(
    shape: dict[str, Any], part_pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "_memfd", no_host_memory)
    monkeypatch.setattr(exported_pages, "_PART_PAGES", part_pages)
    with pair(**shape) as made:
        prefix = made.fetch()
        assert prefix.num_units == 6
        made.second.check_integrity()
        assert made.receiver.install(prefix)
        assert prefix.is_intact
        run(made.second, [*IDS, 1], 6 * BLOCK_TOKENS)
        assert made.receiver.num_bytes == prefix.num_bytes > 0


@pytest.mark.parametrize("num_calls", range(1, 51))
def test_whatever_call_fails_blocks_come_another_way(num_calls: int, caplog: pytest.LogCaptureFixture) -> None:
    """Through host memory if exporting or importing fails; what fails at the copy is computed."""
    caplog.set_level(logging.INFO)
    with pair() as made:
        made.driver.fail_at = len(made.driver.calls) + num_calls
        prefix = made.fetch()
        failed = made.driver.calls[made.driver.fail_at - 1 : made.driver.fail_at]
        assert prefix.num_units == 6
        retried = "come through host memory" in caplog.text
        assert retried == (failed not in ([], ["cuMemRelease"], ["cuMemUnmap"]))
        installed = made.receiver.install(prefix)
        made.driver.fail_at = -1
        run(made.second, [*IDS, 1], 6 * BLOCK_TOKENS if installed else 0)


@pytest.mark.parametrize(("num_evicted", "num_units"), [(1, 5), (4, 2), (6, 0)])
def test_units_that_were_evicted_before_the_copy_ended_are_computed(num_evicted: int, num_units: int) -> None:
    with pair() as made:
        prefix = made.fetch()
        made.evict(num_evicted)
        run(made.first, [1000 + token for token in IDS], 0)  # other tokens in their blocks
        made.driver.finish_work()
        made.receiver.install(prefix)
        assert not prefix.is_intact
        run(made.second, [*IDS, 1], num_units * BLOCK_TOKENS)


def test_blocks_that_are_the_same_again_are_not_trusted() -> None:
    """They may have had other content while they were copied."""
    with pair() as made:
        prefix, tree, pool = made.fetch(), made.first.tree, made.first.group_memories[0].pool
        with made.first.lock.exclusive():
            [*_, node] = tree.find(prefix.chain, 6)
            block_ids = node.blocks[0] or ()
            pool.acquire_cached(block_ids)
            node.references += 1  # it stays known meanwhile
            tree.unindex_blocks(node, 0)
            tree.index_blocks(node, 0, (*block_ids,))
            node.references -= 1
            pool.free(block_ids, fence=0, now=0.0)
        made.receiver.install(prefix)
        run(made.second, [*IDS, 1], 5 * BLOCK_TOKENS)


def test_windows_are_installed_whole_or_not_at_all() -> None:
    with pair(windowed=True) as made:
        prefix = made.fetch()
        made.evict(1)
        made.receiver.install(prefix)
        run(made.second, [*IDS, 1], 0)


def gone(made: Pair) -> None:
    made.giver.close()


def silent(made: Pair) -> None:
    made.giver._exporter.num_intact = lambda number: "nonsense"  # type: ignore[assignment,method-assign,return-value]


@pytest.mark.parametrize("fault", [gone, silent])
def test_without_an_answer_nothing_is_installed(fault: Callable[[Pair], None]) -> None:
    with pair() as made:
        prefix = made.fetch()
        fault(made)
        made.receiver.install(prefix)
        run(made.second, [*IDS, 1], 0)


def test_the_copy_is_made_when_the_giver_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with pair() as made:
        prefix, copy, num_intact = made.fetch(), made.receiver._records.copy, made.giver._exporter.num_intact
        running: list[int] = []
        monkeypatch.setattr(made.receiver._records, "copy", lambda *args: made.driver.launch(set()) or copy(*args))
        monkeypatch.setattr(
            made.giver._exporter,
            "num_intact",
            lambda number: running.append(made.driver.num_running) or num_intact(number),
        )
        made.receiver.install(prefix)
        assert running == [0]


def test_a_step_that_may_write_the_blocks_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "_FENCE_S", 0.05)
    with pair() as made:
        made.driver.launch(set())
        made.first.launched()
        assert made.fetch().num_units == 0


def test_units_that_a_step_will_write_are_not_given() -> None:
    with pair() as made:
        made.evict()
        tokens = Tokens(made.first.prefixes.chain(), IDS)
        sequence = submit(made.first, tokens, 0)
        assert made.fetch().num_units == 0
        compute(made.first, (sequence, tokens, 0))


def test_no_page_is_exported_whose_blocks_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    with pair() as made:
        monkeypatch.setattr(made.giver, "_wait_for_fence", made.first.release_all)
        num_calls = len(made.driver.calls)
        assert made.fetch().num_units == 0
        assert "cuMemExportToShareableHandle" not in made.driver.calls[num_calls:]


@pytest.mark.parametrize("end", ["installed", "cancelled", "cancelled while it comes", "closed"])
def test_pages_are_unmapped_when_no_one_waits_for_them(end: str) -> None:
    with pair() as made:
        prefix = made.begin() if end == "cancelled while it comes" else made.fetch()
        if end == "installed":
            made.receiver.install(prefix)
        elif end != "closed":
            made.receiver.cancel(prefix)
        wait_for(lambda: prefix.is_done and (end == "closed" or not made.receiver._imported))


def test_a_page_that_the_giver_gives_back_lives_until_it_is_unmapped() -> None:
    with pair() as made:
        prefix, before = made.fetch(), made.driver.used_bytes
        made.first.release_all()
        assert made.driver.used_bytes == before
        made.receiver.cancel(prefix)
        made.receiver.close()
        assert made.driver.used_bytes == before - 6 * PAGE_BYTES


def test_only_the_latest_exports_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exported_pages, "_MOST_EXPORTS", 1)
    with pair() as made:
        first, second = made.fetch(), made.fetch()
        made.receiver.install(first)
        run(made.second, [*IDS, 1], 0)
        made.second.prefixes.evict_prefixes(())
        made.receiver.install(second)
        run(made.second, [*IDS, 1], 6 * BLOCK_TOKENS)


def test_a_giver_outlives_receivers_that_go() -> None:
    with pair() as made:
        for num_answers in range(2):
            with connect(made.giver.address, remote=False) as link:
                link.send_json({"fingerprint": "f", "keys": [], "first_units": 0, "ahead": False, "imports": True})
                link.send(encode_tokens(IDS))
                for _ in range(num_answers):
                    link.receive()
        made.receiver.install(made.fetch())
        run(made.second, [*IDS, 1], 6 * BLOCK_TOKENS)


_RECEIVER = """
import os, sys
from folio.vmem.prefix.store.handover import PrefixReceiver
from folio.vmem.prefix.store.records import Records
from folio.vmem.prefix.token_chain import encode_tokens
from tests.vmem.sequences import run
from tests.vmem.small_memory import BLOCK_TOKENS, FlakyCuda, make_memory
from tests.vmem.store.stores import IDS, wait_for

memory, device = make_memory(FlakyCuda)
receiver = PrefixReceiver(memory, Records(memory), lambda: "f")
prefix = receiver.find(memory.prefixes.chain(()), [*IDS, 1])
receiver.read(prefix, sys.argv[1])
wait_for(lambda: prefix.is_done)
assert "cuMemImportFromShareableHandle" in device.fake.calls, "nothing was imported"
if sys.argv[2] == "dies":
    os._exit(3)
assert receiver.install(prefix)
memory.free(run(memory, [*IDS, 1], 6 * BLOCK_TOKENS))
receiver.close()
device.fake.finish_work()
memory.check_idle()
memory.close()
assert device.fake.leftovers == (0, 0, 0, 0, 0)
os._exit(0)
"""


@pytest.mark.processes
@pytest.mark.parametrize(("end", "status"), [("installs", 0), ("dies", 3)])
def test_two_processes(end: str, status: int) -> None:
    with pair() as made:
        command = [sys.executable, "-c", _RECEIVER, str(made.giver.address), end]
        environment = os.environ | {"LD_LIBRARY_PATH": str(build())}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == status, done.stderr
        made.first.check_integrity()
        made.first.prefixes.evict_prefixes(())  # nothing holds the blocks
        run(made.first, [*IDS, 1], 0)
