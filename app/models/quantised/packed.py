"""A folder whose weights consist of several tensors each: packed codes, scales, zero points."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch

from folio.app.config.quantised import LEAST_GROUP, Scheme
from folio.app.errors import ModelError
from folio.app.models.quantised.files import TensorFiles
from folio.app.models.quantised.share import Share
from folio.kernels import QuantisedWeight, rounded_scales

_WEIGHT = ".weight"
_MIXTRAL = re.compile(r"(?<=\d\.)w[123](?=\.weight$)")
_PROJECTIONS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


class Parts:
    """The tensors of one weight, by the endings of their names."""

    def __init__(self, files: TensorFiles, stem: str, present: frozenset[str]) -> None:
        self.stem = stem
        self.present = present
        self._files = files

    def read(self, ending: str, *dtypes: torch.dtype) -> torch.Tensor:
        """A tensor of one of these dtypes, or of any."""
        tensor = self._files.read(self.stem + ending)
        if dtypes and tensor.dtype not in dtypes:
            raise ModelError(f"{self}{ending} has the dtype {_name(tensor)}, not {' or '.join(map(_short, dtypes))}")
        return tensor

    def scales(self, ending: str) -> torch.Tensor:
        """Scales of any dtype, as float32."""
        return self.finite(
            ending, self.read(ending, torch.float16, torch.bfloat16, torch.float32, torch.float8_e8m0fnu).float()
        )

    def finite(self, ending: str, scales: torch.Tensor) -> torch.Tensor:
        if not bool(scales.isfinite().all()):
            raise ModelError(f"{self}{ending} has scales that are infinite or no numbers")
        return scales

    def expect(self, ending: str, tensor: torch.Tensor, *shape: int) -> None:
        if tensor.shape != shape:
            raise ModelError(f"{self}{ending} has the shape {list(tensor.shape)}, not {list(shape)}")

    def __str__(self) -> str:
        return f"{self._files.folder}: {self.stem}"


@dataclass(frozen=True, slots=True)
class Layout:
    """Tensors that a method makes of a weight.

    Attributes:
        endings: of their names, after the module's name.
        marks: each of these endings says that the module is quantised.
        read: makes a weight of them.
    """

    endings: tuple[str, ...]
    marks: frozenset[str]
    read: Callable[[Parts, Scheme], QuantisedWeight | torch.Tensor]


class PackedFolder:
    """`QuantisedCheckpoint` of a folder of safetensors files."""

    def __init__(self, files: TensorFiles, layout: Layout, scheme: Scheme) -> None:
        found: dict[str, set[str]] = {}
        for name in files.names():
            for ending in layout.endings:
                if name.endswith(ending):
                    found.setdefault(name.removesuffix(ending), set()).add(ending)
        self._parts = {
            _current(stem + _WEIGHT): Parts(files, stem, frozenset(endings))
            for stem, endings in found.items()
            if endings & layout.marks
        }
        inside = {parts.stem + ending for parts in self._parts.values() for ending in parts.present}
        self._plain = {_current(name): name for name in files.names() - inside}
        self._files, self._layout, self._scheme = files, layout, scheme

    def names(self) -> frozenset[str]:
        return frozenset(self._plain.keys() | self._parts.keys())

    def read(self, name: str, share: Share | None = None) -> torch.Tensor | QuantisedWeight:
        if (parts := self._parts.get(name)) is None:
            tensor = self._files.share(self._plain.get(name, name), share)
            if name.endswith(_WEIGHT) and tensor.element_size() == 1:
                raise ModelError(f"{self._files.folder}: {name} has the dtype {_name(tensor)}, and lacks its scales")
            return tensor
        try:
            return self._layout.read(parts, self._scheme)
        except ValueError as error:  # of `QuantisedWeight`
            raise ModelError(f"{parts}: {error}") from None


def _current(name: str) -> str:
    """A name in transformers' model of a parameter that Mixtral's checkpoints call otherwise."""
    name = name.replace(".block_sparse_moe.", ".mlp.")
    return _MIXTRAL.sub(lambda found: _PROJECTIONS[found[0]], name)


def unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes of 4 or 8 bits in int32 `[rows, words]`, the lowest bits first: uint8 `[rows, codes]`."""
    packed = words.contiguous().view(torch.uint8)
    if bits == 8:
        return packed
    wide = packed.to(torch.int16)
    return wide.bitwise_or_(wide << 4).bitwise_and_(0x0F0F).view(torch.uint8)


def grouped(
    codes: torch.Tensor,
    bits: int,
    scales: torch.Tensor,
    zeros: torch.Tensor | int,
    *,
    group: int | None = None,
    groups: torch.Tensor | None = None,
) -> QuantisedWeight:
    """A weight of `scale · (code − zero)`.

    Args:
        codes: uint8 `[outputs, inputs]`.
        scales: float32 `[outputs, number of groups]`.
        zeros: like `scales`, or one for all of them.
        group: inputs of a group, the last one excepted; `None`: as many in each, which the number of groups says.
        groups: `[inputs]`: the group of each input; `None`: neighbours have one.

    Raises:
        ValueError: the groups have not as many inputs, or are none that the kernels take.
    """
    (_, inputs), count = codes.shape, scales.shape[1]
    if group is None:
        if count == 0 or inputs % count:
            raise ValueError(f"{inputs} inputs cannot be divided into {count} groups")
        group = inputs // count
    if count == 1:
        group += -group % LEAST_GROUP
    if group % LEAST_GROUP:
        raise ValueError(f"groups of {group} inputs; the kernels have those of multiples of {LEAST_GROUP}")
    order = None if groups is None else _order(groups.long(), group)
    if order is not None:
        codes = codes[:, order]
    if isinstance(zeros, torch.Tensor) and bool((zeros == zeros[0, 0]).all()):
        zeros = int(zeros[0, 0])
    offsets = None if isinstance(zeros, int) else -zeros.float() * scales
    halves, half_offsets, factors = rounded_scales(scales, offsets)
    return QuantisedWeight(
        codes.contiguous(),
        bits,  # type: ignore[arg-type]  # 4 or 8
        group,
        halves,
        half_offsets,
        factors=factors,
        zero=zeros if isinstance(zeros, int) else 0,
        order=order,
    )


def _order(groups: torch.Tensor, group: int) -> torch.Tensor | None:
    """Inputs in the order of their groups; `None` if they are in it."""
    order = groups.argsort(stable=True)
    expected = torch.arange(len(groups)) // group
    if (wrong := groups[order] != expected).any():
        first = int(expected[wrong][0])
        raise ValueError(f"g_idx does not give {int((expected == first).sum())} inputs to the group {first}")
    return None if bool((groups == expected).all()) else order


def _name(tensor: torch.Tensor) -> str:
    return _short(tensor.dtype)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
