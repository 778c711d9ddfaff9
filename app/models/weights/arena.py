"""Weight arena: all tensors of a loaded model in one range of addresses, which is mapped while the model is awake."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from folio.app.errors import ModelError
from folio.app.models.weights.file import TensorPlace, WeightTable
from folio.app.models.weights.model_parts import find_tensors
from folio.vmem import AddressRange
from folio.vmem.weights import read_ahead

_PAGE_BYTES = 4096
# A cache line, and more than any dtype or vector load needs.
_ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True, eq=False)
class ModelTensors:
    """The tensors of a loaded model and the places that they get.

    Attributes:
        tensors: of the table, in its order.
        pieces: (offset in the contents, uint8 `[num_bytes]`), in order: the memory of the tensors, each byte once
            although several tensors may share it. None any more after `attach` or `drop`.
        facts: about the model, for its file.
        dropped: called when the tensors have given up their own memory.
    """

    table: WeightTable
    tensors: tuple[torch.Tensor, ...]
    pieces: list[tuple[int, torch.Tensor]]
    facts: dict[str, Any] = field(default_factory=dict)
    dropped: Callable[[], None] = lambda: None

    def attach(self, contents: torch.Tensor) -> None:
        """Let the tensors read the contents, uint8 `[num_bytes]`, which need not be readable yet, instead of their own
        memory."""
        # In place: every reference to a tensor reads the new memory then, in frozen dataclasses, too. In this mode
        # because fusion makes inference tensors, which may not be changed outside of it.
        elsewhere = []
        with torch.inference_mode():
            for place, tensor in zip(self.table.tensors, self.tensors, strict=True):
                # `nn.Module.to` leaves plain attributes on the CPU. A view keeps its base, and with it the old memory.
                if tensor.device.type != contents.device.type or tensor._base is not None:
                    elsewhere.append((place, tensor))
                    continue
                offset = place.offset // tensor.element_size()
                tensor.set_(contents.untyped_storage(), offset, place.shape, place.stride)
        for place, tensor in elsewhere:
            _replace(tensor, contents, place)
        self._end()

    def drop(self) -> None:
        """Give up the tensors' memory without another one; they are empty then."""
        with torch.inference_mode():
            for tensor in self.tensors:
                nothing = torch.empty(0, dtype=torch.uint8, device=tensor.device).untyped_storage()
                tensor.set_(nothing, 0, (0,), (1,))
        self._end()

    def _end(self) -> None:
        self.pieces.clear()
        self.dropped()


