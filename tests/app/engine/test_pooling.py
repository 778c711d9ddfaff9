"""Embeddings and scores of prompts, compared with transformers' own hidden states."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from folio.app.config.engine import EngineConfig
from folio.app.engine.async_engine import AsyncEngine
from folio.app.engine.engine import Engine
from folio.app.engine.llm import LLM
from folio.app.engine.request.faults import FAILED
from folio.app.engine.request.pooled import PooledPrompt, PoolingParams
from folio.app.errors import ConfigError, ContextLengthError, EngineError, ModelError, RequestError
from tests.app.engine.engines import BLOCK_BYTES, MakeEngine, folder_of, greedy, run, tokens_of
from tests.app.engine.lora.adapters import Merged, make_adapter
from tests.app.engine.pooled import (
    EMBED,
    ONE,
    TOLERANCE,
    assert_close,
    copy_of,
    embed,
    expected,
    headless_copy,
    hidden,
    unit,
    vector,
)
from tests.app.small_tokenizers import byte_level
from tests.conftest import SMALL, MakeCheckpoint, tokens

GREEDY = greedy(12)
LENGTHS = (1, 7, 33, 90, 150)


@pytest.fixture
def make_engine(make_engine: MakeEngine) -> MakeEngine:
    def make(folder: Path | str = "llama", **settings: Any) -> Engine:
        return make_engine(folder, **({"pooling": "last"} | settings))

    return make


@pytest.fixture
def copy(llama: Path, tmp_path: Path) -> Path:
    """A checkpoint to be changed."""
    return copy_of(llama, tmp_path)


@pytest.mark.thirds
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "opt", "gpt2", "gpt_oss", "lfm2"])
@pytest.mark.parametrize("method", ["last", "mean"])
def test_embeddings_are_those_of_transformers(
    make_engine: MakeEngine, make_checkpoint: MakeCheckpoint, name: str, method: str
) -> None:
    """Prompts of one and of several chunks, packed into common steps; again, with what is cached."""
    engine = make_engine(name, pooling=method, max_num_batched_tokens=48)
    prompts = [tokens(length, seed) for seed, length in enumerate(LENGTHS)]
    wanted = [expected(folder_of(make_checkpoint, name), prompt, method) for prompt in prompts]
    for _ in range(2):
        for actual, whole in zip(embed(engine, prompts), wanted, strict=True):
            assert_close(actual, whole)


@pytest.mark.parametrize("method", ["last", "mean"])
@pytest.mark.parametrize(("budget", "num_blocks"), [(16, 1000), (64, 1000), (1024, 1000), (50, 14)])
def test_beside_generating_requests(
    make_engine: MakeEngine, llama: Path, method: str, budget: int, num_blocks: int
) -> None:
    """Neither kind of request changes the other's results, with room for a part of the blocks, too."""
    settings = {"max_num_batched_tokens": budget, "max_model_len": 200, "kv_memory_bytes": num_blocks * BLOCK_BYTES}
    engine = make_engine(pooling=method, **settings)
    outputs = []
    for pooled in (False, True):
        for i in range(3):
            engine.submit(f"text {i}", tokens(20 + 30 * i, 50 + i), greedy(60), cache_salt=str(pooled))
            if pooled:
                engine.submit(f"embed {i}", tokens(60 + 29 * i, 60 + i), ONE, pooling=EMBED)
        deltas = run(engine)
        outputs.append([tokens_of(deltas[f"text {i}"]) for i in range(3)])
    assert outputs[0] == outputs[1]
    assert (sum(engine.scheduler.begun.num_preempted.values()) > 0) == (num_blocks == 14)
    for i in range(3):
        assert_close(vector(deltas[f"embed {i}"]), expected(llama, tokens(60 + 29 * i, 60 + i), method))


def test_prefixes_are_shared_with_generating_requests(make_engine: MakeEngine, llama: Path) -> None:
    """Pooling the last token reads the cache; the mean computes every token, and leaves it in the cache."""
    prompt = tokens(200)
    for method, num_cached in (("last", 199), ("mean", 0)):
        engine = make_engine(pooling=method)
        engine.submit("text", prompt, GREEDY)
        run(engine)
        engine.submit("embed", prompt, ONE, pooling=EMBED)
        deltas = run(engine)["embed"]
        assert deltas[0].num_cached_tokens == num_cached
        assert_close(vector(deltas), expected(llama, prompt, method))
        engine.submit("again", prompt, GREEDY)
        assert run(engine)["again"][0].num_cached_tokens >= 192


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
@pytest.mark.parametrize("method", ["last", "mean"])
def test_preempted_prompts_count_no_token_twice(
    make_engine: MakeEngine, llama: Path, method: str, preemption: Any
) -> None:
    engine = make_engine(pooling=method, preemption=preemption, max_num_batched_tokens=32)
    engine.submit("embed", tokens(150, 3), ONE, pooling=EMBED)
    for _ in range(3):
        assert not engine.step()
    engine.scheduler.begun.preempt(engine.scheduler.running[-1])
    deltas = run(engine)["embed"]
    assert engine.scheduler.begun.num_preempted[preemption] == 1
    assert_close(vector(deltas), expected(llama, tokens(150, 3), method))


