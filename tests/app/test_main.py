"""What the application makes of its arguments before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from app.config import EngineConfig
from app.errors import ConfigError
from app.main import AppArgs, build, shared_engine


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"kv_memory_bytes": 1 << 20}, "leave one of them out"),
        ({"kv_memory_floor_bytes": 1 << 20}, "cannot lend"),
        ({"tensor_parallel_size": 2}, "replicas of one rank"),
        ({"speculation": "draft", "draft_model": "builtin"}, "lent to nobody"),
    ],
)
def test_what_cannot_share_a_device(settings: dict[str, Any], said: str) -> None:
    args = AppArgs(engine=EngineConfig(model="builtin", **settings), shared_kv_memory_bytes=1 << 20)
    with pytest.raises(ConfigError, match=said):
        shared_engine(args)


def test_an_adapter_needs_a_name_of_its_own() -> None:
    engine = EngineConfig(model="builtin", adapters={"builtin": "somewhere"})
    with pytest.raises(ConfigError, match="tell them apart"):
        build(AppArgs(engine=engine))


def test_what_is_shared_is_the_ceiling_of_each() -> None:
    args = AppArgs(engine=EngineConfig(model="builtin", speculation="ngram"), shared_kv_memory_bytes=1 << 20)
    assert shared_engine(args).kv_memory_bytes == 1 << 20
    assert shared_engine(AppArgs(engine=EngineConfig(model="builtin"))).kv_memory_bytes is None
