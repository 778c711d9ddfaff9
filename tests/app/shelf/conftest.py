from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from folio.app.shelf import control, shelved_model
from tests.app.shelf.shelves import TinyModels
from tests.conftest import MakeCheckpoint


@pytest.fixture(scope="session")
def models(make_checkpoint: MakeCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyModels]:
    made = TinyModels(make_checkpoint, tmp_path_factory.mktemp("shelf"))
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _hung_loads_of_this_test(tmp_path: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(control, "default_folder", lambda: tmp_path / "pinned")
        patch.setattr(shelved_model, "_FIRST_RETRY_S", 0.1)  # after a failure
        yield
