"""Prompts leave the decodes beside them their pace."""

from __future__ import annotations

from typing import Any

import pytest

from folio.app.engine.engine import Engine
from folio.app.engine.report import StepTimes
from folio.app.engine.schedule.mixed_steps import LEAST_CHUNK, STRETCH, MixedSteps
from folio.app.engine.schedule.preemption import PreemptionCostModel
from folio.app.engine.schedule.scheduled import Scheduled
from tests.app.engine.engines import ExpectSteps, MakeEngine, greedy, run

# A decode alone takes 10 ms, a token of a prompt 1 ms.
TIMES = StepTimes(fixed_s=0.009, token_s=0.001)
PROMPT = [7] * 400


@pytest.mark.parametrize(
    ("longest_s", "times", "most"),
    [
        (0.25, TIMES, 240),
        (0.0, TIMES, 30),  # `STRETCH` times the decode
        (None, TIMES, 800),
        (0.25, StepTimes(fixed_s=0.009, token_s=0.001, attended_s=1e-5), 140),  # they attend to 9,870
        (0.25, StepTimes(fixed_s=0.1, token_s=1.0), LEAST_CHUNK),  # a prompt goes on whatever it costs
        (0.25, StepTimes(), 800),  # nothing is measured yet
    ],
)
def test_a_prompt_beside_a_decode(
    make_engine: MakeEngine, expect_steps: ExpectSteps, longest_s: float | None, times: StepTimes, most: int
) -> None:
    engine = make_engine("tiny", prefix_cache=False, max_mixed_step_s=longest_s)
    chunks = _chunks(engine)
    expect_steps(times)
    engine.submit("alone", PROMPT, greedy(2))
    run(engine)
    assert chunks == [(0, 400), (1, 0)], "nobody waits for it"
    chunks.clear()
    engine.submit("decodes", [1], greedy(100))
    engine.step()
    for name in ("first", "second"):  # together they have as many tokens a step as one
        engine.submit(name, PROMPT, greedy(1))
    run(engine)
    slow = [tokens for decodes, tokens in chunks if decodes and tokens]
    assert max(slow) <= most + LEAST_CHUNK
    assert slow[0] == pytest.approx(most, abs=2)
    assert sum(tokens for _, tokens in chunks) == 801, "no token twice"


def test_a_machine_that_becomes_busy(
    make_engine: MakeEngine, expect_steps: ExpectSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine("tiny", prefix_cache=False, max_mixed_step_s=0.25)
    chunks = _chunks(engine)
    expect_steps(TIMES)
    engine.submit("decodes", [1], greedy(100))
    engine.step()
    steps, seconds = engine.scheduler.mixed_steps, iter([1.0] * 4 + [0.1] * 8)
    note = steps.note
    monkeypatch.setattr(steps, "note", lambda scheduled, _: note(scheduled, next(seconds)))
    engine.submit("prompt", PROMPT * 2, greedy(1))
    run(engine)
    slow = [tokens for decodes, tokens in chunks if decodes and tokens]
    assert slow[0] == 240
    assert min(slow[1:5]) == pytest.approx(30, abs=25)
    assert slow[-2] > 2 * min(slow), "it recovers"


@pytest.fixture
def recovery() -> PreemptionCostModel:
    """It has seen `TIMES`."""
    model = PreemptionCostModel(512)
    for tokens in (1, 100, 400):
        model.observe_step(tokens, 0, 0.009 + 0.001 * tokens)
    return model


def test_a_few_prompts_share_a_step(recovery: PreemptionCostModel) -> None:
    steps = MixedSteps(recovery, 0.1)
    steps.begin([_decode()])
    assert steps.fitting_tokens(0, 40) == 40
    assert steps.take(0, 40)
    assert steps.fitting_tokens(1000, 400) == pytest.approx(50, abs=1)
    assert not steps.take(1000, 50)
    steps.begin([])
    assert steps.fitting_tokens(0, 10**6) == 10**6, "no sequence decodes"
    assert STRETCH > 1


def test_decodes_with_drafts_are_decodes(recovery: PreemptionCostModel) -> None:
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
