"""LoRA: adapters in one batch equal models with merged weights; loading, eviction, errors, and freed memory."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import re
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from folio.app.config.engine import EngineConfig
from folio.app.engine.async_engine import AsyncEngine
from folio.app.engine.engine import Engine
from folio.app.engine.lora.layers import LoRALayers, LoRALinear, adapter_batch
from folio.app.engine.lora.weights import LowRank, check_sources, read_config
from folio.app.engine.report import StepTimes
from folio.app.engine.request.request import Sequence
from folio.app.engine.speculation.ngram import NgramProposer
from folio.app.engine.step.token_selection import TokenSelection
from folio.app.errors import ConfigError, ModelError, UnknownModelError
from tests.app.engine.engines import BLOCK_BYTES, MakeEngine, answers, engine_of, folder_of, greedy, prompts, run, steps
from tests.app.engine.engines import tokens_of as tokens
from tests.app.engine.lora.adapters import Merged, make_adapter, write_adapter
from tests.app.engine.lora.conftest import Events
from tests.conftest import MakeCheckpoint

Adapters = dict[str, Path]
NUM_TOKENS = 8
GREEDY = greedy(NUM_TOKENS)
ATTENTION = r"(q|k|v|o)_proj$"
# Three adapters each: the layers, PEFT's settings, and the resulting scales.
TWO = {"": 2.0}
ADAPTERS: dict[str, list[tuple[str, dict[str, Any], dict[str, float]]]] = {
    "llama": [
        (r"layers.*_proj$", {"target_modules": "all-linear"}, TWO),
        (r"_proj$|lm_head", {"rank": 2, "use_rslora": True, "lora_alpha": 3}, {"": 3 / math.sqrt(2)}),
        (
            r"layers\.1\..*(gate|q)_proj$",
            {
                "target_modules": r".*layers\.1\..*(gate|q)_proj",
                "rank_pattern": {"q_proj": 6},
                "alpha_pattern": {"mlp.gate_proj": 2},
            },
            {"gate_proj": 0.5, "q_proj": 8 / 6},
        ),
    ],
    "qwen2": [(ATTENTION, {}, TWO), (r"(q|v)_proj$", {"rank": 1}, TWO), (r"up_proj$", {}, TWO)],
    "gpt2": [(r"c_attn$", {"fan_in_fan_out": True}, TWO), (r"c_(proj|fc)$", {}, TWO), (r"h\..*c_", {}, TWO)],
    "gemma2": [(r"_proj$", {"target_modules": "all-linear"}, TWO), (ATTENTION, {}, TWO), (r"mlp", {}, TWO)],
    "mixtral": [(ATTENTION, {}, TWO), (r"(q|v)_proj$", {}, TWO), (r"o_proj$", {"rank": 8}, TWO)],
}


def record_logits(engine: Engine) -> dict[str, list[torch.Tensor]]:
    """The logits of each request's sampled tokens, filled while the engine runs."""
    rows: dict[str, list[torch.Tensor]] = {}
    choose = engine.chooser.choose

    def note(selection: TokenSelection, logits: torch.Tensor) -> None:
        for sequence, row in selection.plain:
            rows.setdefault(sequence.request_id, []).append(logits[selection.where[row]].float())
        choose(selection, logits)

    engine.chooser.choose = note  # type: ignore[method-assign]
    return rows


@pytest.fixture
def three(tmp_path: Path, llama: Path) -> Adapters:
    """Three adapters of a small llama with different outputs."""
    folders = {name: tmp_path / name for name in "abc"}
    for seed, folder in enumerate(folders.values()):
        make_adapter(folder, llama, r"layers.*_proj$", seed=seed)
    return folders


@pytest.fixture
def expected(llama: Path, three: Adapters) -> Iterator[Any]:
    """(adapter, prompt) → what the merged model generates."""
    models: dict[str | None, Merged] = {}

    def generate(name: str | None, prompt: list[int], num_tokens: int = NUM_TOKENS) -> list[int]:
        if name not in models:
            models[name] = Merged(llama, three[name] if name else None)
        return models[name].generate(prompt, num_tokens)

    return generate


