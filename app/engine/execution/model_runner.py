"""One rank's forwards: a step's tokens in, logits of the tokens that sample out."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from app.engine.execution import recurrent
from app.engine.execution.attention import IMPLEMENTATION, CachedAttention, GeometryProbe, bind_attention
from app.engine.execution.batch import StepBatch
from app.engine.execution.recurrent import CachedStates, RecurrentLayer, StateProbe
from app.engine.model.loader import LoadedModel
from app.errors import ModelError
from kernels import AttentionProvider
from vmem import CacheTensors, LayerSpec

PROBE_TOKENS = 6


@dataclass(frozen=True, slots=True)
class ObservedLayers:
    """What one forward showed.

    Attributes:
        attention: cache geometry of each layer that attends.
        windows: how many tokens a query sees, of the layers where it does not see all before it.
        states: what each layer with a recurrent state keeps.
    """

    attention: dict[int, LayerSpec]
    windows: dict[int, int]
    states: dict[int, RecurrentLayer]


class ModelRunner:
    """Runs a loaded model over the KV memory. With several ranks each runs its share, all of them together.

    A forward sees all sequences as one row `[1, num_tokens]` with explicit positions; only attention knows
    where one ends and the next begins.

    Attributes:
        layers: what the model's layers need.
    """

    def __init__(self, model: LoadedModel, provider: AttentionProvider) -> None:
        """Raises `ModelError` if a layer does not attend as it should."""
        self._model = model
        self._module = model.module
        self._provider = provider
        self._states: CachedStates | None = None
        self.layers = observe_layers(model, provider)

    def attach_caches(self, tensors: CacheTensors) -> None:
        """Run on these caches from now on."""
        self._attention = CachedAttention(tensors, self._provider)
        self._states = CachedStates(tensors.state_view(), self.layers.states) if self.layers.states else None
        bind_attention(self._module, self._attention)
        recurrent.bind_mixers(self._module, self._states)

    @torch.inference_mode()
    def run(self, batch: StepBatch) -> torch.Tensor:
        """Logits `[num_logits, vocab_size]` of the rows that need them, on the device, which may be computing still; of
        rank 0 only. The batch's blocks must be mapped."""
        self._attention.batch = batch
        if self._model.adapters is not None:
            self._model.adapters.set_batch(batch.adapters)
        if self._states is not None and batch.states is not None:
            self._states.set_batch(batch.states)
        return forward(self._module, batch.token_ids, batch.positions, batch.logit_rows)

    @torch.inference_mode()
    def own_logits(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Logits `[num_tokens, vocab_size]` by transformers' plain attention and unwrapped mixers, on the CPU."""
        recurrent.bind_mixers(self._module, None)
        if self._model.adapters is not None:
            self._model.adapters.set_batch(None)
        self._module.set_attn_implementation("eager")
        try:
            out = self._module(input_ids=token_ids[None].to(self._module.device), use_cache=False)
            logits: torch.Tensor = out.logits[0].float().cpu()
            return logits
        finally:
            self._module.set_attn_implementation(IMPLEMENTATION)
            recurrent.bind_mixers(self._module, self._states)


def forward(module: nn.Module, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Logits `[len(rows), vocab_size]` of a packed forward of `[num_tokens]` tokens."""
    device = next(module.parameters()).device
    token_ids, positions, rows = (tensor.to(device) for tensor in (token_ids, positions, rows))
    out = module(input_ids=token_ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=rows)
    logits: torch.Tensor = out.logits[0]
    return logits


@torch.inference_mode()
def observe_layers(model: LoadedModel, provider: AttentionProvider) -> ObservedLayers:
    """Geometry of every layer, from one tiny forward. Raises `ModelError` if a layer is missing."""
    probe, state_probe = GeometryProbe(provider), StateProbe()
    bind_attention(model.module, probe)
    recurrent.bind_mixers(model.module, state_probe)
    tokens = torch.arange(PROBE_TOKENS) % model.vocab_size
    with nullcontext() if model.adapters is None else model.adapters.observed(PROBE_TOKENS, 1):
        logits = forward(model.module, tokens, torch.arange(PROBE_TOKENS), torch.tensor([PROBE_TOKENS - 1]))
    kind = model.module.config.model_type
    if len(logits) != 1:
        raise ModelError(f"{kind} ignores logits_to_keep: asked for 1 row of logits, it gave {len(logits)}")
    if set(probe.windows) != model.windowed_layers:
        raise ModelError(
            f"{kind} should have sliding windows in layers {sorted(model.windowed_layers)}, but tells its attention so "
            f"only in {sorted(probe.windows)}; it would be served wrongly beyond the window"
        )
    specs = probe.layers(required=model.attention_layers, allowed=model.attention_layers | model.recurrent_layers)
    return ObservedLayers(specs, probe.windows, state_probe.layers(model.recurrent_layers))
