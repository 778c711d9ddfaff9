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
# Tokens whose noise is bounded at once, where rows are short.
_TOKENS_AT_ONCE = 1 << 16
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


def noise_keys(keys: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """For each of `keys [n]` and `numbers [n]` (int64) the `noise_key` of the key's numbers and this one."""
    mixed = keys.astype(np.uint64) + numbers.astype(np.uint64) + np.uint64(_GAMMA)
    mixed = (mixed ^ mixed >> np.uint64(30)) * np.uint64(_FIRST)
    mixed = (mixed ^ mixed >> np.uint64(27)) * np.uint64(_SECOND)
    return (mixed ^ mixed >> np.uint64(31)).astype(np.int64)


def gumbel(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, float64 and at most 22.2, for `token_ids [..., n]` under `keys [..., 1]`, both int64."""
    numbers = _mix(((token_ids >> 1) + 1).mul_(_signed(_GAMMA)).add_(keys))
    halves = numbers.unsqueeze(-1).view(torch.int32)
    bits = halves.gather(-1, (token_ids & 1).unsqueeze(-1)).squeeze(-1).bitwise_and_(2**_BITS - 1)
    # An exponential variable from the complement to 1: precise where it is small, which is where tokens win.
    return bits.double().add_(0.5).mul_(-(2.0**-_BITS)).log1p_().neg_().log_().neg_()


def draw(logits: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The tokens `[rows]` with the highest sum of logit and noise, the lower id among equals; on CPUs.

    Logarithms for a complete vocabulary would cost more than everything else; exact sums are computed only for tokens
    with a high upper bound. Rows of NaN or -inf get an arbitrary token.

    Args:
        logits: `[rows, vocab_size]` float32, contiguous.
        keys: `[rows]` int64.
    """
    tokens = np.zeros(len(logits), np.int64)
    best = np.full(len(logits), -math.inf)
    unsettled = np.arange(len(logits))
    floors: np.ndarray | None = None
    while len(unsettled):
        some = slice(None) if floors is None else torch.from_numpy(unsettled)
        rows, token_ids, floors = _contenders(logits[some], keys[some], floors)
        rows = unsettled[rows]
        sums = sums_of(logits, keys, rows, token_ids)
        found, highest, lowest_ids = highest_of(rows, token_ids, sums)
        better = highest > best[found]
        best[found[better]], tokens[found[better]] = highest[better], lowest_ids[better]
        totals = best[unsettled]
        least_bounds = np.minimum(totals * (1 - _RELATIVE_SLACK), totals * (1 + _RELATIVE_SLACK)) - _SLACK
        # A token with a bound below the floor may still be better.
        again = (totals > -math.inf) & (least_bounds < floors)
        unsettled, floors = unsettled[again], least_bounds[again]
    return torch.from_numpy(tokens)


def sums_of(logits: torch.Tensor, keys: torch.Tensor, rows: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
    """Logit and noise of tokens, float64, by their row and id, both `[n]` int64."""
    noise = gumbel(keys[torch.from_numpy(rows), None], torch.from_numpy(token_ids)[:, None])[:, 0]
    sums: np.ndarray = logits.numpy()[rows, token_ids] + noise.numpy()
    return sums


def highest_of(rows: np.ndarray, token_ids: np.ndarray, sums: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Each row among the ascending `rows [n]`, with its highest sum and the lowest id of a token that has it."""
    found, starts, lengths = np.unique(rows, return_index=True, return_counts=True)
    if not len(found):
        return found, sums, token_ids
    highest = np.maximum.reduceat(sums, starts)
    has_it = sums == np.repeat(highest, lengths)
    lowest_ids = np.minimum.reduceat(np.where(has_it, token_ids, np.iinfo(np.int64).max), starts)
    return found, highest, lowest_ids


def _contenders(
    logits: torch.Tensor, keys: torch.Tensor, floors: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens whose sum may reach the row's floor, by row and id and in that order, and the floors.

    Args:
        floors: by default `_WITHIN` below the best bound.
    """
    num_rows, vocab_size = logits.shape
    steps = _steps(vocab_size)
    # In parts that stay in the cores' caches; a core has a row of a large vocabulary at once.
    at_once = max(torch.get_num_threads(), _TOKENS_AT_ONCE // vocab_size)
    places, lowest = [], []
    for start in range(0, num_rows, at_once):
        part = slice(start, start + at_once)
        bits = _mix(steps + keys[part, None]).view(torch.int32)[:, :vocab_size].bitwise_and_(2**_BITS - 1)
        # With v = (bits + 0.5) / 2^31 the noise is -log(-log(1 - v)) <= -log(v). And a float's own bits are its
        # logarithm to base 2, scaled and shifted, and at most 0.09 too low in between the powers of 2.
        bounds = torch.add(logits[part], bits.float().view(torch.int32).float(), alpha=-_LOG_SCALE)
        if floors is None:
            lowest.append(bounds.amax(dim=-1).double().numpy() + _LOG_SHIFT - _WITHIN)
        else:
            lowest.append(floors[part])
        reached = np.maximum(lowest[-1] - _LOG_SHIFT, _LOWEST).astype(np.float32)
        places.append(np.flatnonzero(bounds.numpy() >= reached[:, None]) + start * vocab_size)
    rows, token_ids = np.divmod(np.concatenate(places), vocab_size)
    return rows, token_ids, np.concatenate(lowest)


@functools.lru_cache(maxsize=8)
def _steps(vocab_size: int) -> torch.Tensor:
    """Offsets from the key of SplitMix64's states."""
    return torch.arange(1, (vocab_size + 1) // 2 + 1).mul_(_signed(_GAMMA))


def _mix(numbers: torch.Tensor) -> torch.Tensor:
    """SplitMix64's outputs for its states, in place."""
    shifted = numbers >> 30
    numbers ^= shifted.bitwise_and_(2**34 - 1)
    numbers *= _signed(_FIRST)
    numbers ^= torch.bitwise_right_shift(numbers, 27, out=shifted).bitwise_and_(2**37 - 1)
    numbers *= _signed(_SECOND)
    numbers ^= torch.bitwise_right_shift(numbers, 31, out=shifted).bitwise_and_(2**33 - 1)
    return numbers


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number
