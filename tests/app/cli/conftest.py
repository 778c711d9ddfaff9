"""Configuration files for the command line."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from folio.app.http import haproxy


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., str]:
    """Write a file for a Folio application, with these engine settings and HTTP options of Serve."""

    def write(engine: dict[str, Any], **http: Any) -> str:
        args = {"engine": {"model": "builtin"} | engine}
        application = {"name": "folio", "import_path": "folio.app.main:build", "args": args}
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump({"http_options": http, "applications": [application]}))
        return str(path)

    return write


@pytest.fixture(autouse=True)
def levels() -> Iterator[None]:
    """`StartLog` sets levels of loggers for the process."""
    names = ("ray", "ray.serve", "folio.kernels")
    before = {name: logging.getLogger(name).level for name in names}
    yield
    for name, level in before.items():
        logging.getLogger(name).setLevel(level)


class Stdin(io.TextIOBase):
    """Standard input: a pipe with a text, or a terminal at which lines and Ctrl-D are typed."""

    def __init__(self) -> None:
        self._lines: list[str | BaseException] | None = None
        self.text: str | BaseException = ""

    def type(self, *lines: str | BaseException) -> None:
        self._lines = list(lines)

    def isatty(self) -> bool:
        return self._lines is not None

    def readline(self, size: int | None = -1) -> str:  # type: ignore[override]
        return f"{_given(self._lines.pop(0))}\n" if self._lines else ""

    def read(self, size: int | None = -1) -> str:
        return _given(self.text)


def _given(read: str | BaseException) -> str:
    if isinstance(read, BaseException):
        raise read
    return read


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Stdin:
    monkeypatch.setattr(sys, "stdin", stream := Stdin())
    return stream


def _refuse(*_: Any, **__: Any) -> None:
    pytest.fail("Ray is started")


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Ray as `folio serve` uses it, without processes. By default it must not be started."""
    import ray

    from folio.app.cli.start import lifetime

    stand_in = SimpleNamespace(init=_refuse, nodes=list, shutdown=lambda: None, util=ray.util)
    monkeypatch.setattr(lifetime, "ray", stand_in)
    return stand_in


@pytest.fixture
def served(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What `folio serve` starts and serves, without serving it: Ray's options, addresses, configurations and further
    arguments."""
    from folio.app.cli.start import lifetime

    noted = SimpleNamespace(starts=[], addresses=[], configs=[], more=[], gpus=None)

    def serve(config: Any, *_: Any, **more: Any) -> int:
        noted.configs.append(config)
        noted.more.append(more)
        return 0

    def reserve(*address: Any) -> Any:
        noted.addresses.append(address)
        return SimpleNamespace(close=lambda: None)

    cluster.init = lambda **options: noted.starts.append(options)
    monkeypatch.setattr(lifetime, "serve_until_signal", serve)
    monkeypatch.setattr(lifetime, "reserve_address", reserve)
    monkeypatch.setattr(lifetime, "unseen_gpus", lambda: noted.gpus)  # which asks torch where libcuda is found
    monkeypatch.setattr(lifetime, "Signals", lambda longest_s: None)
    monkeypatch.setattr(lifetime, "compile_kernels", lambda _: None)
    monkeypatch.setenv(haproxy.SWITCH, "0")
    return noted
