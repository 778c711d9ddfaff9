"""Fixtures for the tests of engines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from folio.app.engine.engine import Engine
from folio.app.engine.ranks.processes import Launch, spawn_ranks
from tests.app.engine.engines import MakeEngine, engine_of, folder_of
from tests.architectures import ALL
from tests.conftest import ARCHITECTURES, HYBRIDS, MakeCheckpoint


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
