"""Fixtures for the tests of sampling: the other ways to choose on a CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

from folio.app.engine.sampling import choice, penalties, sampler


@pytest.fixture
def by_torch(without_compiler: None) -> Iterator[None]:
    """As on a machine without a C++ compiler."""
    choice.compiled_kernels.cache_clear()
    yield
    choice.compiled_kernels.cache_clear()


@pytest.fixture(params=["compiled", "by_torch"])
def each_choice(request: pytest.FixtureRequest) -> None:
    if request.param == "by_torch":
        request.getfixturevalue("by_torch")


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is sent to a device is copied, on a CPU too."""

    def copy(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
        return [torch.from_numpy(array.copy()).to(device) for array in arrays]

    for module in (sampler, penalties):
        monkeypatch.setattr(module, "to_device", copy)


@pytest.fixture
def on_gpu(copied: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of GPUs, in Triton's interpreter."""
    pytest.importorskip("triton")
    monkeypatch.setattr(sampler, "_choose_on_cpu", sampler._choose_on_gpu)
