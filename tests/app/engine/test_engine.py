"""The step loop: pressure, limits, cancellation; memory is all there afterwards."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import pytest
import torch

from folio.app.config.engine import EngineConfig
from folio.app.config.machine import Machine
from folio.app.engine.engine import Engine
from folio.app.engine.layers.batch import StepBatch
from folio.app.engine.memory import kv_plan
from folio.app.engine.request.delta import Delta
from folio.app.engine.sampling.params import SamplingParams
from folio.app.engine.step import step_loop
from folio.app.errors import ConfigError, ContextLengthError, RequestError
from folio.vmem import MapError, OutOfPages, View
from tests.conftest import ARCHITECTURES, VOCAB_SIZE, MakeCheckpoint

GREEDY = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
BLOCK_BYTES = 16 * 768


def make_engine(make_checkpoint: MakeCheckpoint, **settings: object) -> Engine:
    folder = make_checkpoint(*ARCHITECTURES["llama"][:1], **ARCHITECTURES["llama"][1])
    defaults: dict[str, object] = {"kv_memory_bytes": 16 << 20, "skip_tokenizer_init": True, "max_num_seqs": 8}
    return Engine(EngineConfig(model=str(folder), **(defaults | settings)))  # type: ignore[arg-type]


@pytest.fixture
def engine(make_checkpoint: MakeCheckpoint) -> Iterator[Engine]:
    engine = make_engine(make_checkpoint)
    yield engine
    engine.check_integrity()
    engine.close()


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(9)
    return [torch.randint(VOCAB_SIZE - 1, (n,), generator=generator).tolist() for n in lengths]


def run(engine: Engine) -> dict[str, list[int]]:
    outputs: dict[str, list[int]] = {}
    while engine.has_work:
        for delta in engine.step():
            outputs.setdefault(delta.request_id, []).extend(delta.token_ids)
        engine.check_integrity()
    return outputs


@pytest.mark.parametrize("view", ["region", "block_table"])
def test_pressure_changes_nothing(make_checkpoint: MakeCheckpoint, view: View) -> None:
    """With room for a third of the blocks requests are preempted and computed again, to the same tokens."""
    outputs = []
    for num_blocks in (1000, 14):
        engine = make_engine(
            make_checkpoint,
            kv_memory_bytes=num_blocks * BLOCK_BYTES,
            max_model_len=200,
            max_num_batched_tokens=50,
            kv_view=view,
        )
        preempted = 0
        preempt = engine.scheduler.begun.preempt

        def count(victim: object, preempt: object = preempt) -> None:
            nonlocal preempted
            preempted += 1
            preempt(victim)  # type: ignore[operator]

        engine.scheduler.begun.preempt = count  # type: ignore[method-assign, assignment]
        for i, prompt in enumerate(prompts(60, 31, 47, 16, 90, 5)):
            engine.submit(str(i), prompt, GREEDY)
        outputs.append(run(engine))
        assert (preempted > 0) == (num_blocks == 14)
        engine.close()
    assert outputs[0] == outputs[1]
    assert all(len(tokens) == 40 for tokens in outputs[0].values())


def test_a_lowered_budget_loses_nothing(make_checkpoint: MakeCheckpoint) -> None:
    """Lowered to what one sequence needs in the middle of a run and raised again: the same tokens, at another pace."""
    outputs = []
    for lowered in (False, True):
        engine = make_engine(make_checkpoint, kv_memory_bytes=100 * BLOCK_BYTES, max_model_len=140)
        for i, prompt in enumerate(prompts(60, 31, 47, 16, 90, 5)):
            engine.submit(str(i), prompt, GREEDY)
        tokens: dict[str, list[int]] = {}
        for step in itertools.count():
            if lowered and step == 5:
                assert engine.set_budget(9 * BLOCK_BYTES, 1) == "deferred"
            if lowered and step == 60:
                assert engine.report().active_bytes <= 9 * BLOCK_BYTES
                assert engine.set_budget(100 * BLOCK_BYTES, 2) == "applied"
            for delta in engine.step():
                tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
            engine.check_integrity()
            if not engine.has_work:
                break
        outputs.append(tokens)
        engine.close()
    assert outputs[0] == outputs[1]


def test_a_device_smaller_than_the_budget_fails_the_request(
    make_checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waited for ever, and everybody behind it."""
    engine = make_engine(make_checkpoint, kv_idle_release_s=0.0)
    monkeypatch.setattr(step_loop, "_GIVE_UP_S", 0.05)
    while engine.report().physical_bytes:  # of the swaps that are tried at the start
        engine.memory.wait_for_progress(0.1)

    def full(page_bytes: int) -> int:
        raise OutOfPages(1, 0)

    with monkeypatch.context() as patch:
        patch.setattr(engine.memory.backend, "create", full)
        engine.submit("unlucky", prompts(100)[0], GREEDY)
        deltas: list[Delta] = []
        while engine.has_work:
            deltas += engine.step()
        assert [str(delta.error) for delta in deltas] == [
            "the device has too little memory for this request, although the budget allows it"
        ]
    engine.submit("lucky", prompts(100)[0], GREEDY)
    assert len(run(engine)["lucky"]) == 40
    engine.close()


