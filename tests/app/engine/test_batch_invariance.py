"""In bfloat16 a request has the same tokens alone and in a batch, and goes on with the same ones elsewhere, where its
tokens are part of the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from folio.app.engine import SamplingParams
from folio.app.engine.engine import Engine
from folio.app.engine.ranks import executor
from folio.app.engine.request.engine_request import BegunOutput
from folio.app.errors import ConfigError
from folio.kernels import CpuLinear, select_provider
from tests.app.engine.engines import MakeEngine, answers, greedy, prompts
from tests.app.engine.tensor_parallel.thread_ranks import thread_ranks
from tests.conftest import MakeCheckpoint

# (model, settings): each kind of weight, cache and step.
CASES: list[tuple[str, dict[str, Any]]] = [
    ("builtin", {}),
    ("builtin", {"quantization": "int4", "max_num_batched_tokens": 16}),
    ("builtin", {"quantization": "int8", "prefix_cache": False}),
    ("builtin", {"kv_dtype": "int8", "speculation": "ngram", "async_scheduling": "on"}),
    ("gemma3", {"max_num_batched_tokens": 32}),  # windows
    ("gpt2", {"kv_view": "block_table"}),  # nothing is fused
    ("starcoder2", {}),  # activations by row
    ("llama", {"tensor_parallel_size": 2}),
]
NEW_TOKENS = 12
SEEDED = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.8, seed=3, ignore_eos=True)
WAYS = (greedy(NEW_TOKENS), greedy(NEW_TOKENS), SEEDED, replace(SEEDED, top_p=0.8, seed=4))


@pytest.fixture(autouse=True)
def _has_kernels() -> None:

    if reason := CpuLinear().unsupported(torch.bfloat16):
        pytest.skip(reason)


def go_on(engine: Engine, name: str, prompt: Sequence[int], params: SamplingParams, before: Sequence[int]) -> None:
    """Submit a request that has had these tokens elsewhere."""
    engine.submit(name, prompt, params, begun=(BegunOutput(0, before),) if before else ())


@pytest.mark.parametrize(("model", "settings"), CASES, ids=str)
def test_equal_tokens(
    model: str, settings: dict[str, Any], make_engine: MakeEngine, checkpoint: MakeCheckpoint
) -> None:
    folder = model if model == "builtin" else checkpoint(model)
    engine = make_engine(folder, thread_ranks, dtype="bfloat16", batch_invariant=True, **settings)
    asked = {
        f"{i}": (prompt, params) for i, (prompt, params) in enumerate(zip(prompts(3, 90, 20, 61), WAYS, strict=True))
    }
    alone: dict[str, list[int]] = {}
    for name, (prompt, params) in asked.items():
        go_on(engine, name, prompt, params, [])
        alone |= answers(engine)
    for name, (prompt, params) in asked.items():
        go_on(engine, name, prompt, params, [])
    assert answers(engine) == alone
    for cut in range(1, NEW_TOKENS):
        for name, (prompt, params) in asked.items():
            go_on(engine, name, prompt, params, alone[name][:cut])
        assert answers(engine) == {name: tokens[cut:] for name, tokens in alone.items()}, f"after {cut} tokens"


def test_a_setting_that_has_no_effect_is_noticed(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that sum in another order in decodes do not get past the self-test."""
    monkeypatch.setattr(executor, "select_provider", lambda *args, **_: select_provider(*args))
    make_engine("builtin", dtype="float32")
    with pytest.raises(ConfigError, match=r"batch_invariant is true, but .* tokens of .* have other logits"):
        make_engine("builtin", dtype="float32", batch_invariant=True)


@pytest.mark.parametrize(
    ("model", "settings", "reason"),
    [
        ("mixtral", {}, "torch computes .*linear.* in mixtral"),
        ("qwen3_next", {}, "2 layers are recurrent"),
        ("builtin", {"dtype": "float16"}, "torch computes linear in"),  # oneDNN does
        ("builtin", {"kv_dtype": "fp8_e4m3"}, "no attention provider supports this call"),
    ],
)
def test_what_cannot_be_is_refused(model: str, settings: dict[str, Any], reason: str, make_engine: MakeEngine) -> None:
    with pytest.raises(ConfigError, match=reason):
        make_engine(model, batch_invariant=True, **settings)


@pytest.mark.usefixtures("without_compiler")
def test_without_a_compiler_it_is_refused(make_engine: MakeEngine) -> None:
    with pytest.raises(ConfigError, match="no attention provider for cpu is available"):
        make_engine("builtin", batch_invariant=True)
