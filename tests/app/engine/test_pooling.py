"""Embeddings and scores of prompts, compared with transformers' own hidden states."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from folio.app.config.engine import EngineConfig
from folio.app.engine.async_engine import AsyncEngine
from folio.app.engine.engine import Engine
from folio.app.engine.llm import LLM
from folio.app.engine.ranks.processes import Launch, spawn_ranks
from folio.app.engine.request.delta import Delta
from folio.app.engine.request.faults import FAILED
from folio.app.engine.request.pooled import PooledPrompt, PoolingParams
from folio.app.engine.sampling.params import SamplingParams
from folio.app.errors import ConfigError, ContextLengthError, EngineError, ModelError, RequestError
from tests.app.small_tokenizers import byte_level
from tests.conftest import ARCHITECTURES, HYBRIDS, SMALL, MakeCheckpoint, tokens

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
ONE = SamplingParams(max_tokens=1)
EMBED = PoolingParams()
# Largest difference of a component of a vector of length 1: float32, other kernels, sums in another order.
TOLERANCE = 2e-5
BLOCK_BYTES = 16 * 768
LENGTHS = (1, 7, 33, 90, 150)


def checkpoint(make_checkpoint: MakeCheckpoint, name: str = "llama") -> Path:
    return make_checkpoint(ARCHITECTURES[name][0], **ARCHITECTURES[name][1])


def make_engine(folder: Path, launch: Launch = spawn_ranks, **settings: Any) -> Engine:
    defaults = {"kv_memory_bytes": 16 << 20, "skip_tokenizer_init": True, "max_num_seqs": 8, "pooling": "last"}
    return Engine(EngineConfig(model=str(folder), **(defaults | settings)), launch)


def run(engine: Engine) -> dict[str, list[Delta]]:
    deltas: dict[str, list[Delta]] = {}
    while engine.has_work:
        for delta in engine.step():
            deltas.setdefault(delta.request_id, []).append(delta)
        engine.check_integrity()
    return deltas


def vector(deltas: list[Delta]) -> np.ndarray[Any, Any]:
    [delta] = deltas
    assert delta.error is None
    assert delta.pooled is not None
    return np.frombuffer(delta.pooled, "<f4")


def embed(engine: Engine, prompts: list[list[int]], params: PoolingParams = EMBED, **options: Any) -> list[Any]:
    for i, prompt in enumerate(prompts):
        engine.submit(f"embed {i}", prompt, ONE, pooling=params, **options)
    deltas = run(engine)
    return [vector(deltas[f"embed {i}"]) for i in range(len(prompts))]


def hidden(folder: Path, prompt: list[int]) -> np.ndarray[Any, Any]:
    """`[num_tokens, hidden_size]` by transformers."""
    model = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        states: torch.Tensor = model(torch.tensor([prompt])).last_hidden_state[0]
    return states.double().numpy()


def unit(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return values / np.linalg.norm(values)


def expected(folder: Path, prompt: list[int], method: str) -> np.ndarray[Any, Any]:
    states = hidden(folder, prompt)
    return unit(states[-1] if method == "last" else states.mean(0))


def assert_close(actual: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any], tolerance: float = TOLERANCE) -> None:
    assert actual.shape == wanted.shape
    difference = float(np.abs(actual - wanted).max())
    assert difference <= tolerance, difference


@pytest.mark.thirds
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "opt", "gpt2", "gpt_oss"])
@pytest.mark.parametrize("method", ["last", "mean"])
def test_embeddings_are_those_of_transformers(make_checkpoint: MakeCheckpoint, name: str, method: str) -> None:
    """Prompts of one and of several chunks, packed into common steps."""
    folder = checkpoint(make_checkpoint, name)
    engine = make_engine(folder, pooling=method, max_num_batched_tokens=48)
    prompts = [tokens(length, seed) for seed, length in enumerate(LENGTHS)]
    for prompt, actual in zip(prompts, embed(engine, prompts), strict=True):
        assert_close(actual, expected(folder, prompt, method))
    engine.close()


@pytest.mark.parametrize("method", ["last", "mean"])
def test_recurrent_states(make_checkpoint: MakeCheckpoint, method: str) -> None:
    folder = make_checkpoint("lfm2", **HYBRIDS["lfm2"])
    engine = make_engine(folder, pooling=method, max_num_batched_tokens=48)
    prompt = tokens(100)
    for _ in range(2):
        [actual] = embed(engine, [prompt])
        assert_close(actual, expected(folder, prompt, method))
    engine.close()


@pytest.mark.parametrize("method", ["last", "mean"])
@pytest.mark.parametrize("budget", [16, 64, 1024])
def test_beside_generating_requests(make_checkpoint: MakeCheckpoint, method: str, budget: int) -> None:
    """Neither kind of request changes the other's results."""
    folder = checkpoint(make_checkpoint)
    engine = make_engine(folder, pooling=method, max_num_batched_tokens=budget)
    outputs = []
    for pooled in (False, True):
        for i in range(3):
            engine.submit(f"text {i}", tokens(20 + 30 * i, 50 + i), GREEDY, cache_salt=str(pooled))
            if pooled:
                engine.submit(f"embed {i}", tokens(60 + 9 * i, 60 + i), ONE, pooling=EMBED)
        deltas = run(engine)
        outputs.append([[t for d in deltas[f"text {i}"] for t in d.token_ids] for i in range(3)])
    assert outputs[0] == outputs[1]
    for i in range(3):
        assert_close(vector(deltas[f"embed {i}"]), expected(folder, tokens(60 + 9 * i, 60 + i), method))
    engine.close()


