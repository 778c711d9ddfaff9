"""Noise is uniform and independent, draws have the highest sum, and close distributions draw alike."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from folio.app.engine.sampling import noise
from folio.app.engine.sampling.noise import draw, gumbel, noise_key
from tests.app.engine.sampling.helpers import chi_square_excess


def keys_of(count: int, *before: int) -> torch.Tensor:
    return torch.tensor([noise_key(*before, i) for i in range(count)])


def uniform(keys: torch.Tensor, token_ids: torch.Tensor) -> np.ndarray:
    """The numbers in (0, 1) that noise is made of, `[keys, token_ids]`."""
    values = gumbel(keys[:, None], token_ids.expand(len(keys), -1).contiguous())
    result: np.ndarray = (-(-values).exp()).exp().numpy()
    return result


def test_numbers_are_splitmix64s() -> None:
    """The first five for the state 1234567, from the reference implementation; and the first is the first key's."""
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    bits = ((1 - uniform(torch.tensor([1234567]), torch.arange(10))[0]) * 2**31).astype(np.int64)
    assert bits.tolist() == [number >> half & 2**31 - 1 for number in published for half in (0, 32)]
    assert noise_key(1234567) % 2**64 == published[0]


def test_every_bit_is_even() -> None:
    """Each of the 31 bits of 400,000 tokens, and of the next position's, and whether they agree: within 5 sigma."""
    count = 400_000
    values = uniform(keys_of(2, 3, 0), torch.arange(count))
    bits = ((1 - values) * 2**31).astype(np.int64)
    for numbers in (bits[0], bits[1], bits[0] ^ bits[1], bits[0, 1:] ^ bits[0, :-1], bits[0, 2:] ^ bits[0, :-2]):
        ones = [int((numbers >> bit & 1).sum()) for bit in range(31)]
        assert max(abs(n - len(numbers) / 2) for n in ones) < 5 * math.sqrt(count) / 2


@pytest.mark.parametrize("what", ["tokens", "halves", "positions", "indices", "seeds"])
def test_neighbours_are_independent(what: str) -> None:
    """Chi-square of pairs on a grid: neighbouring ids, of one number or of two, and the same id under close keys."""
    if what in ("tokens", "halves"):
        values = uniform(keys_of(40, 7, 0), torch.arange(5000))
        first, second = (values[:, 1:-1:2], values[:, 2::2]) if what == "tokens" else (values[:, ::2], values[:, 1::2])
    else:
        close = {"positions": (1, 0, range(201)), "indices": (1, range(201), 0), "seeds": (range(201), 0, 0)}[what]
        keys = [[value[i] if isinstance(value, range) else value for value in close] for i in range(201)]
        values = uniform(torch.tensor([noise_key(*key) for key in keys]), torch.arange(500))
        first, second = values[1:], values[:-1]
    cells = (first * 16).astype(int) * 16 + (second * 16).astype(int)
    assert chi_square_excess(np.bincount(cells.ravel(), minlength=256), np.full(256, cells.size / 256)) < 1


def test_small_probabilities_are_drawn_as_often_as_expected() -> None:
    """Noise must be precise where it is high: of 2 million values the highest 40 are where they are expected."""
    values = gumbel(torch.tensor([[5]]), torch.arange(2_000_000)[None])[0]
    for expected in (40, 1000, 100_000):
        threshold = -math.log(-math.log1p(-expected / 2_000_000))
        assert abs(int((values > threshold).sum()) - expected) < 4 * math.sqrt(expected)


@pytest.mark.parametrize(
    ("vocab_size", "num_rows", "scale"),
    [(1, 3, 1.0), (2, 3000, 4.0), (7, 3000, 1.0), (1001, 300, 3.0), (40_000, 5, 0.0), (3000, 100, 3e6)],
)
def test_draws_the_highest_sum(vocab_size: int, num_rows: int, scale: float) -> None:
    """Bounds do not change the result, also with two tokens left or coarse rounding."""
    logits = scale * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(0))
    logits[::2, ::3] = -torch.inf
    logits[:, -1] = 0.0
    keys = keys_of(num_rows, 1)
    sums = logits.double() + gumbel(keys[:, None], torch.arange(vocab_size).repeat(num_rows, 1))
    tokens = draw(logits, keys)
    assert torch.equal(tokens, sums.max(dim=-1).indices)
    for i in range(0, num_rows, max(1, num_rows // 10)):
        assert draw(logits[i : i + 1], keys[i : i + 1]) == tokens[i]


def test_the_noise_of_a_token_is_independent_of_the_batch() -> None:
    keys = keys_of(3)
    every = gumbel(keys[:, None], torch.arange(5000).repeat(3, 1))
    some = torch.randperm(5000, generator=torch.Generator().manual_seed(0))
    for count in (1, 2, 15, 17, 301):
        assert torch.equal(gumbel(keys[1:, None], some[:count].repeat(2, 1)), every[1:, some[:count]])
    assert every.max() <= 22.2
    assert every.isfinite().all()


def test_rows_without_anything_to_draw() -> None:
    logits = torch.zeros(4, 6)
    logits[0], logits[1], logits[2, 3] = torch.nan, -torch.inf, torch.inf
    tokens = draw(logits, keys_of(4))
    assert ((tokens >= 0) & (tokens < 6)).all()
    assert torch.equal(tokens[3:], draw(logits[3:], keys_of(4)[3:]))


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_close_distributions_draw_alike(scale: float) -> None:
    """Token i is drawn by both with probability 1 / sum_j max(p_j / p_i, q_j / q_i); independent draws, or one number
    for both cumulated distributions, agree far less. Within 5 sigma, and never below (1 - d) / (1 + d)."""
    num_draws, generator = 4000, torch.Generator().manual_seed(0)
    target = scale * torch.randn(300, generator=generator)
    draft = target + 0.3 * torch.randn(300, generator=generator)
    p, q = target.double().softmax(-1), draft.double().softmax(-1)
    ratios = torch.maximum(p / p[:, None], q / q[:, None])
    expected = float((1 / ratios.sum(dim=-1)).sum())
    overlap = float(torch.minimum(p, q).sum())
    assert overlap / (2 - overlap) <= expected <= overlap
    assert expected > 0.9 * overlap
    keys = keys_of(num_draws, 2)
    agreed = draw(target.repeat(num_draws, 1), keys) == draw(draft.repeat(num_draws, 1), keys)
    sigma = math.sqrt(expected * (1 - expected) / num_draws)
    assert abs(float(agreed.double().mean()) - expected) < 5 * sigma


def test_a_further_pass_where_the_highest_bound_is_not_the_best_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "_WITHIN", 0.0)
    test_draws_the_highest_sum(7, 3000, 1.0)
