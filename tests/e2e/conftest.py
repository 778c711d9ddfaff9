"""Applications on the tests' Ray cluster (`cluster_url`). A start takes 10 to 20 s."""

from __future__ import annotations

from typing import Any

import pytest

from folio.app.config.args import AppArgs
from folio.app.config.engine import EngineConfig
from tests.cluster import Front


@pytest.fixture(scope="module")
def folio(front: Front) -> Any:
    """A handle of the ingress of an application with the built-in model at `/`, which several files share."""
    engine = EngineConfig(
        model="builtin", kv_memory_bytes=256 << 20, max_num_batched_tokens=512, prefix_cache_release_s=3.0
    )
    return front.run(AppArgs(engine=engine))
