"""Stress test: the engine's and the mapper's thread for seconds (nightly half a minute), on a slow device with random
failures."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from folio.vmem import KVMemory, MapError, MemoryReport, OutOfPages, SequenceMemory, StepDemand, VmemError
from tests.nightly import examples
from tests.processes import until
from tests.vmem.small_memory import (
    DOCUMENTS,
    MAX_TOKENS,
    PAGE_BYTES,
    FlakyCuda,
    FlakyHost,
    FlakyStandIn,
    Tokens,
    make_memory,
    pages_read,
    read,
    write,
)

LEAST_S, MOST_S = examples(4, nightly=15), 120
FAIL_RATE, SLOW_RATE = 0.002, 0.05
NO_PROGRESS_S = 20
NUM_PAGES = 120
MOST_RUNNING_STEPS = 3


class Device(threading.Thread):
    """Finishes launched steps one by one."""

    def __init__(self, backend: FlakyCuda) -> None:
        super().__init__(daemon=True)
        self.driver = backend.fake
        self.stopping = False

    def run(self) -> None:
        pauses = random.Random(1)
        while not self.stopping:
            time.sleep(pauses.random() * 0.002)
            self.driver.finish_work(1)


@pytest.mark.parametrize(("kind", "device"), [("interleaved", FlakyStandIn), ("per_layer", FlakyCuda)])
def test_no_deadlock_no_lost_wakeup_no_unfenced_change(kind: str, device: type[FlakyCuda]) -> None:
    memory, backend = make_memory(
        device,
        num_pages=NUM_PAGES,
        kind=kind,  # type: ignore[arg-type]
        windowed=True,
        num_regions=6,
        eager_allocation=True,
        reclaim_threshold=0.3,
        idle_release_s=0.003,
        cache_release_s=0.02,
        max_mappings=300,
    )
    assert isinstance(backend, FlakyCuda)
    device = Device(backend)
    device.start()
    engine = _Engine(memory, backend)
    running = ThreadPoolExecutor(1).submit(engine.run)
    last, began_at = -1, time.monotonic()
    seen_at, least, most = began_at, began_at + LEAST_S, began_at + MOST_S
    while not running.done() and time.monotonic() < most:
        time.sleep(0.05)
        report = memory.report()  # a third thread, as a server has
        if time.monotonic() > least and _is_enough(engine, report):  # a busy machine takes longer
            break
        if engine.num_steps != last:
            last, seen_at = engine.num_steps, time.monotonic()
        assert time.monotonic() - seen_at < NO_PROGRESS_S, "no step for a long time: a deadlock or a lost wake-up"
    engine.stopping = True
    running.result(NO_PROGRESS_S)
    device.stopping = True
    device.join()

    backend.fake.fail_rate = 0.0
    engine.free_all()
    backend.fake.finish_work()
    # Without notifications: the mapper must wake up by itself.
    until(lambda: not memory.report().physical_bytes, NO_PROGRESS_S, memory.report)
    report = memory.report()
    memory.check_idle()
    memory.close()
    assert backend.fake.leftovers == (0, 0, 0, 0, 0)
    assert not backend.fake.violations
    assert _is_enough(engine, report), (engine.num_steps, report)


def test_closing_waits_for_the_work_in_hand() -> None:
    begun, ended = threading.Event(), []

    class Slow(FlakyHost):
        def destroy(self, handle: int) -> None:
            if threading.current_thread().name == "folio-mapper":
                begun.set()
                time.sleep(0.1)  # closing would take less
            super().destroy(handle)
            ended.append(threading.current_thread().name)

    memory, _ = make_memory(Slow, idle_release_s=0.0)
    sequence = memory.create_sequence("region")
    memory.append(sequence, 64)
    memory.ensure([StepDemand(sequence, 0, 64)])
    memory.free(sequence)
    assert begun.wait(NO_PROGRESS_S)
    memory.close()
    assert ended[0] == "folio-mapper"


def _is_enough(engine: _Engine, report: MemoryReport) -> bool:
    """Whether every mechanism was exercised."""
    return (
        report.num_hidden > 100
        and report.mapper_failures > 0
        and report.adoptions > 0
        and report.hit_tokens > 1000
        and report.evicted_blocks > 0
        and engine.num_steps > 500
    )


class _Engine:
    """Submits, steps, forks, truncates, cancels and changes the budget at random; checks what it reads."""

    def __init__(self, memory: KVMemory, backend: FlakyCuda) -> None:
        self.memory = memory
        self.backend = backend
        self.random = random.Random(0)
        self.written: dict[SequenceMemory, Tokens] = {}
        self.next_token = 10_000
        self.coming: dict[SequenceMemory, list[int]] = {}
        self.num_steps = 0
        self.revision = 0
        self.stopping = False

    def run(self) -> None:
        while not self.stopping:
            self.backend.fake.fail_rate = self.random.choice([0.0, FAIL_RATE])
            self.backend.fake.slow_rate = SLOW_RATE
            self._churn()
            self._step()
            if self.random.random() < 0.02:
                self.memory.check_integrity()
            if self.random.random() < 0.01:
                time.sleep(0.01)  # idle: memory begins to go back

    def free_all(self) -> None:
        while self.written:
            self.memory.free(self.written.popitem()[0])

    def _churn(self) -> None:
        rng, memory = self.random, self.memory
        if len(self.written) < 8:
            self._open()
        if rng.random() < 0.2:
            memory.free(self.written.popitem()[0] if rng.random() < 0.5 else self._pop_oldest())
        victim = rng.choice([*self.written]) if self.written else None
        if victim is not None and rng.random() < 0.15 and self.written[victim].ids and len(self.written) < 8:
            tokens = self.written[victim].first(len(self.written[victim].ids) - rng.choice([0, 0, 3, 20]))
            try:
                child = memory.fork(victim, len(tokens.ids), "auto", tokens.chain)
                self.written[child] = tokens
            except VmemError:
                pass
        if victim is not None and rng.random() < 0.1:
            ids = self.written[victim].ids
            try:
                memory.truncate(victim, max(0, len(ids) - rng.choice([1, 5, 17])))
                del ids[victim.num_tokens :]
            except VmemError:
                pass
        if rng.random() < 0.02:
            self.revision += 1
            pages = rng.randint(memory.least_budget_bytes // PAGE_BYTES, NUM_PAGES)
            memory.set_budget(pages * PAGE_BYTES, self.revision)
        while memory.num_free_pages < 0 and self.written:
            memory.free(self.written.popitem()[0])

    def _open(self) -> None:
        """Create a sequence that begins with the cached prefix of a document."""
        ids = DOCUMENTS[self.random.randrange(2)][: self.random.choice([20, 50, 100])]
        tokens = Tokens(self.memory.prefixes.chain(), ids)
        sequence = self.memory.create_sequence(
            self.random.choice(["auto", "auto", "block_table"]), expected_tokens=len(ids)
        )
        try:
            found = self.memory.share_prefix(sequence, tokens.chain, ids)
        except VmemError:
            self.memory.free(sequence)
            return
        self.written[sequence] = Tokens(tokens.chain, ids[:found])
        self.coming[sequence] = ids[found:]

    def _pop_oldest(self) -> SequenceMemory:
        sequence = next(iter(self.written))
        del self.written[sequence]
        return sequence

    def _step(self) -> None:
        memory, demands = self.memory, []
        for sequence, tokens in self.written.items():
            start = len(tokens.ids)
            end = min(start + self.random.choice([1, 1, 1, 30]), MAX_TOKENS)
            if end == start:
                continue
            try:  # as for a prompt of which this step computes a part
                memory.append(sequence, min(end + self.random.choice([0, 0, 60]), MAX_TOKENS))
            except (OutOfPages, MapError):
                continue
            demands.append(StepDemand(sequence, start, end))
            memory.prefixes.stage_prefix(sequence, tokens.ids + self._next(sequence, end - start), start, end)
        while self.backend.fake.num_running > MOST_RUNNING_STEPS:
            time.sleep(0.0001)
        try:
            memory.ensure(demands)
        except (OutOfPages, MapError):
            memory.prefixes.abort_prefixes()
            return
        memory.plan([StepDemand(d.sequence, d.end, max(d.end + 1, d.sequence.num_tokens)) for d in demands])
        self.backend.fake.launch(pages_read(memory, demands))
        for demand in demands:
            tokens = self.written[demand.sequence]
            tokens.ids += self._next(demand.sequence, demand.end - demand.start)
            del self.coming[demand.sequence][: demand.end - demand.start]
            values = tokens.contents[demand.start :]
            write(memory, demand, values, "own")
        memory.launched()
        memory.prefixes.commit_prefixes()
        if demands:
            demand = self.random.choice(demands)
            for layer in (0, 1):
                first = demand.sequence.groups[layer].first * 16
                expected = self.written[demand.sequence].contents[first:]
                assert read(memory, demand, layer, "home") == expected
                if demand.sequence.view == "region":
                    assert read(memory, demand, layer, "region") == expected
        self.num_steps += 1

    def _next(self, sequence: SequenceMemory, count: int) -> list[int]:
        """The next tokens, the same until they are computed: of the document, then unique ones."""
        coming = self.coming.setdefault(sequence, [])
        while len(coming) < count:
            self.next_token += 1
            coming.append(self.next_token)
        return coming[:count]