@pytest.mark.parametrize("name", ADAPTERS)
def test_one_batch_equals_merged_models(
    serve: MakeEngine, make_checkpoint: MakeCheckpoint, tmp_path: Path, name: str
) -> None:
    """Base and three adapters at once, prompts in chunks beside decodes, fused and packed layers."""
    model = folder_of(make_checkpoint, name)
    merged: dict[str | None, Merged] = {None: Merged(model)}
    for i, (pattern, settings, scales) in enumerate(ADAPTERS[name]):
        make_adapter(tmp_path / str(i), model, pattern, seed=i, **settings)
        merged[str(i)] = Merged(model, tmp_path / str(i), scales)
    engine = serve(model, {str(i): tmp_path / str(i) for i in range(3)}, max_num_batched_tokens=40)
    logits = record_logits(engine)
    jobs = {f"{key}-{n}": (key, prompt) for n, prompt in enumerate(prompts(33, 7)) for key in merged}
    for request_id, (key, prompt) in jobs.items():
        engine.submit(request_id, prompt, GREEDY, adapter=key)
    outputs = answers(engine)
    for request_id, (key, prompt) in jobs.items():
        wanted = merged[key].logits(prompt + outputs[request_id])[len(prompt) - 1 : -1]
        assert outputs[request_id] == wanted.argmax(-1).tolist(), request_id
        difference = (torch.stack(logits[request_id]) - wanted).abs().max() / wanted.abs().max()
        assert difference <= 1e-4, f"{request_id}: {difference}"
    firsts = torch.stack([rows[0] for rows in logits.values()])
    apart = torch.pdist(firsts, p=torch.inf).min()
    assert apart > 0.1, apart  # the adapters must differ


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("slots", [[0, 0, 1, -1], [1, 0, -1, 1], [-1, -1, -1, -1]])
def test_adjacent_and_separate_rows(slots: list[int], dtype: torch.dtype) -> None:
    """Sequences alone equal sequences in one batch, whether an adapter's rows are adjacent or not."""
    torch.manual_seed(0)
    model = Tiny().to(dtype)
    layers = LoRALayers(model)  # type: ignore[arg-type]
    for slot in range(2):
        shapes = {"inner": (12, 12), "head": (20, 12)}
        weights = {
            path: LowRank(torch.randn(2, columns, dtype=dtype), torch.randn(rows, 2, dtype=dtype))
            for path, (rows, columns) in shapes.items()
        }
        layers.insert(slot, layers.stack(weights))
    assert model.inner.weight.dtype == model.inner.bias.dtype == dtype  # for models that read them
    num_tokens = np.array([3, 1, 2, 4])
    sample_rows = num_tokens.cumsum() - 1
    x = torch.randn(1, 10, 12, dtype=dtype)
    with torch.inference_mode():
        layers.set_batch(adapter_batch(np.array(slots), num_tokens, sample_rows, torch.device("cpu")))
        together = model(x, sample_rows)
        apart, start = [], 0
        for slot, n in zip(slots, num_tokens.tolist(), strict=True):
            one = adapter_batch(np.array([slot]), np.array([n]), np.array([n - 1]), torch.device("cpu"))
            layers.set_batch(one)
            apart.append(model(x[:, start : start + n], np.array([n - 1])))
            start += n
        layers.set_batch(None)
        plain = model(x, sample_rows)
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(together, torch.cat(apart, dim=1), rtol=tolerance, atol=tolerance)
    changed = ((together - plain).abs().amax(-1) > tolerance)[0].tolist()
    assert changed == [slot >= 0 for slot in slots]


class Tiny(nn.Module):
    """Two linear layers, the second only for rows that sample."""

    def __init__(self) -> None:
        super().__init__()
        self.config = None
        self.inner, self.head = nn.Linear(12, 12), nn.Linear(12, 20)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, x: torch.Tensor, rows: np.ndarray[Any, Any]) -> torch.Tensor:
        out: torch.Tensor = self.head(self.inner(x)[:, rows])
        return out

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")