def test_prefixes_are_shared_with_generating_requests(make_checkpoint: MakeCheckpoint) -> None:
    """Pooling the last token reads the cache; the mean computes every token, and leaves it in the cache."""
    folder = checkpoint(make_checkpoint)
    prompt = tokens(200)
    for method, num_cached in (("last", 199), ("mean", 0)):
        engine = make_engine(folder, pooling=method)
        engine.submit("text", prompt, GREEDY)
        run(engine)
        engine.submit("embed", prompt, ONE, pooling=EMBED)
        deltas = run(engine)["embed"]
        assert deltas[0].num_cached_tokens == num_cached
        assert_close(vector(deltas), expected(folder, prompt, method))
        engine.submit("again", prompt, GREEDY)
        assert run(engine)["again"][0].num_cached_tokens >= 192
        engine.close()


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
@pytest.mark.parametrize("method", ["last", "mean"])
def test_preempted_prompts_count_no_token_twice(make_checkpoint: MakeCheckpoint, method: str, preemption: str) -> None:
    folder = checkpoint(make_checkpoint)
    engine = make_engine(folder, pooling=method, preemption=preemption, max_num_batched_tokens=32)
    prompt = tokens(150, 3)
    engine.submit("embed", prompt, ONE, pooling=EMBED)
    for _ in range(3):
        assert not engine.step()
    engine.scheduler.begun.preempt(engine.scheduler.running[-1])
    deltas = run(engine)["embed"]
    assert engine.scheduler.begun.num_preempted[preemption] == 1  # type: ignore[index]
    assert_close(vector(deltas), expected(folder, prompt, method))
    engine.close()


def test_pressure(make_checkpoint: MakeCheckpoint) -> None:
    """With room for a third of the blocks the vectors are the same."""
    folder = checkpoint(make_checkpoint)
    prompts = [tokens(length, seed) for seed, length in enumerate((90, 120, 60, 33, 150, 100))]
    settings = {"max_model_len": 200, "max_num_batched_tokens": 50, "pooling": "mean"}
    vectors = []
    for num_blocks in (1000, 14):
        engine = make_engine(folder, kv_memory_bytes=num_blocks * BLOCK_BYTES, **settings)
        for i in range(3):
            engine.submit(f"text {i}", tokens(40, 70 + i), SamplingParams(max_tokens=60, ignore_eos=True))
        vectors.append(embed(engine, prompts))
        engine.close()
    for free, pressed in zip(*vectors, strict=True):
        assert_close(pressed, free)


