"""Recorded graph: a stand-in for CUDA graphs on CPUs, which tests their rules (`CAPTURES["cpu"] = record`).

The calls that torch dispatches are recorded, and replayed over the same tensors. A kernel outside of torch is seen by
the recorder only where it is launched through `Recorder.launch`, as attention is (`RecordableProvider`); any other is
refused, because its calls would be missing in a replay.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from folio.app.engine.execution.graph import Capture, CaptureError
from folio.kernels import AttentionProvider
from folio.kernels.provider import AttentionCall, CacheWrite

# Methods that give the host a value or an address.
_HOST_READS = {
    torch.Tensor.item,
    torch.Tensor.tolist,
    torch.Tensor.numpy,
    torch.Tensor.data_ptr,
    torch.Tensor.__bool__,
    torch.Tensor.__int__,
    torch.Tensor.__float__,
    torch.Tensor.__index__,
}


@dataclass(frozen=True, slots=True)
class _Value:
    """In place of a tensor in recorded arguments."""

    number: int


@dataclass(frozen=True, slots=True)
class _Call:
    function: Callable[..., Any]
    args: Any
    kwargs: Mapping[str, Any]
    outputs: tuple[int, ...]


class RecordedGraph:
    """`Graph` of calls that torch dispatches.

    Tensors that the work has not made itself are held by weak references: one that is freed or moved after the capture
    makes `replay` raise `CaptureError`, where a CUDA graph would read whatever has come to its address.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._calls: list[_Call] = []
        self._outside: dict[int, tuple[weakref.ref[torch.Tensor], int | None]] = {}  # and the address
        self._recording: _Recording | None = None
        self.num_bytes = 0

    def capture(self, work: Callable[[], object]) -> None:
        work()
        self._recording = recording = _Recording()
        with self._recorder.recording(recording), _HostReads(recording), _Dispatched(recording):
            work()
        self._recording, self._calls = None, recording.calls
        self._outside = {number: (tensor, _address(tensor())) for number, tensor in recording.outside.items()}
        self.num_bytes = recording.num_bytes
        if any(tensor() is None for tensor, _ in self._outside.values()):
            raise CaptureError("a tensor was made on the host within the work; make it before, or on the device")
        if kept := [tensor.shape for made in recording.made if (tensor := made()) is not None]:
            raise CaptureError(
                f"{len(kept)} tensors made within the work are kept, and a replay overwrites them: {kept}"
            )

    def launch_between(self, call: Callable[[], object]) -> None:
        def without_result() -> None:
            call()

        if self._recording is not None:
            self._recording.calls.append(_Call(without_result, (), {}, ()))

    def replay(self) -> None:
        self._recorder.replays.append(self)
        values: dict[int, torch.Tensor] = {}
        for number, (reference, address) in self._outside.items():
            tensor = reference()
            if tensor is None or _address(tensor) != address:
                raise CaptureError(f"a tensor at {address or 0:#x}, which the graph reads, has been freed or moved")
            values[number] = tensor
        for call in self._calls:
            args, kwargs = _mapped((call.args, dict(call.kwargs)), _Value, lambda value: values[value.number])
            results = _tensors(call.function(*args, **kwargs))
            values.update(zip(call.outputs, results, strict=True))


