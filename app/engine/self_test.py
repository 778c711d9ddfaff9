"""Before a model is served: does the packed forward give what the model gives alone?

Some models ignore a registered attention function, others mix the sequences of a packed batch without a word. So the
loaded model itself is run both ways on two short prompts: through Folio, in chunks that mix prefill and decode; and by
transformers' own attention, one prompt at a time.
"""

from __future__ import annotations

import logging
import statistics

import torch

from app.engine.attention import IMPLEMENTATION
from app.engine.batch import build_batch
from app.engine.model_loader import LoadedModel
from app.engine.model_runner import ModelRunner
from app.engine.params import SamplingParams
from app.engine.request import Request
from app.engine.scheduler import Scheduled
from app.errors import ModelError
from vmem import KVMemory, View

logger = logging.getLogger(__name__)

# Relative difference of the rows of logits. A mix-up gives about 1 in nearly every row; rounding far less than these.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.03}
# (tokens of the first prompt, of the second) in each step: prefill, a mixed step, a chunk beside a decode, decodes.
STEPS = ((11, 0), (1, 7), (1, 13), (1, 1))


def self_test(model: LoadedModel, runner: ModelRunner, memory: KVMemory, view: View) -> None:
    """Raise `ModelError` unless the packed logits agree with the model's own."""
    generator = torch.Generator().manual_seed(0)
    prompts = [
        torch.randint(model.vocab_size, (sum(chunk),), generator=generator) for chunk in zip(*STEPS, strict=True)
    ]
    expected = [_own_logits(model, prompt) for prompt in prompts]
    requests = [
        Request(f"self-test-{i}", prompt.tolist(), SamplingParams(), 1, None) for i, prompt in enumerate(prompts)
    ]
    differences: list[float] = []
    try:
        for request in requests:
            request.memory = memory.open(view)
            memory.append(request.memory, len(request.token_ids))
            memory.ensure([request.memory])
        for counts in STEPS:
            scheduled = [Scheduled(r, n) for r, n in zip(requests, counts, strict=True) if n]
            batch = build_batch(scheduled, memory, view, sample_all=True)
            actual = runner.run(batch)
            row = 0
            for s in scheduled:
                start = s.request.num_computed
                wanted = expected[requests.index(s.request)][start : start + s.num_tokens]
                got = actual[row : row + s.num_tokens].float()
                differences += ((got - wanted).norm(dim=-1) / wanted.norm(dim=-1)).tolist()
                row += s.num_tokens
                s.request.num_computed += s.num_tokens
    finally:
        for request in requests:
            if request.memory is not None:
                memory.free(request.memory)
    # In half precision a close call of a mixture's router can go the other way and change a row for good.
    difference = max(differences) if model.dtype == torch.float32 else statistics.median(differences)
    if not difference <= TOLERANCE[model.dtype]:  # NaN fails too
        raise ModelError(
            f"self-test failed: {model.module.config.model_type} gives other logits in a packed batch than alone "
            f"(relative difference {difference:.2g}, allowed {TOLERANCE[model.dtype]}); it would be served wrongly"
        )
    logger.info("self-test passed: relative difference %.2g", difference)


@torch.inference_mode()
def _own_logits(model: LoadedModel, prompt: torch.Tensor) -> torch.Tensor:
    """Logits `[num_tokens, vocab_size]` by transformers' plain attention."""
    model.module.set_attn_implementation("eager")
    try:
        logits: torch.Tensor = model.module(input_ids=prompt[None], use_cache=False).logits[0].float()
        return logits
    finally:
        model.module.set_attn_implementation(IMPLEMENTATION)
