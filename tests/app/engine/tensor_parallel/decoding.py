"""Every way of sampling in one batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from folio.app.engine import Delta, SamplingParams
from folio.app.engine.engine import Engine, EngineConfig
from folio.app.engine.ranks.processes import Launch, spawn_ranks
from tests.conftest import VOCAB_SIZE

GREEDY = SamplingParams(max_tokens=14, temperature=0, ignore_eos=True)
WAYS = [
    GREEDY,
    replace(GREEDY, temperature=1.0, seed=3, n=3, top_p=0.95, min_p=0.01, repetition_penalty=1.2),
    replace(GREEDY, use_beam_search=True, n=3, length_penalty=0.5),
    replace(GREEDY, n=2, best_of=4, temperature=1.5, seed=8),
    replace(GREEDY, prompt_logprobs=2, logprobs=3),
    replace(GREEDY, temperature=0.7, seed=1, presence_penalty=0.5, logit_bias={7: 5.0}, min_tokens=3),
]


def prompts() -> list[list[int]]:
    """With and without common prefixes."""
    generator = torch.Generator().manual_seed(7)

    def tokens(count: int) -> list[int]:
        return torch.randint(1, VOCAB_SIZE - 1, (count,), generator=generator).tolist()

    common = tokens(100)
    return [common + tokens(20), tokens(1), common + tokens(33), tokens(64), common[:70] + tokens(9), tokens(150)]


def generate(folder: Path, launch: Launch = spawn_ranks, **settings: Any) -> list[tuple[Any, ...]]:
    """All outputs, without the values of log probabilities, which are rounded."""
    config = EngineConfig(
        model=str(folder),
        max_model_len=200,
        max_num_batched_tokens=64,
        skip_tokenizer_init=True,
        dtype="float32",
        **({"kv_memory_bytes": 16 << 20} | settings),
    )
    engine = Engine(config, launch)
    deltas: list[Delta] = []
    try:
        for i, (prompt, params) in enumerate(zip(prompts(), WAYS, strict=True)):
            engine.submit(str(i), prompt, params)
        while engine.has_work:
            deltas += engine.step()
            engine.check_integrity()
        engine.fork("0", "fork", replace(GREEDY, n=2, max_tokens=5))
        while engine.has_work:
            deltas += engine.step()
            engine.check_integrity()
    finally:
        engine.close()
    outputs: dict[tuple[str, int], tuple[list[int], list[Any], list[Any]]] = {}
    for delta in deltas:
        assert delta.error is None
        tokens, prompt_logprobs, logprobs = outputs.setdefault((delta.request_id, delta.index), ([], [], []))
        tokens += delta.token_ids
        prompt_logprobs += [(t.token_id, t.rank, [i for i, _ in t.top]) for t in delta.prompt_logprobs]
        logprobs += [(t.token_id, t.rank, [i for i, _ in t.top]) for t in delta.logprobs]
    return sorted((*key, output) for key, output in outputs.items())
