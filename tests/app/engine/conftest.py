"""Fixtures for the tests of engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from folio.app.config.machine import Machine
from folio.app.engine.engine import Engine
from folio.app.engine.memory import kv_plan
from folio.app.engine.ranks import self_test
from folio.app.engine.ranks.processes import Launch, spawn_ranks
from folio.app.engine.schedule.preemption import PreemptionCostModel
from folio.kernels.cpu import build
from folio.vmem import CudaBackend
from folio.vmem.backends.cuda import CPU
from tests.app.engine.engines import ExpectSteps, MakeEngine, engine_of, folder_of
from tests.architectures import ALL
from tests.conftest import ARCHITECTURES, HYBRIDS, MakeCheckpoint
from tests.vmem.backends.stand_in_driver import StandInDriver


@pytest.fixture
def make_engine(make_checkpoint: MakeCheckpoint) -> Iterator[MakeEngine]:
    """`make_engine(model, **settings)` of an architecture or a folder; closed at the end, when all must be free."""
    made: list[Engine] = []

    def make(model: Path | str = "llama", launch: Launch = spawn_ranks, **settings: Any) -> Engine:
        if model == "tiny" or model in ARCHITECTURES or model in HYBRIDS:
            model = folder_of(make_checkpoint, str(model))
        made.append(engine_of(model, launch, **settings))
        return made[-1]

    yield make
    for engine in made:
        engine.check_integrity()
        engine.close()


@pytest.fixture
def engine(make_engine: MakeEngine) -> Engine:
    return make_engine()


@pytest.fixture
def llama(make_checkpoint: MakeCheckpoint) -> Path:
    return folder_of(make_checkpoint, "llama")


@pytest.fixture(scope="session")
def checkpoint(make_checkpoint: MakeCheckpoint) -> MakeCheckpoint:
    """`checkpoint(name, **changes)` → folder of a small random checkpoint of that architecture."""

    def make(name: str, **changes: Any) -> Path:
        model_type, settings = ALL[name]
        return make_checkpoint(model_type, **settings | changes)

    return make


@pytest.fixture
def use_machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`use_machine(**changes)`: this machine, with these changes, is found from now on. `resident_bytes`: what this
    process takes of it."""

    def use(resident_bytes: int | None = None, **changes: Any) -> None:
        machine = replace(Machine.detect(), **changes)
        monkeypatch.setattr(Machine, "detect", lambda: machine)
        if resident_bytes is not None:
            monkeypatch.setattr(kv_plan, "resident_bytes", lambda: resident_bytes)

    return use


@pytest.fixture
def use_driver(monkeypatch: pytest.MonkeyPatch) -> Callable[[StandInDriver], None]:
    """`use_driver(driver)`: engines on a CPU have their KV memory there from now on."""

    def use(driver: StandInDriver) -> None:
        for module in (kv_plan, self_test):
            monkeypatch.setattr(
                module, "select_backend", lambda *_, **__: CudaBackend(driver=driver, tensor_device=CPU)
            )

    return use


@pytest.fixture
def expect_steps(monkeypatch: pytest.MonkeyPatch) -> ExpectSteps:
    """`expect_steps(times)`: engines have measured these times from now on."""
    return lambda times: monkeypatch.setattr(PreemptionCostModel, "step_times", times)


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine without a C++ compiler, whose steps are torch's calls and attention alone."""
    build.load_library.cache_clear()
    monkeypatch.setenv("PATH", "")
    yield
    build.load_library.cache_clear()
