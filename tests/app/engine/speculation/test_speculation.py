"""Speculation in the engine: the same outputs in fewer steps, also under memory pressure, with all memory freed."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch

from folio.app.config.engine import EngineConfig
from folio.app.engine.engine import Engine
from folio.app.engine.report import StepTimes
from folio.app.engine.sampling.params import SamplingParams
from folio.app.engine.speculation import length
from folio.app.engine.speculation.draft import DraftProposer
from folio.app.errors import ConfigError, EngineError
from tests.app.engine.tensor_parallel.thread_ranks import thread_ranks
from tests.conftest import ARCHITECTURES, HYBRIDS, MakeCheckpoint, tokens

TINY = ARCHITECTURES["llama"][1] | {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48}
GREEDY = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=40, temperature=0.7, top_p=0.9, seed=8, ignore_eos=True)
# Of few tokens, so that even random weights repeat themselves.
FEW = SamplingParams(max_tokens=40, seed=8, ignore_eos=True, logit_bias={10: 80.0, 11: 80.0, 12: 80.0})


@pytest.fixture(autouse=True)
def longest_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if steps were so slow that the longest drafts pay, whatever their acceptance."""
    times = {"step": StepTimes(fixed_s=10.0), "draft": StepTimes()}
    choose = length.choose_lengths
    monkeypatch.setattr(length, "choose_lengths", lambda *args, **kwargs: choose(*args, **(kwargs | times)))


class Run:
    """An engine that runs requests, with a check of memory after each step."""

    def __init__(self, folder: str, *, launch: Any = None, **settings: Any) -> None:
        defaults = {"kv_memory_bytes": 16 << 20, "skip_tokenizer_init": True, "max_num_seqs": 8, "num_threads": 1}
        config = EngineConfig(model=folder, **(defaults | settings))
        self.engine = Engine(config, launch) if launch else Engine(config)
        self.num_steps = 0

    def __call__(self, prompts: list[list[int]], *params: SamplingParams, close: bool = True) -> list[list[int]]:
        outputs: list[list[int]] = [[] for _ in prompts]
        for i, prompt in enumerate(prompts):
            self.engine.submit(str(i), prompt, params[i % len(params)])
        while self.engine.has_work:
            for delta in self.engine.step():
                assert delta.error is None
                outputs[int(delta.request_id)].extend(delta.token_ids)
            self.num_steps += 1
            self.engine.check_integrity()
        if close:
            self.engine.close()
        return outputs


PROMPTS = [tokens(20), tokens(12, 1) * 4, tokens(90, 2), tokens(3, 3) * 9, tokens(31, 4)]


@pytest.fixture
def folder(make_checkpoint: MakeCheckpoint) -> str:
    return str(make_checkpoint("llama", **ARCHITECTURES["llama"][1]))


@pytest.mark.parametrize("speculation", ["ngram", "draft"])
@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_outputs_are_the_same(architecture: str, speculation: str, make_checkpoint: MakeCheckpoint) -> None:
    """Greedy and seeded requests side by side. Drafts of the model itself are accepted."""
    folder = str(make_checkpoint(*ARCHITECTURES[architecture][:1], **ARCHITECTURES[architecture][1]))
    expected = Run(folder)(PROMPTS, GREEDY, SEEDED, FEW)
    run = Run(folder, speculation=speculation, draft_model=folder if speculation == "draft" else None)
    assert run(PROMPTS, GREEDY, SEEDED, FEW) == expected
    assert run.engine.speculation is not None
    counts = run.engine.speculation.counts
    assert counts.proposer == speculation
    assert counts.draft_tokens > 20
    if speculation == "draft":
        assert counts.accepted_tokens > 0.97 * counts.draft_tokens
        assert run.num_steps < 15
    else:
        assert counts.accepted_tokens > 0


def test_a_loop_is_drafted_from_the_text(folder: str) -> None:
    """Repeated tokens take one step for the longest draft and one more token."""
    one = dataclasses.replace(GREEDY, logit_bias={10: 100.0})
    run = Run(folder, speculation="ngram", max_draft_tokens=8)
    assert run([tokens(20)], one) == [[10] * 40]
    assert run.engine.speculation is not None
    counts = run.engine.speculation.counts
    assert counts.accepted_tokens == 40 - run.num_steps
    assert run.num_steps <= 8
    assert counts.accepted_tokens == counts.draft_tokens