def test_the_least_recently_used_is_evicted_and_reloaded(
    serve: MakeEngine, llama: Path, three: Adapters, expected: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    [prompt] = prompts(20)
    engine = serve(llama, three, max_loaded_adapters=2)
    for name, kept in (("a", "a"), ("b", "ab"), ("a", "ab"), ("c", "ac"), ("b", "bc")):
        engine.submit("r", prompt, GREEDY, adapter=name)
        assert answers(engine)["r"] == expected(name, prompt)
        assert sorted(engine.adapters.slots) == list(kept)
    assert [sum(text in line for line in caplog.messages) for text in ("loaded adapter", "dropped adapter")] == [4, 2]


def test_requests_wait_while_all_slots_are_in_use(
    serve: MakeEngine, llama: Path, three: Adapters, expected: Any
) -> None:
    """With one slot adapters are loaded first come, first served, and requests without an adapter do not wait."""
    engine = serve(llama, three, max_loaded_adapters=1)
    jobs = [(name, prompt) for prompt in prompts(20, 9) for name in ("a", "b", None, "c")]
    for i, (name, prompt) in enumerate(jobs):
        engine.submit(str(i), prompt, GREEDY, adapter=name)
    outputs: dict[str, list[int]] = {}
    for delta in steps(engine):
        outputs.setdefault(delta.request_id, []).extend(tokens([delta]))
        assert len(engine.adapters.slots) <= 1
        if len(outputs) == 3:
            assert sorted(outputs) == ["0", "2", "6"]
            assert engine.load.report().num_waiting == 5
    assert [int(i) for i in outputs if jobs[int(i)][0]] == [0, 1, 3, 4, 5, 7]
    assert outputs == {str(i): expected(name, prompt) for i, (name, prompt) in enumerate(jobs)}


def test_only_requests_of_an_adapter_wait_for_its_file(
    serve: MakeEngine, llama: Path, three: Adapters, expected: Any, read_events: Events
) -> None:
    [prompt] = prompts(20)
    engine = serve(llama, three)
    engine.submit("b", prompt, GREEDY, adapter="b")
    run(engine)
    _, may_end = read_events
    may_end.clear()
    for name in ("a", "b", None):
        engine.submit(str(name), prompt, GREEDY, adapter=name)
    deltas = [delta for _ in range(NUM_TOKENS + 2) for delta in engine.step()]
    for name in ("b", None):
        assert tokens([delta for delta in deltas if delta.request_id == str(name)]) == expected(name, prompt)
    engine.submit("gone", prompt, GREEDY, adapter="c")
    engine.step()
    engine.cancel("gone")
    may_end.set()
    assert answers(engine) == {"a": expected("a", prompt)}


async def test_errors_in_the_async_engine(llama: Path, three: Adapters, expected: Any) -> None:
    """An unknown adapter is refused at once, and one that cannot be loaded fails its request."""
    [prompt] = prompts(20)
    (three["b"] / "adapter_config.json").write_text("{}")
    sources = {name: str(folder) for name, folder in three.items()}
    engine = AsyncEngine(
        EngineConfig(
            model=str(llama), adapters=sources, kv_memory_bytes=16 << 20, skip_tokenizer_init=True, num_threads=1
        )
    )

    async def generate(name: str) -> list[int]:
        return tokens([delta async for deltas in engine.generate(prompt, GREEDY, adapter=name) for delta in deltas])

    good, damaged, unknown = await asyncio.gather(*map(generate, "abd"), return_exceptions=True)
    assert good == expected("a", prompt)
    assert isinstance(damaged, ModelError)
    assert isinstance(unknown, UnknownModelError)
    assert engine.healthy
    engine.close()


def test_preempted_requests_keep_their_adapter(serve: MakeEngine, llama: Path, three: Adapters, expected: Any) -> None:
    """Too few blocks for all, and two slots for three adapters."""
    engine = serve(
        llama,
        three,
        max_loaded_adapters=2,
        kv_memory_bytes=7 * BLOCK_BYTES,
        max_model_len=60,
        max_num_batched_tokens=30,
    )
    jobs = list(zip("abacbc", prompts(44, 44, 44, 44, 44, 44), strict=True))  # of one length: in order of arrival
    # Loaded before the others arrive: else the requests of one could end before the other has been read.
    for name in "ab":
        engine.submit(name, [1], replace(GREEDY, max_tokens=1), adapter=name)
    assert run(engine).keys() == {"a", "b"}
    for i, (name, prompt) in enumerate(jobs):
        engine.submit(str(i), prompt, GREEDY, adapter=name)
    outputs = answers(engine)
    assert outputs == {str(i): expected(name, prompt) for i, (name, prompt) in enumerate(jobs)}
    assert sum(engine.load.take_activity().num_preempted.values())


def test_forks_have_their_adapter(serve: MakeEngine, llama: Path, three: Adapters, expected: Any) -> None:
    """Several outputs of a request, a fork of one that runs, and one of a request that has ended and whose adapter has
    been dropped since."""
    [prompt] = prompts(30)
    engine = serve(llama, three, max_loaded_adapters=1)
    engine.submit("r", prompt, replace(GREEDY, n=2), adapter="a")
    deltas = [delta for _ in range(4) for delta in engine.step()]
    engine.fork("r", "running", replace(GREEDY, max_tokens=2))
    for request_id, more in run(engine).items():
        deltas += [replace(delta, index=2) if request_id == "running" else delta for delta in more]
    outputs = [tokens([delta for delta in deltas if delta.index == i]) for i in range(3)]
    whole = expected("a", prompt)
    assert outputs[:2] == [whole, whole]
    assert outputs[2] in [whole[i : i + 2] for i in range(NUM_TOKENS)]
    engine.submit("other", prompt, GREEDY, adapter="b")
    run(engine)
    assert list(engine.adapters.slots) == ["b"]
    engine.fork("r", "ended", GREEDY, index=1)
    deltas = run(engine)["ended"]
    assert tokens(deltas) == expected("a", prompt + whole)
    assert deltas[0].num_cached_tokens == 32


def test_drafts_are_verified_with_the_adapter(
    serve: MakeEngine, llama: Path, three: Adapters, expected: Any, expect_steps: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of draft tokens have the sequence's adapter: the merged model's tokens are accepted, and no others.

    Regression: only the sequence without an adapter repeated itself and had drafts, and none when measured step times
    said that they do not pay."""
    jobs = {str(name): (name, prompt) for name, prompt in zip((*"abc", None), prompts(5, 6, 7, 5), strict=True)}
    wanted = {request_id: expected(name, prompt, 40) for request_id, (name, prompt) in jobs.items()}

    def all_but_the_last_right(_: NgramProposer, sequences: list[Sequence], most: list[int]) -> list[list[int]]:
        drafts = [wanted[s.request_id][s.num_output_tokens :][:count] for s, count in zip(sequences, most, strict=True)]
        return [[*draft[:-1], draft[-1] ^ 1] if draft else [] for draft in drafts]

    monkeypatch.setattr(NgramProposer, "propose", all_but_the_last_right)
    expect_steps(StepTimes(fixed_s=10.0))  # the longest drafts pay
    engine = serve(llama, three, speculation="ngram", max_draft_tokens=8)
    for request_id, (name, prompt) in jobs.items():
        engine.submit(request_id, prompt, replace(GREEDY, max_tokens=40), adapter=name)
    assert answers(engine) == wanted
    assert engine.speculation is not None
    counts = engine.speculation.counts
    assert counts.checks == 4 * 5  # of outputs of 1 + 8 + 8 + 8 + 8 + 6 + 1 tokens
    assert counts.accepted_tokens == counts.draft_tokens - counts.checks == 4 * (7 + 7 + 7 + 7 + 5)


def test_prefixes_are_not_shared_between_adapters(
    serve: MakeEngine, llama: Path, three: Adapters, expected: Any
) -> None:
    [prompt] = prompts(40)
    engine = serve(llama, three)
    for cached in (0, 32):
        for name in (None, "a", "b"):
            engine.submit("r", prompt, GREEDY, adapter=name)
            deltas = run(engine)["r"]
            assert tokens(deltas) == expected(name, prompt)
            assert deltas[0].num_cached_tokens == cached


def test_all_memory_is_freed_under_load(llama: Path, three: Adapters) -> None:
    """Requests begin and are cancelled at any time, also while their adapter is being read."""
    generator = np.random.default_rng(4)
    engine = engine_of(llama, adapters={name: str(folder) for name, folder in three.items()}, max_loaded_adapters=2)
    lengths = generator.integers(5, 60, 25).tolist()
    for i, prompt in enumerate(prompts(*lengths)):
        engine.submit(str(i), prompt, GREEDY, adapter=[None, *"abc"][generator.integers(4)])
        if i % 3 == 0:
            engine.cancel(str(generator.integers(i + 1)))
        for delta in engine.step() if i % 2 else ():
            assert delta.error is None
        assert len(engine.adapters.slots) <= 2
    for deltas in run(engine).values():
        tokens(deltas)
    linears = [module for module in engine.model.module.modules() if isinstance(module, LoRALinear)]
    assert max(len(linear.updates) for linear in linears) == 2
    weights = [weakref.ref(update.down) for linear in linears for update in linear.updates.values()]
    engine.close()
    gc.collect()
    assert weights
    assert not any(weight() is not None for weight in weights)


def test_a_damaged_adapter_fails_its_requests_only(
    serve: MakeEngine, llama: Path, three: Adapters, expected: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The next request for the adapter tries again."""
    [prompt] = prompts(12)
    weights = three["b"] / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:1000])
    engine = serve(llama, three, max_loaded_adapters=1)
    for i, name in enumerate(("b", "a", "b", None)):
        engine.submit(str(i), prompt, GREEDY, adapter=name)
    outputs = run(engine)
    for i in (0, 2):
        [delta] = outputs[str(i)]
        assert isinstance(delta.error, ModelError)
        assert "cannot read" in str(delta.error)
    assert tokens(outputs["1"]) == expected("a", prompt)
    assert tokens(outputs["3"]) == expected(None, prompt)
    assert caplog.text.count("cannot read") == 1  # failed requests cause no further read
    weights.write_bytes(whole)
    engine = serve(llama, three, max_loaded_adapters=1)
    engine.submit("0", prompt, GREEDY, adapter="b")
    assert answers(engine)["0"] == expected("b", prompt)
    make_adapter(three["b"], llama, r"q_proj$", seed=5)  # another adapter in the same folder
    for name in ("a", "b"):
        engine.submit(name, prompt, GREEDY, adapter=name)
    outputs = run(engine)
    assert tokens(outputs["a"]) == expected("a", prompt)
    assert "has changed since" in str(outputs["b"][0].error)


