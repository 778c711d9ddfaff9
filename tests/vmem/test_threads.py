"""Stress test: the engine's and the mapper's thread for seconds (nightly half a minute), on a slow device with random
failures."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("hypothesis")
from folio.vmem import LayoutKind, MemoryReport, PrefixUse, StepDemand
from tests.nightly import examples
from tests.processes import until
from tests.vmem.memory_machine import MemoryMachine
from tests.vmem.small_memory import FlakyCuda, FlakyHost, make_memory

LEAST_S, MOST_S = examples(4, nightly=15), 120
FAIL_RATE, SLOW_RATE = 0.005, 0.05
NO_PROGRESS_S = 20
MOST_RUNNING_STEPS = 3
SETTINGS = {
    "background": True,
    "windowed": True,
    "num_regions": 6,
    "eager_allocation": True,
    "reclaim_threshold": 0.3,
    "idle_release_s": 0.003,
    "cache_release_s": 0.02,
    "max_mappings": 300,
}


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


@pytest.mark.parametrize("kind", ["interleaved", "per_layer"])
def test_no_deadlock_no_lost_wakeup_no_unfenced_change(kind: LayoutKind) -> None:
    engine = Engine()
    engine.begin(FlakyCuda, 120, SETTINGS | {"kind": kind})
    memory, backend = engine.memory, engine.backend
    assert isinstance(backend, FlakyCuda)
    device = Device(backend)
    device.start()
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
    engine.teardown()
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


def _is_enough(engine: Engine, report: MemoryReport) -> bool:
    """Whether every mechanism was exercised."""
    return (
        report.num_hidden > 100
        and report.mapper_failures > 0
        and report.adoptions > 0
        and report.hit_tokens > 1000
        and report.evicted_blocks > 0
        and engine.num_steps > 500
    )


class Engine(MemoryMachine):
    """Plays the machine's rules at random until it is stopped; what is read is checked."""

    num_steps = 0
    stopping = False

    def run(self) -> None:
        pick = self.random = random.Random(0)
        driver = self.backend.fake  # type: ignore[union-attr]
        while not self.stopping:
            driver.fail_rate = pick.choice([0.0, FAIL_RATE])
            driver.slow_rate = SLOW_RATE
            self._churn()
            while driver.num_running > MOST_RUNNING_STEPS:
                time.sleep(0.0001)
            self.step({pick.randrange(8) for _ in range(3)}, pick.choice([1, 1, 20]), pick.choice(["home", "region"]))
            if pick.random() < 0.02:
                self.memory.check_integrity()
            if pick.random() < 0.01:
                time.sleep(0.01)  # idle: memory begins to go back

    def _step(self, demands: list[StepDemand], view: str, *, fails: bool = False) -> bool:
        self.num_steps += bool(demands)
        return super()._step(demands, view, fails=fails)

    def _churn(self) -> None:
        pick, which = self.random, self.random.randrange(8)
        if len(self.written) < 8:
            documents, common = [pick.randrange(2)], pick.choice([20, 50, 100])
            self.submit(
                pick.choice(["auto", "auto", "block_table"]), documents, common, 5, "", "home", PrefixUse(), False
            )
        if pick.random() < 0.3 or len(self.written) > 8:
            self.finish(which)
        if pick.random() < 0.15:
            self.fork(which, pick.choice([0, 0, 3, 20]), "auto", True)
        if pick.random() < 0.1:
            self.truncate(which, pick.choice([1, 5, 17]))
        if pick.random() < 0.02:
            self.set_budget(pick.random())
