"""Model runner: one rank's forwards, from a step's tokens to logits."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from transformers import PreTrainedModel

from folio.app.engine.device.charges import DeviceCharges
from folio.app.engine.execution.captured_graphs import CapturedGraphs, GraphPlan
from folio.app.engine.execution.decode_graphs import DecodeGraphs
from folio.app.engine.execution.mixed_graphs import MixedGraphs
from folio.app.engine.layers import recurrent
from folio.app.engine.layers.attention import (
    IMPLEMENTATION,
    AttentionHandler,
    CachedAttention,
    GeometryProbe,
    bind_attention,
)
from folio.app.engine.layers.batch import StepBatch
from folio.app.engine.layers.recurrent import CachedStates, RecurrentLayer, StateProbe
from folio.app.engine.model.kv_scales import RoundingProbe, ScaleProbe, cached_spec, has_scales, measured_tokens
from folio.app.engine.model.loader import LoadedModel
from folio.app.errors import ModelError
from folio.kernels import AttentionProvider, CacheScales
from folio.vmem import CacheTensors, KVMemory, LayerSpec

logger = logging.getLogger(__name__)

PROBE_TOKENS = 6


@dataclass(frozen=True, slots=True)
class ObservedLayers:
    """Geometry of a model's layers, observed in one forward.

    Attributes:
        attention: cache geometry of each layer that attends.
        windows: tokens that a query sees, in layers with a sliding window.
        states: recurrent states of each layer that has any.
    """

    attention: dict[int, LayerSpec]
    windows: dict[int, int]
    states: dict[int, RecurrentLayer]


class ModelRunner:
    """Runs a loaded model over the KV memory; with several ranks each runs its share at the same time.

    A forward takes all sequences as one row `[1, num_tokens]` with explicit positions; only attention and recurrent
    mixers separate them.

    Attributes:
        layers: see `ObservedLayers`.
        graphs: graphs of decode steps; `None` if all steps are launched kernel by kernel.
        mixed_graphs: graphs of steps with prompts; `None` if they are launched kernel by kernel.
    """

    def __init__(self, model: LoadedModel, provider: AttentionProvider) -> None:
        """Raises `ModelError` if the layers do not attend as the config says."""
        self._model = model
        self._module = model.module
        self._provider = provider
        self._attention: CachedAttention | None = None
        self._states: CachedStates | None = None
        self.layers = observe_layers(model, provider)
        self.graphs: DecodeGraphs | None = None
        self.mixed_graphs: MixedGraphs | None = None
        self._scales = cache_scales(model, provider, self.layers) if has_scales(model.cache_dtype) else {}

    def attach_caches(self, tensors: CacheTensors) -> None:
        """Use these caches from now on, without graphs."""
        self._attention = CachedAttention(tensors, self._provider, self._scales)
        self._states = CachedStates(tensors.state_view(), self.layers.states) if self.layers.states else None
        bind_attention(self._module, self._attention)
        recurrent.bind_mixers(self._module, self._states)
        self.graphs = self.mixed_graphs = None

    def use_graphs(self, plan: GraphPlan, memory: KVMemory, charges: DeviceCharges | None) -> CapturedGraphs | None:
        """Capture steps over the memory, whose caches are attached, see `CapturedGraphs`. `None`: steps with recurrent
        states are not captured."""
        if self._states is not None:
            return None
        device = self._module.device
        graphs = CapturedGraphs(plan, memory, device, charges)
        self.graphs = DecodeGraphs(plan, graphs, memory.tensors, device, self._compute)
        if plan.new_mixed_graph is not None:
            assert self._attention is not None
            bind = partial(bind_attention, self._module)
            self.mixed_graphs = MixedGraphs(plan, graphs, device, self._attention, self._forward_alone, bind)
        return graphs

    @torch.inference_mode()
    def run(self, batch: StepBatch) -> torch.Tensor:
        """Logits `[num_logits, vocab_size]` of the batch's logit rows, complete on rank 0 only. They are on the device,
        which may still compute them, and valid until the next call. The batch's blocks must be mapped."""
        logits = None if self.graphs is None else self.graphs.run(batch)
        if logits is None and self.mixed_graphs is not None:
            logits = self.mixed_graphs.run(batch)
        return self._compute(batch) if logits is None else logits

    def _compute(self, batch: StepBatch) -> torch.Tensor:
        """`run`, kernel by kernel."""
        assert self._attention is not None
        self._attention.batch = batch
        if self._model.adapters is not None:
            self._model.adapters.set_batch(batch.adapters)
        if self._states is not None and batch.states is not None:
            self._states.set_batch(batch.states)
        # torch selects rows with all threads, which then spin for milliseconds unless GOMP_SPINCOUNT says otherwise.
        rows = None if len(batch.logit_rows) == len(batch.token_ids) else batch.logit_rows
        logits = forward(self._module, batch.token_ids, batch.positions, rows)
        self._attention.forget_calls()
        return logits

    def _forward_alone(self, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """A forward without adapters and states by the bound handler."""
        if self._model.adapters is not None:
            self._model.adapters.set_batch(None)
        return forward(self._module, token_ids, positions, rows)

    def run_largest(self, num_tokens: int, num_logits: int) -> torch.Tensor:
        """Logits `[num_logits, vocab_size]` of a step of random tokens that attend to each other, without a cache."""
        tokens = torch.arange(num_tokens) % self._model.vocab_size
        return self._without_cache(GeometryProbe(self._provider), tokens, num_logits)

    def rounded_logits(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Logits `[num_tokens, vocab_size]` of one sequence without a cache, on the CPU. Keys and values are rounded as
        a cache of 8 bits does."""
        handler = RoundingProbe(GeometryProbe(self._provider), self._model.cache_dtype, self._scales)
        return self._without_cache(handler, token_ids, len(token_ids)).float().cpu()

    def _without_cache(self, handler: AttentionHandler, token_ids: torch.Tensor, num_logits: int) -> torch.Tensor:
        if self._model.adapters is not None:
            self._model.adapters.set_batch(None)
        try:
            return _probe(self._model, handler, StateProbe(), token_ids, num_logits)
        finally:
            bind_attention(self._module, self._attention)
            recurrent.bind_mixers(self._module, self._states)

    @torch.inference_mode()
    def run_pooled(self, batch: StepBatch, pooled: Sequence[slice]) -> tuple[torch.Tensor, torch.Tensor]:
        """`run`, and the sums `[len(pooled), hidden_size]` float32 of these rows' hidden states after the last norm.
        Other ranks `run` the same batch: all have the whole hidden states."""
        with hidden_states(self._module) as states:
            logits = self._compute(batch)
        [hidden] = states
        return logits, torch.stack([hidden[0, rows].float().sum(0) for rows in pooled])

    @torch.inference_mode()
    def own_logits(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Logits `[num_tokens, vocab_size]` by transformers' own attention and mixers, on the CPU."""
        bind_attention(self._module, None)
        recurrent.bind_mixers(self._module, None)
        if self._model.adapters is not None:
            self._model.adapters.set_batch(None)
        self._module.set_attn_implementation("eager")
        try:
            out = self._module(input_ids=token_ids[None].to(self._module.device), use_cache=False)
            return out.logits[0].float().cpu()
        finally:
            self._module.set_attn_implementation(IMPLEMENTATION)
            bind_attention(self._module, self._attention)
            recurrent.bind_mixers(self._module, self._states)


@contextmanager
def hidden_states(module: PreTrainedModel) -> Iterator[list[torch.Tensor]]:
    """A list to which each forward within the context adds the hidden states `[1, num_tokens, hidden_size]` after the
    last norm."""
    states: list[torch.Tensor] = []
    hook = module.get_decoder().register_forward_hook(lambda _, __, output: states.append(output[0]))
    try:
        yield states
    finally:
        hook.remove()


def forward(
    module: nn.Module, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor | None
) -> torch.Tensor:
    """Logits `[len(rows), vocab_size]` of a packed forward of `[num_tokens]` tokens; `rows`: `None` for all."""
    device = next(module.parameters()).device
    token_ids, positions = token_ids.to(device), positions.to(device)
    kept = 0 if rows is None else rows.to(device)
    out = module(input_ids=token_ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=kept)
    return out.logits[0]


@torch.inference_mode()
def _probe(
    model: LoadedModel, handler: AttentionHandler, states: StateProbe, token_ids: torch.Tensor, num_logits: int
) -> torch.Tensor:
    """Logits of the last `num_logits` of `token_ids`, as one sequence; positions wrap at the model's limit."""
    bind_attention(model.module, handler)
    recurrent.bind_mixers(model.module, states)
    positions = torch.arange(len(token_ids))
    return forward(model.module, token_ids, positions % model.max_positions, positions[-num_logits:])


def cache_scales(model: LoadedModel, provider: AttentionProvider, layers: ObservedLayers) -> dict[int, CacheScales]:
    """Scales `[num_kv_heads]` of each attention layer for a cache of 8-bit floats: the checkpoint's, or measured in one
    forward, on each rank for its own heads."""
    device = model.module.device
    scales = {
        layer: CacheScales(*(torch.full((layers.attention[layer].num_heads,), scale, device=device) for scale in pair))
        for layer, pair in model.stored_scales.items()
        if layer in layers.attention
    }
    num_stored = len(scales)
    if missing := layers.attention.keys() - scales.keys():
        probe = ScaleProbe(GeometryProbe(provider))
        _probe(model, probe, StateProbe(), measured_tokens(model.vocab_size, model.max_positions), 1)
        measured = probe.scales(model.cache_dtype)
        scales |= {layer: measured[layer] for layer in missing}
    logger.info(
        "KV cache of %s: scales of %d layers from the checkpoint, of %d measured",
        model.cache_dtype,
        num_stored,
        len(missing),
    )
    return scales


@torch.inference_mode()
def observe_layers(model: LoadedModel, provider: AttentionProvider) -> ObservedLayers:
    """Observe the geometry of every layer in one small forward. Raises `ModelError` if a layer does not attend."""
    probe, state_probe = GeometryProbe(provider), StateProbe()
    tokens = torch.arange(PROBE_TOKENS) % model.vocab_size
    none: list[torch.Tensor] = []
    with (
        nullcontext() if model.adapters is None else model.adapters.observed(PROBE_TOKENS, 1),
        nullcontext(none) if model.pooling is None else hidden_states(model.module) as states,
    ):
        logits = _probe(model, probe, state_probe, tokens, 1)
    kind = model.module.config.model_type
    if len(logits) != 1:
        raise ModelError(f"{kind} ignores logits_to_keep: it returned {len(logits)} rows of logits instead of 1")
    if model.pooling is not None and [state.shape[:2] for state in states] != [(1, PROBE_TOKENS)]:
        raise ModelError(f"{kind} has no decoder of its own below the output layer; there is nothing to pool from")
    if set(probe.windows) != model.windowed_layers:
        raise ModelError(
            f"{kind} should have sliding windows in layers {sorted(model.windowed_layers)}, but passes them to "
            f"attention only in {sorted(probe.windows)}; outputs beyond the window would be wrong"
        )
    specs = probe.layers(required=model.attention_layers, allowed=model.attention_layers | model.recurrent_layers)
    specs = {layer: cached_spec(spec, model.cache_dtype) for layer, spec in specs.items()}
    return ObservedLayers(specs, probe.windows, state_probe.layers(model.recurrent_layers))
