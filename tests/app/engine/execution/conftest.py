"""Fixtures for the tests of steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from folio.app.engine.execution.graph import CAPTURES
from folio.app.engine.execution.model_runner import ModelRunner
from folio.app.engine.layers.batch import StepBatch
from folio.app.engine.memory import kv_plan
from folio.app.engine.ranks import executor
from folio.vmem import KVMemory, StepDemand
from tests.app.engine.execution.strict_pointers import StrictProvider, strict_copy
from tests.fakes.recorded_graph import RecordedGraph, record
from tests.vmem.backends.stand_in_driver import StandInDriver
from tests.vmem.small_memory import pages_read


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[RecordedGraph]:
    """Steps on CPUs are captured by the stand-in; the graph of each replay."""
    replayed: list[RecordedGraph] = []
    monkeypatch.setitem(CAPTURES, "cpu", partial(record, replays=replayed))
    return replayed


@pytest.fixture
def use_device(use_driver: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], StandInDriver]]:
    """A function that makes engines use a device without a GPU, over the real bindings and a stand-in for the library.
    Its steps finish late, one after the other: what a step may still read must stay mapped. No kernel may be given a
    tensor whose address is a hole, which Triton refuses."""
    drivers: list[StandInDriver] = []

    def use() -> StandInDriver:
        drivers.append(StandInDriver(32 << 20))
        use_driver(drivers[-1])
        _install(drivers[-1], monkeypatch)
        return drivers[-1]

    yield use
    [driver] = drivers
    driver.finish_work()
    assert driver.leftovers == (0, 0, 0, 0, 0)
    assert driver.violations == []


def _install(driver: StandInDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    run, ensure = ModelRunner.run, KVMemory.ensure
    select_provider, select_block_copy = executor.select_provider, kv_plan.select_block_copy
    reading: list[set[int]] = [set()]

    def ensure_and_note(memory: KVMemory, demands: Iterable[StepDemand]) -> None:
        demands = list(demands)
        ensure(memory, demands)
        reading[0] = pages_read(memory, demands)

    def launch_and_run(runner: ModelRunner, batch: StepBatch) -> torch.Tensor:
        driver.launch(reading[0])
        if driver.num_running > 2:
            driver.finish_work(1)
        return run(runner, batch)

    monkeypatch.setattr(
        executor, "select_provider", lambda *args, **options: StrictProvider(select_provider(*args, **options), driver)
    )
    copy = select_block_copy(torch.device("cpu"))
    if copy is not None:
        monkeypatch.setattr(kv_plan, "select_block_copy", lambda device: strict_copy(copy, driver))
    monkeypatch.setattr(KVMemory, "ensure", ensure_and_note)
    monkeypatch.setattr(ModelRunner, "run", launch_and_run)
