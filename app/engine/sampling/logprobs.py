"""Log probabilities of tokens, by the model's unprocessed logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from app.engine.request import TokenLogprobs

# Logits processed at once: some tens of MB with all intermediate results.
CHUNK_ELEMENTS = 1 << 21


def chunks(num_rows: int, row_elements: int) -> Iterator[slice]:
    """Rows to process at once; a row's results must not depend on the rest of its chunk."""
    step = max(1, CHUNK_ELEMENTS // row_elements)
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


def prompt_logprobs(logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> tuple[TokenLogprobs, ...]:
    """Log probabilities of `token_ids[i]` by row i of `logits [n, vocab_size]`, each with `num_top` alternatives."""
    return tuple(token_logprobs(logits, token_ids, [num_top] * len(token_ids)))


def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """`prompt_logprobs` with a number of alternatives for each row. Equal tokens are ordered by id."""
    assert len(logits) == len(token_ids) == len(num_top)
    results = []
    for rows in chunks(*logits.shape):
        results += _chunk(logits[rows].float(), token_ids[rows], num_top[rows])
    return results


def _chunk(logits: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    vocab_size = logits.shape[-1]
    logprobs = logits.log_softmax(dim=-1)
    chosen = torch.tensor(token_ids)[:, None]
    own = logits.gather(-1, chosen)
    before = (logits > own) | ((logits == own) & (torch.arange(vocab_size) < chosen))
    ranks = (before.sum(dim=-1) + 1).tolist()
    own_logprobs = logprobs.gather(-1, chosen)[:, 0].tolist()
    most = min(max(num_top), vocab_size)
    if most:
        top_ids = sort_keys(logits).topk(most, dim=-1).indices
        tops = list(zip(top_ids.tolist(), logprobs.gather(-1, top_ids).tolist(), strict=True))
    else:
        tops = [([], [])] * len(token_ids)
    return [
        TokenLogprobs(token_id, logprob, rank, tuple(zip(ids[:num], values[:num], strict=True)))
        for token_id, logprob, rank, num, (ids, values) in zip(
            token_ids, own_logprobs, ranks, num_top, tops, strict=True
        )
    ]


def sort_keys(logits: torch.Tensor) -> torch.Tensor:
    """Integers in the order of the float32 logits, and of token ids among equal ones.

    Half precision gives many equal logits, whose order in `topk` depends on k, and with that on other requests'
    parameters.
    """
    bits = logits.contiguous().view(torch.int32).long()
    ordered = torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    return ordered * logits.shape[-1] - torch.arange(logits.shape[-1])