def test_cancelled_prompts_leave_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_batched_tokens=32)
    for i in range(4):
        engine.submit(str(i), tokens(100, i), ONE, pooling=EMBED)
    engine.step()
    for name in "03":
        engine.cancel(name)
    engine.step()
    assert run(engine).keys() == {"1", "2"}


@pytest.mark.parametrize("speculation", ["off", "ngram"])
def test_a_chunk_of_one_token_is_no_decode(make_engine: MakeEngine, llama: Path, speculation: str) -> None:
    """The last chunk of 65 tokens has one, to which draft tokens would be added."""
    engine = make_engine(max_num_batched_tokens=64, speculation=speculation, prefix_cache=False)
    prompt = tokens(5) * 13
    [actual] = embed(engine, [prompt])
    assert_close(actual, expected(llama, prompt, "last"))


def test_a_prompt_may_fill_the_context(make_engine: MakeEngine, llama: Path) -> None:
    engine = make_engine(max_model_len=64)
    [actual] = embed(engine, [tokens(64)])
    assert_close(actual, expected(llama, tokens(64), "last"))
    with pytest.raises(ContextLengthError, match=r"input resulted in 65.*truncate_prompt_tokens"):
        engine.submit("long", tokens(65), ONE, pooling=EMBED)
    with pytest.raises(ContextLengthError):
        engine.submit("text", tokens(64), ONE)


def test_dimensions(make_engine: MakeEngine) -> None:
    """The first components, normalised anew, of a model that allows it."""
    engine = make_engine(matryoshka=True)
    [whole] = embed(engine, [tokens(20)])
    [cut] = embed(engine, [tokens(20)], PoolingParams(dimensions=16))
    assert_close(cut, unit(whole[:16].astype(np.float64)))
    for dimensions in (0, -1, 65):
        with pytest.raises(RequestError, match=f"dimensions is {dimensions}; it must be between 1 and 64"):
            engine.submit("x", tokens(5), ONE, pooling=PoolingParams(dimensions=dimensions))
    engine = make_engine()
    assert_close(embed(engine, [tokens(20)], PoolingParams(dimensions=64))[0], whole)
    with pytest.raises(RequestError, match="matryoshka") as refused:
        engine.submit("x", tokens(5), ONE, pooling=PoolingParams(dimensions=16))
    assert refused.value.param == "dimensions"


@pytest.mark.parametrize(("said", "allowed"), [({"is_matryoshka": True}, 7), ({"matryoshka_dimensions": [8, 32]}, 32)])
def test_dimensions_of_the_checkpoint(make_engine: MakeEngine, copy: Path, said: dict[str, Any], allowed: int) -> None:
    edit(copy / "config.json", **said)
    engine = make_engine(copy)
    assert len(embed(engine, [tokens(9)], PoolingParams(dimensions=allowed))[0]) == allowed
    if "matryoshka_dimensions" in said:
        with pytest.raises(RequestError, match=r"one of \[8, 32, 64\]"):
            engine.submit("x", tokens(5), ONE, pooling=PoolingParams(dimensions=7))


def test_a_generating_model_names_the_setting(make_engine: MakeEngine) -> None:
    engine = make_engine(pooling="auto")
    assert engine.model.pooling is None
    with pytest.raises(RequestError, match="pooling: last or mean") as refused:
        engine.submit("x", tokens(5), ONE, pooling=EMBED)
    assert refused.value.param == "model"


def test_values_that_are_not_finite_fail_one_request(make_engine: MakeEngine, copy: Path) -> None:
    weights = load_file(copy / "model.safetensors")
    weights["model.embed_tokens.weight"][500] = float("nan")
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    engine = make_engine(copy)
    engine.submit("bad", [500], ONE, pooling=EMBED)
    engine.submit("good", [3, 4], ONE, pooling=EMBED)
    deltas = run(engine)
    assert isinstance(deltas["bad"][0].error, EngineError)
    assert_close(vector(deltas["good"]), expected(copy, [3, 4], "last"))


def test_scripts(llama: Path) -> None:
    with LLM(llama, kv_memory_bytes=16 << 20, skip_tokenizer_init=True, pooling="mean", matryoshka=True) as llm:
        for length, vector in zip((5, 90), llm.embed([tokens(5), tokens(90)]), strict=True):
            assert_close(np.array(vector), expected(llama, tokens(length), "mean"))
        assert len(llm.embed([tokens(5)], dimensions=8)[0]) == 8
        with pytest.raises(RequestError, match="empty"):
            llm.embed([tokens(5), []])
        llm.engine.check_integrity()


