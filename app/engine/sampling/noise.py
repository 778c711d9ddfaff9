"""Noise that makes the likeliest token a drawn one (the Gumbel-max trick).

A token's noise is a function of a key, which stands for a place in an output, and of the token's id. So a draw does not
depend on which other tokens can be drawn, and two models with the same key mostly draw the same token where they mostly
agree: token i is both's with probability 1 / sum_j max(p_j / p_i, q_j / q_i).

The bits are SplitMix64's (Steele, Lea and Flood, 2014): its n-th number from the key on is for tokens 2n and 2n + 1.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import torch

_GAMMA, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
# Of each half of a number: torch's integers have signs.
_BITS = 31
_LOG_SCALE, _LOG_SHIFT = math.log(2) / 2**23, (127 + _BITS) * math.log(2)
# Tokens are looked at more closely if they may be so little below the best bound: for fewer, a second look is common;
# for more, there are many.
_WITHIN = 2.0
_LOWEST = float(np.finfo(np.float32).min)
# Rounding of bounds in float32: of numbers of about 100, and relative to the logits.
_SLACK, _RELATIVE_SLACK = 1e-4, 2.0**-20


def noise_key(*numbers: int) -> int:
    """A key, as a signed 64-bit number, for numbers that may be close to those of other keys."""
    key = 0
    for number in numbers:
        key = (key + number + _GAMMA) % 2**64
        key = (key ^ key >> 30) * _FIRST % 2**64
        key = (key ^ key >> 27) * _SECOND % 2**64
        key ^= key >> 31
    return _signed(key)


def gumbel(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, float64 and at most 22.2, for `token_ids [..., n]` under `keys [..., 1]`, both int64."""
    numbers = _mix(((token_ids >> 1) + 1).mul_(_signed(_GAMMA)).add_(keys))
    halves = numbers.unsqueeze(-1).view(torch.int32)
    bits = halves.gather(-1, (token_ids & 1).unsqueeze(-1)).squeeze(-1).bitwise_and_(2**_BITS - 1)
    # An exponential variable from what is missing to 1: precise where it is small, and those are the ones that win.
    return bits.double().add_(0.5).mul_(-(2.0**-_BITS)).log1p_().neg_().log_().neg_()


def draw(logits: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The tokens `[rows]` with the highest sum of logit and noise, the lower id among equals.

    Logarithms for a whole vocabulary would cost more than all the rest. So first all tokens get a bound of that sum.
    Rows that are not numbers, or have none above -inf, get any token.

    Args:
        logits: `[rows, vocab_size]` float32.
        keys: `[rows]` int64.
    """
    vocab_size = logits.shape[-1]
    best = [(-math.inf, 0)] * len(logits)
    unsettled = list(range(len(logits)))
    floors: list[float] | None = None
    while unsettled:
        some = slice(None) if floors is None else unsettled
        places, floors = _contenders(logits[some], keys[some], floors)
        rows, token_ids = np.divmod(places, vocab_size)
        rows = np.array(unsettled)[rows]
        found = torch.from_numpy(token_ids)[:, None]
        noise = gumbel(keys[torch.from_numpy(rows), None], found)[:, 0].numpy()
        sums = logits.numpy()[rows, token_ids] + noise  # float64, like the noise
        for row, token_id, total in zip(rows.tolist(), token_ids.tolist(), sums.tolist(), strict=True):
            if total > best[row][0]:  # token ids ascend
                best[row] = (total, token_id)
        lower = {}
        for row, floor in zip(unsettled, floors, strict=True):
            total = best[row][0]
            wanted = total - _SLACK - _RELATIVE_SLACK * abs(total)
            if -math.inf < wanted < floor:  # a token whose bound is below the floor may still be better
                lower[row] = wanted
        unsettled, floors = list(lower), list(lower.values())
    return torch.tensor([token_id for _, token_id in best])


def _contenders(logits: torch.Tensor, keys: torch.Tensor, floors: list[float] | None) -> tuple[np.ndarray, list[float]]:
    """All tokens whose logit and noise may reach the row's floor, in order as `row * vocab_size + id`, and the floors.

    Args:
        floors: by default so that there are a few.
    """
    num_rows, vocab_size = logits.shape
    steps = _steps(vocab_size)
    at_once = torch.get_num_threads()  # a row each: more would not stay in its core's cache
    places, lowest = [], []
    for start in range(0, num_rows, at_once):
        part = slice(start, start + at_once)
        bits = _mix(steps + keys[part, None]).view(torch.int32)[:, :vocab_size].bitwise_and_(2**_BITS - 1)
        # With v = (bits + 0.5) / 2^31 the noise is -log(-log(1 - v)) <= -log(v). And a float's own bits are its
        # logarithm to base 2, scaled and shifted, and at most 0.09 too low in between the powers of 2.
        bounds = torch.add(logits[part], bits.float().view(torch.int32).float(), alpha=-_LOG_SCALE)
        if floors is None:
            lowest += [highest + _LOG_SHIFT - _WITHIN for highest in bounds.amax(dim=-1).tolist()]
        else:
            lowest += floors[part]
        reached = np.array([max(floor - _LOG_SHIFT, _LOWEST) for floor in lowest[part]], np.float32)
        places.append((bounds.numpy() >= reached[:, None]).ravel().nonzero()[0] + start * vocab_size)
    return np.concatenate(places), lowest


@functools.lru_cache(maxsize=8)
def _steps(vocab_size: int) -> torch.Tensor:
    """How far from the key SplitMix64 is at each of its numbers."""
    return torch.arange(1, (vocab_size + 1) // 2 + 1).mul_(_signed(_GAMMA))


def _mix(numbers: torch.Tensor) -> torch.Tensor:
    """SplitMix64's output for its states, in place."""
    numbers ^= (numbers >> 30).bitwise_and_(2**34 - 1)
    numbers *= _signed(_FIRST)
    numbers ^= (numbers >> 27).bitwise_and_(2**37 - 1)
    numbers *= _signed(_SECOND)
    numbers ^= (numbers >> 31).bitwise_and_(2**33 - 1)
    return numbers


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number
