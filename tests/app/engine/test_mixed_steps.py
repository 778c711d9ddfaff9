"""Prompts leave the decodes beside them their pace."""

from __future__ import annotations

import math
from typing import Any

import pytest

from folio.app.config.engine import EngineConfig
from folio.app.engine import SamplingParams
from folio.app.engine.engine import Engine
from folio.app.engine.report import StepTimes
from folio.app.engine.schedule.mixed_steps import LEAST_CHUNK, STRETCH, MixedSteps
from folio.app.engine.schedule.preemption import PreemptionCostModel
from folio.app.engine.schedule.scheduled import Scheduled
from tests.conftest import SMALL, MakeCheckpoint

# A decode alone takes 10 ms, a token of a prompt 1 ms.
TIMES = StepTimes(fixed_s=0.009, token_s=0.001)
PROMPT = [7] * 400


@pytest.mark.parametrize(
    ("longest_s", "times", "most"),
    [
        (0.25, TIMES, 240),
        (0.0, TIMES, 30),  # `STRETCH` times the decode
        (math.inf, TIMES, 800),
        (0.25, StepTimes(fixed_s=0.009, token_s=0.001, attended_s=1e-5), 140),  # they attend to 9,870
        (0.25, StepTimes(fixed_s=0.1, token_s=1.0), LEAST_CHUNK),  # a prompt goes on whatever it costs
        (0.25, StepTimes(), 800),  # nothing is measured yet
    ],
)
def test_a_prompt_beside_a_decode(
    make_checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch, longest_s: float, times: StepTimes, most: int
) -> None:
    engine = _engine(make_checkpoint, longest_s)
    chunks = _chunks(engine)
    monkeypatch.setattr(PreemptionCostModel, "step_times", times)
    engine.submit("alone", PROMPT, _greedy(2))
    _run(engine)
    assert chunks == [(0, 400), (1, 0)], "nobody waits for it"
    chunks.clear()
    engine.submit("decodes", [1], _greedy(100))
    engine.step()
    for name in ("first", "second"):  # together they have as many tokens a step as one
        engine.submit(name, PROMPT, _greedy(1))
    _run(engine)
    slow = [tokens for decodes, tokens in chunks if decodes and tokens]
    assert max(slow) <= most + LEAST_CHUNK
    assert slow[0] == pytest.approx(most, abs=2)
    assert sum(tokens for _, tokens in chunks) == 801, "no token twice"
    engine.close()


def test_a_machine_that_becomes_busy(make_checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = _engine(make_checkpoint, 0.25)
    chunks = _chunks(engine)
    monkeypatch.setattr(PreemptionCostModel, "step_times", TIMES)
    engine.submit("decodes", [1], _greedy(100))
    engine.step()
    steps, seconds = engine.scheduler.mixed_steps, iter((1.0, 1.0, 1.0, 1.0, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1))
    note = steps.note
    monkeypatch.setattr(steps, "note", lambda scheduled, _: note(scheduled, next(seconds)))
    engine.submit("prompt", PROMPT * 2, _greedy(1))
    _run(engine)
    slow = [tokens for decodes, tokens in chunks if decodes and tokens]
    assert slow[0] == 240
    assert min(slow[1:5]) == pytest.approx(30, abs=25)
    assert slow[-2] > 2 * min(slow), "it recovers"
    engine.close()


def test_a_few_prompts_share_a_step() -> None:
    recovery = PreemptionCostModel(512)
    for tokens in (1, 100, 400):
        recovery.observe_step(tokens, 0, 0.009 + 0.001 * tokens)
    steps = MixedSteps(recovery, 0.1)
    steps.begin([_decode()])
    assert steps.fitting_tokens(0, 40) == 40
    assert steps.take(0, 40)
    assert steps.fitting_tokens(1000, 400) == pytest.approx(50, abs=1)
    assert not steps.take(1000, 50)
    steps.begin([])
    assert steps.fitting_tokens(0, 10**6) == 10**6, "no sequence decodes"
    assert STRETCH > 1


def test_decodes_with_drafts_are_decodes() -> None:
    recovery = PreemptionCostModel(512)
    for tokens in (1, 100, 400):
        recovery.observe_step(tokens, 0, 0.009 + 0.001 * tokens)
    prompt, verified = _decode(num_tokens=100, samples=False), _decode(num_tokens=4, drafts=(1, 2, 3))
    fitting = []
    for decode in (_decode(num_tokens=100), verified, _decode()):
        steps = MixedSteps(recovery, 0.1)
        for _ in range(8):
            steps.note([decode, prompt], 1.0)
        steps.begin([_decode()])
        fitting.append(steps.fitting_tokens(0, 400))
    assert fitting[0] == pytest.approx(90, abs=1), "the end of a prompt waits for nothing"
    assert fitting[1:] == [30, 30], "steps took longer than expected: the share of the decodes is left"


def _decode(**changed: Any) -> Any:
    return type("Decode", (), {"num_tokens": 1, "num_attended": 0, "samples": True, "drafts": ()} | changed)()


def _greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)


def _engine(make_checkpoint: MakeCheckpoint, longest_s: float) -> Engine:
    folder = make_checkpoint("llama", **SMALL | {"max_position_embeddings": 1024})
    return Engine(
        EngineConfig(
            model=str(folder),
            kv_memory_bytes=16 << 20,
            skip_tokenizer_init=True,
            prefix_cache=False,
            max_mixed_step_s=None if longest_s == math.inf else longest_s,
        )
    )


def _chunks(engine: Engine) -> list[tuple[int, int]]:
    """(decodes, prompt tokens) of each step to come."""
    chunks: list[tuple[int, int]] = []
    schedule = engine.scheduler.schedule

    def noted(*args: Any, **ahead: bool) -> list[Scheduled]:
        scheduled = schedule(*args, **ahead)
        decodes = [s for s in scheduled if s.sequence.num_output_tokens]
        chunks.append((len(decodes), sum(s.num_tokens for s in scheduled if s not in decodes)))
        return scheduled

    engine.scheduler.schedule = noted  # type: ignore[method-assign]
    return chunks


def _run(engine: Engine) -> None:
    while engine.has_work:
        engine.step()
    engine.check_integrity()
