"""One Ray cluster for all applications that the tests deploy, one file's after another's: a start takes 10 to 20 s."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from ray import serve

from benchmarks.served import cluster


@pytest.fixture(scope="session")
def cluster_url() -> Iterator[str]:
    """Where Serve listens."""
    with cluster() as url:
        yield url


@contextmanager
def deleted_at_the_end(name: str) -> Iterator[None]:
    """An application that is deployed within, even if only in part."""
    try:
        yield
    finally:
        serve.delete(name)
