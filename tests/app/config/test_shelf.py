"""Settings of a shelf: bounds, and contradictions between its models."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from folio.app.config.args import AppArgs
from folio.app.config.engine import EngineConfig
from folio.app.config.shelf import SLO, ModelConfig
from folio.app.errors import ConfigError

GIB = 1 << 30


def a_model(name: str = "m", **settings: Any) -> dict[str, Any]:
    return {"name": name, "engine": {"model": "builtin"}} | settings


def args(*models: dict[str, Any], **settings: Any) -> AppArgs:
    return AppArgs.model_validate({"models": list(models), "device_memory_bytes": GIB} | settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": ""}, "name is ''"),
        ({"name": " m"}, "name is ' m'"),
        ({"name": "a\nb"}, r"name is 'a\\nb'"),
        ({"keep": -1}, "keep is -1; it must be at least 0"),
        ({"keep": float("nan")}, "keep is nan"),
        (
            {"keep": float("inf")},
            "keep is inf; it must be at least 0 and finite; to keep a model for ever, use 'always'",
        ),
        ({"keep": "never"}, "keep is 'never'; it must be 'auto', 'always' or seconds"),
        # The thread of all models ended: a quantum of such a weight is 0.
        ({"weight": 1e-320}, "weight is 1e-320; it must be from 0.001 to 1000"),
        ({"weight": 1e308}, "weight is 1e[+]308"),
        ({"weight": float("nan")}, "weight is nan"),
    ],
)
def test_bounds(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        ModelConfig(**({"name": "m", "engine": EngineConfig(model="builtin")} | settings))


def test_targets_are_above_zero() -> None:
    with pytest.raises(ConfigError) as caught:
        SLO(ttft_s=0, tpot_s=float("nan"))
    assert [line.split()[0] for line in str(caught.value).splitlines()] == ["ttft_s", "tpot_s"]


def test_keep_in_yaml_is_a_word_or_seconds() -> None:
    adapter = TypeAdapter(ModelConfig)
    assert [adapter.validate_python(a_model(keep=keep)).keep for keep in ("auto", "always", 30, 0.5)] == [
        "auto",
        "always",
        30,
        0.5,
    ]
    with pytest.raises(ValidationError, match="slow"):
        adapter.validate_python(a_model(slow=True))
    assert adapter.validate_python(a_model(slo={"ttft_s": 2.0})).slo == SLO(ttft_s=2.0)


def test_a_single_engine_is_a_shelf_of_one_that_never_sleeps() -> None:
    engine = EngineConfig(model="builtin", max_num_seqs=3)
    [model] = AppArgs(engine=engine, model_name="m", tool_call_parser="hermes", reasoning_parser="qwen3").shelf.models
    assert model == ModelConfig(
        name="m", engine=engine, keep="always", tool_call_parser="hermes", reasoning_parser="qwen3"
    )
    [model] = AppArgs(engine=EngineConfig(model="Qwen/Qwen2.5-0.5B")).shelf.models
    assert model.name == "Qwen2.5-0.5B"


def test_either_an_engine_or_models() -> None:
    for value in ({}, {"models": []}):
        with pytest.raises(ConfigError, match=r"^engine is missing"):
            AppArgs.model_validate(value)
    with pytest.raises(ConfigError, match=r"^engine and models are both set"):
        args(a_model(), engine={"model": "builtin"})


def test_every_contradiction_of_models_has_a_line_that_begins_with_the_key() -> None:
    engine = {"model": "builtin", "adapters": {"a": "x/a"}}
    with pytest.raises(ConfigError) as caught:
        args(
            a_model("m", engine=engine),
            a_model("m", engine=engine | {"tensor_parallel_size": 2, "kv_memory_floor_bytes": 1}),
            a_model("a", engine={"model": "builtin", "device": "cuda", "isolate_tenants": False}),
            a_model("n", engine={"model": "builtin", "skip_tokenizer_init": True}),
            device_memory_bytes=None,
            shared_kv_memory_bytes=GIB,
            model_name="m",
            tool_call_parser="hermes",
            model_aliases={"x": "y"},
        )
    assert [line.split()[0] for line in str(caught.value).splitlines()] == [
        "model_aliases['x']",
        "models[1].name",
        "models[1].engine.adapters.a",
        "models[1].engine.tensor_parallel_size",
        "models[1].engine.kv_memory_floor_bytes",
        "models[2].name",
        "models[2].engine.device",
        "models[2].engine.isolate_tenants",
        "models[3].engine.skip_tokenizer_init",
        "device_memory_bytes",
        "shared_kv_memory_bytes",
        "model_name",
        "tool_call_parser",
    ]


def test_settings_of_a_shelf_beside_a_single_engine() -> None:
    for setting in (
        {"device_memory_bytes": GIB},
        {"host_memory_bytes": 0},
        {"weights_dir": "/w"},
        {"weights_dir_bytes": 1},
        {"models_dir": "/m"},
    ):
        with pytest.raises(ConfigError, match=f"^{next(iter(setting))} is .*it is for models"):
            AppArgs.model_validate({"engine": {"model": "builtin"}} | setting)


def test_aliases_name_any_model_or_adapter_and_what_may_be_added() -> None:
    two = (a_model("m"), a_model("n", engine={"model": "builtin", "adapters": {"a": "x/a"}}))
    args(*two, model_aliases={"x": "m", "y": "n", "z": "a"})
    with pytest.raises(ConfigError, match="one of m, n, a"):
        args(*two, model_aliases={"x": "later"})
    args(*two, model_aliases={"x": "later"}, models_dir="/models")
