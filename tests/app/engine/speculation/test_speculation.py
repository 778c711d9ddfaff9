"""Speculation in the engine: the same outputs in fewer steps, also under memory pressure, with all memory freed."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from folio.app.engine.engine import Engine
from folio.app.engine.report import StepTimes
from folio.app.engine.sampling.params import SamplingParams
from folio.app.engine.speculation.draft import DraftProposer
from folio.app.engine.speculation.speculation import SpeculationCounts
from folio.app.errors import ConfigError, EngineError
from tests.app.engine.engines import BLOCK_BYTES, MakeEngine, folder_of, greedy, outputs, raising, run, steps, tokens_of
from tests.app.engine.tensor_parallel.thread_ranks import thread_ranks
from tests.conftest import MakeCheckpoint, tokens

GREEDY = greedy(40)
SEEDED = SamplingParams(max_tokens=40, temperature=0.7, top_p=0.9, seed=8, ignore_eos=True)
# Of few tokens, so that even random weights repeat themselves.
FEW = SamplingParams(max_tokens=40, seed=8, ignore_eos=True, logit_bias={10: 80.0, 11: 80.0, 12: 80.0})


@pytest.fixture(autouse=True)
def longest_drafts(expect_steps: Callable[..., None]) -> None:
    """As if steps were so slow that the longest drafts pay, whatever their acceptance."""
    expect_steps(StepTimes(fixed_s=1e6))


PROMPTS = [tokens(20), tokens(12, 1) * 4, tokens(90, 2), tokens(3, 3) * 9, tokens(31, 4)]


def answer(engine: Engine, prompts: list[list[int]], *params: SamplingParams) -> list[list[int]]:
    for i, prompt in enumerate(prompts):
        engine.submit(str(i), prompt, params[i % len(params)])
    found = run(engine)
    return [tokens_of(found[str(i)]) for i in range(len(prompts))]


def counts_of(engine: Engine) -> SpeculationCounts:
    assert engine.speculation is not None
    return engine.speculation.counts


@pytest.fixture
def drafts_of(make_checkpoint: MakeCheckpoint) -> Callable[..., dict[str, Any]]:
    """The settings of a way to speculate: "ngram", or a draft model, which is a tiny one or the model itself."""

    def settings(way: str, model: str = "llama") -> dict[str, Any]:
        draft = {"ngram": None, "own": model, "tiny": "tiny"}[way]
        if draft is None:
            return {"speculation": "ngram"}
        return {"speculation": "draft", "draft_model": str(folder_of(make_checkpoint, draft))}

    return settings


# (model, way, settings)
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "ngram", {}),
    ("llama", "own", {}),
    ("gemma2", "ngram", {}),
    ("gemma2", "own", {}),
    ("llama", "own", {"launch": thread_ranks, "tensor_parallel_size": 2}),
    # Requests are preempted between drafts, and a draft model lacks memory for all of them.
    ("llama", "ngram", {"preemption": "swap", "kv_memory_bytes": 14 * BLOCK_BYTES}),
    ("llama", "tiny", {"preemption": "recompute", "kv_memory_bytes": 16 * BLOCK_BYTES}),
    ("llama", "own", {"preemption": "swap", "kv_memory_bytes": 28 * BLOCK_BYTES}),
]


@pytest.mark.parametrize(("model", "way", "settings"), CASES)
def test_outputs_are_the_same(
    make_engine: MakeEngine, drafts_of: Any, model: str, way: str, settings: dict[str, Any]
) -> None:
    """Greedy and seeded requests side by side. Drafts of the model itself are accepted."""
    is_pressed = "preemption" in settings
    params = [dataclasses.replace(each, max_tokens=60 if is_pressed else 40) for each in (GREEDY, SEEDED, FEW)]
    prompts = PROMPTS[:4] if is_pressed else PROMPTS
    both = {"max_model_len": 160, "max_num_batched_tokens": 50} if is_pressed else {}
    expected = answer(make_engine(model, **both), prompts, *params)
    engine = make_engine(model, **drafts_of(way, model), **both, **settings)
    if "launch" in settings:  # each rank has half of the heads, and rank 0 the draft model, unsharded
        assert engine.report().budget_bytes == pytest.approx((16 << 20) / 3, rel=0.01)
    assert answer(engine, prompts, *params) == expected
    counts = counts_of(engine)
    assert counts.proposer == ("ngram" if way == "ngram" else "draft")
    assert counts.draft_tokens > 20
    assert (sum(engine.load.take_activity().num_preempted.values()) > 0) == is_pressed
    if way == "own" and not is_pressed:
        assert counts.accepted_tokens > 0.97 * counts.draft_tokens
    elif way == "ngram":
        assert counts.accepted_tokens > 0


@pytest.mark.parametrize("way", ["ngram", "own"])
def test_a_loop_is_drafted_whole(make_engine: MakeEngine, drafts_of: Any, way: str) -> None:
    """Repeated tokens take one step for the longest draft and one more token."""
    engine = make_engine(**drafts_of(way), max_draft_tokens=8)
    engine.submit("0", tokens(20), dataclasses.replace(GREEDY, logit_bias={10: 100.0}))
    found, num_steps = [], 0
    while engine.has_work:
        found += [token for delta in engine.step() for token in delta.token_ids]
        num_steps += 1
    assert found == [10] * 40
    counts = counts_of(engine)
    assert num_steps <= 8
    assert counts.accepted_tokens == counts.draft_tokens == 40 - num_steps


def test_prefixes_with_rejected_drafts(make_engine: MakeEngine, drafts_of: Any) -> None:
    """A second request hits generated tokens in the prefix cache, and never rejected drafts."""
    engine, plain = make_engine(**drafts_of("tiny"), block_tokens=16), make_engine(block_tokens=16)
    prompts = PROMPTS
    for _ in range(2):
        found = answer(engine, prompts, GREEDY)
        assert found == answer(plain, prompts, GREEDY)
        prompts = [prompt + output + tokens(5) for prompt, output in zip(prompts, found, strict=True)]
    counts = counts_of(engine)
    assert counts.accepted_tokens < counts.draft_tokens / 4  # of random weights


def test_forks_beams_and_penalties_are_not_drafted(make_engine: MakeEngine, drafts_of: Any) -> None:
    """Sequences are drafted for after they are forked; sampling that depends on preceding tokens never is."""
    params = [
        dataclasses.replace(SEEDED, n=3, max_tokens=12),
        SamplingParams(max_tokens=12, best_of=3, temperature=0, use_beam_search=True, ignore_eos=True),
        greedy(12, repetition_penalty=1.3),
        greedy(1),
    ]
    every = []
    for settings in ({}, drafts_of("ngram"), drafts_of("own")):
        engine = make_engine(max_num_batched_tokens=39, **settings)
        found: dict[tuple[str, int], list[int]] = {}
        seen: Counter[tuple[str, int, int]] = Counter()
        for i, each in enumerate(params):
            # Its last token alone, as if it decoded; and the text says how it might go on.
            engine.submit(f"{i} long", tokens(4, i) * 10, each)
            found |= outputs(engine) if i == 0 else {}
            engine.submit(str(i), [7], each)
        for delta in steps(engine):
            found.setdefault((delta.request_id, delta.index), []).extend(tokens_of([delta]))
            seen[delta.request_id, delta.index, len(delta.token_ids)] += 1
        every.append(found)
    assert every[0] == every[1] == every[2]
    assert any(count > 1 for name, _, count in seen if name.startswith("0"))
    assert all(count == 1 for name, _, count in seen if name.startswith("2"))


def test_a_failing_draft_model_costs_drafts_only(
    make_engine: MakeEngine, drafts_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failure ended the step, and with that every running request."""
    engine = make_engine(**drafts_of("own"))
    expected = answer(engine, PROMPTS, GREEDY)
    for i, prompt in enumerate(PROMPTS):
        engine.submit(str(i), prompt, GREEDY)
    deltas = [delta for _ in range(3) for delta in engine.step()]
    with monkeypatch.context() as patch:
        patch.setattr(DraftProposer, "run", raising(EngineError("no more")))
        deltas += engine.step()
    deltas += steps(engine)
    assert [tokens_of([d for d in deltas if d.request_id == str(i)]) for i in range(len(PROMPTS))] == expected


