"""Blocks of README.md and docs/ that call a server run, in order, against one with the built-in model."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray import serve

from folio.app.config.engine import EngineConfig
from folio.app.main import AppArgs, build
from tests.docs.blocks import ROOT, valid_pages
from tests.e2e.conftest import deleted_at_the_end
from tests.e2e.pages import Runner, needs_server


@pytest.fixture(scope="module")
def runner(cluster_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    folder = tmp_path_factory.mktemp("docs")
    shutil.copy(ROOT / "serve_config.yaml", folder)
    engine = EngineConfig(model="builtin", kv_memory_bytes=256 << 20)
    with deleted_at_the_end("folio"):
        serve.run(build(AppArgs(engine=engine)), name="folio", route_prefix="/")
        variables = {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
        runner = Runner(cluster_url.removeprefix("http://"), variables, Path(folder))
        yield runner
        runner.close()


@pytest.mark.parametrize("page", [page for page, blocks in valid_pages() if needs_server(blocks)])
def test_page(runner: Runner, page: str) -> None:
    runner.run_page(page)
