"""The step loop: pressure, limits, cancellation; memory is all there afterwards."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from folio.app.engine.engine import Engine
from folio.app.engine.memory import kv_plan
from folio.app.engine.sampling import sampler
from folio.app.engine.sampling.params import SamplingParams
from folio.app.engine.step import step_loop, token_selection
from folio.app.errors import ConfigError, ContextLengthError, RequestError
from folio.vmem import MapError, OutOfPages, View
from tests.app.engine.engines import BLOCK_BYTES, MakeEngine, answers, greedy, prompts, raising, run, steps
from tests.conftest import VOCAB_SIZE

GREEDY = greedy(40)
LENGTHS = (60, 31, 47, 16, 90, 5)


def submit(engine: Engine, *lengths: int) -> None:
    for i, prompt in enumerate(prompts(*lengths)):
        engine.submit(str(i), prompt, GREEDY)


def test_a_lowered_budget_loses_nothing(make_engine: MakeEngine) -> None:
    """Lowered to what one sequence needs in the middle of a run and raised again: the same tokens, at another pace."""
    engine = make_engine(kv_memory_bytes=100 * BLOCK_BYTES, max_model_len=140)
    submit(engine, *LENGTHS)
    expected = answers(engine)
    submit(engine, *LENGTHS)
    found: dict[str, list[int]] = {name: [] for name in expected}
    for step in range(200):
        if step == 5:
            assert engine.set_budget(9 * BLOCK_BYTES, 1) == "deferred"
        if step == 60:
            assert engine.report().active_bytes <= 9 * BLOCK_BYTES
            assert engine.set_budget(100 * BLOCK_BYTES, 2) == "applied"
        for delta in engine.step() if engine.has_work else ():
            found[delta.request_id] += delta.token_ids
        engine.check_integrity()
    assert found == expected
    with pytest.raises(RequestError, match="must be between") as error:
        engine.set_budget(1, 3)
    assert error.value.param == "budget_bytes"


def test_a_device_smaller_than_the_budget_fails_the_request(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waited for ever, and everybody behind it."""
    engine = make_engine(kv_idle_release_s=0.0)
    monkeypatch.setattr(step_loop, "_GIVE_UP_S", 0.05)
    while engine.report().physical_bytes:  # of the swaps that are tried at the start
        engine.memory.wait_for_progress(0.1)
    with monkeypatch.context() as patch:
        patch.setattr(engine.memory.backend, "create", raising(OutOfPages(1, 0)))
        submit(engine, 100)
        assert [str(delta.error) for delta in steps(engine)] == [
            "the device has too little memory for this request, although the budget allows it"
        ]
    submit(engine, 100)
    assert len(answers(engine)["0"]) == 40


FAILING: dict[str, Callable[[Any], list[tuple[Any, str]]]] = {
    "mapped": lambda engine: [(engine.memory, "ensure")],
    "computed": lambda engine: [(engine.model.module, "forward")],
    "sampled": lambda _: [(token_selection, "launch_sampling"), (token_selection, "sample_apart")],
    "sampled together and alone": lambda _: [(token_selection, "launch_sampling"), (sampler, "launch_sampling")],
}


