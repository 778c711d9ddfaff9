"""Fixtures of models."""

from __future__ import annotations

import pytest

from folio.app.engine.model import checkpoint_module, loader


@pytest.fixture
def triton_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of CUDA, in Triton's interpreter: models that are loaded from now on have them."""
    codes = pytest.importorskip("folio.kernels.triton.codes")
    monkeypatch.setattr(checkpoint_module, "select_packed_product", codes.TritonCodes)
    monkeypatch.setattr(loader, "run_in_one_call", lambda _: 0)  # of CPUs