UP = "base_model.model.model.layers.0.mlp.up_proj"
WRONG: dict[str, tuple[dict[str, tuple[int, ...]], dict[str, Any], str]] = {
    "dora": ({}, {"use_dora": True}, "use_dora=True"),
    "saved modules": ({}, {"modules_to_save": ["lm_head"]}, "modules_to_save"),
    "bias": ({}, {"bias": "all"}, "bias='all'"),
    "parameters": ({}, {"target_parameters": ["experts.gate_up_proj"]}, "target_parameters"),
    "changed base": ({}, {"init_lora_weights": "pissa_niter_4"}, "pissa_niter_4"),
    "new": ({}, {"use_something_new": {"a": 1}}, "use_something_new"),
    "kind": ({}, {"peft_type": "LOHA"}, "'LOHA'"),
    "rank": ({}, {"r": 0, "lora_alpha": 1}, "a rank is 0"),
    "no rank": ({}, {"r": None}, "is damaged"),
    "pattern": ({}, {"target_modules": "(up"}, "is damaged"),
    "other rank": ({}, {"r": 8}, "does not fit"),
    "other size": ({f"{UP}.lora_A.weight": (4, 32)}, {}, "made for another"),
    "missing layer": ({}, {"target_modules": ["up_proj", "q_proj"]}, "layers.0.self_attn.q_proj needs"),
    "one side": ({f"{UP}.lora_A.weight": ()}, {}, "does not fit"),
    "no layer": ({"base_model.model.model.layers.9.mlp.up_proj.lora_A.weight": (4, 64)}, {}, "layers.9.mlp.up_proj"),
    "embedding": ({"base_model.model.model.embed_tokens.lora_embedding_A": (4, 512)}, {}, "embed_tokens"),
    "magnitude": ({f"{UP}.lora_magnitude_vector": (96,)}, {}, "lora_magnitude_vector"),
}


