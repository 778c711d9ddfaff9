from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.app.engine.shelf.shelves import TinyModels
from tests.conftest import MakeCheckpoint


@pytest.fixture(scope="session")
def models(make_checkpoint: MakeCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyModels]:
    made = TinyModels(make_checkpoint, tmp_path_factory.mktemp("shelf"))
    yield made
    made.close()
