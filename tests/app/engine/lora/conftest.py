"""Fixtures for the tests of adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from folio.app.engine.engine import Engine
from tests.app.engine.engines import MakeEngine
from tests.app.engine.lora.adapters import one_thread

__all__ = ["one_thread"]


@pytest.fixture
def serve(make_engine: MakeEngine, one_thread: None) -> MakeEngine:
    """`serve(model, adapters, **settings)`: an engine of folders of adapters, by their names."""

    def make(model: Path, adapters: dict[str, Path], **settings: Any) -> Engine:
        sources = {name: str(folder) for name, folder in adapters.items()}
        return make_engine(model, **({"adapters": sources, "max_num_seqs": 16} | settings))

    return make
