"""Fixtures for the tests of steps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from folio.kernels import KernelError
from folio.kernels.cpu import build


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine without a C++ compiler, whose steps are torch's calls and attention alone."""

    def refuse(*_: object) -> None:
        raise KernelError("no C++ compiler")

    build.load_library.cache_clear()
    monkeypatch.setattr(build, "_library", refuse)
    yield
    build.load_library.cache_clear()