def test_an_adapter_changes_the_embedding(make_engine: MakeEngine, llama: Path, tmp_path: Path) -> None:
    """Beside the same prompt without it."""
    make_adapter(tmp_path / "adapter", llama, "up_proj", seed=2)
    merged = Merged(llama, tmp_path / "adapter").save(tmp_path / "merged")
    engine = make_engine(adapters={"a": str(tmp_path / "adapter")}, max_num_batched_tokens=48)
    prompt = tokens(70, 4)
    engine.submit("plain", prompt, ONE, pooling=EMBED)
    engine.submit("adapted", prompt, ONE, pooling=EMBED, adapter="a")
    deltas = run(engine)
    assert_close(vector(deltas["plain"]), expected(llama, prompt, "last"))
    assert_close(vector(deltas["adapted"]), expected(merged, prompt, "last"))


def test_a_failure_of_one_prompt_is_its_own(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine()
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


# ---- what the checkpoint says ----


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
    make_engine: MakeEngine, copy: Path, pooling: dict[str, Any], method: str, normalized: bool
) -> None:
    write_modules(copy, "Transformer", "Pooling", *(["Normalize"] if normalized else []), **pooling)
    engine = make_engine(copy, pooling="auto")
    states = hidden(copy, tokens(30))
    wanted = states[-1] if method == "last" else states.mean(0)
    [actual] = embed(engine, [tokens(30)])
    length = float(np.linalg.norm(wanted))
    assert_close(actual, wanted / length if normalized else wanted, TOLERANCE * (1 if normalized else length))


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
    make_engine: MakeEngine, copy: Path, kinds: tuple[str, ...], pooling: dict[str, Any], reason: str
) -> None:
    write_modules(copy, *kinds, **pooling)
    with pytest.raises(ModelError, match=reason):
        make_engine(copy, pooling="auto")
    make_engine(copy, pooling="none")


@pytest.mark.parametrize("said", [{"is_causal": False}, {"use_bidirectional_attention": True}])
def test_bidirectional_models_are_refused(make_engine: MakeEngine, copy: Path, said: dict[str, Any]) -> None:
    edit(copy / "config.json", **said)
    with pytest.raises(ModelError, match="in both directions"):
        make_engine(copy)


async def test_a_checkpoint_without_output_layer_only_embeds(
    make_engine: MakeEngine, llama: Path, tmp_path: Path
) -> None:
    """In an engine that warms up, too."""
    headless = headless_copy(llama, tmp_path)
    engine = make_engine(headless)
    [actual] = embed(engine, [tokens(30)])
    assert_close(actual, expected(llama, tokens(30), "last"))
    with pytest.raises(RequestError, match=r"generates no text; use /v1/embeddings"):
        engine.submit("text", tokens(5), GREEDY)
    with pytest.raises(ModelError, match=r"lacks 1 weights, lm_head.weight"):
        make_engine(headless, pooling="none")
    served = AsyncEngine(
        EngineConfig(model=str(headless), kv_memory_bytes=16 << 20, skip_tokenizer_init=True, pooling="mean")
    )
    async for [delta] in served.generate(tokens(30), ONE, pooling=EMBED):
        assert delta.pooled is not None
    await served.check_integrity()
    served.close()


# ---- scores ----


@pytest.fixture
def make_classifier(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> Callable[[int], Path]:
    def make(num_labels: int) -> Path:
        torch.manual_seed(5)
        model = AutoModelForSequenceClassification.from_pretrained(
            folder_of(make_checkpoint, "qwen3"), num_labels=num_labels, dtype=torch.float32
        )
        model.score.weight.data.normal_(std=0.2)
        model.config.pad_token_id = None
        model.save_pretrained(tmp_path / "classifier")
        return tmp_path / "classifier"

    return make


def test_scores_are_those_of_transformers(make_engine: MakeEngine, make_classifier: Callable[[int], Path]) -> None:
    classifier = make_classifier(1)
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


def test_classifiers_with_several_labels_are_refused(
    make_engine: MakeEngine, make_classifier: Callable[[int], Path]
) -> None:
    with pytest.raises(ModelError, match=r"shape \[3, 64\]; Folio serves classifiers with one label"):
        make_engine(make_classifier(3), pooling="auto")


def test_an_embedding_model_has_no_scores(make_engine: MakeEngine) -> None:
    with pytest.raises(RequestError, match="has no classifier"):
        make_engine().submit("x", tokens(5), ONE, pooling=PoolingParams("score"))


SCORES = {"score_tokens": ("a", "b"), "score_template": "{query} {document}", "skip_tokenizer_init": False}


def with_tokenizer(folder: Path, to: Path) -> Path:
    copy = copy_of(folder, to)
    byte_level().save_pretrained(copy)
    return copy


@pytest.mark.parametrize("tied", [True, False])
def test_scores_of_tokens(make_engine: MakeEngine, make_checkpoint: MakeCheckpoint, tmp_path: Path, tied: bool) -> None:
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


def test_tokens_that_cannot_score(make_engine: MakeEngine, llama: Path, tmp_path: Path) -> None:
    folder = with_tokenizer(llama, tmp_path)
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
