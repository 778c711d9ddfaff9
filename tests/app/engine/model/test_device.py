"""The choice of the device: every step that can fail gives its reason, over the stand-in driver."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from folio.app.config.engine import EngineConfig, ResolvedConfig
from folio.app.engine.engine import Engine
from folio.app.engine.model.device import CudaProbes, resolve
from folio.app.errors import ConfigError
from folio.kernels import AttentionProvider, KernelError, select_provider
from folio.kernels.provider import AttentionCall
from folio.kernels.reference import ReferenceProvider
from folio.vmem import Backend, CudaBackend, MapError
from folio.vmem.backends.cuda import CPU
from folio.vmem.backends.probe import check_mapping
from tests.app.engine.runs import on_gpu
from tests.vmem.backends.stand_in_driver import StandInDriver

AUTO = EngineConfig(model="builtin")


class WrongAttention(ReferenceProvider):
    """Attention without the last cached token."""

    def run_attend(self, call: AttentionCall) -> torch.Tensor:
        lengths = call.batch.cache_seqlens - 1
        return super().run_attend(replace(call, batch=replace(call.batch, cache_seqlens=lengths)))


def probes(
    driver: StandInDriver,
    *,
    available: bool = True,
    provider: Callable[[], AttentionProvider] = lambda: select_provider("sdpa", torch.device("cpu")),
) -> CudaProbes:
    def open_backend() -> Backend:
        return CudaBackend(driver=driver, tensor_device=CPU)

    return CudaProbes(lambda: available, open_backend, provider, torch.device("cpu"))


def test_a_device_that_works_is_taken() -> None:
    driver = StandInDriver(8 << 20)
    for device in ("auto", "cuda"):
        resolved = resolve(replace(AUTO, device=device), probes(driver))
        assert (resolved.device, resolved.max_num_seqs) == ("cuda", 256)
        assert resolve(resolved, probes(driver, available=False)) is resolved  # the device is known
    assert driver.leftovers == (0, 0, 0, 0, 0)
    assert {"cuMemAddressReserve", "cuMemCreate", "cuMemMap", "cuMemUnmap", "cuMemRelease"} <= set(driver.calls)


def test_cpu_is_not_probed() -> None:
    assert resolve(replace(AUTO, device="cpu"), probes(StandInDriver(0))) == replace(AUTO, device="cpu").on_device(
        "cpu"
    )


CALLS = ["cuDeviceGet", "cuDevicePrimaryCtxRetain"]
CALLS += ["cuMemGetAllocationGranularity", "cuMemAddressReserve", "cuMemCreate"]


def no_provider() -> AttentionProvider:
    raise KernelError("attention triton needs the package triton")


def no_compiler() -> AttentionProvider:
    raise OSError("no C compiler")


def small(driver: StandInDriver) -> None:
    driver.capacity_bytes = 0


def refuse(name: str) -> Callable[[StandInDriver], None]:
    """Let every call of this name fail."""
    num_values = {"cuInit": 0, "cuMemMap": 0, "cuMemSetAccess": 0}.get(name, 1)

    def spoil(driver: StandInDriver) -> None:
        setattr(driver, name, lambda *_: (driver.CUresult.CUDA_ERROR_INVALID_VALUE, *[0] * num_values))

    return spoil


@pytest.mark.parametrize(
    ("spoil", "options", "reason"),
    [
        (None, {"available": False}, "torch sees no CUDA device here"),
        (refuse("cuInit"), {}, "cuInit failed: CUDA_ERROR_INVALID_VALUE (1)"),
        *((refuse(name), {}, f"{name} failed") for name in CALLS),
        (refuse("cuMemMap"), {}, "cuMemMap at 0x"),
        (refuse("cuMemSetAccess"), {}, "cuMemSetAccess at 0x"),
        (small, {}, "the device has no memory for a page of 65536 bytes"),
        (None, {"provider": no_provider}, "attention triton needs the package triton"),
        (None, {"provider": no_compiler}, "no C compiler"),
        (None, {"provider": WrongAttention}, "attention reference differs from the reference by"),
    ],
)
@pytest.mark.parametrize("has_gpu", [False, True])
def test_each_step_that_fails_gives_the_reason(
    spoil: Callable[[StandInDriver], None] | None,
    options: dict[str, Any],
    reason: str,
    has_gpu: bool,
    caplog: pytest.LogCaptureFixture,
    use_machine: Callable[..., None],
) -> None:
    """On a machine with a GPU the CPU is a surprise."""
    use_machine(has_gpu=has_gpu)
    caplog.set_level(logging.INFO, "folio.app.engine.model.device")
    driver = StandInDriver(8 << 20)
    if spoil is not None:
        spoil(driver)
    assert resolve(AUTO, probes(driver, **options)) == AUTO.on_device("cpu")
    [(level, message)] = [(r.levelno, r.getMessage()) for r in caplog.records if r.name.endswith("model.device")]
    assert message.startswith("device auto is the CPU: ")
    assert reason in message
    assert "\n" not in message
    assert level == (logging.WARNING if has_gpu else logging.INFO)
    with pytest.raises(ConfigError, match=r"^device is cuda, but .*; use cpu$") as error:
        resolve(replace(AUTO, device="cuda"), probes(driver, **options))
    assert reason in str(error.value)
    assert driver.leftovers[4] == 0


def test_every_failing_call_leaves_nothing_behind() -> None:
    """Call by call: a failure that cannot be undone is the reason, too, and undoable ones leave nothing."""
    driver = StandInDriver(8 << 20)
    assert probes(driver).fault() is None
    num_calls, num_faults = len(driver.calls), 0
    for fail_at in range(1, num_calls + 1):
        driver = StandInDriver(8 << 20)
        driver.fail_at = fail_at
        num_faults += probes(driver).fault() is not None
        assert driver.leftovers[:4] == (0, 0, 0, 0), driver.calls[fail_at - 1]
    assert num_faults > num_calls // 3  # others are tried again


def test_a_page_must_show_the_same_bytes_at_both_addresses() -> None:
    class Copying(CudaBackend):
        """Maps another page at the second address."""

        def _map(self, address: int, handles: object) -> None:
            assert isinstance(handles, list)
            other = self._create(self.page_bytes)
            super()._map(address, [handles[0], other])
            self._destroy(other, self.page_bytes)

    driver = StandInDriver(8 << 20)
    backend = Copying(driver=driver, tensor_device=CPU)
    with pytest.raises(MapError, match="does not show the same bytes at both"):
        check_mapping(backend)
    backend.close()
    assert driver.leftovers == (0, 0, 0, 0, 0)


def test_an_engine_is_resolved_once() -> None:
    engine = Engine(replace(AUTO, kv_memory_bytes=16 << 20, num_threads=1))
    try:
        assert isinstance(engine.config, ResolvedConfig)
        assert (engine.config.device, engine.scheduler.max_num_seqs) == ("cpu", 64)
    finally:
        engine.close()


@on_gpu
@pytest.mark.parametrize("attention", ["auto", "triton", "sdpa"])
def test_a_real_device_works(attention: str) -> None:
    assert CudaProbes.here(attention).fault() is None
    assert resolve(replace(AUTO, attention=attention)).device == "cuda"