def test_cancelled_prompts_leave_nothing(make_checkpoint: MakeCheckpoint) -> None:
    engine = make_engine(checkpoint(make_checkpoint), max_num_batched_tokens=32)
    for i in range(4):
        engine.submit(str(i), tokens(100, i), ONE, pooling=EMBED)
    engine.step()
    engine.cancel("0")
    engine.cancel("3")
    engine.step()
    engine.check_integrity()
    assert run(engine).keys() == {"1", "2"}
    engine.check_integrity()
    engine.close()


@pytest.mark.parametrize("speculation", ["off", "ngram"])
def test_a_chunk_of_one_token_is_no_decode(make_checkpoint: MakeCheckpoint, speculation: str) -> None:
    """The last chunk of 65 tokens has one, to which draft tokens would be added."""
    folder = checkpoint(make_checkpoint)
    engine = make_engine(folder, max_num_batched_tokens=64, speculation=speculation, prefix_cache=False)
    prompt = [*tokens(5) * 13]
    [actual] = embed(engine, [prompt])
    assert_close(actual, expected(folder, prompt, "last"))
    engine.close()


def test_a_prompt_may_fill_the_context(make_checkpoint: MakeCheckpoint) -> None:
    folder = checkpoint(make_checkpoint)
    engine = make_engine(folder, max_model_len=64)
    [actual] = embed(engine, [tokens(64)])
    assert_close(actual, expected(folder, tokens(64), "last"))
    with pytest.raises(ContextLengthError, match=r"input resulted in 65.*truncate_prompt_tokens"):
        engine.submit("long", tokens(65), ONE, pooling=EMBED)
    with pytest.raises(ContextLengthError):
        engine.submit("text", tokens(64), ONE)
    engine.close()


def test_dimensions(make_checkpoint: MakeCheckpoint) -> None:
    """The first components, normalised anew, of a model that allows it."""
    folder = checkpoint(make_checkpoint)
    engine = make_engine(folder, matryoshka=True)
    [whole] = embed(engine, [tokens(20)])
    [cut] = embed(engine, [tokens(20)], PoolingParams(dimensions=16))
    assert_close(cut, unit(whole[:16].astype(np.float64)))
    for dimensions in (0, -1, 65):
        with pytest.raises(RequestError, match=f"dimensions is {dimensions}; it must be between 1 and 64"):
            engine.submit("x", tokens(5), ONE, pooling=PoolingParams(dimensions=dimensions))
    engine.close()
    engine = make_engine(folder)
    assert_close(embed(engine, [tokens(20)], PoolingParams(dimensions=64))[0], whole)
    with pytest.raises(RequestError, match="matryoshka") as refused:
        engine.submit("x", tokens(5), ONE, pooling=PoolingParams(dimensions=16))
    assert refused.value.param == "dimensions"
    engine.close()


@pytest.mark.parametrize(("said", "allowed"), [({"is_matryoshka": True}, 7), ({"matryoshka_dimensions": [8, 32]}, 32)])
def test_dimensions_of_the_checkpoint(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, said: dict[str, Any], allowed: int
) -> None:
    folder = copy_of(checkpoint(make_checkpoint), tmp_path)
    edit(folder / "config.json", **said)
    engine = make_engine(folder)
    assert len(embed(engine, [tokens(9)], PoolingParams(dimensions=allowed))[0]) == allowed
    if "matryoshka_dimensions" in said:
        with pytest.raises(RequestError, match=r"one of \[8, 32, 64\]"):
            engine.submit("x", tokens(5), ONE, pooling=PoolingParams(dimensions=7))
    engine.close()


def test_a_generating_model_names_the_setting(make_checkpoint: MakeCheckpoint) -> None:
    engine = make_engine(checkpoint(make_checkpoint), pooling="auto")
    assert engine.model.pooling is None
    with pytest.raises(RequestError, match="pooling: last or mean") as refused:
        engine.submit("x", tokens(5), ONE, pooling=EMBED)
    assert refused.value.param == "model"
    engine.close()


