"""Mixers compute the same in a packed forward as for each sequence alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from folio.app.engine.execution.model_runner import forward
from folio.app.engine.layers import attention, recurrent
from folio.app.engine.layers.recurrent import (
    CachedStates,
    PackedMixer,
    RecurrentLayer,
    StateBatch,
    StateProbe,
    StateSpec,
)
from folio.app.errors import ModelError
from folio.kernels import Masking, VarlenBatch
from folio.kernels.reference import ReferenceProvider
from tests.app.engine.layers import models
from tests.conftest import HYBRIDS, VOCAB_SIZE

# Every path of a mixer: chunks below and beyond the kernel width and the scan's own chunk, decodes alone and together.
STEPS = ((0, 7, 64, 0), (1, 1, 3, 65), (0, 3, 1, 1), (1, 1, 1, 1), (1, 1, 1, 37), (0, 27, 5, 7))
LENGTHS = [sum(counts) for counts in zip(*STEPS, strict=True)]
BLOCKS = (4, 0, 3, 5)
NUM_BLOCKS = 7
TOLERANCE = 1e-4  # of a token's norm, in float32


def sequences_of(batch: StateBatch) -> Iterator[tuple[int, int, int, bool]]:
    return zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], batch.blocks, batch.fresh, strict=True)


def make_model(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    model: PreTrainedModel = models.make_model(name, dtype)
    for parameter_name, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            nn.init.normal_(parameter, std=0.25 if "embed" not in parameter_name else 1.0)
    return model


@torch.inference_mode()
def observe(model: PreTrainedModel) -> dict[int, RecurrentLayer]:
    installed = recurrent.install(model)
    probe = StateProbe()
    recurrent.bind_mixers(model, probe)
    models.bind_reference(model)
    forward(model, torch.arange(6), torch.arange(6), torch.tensor([5]))
    return probe.layers(installed)


def make_memory(layers: dict[int, RecurrentLayer]) -> torch.Tensor:
    """Rows of NaN in every dtype."""
    return torch.full((NUM_BLOCKS, recurrent.state_bytes(layers)), 255, dtype=torch.uint8)


class PackedModel:
    """A model in packed forwards. Its attention keeps keys and values in lists, by layer and block."""

    batch: StateBatch

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.layers = layers = observe(model)
        self.memory = make_memory(layers)
        self.states = CachedStates(self.memory, layers)
        self.cached: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self.lengths: dict[int, int] = {}

    @torch.inference_mode()
    def __call__(self, token_ids: list[torch.Tensor], batch: StateBatch) -> torch.Tensor:
        """Logits of all tokens."""
        positions = []
        for start, end, block, fresh in sequences_of(batch):
            first = 0 if fresh else self.lengths[block]
            self.lengths[block] = first + end - start
            positions.append(torch.arange(first, self.lengths[block]))
        self.batch = batch
        self.states.set_batch(batch)
        recurrent.bind_mixers(self.model, self.states)
        attention.bind_attention(self.model, self)
        return forward(self.model, torch.cat(token_ids), torch.cat(positions), torch.arange(batch.cu_seqlens[-1]))

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, masking: Masking
    ) -> torch.Tensor:
        outs = []
        for start, end, block, fresh in sequences_of(self.batch):
            keys, values = key[start:end], value[start:end]
            if not fresh:
                before = self.cached[layer, block]
                keys, values = torch.cat([before[0], keys]), torch.cat([before[1], values])
            self.cached[layer, block] = keys, values
            lengths = [torch.tensor(length, dtype=torch.int32) for length in ([0, end - start], [len(keys)], [[0]])]
            alone = VarlenBatch(*lengths, end - start, len(keys))
            outs.append(ReferenceProvider().attend(query[start:end], keys[None], values[None], alone, masking))
        return torch.cat(outs)

    def fork(self, source: int, target: int) -> None:
        self.memory[target] = self.memory[source]
        self.lengths[target] = self.lengths[source]
        self.cached |= {(layer, target): kv for (layer, block), kv in self.cached.items() if block == source}


def batch_of(counts: Sequence[int], blocks: Sequence[int], fresh: Sequence[bool]) -> StateBatch:
    return StateBatch([sum(counts[:i]) for i in range(len(counts) + 1)], list(blocks), list(fresh))


def in_steps(packed: PackedModel, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Each sequence's outputs after all of `STEPS`."""
    outs: list[list[torch.Tensor]] = [[] for _ in inputs]
    done = [0] * len(inputs)
    for counts in STEPS:
        running = [i for i, count in enumerate(counts) if count]
        now = [counts[i] for i in running]
        batch = batch_of(now, [BLOCKS[i] for i in running], [done[i] == 0 for i in running])
        out = packed([inputs[i][done[i] : done[i] + counts[i]] for i in running], batch)
        for i, rows in zip(running, out.split(now), strict=True):
            outs[i].append(rows)
            done[i] += counts[i]
    return [torch.cat(rows) for rows in outs]


