"""Fixtures for the tests of steps."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from folio.app.engine.execution.graph import CAPTURES
from folio.kernels import KernelError
from folio.kernels.cpu import build
from tests.fakes.recorded_graph import RecordedGraph, record


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine without a C++ compiler, whose steps are torch's calls and attention alone."""

    def refuse(*_: object) -> None:
        raise KernelError("no C++ compiler")

    build.load_library.cache_clear()
    monkeypatch.setattr(build, "_library", refuse)
    yield
    build.load_library.cache_clear()


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[RecordedGraph]:
    """Steps on CPUs are captured by the stand-in; the graph of each replay."""
    replayed: list[RecordedGraph] = []
    monkeypatch.setitem(CAPTURES, "cpu", partial(record, replays=replayed))
    return replayed
