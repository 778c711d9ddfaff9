"""Small engines, and how tests run requests on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch

from folio.app.config.engine import EngineConfig
from folio.app.engine.async_engine import AsyncEngine
from folio.app.engine.engine import Engine
from folio.app.engine.ranks.processes import Launch, spawn_ranks
from folio.app.engine.report import StepTimes
from folio.app.engine.request.delta import Delta
from folio.app.engine.sampling.params import SamplingParams
from tests.conftest import ARCHITECTURES, HYBRIDS, SMALL, VOCAB_SIZE, MakeCheckpoint

TINY = SMALL | {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
BLOCK_BYTES = 16 * 768  # of 16 tokens of ARCHITECTURES["llama"]
MOST_STEPS = 3000
MakeEngine = Callable[..., Engine]
ExpectSteps = Callable[[StepTimes], None]


def folder_of(make_checkpoint: MakeCheckpoint, name: str) -> Path:
    """The checkpoint of an architecture; "tiny" is a llama of one layer."""
    if name == "tiny":
        return make_checkpoint("llama", **TINY)
    return make_checkpoint(name, **(HYBRIDS[name] if name in HYBRIDS else ARCHITECTURES[name][1]))


def engine_of(folder: Path | str, launch: Launch = spawn_ranks, **settings: Any) -> Engine:
    defaults = {"kv_memory_bytes": 16 << 20, "max_num_seqs": 8, "num_threads": 1}
    defaults |= {"skip_tokenizer_init": folder != "builtin"}
    return Engine(EngineConfig(model=str(folder), **(defaults | settings)), launch)


def prompts(*lengths: int) -> list[list[int]]:
    """Random prompts, others than those of `tests.conftest.tokens`."""
    generator = torch.Generator().manual_seed(9)
    return [torch.randint(VOCAB_SIZE - 1, (n,), generator=generator).tolist() for n in lengths]


def greedy(max_tokens: int, **params: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, **params)


def steps(engine: Engine) -> Iterator[Delta]:
    """All deltas until nothing is left to do, with a check of the memory after each step. Nobody may starve."""
    for _ in range(MOST_STEPS):
        if not engine.has_work:
            break
        yield from engine.step()
        engine.check_integrity()
    assert not engine.has_work


def run(engine: Engine) -> dict[str, list[Delta]]:
    """Each request's deltas."""
    deltas: dict[str, list[Delta]] = {}
    for delta in steps(engine):
        deltas.setdefault(delta.request_id, []).append(delta)
    return deltas


def tokens_of(deltas: Sequence[Delta]) -> list[int]:
    assert all(delta.error is None for delta in deltas), deltas
    return [token for delta in deltas for token in delta.token_ids]


def answers(engine: Engine) -> dict[str, list[int]]:
    """Each request's tokens, of requests with one output."""
    return {name: tokens_of(deltas) for name, deltas in run(engine).items()}


def outputs(engine: Engine) -> dict[tuple[str, int], list[int]]:
    """The tokens of each output of each request."""
    found: dict[tuple[str, int], list[int]] = {}
    for delta in steps(engine):
        found.setdefault((delta.request_id, delta.index), []).extend(tokens_of([delta]))
    return found


class Replaced(Engine):
    """In place of some methods there may be a test's: `instead`, by their names."""

    def __init__(self, *args: Any) -> None:
        self.instead: dict[str, Callable[..., Any]] = {}
        super().__init__(*args)

    def step(self) -> list[Delta]:
        deltas: list[Delta] = self.instead.get("step", super().step)()
        return deltas

    def add_request(self, *args: Any, **options: Any) -> None:
        self.instead.get("add_request", super().add_request)(*args, **options)

    def check_integrity(self) -> None:
        self.instead.get("check_integrity", super().check_integrity)()


def stall_after(engine: AsyncEngine, seconds: float) -> None:
    """Take an engine with a step that is longer for stalled, however long others were."""
    engine.driver._stalled_s, engine.driver._longest_s = seconds, 0.0


@contextmanager
def broken_layer(engine: Engine, error: BaseException) -> Iterator[None]:
    """Within the context the model's last layer fails."""
    module: Any = engine.model.module
    hook = module.model.layers[-1].register_forward_pre_hook(raising(error))
    try:
        yield
    finally:
        hook.remove()


def note_sizes(engine: Engine) -> list[int]:
    """Numbers of tokens that the model computes from now on, one for each call."""
    sizes: list[int] = []

    def note(_: torch.nn.Module, args: object, named: dict[str, torch.Tensor]) -> None:
        sizes.append(named["input_ids"].shape[-1])

    engine.model.module.register_forward_pre_hook(note, with_kwargs=True)
    return sizes


def raising(error: BaseException) -> Callable[..., NoReturn]:
    """A function that fails."""

    def fail(*_: object, **__: object) -> NoReturn:
        raise error

    return fail
