"""Log probabilities of tokens by the model alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from app.engine.request import TokenLogprobs


def prompt_logprobs(logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> tuple[TokenLogprobs, ...]:
    """Of each token, by its row of `logits [len(token_ids), vocab_size]`."""
    logprobs = logits.float().log_softmax(dim=-1)
    chosen = logprobs.gather(-1, torch.tensor(token_ids)[:, None])
    ranks = (logprobs > chosen).sum(dim=-1) + 1
    top = logprobs.topk(num_top, dim=-1)
    return tuple(
        TokenLogprobs(token_id, logprob, rank, tuple(zip(ids, values, strict=True)))
        for token_id, logprob, rank, ids, values in zip(
            token_ids, chosen[:, 0].tolist(), ranks.tolist(), top.indices.tolist(), top.values.tolist(), strict=True
        )
    )