def test_a_step_that_fails_halfway_is_fenced(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Part of it may be running on the device: without a fence its pages would be unmapped under it."""
    launched = 0

    def count() -> None:
        nonlocal launched
        launched += 1

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("out of memory")

    engine.submit("0", prompts(20)[0], GREEDY)
    with monkeypatch.context() as patch:
        patch.setattr(engine.memory, "launched", count)
        patch.setattr(engine.executor._runner._module, "forward", fail)
        with pytest.raises(RuntimeError):
            engine.step()
    assert launched == 1
    engine.cancel("0")


def test_a_budget_out_of_bounds_is_the_callers_error(engine: Engine) -> None:
    with pytest.raises(RequestError, match="must be between") as error:
        engine.set_budget(1, 1)
    assert error.value.param == "budget_bytes"


def test_sequences_of_both_views_in_one_batch(make_checkpoint: MakeCheckpoint) -> None:
    """When the mappings run out, "auto" goes on through block tables, in the middle of a sequence too."""
    outputs = []
    for max_mappings in (50_000, 60):
        engine = make_engine(make_checkpoint, kv_memory_bytes=100 * BLOCK_BYTES, max_model_len=200)
        policy = engine.memory.policy
        policy.options = dataclasses.replace(policy.options, max_mappings=max_mappings)
        for i, prompt in enumerate(prompts(60, 31, 47, 16, 90, 5)):
            engine.submit(str(i), prompt, GREEDY)
        outputs.append(run(engine))
        assert (engine.report().demotions > 0) == (max_mappings == 60)
        engine.close()
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("view", ["region", "block_table"])
def test_a_window_layer_keeps_only_its_window(make_checkpoint: MakeCheckpoint, view: View) -> None:
    folder = make_checkpoint("mistral", **ARCHITECTURES["mistral"][1])
    engine = Engine(
        EngineConfig(
            model=str(folder),
            kv_memory_bytes=16 << 20,
            skip_tokenizer_init=True,
            kv_view=view,
            block_tokens=16,
            max_num_batched_tokens=64,
        )
    )
    engine.submit("long", prompts(600)[0], GREEDY)
    while engine.has_work:
        engine.step()
        engine.check_integrity()
        # 48 tokens and a chunk of 64 touch at most eight blocks; after the prompt 48 touch four, and a next one.
        decoding = any(r.num_output_tokens for request in engine.scheduler.running for r in request.sequences)
        assert engine.report().active_bytes <= (5 if decoding else 8) * BLOCK_BYTES
    engine.close()


def test_a_prompt_as_long_as_the_context(engine: Engine) -> None:
    engine.submit("full", prompts(1023)[0], SamplingParams(max_tokens=None, temperature=0))
    assert len(run(engine)["full"]) == 1


def test_more_requests_than_sequences(engine: Engine) -> None:
    for i, prompt in enumerate(prompts(*[7] * 30)):
        engine.submit(str(i), prompt, SamplingParams(max_tokens=1 + i % 5, temperature=0, ignore_eos=True))
    assert {int(i): len(tokens) for i, tokens in run(engine).items()} == {i: 1 + i % 5 for i in range(30)}


def test_a_budget_below_the_number_of_sequences(make_checkpoint: MakeCheckpoint) -> None:
    engine = make_engine(make_checkpoint, max_num_batched_tokens=3)
    for i, prompt in enumerate(prompts(*[10] * 8)):
        engine.submit(str(i), prompt, GREEDY)
    assert all(len(tokens) == 40 for tokens in run(engine).values())
    engine.close()


def test_sampling_is_reproducible_in_any_company(engine: Engine) -> None:
    seeded = SamplingParams(max_tokens=20, temperature=0.8, top_p=0.9, seed=42, ignore_eos=True)
    engine.submit("seeded", prompts(33)[0], seeded)
    alone = run(engine)["seeded"]
    for i, prompt in enumerate(prompts(100, 3)):
        engine.submit(str(i), prompt, SamplingParams(max_tokens=30, ignore_eos=True))
    engine.step()
    engine.submit("seeded", prompts(33)[0], seeded)
    assert run(engine)["seeded"] == alone


def test_cancel_at_every_stage(engine: Engine) -> None:
    for i, prompt in enumerate(prompts(*[40] * 12)):
        engine.submit(str(i), prompt, GREEDY)
    engine.cancel("11")  # waiting
    engine.step()
    engine.cancel("0")  # running
    engine.step()
    engine.cancel("0")  # not there any more
    outputs = run(engine)
    assert sorted(map(int, outputs)) == list(range(1, 11))
    assert len(outputs["10"]) == 40


def test_eos_ends_a_request(engine: Engine) -> None:
    """The first greedy token, declared to be EOS, is also the last."""
    prompt = prompts(12)[0]
    engine.submit("long", prompt, GREEDY)
    first = run(engine)["long"][0]
    engine.vocabulary.eos_token_ids = frozenset([first])
    engine.submit("short", prompt, SamplingParams(max_tokens=40, temperature=0))
    deltas = []
    while engine.has_work:
        deltas += engine.step()
    assert [(d.token_ids, d.finish_reason) for d in deltas] == [((first,), "stop")]


@pytest.mark.parametrize(
    ("length", "max_tokens", "param"), [(1024, None, "prompt"), (1000, 25, "max_tokens"), (5000, 1, "prompt")]
)
def test_what_never_fits_is_refused_at_once(engine: Engine, length: int, max_tokens: int | None, param: str) -> None:
    with pytest.raises(ContextLengthError, match="1024 tokens") as error:
        engine.submit("x", [1] * length, SamplingParams(max_tokens=max_tokens))
    assert error.value.param == param
    assert not engine.has_work


def test_bad_prompts_are_refused(engine: Engine) -> None:
    with pytest.raises(RequestError, match="empty"):
        engine.submit("x", [], GREEDY)
    with pytest.raises(RequestError, match=f"between 0 and {VOCAB_SIZE - 1}"):
        engine.submit("x", [1, VOCAB_SIZE], GREEDY)
    with pytest.raises(RequestError, match="stop needs a tokenizer"):
        engine.submit("x", [1], SamplingParams(stop="a"))
    engine.submit("x", [1], GREEDY)
    with pytest.raises(RequestError, match="in use"):
        engine.submit("x", [1], GREEDY)
    engine.cancel("x")


def test_a_failed_step_loses_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.submit("x", prompts(20)[0], GREEDY)
    engine.step()

    def fail(*_: object) -> None:
        raise MapError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(engine.memory, "ensure", fail)
        with pytest.raises(MapError):
            engine.step()
    engine.check_integrity()
    assert len(run(engine)["x"]) == 39


def test_logits_that_are_no_numbers_fail_their_request_only(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.submit("broken", prompts(20)[0], GREEDY)
    engine.submit("sound", prompts(20)[0], GREEDY)
    real = engine.executor._runner.run

    def spoil(batch: StepBatch) -> torch.Tensor:
        logits = real(batch).clone()
        logits[0, 7] = torch.nan
        return logits

    with monkeypatch.context() as patch:
        patch.setattr(engine.executor._runner, "run", spoil)
        broken, sound = engine.step()
    assert (broken.request_id, broken.token_ids, broken.finished) == ("broken", (), True)
    assert "not finite" in str(broken.error)
    assert sound.error is None
    assert len(run(engine)["sound"]) == 39


def test_settings_that_cannot_work(make_checkpoint: MakeCheckpoint) -> None:
    with pytest.raises(ConfigError, match="below two blocks"):
        make_engine(make_checkpoint, kv_memory_bytes=BLOCK_BYTES)
    with pytest.raises(ConfigError, match="does not fit into the KV cache"):
        make_engine(make_checkpoint, kv_memory_bytes=3 * BLOCK_BYTES, max_model_len=100)
    with pytest.raises(ConfigError, match="beyond the 1024 positions"):
        make_engine(make_checkpoint, max_model_len=2000)
    with pytest.raises(ConfigError, match="block_tokens 24 must divide"):
        make_engine(make_checkpoint, block_tokens=24)
    with pytest.raises(ConfigError, match="attention 'fast' is unknown"):
        make_engine(make_checkpoint, attention="fast")
    with pytest.raises(ConfigError, match="choose one of"):
        make_engine(make_checkpoint, dtype="int3")


@pytest.mark.parametrize(("asked", "block_tokens"), [(None, 16), (1 << 30, 64)])
def test_blocks_are_longer_only_for_a_ceiling_somebody_asked_for(
    make_checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch, asked: int | None, block_tokens: int
) -> None:
    """Pages are limited: the default ceiling of a small model on a large machine made blocks of 256 tokens."""
    machine = dataclasses.replace(Machine.detect(), max_map_count=65_530)
    monkeypatch.setattr(Machine, "detect", lambda: machine)
    engine = make_engine(make_checkpoint, kv_memory_bytes=asked)
    [group] = engine.memory.groups
    assert group.layout.block_tokens == block_tokens
    assert engine.report().budget_bytes <= kv_plan.MAX_PAGES["cpu"] * group.layout.page_bytes
    engine.close()


@pytest.mark.parametrize("settings", [{"max_num_seqs": 1}, {"max_model_len": 16}, {"kv_memory_bytes": 2 * BLOCK_BYTES}])
def test_the_smallest_settings_work(make_checkpoint: MakeCheckpoint, settings: dict[str, int]) -> None:
    """The self-test needed two sequences of 21 tokens, whatever the settings allowed."""
    engine = make_engine(make_checkpoint, **settings)
    for i in range(3):
        engine.submit(str(i), [1, 2, 3], SamplingParams(max_tokens=5, temperature=0, ignore_eos=True))
    assert all(len(tokens) == 5 for tokens in run(engine).values())
    engine.close()


def test_a_small_cache_limits_the_context(make_checkpoint: MakeCheckpoint) -> None:
    engine = make_engine(make_checkpoint, kv_memory_bytes=4 * BLOCK_BYTES)
    assert engine.max_model_len == 64
    engine.close()


def test_tokens_in_flight_come_before_the_error_of_their_request(make_checkpoint: MakeCheckpoint) -> None:
    """A fork waits for them. They were returned one step late, after the request had ended: `AsyncEngine` stopped."""
    engine = make_engine(make_checkpoint, async_scheduling="on")
    engine.submit("0", prompts(20)[0], GREEDY, timeout_s=600)
    seen = [delta for _ in range(5) for delta in engine.step()]
    num_before = sum(len(delta.token_ids) for delta in seen)
    engine.fork("0", "fork", GREEDY)
    assert len(engine.requests["0"].sequences[0].token_ids) == 20 + num_before + 1
    engine.requests["0"].deadline = engine._next_deadline = 0.0
    deltas = engine.step()
    assert [(delta.request_id, delta.error is not None) for delta in deltas] == [("0", False), ("0", True)]
    assert len(deltas[0].token_ids) == 1
    while engine.has_work:
        assert all(delta.request_id == "fork" for delta in engine.step())
    engine.check_integrity()
    engine.close()


def test_a_sampler_that_fails_preempts_nobody(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """All running requests were computed again, although nothing of the step had been committed."""

    def fail(*_: object) -> None:
        raise IndexError("injected")

    for i, prompt in enumerate(prompts(20, 30)):
        engine.submit(str(i), prompt, GREEDY)
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr("folio.app.engine.step.token_selection.launch_sampling", fail)
        patch.setattr("folio.app.engine.step.token_selection.sample_apart", fail)
        with pytest.raises(IndexError):
            engine.step()
    assert sum(engine.scheduler.begun.num_preempted.values()) == 0
    engine.cancel_all()
    engine.check_integrity()
