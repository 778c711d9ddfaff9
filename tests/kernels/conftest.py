"""Fixtures for the tests of kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from folio.kernels.cpu import build


@pytest.fixture
def uncached_libraries() -> Iterator[None]:
    """Load C++ libraries anew in this test, and again after it."""
    build.load_library.cache_clear()
    yield
    build.load_library.cache_clear()


UseCompiler = Callable[[str | None], None]


@pytest.fixture
def use_compiler(uncached_libraries: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> UseCompiler:
    """`use_compiler(script)`: the only C++ compiler is this shell script, with its output's path as `$last`; `None`:
    there is none."""

    def use(script: str | None) -> None:
        folder = tmp_path / "bin"
        folder.mkdir()
        monkeypatch.setenv("PATH", str(folder))
        if script is not None:
            (folder / "g++").write_text(f'#!/bin/sh\nfor last; do :; done\n[ "$last" = --version ] && exit\n{script}\n')
            (folder / "g++").chmod(0o755)

    return use
