"""What the engine takes beside the model: scheduling, mapping, laying out, sampling, text."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from app.engine import LLM, SamplingParams

NEW_TOKENS = 64
STUB_SEQS, STUB_VOCAB, STUB_LATENCY_S, STUB_STEPS = 256, 32000, 0.02, 60


class _Timed:
    """The time of forwards."""

    def __init__(self, run: Any) -> None:
        self._run = run
        self.seconds = 0.0

    def __call__(self, *args: Any) -> torch.Tensor:
        start = time.perf_counter()
        logits: torch.Tensor = self._run(*args)
        self.seconds += time.perf_counter() - start
        return logits


def host_share(folder: Path, prompts: list[list[int]]) -> float:
    """Share of the time of decode steps that is not the model's forward, layout of its batch included in neither."""
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
    shares = []
    with LLM(folder, prefix_cache=False) as llm:
        engine = llm.engine
        forward = _Timed(engine._executor._runner.run)
        engine._executor._runner.run = forward  # type: ignore[assignment, method-assign]
        for _ in range(3):
            for i, prompt in enumerate(prompts):
                engine.submit(str(i), prompt, params)
            while any(request.num_uncomputed > 1 for request in engine._scheduler.unfinished()):
                engine.step()
            forward.seconds, start = 0.0, time.perf_counter()
            while engine.has_work:
                engine.step()
            shares.append(1 - forward.seconds / (time.perf_counter() - start))
    return statistics.median(shares)


def step_us_stub() -> float:
    """Microseconds of a step of 256 sequences that is not its model's, which only waits; greedy, 32,000 tokens."""
    with tempfile.TemporaryDirectory() as folder:
        config = Qwen2Config(
            vocab_size=STUB_VOCAB,
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
        )
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
        llm = LLM(
            folder,
            skip_tokenizer_init=True,
            max_model_len=1024,
            max_num_seqs=STUB_SEQS,
            max_num_batched_tokens=4096,
            kv_memory_bytes=1 << 30,
        )
        engine = llm.engine
        generator = torch.Generator().manual_seed(0)
        logits = torch.randn(STUB_SEQS, STUB_VOCAB, generator=generator).bfloat16()
        params = SamplingParams(max_tokens=STUB_STEPS + 10, temperature=0, ignore_eos=True)
        for i in range(STUB_SEQS):
            engine.submit(str(i), torch.randint(STUB_VOCAB, (32,), generator=generator).tolist(), params)
        while any(request.num_uncomputed > 1 for request in engine._scheduler.unfinished()):
            engine.step()

        def wait(*_: Any) -> torch.Tensor:
            time.sleep(STUB_LATENCY_S)
            return logits

        forward = _Timed(wait)
        engine._executor.run = forward  # type: ignore[assignment, method-assign]
        times = []
        for _ in range(STUB_STEPS):
            forward.seconds, start = 0.0, time.perf_counter()
            engine.step()
            times.append(time.perf_counter() - start - forward.seconds)
        llm.close()
    return statistics.median(times) * 1e6
