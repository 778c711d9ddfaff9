"""Choice of a token for each row of logits: temperature, min_p, top_k, top_p, and noise; one program a row.

A token is drawn from all tokens, and kept if fewer than top_k tokens precede it and these have less than top_p of the
mass. If it is not kept, neither are those that it precedes, and another one is drawn from the rest. Passes over a row
are as many as it needs, without a sort and without the host.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# ruff: noqa: N803 (compile-time constants are capitals in Triton's kernels)

# Names of a row's settings, see `choose`.
SETTINGS = ("key", "top_p", "temperature", "min_p", "top_k")

_TILE_TOKENS, _NUM_WARPS = 4096, 16
_LOWEST_KEY = tl.constexpr(-(2**31))


@triton.jit
def _load(
    row_ptr: tl.tensor,
    start: tl.tensor,
    vocab_size: tl.tensor,
    temperature: tl.tensor,
    floor: tl.tensor,
    TILE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Token ids and scaled logits; -inf for tokens below the floor, NaN, and ids beyond the vocabulary."""
    ids = start + tl.arange(0, TILE)
    logits = tl.load(row_ptr + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
    scaled = tl.div_rn(logits, temperature)
    scaled = tl.where(scaled == 0.0, 0.0, scaled)  # one zero only
    return ids, tl.where(scaled >= floor, scaled, float("-inf"))


@triton.jit
def _keys(logits: tl.tensor) -> tl.tensor:
    """int32 in the order of float32."""
    bits = logits.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _random_bits(key: tl.tensor, ids: tl.tensor) -> tl.tensor:
    """The 31 bits of `app/engine/sampling/noise.py`: SplitMix64's n-th number is for tokens 2n and 2n + 1."""
    number = key.to(tl.uint64, bitcast=True) + ((ids >> 1) + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB
    number = number ^ (number >> 31)
    half = tl.where((ids & 1) == 1, number >> 32, number)
    return (half & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _precede(logits: tl.tensor, ids: tl.tensor, logit: tl.tensor, token: tl.tensor) -> tl.tensor:
    return (logits > logit) | ((logits == logit) & (ids < token))


@triton.jit
def _draw(
    row_ptr: tl.tensor,
    vocab_size: tl.tensor,
    temperature: tl.tensor,
    floor: tl.tensor,
    key: tl.tensor,
    before_logit: tl.tensor,
    before_token: tl.tensor,
    TILE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Logit and id of the token with the highest sum of logit and noise, of those that precede another one."""
    best = tl.full((), float("-inf"), tl.float64)
    best_logit = tl.full((), float("-inf"), tl.float32)
    best_token = tl.full((), 0, tl.int32)
    for start in range(0, vocab_size, TILE):
        ids, logits = _load(row_ptr, start, vocab_size, temperature, floor, TILE)
        logits = tl.where(_precede(logits, ids, before_logit, before_token), logits, float("-inf"))
        bits = _random_bits(key, ids)
        # With v = (bits + 0.5) / 2^31 the noise is -log(-log(1 - v)) <= -log(v); few tiles need its logarithms.
        bounds = logits + (21.487562597358306 - tl.log(bits.to(tl.float32) + 0.5))
        bound = tl.max(bounds, axis=0)
        slack = 1e-4 + 9.5367431640625e-07 * tl.abs(bound)  # rounding errors
        if (bound + slack).to(tl.float64) >= best:
            # 1 - v is exact in float64, so its logarithm is precise where v is small, which is where tokens win.
            rest = 1.0 - (bits.to(tl.float64) + 0.5) * 4.656612873077393e-10
            sums = logits.to(tl.float64) - tl.log(-tl.log(rest))
            highest = tl.max(sums, axis=0)
            if highest > best:
                best = highest
                best_token = tl.min(tl.where(sums == highest, ids, vocab_size), axis=0)
                best_logit = tl.max(tl.where(ids == best_token, logits, float("-inf")), axis=0)
    return best_logit, best_token


@triton.jit
def _preceding(
    row_ptr: tl.tensor,
    vocab_size: tl.tensor,
    temperature: tl.tensor,
    floor: tl.tensor,
    highest: tl.tensor,
    logit: tl.tensor,
    token: tl.tensor,
    TILE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Number and mass of the tokens that precede one; a mass of 1 is the likeliest token's."""
    count = tl.full((), 0, tl.int32)
    mass = tl.full((), 0.0, tl.float64)
    for start in range(0, vocab_size, TILE):
        ids, logits = _load(row_ptr, start, vocab_size, temperature, floor, TILE)
        precede = _precede(logits, ids, logit, token)
        count += tl.sum(precede.to(tl.int32), axis=0)
        mass += tl.sum(tl.where(precede, tl.exp(logits - highest), 0.0).to(tl.float64), axis=0)
    return count, mass


@triton.jit
def _least_of_top_k(
    row_ptr: tl.tensor,
    vocab_size: tl.tensor,
    temperature: tl.tensor,
    floor: tl.tensor,
    highest: tl.tensor,
    top_k: tl.tensor,
    TILE: tl.constexpr,
) -> tl.tensor:
    """A logit that at least top_k tokens reach, and fewer exceed. Each pass has seven pivots."""
    low = tl.full((), _LOWEST_KEY, tl.int64)  # reached by enough tokens
    high = _keys(highest).to(tl.int64) + 1  # not so
    exact = high - low <= 1
    while not exact:
        step = (high - low + 7) // 8
        counts1 = tl.zeros([TILE], tl.int32)
        counts2 = tl.zeros([TILE], tl.int32)
        counts3 = tl.zeros([TILE], tl.int32)
        counts4 = tl.zeros([TILE], tl.int32)
        counts5 = tl.zeros([TILE], tl.int32)
        counts6 = tl.zeros([TILE], tl.int32)
        counts7 = tl.zeros([TILE], tl.int32)
        for start in range(0, vocab_size, TILE):
            _, logits = _load(row_ptr, start, vocab_size, temperature, floor, TILE)
            above = _keys(logits).to(tl.int64) - low
            there = logits > float("-inf")
            counts1 += (there & (above >= step)).to(tl.int32)
            counts2 += (there & (above >= 2 * step)).to(tl.int32)
            counts3 += (there & (above >= 3 * step)).to(tl.int32)
            counts4 += (there & (above >= 4 * step)).to(tl.int32)
            counts5 += (there & (above >= 5 * step)).to(tl.int32)
            counts6 += (there & (above >= 6 * step)).to(tl.int32)
            counts7 += (there & (above >= 7 * step)).to(tl.int32)
        num = (tl.sum(counts1, axis=0) >= top_k).to(tl.int64)
        num += (tl.sum(counts2, axis=0) >= top_k).to(tl.int64)
        num += (tl.sum(counts3, axis=0) >= top_k).to(tl.int64)
        num += (tl.sum(counts4, axis=0) >= top_k).to(tl.int64)
        num += (tl.sum(counts5, axis=0) >= top_k).to(tl.int64)
        num += (tl.sum(counts6, axis=0) >= top_k).to(tl.int64)
        num += (tl.sum(counts7, axis=0) >= top_k).to(tl.int64)
        low += num * step
        high = tl.minimum(low + step, high)
        exact = high - low <= 1
    key = low.to(tl.int32)
    least = tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)
    return tl.where(low > _LOWEST_KEY, least, float("-inf"))  # the lowest key stands for no logit


@triton.jit
def _choose_kernel(
    logits_ptr: tl.tensor,  # [*, vocab_size], rows row_stride apart
    rows_ptr: tl.tensor,  # [num_rows] int64
    keys_ptr: tl.tensor,  # [num_rows] each
    top_p_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    possible_ptr: tl.tensor,
    row_stride: tl.tensor,
    vocab_size: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    row_ptr = logits_ptr + tl.load(rows_ptr + row) * row_stride
    temperature = tl.load(temperature_ptr + row)
    is_greedy = temperature == 0.0
    temperature = tl.where(is_greedy, 1.0, temperature)
    floor = tl.full((), float("-inf"), tl.float32)
    highest = tl.full((), float("-inf"), tl.float32)
    token = tl.full((), 0, tl.int32)
    for start in range(0, vocab_size, TILE):
        ids, logits = _load(row_ptr, start, vocab_size, temperature, floor, TILE)
        tile_highest = tl.max(logits, axis=0)
        if tile_highest > highest:
            highest = tile_highest
            token = tl.min(tl.where(logits == tile_highest, ids, vocab_size), axis=0)
    possible = highest > float("-inf")
    if possible & (not is_greedy):
        floor = highest + tl.load(min_p_ptr + row)  # the difference of two logits is the ratio of the probabilities
        top_k = tl.load(top_k_ptr + row)
        top_p = tl.load(top_p_ptr + row)
        limit = tl.full((), float("inf"), tl.float64)  # of the mass that precedes a token
        lowest = tl.full((), float("-inf"), tl.float32)
        if top_k > 0:
            lowest = _least_of_top_k(row_ptr, vocab_size, temperature, floor, highest, top_k, TILE)
        if top_p < 1.0:
            # All tokens precede an id that none has; of top_k, those that reach the lowest logit may be too many.
            first = tl.where(top_k > 0, 0, vocab_size)
            count, mass = _preceding(row_ptr, vocab_size, temperature, floor, highest, lowest, first, TILE)
            if (top_k > 0) & (lowest > float("-inf")):
                mass += (top_k - count).to(tl.float64) * tl.exp(lowest - highest).to(tl.float64)
            limit = mass * top_p
        floor = tl.maximum(floor, lowest)
        before_logit = tl.full((), float("-inf"), tl.float32)
        before_token = vocab_size.to(tl.int32)
        again = True
        while again:
            before_logit, before_token = _draw(
                row_ptr, vocab_size, temperature, floor, tl.load(keys_ptr + row), before_logit, before_token, TILE
            )
            again = False
            if (top_k > 0) | (top_p < 1.0):
                count, mass = _preceding(
                    row_ptr, vocab_size, temperature, floor, highest, before_logit, before_token, TILE
                )
                again = (count > 0) & (((top_k > 0) & (count >= top_k)) | (mass >= limit))
        token = before_token
    tl.store(tokens_ptr + row, token.to(tl.int64))
    tl.store(possible_ptr + row, possible)


def choose(
    logits: torch.Tensor,
    rows: torch.Tensor,
    key: torch.Tensor,
    top_p: torch.Tensor,
    temperature: torch.Tensor,
    min_p: torch.Tensor,
    top_k: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A token for each of `rows [n]` (int64) of `logits [*, vocab_size]`, of any floating type and contiguous in a row;
    and whether any token has a logit above -inf, both `[n]`. Does not wait for the device.

    Args:
        key: int64, of the noise.
        top_p: float64, 1: all tokens.
        temperature: float32, 0: the likeliest token.
        min_p: float32, its logarithm.
        top_k: int32, 0: all tokens.
    """
    assert logits.stride(-1) == 1
    vocab_size = logits.shape[-1]
    tokens = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    possible = torch.empty(len(rows), dtype=torch.bool, device=logits.device)
    with torch.cuda.device_of(logits):
        _choose_kernel[(len(rows),)](
            logits,
            rows,
            key,
            top_p,
            temperature,
            min_p,
            top_k,
            tokens,
            possible,
            logits.stride(0),
            vocab_size,
            TILE=min(_TILE_TOKENS, triton.next_power_of_2(vocab_size)),
            num_warps=_NUM_WARPS,
        )
    return tokens, possible
