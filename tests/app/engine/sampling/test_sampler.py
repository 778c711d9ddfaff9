"""Sampled frequencies match the exact distribution; a row's token is independent of the batch; log probabilities."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from folio.app.engine.sampling import logprobs, noise, sampler
from folio.app.engine.sampling.logprobs import prompt_logprobs
from folio.app.engine.sampling.params import SamplingParams, Structure
from folio.app.engine.sampling.state import SamplingState
from folio.app.engine.sampling.token_logprobs import TokenLogprobs
from folio.app.errors import RequestError
from tests.app.engine.sampling.helpers import (
    ENDS,
    NAMES,
    OUTPUT,
    PROMPT,
    WORDS,
    Allowed,
    bad_words_of,
    chi_square_excess,
    exact_distribution,
    state_with,
)


def request(**params: object) -> SamplingState:
    return SamplingState(SamplingParams(**params), [1])  # type: ignore[arg-type]


def sample(logits: torch.Tensor, rows: list[SamplingState]) -> list[int]:
    return sampler.sample(logits, rows).token_ids


TOGETHER = [(), *((name,) for name in NAMES), *itertools.combinations(NAMES, 2), tuple(NAMES)]


@pytest.mark.thirds
@pytest.mark.parametrize("features", TOGETHER, ids="+".join)
def test_every_combination_draws_by_the_exact_distribution(features: tuple[str, ...]) -> None:
    """Chi-square at the 0.01 % level, against float64 probabilities of each token by the definitions."""
    num_draws = 1000
    logits = 1.5 * torch.randn(16, generator=torch.Generator().manual_seed(2))
    states = [state_with(features, index) for index in range(num_draws)]
    allowed = {*range(0, 16, 3), *OUTPUT} if "structure" in features else set(range(16))
    if "allowed" in features:
        allowed &= {0, 3, 6, 7, 8, 15}
    exact = exact_distribution(
        logits.double().numpy(),
        states[0].params,
        prompt=PROMPT,
        output=OUTPUT,
        bad_words=WORDS if "bad_words" in features else (),
        eos=ENDS,
        allowed=allowed,
    )
    seen = np.bincount(sample(logits.expand(num_draws, -1), states), minlength=16)
    possible = exact > 0
    assert not seen[~possible].any()
    excess = chi_square_excess(seen, exact * num_draws)
    assert excess < 1, f"{excess:.2f} times the critical value"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("each_choice")
def test_a_sequence_is_independent_of_the_batch(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows with all kinds of parameters, in any order and in chunks of any size; their log probabilities too."""
    generator = torch.Generator().manual_seed(0)
    # so many that many of the random settings differ, and tokens up to 15 likely, for what is special about them
    mixed = random.Random(0)
    settings = [
        (tuple(mixed.sample(NAMES, mixed.randrange(6))), {"temperature": 0.0} if i % 4 == 0 else {}) for i in range(24)
    ]
    steps = [
        (3 * torch.randn(len(settings), 700, generator=generator) + 3 * (torch.arange(700) < 16)).to(dtype)
        for _ in range(6)
    ]

    def run(which: list[int]) -> dict[int, list[object]]:
        states = [state_with(settings[i][0], i, logprobs=i % 3 or None, **settings[i][1]) for i in which]
        found: dict[int, list[object]] = {i: [] for i in which}
        for logits in steps:
            sampled = sampler.sample(logits[which], states)
            assert all(sampled.sound)
            for i, state, token, logprob in zip(which, states, sampled.token_ids, sampled.logprobs, strict=True):
                found[i].append((token, logprob))
                state.append(token)
        return found

    together = run(list(range(len(settings))))
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", 700 * 5)
    order = list(together)
    mixed.shuffle(order)
    assert run(order) == together
    for i in together:
        assert run([i])[i] == together[i], f"{settings[i]} in row {i}"


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads", "by_torch")
def test_top_p_cuts_a_single_row_of_a_large_vocabulary_like_several(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's logsumexp adds up one row of 32,768 numbers in parallel parts, and several row by row. Probabilities from
    it were others in the last bits, and alone, a request with top_p between the two had a token more or less."""
    num_different = 0
    for seed in range(20):
        logits = 3 * torch.randn(1, 40_000, generator=torch.Generator().manual_seed(seed))
        sums = torch.stack([logits.logsumexp(-1)[0], logits.expand(2, -1).logsumexp(-1)[0]])
        if sums[0] == sums[1]:
            continue
        num_different += 1
        # So the least likely token of all that can be drawn is drawn.
        monkeypatch.setattr(noise, "gumbel", lambda keys, token_ids, row=logits[0]: -2 * row[token_ids].double())
        ordered = logits[0].sort(descending=True).values
        between = (ordered[:20] - sums[:, None]).double().exp().cumsum(-1).mean(0)
        for top_p in between.tolist():
            states = [request(top_p=top_p)] * 2
            assert sample(logits.expand(2, -1), states) == sample(logits, states[:1]) * 2
    if not num_different:
        pytest.skip("this torch adds up one row and several alike")


def test_tokens_sampled_ahead_equal_those_sampled_later() -> None:
    """Draft tokens: rows at later positions of a state draw the tokens that they draw after the preceding ones are
    appended."""
    logits = 2 * torch.randn(6, 16, generator=torch.Generator().manual_seed(1))
    params = {"seed": 5, "top_k": 9, "min_p": 0.01, "logit_bias": {3: 1.0}, "min_tokens": 3, "stop_token_ids": [1, 2]}
    params |= {"bad_words": ["some"]}

    def fresh() -> SamplingState:
        return SamplingState(
            SamplingParams(**params),  # type: ignore[arg-type]
            [1],
            bad_words=bad_words_of([(4,), (0,)]),
            eos_token_ids=frozenset({15}),
        )

    state = fresh()
    assert state.can_look_ahead
    ahead = sampler.sample(logits, [state] * 6, range(6)).token_ids
    for i, token in enumerate(ahead):
        assert sample(logits[i : i + 1], [state]) == [token]
        state.append(token)
    others = [fresh(), request(temperature=0), fresh()]
    mixed = sampler.sample(logits[[0, 1, 2]], others, [0, 0, 2]).token_ids
    assert mixed == [ahead[0], int(logits[1].argmax()), ahead[2]]


def test_contradictory_parameters_are_distinguished_from_broken_logits() -> None:
    """Every token is forbidden. Other rows are sampled."""
    logits = torch.randn(4, 16)
    logits[3] = torch.nan
    contradictory = [
        SamplingState(
            SamplingParams(temperature=t, structure=Structure("choice", "[]"), bad_words=["x"], top_k=k),
            [1],
            matcher=Allowed([3, 4]),
            bad_words=bad_words_of([(3,), (4,)]),
        )
        for t, k in ((0.0, 0), (1.0, 5))
    ]
    sampled = sampler.sample(logits, [contradictory[0], request(temperature=0), contradictory[1], request(top_k=2)])
    assert sampled.blocked == {0, 2}
    assert sampled.sound == [False, True, False, False]
    assert sampled.token_ids[1] == int(logits[1].argmax())


def test_plain_greedy_rows_cost_one_reduction(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are never copied or processed, alone or beside others, and logits do not change."""
    seen = []
    process = sampler.apply_edits

    def note(logits: torch.Tensor, *rest: Any) -> None:
        seen.append(len(logits))
        process(logits, *rest)

    monkeypatch.setattr(sampler, "apply_edits", note)
    logits = torch.randn(40, 50).bfloat16()
    before = logits.clone()
    greedy = [request(temperature=0) for _ in range(39)]
    assert sample(logits[:39], greedy) == logits[:39].float().argmax(-1).tolist()
    assert seen == []
    assert sample(logits, [*greedy, request(logit_bias={7: 100.0}, temperature=0)])[39] == 7
    assert seen == [1]
    assert torch.equal(logits, before)


@pytest.mark.usefixtures("by_torch")
def test_the_lowest_of_equals_is_drawn_whatever_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise that makes up for the logits leaves equal sums; top_k sorts the likeliest, here the last, first."""
    logits = torch.arange(400.0)[None] / 8
    monkeypatch.setattr(noise, "gumbel", lambda keys, token_ids: -token_ids.double() / 8)
    assert sample(logits, [request(top_k=50)]) == [350]


@pytest.mark.parametrize("params", [{"top_p": 1e-46}, {"top_p": 1e-300}, {"temperature": 1e-40}])
def test_tiny_parameters_keep_the_likeliest(params: dict[str, float]) -> None:
    """A top_p that is 0 in float32 excluded every token, and the step failed."""
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    assert sample(logits, [request(**params)]) == [1]


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"n": 1.0}, "n is 1.0; it must be a whole number"),
        ({"n": None}, "n is None; it must be a whole number"),
        ({"top_k": True}, "top_k is True; it must be a whole number"),
        ({"top_k": -2}, "top_k"),
        ({"seed": 1.0}, "seed is 1.0; it must be a whole number"),
        ({"seed": 2**64}, "seed"),
        ({"max_tokens": "5"}, "max_tokens is '5'; it must be a whole number"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": "hot"}, "temperature is 'hot'; it must be a number"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"presence_penalty": None}, "presence_penalty is None; it must be a number"),
        ({"presence_penalty": math.nan}, "presence_penalty is nan; it must be between -2 and 2"),
        ({"repetition_penalty": 1e-38}, "repetition_penalty is 1e-38; it must be between 0.001 and 100"),
        ({"top_p": 0}, "top_p is 0; it must be above 0"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"allowed_token_ids": [1] * 4097}, "allowed_token_ids"),
        ({"allowed_token_ids": [1], "use_beam_search": True}, "allowed_token_ids"),
    ],
)
def test_bad_params_name_the_field(params: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=re.escape(said)) as error:
        SamplingParams(**params)
    assert error.value.param == next(iter(params))
    assert str(error.value) == said or " is " not in said


def check(found: TokenLogprobs, logits: torch.Tensor, token: int, num_top: int) -> None:
    """Against one row's log_softmax in float64, ranked token by token."""
    expected = logits.double().log_softmax(-1).tolist()
    ranked = sorted(range(len(expected)), key=lambda i: (-float(logits[i]), i))
    assert found.token_id == token
    assert found.logprob == pytest.approx(expected[token], abs=2e-6)
    assert found.rank == ranked.index(token) + 1
    assert [i for i, _ in found.top] == ranked[:num_top]
    assert [value for _, value in found.top] == pytest.approx([expected[i] for i in ranked[:num_top]], abs=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_top", [0, 1, 5, 500])
def test_prompt_logprobs(dtype: torch.dtype, num_top: int) -> None:
    """Half precision has many equal logits, which are ranked by their ids, as the alternatives are. There are 400."""
    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(9, 400, generator=generator)).to(dtype)
    token_ids = [0, 399, 7, 7, 200, *logits[5:].argmax(-1).tolist()]
    for i, found in enumerate(prompt_logprobs(logits, token_ids, num_top)):
        check(found, logits[i].float(), token_ids[i], num_top)


def test_rows_are_worked_on_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The size of a chunk bounds memory, and changes nothing else."""
    vocab_size = logprobs.CHUNK_ELEMENTS // 3
    logits, tokens = torch.randn(7, vocab_size).bfloat16(), list(range(7))
    alone = [prompt_logprobs(logits[i : i + 1], [i], 3) for i in tokens]
    sizes = []

    def seen(rows: torch.Tensor, tokens: torch.Tensor, most: int) -> torch.Tensor:
        sizes.append(len(rows))
        return chunk(rows, tokens, most)

    chunk = logprobs._chunk
    monkeypatch.setattr(logprobs, "_chunk", seen)
    assert prompt_logprobs(logits, tokens, 3) == tuple(found for row in alone for found in row)
    assert sizes == [3, 3, 1]


def test_sampled_tokens_have_those_of_the_raw_logits() -> None:
    """By unprocessed logits, and only for rows that request them."""
    logits = (3 * torch.randn(5, 400, generator=torch.Generator().manual_seed(0))).bfloat16()
    settings: list[dict[str, object]] = [
        {"temperature": 0, "logprobs": 4},
        {"temperature": 3.0, "logprobs": 2, "seed": 1},
        {"temperature": 0},
        {"temperature": 0, "logit_bias": {17: 100.0}, "logprobs": 0},
        {"temperature": 2.0, "top_k": 3, "logprobs": 1, "seed": 2, "repetition_penalty": 1.5},
    ]
    states = [SamplingState(SamplingParams(**s), [1]) for s in settings]  # type: ignore[arg-type]
    sampled = sampler.sample(logits, states)
    assert sampled.token_ids[3] == 17
    for i, (state, found) in enumerate(zip(states, sampled.logprobs, strict=True)):
        if state.params.logprobs is None:
            assert found is None
        else:
            assert found is not None
            check(found, logits[i].float(), sampled.token_ids[i], state.params.logprobs)
