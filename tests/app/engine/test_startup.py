"""What an engine does before its first request: warm up, take over prefixes; and what is left of it."""

from __future__ import annotations

import copy
import json
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from folio.app.config.engine import EngineConfig
from folio.app.engine import AsyncEngine, SamplingParams
from folio.app.engine.engine import Engine
from folio.app.engine.model.fingerprints import fingerprints
from folio.app.engine.model.loader import load_model
from folio.app.engine.report import StartTimes, process_age_s
from folio.app.engine.request.delta import Delta
from folio.app.engine.sampling.params import ReasoningBudget, Structure
from folio.app.engine.startup import (
    SAMPLED,
    STRUCTURED,
    hot_prefixes,
    merge_hot_prefixes,
    warm_prefixes,
    warm_up,
    warm_up_rounds,
)
from folio.app.errors import ConfigError, EngineError, ModelError, RequestError, UnavailableError
from folio.app.models.builtin import BUILTIN_FOLDER
from folio.vmem import CachedPrefix, IntegrityError
from tests.app.engine.engines import MakeEngine, answers, broken_layer, greedy, run, tokens_of
from tests.app.engine.lora.adapters import make_adapter
from tests.app.small_tokenizers import word_level, wordpiece
from tests.conftest import MakeCheckpoint, tokens

GREEDY = greedy(4)
SETTINGS: dict[str, Any] = {"block_tokens": 16, "max_num_batched_tokens": 96}


@pytest.fixture
def make(make_engine: MakeEngine) -> MakeEngine:
    return lambda model="llama", **settings: make_engine(model, **(SETTINGS | settings))


@pytest.fixture
def config(llama: Path) -> EngineConfig:
    defaults = {"kv_memory_bytes": 16 << 20, "skip_tokenizer_init": True, "max_num_seqs": 8}
    return EngineConfig(model=str(llama), **(defaults | SETTINGS))


def cached_of(engine: Engine, prompt: Sequence[int], **options: Any) -> int:
    """Compute a prompt; returns how much of it was cached."""
    engine.submit("r", prompt, GREEDY, **options)
    deltas = run(engine)["r"]
    assert len(tokens_of(deltas)) == 4
    return deltas[-1].num_cached_tokens


# ---- checkpoints that are not whole ----


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    return Path(shutil.copytree(BUILTIN_FOLDER, tmp_path / "model"))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        # `SafetensorError: Error while deserializing header` with a traceback, and no file name.
        *(("model.safetensors", n, r"model\.safetensors has \d+ bytes and is truncated or") for n in (0, 5, 1000, -1)),
        ("pytorch_model.bin", b"", r"pytorch_model\.bin is truncated or"),
        ("pytorch_model.bin", b"PK\3\4" + b"z" * 500, r"pytorch_model\.bin is truncated or"),
        ("pytorch_model.bin", b"no weights", r"pytorch_model\.bin is truncated or"),
    ],
)
def test_damaged_weights_are_told_in_one_line(damaged: Path, name: str, content: bytes | int, said: str) -> None:
    """Of either format, truncated to a number of bytes or with other contents."""
    path = damaged / "model.safetensors"
    whole = path.read_bytes()
    path.unlink()
    (damaged / name).write_bytes(whole[:content] if isinstance(content, int) else content)
    with pytest.raises(ModelError, match=said + " damaged") as refused:
        load_model(EngineConfig(model=str(damaged)).on_device("cpu"))
    assert "\n" not in str(refused.value)


def test_another_models_tokenizer_is_refused(damaged: Path) -> None:
    """It was accepted, and requests whose text had such a token failed."""
    path = damaged / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocab_size = json.loads((damaged / "config.json").read_text())["vocab_size"]
    vocabulary[max(vocabulary, key=vocabulary.__getitem__)] = vocab_size
    path.write_text(json.dumps(tokenizer))
    with pytest.raises(ModelError, match=rf"token ids up to {vocab_size}, but the model's vocab_size is {vocab_size}"):
        load_model(EngineConfig(model=str(damaged)).on_device("cpu"))


# ---- times ----


