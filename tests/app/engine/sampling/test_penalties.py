"""Penalised logits are equal to the last bit for every kernel, and counts on a device follow the sequence."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from folio.app.engine.sampling import penalties, sampler
from folio.app.engine.sampling.params import SamplingParams
from folio.app.engine.sampling.penalties import counts_of, gather_penalties
from folio.app.engine.sampling.settings import gather_settings
from folio.app.engine.sampling.state import SamplingState

VOCAB_SIZE = 500
PENALTIES: dict[str, Any] = {"repetition_penalty": 1.3, "frequency_penalty": 0.17, "presence_penalty": -0.4}


def state_of(prompt: Sequence[int], output: Sequence[int] = (), **params: object) -> SamplingState:
    state = SamplingState(SamplingParams(**params), list(prompt))  # type: ignore[arg-type]
    for token in output:
        state.append(token)
    return state


def check_exact() -> None:
    """The penalised token 5 ties with another one that has the same logit to the last bit: the lower id is chosen. A
    rounding error either way would change one of the choices."""
    rng = np.random.default_rng(0)
    logits, states = torch.full((400, 70), -1e4), []
    for i, row in enumerate(logits):
        times, logit = int(rng.integers(0, 30)), np.float32(rng.normal() * 5)
        repetition, frequency, presence = map(np.float32, rng.uniform([0.5, -2, -2], [2, 2, 2]))
        result = logit * repetition if logit < 0 else logit / repetition
        result = result - frequency * np.float32(times) - presence * np.float32(times > 0)
        row[5], row[5 + (1, -1)[i % 2]] = float(logit), float(result)
        given = {"repetition_penalty": repetition, "frequency_penalty": frequency, "presence_penalty": presence}
        states.append(
            state_of([5], [5] * times, temperature=0, **{name: float(value) for name, value in given.items()})
        )
    assert sampler.sample(logits, states).token_ids == [5, 4] * 200


@pytest.mark.usefixtures("each_choice")
def test_each_operation_is_rounded_alone() -> None:
    """Compilers fuse a product with a sum, whose result is another in the last bit."""
    check_exact()


@pytest.mark.usefixtures("on_gpu")
def test_each_operation_is_rounded_alone_on_gpus() -> None:
    check_exact()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [1, 63, 64, 65, 5000])
def test_the_compiled_choice_penalises_like_torch(
    dtype: torch.dtype, vocab_size: int, request: pytest.FixtureRequest
) -> None:
    """Rows of all ways of sampling, some not penalised, of logits with a stride, some with edits."""
    rng, generator = random.Random(vocab_size), torch.Generator().manual_seed(vocab_size)
    logits = (2 * torch.randn(30, vocab_size + 7, generator=generator)).to(dtype)[:, :vocab_size]
    states = [
        state_of(
            [rng.randrange(vocab_size) for _ in range(rng.choice([1, 40, 6000]))],
            [rng.randrange(vocab_size) for _ in range(rng.choice([0, 3, 300]))],
            seed=i,
            temperature=rng.choice([0.0, 0.7, 1.0]),
            top_p=rng.choice([1.0, 0.9, 0.5]),
            logit_bias=rng.choice([{}, {0: 3.0}]),
            **(PENALTIES if i % 3 else {}),
        )
        for i in range(len(logits))
    ]
    before, compiled = logits.clone(), sampler.sample(logits, states)
    assert torch.equal(logits, before)
    request.getfixturevalue("by_torch")
    assert sampler.sample(logits, states) == compiled


@pytest.mark.usefixtures("on_gpu")
def test_counts_on_a_device_follow_the_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are added, forked, swapped, left out for a while and removed; their entries outgrow the room; launches
    fail before and after entries are replaced. Each step changes all logits like states that are made anew."""
    from folio.kernels.triton import penalties as kernels

    class LaunchError(Exception):
        pass

    rng, generator = random.Random(0), torch.Generator().manual_seed(0)
    penalise, failing = kernels.penalise, ""

    def failing_at_times(logits: torch.Tensor, most_entries: int, *table: torch.Tensor) -> None:
        if failing == "before":
            raise LaunchError
        penalise(logits, most_entries, *table)
        changed.append(logits.clone())
        if failing == "after":
            raise LaunchError

    monkeypatch.setattr(kernels, "penalise", failing_at_times)
    live: list[tuple[SamplingState, list[int], list[int]]] = []
    changed: list[torch.Tensor] = []
    for step in range(120):
        if step % 20 == 0:
            prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice([1, 30, 200]))]
            live.append((state_of(prompt, temperature=0, **PENALTIES), prompt, []))
        if step % 30 == 15:
            parent, prompt, output = rng.choice(live)
            live.append((parent.fork(index=step), prompt, output.copy()))
        if len(live) > 6:
            live.pop(rng.randrange(len(live)))
        rng.shuffle(live)
        present = live[: rng.randint(1, len(live))]
        logits = torch.randn(len(present), VOCAB_SIZE, generator=generator)
        failing = rng.choice(["", "", "", "before", "after"])
        states = [state for state, _, _ in present]
        if failing:
            with pytest.raises(LaunchError):
                sampler.sample(logits, states)
            failing = ""
        sampler.sample(logits, states)
        anew = [state_of(prompt, output, temperature=0, **PENALTIES) for _, prompt, output in present]
        settings, expected = gather_settings(anew, [0] * len(anew), VOCAB_SIZE), logits.clone()
        penalties.penalise(expected, counts_of(anew, settings), settings)
        assert torch.equal(changed[-1][:, :VOCAB_SIZE], expected), f"step {step}"
        for state, _, output in present:
            token = rng.randrange(VOCAB_SIZE)
            state.append(token)
            output.append(token)
    for state, prompt, output in live:
        counts, copy = state.counts, state.counts.copy_to(torch.device("cpu"))
        stale = sorted(counts.changed)
        fresh = np.setdiff1d(np.arange(counts.num), stale)
        assert np.array_equal(copy.numpy()[fresh] >> 32, counts.token_ids[fresh])
        assert np.array_equal((copy.numpy()[fresh] & 0xFFFFFFFF).astype(np.float32), counts.in_output[fresh])
        assert sorted(counts.token_ids.tolist()) == sorted({*prompt, *output})


@pytest.mark.usefixtures("on_gpu")
def test_a_step_sends_changes_alone() -> None:
    """Regression: all distinct tokens of all rows were joined and sent in each step."""
    cpu = torch.device("cpu")
    states = [state_of(range(i, i + 3_000), **PENALTIES) for i in range(16)]
    settings = gather_settings(states, [0] * 16, 4_000)
    logits = torch.zeros(16, 4_000)
    copies: list[torch.Tensor | None] = []
    for step in range(3):
        sampler.sample(logits, states)
        for i, state in enumerate(states):
            state.append(step + i)
        table = gather_penalties(counts_of(states, settings), settings, cpu)
        assert len(table.changed) == 16
        assert sum(array.nbytes for array in table) == 16 * (32 + 16)
        copies.append(states[0].counts.copy)
    assert copies[0] is copies[1] is copies[2]
