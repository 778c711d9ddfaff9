"""One server with a real engine for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.local_server import LocalServer


@pytest.fixture(scope="session")
def local_server() -> Iterator[LocalServer]:
    local = LocalServer(dtype="float32", pooling="mean")
    yield local
    local.close()


@pytest.fixture
def server(local_server: LocalServer) -> Iterator[LocalServer]:
    """The server; after the test no request and no page may be left."""
    yield local_server
    local_server.wait_until_idle()
