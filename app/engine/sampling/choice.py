"""Choice of a token for each row on CPUs: penalties, temperature, min_p, top_k, top_p, and noise.

`kernels/triton/sampling.py` is the same for GPUs. The definition, with tokens ordered by their scaled logit and equal
ones by id: a token is kept if fewer than top_k precede it, and if those that precede it have less than top_p of the
mass of the first top_k, or of all tokens. Masses are integers, whose sums do not depend on the order of summation.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from folio.app.engine.sampling.noise import draw, highest_of, sums_of
from folio.app.engine.sampling.penalties import TokenCounts, penalise
from folio.app.engine.sampling.settings import GREEDY, MIN_P, TRUNCATED
from folio.kernels import KernelError
from folio.kernels.cpu.row_max import CpuRowMax
from folio.kernels.cpu.sampling import SETTING_NAMES, CpuChoice

logger = logging.getLogger(__name__)

# Copied rows are padded to a multiple of this.
BLOCK_TOKENS = 64
# Tokens sorted for top_p at first: few tokens nearly always have top_p of the mass.
_CANDIDATES = 256
# Mass of probability 1.
_MASS = 2.0**44


def likeliest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The maximum of each row of `logits [rows, vocab_size]`, of any floating type, and the lowest token id that has
    it. In a row with a NaN, both are those of the first NaN."""
    if (compiled := compiled_kernels()) is not None:
        return compiled.row_max(logits)
    highest, token_ids = logits.max(dim=-1)
    return highest, token_ids


def choose(
    logits: torch.Tensor, rows: np.ndarray, settings: np.ndarray, counts: Sequence[TokenCounts | None]
) -> tuple[torch.Tensor, torch.Tensor]:
    """A token for each of `rows [n]` (int64) of `logits [*, vocab_size]`, and whether any token was allowed.

    Args:
        logits: in float32, bfloat16 or float16; not changed.
        settings: `SETTINGS` of the rows, `[n]`; all of them or none are greedy, all or none are truncated.
        counts: of each row its token counts; `None`: it is not penalised.
    """
    if (compiled := compiled_kernels()) is not None:
        columns = (torch.from_numpy(np.ascontiguousarray(settings[name])) for name in SETTING_NAMES)
        addresses = torch.tensor([0 if own is None else own.address for own in counts])
        nums = torch.tensor([0 if own is None else own.num for own in counts])
        return compiled.choose(logits, torch.from_numpy(rows), *columns, addresses, nums)
    values = copy_rows(logits, rows)
    penalise(values, counts, settings)
    return choose_by_torch(values, settings)


