"""Runs of an engine until all requests have ended."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from folio.app.engine import SamplingParams
from folio.app.engine.engine import Engine
from folio.app.engine.layers.fused_layer import FusedLayer
from folio.app.engine.schedule.mixed_steps import MixedSteps


def on_gpu(test: Any) -> Any:
    """Marks a test for a CUDA device, and skips it where there is none."""
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")(test))


def run(
    engine: Engine, prompts: Sequence[list[int]], params: SamplingParams, *, steps_apart: int = 0
) -> list[list[int]]:
    """Tokens of prompts that arrive together or some steps apart, with a check of the memory after every step."""
    outputs: list[list[int]] = [[] for _ in prompts]
    arriving = list(enumerate(prompts))
    while arriving or engine.has_work:
        for i, prompt in arriving[: 1 if steps_apart else None]:
            engine.submit(str(i), prompt, params)
        del arriving[: 1 if steps_apart else None]
        for _ in range(steps_apart or 1):
            for delta in engine.step():
                assert delta.error is None
                outputs[int(delta.request_id)] += delta.token_ids
            engine.check_integrity()
    return outputs


def generate_staggered(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    """Outputs of prompts that arrive two steps apart, so that prefills meet decodes. Chunks of prompts do not follow
    measured times here: bfloat16 rounds each division of a prompt differently."""
    engine.scheduler.mixed_steps = MixedSteps(engine.recovery, math.inf)
    return run(engine, prompts, params, steps_apart=2)


def layers_in_one_call(module: torch.nn.Module) -> int:
    return sum(isinstance(layer, FusedLayer) and layer.one_call is not None for layer in module.modules())
