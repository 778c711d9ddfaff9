"""Building the application from its arguments: contradictions, resources, queue bounds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from folio.app import main
from folio.app.config.args import AppArgs, RoutingArgs, StreamingArgs
from folio.app.config.engine import EngineConfig
from folio.app.errors import ConfigError
from folio.app.main import bounded, build, max_ongoing_requests, most_seqs, replica_resources, served_shelf


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_memory_bytes": 1 << 20}, "leave one of them out"),
        ({"kv_memory_floor_bytes": 1 << 20}, "cannot be shared"),
        ({"tensor_parallel_size": 2}, "replicas of one rank"),
        ({"speculation": "draft", "draft_model": "builtin"}, "cannot be shared"),
    ],
)
def test_settings_that_exclude_sharing_a_device(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AppArgs(engine=EngineConfig(model="builtin", **settings), shared_kv_memory_bytes=1 << 20)


def test_shared_memory_is_positive() -> None:
    with pytest.raises(ValidationError, match="shared_kv_memory_bytes\n  Input should be greater than 0"):
        AppArgs(engine=EngineConfig(model="builtin"), shared_kv_memory_bytes=0)


def test_an_adapter_needs_a_name_of_its_own() -> None:
    engine = EngineConfig(model="builtin", adapters={"builtin": "somewhere"})
    with pytest.raises(ConfigError, match="also the name of an adapter"):
        AppArgs(engine=engine)


def test_aliases_stand_for_served_models() -> None:
    engine = EngineConfig(model="builtin", adapters={"pirate": "somewhere"})
    AppArgs(engine=engine, model_name="m", model_aliases={"claude-*": "m", "x": "pirate"})
    with pytest.raises(ConfigError, match=r"model_aliases\['x'\] is 'y', which is not served; .* one of m, pirate"):
        AppArgs(engine=engine, model_name="m", model_aliases={"x": "y"})
    with pytest.raises(ConfigError, match="has 'pirate', which is a served name itself"):
        AppArgs(engine=engine, model_name="m", model_aliases={"pirate": "m"})


def test_all_contradictions_are_reported_together() -> None:
    with pytest.raises(ConfigError) as caught:
        AppArgs(
            engine=EngineConfig(model="builtin", skip_tokenizer_init=True),
            routing=RoutingArgs(stale_after_s=1.0),
            streaming=StreamingArgs(min_interval_s=1.0),
        )
    keys = [line.split()[0] for line in str(caught.value).splitlines()]
    assert keys == ["engine.skip_tokenizer_init", "routing.stale_after_s", "streaming.min_interval_s"]


def test_ranks_keep_the_blocks_of_their_prompts() -> None:
    engine = EngineConfig(model="builtin", tensor_parallel_size=2)
    with pytest.raises(ConfigError, match=r"prefill_share is 0\.5 and engine\.tensor_parallel_size 2"):
        AppArgs(engine=engine, routing=RoutingArgs(prefill_share=0.5))


def test_a_model_that_cannot_be_loaded_is_not_deployed() -> None:
    """Regression: `serve deploy` started three replicas, which failed with a traceback each."""
    with pytest.raises(ConfigError, match="no such folder exists"):
        build(AppArgs(engine=EngineConfig(model="/no/such")))


def test_three_replicas_and_an_update_fit_two_cores() -> None:
    """Regression: each asked Ray for a core, so that the third, and the new one of an update, never got one."""
    asked = replica_resources(EngineConfig(model="builtin"))["ray_actor_options"]["num_cpus"]
    ingress = 0.1
    assert 4 * asked + 2 * ingress <= 2


def test_serve_does_not_log_requests_too() -> None:
    """Regression: one line by the ingress, one by Serve for it, and one more for the call of the replica."""
    application: Any = build(AppArgs(engine=EngineConfig(model="builtin")))
    ingress = application._bound_deployment
    replica = next(arg for arg in ingress.init_args if hasattr(arg, "_bound_deployment"))._bound_deployment
    for deployment in (ingress, replica):
        assert deployment._deployment_config.logging_config["enable_access_log"] is False


def test_the_shared_memory_is_the_ceiling_of_each_replica() -> None:
    args = AppArgs(engine=EngineConfig(model="builtin", speculation="ngram"), shared_kv_memory_bytes=1 << 20)
    assert served_shelf(args).first.engine.kv_memory_bytes == 1 << 20
    assert served_shelf(AppArgs(engine=EngineConfig(model="builtin"))).first.engine.kv_memory_bytes is None


def test_the_engines_queue_is_the_bound_not_serves() -> None:
    """Requests that wait in Serve would be neither counted nor refused."""
    default, small, none = (
        bounded(EngineConfig(model="builtin", max_num_seqs=8, **more))
        for more in ({}, {"max_queued_requests": 3}, {"max_queued_requests": None})
    )
    assert [config.max_queued_requests for config in (default, small, none)] == [32, 3, None]
    assert max_ongoing_requests(default) > 8 + 32 + 500
    assert max_ongoing_requests(none) > 10_000


@pytest.mark.parametrize(
    ("device", "gpus", "num_gpus", "num_seqs"),
    [
        ("auto", None, 0.0, 64),  # no cluster yet
        ("auto", 0, 0.0, 64),
        ("auto", 2, 1.0, 256),
        ("cpu", 2, 0.0, 64),
        ("cuda", 0, 1.0, 256),
    ],
)
def test_replicas_ask_for_gpus_that_the_cluster_has(
    device: str, gpus: int | None, num_gpus: float, num_seqs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    resources = {"CPU": 8.0} | ({"GPU": gpus} if gpus else {})
    cluster = SimpleNamespace(is_initialized=lambda: gpus is not None, cluster_resources=lambda: resources)
    monkeypatch.setattr(main, "ray", cluster)
    config = EngineConfig(model="builtin", device=device)
    assert replica_resources(config)["ray_actor_options"]["num_gpus"] == num_gpus
    assert most_seqs(config) == num_seqs
    assert bounded(config).max_queued_requests == 4 * num_seqs
    assert bounded(config).max_num_seqs is None  # the replica may be on the CPU nevertheless
    ranks = replica_resources(EngineConfig(model="builtin", device=device, tensor_parallel_size=2))
    assert [bundle.get("GPU", 0.0) for bundle in ranks["placement_group_bundles"]] == [num_gpus] * 2


def test_a_bound_of_the_queue_is_a_positive_number() -> None:
    with pytest.raises(ConfigError, match="max_queued_requests is 0"):
        EngineConfig(model="builtin", max_queued_requests=0)
    with pytest.raises(ConfigError, match="max_queued_requests is 'many'"):
        EngineConfig(model="builtin", max_queued_requests="many")  # type: ignore[arg-type]
