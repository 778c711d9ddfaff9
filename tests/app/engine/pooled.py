"""Embeddings of small engines, and what transformers makes of the same prompts."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from folio.app.engine.engine import Engine
from folio.app.engine.request.delta import Delta
from folio.app.engine.request.pooled import PoolingParams
from folio.app.engine.sampling.params import SamplingParams
from tests.app.engine.engines import run

ONE = SamplingParams(max_tokens=1)
EMBED = PoolingParams()
# Largest difference of a component of a vector of length 1: float32, other kernels, sums in another order.
TOLERANCE = 2e-5
Vector = np.ndarray[Any, Any]


def vector(deltas: list[Delta]) -> Vector:
    [delta] = deltas
    assert delta.error is None
    assert delta.pooled is not None
    return np.frombuffer(delta.pooled, "<f4")


def embed(engine: Engine, prompts: list[list[int]], params: PoolingParams = EMBED, **options: Any) -> list[Any]:
    for i, prompt in enumerate(prompts):
        engine.submit(f"embed {i}", prompt, ONE, pooling=params, **options)
    deltas = run(engine)
    return [vector(deltas[f"embed {i}"]) for i in range(len(prompts))]


def hidden(folder: Path, prompt: list[int]) -> Vector:
    """`[num_tokens, hidden_size]` by transformers."""
    model = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        states: torch.Tensor = model(torch.tensor([prompt])).last_hidden_state[0]
    return states.double().numpy()


def unit(values: Vector) -> Vector:
    return values / np.linalg.norm(values)


def expected(folder: Path, prompt: list[int], method: str) -> Vector:
    states = hidden(folder, prompt)
    return unit(states[-1] if method == "last" else states.mean(0))


def assert_close(actual: Vector, wanted: Vector, tolerance: float = TOLERANCE) -> None:
    assert actual.shape == wanted.shape
    difference = float(np.abs(actual - wanted).max())
    assert difference <= tolerance, difference


def copy_of(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to / "copy"))


def headless_copy(folder: Path, to: Path) -> Path:
    """A checkpoint as `AutoModel` saves it: no output layer, and no prefix before names."""
    copy = copy_of(folder, to)
    weights = load_file(copy / "model.safetensors")
    base = {name.removeprefix("model."): value for name, value in weights.items() if name != "lm_head.weight"}
    save_file(base, copy / "model.safetensors", {"format": "pt"})
    return copy