def assert_close(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    relative = (actual - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert relative.max() <= TOLERANCE, f"{what}: relative difference {relative.max():.2g} at {relative.argmax()}"


@torch.inference_mode()
def alone(model: PreTrainedModel, token_ids: torch.Tensor) -> torch.Tensor:
    """Logits `[num_tokens, vocab_size]` by transformers' own attention and mixers."""
    recurrent.bind_mixers(model, None)
    model.set_attn_implementation("eager")
    logits: torch.Tensor = model(input_ids=token_ids[None], use_cache=False).logits[0]
    model.set_attn_implementation(attention.IMPLEMENTATION)
    return logits


def make_prompts(lengths: Sequence[int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, VOCAB_SIZE, (length,), generator=generator) for length in lengths]


@pytest.mark.parametrize("name", HYBRIDS)
def test_model(name: str) -> None:
    """No other layer of these models mixes the sequences of a packed row, and no state is written to other rows."""
    model = make_model(name)
    prompts = make_prompts(LENGTHS)
    expected = [alone(model, prompt) for prompt in prompts]
    packed = PackedModel(model)
    assert [m.layer for m in model.modules() if isinstance(m, PackedMixer)] == sorted(packed.layers)
    for prompt, logits in zip(prompts, expected, strict=True):
        assert alone(model, prompt).equal(logits), "an unbound wrapper changes the logits"
    actual = in_steps(packed, prompts)
    for i in range(len(prompts)):
        assert_close(actual[i], expected[i], f"sequence {i}")
    untouched = [block for block in range(NUM_BLOCKS) if block not in BLOCKS]
    assert packed.memory[untouched].eq(255).all()


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_row_is_reused_and_copied(name: str) -> None:
    """A fresh sequence does not read the state of the row's last owner, and a copy continues like the original."""
    model = make_model(name)
    packed = PackedModel(model)
    first, second = make_prompts((30, 45))
    packed([first], batch_of([30], [1], [True]))
    packed([second[:21]], batch_of([21], [1], [True]))
    packed.fork(1, 6)
    expected = alone(model, second)[21:]
    for block in (1, 6):  # the original goes on before the copy does
        chunks = second[21:].split([1, 22, 1])
        rows = [packed([chunk], batch_of([len(chunk)], [block], [False])) for chunk in chunks]
        assert_close(torch.cat(rows), expected, f"block {block}")


def test_observed_layers() -> None:
    model = make_model("granitemoehybrid", torch.bfloat16)
    found = recurrent.find_recurrent_layers(model)
    assert {layer: mixer.path for layer, mixer in found.items()} == {
        0: "model.layers.0.mamba",
        2: "model.layers.2.mamba",
    }
    conv = StateSpec("conv", 0, (128 + 2 * 2 * 16, 4), torch.bfloat16)
    scan = StateSpec("recurrent", 0, (8, 16, 16), torch.float32)
    layers = observe(model)
    assert layers == dict.fromkeys((0, 2), RecurrentLayer((conv, scan), resumes=True))
    assert recurrent.state_bytes(layers) == 2 * (conv.num_bytes + scan.num_bytes)
    assert not any(layer.resumes for layer in observe(make_model("jamba")).values())
    assert recurrent.install(models.make_model("llama")) == frozenset()


def test_views_are_aligned_and_apart() -> None:
    odd = StateSpec("conv", 0, (3, 5), torch.bfloat16)
    scan = StateSpec("recurrent", 0, (2, 7), torch.float32)
    layers = {1: RecurrentLayer((odd, scan), resumes=True), 4: RecurrentLayer((odd,), resumes=True)}
    assert recurrent.state_bytes(layers) == 3 * 64
    memory = torch.zeros(4, 256, dtype=torch.uint8)
    views = recurrent.state_views(memory[:, :192], layers)
    for number, view in enumerate((*views[1], *views[4]), start=1):
        assert not view.data_ptr() % recurrent.ALIGNMENT_BYTES
        assert not view.any()
        view[2] = number
    assert [tuple(view.shape) for view in (*views[1], *views[4])] == [(4, 3, 5), (4, 2, 7), (4, 3, 5)]
    assert [view[2].unique().tolist() for view in (*views[1], *views[4])] == [[1], [2], [3]]
    assert not memory[[0, 1, 3]].any()
    for wrong in (memory[:, :128], memory[:, 8:200], memory.view(torch.int8)):
        with pytest.raises(ValueError, match="row"):
            recurrent.state_views(wrong, layers)


def test_what_is_refused() -> None:
    class Mixer(nn.Module):
        layer_idx = 3

        def forward(self, hidden_states: torch.Tensor, cache_params: Any = None) -> torch.Tensor:
            return hidden_states

    with pytest.raises(ModelError, match=r"\[3\].*once"):
        StateProbe().layers(recurrent.install(nn.Sequential(Mixer())))
    with pytest.raises(ModelError, match="layer 3 keeps state in 0 and in 1"):
        recurrent.find_recurrent_layers(nn.Sequential(Mixer(), Mixer()))
    for cu_seqlens, blocks, message in (([0, 3], [1, 2], "one more"), ([0, 3, 5], [1, 1], "share")):
        with pytest.raises(ValueError, match=message):
            StateBatch(cu_seqlens, blocks, [True, True])
