"""Blocks of docs/ that call a server run, in order, against one with the built-in model; those of `FIRST_PAGES` in
`test_lifetime.py`."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from tests.docs.blocks import ROOT, valid_pages
from tests.e2e.pages import FIRST_PAGES, Runner, needs_server


@pytest.fixture(scope="module")
def runner(cluster_url: str, folio: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    folder = tmp_path_factory.mktemp("docs")
    shutil.copy(ROOT / "serve_config.yaml", folder)
    variables = {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    runner = Runner(cluster_url.removeprefix("http://"), variables, Path(folder))
    yield runner
    runner.close()


@pytest.mark.thirds
@pytest.mark.parametrize("page", [p for p, blocks in valid_pages() if needs_server(blocks) and p not in FIRST_PAGES])
def test_page(runner: Runner, page: str) -> None:
    runner.run_page(page)