@pytest.mark.parametrize(
    ("speculation", "preemption", "num_blocks"), [("ngram", "swap", 14), ("tiny", "recompute", 16), ("own", "swap", 28)]
)
def test_under_pressure(
    folder: str, make_checkpoint: MakeCheckpoint, speculation: str, preemption: str, num_blocks: int
) -> None:
    """Requests are preempted between drafts, and a draft model lacks memory for all of them."""
    draft = {"ngram": None, "own": folder, "tiny": str(make_checkpoint("llama", **TINY))}[speculation]
    settings: dict[str, Any] = {"max_model_len": 160, "max_num_batched_tokens": 50}
    params = [dataclasses.replace(each, max_tokens=60) for each in (GREEDY, SEEDED, FEW)]
    expected = Run(folder, **settings)(PROMPTS[:4], *params)
    run = Run(
        folder,
        speculation="draft" if draft else "ngram",
        draft_model=draft,
        preemption=preemption,
        kv_memory_bytes=num_blocks * 16 * 768,
        **settings,
    )
    assert run(PROMPTS[:4], *params) == expected
    assert sum(run.engine.load.take_activity().num_preempted.values()) > 0
    assert run.engine.speculation is not None
    assert run.engine.speculation.counts.draft_tokens > 0


def test_several_ranks(folder: str) -> None:
    """The draft model runs unsharded on rank 0 only."""
    prompts = PROMPTS[:3]
    expected = Run(folder)(prompts, GREEDY, SEEDED)
    run = Run(folder, launch=thread_ranks, tensor_parallel_size=2, speculation="draft", draft_model=folder)
    assert run.engine.report().budget_bytes == pytest.approx(
        (16 << 20) / 3, rel=0.01
    )  # each rank has half of the heads
    assert run(prompts, GREEDY, SEEDED) == expected
    assert run.engine.speculation is not None
    counts = run.engine.speculation.counts
    assert counts.accepted_tokens > 0.97 * counts.draft_tokens


def test_prefixes_with_rejected_drafts(folder: str, make_checkpoint: MakeCheckpoint) -> None:
    """A second request hits generated tokens in the prefix cache, and never rejected drafts."""
    run = Run(folder, speculation="draft", draft_model=str(make_checkpoint("llama", **TINY)), block_tokens=16)
    plain = Run(folder, block_tokens=16)
    prompts = PROMPTS
    for _ in range(2):
        outputs = run(prompts, GREEDY, close=False)
        assert outputs == plain(prompts, GREEDY, close=False)
        prompts = [prompt + output + tokens(5) for prompt, output in zip(prompts, outputs, strict=True)]
    assert run.engine.speculation is not None
    counts = run.engine.speculation.counts
    assert counts.accepted_tokens < counts.draft_tokens / 4  # of random weights
    run.engine.close()
    plain.engine.close()


def test_forks_beams_and_penalties_are_not_drafted(folder: str) -> None:
    """Sequences are drafted for after they are forked; sampling that depends on preceding tokens never is."""
    params = [
        dataclasses.replace(SEEDED, n=3, max_tokens=12),
        SamplingParams(max_tokens=12, best_of=3, temperature=0, use_beam_search=True, ignore_eos=True),
        dataclasses.replace(GREEDY, repetition_penalty=1.3, max_tokens=12),
        dataclasses.replace(GREEDY, max_tokens=1),
    ]
    outputs = []
    for settings in ({}, {"speculation": "ngram"}, {"speculation": "draft", "draft_model": folder}):
        run = Run(folder, max_num_batched_tokens=39, **settings)
        seen: Counter[tuple[str, int, int]] = Counter()
        found: dict[tuple[str, int], list[int]] = {}
        for i, each in enumerate(params):
            # Its last token alone, as if it decoded; and the text says how it might go on.
            run.engine.submit(f"{i} long", tokens(4, i) * 10, each)
            while run.engine.has_work and i == 0:
                for delta in run.engine.step():
                    found.setdefault((delta.request_id, delta.index), []).extend(delta.token_ids)
            run.engine.submit(str(i), [7], each)
        while run.engine.has_work:
            for delta in run.engine.step():
                assert delta.error is None
                found.setdefault((delta.request_id, delta.index), []).extend(delta.token_ids)
                seen[delta.request_id, delta.index, len(delta.token_ids)] += 1
            run.engine.check_integrity()
        outputs.append(found)
        run.engine.close()
    assert outputs[0] == outputs[1] == outputs[2]
    assert any(count > 1 for name, _, count in seen if name.startswith("0"))
    assert all(count == 1 for name, _, count in seen if name.startswith("2"))


