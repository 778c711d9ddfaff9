"""Choice of attention providers."""

from __future__ import annotations

import logging

import pytest
import torch

from folio.kernels import KernelError, Masking, select_provider
from tests.kernels.cases import check, in_chunks, make_case
from tests.kernels.conftest import UseCompiler

CPU = torch.device("cpu")


def test_unknown_or_unavailable_provider_is_an_error() -> None:
    with pytest.raises(KernelError, match="choose one of"):
        select_provider("fastest", CPU)
    with pytest.raises(KernelError, match="cpu cannot run on cuda; choose one of triton"):
        select_provider("cpu", torch.device("cuda"))
    with pytest.raises(KernelError, match="triton cannot run on cpu; choose one of cpu, sdpa, reference"):
        select_provider("triton", CPU)
    with pytest.raises(KernelError, match="does not know the device mps"):
        select_provider("auto", torch.device("mps"))


def test_batch_invariance_is_of_few_providers() -> None:
    with pytest.raises(KernelError, match="sdpa is not batch-invariant; choose one of cpu, triton"):
        select_provider("sdpa", CPU, batch_invariant=True)
    provider, case = select_provider("auto", CPU, batch_invariant=True), make_case([(70, 70)])
    assert torch.equal(in_chunks(provider, case, 1), in_chunks(provider, case, 70))
    with pytest.raises(KernelError, match="no attention provider supports this call: cpu: takes at most 64"):
        in_chunks(provider, make_case([(3, 9)], (65, 1)), 1)


def test_without_a_compiler_none_is_batch_invariant(use_compiler: UseCompiler) -> None:
    use_compiler(None)
    with pytest.raises(KernelError, match=r"no attention provider for cpu is available: cpu: .*g\+\+"):
        select_provider("auto", CPU, batch_invariant=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("name", ["triton", "torch-flash"])
def test_unavailable_provider_is_an_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(KernelError):
        select_provider(name, torch.device("cuda"))


def test_auto_takes_the_next_provider_if_the_first_does_not_support_a_call(caplog: pytest.LogCaptureFixture) -> None:
    provider = select_provider("auto", CPU)
    for _ in range(2):
        check(provider, make_case([(1, 20), (3, 9)], (65, 1)))
    assert [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING] == [
        "attention falls back to sdpa, many times slower than cpu: takes at most 64 query heads per KV head"
    ]


def test_only_auto_falls_back_without_a_compiler(use_compiler: UseCompiler, caplog: pytest.LogCaptureFixture) -> None:
    use_compiler(None)
    provider = select_provider("auto", CPU)
    check(provider, make_case([(1, 20), (3, 9)], masking=Masking(0.2, window_left=4)))
    assert "provider cpu is not available" in caplog.text
    with pytest.raises(KernelError, match="g\\+\\+"):
        select_provider("cpu", CPU)