def test_phases_add_up() -> None:
    times = StartTimes(process_s=process_age_s())
    times.lap("model_s")
    times.lap("memory_s")
    assert times.ready_s == pytest.approx(times.model_s + times.memory_s)
    assert 0 < times.process_s <= process_age_s()
    assert times.process_s not in (0.0, times.ready_s)
    assert str(StartTimes(model_s=1.0, self_test_s=2.0, process_s=9.0)) == (
        "3.00 s (model 1.00, self test 2.00, process 9.00)"
    )
    assert list(times.phases())[:2] == ["model", "memory"]


# ---- warm-up ----


def fits(most: int) -> Callable[[Sequence[int]], bool]:
    return lambda lengths: sum(lengths) <= most


def test_rounds_fill_a_step_and_grow() -> None:
    rounds = warm_up_rounds(
        vocab_size=100, max_model_len=50, max_num_seqs=6, step_tokens=100, has_structures=True, fits=fits(1000)
    )
    assert [[len(prompt) for prompt, _ in prompts] for prompts in rounds] == [
        [8],
        [8],
        [8],
        [8] * 4,
        [8] * 6,
        [48, 48, 4],
    ]
    kinds = {params.structure is not None for prompts in rounds for _, params in prompts}
    assert kinds == {True, False}
    assert {params.temperature for _, params in rounds[-2]} == {0, SAMPLED.temperature}
    assert all(len(prompt) + (params.max_tokens or 0) <= 50 for prompts in rounds for prompt, params in prompts)


@pytest.mark.parametrize(("longest", "num_seqs", "room"), [(2, 1, 2), (9, 64, 20), (4, 3, 1)])
def test_rounds_fit_wherever_one_sequence_does(longest: int, num_seqs: int, room: int) -> None:
    rounds = warm_up_rounds(
        vocab_size=9,
        max_model_len=longest,
        max_num_seqs=num_seqs,
        step_tokens=64,
        has_structures=False,
        fits=fits(room),
    )
    for prompts in rounds:
        lengths = [len(prompt) + (params.max_tokens or 0) for prompt, params in prompts]
        assert 1 <= len(lengths) <= num_seqs
        assert max(lengths) <= longest
        assert len(lengths) == 1 or sum(lengths) <= room
    assert not any(params.structure == STRUCTURED.structure for prompts in rounds for _, params in prompts)


@pytest.mark.parametrize("model", ["llama", "gemma2", "bamba"])
def test_a_warm_engine_is_as_good_as_new(model: str, make: MakeEngine) -> None:
    """But for its step times: nothing is cached, counted, or to be forked; and its outputs are the same."""
    cold, warm = (make(model) for _ in range(2))
    fresh = warm.report()
    warm_up(warm)
    warm.check_integrity()
    report = warm.report()
    for name in ("queried_tokens", "hit_tokens", "evicted_blocks", "cached_prefixes", "active_bytes", "cached_bytes"):
        assert getattr(report, name) == getattr(fresh, name) == 0, name
    assert not hot_prefixes(warm)
    load = warm.load.report()
    assert (load.keys, load.busy_share, load.freed_tokens_per_s, load.num_running) == (b"", 0, 0, 0)
    assert load.step.token_s > 0 or load.step.fixed_s > 0
    assert cold.load.report().step == type(load.step)()
    assert warm.decoder.ended.get("warm-up 0", 0) is None
    assert warm.start_times.warm_up_s > 0
    found = []
    for engine in (cold, warm):
        engine.submit("r", tokens(150), GREEDY)
        found.append(answers(engine)["r"])
    assert found[0] == found[1] != []


