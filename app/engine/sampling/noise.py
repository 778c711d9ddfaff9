"""Sampling noise: the Gumbel-max trick with noise that is a function of a key and a token id.

The key stands for a position in an output. A draw does not depend on the set of other candidates, and two models with
the same key draw the same token i with probability 1 / sum_j max(p_j / p_i, q_j / q_i), which makes draft tokens
accepted more often.

The bits are SplitMix64's (Steele, Lea and Flood, 2014): its n-th number from the key on is for tokens 2n and 2n + 1.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import torch

_GAMMA, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
# Random bits of each half of a number, without the sign bit of torch's integers.
_BITS = 31
_LOG_SCALE, _LOG_SHIFT = math.log(2) / 2**23, (127 + _BITS) * math.log(2)
# Tokens whose bound is this close to the best one are contenders. With less, second passes are common; with more,
# contenders are many.
_WITHIN = 2.0
_LOWEST = float(np.finfo(np.float32).min)
# Rounding error of bounds in float32: of numbers of about 100, and relative to the logits.
_SLACK, _RELATIVE_SLACK = 1e-4, 2.0**-20


def noise_key(*numbers: int) -> int:
    """A signed 64-bit key, well mixed even for similar numbers."""
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
    # An exponential variable from the complement to 1: precise where it is small, which is where tokens win.
    return bits.double().add_(0.5).mul_(-(2.0**-_BITS)).log1p_().neg_().log_().neg_()


def draw(logits: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The tokens `[rows]` with the highest sum of logit and noise, the lower id among equals.

    Logarithms for a complete vocabulary would cost more than everything else; exact sums are computed only for tokens
    with a high upper bound. Rows of NaN or -inf get an arbitrary token.

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
            least_bound = total - _SLACK - _RELATIVE_SLACK * abs(total)
            if -math.inf < least_bound < floor:  # a token with a bound below the floor may still be better
                lower[row] = least_bound
        unsettled, floors = list(lower), list(lower.values())
    return torch.tensor([token_id for _, token_id in best])


def _contenders(logits: torch.Tensor, keys: torch.Tensor, floors: list[float] | None) -> tuple[np.ndarray, list[float]]:
    """Tokens whose sum may reach the row's floor, ascending as `row * vocab_size + id`, and the floors.

    Args:
        floors: by default `_WITHIN` below the best bound.
    """
    num_rows, vocab_size = logits.shape
    steps = _steps(vocab_size)
    at_once = torch.get_num_threads()  # a row each, to stay in the core's cache
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
    """Offsets from the key of SplitMix64's states."""
    return torch.arange(1, (vocab_size + 1) // 2 + 1).mul_(_signed(_GAMMA))


def _mix(numbers: torch.Tensor) -> torch.Tensor:
    """SplitMix64's outputs for its states, in place."""
    numbers ^= (numbers >> 30).bitwise_and_(2**34 - 1)
    numbers *= _signed(_FIRST)
    numbers ^= (numbers >> 27).bitwise_and_(2**37 - 1)
    numbers *= _signed(_SECOND)
    numbers ^= (numbers >> 31).bitwise_and_(2**33 - 1)
    return numbers


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number
