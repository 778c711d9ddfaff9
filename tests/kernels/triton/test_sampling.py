"""The Triton kernel that chooses tokens against the CPU's choice: on the GPU if there is one, else interpreted."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from folio.app.engine.sampling import choice
from folio.app.engine.sampling.noise import noise_key
from folio.app.engine.sampling.settings import GREEDY, MIN_P, SETTINGS, TRUNCATED

pytest.importorskip("triton")
from folio.kernels.triton import sampling

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
pytestmark = [pytest.mark.gpu] if CUDA else []


def settings_of(
    count: int, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    settings = np.zeros(count, SETTINGS)
    settings["key"] = [noise_key(7, i) for i in range(count)]
    settings["temperature"], settings["top_k"], settings["top_p"] = temperature, top_k, top_p
    settings["min_p"] = np.log(min_p) if min_p else -np.inf
    settings["features"] = (
        (0 if temperature else GREEDY) | (TRUNCATED if top_k or top_p < 1 else 0) | (MIN_P if min_p else 0)
    )
    return settings


def chosen(logits: torch.Tensor, settings: np.ndarray, rows: list[int] | None = None) -> tuple[list[int], list[bool]]:
    where = torch.tensor(list(range(len(settings))) if rows is None else rows, device=DEVICE)
    columns = [torch.from_numpy(np.ascontiguousarray(settings[name])).to(DEVICE) for name in sampling.SETTINGS]
    tokens, possible = sampling.choose(logits.to(DEVICE), where, *columns)
    return tokens.tolist(), possible.tolist()


def expected(logits: torch.Tensor, settings: np.ndarray) -> tuple[list[int], list[bool]]:
    tokens, possible = choice.choose(logits, np.arange(len(logits)), settings, [None] * len(logits))
    return tokens.tolist(), possible.tolist()


CASES = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.6},
    {"min_p": 0.05},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 300},
    {"top_p": 1e-46},
    {"top_p": 0.3},
    {"top_p": 0.95},
    {"top_k": 20, "top_p": 0.8, "temperature": 0.7},
    {"top_k": 40, "top_p": 0.5, "min_p": 0.01},
]


@pytest.mark.thirds
@pytest.mark.parametrize("params", CASES, ids=str)
@pytest.mark.parametrize("scale", [0.0, 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_choice_on_cpus(
    params: dict[str, float], scale: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of peaked, flat and equal logits; half precision has many equal ones. A vocabulary is several tiles, the last one
    not whole."""
    monkeypatch.setattr(sampling, "_TILE_TOKENS", 256)
    generator = torch.Generator().manual_seed(1)
    logits = (scale * torch.randn(3, 601, generator=generator)).to(dtype)
    settings = settings_of(3, **params)  # type: ignore[arg-type]
    assert chosen(logits, settings) == expected(logits, settings)


def test_rows_are_found_by_their_indices_and_strides() -> None:
    logits = 3 * torch.randn(9, 500, generator=torch.Generator().manual_seed(0))
    settings = settings_of(4, top_p=0.9)
    rows = [7, 0, 3, 8]
    assert chosen(logits[:, :130], settings, rows) == expected(logits[rows, :130], settings)


def test_forbidden_tokens_and_broken_rows() -> None:
    """Rows without an allowed token say so; NaN and infinity end in a token of the vocabulary."""
    logits = torch.randn(6, 200, generator=torch.Generator().manual_seed(0))
    logits[0] = -torch.inf
    logits[1, 3:] = -torch.inf
    logits[2], logits[3, 5], logits[4, 9] = torch.nan, torch.nan, torch.inf
    for params in CASES[::2]:
        tokens, possible = chosen(logits, settings_of(6, **params))  # type: ignore[arg-type]
        assert possible[:2] == [False, True]
        assert possible[5]
        assert tokens[1] < 3
        assert all(0 <= token < 200 for token in tokens)
