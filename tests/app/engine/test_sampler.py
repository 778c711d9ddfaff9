"""Frequencies match the exact distribution, and a row's token depends on nothing else in the batch."""

from __future__ import annotations

import pytest
import torch

from app.engine import sampler
from app.engine.params import SamplingParams
from app.engine.sampling_state import SamplingState
from app.errors import RequestError

NUM_DRAWS = 4000


def request(**params: object) -> SamplingState:
    return SamplingState(SamplingParams(**params), [1])  # type: ignore[arg-type]


def sample(logits: torch.Tensor, rows: list[SamplingState]) -> list[int]:
    return sampler.sample(logits, rows).token_ids


def frequencies(logits: torch.Tensor, **params: object) -> torch.Tensor:
    requests = [request(seed=i, **params) for i in range(NUM_DRAWS)]
    tokens = sample(logits.expand(NUM_DRAWS, -1), requests)
    return torch.bincount(torch.tensor(tokens), minlength=logits.numel()) / NUM_DRAWS


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({}, 8),
        ({"temperature": 0.5}, 8),
        ({"top_k": 3}, 3),
        ({"top_p": 0.85}, 4),  # 0.4 + 0.25 + 0.15 + 0.08 passes 0.85
        ({"top_k": 3, "top_p": 0.6}, 2),  # of 0.5, 0.3125, 0.1875
    ],
)
def test_frequencies_match_the_distribution(params: dict[str, float], kept: int) -> None:
    """Chi-square against the exact probabilities at the 0.1 % level."""
    probs = torch.tensor([0.4, 0.25, 0.15, 0.08, 0.05, 0.04, 0.02, 0.01])
    exact = probs ** (1 / params.get("temperature", 1.0))
    exact[kept:] = 0
    exact /= exact.sum()
    seen = frequencies(probs.log(), **params)
    assert seen[kept:].sum() == 0
    chi_square = (NUM_DRAWS * (seen - exact)[:kept] ** 2 / exact[:kept]).sum().item()
    critical = {2: 10.8, 3: 13.8, 4: 16.3, 8: 24.3}[kept]
    assert chi_square < critical, f"chi-square {chi_square:.1f}"


def test_flat_distribution_needs_more_candidates_than_usual() -> None:
    """top_p over a flat vocabulary keeps more tokens than are sorted at first."""
    seen = frequencies(torch.zeros(2000), top_p=0.9)
    assert 1500 < seen.count_nonzero() <= 1801


def test_alone_and_in_a_crowd() -> None:
    """A seeded request draws the same tokens whatever its neighbours ask for."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 1000, generator=generator)
    settings = [{}, {"top_k": 7}, {"top_p": 0.9}, {"temperature": 0.0}, {"top_p": 0.99, "temperature": 3.0}]
    together = [request(seed=i, **s) for i, s in enumerate(settings)]
    crowd = [sample(logits, together) for _ in range(20)]
    for i, setting in enumerate(settings):
        alone = request(seed=i, **setting)
        assert [sample(logits[i : i + 1], [alone])[0] for _ in range(20)] == [tokens[i] for tokens in crowd]


def test_equal_logits_do_not_depend_on_the_neighbours() -> None:
    """bfloat16 logits tie often, and topk orders ties differently for another k: a neighbour's top_k showed."""
    generator = torch.Generator().manual_seed(0)
    for seed in range(40):
        logits = torch.randn(2, 3000, generator=generator).bfloat16()
        for params in ({"top_k": 50}, {"top_p": 0.9}):
            alone = sample(logits[:1], [request(seed=seed, **params)])
            together = sample(logits, [request(seed=seed, **params), request(seed=1, top_k=1000)])
            assert together[0] == alone[0]


@pytest.mark.parametrize("top_p", [1e-46, 1e-300])
def test_tiny_top_p_keeps_the_likeliest(top_p: float) -> None:
    """It is 0 in float32: every token was excluded, and the whole step failed."""
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    assert sample(logits, [request(top_p=top_p)]) == [1]


def test_broken_logits_stay_inside_the_vocabulary() -> None:
    logits = torch.full((2, 5), torch.nan)
    assert all(0 <= token < 5 for token in sample(logits, [request(), request(top_k=2)]))


def test_tiny_temperature_is_greedy() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    assert sample(logits, [request(temperature=1e-40)]) == [1]


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"seed": 2**64}, "seed"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
    ],
)
def test_bad_params_name_the_field(params: dict[str, object], field: str) -> None:
    with pytest.raises(RequestError) as error:
        SamplingParams(**params)  # type: ignore[arg-type]
    assert error.value.param == field
