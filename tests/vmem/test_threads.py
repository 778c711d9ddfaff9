"""The engine's thread and the mapper's, for half a minute, on a device that fails now and then and takes its time."""

from __future__ import annotations

import random
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.vmem.small_memory import (
    MAX_TOKENS,
    PAGE_BYTES,
    FlakyCuda,
    make_memory,
    pages_read,
    read,
    write,
)
from vmem import Demand, KVMemory, MapError, OutOfPages, SequenceMemory, VmemError

DURATION_S = 30
FAIL_RATE, SLOW_RATE = 0.002, 0.05
NO_PROGRESS_S = 20
NUM_PAGES = 120
MOST_RUNNING_STEPS = 3


class Device(threading.Thread):
    """Finishes launched steps one by one, a moment after each other."""

    def __init__(self, backend: FlakyCuda) -> None:
        super().__init__(daemon=True)
        self.driver = backend.fake
        self.stopping = False

    def run(self) -> None:
        pauses = random.Random(1)
        while not self.stopping:
            time.sleep(pauses.random() * 0.002)
            self.driver.finish_work(1)


@pytest.mark.parametrize("kind", ["interleaved", "per_layer"])
def test_no_deadlock_no_lost_wakeup_no_unfenced_change(kind: str) -> None:
    memory, backend = make_memory(
        FlakyCuda,
        num_pages=NUM_PAGES,
        kind=kind,  # type: ignore[arg-type]
        windowed=True,
        num_regions=6,
        eager_allocation=True,
        reclaim_threshold=0.3,
        idle_release_s=0.003,
        max_mappings=300,
    )
    assert isinstance(backend, FlakyCuda)
    device = Device(backend)
    device.start()
    engine = _Engine(memory, backend)
    running = ThreadPoolExecutor(1).submit(engine.run)
    last, seen_at, deadline = -1, time.monotonic(), time.monotonic() + DURATION_S / 2
    while time.monotonic() < deadline and not running.done():
        time.sleep(0.05)
        memory.report()  # a third thread, as a server has
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
    deadline = time.monotonic() + NO_PROGRESS_S
    while memory.report().physical_bytes:  # nobody says anything any more: the mapper must wake up by itself
        assert time.monotonic() < deadline, memory.report()
        time.sleep(0.005)
    report = memory.report()
    memory.check_idle()
    memory.close()
    assert backend.fake.leftovers == (0, 0, 0, 0, 0)
    assert not backend.fake.violations
    assert report.num_hidden > 100
    assert report.mapper_failures > 0
    assert report.adoptions > 0
    assert engine.num_steps > 500


class _Engine:
    """Submits, steps, forks, truncates, cancels and changes the budget at random; checks what it reads."""

    def __init__(self, memory: KVMemory, backend: FlakyCuda) -> None:
        self.memory = memory
        self.backend = backend
        self.random = random.Random(0)
        self.written: dict[SequenceMemory, list[float]] = {}
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
            sequence = memory.open(rng.choice(["auto", "auto", "block_table"]))
            self.written[sequence] = []
        if rng.random() < 0.2:
            memory.free(self.written.popitem()[0] if rng.random() < 0.5 else self._pop_oldest())
        victim = rng.choice([*self.written]) if self.written else None
        if victim is not None and rng.random() < 0.15 and self.written[victim] and len(self.written) < 8:
            num_tokens = max(1, len(self.written[victim]) - rng.choice([0, 0, 3, 20]))
            try:
                child = memory.fork(victim, num_tokens, "auto")
                self.written[child] = self.written[victim][:num_tokens]
            except VmemError:
                pass
        if victim is not None and rng.random() < 0.1:
            num_tokens = max(0, len(self.written[victim]) - rng.choice([1, 5, 17]))
            try:
                memory.truncate(victim, num_tokens)
                del self.written[victim][num_tokens:]
            except VmemError:
                pass
        if rng.random() < 0.02:
            self.revision += 1
            pages = rng.randint(memory._pages._fewest, NUM_PAGES)
            memory.set_budget(pages * PAGE_BYTES, self.revision)
        while memory.num_free_pages < 0 and self.written:
            memory.free(self.written.popitem()[0])

    def _pop_oldest(self) -> SequenceMemory:
        sequence = next(iter(self.written))
        del self.written[sequence]
        return sequence

    def _step(self) -> None:
        memory, demands = self.memory, []
        for sequence, values in self.written.items():
            start = len(values)
            end = min(start + self.random.choice([1, 1, 1, 30]), MAX_TOKENS)
            if end == start:
                continue
            try:  # as for a prompt of which this step computes a part
                memory.append(sequence, min(end + self.random.choice([0, 0, 60]), MAX_TOKENS))
            except (OutOfPages, MapError):
                continue
            demands.append(Demand(sequence, start, end))
        while self.backend.fake.num_running > MOST_RUNNING_STEPS:
            time.sleep(0.0001)
        try:
            memory.ensure(demands)
        except (OutOfPages, MapError):
            return
        memory.plan([Demand(d.sequence, d.end, max(d.end + 1, d.sequence.num_tokens)) for d in demands])
        self.backend.fake.launch(pages_read(memory, demands))
        for demand in demands:
            values = [self.random.random() for _ in range(demand.end - demand.start)]
            write(memory, demand, values, demand.sequence.view if demand.sequence.view == "region" else "home")
            self.written[demand.sequence] += [_rounded(value) for value in values]
        memory.launched()
        if demands:
            demand = self.random.choice(demands)
            for layer in (0, 1):
                first = demand.sequence.groups[layer].first * 16
                expected = self.written[demand.sequence][first:]
                assert read(memory, demand, layer, "home") == expected
                if demand.sequence.view == "region":
                    assert read(memory, demand, layer, "region") == expected
        self.num_steps += 1


def _rounded(value: float) -> float:
    """As float32 keeps it."""
    return float(struct.unpack("f", struct.pack("f", value))[0])