def collect(
    model: nn.Module, facts: dict[str, Any] | None = None, dropped: Callable[[], None] = lambda: None
) -> ModelTensors:
    """Lay out the tensors of a model. Those that share memory do so in the new places, too.

    Args:
        facts: about the model, for its file.
        dropped: see `ModelTensors`.

    Raises:
        ModelError: a tensor has an opaque layout.
    """
    found = [(path, tensor) for path, tensor in find_tensors(model) if tensor.numel()]
    extents: dict[int, tuple[int, int, torch.Tensor]] = {}  # address of a storage → first byte, end, a tensor of it
    for path, tensor in found:
        if tensor.layout != torch.strided:
            raise ModelError(f"the tensor {path} has the layout {tensor.layout}, which cannot be moved")
        storage, (first, end) = tensor.untyped_storage().data_ptr(), _extent(tensor)
        begin, stop, _ = extents.get(storage, (first, end, tensor))
        extents[storage] = min(first, begin), max(end, stop), tensor
    starts: dict[int, int] = {}  # address of a storage → offset in the contents of its first byte
    pieces, used = [], 0
    for storage, (first, end, tensor) in extents.items():
        alignment = _PAGE_BYTES if end - first >= _PAGE_BYTES else _ALIGNMENT_BYTES
        start = -(-used // alignment) * alignment
        start += first % _ALIGNMENT_BYTES  # so that each tensor's offset is a multiple of its element's size
        starts[storage] = start - first
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        pieces.append((start, whole[first:end]))
        used = start + end - first
    places = tuple(
        TensorPlace(
            path,
            str(tensor.dtype).removeprefix("torch."),
            tuple(tensor.shape),
            tensor.stride(),
            starts[tensor.untyped_storage().data_ptr()] + _first_byte(tensor),
        )
        for path, tensor in found
    )
    return ModelTensors(WeightTable(places, used), tuple(tensor for _, tensor in found), pieces, facts or {}, dropped)


def _first_byte(tensor: torch.Tensor) -> int:
    """First byte of a tensor in its storage."""
    return int(tensor.storage_offset()) * tensor.element_size()


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte and end of a tensor that is not empty, in its storage."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first = _first_byte(tensor)
    return first, first + (last + 1) * tensor.element_size()


class Skeleton:
    """A model on torch's meta device, for the tensors of a table.

    Raises:
        ModelError: the model has other tensors.
    """

    def __init__(self, model: nn.Module, table: WeightTable) -> None:
        self._found = list(find_tensors(model))
        self._places = {place.path: place for place in table.tensors}
        shapes = {path: (tuple(part.shape), part.stride()) for path, part in self._found if part.numel()}
        expected = {path: (place.shape, place.stride) for path, place in self._places.items()}
        if shapes != expected:
            others = sorted({path for path, _ in shapes.items() ^ expected.items()})
            raise ModelError(f"the file of its weights has other tensors, {others[0]} among them")

    def fill(self, contents: torch.Tensor) -> None:
        """Give the tensors the values of the contents, uint8 `[num_bytes]`."""
        for path, tensor in self._found:
            _replace(tensor, contents, self._places.get(path))


def _replace(tensor: torch.Tensor, contents: torch.Tensor, place: TensorPlace | None) -> None:
    """Turn a tensor of another device into one of the contents; without a place, into one of undefined values."""
    with torch.inference_mode(tensor.is_inference()):
        if place is None:
            value = torch.empty_like(tensor, device=contents.device)
        else:  # a few tensors of a checkpoint may have another dtype than the model
            value = torch.empty(0, dtype=getattr(torch, place.dtype), device=contents.device)
            offset = place.offset // value.element_size()
            value.set_(contents.untyped_storage(), offset, place.shape, place.stride)
        if isinstance(tensor, nn.Parameter):
            value = nn.Parameter(value, requires_grad=False)
    torch.utils.swap_tensors(tensor, value)  # every reference to the tensor is to the new one then


class WeightRange(Protocol):
    """Addresses of weights: `FileRange` on a CPU, `CudaRange` on CUDA."""

    reserved: AddressRange
    num_bytes: int
    is_mapped: bool

    def tensor(self) -> torch.Tensor: ...

    def map(self, *source: Any) -> None: ...

    def unmap(self) -> None: ...

    def close(self) -> None: ...


class WeightSource(Protocol):
    """Source of an arena's contents."""

    def open(self) -> tuple[Any, ...]:
        """Arguments for `map` of the arena's range, valid until `release`. Raises `ModelError`."""

    def duplicate(self) -> tuple[int, int] | None:
        """A descriptor of the file, owned by the caller, and the offset; `None` without a file. Raises `OSError`."""

    def mapped(self) -> None:
        """The contents have been mapped."""

    def release(self) -> None:
        """The contents are not mapped: they have been unmapped, or could not be mapped."""

    def close(self) -> None: ...


class WeightArena:
    """The range of a model's weights. From any thread: a model may be closed while another thread maps it.

    While it is not mapped, any access to the model's tensors is a SIGSEGV, or on CUDA a fault that ends all work. Their
    addresses never change.

    One thread at a time changes it: `close` waits for a `map` in progress.
    """

    def __init__(self, reserved: WeightRange, source: WeightSource) -> None:
        self._range, self._source = reserved, source
        self._guard = threading.Lock()
        self._is_closed = False

    @property
    def num_bytes(self) -> int:
        """Bytes that the weights take while they are mapped."""
        return self._range.reserved.num_bytes

    @property
    def contents(self) -> torch.Tensor:
        """The weights, uint8 `[num_bytes]`, readable while they are mapped."""
        return self._range.tensor()

    @property
    def is_mapped(self) -> bool:
        return self._range.is_mapped

    def map(self) -> None:
        """Make the weights readable. By one thread at a time.

        Raises:
            OutOfPages: the device has too little memory left. Nothing has changed then.
            MapError: the system refused.
            ModelError: the file of the weights is gone or damaged, and the checkpoint cannot replace it; or the arena
                has been closed.
        """
        with self._guard:
            if self._is_closed:  # before the source makes contents that would never be released
                raise ModelError("the weights have been given back: the engine of their model has stopped")
            try:
                self._range.map(*self._source.open())
            except BaseException:
                self._source.release()
                raise
            self._source.mapped()

    def read_ahead(self) -> Iterator[int]:
        """Read the weights' file, if there is one, into the page cache. Yields after each piece the bytes that were not
        there. Raises `OSError`, `MapError`."""
        with self._guard:  # a thread that maps may replace the file
            found = self._source.duplicate()
        if found is not None:
            fd, offset = found
            try:
                yield from read_ahead(fd, offset, self._range.num_bytes)
            finally:
                os.close(fd)

    def unmap(self) -> None:
        """Give the memory back, unless `close` has. Raises `MapError`; the weights are still mapped then."""
        with self._guard:
            if not self._is_closed:
                self._range.unmap()
                self._source.release()

    def close(self) -> None:
        """Unmap the weights for good. The model's tensors must not be touched any more."""
        with self._guard:
            self._is_closed = True
            self._range.close()
            self._source.close()