def test_unsupported_settings_are_named(serve: MakeEngine, llama: Path, tmp_path: Path) -> None:
    for name, (tensors, settings, _) in WRONG.items():
        weights = make_adapter(tmp_path / name, llama, r"up_proj$")
        for key, shape in tensors.items():
            weights[key] = torch.zeros(shape)
            if not shape:
                del weights[key]
        write_adapter(tmp_path / name, weights, **{"r": 4, "lora_alpha": 8, "target_modules": ["up_proj"]} | settings)
    engine = serve(llama, {name: tmp_path / name for name in WRONG}, max_loaded_adapters=1)
    for name in WRONG:
        engine.submit(name, [1, 2, 3], GREEDY, adapter=name)
    deltas = run(engine)
    for name, (_, _, message) in WRONG.items():
        [delta] = deltas[name]
        assert isinstance(delta.error, ModelError), name
        assert message in str(delta.error), f"{name}: {delta.error}"
    assert not engine.adapters.slots


def test_a_config_that_is_no_object_is_refused(tmp_path: Path) -> None:
    """Regression: of the JSON string "LORA", the settings were read."""
    for text in ("LORA", ["LORA"], 1):
        (tmp_path / "adapter_config.json").write_text(json.dumps(text))
        with pytest.raises(ModelError, match="only LORA is supported"):
            read_config("a", tmp_path)


