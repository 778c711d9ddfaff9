"""Configuration files for the command line."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml


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
