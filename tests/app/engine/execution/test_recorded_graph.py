"""The stand-in for CUDA graphs: what it replays, and what it refuses."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch

from folio.app.engine.execution.graph import CaptureError
from folio.kernels import CpuElementwise, Masking, VarlenBatch, select_provider
from tests.fakes.recorded_graph import RecordableProvider, RecordedGraph, Recorder

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def inference() -> object:
    with torch.inference_mode():
        yield


def capture(work: Callable[[], object]) -> RecordedGraph:
    graph = Recorder().graph()
    graph.capture(work)
    return graph


def test_a_replay_reads_what_lies_at_the_addresses_now() -> None:
    x, weight, out = torch.ones(2, 4), torch.eye(4), torch.zeros(2, 4)

    def work() -> None:
        y = torch.nn.functional.silu(x @ weight)
        halves = y.view(2, 2, 2).split([1, 1], dim=1)
        out.copy_(torch.cat([half.flatten(1) for half in halves], dim=1))

    graph = capture(work)
    x.fill_(3.0)
    weight.mul_(2.0)
    out.zero_()
    graph.replay()
    assert torch.equal(out, torch.nn.functional.silu(torch.full((2, 4), 6.0)))
    address = out.data_ptr()
    x.fill_(-1.0)
    graph.replay()
    assert torch.equal(out, torch.nn.functional.silu(torch.full((2, 4), -2.0)))
    assert out.data_ptr() == address
    assert graph.num_bytes >= 2 * x.nbytes


def test_changes_in_place_are_replayed_in_order() -> None:
    x, rows, out = torch.zeros(4), torch.tensor([2, 0]), torch.zeros(2)

    def work() -> None:
        x[:2] += 1.0
        x.index_copy_(0, rows, torch.full((2,), 7.0))
        x.mul_(2.0)
        out.copy_(x[rows])

    graph = capture(work)  # runs it twice
    x.zero_()
    rows.copy_(torch.tensor([3, 1]))
    graph.replay()
    assert x.tolist() == [2.0, 14.0, 0.0, 14.0]
    assert out.tolist() == [14.0, 14.0]


def read_item(x: torch.Tensor) -> object:
    return x.sum().item()


def branch(x: torch.Tensor) -> object:
    return x * 2 if (x > 0).all() else x


def to_list(x: torch.Tensor) -> object:
    return x.tolist()


def to_numpy(x: torch.Tensor) -> object:
    return x.numpy()


def places(x: torch.Tensor) -> object:
    return x.nonzero()


def mask(x: torch.Tensor) -> object:
    return x[x > 0]


def repeats(x: torch.Tensor) -> object:
    return torch.repeat_interleave(x, x.long(), dim=0)


def host_values(x: torch.Tensor) -> object:
    return x + torch.tensor([1.0, 2.0])


def other_kernel(x: torch.Tensor) -> object:
    return ctypes.c_float.from_address(x.data_ptr()).value


@pytest.mark.parametrize(
    ("work", "reason"),
    [
        (read_item, r"reads a value on the host \(Tensor.item\)"),
        (branch, r"reads a value on the host \(Tensor.__bool__\)"),
        (to_list, r"Tensor.tolist"),
        (to_numpy, r"Tensor.numpy"),
        (places, r"aten.nonzero.default depends on values"),
        (mask, r"aten.index.Tensor depends on values"),
        (repeats, r"depends on values"),
        (host_values, "made on the host"),
        (other_kernel, "calls a kernel outside of torch"),
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


@pytest.mark.parametrize("name", ["cpu", "sdpa", "reference"])
def test_attention_is_one_launch_that_reads_lengths_and_tables_late(name: str) -> None:
    recorder = Recorder()
    provider = RecordableProvider(select_provider(name, CPU), recorder)
    keys, values = torch.randn(2, 6, 8, 2, 16)
    query, key, value = torch.randn(3, 4, 16), torch.randn(3, 2, 16), torch.randn(3, 2, 16)
    slots, table = torch.tensor([9, 17, 0]), torch.tensor([[1, 0], [2, 3], [0, 0]], dtype=torch.int32)
    lengths = torch.tensor([2, 2, 1], dtype=torch.int32)
    batch = VarlenBatch(torch.arange(4, dtype=torch.int32), lengths, table, 1, 16)
    masking = Masking(0.25, window_left=5, sinks=torch.randn(4))
    out = torch.zeros(3, 4, 16)

    def work() -> None:
        provider.write(key * 2, value, keys, values, slots)
        out.copy_(provider.attend(query + 1, keys, values, batch, masking))

    graph = recorder.graph()
    graph.capture(work)
    slots.copy_(torch.tensor([12, 30, 0]))
    lengths.copy_(torch.tensor([5, 15, 1], dtype=torch.int32))
    table[1] = torch.tensor([4, 3])
    for tensor in (query, key, value):
        tensor.normal_()
    graph.replay()
    assert torch.equal(keys[1, 4], key[0] * 2)
    assert torch.equal(values[3, 6], value[1])
    inner = select_provider(name, CPU)
    assert torch.equal(out, inner.attend(query + 1, keys, values, batch, masking))