@pytest.mark.parametrize(("name", "refused"), [("mixtral", r"experts|gate"), ("lfm2", r"\.conv\.")])
def test_experts_and_mixers_are_no_targets(
    serve: MakeEngine, llama: Path, make_checkpoint: MakeCheckpoint, tmp_path: Path, name: str, refused: str
) -> None:
    """They compute tokens in another order."""
    make_adapter(tmp_path / "a", llama, "q_proj")
    engine = serve(folder_of(make_checkpoint, name), {"a": tmp_path / "a"})
    assert engine.model.adapters is not None
    paths = " ".join(engine.model.adapters.shapes)
    assert "self_attn.q_proj" in paths
    assert "lm_head" in paths
    assert re.search(refused, paths) is None


def test_names_are_checked_before_anything_is_loaded(
    serve: MakeEngine, llama: Path, three: Adapters, tmp_path: Path
) -> None:
    check_sources({"hub": "owner/name", "here": str(three["a"])})
    for source, message in ((tmp_path / "typo", "neither a folder"), (tmp_path, "no adapter_config.json")):
        with pytest.raises(ConfigError, match=message):
            serve(llama, {"a": source})
    with pytest.raises(ConfigError, match="empty name"):
        check_sources({"": str(three["a"])})
    engine = serve(llama, three)
    with pytest.raises(UnknownModelError, match="has a, b, c"):
        engine.submit("r", [1], GREEDY, adapter="d")
    assert not engine.has_work


def test_without_adapters_the_model_is_as_it_was(serve: MakeEngine, llama: Path) -> None:
    engine = serve(llama, {})
    assert not any(isinstance(module, LoRALinear) for module in engine.model.module.modules())
    with pytest.raises(UnknownModelError, match="has none"):
        engine.submit("r", [1], GREEDY, adapter="a")
