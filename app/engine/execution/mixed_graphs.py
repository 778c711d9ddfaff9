"""Mixed graphs: steps with prompts, replayed in pieces between which attention is launched.

    piece 0: embeddings, norm, projections | attention of layer 0 | piece 1: output, MLP, norm, projections | … | logits

Everything but attention treats tokens one by one, so that a step of any sequences is padded to a bucket of tokens.
Attention is launched for the real tokens only, as without graphs: padding tokens have no keys, and write nothing. What
it reads and writes is copied to tensors that stay where they are, the same ones for all layers and buckets.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable
from contextlib import nullcontext

import torch

from app.engine.execution.attention import AttentionHandler, CachedAttention, RotaryLayer
from app.engine.execution.batch import StepBatch
from app.engine.execution.decode_graphs import GraphPlan
from app.engine.execution.graph import CaptureError, Graph
from app.errors import ModelError
from kernels import Masking, note_compilation
from vmem import KVMemory

logger = logging.getLogger(__name__)

# Beyond them the device takes longer than the host.
TOKEN_BUCKETS = (16, 32, 64, 128, 256, 384, 512, 640)


class MixedGraphs:
    """The graphs of one model over one KV memory, captured when they are first needed, or all at once.

    Args:
        plan: its last bucket is the most rows of logits. Its budget is shared with decode graphs.
        used_bytes: memory of decode graphs.
        forward: logits `[num_rows, vocab_size]` of token ids and positions `[num_tokens]` and rows `[num_rows]`, by the
            bound handler.
        bind: makes a handler compute the attention of every layer.

    Attributes:
        captured: by number of tokens.
        num_bytes: memory of all graphs.
    """

    @torch.inference_mode()
    def __init__(
        self,
        plan: GraphPlan,
        memory: KVMemory,
        device: torch.device,
        attention: CachedAttention,
        used_bytes: Callable[[], int],
        forward: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
        bind: Callable[[AttentionHandler], None],
    ) -> None:
        self._plan, self._memory = plan, memory
        self._attention, self._used_bytes = attention, used_bytes
        self._forward, self._bind = forward, bind
        self._token_ids, self._positions = torch.zeros(2, TOKEN_BUCKETS[-1], dtype=torch.int64, device=device)
        self._rows = torch.zeros(plan.buckets[-1], dtype=torch.int64, device=device)
        self._logits: torch.Tensor | None = None  # [most rows, vocab_size]
        self._between = _Between(attention)
        self._is_refused = False
        self._inputs: list[tuple[torch.Tensor, ...]] = []  # of the graphs, which do not keep what they read
        self.captured: dict[int, Graph] = {}
        self.num_bytes = 0

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
        bucket = TOKEN_BUCKETS[place]
        if num_rows > self._num_rows(bucket) or not (bucket in self.captured or self._capture(bucket)):
            return None
        for inputs, given in (
            (self._token_ids, batch.token_ids),
            (self._positions, batch.positions),
            (self._rows, batch.logit_rows),
        ):
            inputs[: len(given)].copy_(given, non_blocking=True)
            inputs[len(given) :].zero_()
        self._attention.batch = batch
        self._between.num_tokens = num_tokens
        self.captured[bucket].replay()
        self._attention.forget_calls()
        assert self._logits is not None
        return self._logits[:num_rows]

    def capture_all(self) -> None:
        """Capture every bucket that fits, the largest first.

        Raises:
            ModelError: the model cannot be captured, and the plan requires it.
        """
        for bucket in reversed(TOKEN_BUCKETS):
            if bucket not in self.captured and not self._capture(bucket):
                break
        logger.info("captured %d mixed graphs, %.1f MiB", len(self.captured), self.num_bytes / 2**20)

    def _num_rows(self, bucket: int) -> int:
        return min(bucket, len(self._rows))

    @torch.inference_mode()
    def _capture(self, bucket: int) -> bool:
        """Capture a graph; False if it does not fit, or if the model cannot be captured."""
        if self._is_refused or self.num_bytes + self._used_bytes() >= self._plan.budget_bytes:
            return False
        num_rows, graph = self._num_rows(bucket), self._plan.new_graph()
        inputs = self._token_ids[:bucket], self._positions[:bucket], self._rows[:num_rows]
        for tensor in inputs:
            tensor.zero_()

        def work() -> None:
            self._between.graph = graph
            logits = self._forward(*inputs)
            if self._logits is None:  # when the work runs for the first time
                self._logits = logits.new_zeros(len(self._rows), logits.shape[1])
            self._logits[:num_rows].copy_(logits)
            self._between.end()

        self._bind(self._between)
        try:
            with self._memory.mapper.paused() if self._plan.pauses else nullcontext():
                graph.capture(work)
        except torch.OutOfMemoryError as error:
            self._is_refused = True
            logger.warning("no memory for a graph of %d tokens, nor for others: %s", bucket, error)
            return False
        except CaptureError as error:
            self._is_refused = True
            if self._plan.required:
                raise ModelError(
                    f"mixed_graphs is 'on', but steps of this model cannot be captured in pieces: {error}; use 'off'"
                ) from error
            logger.warning("steps of this model cannot be captured in pieces, each kernel is launched: %s", error)
            return False
        finally:
            self._between.end()
            self._bind(self._attention)
        note_compilation(f"mixed graph of {bucket} tokens")
        self._inputs.append(inputs)
        self.captured[bucket] = graph
        self.num_bytes += graph.num_bytes
        return True


class _Between(AttentionHandler):
    """Splits a graph at each attention call, whose tensors it keeps in places of their own.

    Attributes:
        graph: that is captured.
        num_tokens: of the step that is replayed.
    """

    def __init__(self, attention: CachedAttention) -> None:
        self._attention = attention
        self._places: dict[tuple[object, ...], torch.Tensor] = {}  # and the first tokens of each, by number
        self._angles: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by `id`: and where they are kept
        self.graph: Graph | None = None
        self.num_tokens = 0

    def end(self) -> None:
        """End the forward, of whose own tensors none may be kept."""
        self.graph = None
        self._angles.clear()

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
        """Where the result `shape` of attention over the first tokens will be."""
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
            self._places[whole] = like.new_zeros(TOKEN_BUCKETS[-1], *shape[1:])
        if first not in self._places:
            self._places[first] = self._places[whole][: shape[0]]
        return self._places[first]