class _Recording:
    """What has been recorded so far. Does not keep tensors alive.

    Attributes:
        made, outside: tensors that the work has made, and those that it has not, by number.
        is_launching: a kernel runs whose call is recorded as one.
    """

    def __init__(self) -> None:
        self.calls: list[_Call] = []
        self.made: list[weakref.ref[torch.Tensor]] = []
        self.outside: dict[int, weakref.ref[torch.Tensor]] = {}
        self.num_bytes = 0
        self._numbers: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}  # by `id`, which is used again
        self._next = 0
        self.is_launching = False

    @contextmanager
    def launching(self) -> Iterator[None]:
        """Within the context nothing is recorded."""
        self.is_launching = True
        try:
            yield
        finally:
            self.is_launching = False

    def add(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        args, kwargs = tuple(args), dict(kwargs)
        templates = _mapped((args, kwargs), torch.Tensor, lambda tensor: _Value(self._number(tensor)))
        storages = {_address(tensor) for tensor in _tensors((args, kwargs))}
        outputs = []
        for tensor in _tensors(out):
            known = self._numbers.get(id(tensor))
            if known is not None and known[0]() is tensor:  # changed in place
                outputs.append(known[1])
                continue
            outputs.append(self._new(tensor))
            self.made.append(weakref.ref(tensor))
            if _address(tensor) not in storages:
                self.num_bytes += tensor.nbytes
        self.calls.append(_Call(function, templates[0], templates[1], tuple(outputs)))

    def _number(self, tensor: torch.Tensor) -> int:
        known = self._numbers.get(id(tensor))
        if known is not None and known[0]() is tensor:
            return known[1]
        number = self._new(tensor)
        self.outside[number] = weakref.ref(tensor)
        return number

    def _new(self, tensor: torch.Tensor) -> int:
        self._numbers[id(tensor)] = weakref.ref(tensor), self._next
        self._next += 1
        return self._next - 1


class _Dispatched(TorchDispatchMode):
    """Records what torch dispatches, and refuses results that depend on values: their shapes differ between replays."""

    def __init__(self, recording: _Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._recording.is_launching:
            return function(*args, **kwargs)
        with self:  # in inference mode torch dispatches composite functions whole
            parts = function.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        dynamic = torch.Tag.dynamic_output_shape in function.tags
        if function is torch.ops.aten.index.Tensor:
            dynamic = any(index is not None and not _is_integer(index) for index in args[1])
        if dynamic or torch.Tag.data_dependent_output in function.tags:
            raise CaptureError(f"the result of {function} depends on values, which the host would have to read")
        out = function(*args, **kwargs)
        self._recording.add(function, args, kwargs, out)
        return out


class _HostReads(TorchFunctionMode):
    """Refuses what a stream would have to be waited for, and addresses, which are for kernels outside of torch."""

    def __init__(self, recording: _Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function in _HOST_READS and not self._recording.is_launching:
            what = (
                "calls a kernel outside of torch" if function is torch.Tensor.data_ptr else "reads a value on the host"
            )
            raise CaptureError(f"the work {what} (Tensor.{function.__name__})")
        return function(*args, **(kwargs or {}))


class Recorder:
    """Makes the graphs of one model runner, and records launches of its kernels.

    Attributes:
        replays: the graph of each replay.
    """

    def __init__(self, replays: list[RecordedGraph] | None = None) -> None:
        self.replays = [] if replays is None else replays
        self._recording: _Recording | None = None

    def graph(self) -> RecordedGraph:
        return RecordedGraph(self)

    @contextmanager
    def recording(self, recording: _Recording) -> Iterator[None]:
        """Launches within the context belong to this recording."""
        self._recording = recording
        try:
            yield
        finally:
            self._recording = None

    def launch(self, kernel: Callable[..., Any], *tensors: torch.Tensor) -> Any:
        """Call a kernel, and record the call as one. What else the kernel uses must outlive the graph."""
        recording = self._recording
        if recording is None:
            return kernel(*tensors)
        with recording.launching():
            out = kernel(*tensors)
        recording.add(kernel, tensors, {}, out)
        return out


class RecordableProvider(AttentionProvider):
    """An attention provider whose calls are launches: kernels read lengths and block tables when they run."""

    def __init__(self, provider: AttentionProvider, recorder: Recorder) -> None:
        self.name = provider.name
        self._provider = provider
        self._recorder = recorder

    def unsupported(self, call: AttentionCall) -> str | None:
        return self._provider.unsupported(call)

    def run_write(self, new: CacheWrite) -> None:
        key_cache, value_cache, slots, scales = new.key_cache, new.value_cache, new.slots, new.scales
        prepare = self._provider.prepare_write

        def kernel(key: torch.Tensor, value: torch.Tensor) -> None:
            store = prepare(CacheWrite(key, value, key_cache, value_cache, slots, scales))
            store(key, value, key_cache, value_cache)

        self._recorder.launch(kernel, new.key, new.value)

    def run_attend(self, call: AttentionCall) -> torch.Tensor:
        key_cache, value_cache, batch, scales, lse = call.key_cache, call.value_cache, call.batch, call.scales, call.lse
        masking, num_splits, prepare = replace(call.masking, sinks=None), call.num_splits, self._provider.prepare_attend

        def kernel(query: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
            masked = replace(masking, sinks=sinks)
            attend = prepare(AttentionCall(query, key_cache, value_cache, batch, masked, scales, lse, num_splits))
            return attend(query, key_cache, value_cache)

        sinks = () if call.masking.sinks is None else (call.masking.sinks,)
        out: torch.Tensor = self._recorder.launch(kernel, call.query, *sinks)
        return out


def record(_: torch.device, provider: AttentionProvider, replays: list[RecordedGraph] | None = None) -> Capture:
    """Captures of a model's steps; each replay is noted in `replays`."""
    recorder = Recorder(replays)
    return Capture(RecordableProvider(provider, recorder), lambda: recorder.graph)


def _mapped(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """The value with everything of a kind in its tuples, lists and dictionaries changed."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)([_mapped(item, kind, change) for item in value])
    if isinstance(value, dict):
        return {name: _mapped(item, kind, change) for name, item in value.items()}
    return value


def _tensors(value: Any) -> list[torch.Tensor]:
    """All tensors in it, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    items: Iterable[Any] = (
        value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    )
    return [tensor for item in items for tensor in _tensors(item)]


def _address(tensor: torch.Tensor | None) -> int | None:
    """The address of its storage; `None` for layouts without one."""
    if tensor is None or tensor.layout != torch.strided:
        return None
    return tensor.untyped_storage().data_ptr()


def _is_integer(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() and tensor.dtype not in (torch.bool, torch.uint8)