def copy_rows(logits: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
    """`padded` of some rows."""
    are_neighbours = rows[-1] - rows[0] == len(rows) - 1
    some = logits[rows[0] : rows[-1] + 1] if are_neighbours else logits.index_select(0, torch.from_numpy(rows))
    return padded(some)


def padded_width(vocab_size: int) -> int:
    return -(-vocab_size // BLOCK_TOKENS) * BLOCK_TOKENS


def padded(logits: torch.Tensor) -> torch.Tensor:
    """A copy in float32, with columns of -inf up to a multiple of `BLOCK_TOKENS`."""
    num_rows, vocab_size = logits.shape
    values = logits.new_empty(num_rows, padded_width(vocab_size), dtype=torch.float32)
    values[:, :vocab_size].copy_(logits)
    values[:, vocab_size:].fill_(-torch.inf)
    return values


class CompiledKernels(NamedTuple):
    row_max: CpuRowMax
    choose: CpuChoice


@functools.cache
def compiled_kernels() -> CompiledKernels | None:
    """The kernels in C++, or `None` where they cannot be compiled. The first call on a machine compiles for some
    seconds: call it before there are requests."""
    try:
        return CompiledKernels(CpuRowMax(), CpuChoice())
    except KernelError as error:
        logger.warning("sampling on CPUs is not compiled, and takes several times longer: %s", error)
        return None


def choose_by_torch(logits: torch.Tensor, settings: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """As `choose`, without a compiler, for all rows.

    Args:
        logits: `[rows, width]` float32, contiguous; width is a multiple of `BLOCK_TOKENS`, and tokens beyond the
            vocabulary are -inf. They are changed.
    """
    features = int(np.bitwise_or.reduce(settings["features"]))
    highest, tokens = likeliest(logits)
    possible = highest > -torch.inf
    if features & GREEDY:
        return tokens, possible
    keys = torch.from_numpy(np.ascontiguousarray(settings["key"]))
    logits /= torch.from_numpy(settings["temperature"])[:, None]
    if features & MIN_P:  # the difference of two logits is the ratio of the probabilities
        least = logits.gather(-1, tokens[:, None]) + torch.from_numpy(settings["min_p"])[:, None]
        logits.masked_fill_(logits < least, -torch.inf)
    drawn = torch.from_numpy(_draw_truncated(logits, keys, settings)) if features & TRUNCATED else draw(logits, keys)
    return torch.where(possible, drawn, tokens), possible


def _draw_truncated(logits: torch.Tensor, keys: torch.Tensor, settings: np.ndarray) -> np.ndarray:
    """Tokens drawn among the likeliest ones, sorted, for rows where these are enough; other rows are drawn from all
    tokens, until a token is drawn that is kept."""
    top_k, top_p = settings["top_k"].astype(np.int64), settings["top_p"]
    few, cut = top_k > 0, top_p < 1
    probs = logits.softmax(dim=-1) if cut.any() else None  # not logsumexp: torch adds up a single row in another order
    rows, token_ids, complete = _candidates(logits, np.where(few, top_k, _CANDIDATES))
    starts = np.searchsorted(rows, np.arange(len(logits) + 1))
    ranks = np.arange(len(rows)) - starts[rows]
    kept = (ranks < top_k[rows]) | ~few[rows]
    settled = few | complete | ~cut
    if probs is not None:
        masses = _masses(probs[torch.from_numpy(rows), torch.from_numpy(token_ids)]).numpy() * kept
        sums = np.concatenate([[0], masses.cumsum()])
        own = sums[starts[1:]] - sums[starts[:-1]]
        limit = np.where(cut, top_p, 2.0) * np.where(few, own, _MASS)
        kept &= sums[:-1] - sums[starts[rows]] < limit[rows]
        settled |= own >= limit
    settled |= starts[1:] == starts[:-1]  # nothing is allowed
    tokens = np.zeros(len(logits), np.int64)
    kept &= settled[rows]
    rows, token_ids = rows[kept], token_ids[kept]
    found, _, drawn = highest_of(rows, token_ids, sums_of(logits, keys, rows, token_ids))
    tokens[found] = drawn
    left = np.flatnonzero(~settled)
    if len(left):
        assert probs is not None
        some = torch.from_numpy(left)
        tokens[left] = _draw_by_mass(logits[some], keys[some], _masses(probs[some]), limit[left])
    return tokens


def _masses(probs: torch.Tensor) -> torch.Tensor:
    return probs.mul_(_MASS).long()


def _candidates(logits: torch.Tensor, least: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """At least the first `least[row]` tokens of each row, in order.

    Returns:
        Their rows and ids, and for each row whether it has no other tokens.
    """
    num_rows, width = logits.shape
    blocks = logits.view(num_rows, -1, BLOCK_TOKENS)
    maxima = blocks.amax(dim=-1)
    num_blocks = maxima.shape[-1]
    # The first n tokens are in the n blocks with the highest maxima, of equal ones the first.
    most = min(int(least.max()), num_blocks)
    chosen = sort_keys(maxima).topk(most, dim=-1).indices
    last = chosen.gather(-1, torch.from_numpy(np.minimum(least, most) - 1)[:, None])
    floors = maxima.gather(-1, last)
    floors[torch.from_numpy(least >= num_blocks)] = -torch.inf
    starts = torch.arange(num_rows)[:, None] * num_blocks
    found = blocks.view(-1, BLOCK_TOKENS).index_select(0, (chosen + starts).view(-1)).view(num_rows, -1)
    places = np.flatnonzero(((found >= floors) & (found > -torch.inf)).numpy())
    rows, columns = np.divmod(places, most * BLOCK_TOKENS)
    token_ids = chosen.numpy()[rows, columns // BLOCK_TOKENS] * BLOCK_TOKENS + columns % BLOCK_TOKENS
    # One number for row, logit and id, to sort by all of them.
    bits = found.numpy().ravel()[places].view(np.int32).astype(np.int64)
    descending = np.where(bits < 0, bits & 0x7FFFFFFF, -bits) + 2**31
    id_bits = (width - 1).bit_length()
    assert num_rows.bit_length() + id_bits <= 31, (num_rows, width)
    order = np.sort((rows << 32 + id_bits) | (descending << id_bits) | token_ids)
    rows, token_ids = order >> 32 + id_bits, order & (1 << id_bits) - 1
    enough = np.bincount(rows, minlength=num_rows)
    complete = (floors[:, 0] == -torch.inf).numpy()
    # Behind the first `least` ones others may be missing.
    ranks = np.arange(len(rows)) - (enough.cumsum() - enough)[rows]
    kept = complete[rows] | (ranks < least[rows])
    return rows[kept], token_ids[kept], complete


def _draw_by_mass(logits: torch.Tensor, keys: torch.Tensor, masses: torch.Tensor, limit: np.ndarray) -> np.ndarray:
    """Tokens with the highest sums, among those that are preceded by less mass than `limit`.

    A token that is drawn from all tokens is probably among these. If not, the tokens after it are not, either.
    """
    tokens = np.zeros(len(logits), np.int64)
    left = torch.arange(len(logits))
    ids = torch.arange(logits.shape[-1])
    while len(left):
        drawn = draw(logits, keys)[:, None]
        own = logits.gather(-1, drawn)
        before = (logits > own) | ((logits == own) & (ids < drawn))
        mass = torch.where(before, masses, 0).sum(dim=-1)
        kept = mass < torch.from_numpy(limit[left.numpy()])
        tokens[left[kept].numpy()] = drawn[kept, 0].numpy()
        left, keys, masses = left[~kept], keys[~kept], masses[~kept]
        logits = logits[~kept].masked_fill_(~before[~kept], -torch.inf)
    return tokens


def sort_keys(logits: torch.Tensor) -> torch.Tensor:
    """Integers in the order of the float32 logits, and of token ids among equal ones.

    Half precision gives many equal logits, whose order in `topk` depends on k, and with that on other requests'
    parameters.
    """
    bits = logits.contiguous().view(torch.int32).long()
    ordered = torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    return ordered * logits.shape[-1] - torch.arange(logits.shape[-1], device=logits.device)
