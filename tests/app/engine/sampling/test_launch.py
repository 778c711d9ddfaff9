"""Sampling equals its definition, on a GPU's path too, and that path never waits for the device."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from folio.app.engine.sampling import choice, sampler
from folio.app.engine.sampling import logits as processors
from folio.app.engine.sampling.choice import likeliest
from folio.app.engine.sampling.noise import gumbel, noise_key
from folio.app.engine.sampling.params import SamplingParams
from folio.app.engine.sampling.settings import SETTINGS, gather_settings
from folio.app.engine.sampling.state import SamplingState
from folio.app.engine.sampling.transfer import pack, packed_bytes, unpack
from tests.app.engine.sampling.helpers import NAMES, state_with


def by_definition(logits: torch.Tensor, params: SamplingParams, key: int) -> int:
    """A token of one row of float32 logits, by a complete sort and sums in float64."""
    if params.temperature == 0:
        return int(logits.argmax())
    scaled = logits / torch.tensor(params.temperature)
    if params.min_p:
        scaled[scaled < scaled.max() + torch.tensor(params.min_p, dtype=torch.float64).log().float()] = -torch.inf
    values = scaled.double().numpy()
    order = np.lexsort((np.arange(len(values)), -values))
    probs = np.exp(values[order] - values.max())
    if 0 < params.top_k < len(order):
        order, probs = order[: params.top_k], probs[: params.top_k]
    before = probs.cumsum() - probs
    kept = order[(before < params.top_p * probs.sum()) | (params.top_p == 1)]
    sums = values[kept] + gumbel(torch.tensor([key]), torch.from_numpy(kept)).numpy()
    return int(kept[sums == sums.max()].min())


@pytest.mark.thirds
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.usefixtures("each_choice")
def test_equals_a_complete_sort(seed: int) -> None:
    """Peaked, flat and equal logits, in half precision with many equal ones; vocabularies of few and many blocks."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    vocab_size = rng.choice([1, 2, 63, 64, 65, 1000, 4097, 20_000])
    dtype = rng.choice([torch.float32, torch.bfloat16])
    scale = rng.choice([0.0, 0.3, 2.0, 8.0])
    logits = (scale * torch.randn(40, vocab_size, generator=generator)).to(dtype)
    states = [
        SamplingState(
            SamplingParams(
                seed=i,
                temperature=rng.choice([0.0, 0.3, 1.0, 1.7]),
                top_k=rng.choice([0, 0, 1, 5, 50, 400, 10**9]),
                top_p=rng.choice([1.0, 0.999999, 0.95, 0.7, 0.1, 1e-30]),
                min_p=rng.choice([0.0, 0.0, 0.03, 1.0]),
            ),
            [1],
        )
        for i in range(len(logits))
    ]
    tokens = sampler.sample(logits, states).token_ids
    for i, state in enumerate(states):
        expected = by_definition(logits[i].float(), state.params, noise_key(i, 0, 0))
        assert tokens[i] == expected, f"{state.params} of {vocab_size} tokens"


def test_keys_of_many_rows_equal_those_of_one() -> None:
    rows = [(0, 0, 0), (1, 2, 7), (2**64 - 1, 1, 0), (-5, 0, 2), (2**63, 3, 1)]  # seed, index, position
    states = [SamplingState(SamplingParams(seed=seed), [1], index=index) for seed, index, _ in rows]
    for length, state in enumerate(states):
        for token in range(length):
            state.append(token)
    keys = gather_settings(states, [position for _, _, position in rows], 100)["key"].tolist()
    assert keys == [noise_key(seed % 2**64, index, length + p) for length, (seed, index, p) in enumerate(rows)]


@pytest.mark.parametrize("vocab_size", [1, 64, 4160, 9999])
@pytest.mark.usefixtures("each_choice")
def test_the_likeliest_is_the_first_of_equals(vocab_size: int) -> None:
    """Also where it is the last token, or a NaN."""
    logits = torch.randint(0, 4, (50, vocab_size), generator=torch.Generator().manual_seed(0)).float()
    logits[1], logits[2], logits[3, -1] = -torch.inf, 7.0, 9.0
    logits[4, vocab_size // 2] = torch.nan
    for dtype in (torch.float32, torch.bfloat16):
        highest, tokens = likeliest(logits.to(dtype))
        expected = logits.max(dim=-1)
        assert torch.equal(tokens, expected.indices)
        torch.testing.assert_close(highest.float(), expected.values, rtol=0, atol=0, equal_nan=True)


def rich_states(count: int) -> list[SamplingState]:
    """Rows with all kinds of parameters, some greedy, some with log probabilities."""
    rng = random.Random(3)
    settings = [tuple(rng.sample(NAMES, rng.randrange(5))) for _ in range(count)]
    return [
        state_with(names, i, logprobs=(i % 5) or None, **({"temperature": 0.0} if i % 4 == 0 else {}))
        for i, names in enumerate(settings)
    ]


def test_the_path_of_gpus_chooses_the_same(request: pytest.FixtureRequest) -> None:
    """Every kind of row."""
    logits = 3 * torch.randn(24, 130, generator=torch.Generator().manual_seed(0)) + 3 * (torch.arange(130) < 16)
    expected = sampler.sample(logits, rich_states(24))
    request.getfixturevalue("on_gpu")
    assert sampler.sample(logits, rich_states(24)) == expected


def test_the_compiled_choice_equals_torchs() -> None:
    """All kinds of settings, of rows that are equal, flat, peaked or mostly forbidden."""
    if choice.compiled_kernels() is None:
        pytest.skip("there is no C++ compiler")
    for seed in range(40):
        rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        logits = rng.choice([0.0, 0.3, 1.0, 3.0, 8.0]) * torch.randn(
            8, 64 * rng.choice([1, 2, 70, 400]), generator=generator
        )
        if rng.random() < 0.5:
            logits = logits.bfloat16().float()
        if rng.random() < 0.3:
            logits[:, torch.rand(logits.shape[-1], generator=generator) < 0.9] = -torch.inf
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.3, 1.0, 1.7]),
            top_k=rng.choice([0, 0, 1, 5, 50, 400]),
            top_p=rng.choice([1.0, 0.999999, 0.95, 0.7, 0.1, 1e-30]),
            min_p=rng.choice([0.0, 0.0, 0.03, 1.0]),
        )
        settings = gather_settings([SamplingState(params, [1])] * 8, range(8), logits.shape[-1])
        tokens, possible = choice.choose(logits, np.arange(8), settings, [None] * 8)
        expected, expected_possible = choice.choose_by_torch(logits.clone(), settings)
        assert torch.equal(possible, expected_possible)
        assert torch.equal(tokens, expected), f"{params} of {list(logits.shape)}"