def test_the_distribution_is_the_same(folder: str) -> None:
    """Chi-square over the second and third token of many unseeded samples, with drafts of the model itself."""
    params = SamplingParams(max_tokens=3, temperature=1.0, top_k=3, ignore_eos=True, n=8)
    histograms = []
    for settings in ({}, {"speculation": "draft", "draft_model": folder}):
        run = Run(folder, max_num_seqs=64, **settings)
        counts: Counter[tuple[int, ...]] = Counter()
        for i in range(40):
            run.engine.submit(str(i), [5, 9], params)
        tails: dict[tuple[str, int], tuple[int, ...]] = {}
        while run.engine.has_work:
            for delta in run.engine.step():
                key = delta.request_id, delta.index
                tails[key] = tails.get(key, ()) + delta.token_ids
        counts.update(tails.values())
        histograms.append(counts)
        run.engine.close()
    keys = sorted(set(histograms[0]) | set(histograms[1]))
    observed = torch.tensor([[h[k] for k in keys] for h in histograms], dtype=torch.float64)
    assert observed.sum(dim=1).tolist() == [320, 320]
    expected = observed.sum(dim=0) / 2
    chi_square = ((observed - expected) ** 2 / expected).sum().item()
    assert chi_square < len(keys) + 6 * (2 * len(keys)) ** 0.5


def test_a_failing_draft_model_costs_drafts_only(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The failure ended the step, and with that every running request."""
    run = Run(folder, speculation="draft", draft_model=folder)
    expected = run(PROMPTS, GREEDY, close=False)

    def fail(*_: object) -> None:
        raise EngineError("no more")

    for i, prompt in enumerate(PROMPTS):
        run.engine.submit(str(i), prompt, GREEDY)
    outputs: list[list[int]] = [[] for _ in PROMPTS]
    for step in range(100):
        with monkeypatch.context() as patch:
            if step == 3:
                patch.setattr(DraftProposer, "run", fail)
            for delta in run.engine.step():
                outputs[int(delta.request_id)].extend(delta.token_ids)
        run.engine.check_integrity()
        if not run.engine.has_work:
            break
    assert outputs == expected
    run.engine.close()


def test_impossible_settings_are_refused(make_checkpoint: MakeCheckpoint, folder: str) -> None:
    hybrid = str(make_checkpoint("lfm2", **HYBRIDS["lfm2"]))
    with pytest.raises(ConfigError, match="set it to 'off'"):
        Run(hybrid, speculation="ngram")
    with pytest.raises(ConfigError, match="choose a draft model with attention only"):
        Run(folder, speculation="draft", draft_model=hybrid)
    with pytest.raises(ConfigError, match="below two blocks"):
        Run(folder, speculation="draft", draft_model=str(make_checkpoint("llama", **TINY)), kv_memory_bytes=50_000)


def test_drafts_end_where_the_output_ends(folder: str) -> None:
    run = Run(folder, speculation="draft", draft_model=folder)
    [output] = run([PROMPTS[0]], GREEDY, close=False)
    stop = dataclasses.replace(GREEDY, stop_token_ids=(output[11],))
    assert run.engine.speculation is not None
    before = dataclasses.replace(run.engine.speculation.counts)
    assert run([PROMPTS[0]], stop, close=False) == [output[: output.index(output[11]) + 1]]
    counts = run.engine.speculation.counts
    assert counts.draft_tokens - before.draft_tokens <= 12
    run.engine.close()
