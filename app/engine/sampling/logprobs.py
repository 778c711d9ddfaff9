"""Log probabilities of tokens, with the likeliest alternatives; computed where the logits are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch.nn.functional import pad

from folio.app.engine.sampling.choice import BLOCK_TOKENS, sort_keys
from folio.app.engine.sampling.token_logprobs import TokenLogprobs
from folio.app.engine.sampling.transfer import Readback, to_device

# Logits processed at once: on CPUs some tens of MB with all intermediate results.
CHUNK_ELEMENTS = 1 << 21
# On other devices a chunk costs launches.
_DEVICE_CHUNK_ELEMENTS = 1 << 26


def chunks(num_rows: int, row_elements: int, device: torch.device) -> Iterator[slice]:
    """Rows to process at once; a row's results must not depend on the rest of its chunk."""
    step = max(1, (CHUNK_ELEMENTS if device.type == "cpu" else _DEVICE_CHUNK_ELEMENTS) // row_elements)
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


def prompt_logprobs(logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> tuple[TokenLogprobs, ...]:
    """Log probabilities of `token_ids[i]` by row i of `logits [n, vocab_size]`, each with `num_top` alternatives. Equal
    tokens are ordered by id."""
    (tokens,) = to_device([np.array(token_ids, np.int64)], logits.device)
    numbers = Readback(launch_logprobs(logits, tokens, num_top).flatten()).wait()
    return tuple(read_logprobs(numbers, token_ids, [num_top] * len(token_ids)))


def launch_logprobs(logits: torch.Tensor, tokens: torch.Tensor, most: int) -> torch.Tensor:
    """For each row of `logits [n, vocab_size]` the numbers that `read_logprobs` turns into log probabilities, `[n, 2 +
    2 * most]` int32: the bits of the log probability of `tokens [n]`, its rank, and the likeliest tokens with theirs.
    """
    most = min(most, logits.shape[-1])
    return torch.cat(
        [
            _chunk(logits[rows].float(), tokens[rows], most)
            for rows in chunks(len(logits), logits.shape[-1], logits.device)
        ]
    )


def _chunk(logits: torch.Tensor, tokens: torch.Tensor, most: int) -> torch.Tensor:
    logprobs = logits.log_softmax(dim=-1)
    chosen = tokens[:, None]
    parts = [logprobs.gather(-1, chosen).view(torch.int32), _ranks(logits, tokens)[:, None].int()]
    if most:
        top_ids = _likeliest(logits, most)
        parts += [top_ids.int(), logprobs.gather(-1, top_ids).view(torch.int32)]
    return torch.cat(parts, dim=-1)


def _ranks(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """1 for the likeliest token, `[n]`; equal ones are ordered by id."""
    chosen = tokens[:, None]
    own = logits.gather(-1, chosen)
    if logits.device.type != "cpu":
        ids = torch.arange(logits.shape[-1], device=logits.device)
        return ((logits > own) | ((logits == own) & (ids < chosen))).sum(dim=-1) + 1
    # Two passes for five of whole chunks, on one thread: torch's four parallel regions a row cost more than they save.
    numbers = zip(logits.numpy(), own.numpy(), tokens.tolist(), strict=True)
    before = [np.count_nonzero(row[:i] >= value) + np.count_nonzero(row[i:] > value) for row, value, i in numbers]
    return torch.tensor(before) + 1


def _likeliest(logits: torch.Tensor, most: int) -> torch.Tensor:
    """The likeliest tokens of each row, `[n, most]`; equal ones are ordered by id. They are in the `most` blocks with
    the highest maxima, of equal ones the first, so that few logits have to be sorted."""
    blocks = pad(logits, (0, -logits.shape[-1] % BLOCK_TOKENS), value=-torch.inf).view(len(logits), -1, BLOCK_TOKENS)
    maxima = blocks.amax(dim=-1)
    first = sort_keys(maxima).topk(min(most, maxima.shape[-1]), dim=-1).indices.sort(dim=-1).values
    found = blocks.gather(1, first[:, :, None].expand(-1, -1, BLOCK_TOKENS)).flatten(1)
    places = sort_keys(found).topk(most, dim=-1).indices
    return first.gather(-1, places // BLOCK_TOKENS) * BLOCK_TOKENS + places % BLOCK_TOKENS


def read_logprobs(numbers: np.ndarray, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """Log probabilities of tokens by the flat numbers of `launch_logprobs`, with `num_top` alternatives for each."""
    rows = numbers.reshape(len(token_ids), -1)
    most = rows.shape[-1] // 2 - 1
    own, values = rows[:, 0].copy().view(np.float32).tolist(), rows[:, 2 + most :].copy().view(np.float32).tolist()
    ranks, ids = rows[:, 1].tolist(), rows[:, 2 : 2 + most].tolist()
    return [
        TokenLogprobs(token_ids[i], own[i], ranks[i], tuple(zip(ids[i][:num], values[i][:num], strict=True)))
        for i, num in enumerate(num_top)
    ]
