"""A decoder layer in one call against the single operations, bit for bit."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from folio.kernels import KernelError
from folio.kernels.cpu.layer import CpuLayer, Workspace, run_layers
from folio.kernels.elementwise import HeadNorm
from tests.kernels.cases import Lengths
from tests.kernels.cpu.layers import (
    LONG,
    SIZE,
    Layer,
    Step,
    by_single_operations,
    in_one_call,
    make_step,
    make_weights,
    of_step,
    random_hidden,
)
from tests.kernels.marches import MARCHES, has_layers

DECODES: Lengths = [(1, 1), (1, 37), (1, 5), (1, 64)]
MIXED: Lengths = [(1, 9), (7, 7), (1, 30), (20, 41)]


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    dtype: torch.dtype = request.param
    if not has_layers(dtype):
        pytest.skip(f"no layers in one call with {dtype} here")
    return dtype


@pytest.mark.parametrize("seed", range(48))
def test_equals_the_single_operations(seed: int, dtype: torch.dtype) -> None:
    """With every combination of quantised weights, norms of heads, biases, norms of outputs and activations."""
    layer = Layer(seed, dtype, [LONG] if seed % 5 == 0 else [MIXED, DECODES] if seed % 5 == 1 else None)
    actual, _, *caches = layer.results()
    expected, *their_caches = layer.expected()
    assert expected.isfinite().all()
    assert torch.equal(actual, expected), f"{layer.description}: {(actual.float() - expected.float()).abs().max()}"
    assert all(itertools.starmap(torch.equal, zip(caches, their_caches, strict=True)))


@pytest.mark.parametrize("march", MARCHES)
@pytest.mark.parametrize("codes", [False, True])
def test_lesser_processors(codes: bool, march: str, dtype: torch.dtype) -> None:
    """But for rounding the values are those of this processor."""
    ours, theirs = (make_weights(dtype, codes=codes, march=name) for name in ("native", march))
    step = make_step(MIXED, ours, dtype)
    hidden = random_hidden(len(step.rotary.heads), dtype)
    expected, actual = (
        in_one_call(weights, hidden, [own], name).float()
        for weights, own, name in ((ours, step.copied(), "native"), (theirs, step, march))
    )
    # A value that is rounded otherwise changes codes of the inputs of a quantised weight.
    most = (2e-2 if codes else 2e-3) if dtype == torch.float32 else 5e-2
    assert ((actual - expected).abs().max() / expected.abs().max()).item() < most


def test_a_row_depends_neither_on_other_rows_nor_on_threads(dtype: torch.dtype) -> None:
    """One sequence alone is also divided between threads by heads."""
    weights = make_weights(dtype)
    lengths: Lengths = [(1, 2100), (1, 37), (1, 5)]
    together, threads = make_step(lengths, weights, dtype), torch.get_num_threads()
    hidden = random_hidden(len(lengths), dtype)
    expected = in_one_call(weights, hidden, [together])
    try:
        for row, (num_threads, at) in enumerate([(1, 0), (2, 1), (3, 2)]):
            torch.set_num_threads(num_threads)
            batch = together.attention.batch
            alone = replace(
                together.attention,
                query=together.attention.query[row : row + 1],
                batch=replace(
                    batch,
                    cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32),
                    cache_seqlens=batch.cache_seqlens[at : at + 1],
                    block_table=batch.block_table[at : at + 1],
                ),
            )
            old = together.rotary
            rotary = replace(
                old, heads=old.heads[row : row + 1], cos=old.cos[row : row + 1], sin=old.sin[row : row + 1],
                slots=old.slots[row : row + 1],
            )  # fmt: skip
            actual = in_one_call(weights, hidden[row : row + 1], [Step(rotary, alone)])
            assert torch.equal(actual, expected[row : row + 1]), f"row {row}, {num_threads} threads"
    finally:
        torch.set_num_threads(threads)


def test_a_workspace_serves_calls_of_any_size(dtype: torch.dtype) -> None:
    """Values that a larger call left behind are not read."""
    weights, workspace = make_weights(dtype), Workspace()
    layer = CpuLayer(weights)
    for lengths in (DECODES, MIXED, [(1, 3)], MIXED, DECODES):
        ours = make_step(lengths, weights, dtype)
        theirs, hidden = ours.copied(), random_hidden(len(ours.rotary.heads), dtype)
        actual = run_layers(hidden, [of_step(layer, [ours])], workspace)
        assert torch.equal(actual, by_single_operations(weights, hidden, [theirs]).to(dtype))
        workspace.at_least(0).fill_(255)  # NaN in both dtypes


@pytest.mark.parametrize("lengths", [DECODES, LONG, [(1, 5)]], ids=["decodes", "long", "alone"])
def test_several_layers_in_one_call(lengths: Lengths, dtype: torch.dtype) -> None:
    """Layers with other activations and norms, and caches of their own."""
    weights = [make_weights(dtype, activation="silu"), make_weights(dtype, norms=True, after=True, activation="gelu")]
    weights.append(make_weights(dtype, codes=True))
    ours = [make_step(lengths, weight, dtype, seed=seed) for seed, weight in enumerate(weights)]
    theirs = [step.copied() for step in ours]
    expected = hidden = random_hidden(len(ours[0].rotary.heads), dtype)
    for weight, step in zip(weights, theirs, strict=True):
        expected = by_single_operations(weight, expected, [step])
    before = hidden.clone()
    layers = [of_step(CpuLayer(weight), [step]) for weight, step in zip(weights, ours, strict=True)]
    for _ in range(2):  # writing again changes nothing
        assert torch.equal(run_layers(hidden, layers, Workspace()), expected.to(dtype))
        assert torch.equal(hidden, before)
        for a, b in zip(ours, theirs, strict=True):
            assert all(itertools.starmap(torch.equal, zip(a.caches, b.caches, strict=True)))


@pytest.mark.parametrize("wrong", ["slot", "block"])
def test_calls_outside_of_the_cache_change_nothing(wrong: str, dtype: torch.dtype) -> None:
    """Of the second part, too: the first one has not been written by then."""
    weights = make_weights(dtype)
    steps = [make_step(DECODES, weights, dtype, seed=seed) for seed in (1, 2)]
    if wrong == "slot":
        steps[1].rotary.slots[2] = 10**6
    else:
        steps[1].attention.batch.block_table[3, 0] = 10**6
    before = [step.copied() for step in steps]
    with pytest.raises(KernelError, match=r"exceeds its cache.*1000000"):
        in_one_call(weights, random_hidden(2 * len(DECODES), dtype), steps)
    for a, b in zip(steps, before, strict=True):
        assert all(itertools.starmap(torch.equal, zip(a.caches, b.caches, strict=True)))


def test_products_that_do_not_follow_each_other_are_named(dtype: torch.dtype) -> None:
    weights = make_weights(dtype)
    with pytest.raises(ValueError, match="do not follow each other"):
        replace(weights, down=weights.gate_up)
    with pytest.raises(ValueError, match="norms of"):
        replace(weights, norms=(weights.norms[0], HeadNorm(torch.ones(SIZE + 1, dtype=dtype), 1e-5)))
    other = make_weights(torch.float32 if dtype == torch.bfloat16 else torch.bfloat16)
    with pytest.raises(ValueError, match="in a layer of"):
        replace(weights, down=other.down)
