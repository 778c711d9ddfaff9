"""One Ray cluster for all tests that need one, and one application after another at `/`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from folio.app.config.args import AppArgs

NAME = "folio"


def shared_args() -> AppArgs:
    """The application with the built-in model that several files share. Little memory and few sequences, so that
    attacks fill them; short timeouts for endless bodies; float32, so that answers do not depend on other requests."""
    from folio.app.config.args import AppArgs
    from folio.app.config.engine import EngineConfig
    from folio.app.config.http import HttpSettings

    engine = EngineConfig(
        model="builtin",
        dtype="float32",
        kv_memory_bytes=96 << 20,
        max_num_seqs=32,
        max_num_batched_tokens=512,
        prefix_cache_release_s=3.0,
    )
    return AppArgs(engine=engine, http=HttpSettings(body_timeout_s=2.0, max_timeout_s=60.0, default_timeout_s=60.0))


class Front:
    """The application `folio` at `/`: deployed once for the files that ask for the same, and deleted for others."""

    def __init__(self) -> None:
        self._args: AppArgs | None = None
        self._handle: Any = None

    def run(self, args: AppArgs) -> Any:
        """A handle of its ingress."""
        from ray import serve

        from folio.app.main import build

        if args != self._args:
            self.delete()
            self._handle = serve.run(build(args), name=NAME, route_prefix="/")
            self._args = args
        return self._handle

    def delete(self) -> None:
        """Make room for another application, and wait until the processes of this one are gone."""
        from ray import serve

        from benchmarks.served import processes_called
        from tests.processes import until

        if self._args is not None:
            self._args = self._handle = None
            serve.delete(NAME)
            until(lambda: not processes_called(f"ray::ServeReplica:{NAME}:"))


@contextmanager
def deleted_at_the_end(name: str) -> Iterator[None]:
    """An application that is deployed within, even if only in part."""
    from ray import serve

    try:
        yield
    finally:
        serve.delete(name)


@pytest.fixture(scope="session")
def cluster_url() -> Iterator[str]:
    """Where Serve listens."""
    from benchmarks.served import cluster

    with cluster() as url:
        yield url


@pytest.fixture(scope="session")
def front(cluster_url: str) -> Front:
    return Front()