@pytest.mark.parametrize(
    ("model", "draft", "settings", "said"),
    [
        ("lfm2", None, {"speculation": "ngram"}, "set it to 'off'"),
        ("llama", "lfm2", {"speculation": "draft"}, "choose a draft model with attention only"),
        ("llama", "tiny", {"speculation": "draft", "kv_memory_bytes": 50_000}, "below two blocks"),
    ],
)
def test_impossible_settings_are_refused(
    make_engine: MakeEngine,
    make_checkpoint: MakeCheckpoint,
    model: str,
    draft: str | None,
    settings: dict[str, Any],
    said: str,
) -> None:
    with pytest.raises(ConfigError, match=said):
        make_engine(model, draft_model=draft and str(folder_of(make_checkpoint, draft)), **settings)


def test_drafts_end_where_the_output_ends(make_engine: MakeEngine, drafts_of: Any) -> None:
    engine = make_engine(**drafts_of("own"))
    [output] = answer(engine, PROMPTS[:1], GREEDY)
    before = counts_of(engine).draft_tokens
    stop = dataclasses.replace(GREEDY, stop_token_ids=(output[11],))
    assert answer(engine, PROMPTS[:1], stop) == [output[: output.index(output[11]) + 1]]
    assert counts_of(engine).draft_tokens - before <= 12
