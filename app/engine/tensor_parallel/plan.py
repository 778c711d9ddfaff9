"""Which part of each weight a rank has, and what the ranks do with each other's results: the model's own tp plan.

    style                    weight                      forward
    colwise                  a part of the outputs       none
    colwise_gather_output    a part of the outputs       then the ranks' outputs side by side
    rowwise                  a part of the inputs        then the sum over the ranks
    rowwise_split_input      a part of the inputs        of the input that part; then the sum over the ranks
    packed_colwise, …rowwise a part of gate and of up    none
    last, last_but_one       a part of that dimension    none
    first_rank               all, the others have zeros  none
    embedding_rowwise        a part of the vocabulary    what is not there is zero; then the sum over the ranks
    embedding_colwise        a part of each vector       then the ranks' parts side by side
    moe_tp_experts           (its parameters' styles)    then the sum over the ranks
    all_reduce               all                         the sum over the ranks
    moe_identity_expert      all                         of a size-th of the input

Heads are never cut: a rank has whole heads, and where there are fewer KV heads than ranks, several ranks have the same
one.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import PreTrainedModel

from app.errors import ModelError

logger = logging.getLogger(__name__)

# Plans that transformers does not have, or that leave the layers out.
_EXTENSIONS = {
    "gpt_oss": {
        "model.embed_tokens": "embedding_rowwise",
        "model.layers.*.self_attn.q_proj": "colwise",
        "model.layers.*.self_attn.k_proj": "colwise",
        "model.layers.*.self_attn.v_proj": "colwise",
        "model.layers.*.self_attn.sinks": "last",
        "model.layers.*.self_attn.o_proj": "rowwise",
        # Gate and up take turns in the last dimension.
        "model.layers.*.mlp.experts.gate_up_proj": "last",
        "model.layers.*.mlp.experts.gate_up_proj_bias": "last",
        "model.layers.*.mlp.experts.down_proj": "last_but_one",
        "model.layers.*.mlp.experts.down_proj_bias": "first_rank",
        "model.layers.*.mlp.experts": "moe_tp_experts",
    }
}
_COLUMN = {"colwise", "colwise_rep", "colwise_gather_output"}
_ROW = {"rowwise", "rowwise_rep", "rowwise_split_input"}
_REPLICATED = {"replicated_with_grad_allreduce", "mla_kv_a_proj", "replicate", "local_params", "moe_tp_experts"}
_REPLICATED |= {"all_reduce", "moe_identity_expert"}
# A warning is due when every rank has more of the weights than this share: norms are far less.
_MUCH = 0.1
_KV_PROJECTIONS = ("k_proj", "v_proj")


@dataclass(frozen=True, slots=True)
class Cut:
    """The part of a weight that a rank has: spans of one dimension, side by side."""

    dim: int
    spans: tuple[tuple[int, int], ...]

    def of(self, weight: torch.Tensor) -> torch.Tensor:
        """The part, in memory of its own."""
        parts = [weight.narrow(self.dim, start, end - start) for start, end in self.spans]
        return parts[0].clone() if len(parts) == 1 else torch.cat(parts, self.dim)


class Zeros:
    """Nothing of a weight, in its shape: what is added once for all ranks is rank 0's."""

    def of(self, weight: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(weight)


@dataclass(slots=True)
class ShardPlan:
    """What one rank of `size` does.

    Attributes:
        cuts: parameter name → its part of it; the others it has whole.
        styles: module name → what its forward does beside its own.
        spans: module name → of the dimension that is cut, every rank's span.
        kv_groups: attention module name → query heads to a KV head, where several ranks share one.
    """

    rank: int
    size: int
    cuts: dict[str, Cut | Zeros] = field(default_factory=dict)
    styles: dict[str, str] = field(default_factory=dict)
    spans: dict[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    kv_groups: dict[str, int] = field(default_factory=dict)


def plan_shards(model: PreTrainedModel, rank: int, size: int) -> ShardPlan:
    """How a model is cut.

    Args:
        model: it, perhaps without weights (on the meta device).

    Raises:
        ModelError: it has no plan for its layers, one with an unknown style, or dimensions that `size` ranks cannot
            share evenly.
    """
    kind = model.config.model_type
    styles = dict(model.tp_plan or {}) | _EXTENSIONS.get(kind, {})
    if not any(".layers." in f".{name}" for name in styles):
        raise ModelError(f"{kind} has no tensor-parallel plan for its layers; tensor_parallel_size must be 1")
    planner = _Planner(model, ShardPlan(rank, size), styles)
    planner.run()
    _warn_of_whole_weights(model, planner.plan)
    return planner.plan


def _warn_of_whole_weights(model: PreTrainedModel, plan: ShardPlan) -> None:
    """Plans may leave attention out, and with it the KV cache."""
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    whole = sum(size for name, size in sizes.items() if name not in plan.cuts) / sum(sizes.values())
    if whole > _MUCH and not plan.rank:
        logger.warning(
            "the tensor-parallel plan of %s leaves %.0f %% of its weights whole on every rank; so may be the KV cache "
            "of layers whose attention is among them",
            model.config.model_type,
            whole * 100,
        )


class _Planner:
    def __init__(self, model: PreTrainedModel, plan: ShardPlan, styles: dict[str, str]) -> None:
        self.plan = plan
        self._kind = model.config.model_type
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._styles = styles
        self._num_heads: int = model.config.get_text_config().num_attention_heads

    def run(self) -> None:
        for path, module in self._modules.items():
            if (style := self._styles.get(_generic(path))) is not None:
                self.plan.styles[path] = style
            for name, parameter in module.named_parameters(recurse=False):
                self._plan_parameter(path, name, parameter)

    def _plan_parameter(self, path: str, name: str, parameter: nn.Parameter) -> None:
        full_name = f"{path}.{name}"
        style = self._styles.get(_generic(full_name)) or self._styles.get(_generic(path))
        if style is None or style in _REPLICATED:
            return
        own_dim = _dimension(style, name, parameter.ndim)
        if own_dim is None:
            raise ModelError(f"{self._kind} has a tensor-parallel plan with the style {style!r}, which Folio lacks")
        if style == "first_rank" or (style in _ROW and name == "bias"):
            if self.plan.rank:  # added once
                self.plan.cuts[full_name] = Zeros()
            return
        dim = own_dim % parameter.ndim
        spans = self._spans(path, style, parameter.shape[dim])
        start, end = spans[self.plan.rank]
        self.plan.spans[path] = spans
        if style.startswith("packed"):  # the same part of both halves
            half = parameter.shape[dim] // 2
            start, end = start // 2, end // 2
            self.plan.cuts[full_name] = Cut(dim, ((start, end), (half + start, half + end)))
        else:
            self.plan.cuts[full_name] = Cut(dim, ((start, end),))

    def _spans(self, path: str, style: str, length: int) -> tuple[tuple[int, int], ...]:
        """Every rank's span of a dimension of that length."""
        size = self.plan.size
        parent_path, _, name = path.rpartition(".")
        if style == "embedding_rowwise" or style == "colwise_gather_output":  # need not be even
            return tuple((length * r // size, length * (r + 1) // size) for r in range(size))
        parent = self._modules.get(parent_path)
        head_dim = getattr(parent, "head_dim", None)
        if name == "v_proj":
            head_dim = getattr(parent, "v_head_dim", head_dim)
        if name in _KV_PROJECTIONS and isinstance(head_dim, int) and length % head_dim == 0:
            num_kv_heads = length // head_dim
            if num_kv_heads < size and size % num_kv_heads == 0:
                self._share_kv_heads(parent_path, parent)
                copies = size // num_kv_heads
                return tuple((r // copies * head_dim, (r // copies + 1) * head_dim) for r in range(size))
            self._check_divides(num_kv_heads, f"KV heads of {parent_path}")
        elif isinstance(head_dim, int) and style == "colwise":
            self._check_divides(self._num_query_heads(parent), f"query heads of {parent_path}")
        self._check_divides(length // 2 if style.startswith("packed") else length, f"rows or columns of {path}")
        return tuple((length * r // size, length * (r + 1) // size) for r in range(size))

    def _share_kv_heads(self, path: str, attention: nn.Module | None) -> None:
        num_heads = self._num_query_heads(attention)
        self._check_divides(num_heads, f"query heads of {path}")
        self.plan.kv_groups[path] = num_heads // self.plan.size

    def _num_query_heads(self, attention: nn.Module | None) -> int:
        """Of a layer, if it says so, else of all."""
        names = ("num_heads", "num_attention_heads")
        own = [count for name in names if isinstance(count := getattr(attention, name, None), int)]
        return own[0] if own else self._num_heads

    def _check_divides(self, count: int, what: str) -> None:
        if count % self.plan.size:
            raise ModelError(
                f"{self.plan.size} ranks cannot share the {count} {what} evenly; choose another tensor_parallel_size"
            )


def _dimension(style: str, name: str, ndim: int) -> int | None:
    """Which dimension of a parameter is cut; `None` for an unknown style."""
    if style in _COLUMN or style == "packed_colwise":
        return max(ndim - 2, 0)
    if style in _ROW or style in ("packed_rowwise", "last", "first_rank"):
        return ndim - 1
    if style == "last_but_one":
        return ndim - 2
    return {"embedding_rowwise": 0, "embedding_colwise": 1}.get(style)


def _generic(name: str) -> str:
    """The name with layer numbers as `*`, as plans have them."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)
