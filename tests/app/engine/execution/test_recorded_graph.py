"""What the stand-in for CUDA graphs refuses. That it replays what was captured, the engines' tokens show."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch

from folio.app.engine.execution.graph import CaptureError
from folio.kernels import CpuElementwise
from tests.fakes.recorded_graph import RecordedGraph, Recorder

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def inference() -> object:
    with torch.inference_mode():
        yield


def capture(work: Callable[[], object]) -> RecordedGraph:
    graph = Recorder().graph()
    graph.capture(work)
    return graph


@pytest.mark.parametrize(
    ("work", "reason"),
    [
        (lambda x: x.sum().item(), r"reads a value on the host \(Tensor.item\)"),
        (lambda x: x * 2 if (x > 0).all() else x, r"reads a value on the host \(Tensor.__bool__\)"),
        (lambda x: x.tolist(), r"Tensor.tolist"),
        (lambda x: x.numpy(), r"Tensor.numpy"),
        (lambda x: x.nonzero(), r"aten.nonzero.default depends on values"),
        (lambda x: x[x > 0], r"aten.index.Tensor depends on values"),
        (lambda x: torch.repeat_interleave(x, x.long(), dim=0), r"depends on values"),
        (lambda x: x + torch.tensor([1.0, 2.0]), "made on the host"),
        (lambda x: ctypes.c_float.from_address(x.data_ptr()).value, "calls a kernel outside of torch"),
    ],
)
def test_what_a_stream_cannot_replay_is_refused(work: Callable[[torch.Tensor], object], reason: str) -> None:
    x = torch.ones(2)
    work(x)  # eagerly it works
    with pytest.raises(CaptureError, match=reason):
        capture(lambda: work(x))
    work(x)  # and does so afterwards


def test_tensors_made_within_must_not_be_kept() -> None:
    x, kept = torch.ones(2), []
    with pytest.raises(CaptureError, match=r"1 tensors made within the work are kept.*\[2\]"):
        capture(lambda: kept.append(x * 2) or kept[:-1].clear())


def test_a_tensor_that_is_freed_or_moved_is_noticed() -> None:
    x, y, out = torch.ones(2), torch.ones(2), torch.zeros(2)
    inputs = [x, y]
    graph = capture(lambda: out.copy_(inputs[0] + inputs[1]))
    x.set_(torch.ones(2))
    with pytest.raises(CaptureError, match="freed or moved"):
        graph.replay()
    graph = capture(lambda: out.copy_(inputs[0] + inputs[1]))
    graph.replay()
    inputs.clear()
    del y
    with pytest.raises(CaptureError, match="freed or moved"):
        graph.replay()


def test_a_kernel_of_this_project_is_refused_unless_it_is_launched() -> None:
    ops, x, weight, out = CpuElementwise(), torch.randn(2, 8), torch.ones(8), torch.zeros(2, 8)
    with pytest.raises(CaptureError, match="calls a kernel outside of torch"):
        capture(lambda: out.copy_(ops.rms_norm(x, weight, 1e-6)))
    recorder = Recorder()
    graph = recorder.graph()
    graph.capture(lambda: out.copy_(recorder.launch(lambda x: ops.rms_norm(x, weight, 1e-6), x * 2)))
    x.normal_()
    graph.replay()
    assert torch.equal(out, ops.rms_norm(x * 2, weight, 1e-6))
