"""Mixed graphs: steps with prompts, replayed in pieces between which attention is launched.

    piece 0: embeddings, norm, projections | attention of layer 0 | piece 1: output, MLP, norm, projections | … | logits

Everything but attention treats tokens one by one, so that a step of any sequences is padded to a bucket of tokens.
Attention is launched for the real tokens only, as without graphs: padding tokens have no keys, and write nothing. What
it reads and writes is copied to tensors at fixed addresses, which all layers and buckets share.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable, Collection

import torch

from folio.app.engine.execution.captured_graphs import CapturedGraphs, GraphKey, GraphKind, GraphPlan
from folio.app.engine.execution.graph import Graph
from folio.app.engine.layers.attention import AttentionHandler, CachedAttention, RotaryLayer
from folio.app.engine.layers.batch import StepBatch
from folio.kernels import Masking

logger = logging.getLogger(__name__)

# With more tokens the device takes longer than the host's launches, which graphs would save.
TOKEN_BUCKETS = (16, 32, 64, 128, 256, 384, 512, 640)


class MixedGraphs(GraphKind):
    """The graphs of steps with prompts, captured when they are first needed, or all at once.

    Args:
        graphs: all graphs of the model.
        forward: logits `[num_rows, vocab_size]` of token ids and positions `[num_tokens]` and rows `[num_rows]`, by the
            bound handler.
        bind: makes a handler compute the attention of every layer.
    """

    setting = "mixed_graphs", "off"
    steps = "steps with prompts"

    def __init__(
        self,
        plan: GraphPlan,
        graphs: CapturedGraphs,
        device: torch.device,
        attention: CachedAttention,
        forward: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
        bind: Callable[[AttentionHandler], None],
    ) -> None:
        assert plan.new_mixed_graph is not None
        self.new_graph, self._most_rows = plan.new_mixed_graph, plan.buckets[-1]
        self._graphs, self._device, self._attention = graphs, device, attention
        self._forward, self._bind = forward, bind
        self._inputs: torch.Tensor | None = None  # [3, most tokens]: token ids, positions, rows
        self._between = _Between(attention)
        graphs.add_kind(self)

    def run(self, batch: StepBatch) -> torch.Tensor | None:
        """Logits `[num_logits, vocab_size]`, valid until the next call; `None` if no graph can compute the batch: it
        has states, adapters, more tokens than the last bucket or more rows of logits than sequences can run.

        Raises:
            ModelError: the model cannot be captured, and the plan requires it.
        """
        num_tokens, num_rows = len(batch.token_ids), len(batch.logit_rows)
        place = bisect.bisect_left(TOKEN_BUCKETS, num_tokens)
        if batch.states is not None or batch.adapters is not None or place == len(TOKEN_BUCKETS):
            return None
        key = "mixed", TOKEN_BUCKETS[place]
        if num_rows > min(key[1], self._most_rows) or not self._graphs.wants(self, key):
            return None
        assert self._inputs is not None
        given = batch.token_ids, batch.positions, batch.logit_rows
        for inputs, values in zip(self._inputs, given, strict=True):
            inputs[: len(values)].copy_(values, non_blocking=True)
            inputs[len(values) :].zero_()
        self._attention.batch = batch
        self._between.num_tokens = num_tokens
        logits = self._graphs.replay(key, num_rows)
        self._attention.forget_calls()
        return logits

    def capture_all(self) -> None:
        """Capture every bucket that fits, the largest first.

        Raises:
            ModelError: the model cannot be captured, and the plan requires it.
        """
        num_captured = 0
        for bucket in reversed(TOKEN_BUCKETS):
            if not self._graphs.capture(self, ("mixed", bucket)):
                break
            num_captured += 1
        logger.info("captured %d mixed graphs; %.1f MiB of graphs", num_captured, self._graphs.held_bytes / 2**20)

    @property
    def buffer_bytes(self) -> int:
        inputs = self._inputs
        return self._between.num_bytes + (0 if inputs is None else inputs.nbytes)

    def describe(self, key: GraphKey) -> str:
        return f"mixed graph of {key[1]} tokens"

    def capture(self, key: GraphKey, graph: Graph) -> object:
        if self._inputs is None:
            self._inputs = torch.zeros(3, TOKEN_BUCKETS[-1], dtype=torch.int64, device=self._device)
        token_ids, positions, rows = self._inputs.zero_()[:, : key[1]]
        inputs = token_ids, positions, rows[: self._most_rows]

        def work() -> None:
            self._between.graph = graph
            self._graphs.write_logits(self._forward(*inputs))
            self._between.end()

        self._bind(self._between)
        try:
            graph.capture(work)
        finally:
            self._between.end()
            self._bind(self._attention)
        return inputs

    def drop_buffers(self, captured: Collection[GraphKey]) -> None:
        if not any(kind == "mixed" for kind, _ in captured):
            self._inputs = None
            self._between.drop_places()


class _Between(AttentionHandler):
    """Splits a graph at each attention call, and copies the call's tensors to fixed places.

    Attributes:
        graph: the graph that is being captured.
        num_tokens: tokens of the step that is replayed.
        num_bytes: bytes of the places.
    """

    def __init__(self, attention: CachedAttention) -> None:
        self._attention = attention
        self._places: dict[tuple[object, ...], torch.Tensor] = {}  # and the first tokens of each, by number
        self._angles: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by `id`: and where they are kept
        self.graph: Graph | None = None
        self.num_tokens = self.num_bytes = 0

    def end(self) -> None:
        """End the forward, whose own tensors must not be kept."""
        self.graph = None
        self._angles.clear()

    def drop_places(self) -> None:
        """Free the places, which no graph reads any more."""
        self._places.clear()
        self.num_bytes = 0

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, masking: Masking
    ) -> torch.Tensor:
        q, k, v = self._kept("query", query), self._kept("key", key), self._kept("value", value)

        def attend(count: int) -> torch.Tensor:
            return self._attention.attend(layer, q[:count], k[:count], v[:count], masking)

        return self._launch(attend, (*query.shape[:2], value.shape[2]), query)

    def attend_rotary(
        self, layer: RotaryLayer, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        kept, kept_cos, kept_sin = self._kept("heads", heads), self._kept_angles(cos), self._kept_angles(sin)

        def attend(count: int) -> torch.Tensor:
            return self._attention.attend_rotary(layer, kept[:count], kept_cos[:count], kept_sin[:count])

        return self._launch(attend, (len(heads), layer.num_q_heads, heads.shape[2]), heads)

    def _launch(
        self, attend: Callable[[int], torch.Tensor], shape: tuple[int, ...], like: torch.Tensor
    ) -> torch.Tensor:
        """The tensor `shape` to which replays write the attention of the first tokens."""
        assert self.graph is not None
        out = self._place("out", shape, like)
        self.graph.launch_between(lambda: out[: self.num_tokens].copy_(attend(self.num_tokens)))
        return out

    def _kept_angles(self, tensor: torch.Tensor) -> torch.Tensor:
        """`[num_tokens, dim]`. Layers share their angles, which are copied once."""
        known = self._angles.get(id(tensor))
        if known is None:
            kept = self._kept(f"angles {len(self._angles)}", tensor.reshape(-1, tensor.shape[-1]))
            known = self._angles[id(tensor)] = tensor, kept
        return known[1]

    def _kept(self, role: str, tensor: torch.Tensor) -> torch.Tensor:
        return self._place(role, tensor.shape, tensor).copy_(tensor)

    def _place(self, role: str, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        """The first tokens of a tensor `[most tokens, *shape[1:]]`. Zeros at first, so that padding stays finite."""
        whole, first = (role, *shape[1:], like.dtype), (role, *shape, like.dtype)
        if whole not in self._places:
            self._places[whole] = place = like.new_zeros(TOKEN_BUCKETS[-1], *shape[1:])
            self.num_bytes += place.nbytes
        if first not in self._places:
            self._places[first] = self._places[whole][: shape[0]]
        return self._places[first]