def test_broken_rows_end_for_every_choice() -> None:
    """NaN and infinity end in a token of the vocabulary, whatever the settings."""
    logits = torch.randn(4, 300)
    logits[0, 7], logits[1, 8], logits[2], logits[3] = torch.nan, torch.inf, torch.nan, -torch.inf
    for params in ({}, {"top_k": 4}, {"top_p": 0.9}, {"top_k": 9, "top_p": 0.5, "min_p": 0.1}):
        sampled = sampler.sample(logits, [SamplingState(SamplingParams(**params), [1]) for _ in range(4)])  # type: ignore[arg-type]
        assert sampled.sound == [False] * 4
        assert all(0 <= token < 300 for token in sampled.token_ids)


class Unread:
    """A result on its way to the host: a test that waits for it fails."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def wait(self) -> np.ndarray:
        raise AssertionError("waits for the device")


@pytest.fixture
def without_values(copied: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`meta` stands for a GPU: its tensors have shapes and no values, and an operation that needs values raises."""

    def choose(_: torch.Tensor, rows: torch.Tensor, *settings: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert all(column.shape == rows.shape and column.is_meta for column in settings)
        return torch.empty_like(rows), torch.empty_like(rows, dtype=torch.bool)

    def penalise(values: torch.Tensor, most_entries: int, *table: torch.Tensor) -> None:
        assert most_entries
        assert all(column.is_meta for column in (values, *table))

    pytest.importorskip("triton")
    monkeypatch.setattr(sampler, "Readback", Unread)
    monkeypatch.setattr("folio.kernels.triton.sampling.choose", choose)
    monkeypatch.setattr("folio.kernels.triton.penalties.penalise", penalise)
    yield
    processors._addends_by_byte.cache_clear()


def test_rows_on_a_cpu_are_neither_copied_nor_masked_for_others() -> None:
    """Regression: masked rows were in one group with biased ones, and copied twice more for it."""
    params: list[dict[str, Any]] = [
        {},
        {"repetition_penalty": 1.1},
        {"logit_bias": {0: 1.0}, "frequency_penalty": 0.1},
        {"min_tokens": 2, "stop_token_ids": [3]},
        {"allowed_token_ids": [0, 1]},
    ]
    states = [SamplingState(SamplingParams(**own), [1], eos_token_ids=frozenset({2})) for own in params]
    features = gather_settings(states, [0] * len(states), 100)["features"]
    groups = [group.tolist() for group in sampler._alike(features, torch.device("cpu"))]
    assert sorted(groups) == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("without_values")
def test_the_path_of_gpus_never_waits(dtype: torch.dtype) -> None:
    """Regression: whole logits were copied to the host in each step, and sampled there."""
    logits = torch.empty(256, 700, dtype=dtype, device="meta")
    for waits in (
        lambda: logits.max().item(),
        lambda: logits[0].tolist(),
        lambda: logits.cpu(),
        lambda: logits.nonzero(),
        lambda: logits[logits > 0],
        lambda: bool(logits.any()),
        lambda: logits.equal(logits),
    ):
        with pytest.raises((RuntimeError, NotImplementedError)):
            waits()
    pending = sampler.launch_sampling(logits, rich_states(256))
    assert pending.token_ids.is_meta
    assert pending.token_ids.shape == (256,)
    assert pending.token_ids.dtype == torch.int64
    plain = [SamplingState(SamplingParams(top_p=0.9), [1]) for _ in range(256)]
    packed = sampler.launch_sampling(logits, plain)._packed
    assert isinstance(packed, Unread)
    assert packed.tensor.is_meta
    assert packed.tensor.nbytes <= 4096, "token ids and flags, and nothing else"


def test_packed_arrays_keep_types_and_shapes() -> None:
    rng = np.random.default_rng(0)
    arrays: list[np.ndarray] = [
        rng.integers(0, 255, 5).astype(np.int32),
        np.empty(0, np.int64),
        rng.random((3, 2)),
        rng.random((4, 3)).astype(np.float32)[:, 1],  # not contiguous
        np.zeros(2, SETTINGS)["key"] + 7,
        rng.integers(-9, 9, (2, 7)).astype(np.int32),
    ]
    packed = torch.empty(packed_bytes(arrays), dtype=torch.uint8)
    pack(arrays, packed)
    for array, view in zip(arrays, unpack(packed, arrays), strict=True):
        assert np.array_equal(view.numpy(), array)
        assert view.numpy().dtype == array.dtype