@pytest.mark.parametrize("where", FAILING)
def test_a_step_that_fails_loses_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Part of it may be running on the device: without a fence its pages would be unmapped under it. Regression: what a
    failed sampler was to sample from counted as computed; all running requests were preempted."""
    submit(engine, 20, 30)
    engine.step()
    launched, num_fences = engine.memory.launched, 0

    def fence() -> None:
        nonlocal num_fences
        num_fences += 1
        launched()

    with monkeypatch.context() as patch:
        patch.setattr(engine.memory, "launched", fence)
        for holder, name in FAILING[where](engine):
            patch.setattr(holder, name, raising(MapError("injected")))
        with pytest.raises(MapError):
            engine.step()
    assert num_fences == (where != "mapped")
    assert not any(engine.scheduler.begun.num_preempted.values())
    engine.check_integrity()
    assert [len(output) for output in answers(engine).values()] == [39, 39]


def test_sequences_of_both_views_in_one_batch(make_engine: MakeEngine) -> None:
    """When the mappings run out, "auto" goes on through block tables, in the middle of a sequence too."""
    found = []
    for max_mappings in (50_000, 60):
        engine = make_engine(kv_memory_bytes=100 * BLOCK_BYTES, max_model_len=200)
        policy = engine.memory.policy
        policy.options = dataclasses.replace(policy.options, max_mappings=max_mappings)
        submit(engine, *LENGTHS)
        found.append(answers(engine))
        assert (engine.report().demotions > 0) == (max_mappings == 60)
    assert found[0] == found[1]


@pytest.mark.parametrize("view", ["region", "block_table"])
def test_a_window_layer_keeps_only_its_window(make_engine: MakeEngine, view: View) -> None:
    engine = make_engine("mistral", kv_view=view, block_tokens=16, max_num_batched_tokens=64)
    submit(engine, 600)
    while engine.has_work:
        engine.step()
        engine.check_integrity()
        # 48 tokens and a chunk of 64 touch at most eight blocks; after the prompt 48 touch four, and a next one.
        decoding = any(r.num_output_tokens for request in engine.scheduler.running for r in request.sequences)
        assert engine.report().active_bytes <= (5 if decoding else 8) * BLOCK_BYTES


def test_more_requests_than_sequences(engine: Engine) -> None:
    for i, prompt in enumerate(prompts(*[7] * 30)):
        engine.submit(str(i), prompt, greedy(1 + i % 5))
    assert {int(i): len(tokens) for i, tokens in answers(engine).items()} == {i: 1 + i % 5 for i in range(30)}


@pytest.mark.parametrize(
    ("settings", "lengths", "max_tokens", "expected"),
    [
        ({}, [1023], None, 1),  # a prompt as long as the context
        ({"max_num_batched_tokens": 3}, [10] * 8, 40, 40),  # a budget below the number of sequences
        # Regression: the self-test needed two sequences of 21 tokens, whatever the settings allowed.
        ({"max_num_seqs": 1}, [3] * 3, 5, 5),
        ({"max_model_len": 16}, [3] * 3, 5, 5),
        ({"kv_memory_bytes": 2 * BLOCK_BYTES}, [3] * 3, 5, 5),
    ],
)
def test_extremes_work(
    make_engine: MakeEngine, settings: dict[str, int], lengths: list[int], max_tokens: int | None, expected: int
) -> None:
    engine = make_engine(**settings)
    for i, prompt in enumerate(prompts(*lengths)):
        engine.submit(str(i), prompt, SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True))
    assert [len(tokens) for tokens in answers(engine).values()] == [expected] * len(lengths)


def test_cancel_at_every_stage(engine: Engine) -> None:
    submit(engine, *[40] * 12)
    for name in ("11", "0", "0"):  # one waits, one runs, one is not there any more
        engine.cancel(name)
        engine.step()
    found = answers(engine)
    assert sorted(map(int, found)) == list(range(1, 11))
    assert len(found["10"]) == 40


def test_eos_ends_a_request(engine: Engine) -> None:
    """The first greedy token, declared to be EOS, is also the last."""
    submit(engine, 12)
    first = answers(engine)["0"][0]
    engine.vocabulary.eos_token_ids = frozenset([first])
    engine.submit("short", prompts(12)[0], SamplingParams(max_tokens=40, temperature=0))
    assert [(d.token_ids, d.finish_reason) for d in steps(engine)] == [((first,), "stop")]


@pytest.mark.parametrize(
    ("prompt", "params", "param", "said"),
    [
        ([1] * 1024, {}, "prompt", "1024 tokens"),
        ([1] * 1000, {"max_tokens": 25}, "max_tokens", "1024 tokens"),
        ([1] * 5000, {"max_tokens": 1}, "prompt", "1024 tokens"),
        ([], {}, "prompt", "empty"),
        ([1, VOCAB_SIZE], {}, "prompt", f"between 0 and {VOCAB_SIZE - 1}"),
        ([1], {"stop": "a"}, "stop", "stop needs a tokenizer"),
    ],
)
def test_what_cannot_be_served_is_refused_at_once(
    engine: Engine, prompt: list[int], params: dict[str, Any], param: str, said: str
) -> None:
    with pytest.raises(RequestError, match=said) as error:
        engine.submit("x", prompt, SamplingParams(**({"max_tokens": None} | params)))
    assert isinstance(error.value, ContextLengthError) == (said == "1024 tokens")
    assert error.value.param == param
    assert not engine.has_work


def test_a_name_in_use_is_refused(engine: Engine) -> None:
    for _ in range(2):
        engine.submit("x", [1], GREEDY)
        with pytest.raises(RequestError, match="in use"):
            engine.submit("x", [1], GREEDY)
        engine.cancel("x")


def test_logits_that_are_no_numbers_fail_their_request_only(engine: Engine) -> None:
    for name in ("broken", "sound"):
        engine.submit(name, prompts(20)[0], GREEDY)

    def spoil(_: torch.nn.Module, __: object, out: Any) -> None:
        out.logits[0, 0, 7] = torch.nan

    hook = engine.model.module.register_forward_hook(spoil)
    broken, sound = engine.step()
    hook.remove()
    assert (broken.request_id, broken.token_ids, broken.finished) == ("broken", (), True)
    assert "not finite" in str(broken.error)
    assert sound.error is None
    assert len(answers(engine)["sound"]) == 39


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"kv_memory_bytes": BLOCK_BYTES}, "below two blocks"),
        ({"kv_memory_bytes": 3 * BLOCK_BYTES, "max_model_len": 100}, "does not fit into the KV cache"),
        ({"max_model_len": 2000}, "beyond the 1024 positions"),
        ({"block_tokens": 24}, "block_tokens 24 must divide"),
        ({"attention": "fast"}, "attention 'fast' is unknown"),
        ({"dtype": "int3"}, "choose one of"),
    ],
)
def test_settings_that_cannot_work(make_engine: MakeEngine, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_engine(**settings)


@pytest.mark.parametrize(("asked", "block_tokens"), [(None, 16), (1 << 30, 64)])
def test_blocks_are_longer_only_for_a_ceiling_somebody_asked_for(
    make_engine: MakeEngine, use_machine: Callable[..., None], asked: int | None, block_tokens: int
) -> None:
    """Pages are limited: the default ceiling of a small model on a large machine made blocks of 256 tokens."""
    use_machine(max_map_count=65_530)
    engine = make_engine(kv_memory_bytes=asked)
    [group] = engine.memory.groups
    assert group.layout.block_tokens == block_tokens
    assert engine.report().budget_bytes <= kv_plan.MAX_PAGES["cpu"] * group.layout.page_bytes


def test_a_small_cache_limits_the_context(make_engine: MakeEngine) -> None:
    assert make_engine(kv_memory_bytes=4 * BLOCK_BYTES).max_model_len == 64


def test_tokens_in_flight_come_before_the_error_of_their_request(make_engine: MakeEngine) -> None:
    """A fork waits for them. They were returned one step late, after the request had ended: `AsyncEngine` stopped."""
    engine = make_engine(async_scheduling="on")
    engine.submit("0", prompts(20)[0], GREEDY, timeout_s=600)
    num_before = sum(len(delta.token_ids) for _ in range(5) for delta in engine.step())
    engine.fork("0", "fork", GREEDY)
    assert len(engine.requests["0"].sequences[0].token_ids) == 20 + num_before + 1
    engine.requests["0"].deadline = engine._next_deadline = 0.0
    deltas = engine.step()
    assert [(delta.request_id, delta.error is not None) for delta in deltas] == [("0", False), ("0", True)]
    assert len(deltas[0].token_ids) == 1
    assert run(engine).keys() == {"fork"}
