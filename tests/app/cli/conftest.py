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
import ray
import yaml

from folio.app.cli.start import lifetime
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
    """Standard input: lines typed at a terminal and then Ctrl-D, or what a pipe gives. Errors are raised."""

    def type(self, *lines: str | BaseException) -> None:
        self._is_terminal, self._given = True, [f"{line}\n" if isinstance(line, str) else line for line in lines]

    def pipe(self, given: str | BaseException) -> None:
        self._is_terminal, self._given = False, [given]

    def isatty(self) -> bool:
        return self._is_terminal

    def readline(self, size: int | None = -1) -> str:  # type: ignore[override]
        given = self._given.pop(0) if self._given else ""
        if isinstance(given, BaseException):
            raise given
        return given

    read = readline


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Stdin:
    monkeypatch.setattr(sys, "stdin", stream := Stdin())
    return stream


def _refuse(*_: Any, **__: Any) -> None:
    pytest.fail("Ray is started")


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Ray as `folio serve` uses it, without processes. By default it must not be started."""
    stand_in = SimpleNamespace(init=_refuse, nodes=list, shutdown=lambda: None, util=ray.util)
    monkeypatch.setattr(lifetime, "ray", stand_in)
    return stand_in


@pytest.fixture
def served(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What `folio serve` would start and serve: Ray's options, addresses, and configurations with further arguments."""
    noted = SimpleNamespace(starts=[], addresses=[], configs=[], gpus=None)
    cluster.init = lambda **options: noted.starts.append(options)
    note = noted.configs.append
    monkeypatch.setattr(lifetime, "serve_until_signal", lambda config, *_, **more: note((config, more)) or 0)
    monkeypatch.setattr(lifetime, "reserve_address", lambda *address: noted.addresses.append(address))
    monkeypatch.setattr(lifetime, "unseen_gpus", lambda: noted.gpus)  # which asks torch where libcuda is found
    monkeypatch.setattr(lifetime, "Signals", lambda longest_s: None)
    monkeypatch.setattr(lifetime, "compile_kernels", lambda _: None)
    monkeypatch.setenv(haproxy.SWITCH, "0")
    return noted
