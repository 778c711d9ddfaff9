"""Fixtures for the tests of adapters."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from folio.app.engine.engine import Engine
from folio.app.engine.lora.layers import Updates
from folio.app.engine.lora.rank import RankAdapters
from folio.app.engine.lora.source import AdapterSource
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


Events = tuple[threading.Event, threading.Event]


@pytest.fixture
def read_events(monkeypatch: pytest.MonkeyPatch) -> Events:
    """A read of an adapter has begun; reads may end, as at first."""
    begun, may_end, read = threading.Event(), threading.Event(), RankAdapters.read
    may_end.set()

    def read_late(files: RankAdapters, source: AdapterSource) -> Updates:
        begun.set()
        assert may_end.wait(60)
        return read(files, source)

    monkeypatch.setattr(RankAdapters, "read", read_late)
    return begun, may_end