def test_values_that_are_not_finite_fail_one_request(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    folder = copy_of(checkpoint(make_checkpoint), tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][500] = float("nan")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    engine = make_engine(folder)
    engine.submit("bad", [500], ONE, pooling=EMBED)
    engine.submit("good", [3, 4], ONE, pooling=EMBED)
    deltas = run(engine)
    assert isinstance(deltas["bad"][0].error, EngineError)
    assert_close(vector(deltas["good"]), expected(folder, [3, 4], "last"))
    engine.close()


def test_scripts(make_checkpoint: MakeCheckpoint) -> None:
    folder = checkpoint(make_checkpoint)
    with LLM(folder, kv_memory_bytes=16 << 20, skip_tokenizer_init=True, pooling="mean", matryoshka=True) as llm:
        for length, vector in zip((5, 90), llm.embed([tokens(5), tokens(90)]), strict=True):
            assert_close(np.array(vector), expected(folder, tokens(length), "mean"))
        assert len(llm.embed([tokens(5)], dimensions=8)[0]) == 8
        with pytest.raises(RequestError, match="empty"):
            llm.embed([tokens(5), []])
        llm.engine.check_integrity()


def test_an_adapter_changes_the_embedding(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """Beside the same prompt without it."""
    folder = checkpoint(make_checkpoint)
    adapter, merged = make_adapter(folder, tmp_path)
    engine = make_engine(folder, adapters={"a": str(adapter)}, max_num_batched_tokens=48)
    prompt = tokens(70, 4)
    engine.submit("plain", prompt, ONE, pooling=EMBED)
    engine.submit("adapted", prompt, ONE, pooling=EMBED, adapter="a")
    deltas = run(engine)
    assert_close(vector(deltas["plain"]), expected(folder, prompt, "last"))
    assert_close(vector(deltas["adapted"]), expected(merged, prompt, "last"))
    engine.close()


def make_adapter(folder: Path, to: Path) -> tuple[Path, Path]:
    """A LoRA adapter, and the checkpoint with which it is merged."""
    torch.manual_seed(2)
    merged = copy_of(folder, to)
    weights = load_file(merged / "model.safetensors")
    parts = {}
    for layer in range(3):
        name = f"model.layers.{layer}.mlp.up_proj"
        num_outputs, num_inputs = weights[f"{name}.weight"].shape
        a, b = torch.randn(4, num_inputs), 0.1 * torch.randn(num_outputs, 4)
        weights[f"{name}.weight"] += b @ a  # lora_alpha / r is 1
        parts |= {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
    save_file(weights, merged / "model.safetensors", {"format": "pt"})
    adapter = to / "adapter"
    adapter.mkdir()
    save_file(parts, adapter / "adapter_model.safetensors", {"format": "pt"})
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["up_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    return adapter, merged


def test_a_failure_of_one_prompt_is_its_own(
    make_checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(checkpoint(make_checkpoint))
    pooled = PooledPrompt.pooled

    def fail(self: PooledPrompt) -> np.ndarray[Any, Any]:
        if self.params.dimensions == 64:
            raise ZeroDivisionError("secret")
        return pooled(self)

    monkeypatch.setattr(PooledPrompt, "pooled", fail)
    engine.submit("bad", tokens(9), ONE, pooling=PoolingParams(dimensions=64))
    engine.submit("good", tokens(7), ONE, pooling=EMBED)
    engine.submit("text", tokens(8), GREEDY)
    deltas = run(engine)
    [failed] = deltas["bad"]
    assert isinstance(failed.error, EngineError)
    assert str(failed.error) == FAILED
    assert vector(deltas["good"]).shape == (64,)
    assert deltas["text"][-1].finish_reason == "length"
    assert "request bad failed" in caplog.text
    engine.close()


# ---- what the checkpoint says ----


def copy_of(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to / "copy"))


def edit(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def write_modules(folder: Path, *kinds: str, **pooling: Any) -> None:
    """The files of sentence-transformers."""
    modules = [
        {"idx": i, "name": str(i), "path": "" if kind == "Transformer" else f"{i}_{kind}", "type": f"some.path.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    if "Pooling" in kinds:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({"include_prompt": True} | pooling))


@pytest.mark.parametrize(
    ("pooling", "method"),
    [
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False, "word_embedding_dimension": 64}, "last"),
        ({"pooling_mode_lasttoken": False, "pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": "mean"}, "mean"),
    ],
)
@pytest.mark.parametrize("normalized", [True, False])
def test_sentence_transformers(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, pooling: dict[str, Any], method: str, normalized: bool
) -> None:
    folder = copy_of(checkpoint(make_checkpoint), tmp_path)
    write_modules(folder, "Transformer", "Pooling", *(["Normalize"] if normalized else []), **pooling)
    engine = make_engine(folder, pooling="auto")
    states = hidden(folder, tokens(30))
    wanted = states[-1] if method == "last" else states.mean(0)
    [actual] = embed(engine, [tokens(30)])
    length = float(np.linalg.norm(wanted))
    assert_close(actual, wanted / length if normalized else wanted, TOLERANCE * (1 if normalized else length))
    engine.close()


@pytest.mark.parametrize(
    ("kinds", "pooling", "reason"),
    [
        (("Transformer", "Pooling", "Dense"), {"pooling_mode_mean_tokens": True}, "cannot compute: Dense"),
        (("Transformer", "Pooling"), {"pooling_mode_cls_token": True}, "pools by pooling_mode_cls_token"),
        (
            ("Transformer", "Pooling"),
            {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": True},
            "pools by pooling_mode_lasttoken, pooling_mode_mean_tokens",
        ),
        (("Transformer",), {}, "has no Pooling"),
    ],
)
def test_other_sentence_transformers_are_refused(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, kinds: tuple[str, ...], pooling: dict[str, Any], reason: str
) -> None:
    folder = copy_of(checkpoint(make_checkpoint), tmp_path)
    write_modules(folder, *kinds, **pooling)
    with pytest.raises(ModelError, match=reason):
        make_engine(folder, pooling="auto")
    make_engine(folder, pooling="none").close()


@pytest.mark.parametrize("said", [{"is_causal": False}, {"use_bidirectional_attention": True}])
def test_bidirectional_models_are_refused(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, said: dict[str, Any]
) -> None:
    folder = copy_of(checkpoint(make_checkpoint), tmp_path)
    edit(folder / "config.json", **said)
    with pytest.raises(ModelError, match="in both directions"):
        make_engine(folder)


@pytest.fixture
def headless(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> Path:
    """A checkpoint as `AutoModel` saves it: no output layer, and no prefix before names."""
    folder = copy_of(checkpoint(make_checkpoint), tmp_path)
    weights = load_file(folder / "model.safetensors")
    base = {name.removeprefix("model."): value for name, value in weights.items() if name != "lm_head.weight"}
    save_file(base, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_a_checkpoint_without_output_layer_only_embeds(make_checkpoint: MakeCheckpoint, headless: Path) -> None:
    engine = make_engine(headless)
    [actual] = embed(engine, [tokens(30)])
    assert_close(actual, expected(checkpoint(make_checkpoint), tokens(30), "last"))
    with pytest.raises(RequestError, match=r"generates no text; use /v1/embeddings"):
        engine.submit("text", tokens(5), GREEDY)
    engine.close()
    with pytest.raises(ModelError, match=r"lacks 1 weights, lm_head.weight"):
        make_engine(headless, pooling="none")


async def test_a_checkpoint_without_output_layer_warms_up(headless: Path) -> None:
    engine = AsyncEngine(
        EngineConfig(
            model=str(headless), kv_memory_bytes=16 << 20, skip_tokenizer_init=True, max_num_seqs=8, pooling="mean"
        )
    )
    async for [delta] in engine.generate(tokens(30), ONE, pooling=EMBED):
        assert delta.pooled is not None
    await engine.check_integrity()
    engine.close()


# ---- scores ----


@pytest.fixture
def classifier(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> Path:
    return make_classifier(make_checkpoint, tmp_path, 1)


def make_classifier(make_checkpoint: MakeCheckpoint, tmp_path: Path, num_labels: int) -> Path:
    torch.manual_seed(5)
    model = AutoModelForSequenceClassification.from_pretrained(
        checkpoint(make_checkpoint, "qwen3"), num_labels=num_labels, dtype=torch.float32
    )
    model.score.weight.data.normal_(std=0.2)
    model.config.pad_token_id = None
    model.save_pretrained(tmp_path / "classifier")
    return tmp_path / "classifier"


def test_scores_are_those_of_transformers(classifier: Path) -> None:
    engine = make_engine(classifier, pooling="auto", max_num_batched_tokens=48)
    model = AutoModelForSequenceClassification.from_pretrained(
        classifier, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    prompts = [tokens(length, seed) for seed, length in enumerate(LENGTHS)]
    with torch.inference_mode():
        wanted = [torch.sigmoid(model(torch.tensor([prompt])).logits[0]).numpy() for prompt in prompts]
    assert len({round(float(score[0]), 2) for score in wanted}) > 2
    for actual, score in zip(embed(engine, prompts, PoolingParams("score")), wanted, strict=True):
        assert_close(actual, score)
    with pytest.raises(RequestError, match="generates no text; use /v1/score"):
        engine.submit("text", tokens(5), GREEDY)
    with pytest.raises(RequestError, match="makes no embeddings"):
        engine.submit("embed", tokens(5), ONE, pooling=EMBED)
    engine.close()


def test_classifiers_with_several_labels_are_refused(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"shape \[3, 64\]; Folio serves classifiers with one label"):
        make_engine(make_classifier(make_checkpoint, tmp_path, 3), pooling="auto")


def test_an_embedding_model_has_no_scores(make_checkpoint: MakeCheckpoint) -> None:
    engine = make_engine(checkpoint(make_checkpoint))
    with pytest.raises(RequestError, match="has no classifier"):
        engine.submit("x", tokens(5), ONE, pooling=PoolingParams("score"))
    engine.close()


SCORES = {"score_tokens": ("a", "b"), "score_template": "{query} {document}", "skip_tokenizer_init": False}


def with_tokenizer(folder: Path, to: Path) -> Path:
    copy = copy_of(folder, to)
    byte_level().save_pretrained(copy)
    return copy


@pytest.mark.parametrize("tied", [True, False])
def test_scores_of_tokens(make_checkpoint: MakeCheckpoint, tmp_path: Path, tied: bool) -> None:
    """The probability of the second token among the two, by the output layer or the embeddings in its place."""
    folder = with_tokenizer(make_checkpoint("llama", **SMALL | {"tie_word_embeddings": tied}), tmp_path)
    engine = make_engine(folder, pooling="auto", **SCORES)
    token_ids = byte_level().convert_tokens_to_ids(["a", "b"])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([tokens(40)])).logits[0, -1, token_ids].double()
    [actual] = embed(engine, [tokens(40)], PoolingParams("score"))
    assert_close(actual, torch.softmax(logits, 0)[1:].numpy())
    engine.submit("text", tokens(5), GREEDY)
    run(engine)
    engine.close()


def test_tokens_that_cannot_score(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    folder = with_tokenizer(checkpoint(make_checkpoint), tmp_path)
    with pytest.raises(ConfigError, match=r"score_tokens has 'x y z', which is \d tokens"):
        make_engine(folder, pooling="auto", **SCORES | {"score_tokens": ("a", "x y z")})
    edit(folder / "config.json", logit_scale=0.5)
    with pytest.raises(ModelError, match="logit_scale changes its logits"):
        make_engine(folder, pooling="auto", **SCORES)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"pooling": "cls"}, "pooling is 'cls'; choose one of auto, none, last, mean"),
        ({"score_template": "{query}"}, "score_template is '{query}'; it must have {query} and {document}"),
        ({"score_template": None}, "score_template is missing"),
        ({"pooling": "mean"}, "scores are of the last token"),
        ({"skip_tokenizer_init": True}, "score_tokens needs a tokenizer"),
    ],
)
def test_contradictory_settings(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)):
        EngineConfig(**({"model": "builtin"} | SCORES | settings))
