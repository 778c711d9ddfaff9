"""Fixtures for the tests of kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from folio.kernels.cpu import build


@pytest.fixture
def uncached_libraries() -> Iterator[None]:
    """Load C++ libraries anew in this test, and again after it."""
    build.load_library.cache_clear()
    yield
    build.load_library.cache_clear()
