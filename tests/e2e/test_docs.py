"""Blocks of README.md and docs/ that call a server run, in order, against one with the built-in model."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from tests.docs.blocks import ROOT, valid_pages
from tests.e2e.pages import Runner, needs_server


@pytest.fixture(scope="module")
def runner(cluster_url: str, folio: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    folder = tmp_path_factory.mktemp("docs")
    shutil.copy(ROOT / "serve_config.yaml", folder)
    variables = {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    runner = Runner(cluster_url.removeprefix("http://"), variables, Path(folder))
    yield runner
    runner.close()


def pages() -> list[Any]:
    """Each day the README, and a third of the others."""
    found = [page for page, blocks in valid_pages() if needs_server(blocks)]
    return [page if page == "README.md" else pytest.param(page, marks=pytest.mark.thirds) for page in found]


@pytest.mark.parametrize("page", pages())
def test_page(runner: Runner, page: str) -> None:
    runner.run_page(page)
