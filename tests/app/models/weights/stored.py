"""A model of two tensors and its weight file, for tests of stores."""

from __future__ import annotations

import functools
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import nn

from folio.app.models.weights.arena import ModelTensors, WeightArena, collect
from folio.app.models.weights.file import CHUNK_BYTES, write_all
from folio.app.models.weights.key import WeightKey
from folio.app.models.weights.store import WeightStore

KEY = WeightKey("some/model", {"model": "/some/model", "dtype": "auto"}, {"files": [["a.safetensors", 10, 1]]})
NUM_PARAMETERS = 3 * CHUNK_BYTES // 4


@functools.cache
def _values(seed: int, num_parameters: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    return torch.randn(num_parameters), torch.randn(5, dtype=torch.float64)


class Model(nn.Module):
    """12 MiB and a few bytes."""

    def __init__(self, seed: int = 0, num_parameters: int = NUM_PARAMETERS, num_extra: int = 5) -> None:
        super().__init__()
        weight, extra = _values(seed, num_parameters)
        self.weight = nn.Parameter(weight.clone(), requires_grad=False)
        self.register_buffer("buffer", extra[:num_extra].clone(), persistent=False)


def is_right(model: Model, seed: int = 0) -> bool:
    weight, extra = _values(seed, model.weight.numel())
    return torch.equal(model.weight, weight) and torch.equal(model.buffer, extra)


def tensors() -> ModelTensors:
    return collect(Model())


def others() -> ModelTensors:
    return collect(Model(num_extra=4))


def no_second_time() -> ModelTensors:
    raise AssertionError("the weights should not be made again")


def moved(
    store: WeightStore, key: WeightKey = KEY, again: Callable[[], ModelTensors] = no_second_time
) -> tuple[Model, WeightArena]:
    model = Model()
    return model, store.move(collect(model), key, again)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def write_a_part(folder: Path, num_writes: int, pipe: Connection) -> None:
    """Stay in one of the writes."""

    def write(fd: int, data: memoryview, offset: int) -> None:
        nonlocal num_writes
        if num_writes == 0:
            pipe.send("writing")
            pipe.recv()
        num_writes -= 1
        write_all(fd, data, offset)

    moved(WeightStore(folder, write=write))


def use_again_and_again(folder: Path) -> None:
    for _ in range(8):
        model, arena = moved(WeightStore(folder))
        for _ in range(2):
            assert is_right(model)
            arena.unmap()
            arena.map()
        arena.close()
