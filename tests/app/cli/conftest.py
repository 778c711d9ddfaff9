"""Configuration files for the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., str]:
    """Write a file for a Folio application, with these engine settings and HTTP options of Serve."""

    def write(engine: dict[str, Any], **http: Any) -> str:
        args = {"engine": {"model": "builtin"} | engine}
        application = {"name": "folio", "import_path": "app.main:build", "args": args}
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump({"http_options": http, "applications": [application]}))
        return str(path)

    return write
