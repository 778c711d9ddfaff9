"""Log probabilities and ranks by unprocessed logits, in chunks of rows."""

from __future__ import annotations

import pytest
import torch

from app.engine.request import TokenLogprobs
from app.engine.sampling import logprobs
from app.engine.sampling.logprobs import prompt_logprobs
from app.engine.sampling.params import SamplingParams
from app.engine.sampling.sampler import sample
from app.engine.sampling.state import SamplingState


def check(found: TokenLogprobs, logits: torch.Tensor, token: int, num_top: int) -> None:
    """Against one row's log_softmax in float64, ranked token by token."""
    expected = logits.double().log_softmax(-1).tolist()
    ranked = sorted(range(len(expected)), key=lambda i: (-float(logits[i]), i))
    assert found.token_id == token
    assert found.logprob == pytest.approx(expected[token], abs=2e-6)
    assert found.rank == ranked.index(token) + 1
    assert [i for i, _ in found.top] == ranked[:num_top]
    assert [value for _, value in found.top] == pytest.approx([expected[i] for i in ranked[:num_top]], abs=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_top", [0, 1, 5, 400])
def test_prompt_logprobs(dtype: torch.dtype, num_top: int) -> None:
    """Half precision has many equal logits: ranks agree with the order of the alternatives."""
    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(9, 400, generator=generator)).to(dtype)
    token_ids = [0, 399, 7, 7, 200, *logits[5:].argmax(-1).tolist()]
    for i, found in enumerate(prompt_logprobs(logits, token_ids, num_top)):
        check(found, logits[i].float(), token_ids[i], num_top)


def test_equals_are_ranked_by_their_ids() -> None:
    """So a token's rank is its place among the alternatives."""
    logits = torch.tensor([[1.0, 3.0, 3.0, 4.0, 3.0]])
    assert [prompt_logprobs(logits, [token], 0)[0].rank for token in range(5)] == [5, 2, 3, 1, 4]


def test_more_alternatives_than_tokens() -> None:
    (found,) = prompt_logprobs(torch.tensor([[1.0, 3.0, 2.0]]), [0], 100)
    assert [i for i, _ in found.top] == [1, 2, 0]


def test_rows_are_worked_on_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The size of a chunk bounds memory, and changes nothing else."""
    logits = torch.randn(11, 100).bfloat16()
    tokens = list(range(11))
    whole = prompt_logprobs(logits, tokens, 3)
    sizes = []

    def seen(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.numel())
        return order(tensor)

    order = logprobs.sort_keys
    monkeypatch.setattr(logprobs, "sort_keys", seen)
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", 300)
    assert prompt_logprobs(logits, tokens, 3) == whole
    assert sizes == [300, 300, 300, 200]


def test_sampled_tokens_have_those_of_the_raw_logits() -> None:
    """By unprocessed logits, and only for rows that request them."""
    logits = (3 * torch.randn(5, 400, generator=torch.Generator().manual_seed(0))).bfloat16()
    settings: list[dict[str, object]] = [
        {"temperature": 0, "logprobs": 4},
        {"temperature": 3.0, "logprobs": 2, "seed": 1},
        {"temperature": 0},
        {"temperature": 0, "logit_bias": {17: 100.0}, "logprobs": 0},
        {"temperature": 2.0, "top_k": 3, "logprobs": 1, "seed": 2, "repetition_penalty": 1.5},
    ]
    states = [SamplingState(SamplingParams(**s), [1]) for s in settings]  # type: ignore[arg-type]
    sampled = sample(logits, states)
    assert sampled.token_ids[3] == 17
    for i, (state, found) in enumerate(zip(states, sampled.logprobs, strict=True)):
        if state.params.logprobs is None:
            assert found is None
        else:
            assert found is not None
            check(found, logits[i].float(), sampled.token_ids[i], state.params.logprobs)
