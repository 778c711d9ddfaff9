"""Engine overhead beside the model: scheduling, mapping, batch layout, sampling, text."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

import app.engine.engine
import app.engine.execution.executor
from app.engine import LLM, SamplingParams

NEW_TOKENS = 64
STUB_SEQS, STUB_VOCAB, STUB_LATENCY_S, STUB_STEPS = 256, 32000, 0.02, 60


class _Timed:
    """Measures the time of forward passes."""

    def __init__(self, run: Any) -> None:
        self._run = run
        self.seconds = 0.0

    def __call__(self, *args: Any) -> torch.Tensor:
        start = time.perf_counter()
        logits: torch.Tensor = self._run(*args)
        self.seconds += time.perf_counter() - start
        return logits


def host_share(folder: Path, prompts: list[list[int]]) -> float:
    """Share of the time of decode steps outside of the model's forward pass. Neither includes the layout of the
    batch."""
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
    shares = []
    with LLM(folder, prefix_cache=False) as llm:
        engine = llm.engine
        forward = _Timed(engine.executor._runner.run)
        engine.executor._runner.run = forward  # type: ignore[assignment, method-assign]
        for _ in range(3):
            for i, prompt in enumerate(prompts):
                engine.submit(str(i), prompt, params)
            while any(request.num_uncomputed > 1 for request in engine.scheduler.unfinished()):
                engine.step()
            forward.seconds, start = 0.0, time.perf_counter()
            while engine.has_work:
                engine.step()
            shares.append(1 - forward.seconds / (time.perf_counter() - start))
    return statistics.median(shares)


def step_us_stub() -> float:
    """Microseconds of the host's work in a step of 256 greedy sequences with 32,000 tokens of vocabulary; a stub that
    only waits takes the place of the model."""
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
        while any(request.num_uncomputed > 1 for request in engine.scheduler.unfinished()):
            engine.step()

        def wait(*_: Any) -> torch.Tensor:
            time.sleep(STUB_LATENCY_S)
            return logits

        forward = _Timed(wait)
        engine.executor.run = forward  # type: ignore[assignment, method-assign]
        times = []
        for _ in range(STUB_STEPS):
            forward.seconds, start = 0.0, time.perf_counter()
            engine.step()
            times.append(time.perf_counter() - start - forward.seconds)
        llm.close()
    return statistics.median(times) * 1e6


def step_parts(llm: LLM, num_steps: int = 10) -> dict[str, float]:
    """Mean microseconds of each part of the next `num_steps` steps, for which there must be running requests.

    - `schedule`; `map`: exposed mapping; `plan`: tokens and block tables as numbers; `ahead`: announcing the next
      step's needs to the mapper; `build`: tensors, copied to the device
    - `launch`: the forward's time on the host; `wait`: from then on until the device has computed it; `fence`;
      `copy_out`: logits to the host; `sample`; `apply`; `other`
    - `step`: the sum of these
    - `device`: from the forward's first kernel to its last, by events; on the CPU the same as `launch`
    """
    engine, runner = llm.engine, llm.engine.executor._runner
    on_cuda = engine.model.module.device.type == "cuda"
    seconds: dict[str, float] = defaultdict(float)

    def timed(part: str, work: Any, *args: Any, **settings: Any) -> Any:
        start = time.perf_counter()
        result = work(*args, **settings)
        seconds[part] += time.perf_counter() - start
        return result

    def forward(work: Any, *args: Any) -> Any:
        begin, end = (torch.cuda.Event(enable_timing=True) if on_cuda else None for _ in range(2))
        start = time.perf_counter()
        if begin is not None:
            begin.record()
        logits = work(*args)
        if end is not None:
            end.record()
        launched = time.perf_counter()
        seconds["launch"] += launched - start
        if begin is not None and end is not None:
            end.synchronize()  # otherwise the copy that follows would wait
            seconds["wait"] += time.perf_counter() - launched
            seconds["device"] += begin.elapsed_time(end) / 1e3
        else:
            seconds["wait"] += 0.0
            seconds["device"] += launched - start
        return logits

    parts: dict[str, tuple[Any, str]] = {
        "schedule": (engine.scheduler, "schedule"),
        "map": (engine.memory, "ensure"),
        "plan": (app.engine.engine, "plan_step"),
        "ahead": (engine.memory, "plan"),
        "executor": (engine.executor, "run"),
        "build": (app.engine.execution.executor, "build_batch"),
        "fence": (engine.memory, "launched"),
        "sample": (engine.decoder, "choose"),
        "apply": (engine.decoder, "apply"),
    }
    with ExitStack() as undo:
        for part, (owner, name) in parts.items():
            undo.enter_context(patch.object(owner, name, partial(timed, part, getattr(owner, name))))
        undo.enter_context(patch.object(runner, "run", partial(forward, runner.run)))
        start = time.perf_counter()
        for _ in range(num_steps):
            if not engine.step():
                raise RuntimeError("no step was computed: the requests have ended")
        seconds["step"] = time.perf_counter() - start
    device, step = seconds.pop("device"), seconds.pop("step")
    seconds["copy_out"] = seconds.pop("executor") - sum(seconds[name] for name in ("build", "launch", "wait", "fence"))
    seconds["other"] = step - sum(seconds.values())
    return {part: value / num_steps * 1e6 for part, value in (seconds | {"device": device, "step": step}).items()}
