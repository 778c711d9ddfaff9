"""What the application makes of its arguments before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from app.config import EngineConfig
from app.errors import ConfigError
from app.main import AppArgs, bounded, build, max_ongoing_requests, shared_engine


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


def test_the_engines_queue_is_the_bound_and_never_serve() -> None:
    """A request that Serve held back would be counted by nobody, and never be refused."""
    default, small, none = (
        bounded(EngineConfig(model="builtin", max_num_seqs=8, **more))
        for more in ({}, {"max_queued_requests": 3}, {"max_queued_requests": None})
    )
    assert [config.max_queued_requests for config in (default, small, none)] == [32, 3, None]
    assert max_ongoing_requests(default) > 8 + 32 + 500
    assert max_ongoing_requests(none) > 10_000


def test_a_bound_of_the_queue_is_a_positive_number() -> None:
    with pytest.raises(ConfigError, match="max_queued_requests is 0"):
        EngineConfig(model="builtin", max_queued_requests=0)
    with pytest.raises(ConfigError, match="max_queued_requests is 'many'"):
        EngineConfig(model="builtin", max_queued_requests="many")  # type: ignore[arg-type]


def test_only_steps_on_a_cpu_can_yield_it() -> None:
    with pytest.raises(ConfigError, match="yield_cpu is for engines that compute on the CPU"):
        EngineConfig(model="builtin", device="cuda", yield_cpu=True)