@pytest.mark.parametrize(("token_s", "counts"), [(0.0, [2, 2, 2]), (0.001, [1, 2, 2]), (0.01, [0, 0, 1])])
def test_a_slow_cpu_computes_no_long_rounds(
    token_s: float, counts: list[int], make: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others compute each round twice, the second time measured, and nothing from the prefix cache: that would not tell
    a prefill's time."""
    engine, now, seen = make(max_num_seqs=16, max_num_batched_tokens=400, kv_memory_bytes=64 << 20), 0.0, list[int]()

    def observe(num_tokens: int, *_: Any, **__: Any) -> None:
        nonlocal now
        seen.append(num_tokens)
        now += token_s * num_tokens

    monkeypatch.setattr("folio.app.engine.startup.time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(engine.recovery, "observe_step", observe)
    warm_up(engine)
    engine.check_integrity()
    assert [seen.count(num_tokens) for num_tokens in (400, 16 * 8, 4 * 8)] == counts


def test_guesses_of_the_warm_up_do_not_count(make: MakeEngine) -> None:
    engine = make(speculation="ngram")
    lengths = engine.speculation._lengths  # type: ignore[union-attr]
    warm_up(engine)
    assert engine.speculation is not None
    assert engine.speculation.counts.draft_tokens == 0
    assert engine.speculation._lengths is not lengths  # type: ignore[union-attr]
    cached_of(engine, tokens(20) * 3)


@pytest.mark.parametrize("can_be_closed", [True, False])
def test_a_server_that_cannot_get_ready_says_why(config: EngineConfig, can_be_closed: bool) -> None:
    """And leaves nothing behind. Regression: a thread that ended in `close` left whoever made the engine waiting."""
    closed = []

    class Failing(Engine):
        def step(self) -> list[Delta]:
            raise EngineError("injected")

        def close(self) -> None:
            super().close()
            closed.append(self)
            if not can_be_closed:
                raise RuntimeError("cannot be closed")

    errors: list[BaseException] = []

    def start() -> None:
        try:
            AsyncEngine(config, new_engine=Failing)
        except EngineError as error:
            errors.append(error)

    starter = threading.Thread(target=start, daemon=True)
    starter.start()
    starter.join(60)
    assert [str(error) for error in errors] == ["injected"]
    assert len(closed) == 1


@pytest.mark.parametrize("tokenizer", [word_level, wordpiece])
async def test_a_tokenizer_whose_tokens_have_no_bytes_starts(
    tokenizer: Callable[[], PreTrainedTokenizerFast], config: EngineConfig, tmp_path: Path
) -> None:
    """Regression: the warm-up asked for a structure, and its error ended the start."""
    folder = Path(shutil.copytree(config.model, tmp_path / "model"))
    tokenizer().save_pretrained(folder)
    engine = AsyncEngine(replace(config, skip_tokenizer_init=False, model=str(folder)))
    budget = ReasoningBudget(4, "<think>", "</think>")
    [word] = tokenizer().convert_ids_to_tokens([1])
    words = greedy(4, allowed_token_ids=[1])
    found = [delta async for deltas in engine.generate([1, 2], words) for delta in deltas]
    assert "".join(delta.text for delta in found).split() == [word] * 4
    for structure in (Structure("json", "{}"), Structure("regex", "a"), Structure("any", "", budget=budget)):
        with pytest.raises(RequestError, match=r"the tokenizer's decoder is .*without a structure") as refused:
            await anext(engine.generate([1, 2], SamplingParams(structure=structure)))
        assert refused.value.param == "structure"
    assert engine.healthy
    engine.close()


# ---- prefixes of other engines ----


def prefix(length: int, hits: int, seed: int = 0, name: str | None = None, keys: tuple[str, ...] = ()) -> CachedPrefix:
    return CachedPrefix(tuple(tokens(length, seed)), keys, hits, name)


def test_what_several_engines_tell_is_one_list() -> None:
    told = [
        [prefix(32, 0, 9, "rules"), prefix(64, 3), prefix(16, 4, 1)],
        [prefix(64, 2), prefix(64, 4, keys=("tenant:a",)), prefix(32, 0, 8, "rules"), prefix(32, 0, 7, "more")],
    ]
    chosen = merge_hot_prefixes(told, 130)
    assert [(p.pin_name, len(p.token_ids), p.keys, p.hits) for p in chosen] == [
        ("rules", 32, (), 0),
        ("more", 32, (), 0),
        (None, 64, (), 5),
        (None, 16, (), 4),
    ]
    assert chosen[0].token_ids == tuple(tokens(32, 9))
    assert [p.hits for p in merge_hot_prefixes(told, 1000)] == [0, 0, 5, 4, 4]


def test_a_new_engine_has_what_others_are_asked_for(make: MakeEngine) -> None:
    old, new = (make() for _ in range(2))
    old.pin("pin", "rules", tokens(48, 5), tenant="a")
    run(old)
    for _ in range(2):
        cached_of(old, tokens(65))
        cached_of(old, tokens(65, 1), tenant="a", cache_salt="s")
    restored = warm_prefixes(new, [hot_prefixes(old)], 60)
    assert (restored.pinned, restored.hot, restored.failed, restored.late) == (1, 2, 0, 0)
    new.check_integrity()
    assert [(pin.name, pin.num_tokens) for pin in new.report().pins] == [("rules", 48)]
    assert sorted(new.load.report().keys) == sorted(old.load.report().keys)  # what routers are told first
    assert new.decoder.ended.get("prefix 1", 0) is None
    assert new.report().queried_tokens == 0
    for engine in (old, new):
        assert cached_of(engine, tokens(65)) == 64
        assert cached_of(engine, tokens(65, 1), tenant="a", cache_salt="s") == 64
        assert cached_of(engine, tokens(65, 1)) == 0
        assert cached_of(engine, [*tokens(48, 5), 7], tenant="a") == 48


@pytest.mark.parametrize("runs", [True, False])
def test_a_new_engine_gets_the_blocks_of_one_that_still_runs(make: MakeEngine, runs: bool) -> None:
    old, new = (make() for _ in range(2))
    old.pin("pin", "rules", tokens(48, 5))
    run(old)
    for _ in range(2):
        cached_of(old, tokens(65))
    told = hot_prefixes(old)
    if not runs:
        assert old.handover is not None
        old.handover.close()
    new.recovery.observe_step(100, 0, 10.0)  # computing is known to take long
    restored = warm_prefixes(new, [told], 60)
    assert (restored.pinned, restored.hot, restored.failed, restored.late) == (1, 1, 0, 0)
    assert new.handover is not None
    assert bool(new.handover.receiver.num_bytes) == runs
    new.check_integrity()
    assert cached_of(new, [*tokens(48, 5), 7]) == 48
    assert cached_of(new, tokens(65)) == 64


def test_a_restored_pin_has_its_adapter(make: MakeEngine, llama: Path, tmp_path: Path) -> None:
    """Regression: it was computed without the adapter, whose requests then gave other tokens."""
    make_adapter(tmp_path, llama, r"_proj$")
    old, new = (make(adapters={"red": str(tmp_path)}) for _ in range(2))
    old.pin("pin", "rules", tokens(48, 5), adapter="red")
    run(old)
    assert warm_prefixes(new, [hot_prefixes(old)], 60).pinned == 1
    found = []
    for engine in (old, new):
        engine.submit("r", [*tokens(48, 5), 7], greedy(16), adapter="red")
        deltas = run(engine)["r"]
        assert deltas[0].num_cached_tokens == 48
        found.append(tokens_of(deltas))
    assert found[0] == found[1]


def test_a_restored_prefix_may_be_refused_and_others_are_not(make: MakeEngine) -> None:
    """Another adapter, a longer context, and a pin beyond the quota, of a replica with other settings."""
    engine = make(pin_quota=0.0)
    told = [
        prefix(32, 9, 1, keys=("adapter:pirate",)),
        prefix(2000, 8, 2),
        prefix(32, 0, 3, "rules"),
        prefix(32, 1, 4),
    ]
    restored = warm_prefixes(engine, [told], 60)
    assert (restored.pinned, restored.hot, restored.failed, restored.late) == (0, 1, 3, 0)
    assert cached_of(engine, [*tokens(32, 4), 7]) == 32


def test_engines_whose_token_ids_mean_the_same() -> None:
    """And whose keys do."""

    def fingerprint(template: str | None = None, vocabulary: dict[str, int] | None = None, **settings: Any) -> str:
        tokenizer = copy.copy(model.tokenizer)
        assert tokenizer is not None
        if template is not None:
            tokenizer.chat_template = template
        if vocabulary is not None:
            tokenizer.get_vocab = lambda: vocabulary  # type: ignore[method-assign]
        return fingerprints(replace(engine_config, **settings), replace(model, tokenizer=tokenizer)).prefixes

    engine_config = EngineConfig(model="builtin", kv_memory_bytes=16 << 20)
    model = load_model(engine_config.on_device("cpu"))
    own = fingerprint()
    assert own == fingerprint() == fingerprint(kv_memory_bytes=32 << 20, max_num_seqs=3)
    others = [
        fingerprint("{{ messages }}"),
        fingerprint(vocabulary={"a": 1}),
        fingerprint(isolate_tenants=False),
        fingerprint(model="another"),
    ]
    assert len({own, *others}) == 5


def test_outputs_continue_at_engines_with_the_same_weights(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """Whatever their path, and the other settings; but in the same precision."""
    folder = tmp_path / "model"
    shutil.copytree(checkpoint("llama"), folder)
    config = EngineConfig(model=str(folder), skip_tokenizer_init=True)
    model = load_model(config.on_device("cpu"))
    own = fingerprints(config, model)
    assert own == fingerprints(replace(config, max_num_seqs=3), model)
    assert own.outputs != fingerprints(replace(config, kv_dtype="int8"), model).outputs
    assert own.outputs != fingerprints(replace(config, quantization="int8"), model).outputs
    assert own.outputs != fingerprints(replace(config, batch_invariant=True), model).outputs
    [weights] = folder.glob("*.safetensors")
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    other = fingerprints(config, model)
    assert (other.prefixes == own.prefixes, other.outputs == own.outputs) == (True, False)


def test_what_the_settings_pin_is_not_told(make_engine: MakeEngine) -> None:
    """Replicas of newer settings pin something else under that name, or nothing."""
    engine = make_engine("builtin", pinned_prompts={"rules": "x y z " * 40})
    assert [pin.name for pin in engine.report().pins] == ["rules"]
    assert hot_prefixes(engine) == []


def test_restoring_ends_in_time(make: MakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    engine = make()
    restored = warm_prefixes(engine, [[prefix(64, 1), prefix(48, 0, 1, "rules")]], 0.0)
    assert (restored.pinned, restored.hot, restored.late) == (0, 0, 2)
    assert "no time to pin 'rules'" in caplog.text
    assert not engine.has_work
    assert cached_of(engine, tokens(65)) == 0


def test_a_step_that_fails_while_restoring_is_no_reason_not_to_start(
    make: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: one prefix of another replica could keep all new ones from starting."""
    engine, calls = make(), []

    def fail_at_second(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 2:
            raise RuntimeError("injected")

    engine.model.module.register_forward_pre_hook(fail_at_second)
    restored = warm_prefixes(engine, [[prefix(64, 2, 1), prefix(160, 1)]], 60)
    assert (restored.pinned, restored.hot, restored.failed, restored.late) == (0, 1, 1, 0)
    assert "injected" in caplog.text
    engine.check_integrity()
    assert cached_of(engine, tokens(65, 1)) == 64


@pytest.mark.parametrize("error", [IntegrityError("injected"), UnavailableError("injected")])
def test_a_broken_engine_does_not_go_on_restoring(error: Exception, make: MakeEngine) -> None:
    engine = make()
    with broken_layer(engine, error), pytest.raises(type(error), match="injected"):
        warm_prefixes(engine, [[prefix(64, 2)]], 60)


@pytest.mark.parametrize(
    ("settings", "asked"), [({}, 1), ({"restore_prefixes_s": 0.0}, 0), ({"prefix_cache": False}, 0)]
)
async def test_a_server_asks_before_it_is_ready(settings: dict[str, Any], asked: int, config: EngineConfig) -> None:
    calls: list[int] = []

    def others(fingerprint: str) -> list[list[CachedPrefix]]:
        assert fingerprint
        calls.append(1)
        return [[], [prefix(64, 2)]]

    engine = AsyncEngine(replace(config, warm_up=False, **settings), prefixes_of_others=others)
    assert len(calls) == asked
    assert (engine.start_times.prefixes_s > 0) == bool(asked)
    assert engine.start_times.warm_up_s == 0
    deltas = [d async for deltas in engine.generate([*tokens(64), 7], GREEDY) for d in deltas]
    assert deltas[-1].num_cached_tokens == 64 * asked
    engine.close()


def test_a_negative_limit_is_refused() -> None:
    with pytest.raises(ConfigError, match="restore_prefixes_s is -1"):
        EngineConfig(model="builtin", restore_prefixes_s=-1)


def test_the_log_tells_how_many_threads_compute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setenv("OMP_PLACES", "cores")
    Engine(EngineConfig(model="builtin", kv_memory_bytes=8 << 20, warm_up=False, num_threads=1)).close()
    assert "OMP_PLACES=cores has bound this thread to one core; it may use all again" in caplog.text
    assert "1 thread computes: num_threads is 1, and this process may use" in caplog.text
