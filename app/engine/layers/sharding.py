"""Sharding: a rank's share of a model's weights, and the collectives of its forwards.

transformers loads, converts and merges the weights of a checkpoint and registers each with its module. At that moment a
copy of the rank's part replaces the weight. The complete weight is only mapped from the file, and its pages are
released, so that a rank's peak memory is near its share, unless weights are converted to another dtype, which happens
before.

The part of each weight and the collectives follow the model's own tensor-parallel plan:

    style                    weight                      forward
    colwise                  a part of the outputs       none
    colwise_gather_output    a part of the outputs       concatenate the ranks' outputs
    rowwise                  a part of the inputs        sum over the ranks
    rowwise_split_input      a part of the inputs        split the input; sum over the ranks
    packed_colwise, …rowwise a part of gate and of up    none
    last, last_but_one       a part of that dimension    none
    first_rank               all on rank 0, else zeros   none
    embedding_rowwise        a part of the vocabulary    zero for other tokens; sum over the ranks
    embedding_colwise        a part of each vector       concatenate the ranks' parts
    moe_tp_experts           (its parameters' styles)    sum over the ranks
    all_reduce               all                         sum over the ranks
    moe_identity_expert      all                         divide the input by the number of ranks

Heads are never cut: a rank has complete heads. With fewer KV heads than ranks, several ranks have the same KV head.
"""

from __future__ import annotations

import copy
import ctypes
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from folio.app.engine.layers.recurrent import PackedMixer, unwrapped
from folio.app.engine.tensor_parallel.communicator import Communicator
from folio.app.errors import ModelError
from folio.kernels import QuantisedWeight

logger = logging.getLogger(__name__)

# Plans that transformers lacks, or has without the layers.
_EXTENSIONS = {
    "gpt_oss": {
        "model.embed_tokens": "embedding_rowwise",
        "model.layers.*.self_attn.q_proj": "colwise",
        "model.layers.*.self_attn.k_proj": "colwise",
        "model.layers.*.self_attn.v_proj": "colwise",
        "model.layers.*.self_attn.sinks": "last",
        "model.layers.*.self_attn.o_proj": "rowwise",
        # Gate and up are interleaved in the last dimension.
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
# Warn if more than this share of the weights is on every rank; norms are far less.
_MOST_REPLICATED = 0.1
_KV_PROJECTIONS = ("k_proj", "v_proj")
# Styles with a collective in the forward.
_COLLECTING = {"rowwise", "rowwise_rep", "rowwise_split_input", "moe_tp_experts", "all_reduce", "moe_identity_expert"}
_COLLECTING |= {"colwise_gather_output", "colwise_rep", "embedding_rowwise", "embedding_colwise"}
_MADV_DONTNEED = 4
_RELEASE_INTERVAL_BYTES = 64 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


@dataclass(frozen=True, slots=True)
class WeightShard:
    """A rank's part of a weight: concatenated spans of one dimension."""

    dim: int
    spans: tuple[tuple[int, int], ...]

    def of(self, weight: torch.Tensor) -> torch.Tensor:
        """A copy of the part."""
        parts = [weight.narrow(self.dim, start, end - start) for start, end in self.spans]
        return parts[0].clone() if len(parts) == 1 else torch.cat(parts, self.dim)

    def of_one(self, transposed: bool, start: int, outputs: int) -> WeightShard:
        """The part of the outputs `start` to `start + outputs - 1` of one expert, of a weight `[experts, outputs,
        inputs]`, or `[experts, inputs, outputs]` if it is transposed."""
        dim = 2 - self.dim if transposed else self.dim - 1
        if dim == 1:
            return WeightShard(1, self.spans)
        spans = ((max(first - start, 0), min(end - start, outputs)) for first, end in self.spans)
        return WeightShard(0, tuple((first, end) for first, end in spans if first < end))


class ZeroShard:
    """Zeros in a weight's shape, for weights that only rank 0 adds."""

    def of(self, weight: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(weight)


@dataclass(slots=True)
class ShardPlan:
    """The plan of one of `size` ranks.

    Attributes:
        cuts: parameter name → this rank's part; other parameters are replicated.
        styles: module name → style of its collective.
        spans: module name → every rank's span of the sharded dimension.
        kv_groups: attention module name → query heads for each KV head, where several ranks share one.
    """

    rank: int
    size: int
    cuts: dict[str, WeightShard | ZeroShard] = field(default_factory=dict)
    styles: dict[str, str] = field(default_factory=dict)
    spans: dict[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    kv_groups: dict[str, int] = field(default_factory=dict)

    def part_of(
        self, name: str, value: torch.Tensor | QuantisedWeight, cut: WeightShard | ZeroShard | None
    ) -> torch.Tensor | QuantisedWeight:
        """A part of a weight, which may be quantised. Raises `ModelError` if that would cut inputs with one scale."""
        if cut is None or not isinstance(value, QuantisedWeight):
            return value if cut is None else cut.of(value)  # type: ignore[arg-type]  # no quantised one is left
        assert isinstance(cut, WeightShard)  # others are of biases
        if cut.dim == 0:
            return value.select(torch.cat([torch.arange(*span) for span in cut.spans]))
        [span] = cut.spans
        try:
            return value.columns(*span)
        except ValueError as error:
            raise ModelError(
                f"{self.size} ranks cannot share {name}: {error}; choose another tensor_parallel_size"
            ) from None


def plan_shards(model: PreTrainedModel, rank: int, size: int) -> ShardPlan:
    """The sharding of a model, which may be on the meta device.

    Raises:
        ModelError: no plan for the layers, an unknown style, or dimensions that are not divisible by `size`.
    """
    kind = model.config.model_type
    styles = dict(model.tp_plan or {}) | _EXTENSIONS.get(kind, {})
    if not any(".layers." in f".{name}" for name in styles):
        raise ModelError(f"{kind} has no tensor-parallel plan for its layers; tensor_parallel_size must be 1")
    plan = _Planner(model, ShardPlan(rank, size), styles).run()
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    replicated = sum(size for name, size in sizes.items() if name not in plan.cuts) / sum(sizes.values())
    if replicated > _MOST_REPLICATED and not rank:  # plans may omit attention, and with it the KV cache
        logger.warning(
            "the tensor-parallel plan of %s replicates %.0f %% of its weights, and the KV cache of layers "
            "whose attention is among them",
            kind,
            replicated * 100,
        )
    return plan


class _Planner:
    def __init__(self, model: PreTrainedModel, plan: ShardPlan, styles: dict[str, str]) -> None:
        self.plan = plan
        self._kind = model.config.model_type
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._styles = styles
        self._num_heads: int = model.config.get_text_config().num_attention_heads

    def run(self) -> ShardPlan:
        for path, module in self._modules.items():
            if (style := self._styles.get(_generic(path))) is not None:
                self.plan.styles[path] = style
            for name, parameter in module.named_parameters(recurse=False):
                self._plan_parameter(path, name, parameter)
        return self.plan

    def _plan_parameter(self, path: str, name: str, parameter: nn.Parameter) -> None:
        full_name = f"{path}.{name}"
        style = self._styles.get(_generic(full_name)) or self._styles.get(_generic(path))
        if style is None or style in _REPLICATED:
            return
        own_dim = _dimension(style, parameter.ndim)
        if own_dim is None:
            raise ModelError(f"{self._kind} has a tensor-parallel plan with the unknown style {style!r}")
        if style == "first_rank" or (style in _ROW and name == "bias"):
            if self.plan.rank:
                self.plan.cuts[full_name] = ZeroShard()
            return
        dim = own_dim % parameter.ndim
        spans = self._spans(path, style, parameter.shape[dim])
        start, end = spans[self.plan.rank]
        self.plan.spans[path] = spans
        if style.startswith("packed"):
            half = parameter.shape[dim] // 2
            start, end = start // 2, end // 2
            self.plan.cuts[full_name] = WeightShard(dim, ((start, end), (half + start, half + end)))
        else:
            self.plan.cuts[full_name] = WeightShard(dim, ((start, end),))

    def _spans(self, path: str, style: str, length: int) -> tuple[tuple[int, int], ...]:
        size = self.plan.size
        parent_path, _, name = path.rpartition(".")
        if style in ("embedding_rowwise", "colwise_gather_output"):  # may be uneven
            return tuple((length * r // size, length * (r + 1) // size) for r in range(size))
        parent = self._modules.get(parent_path)
        head_dim = getattr(parent, "head_dim", None)
        if name == "v_proj":
            head_dim = getattr(parent, "v_head_dim", head_dim)
        if name in _KV_PROJECTIONS and isinstance(head_dim, int) and length % head_dim == 0:
            num_kv_heads = length // head_dim
            if num_kv_heads < size and size % num_kv_heads == 0:
                num_heads = self._num_query_heads(parent)
                self._check_divides(num_heads, f"query heads of {parent_path}")
                self.plan.kv_groups[parent_path] = num_heads // size
                copies = size // num_kv_heads
                return tuple((r // copies * head_dim, (r // copies + 1) * head_dim) for r in range(size))
            self._check_divides(num_kv_heads, f"KV heads of {parent_path}")
        elif isinstance(head_dim, int) and style == "colwise":
            self._check_divides(self._num_query_heads(parent), f"query heads of {parent_path}")
        self._check_divides(length // 2 if style.startswith("packed") else length, f"rows or columns of {path}")
        return tuple((length * r // size, length * (r + 1) // size) for r in range(size))

    def _num_query_heads(self, attention: nn.Module | None) -> int:
        names = ("num_heads", "num_attention_heads")
        own = [count for name in names if isinstance(count := getattr(attention, name, None), int)]
        return own[0] if own else self._num_heads

    def _check_divides(self, count: int, noun: str) -> None:
        if count % self.plan.size:
            raise ModelError(
                f"{self.plan.size} ranks cannot share the {count} {noun} evenly; choose another tensor_parallel_size"
            )


def _dimension(style: str, ndim: int) -> int | None:
    """The sharded dimension of a parameter; `None` for an unknown style."""
    if style in _COLUMN or style == "packed_colwise":
        return max(ndim - 2, 0)
    if style in _ROW or style in ("packed_rowwise", "last", "first_rank"):
        return ndim - 1
    if style == "last_but_one":
        return ndim - 2
    return {"embedding_rowwise": 0, "embedding_colwise": 1}.get(style)


def _generic(name: str) -> str:
    """The name with `*` for layer numbers, as in plans."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def load_share(
    folder: str, config: PreTrainedConfig, comm: Communicator, **settings: Any
) -> tuple[PreTrainedModel, dict[str, Any], ShardPlan]:
    """`from_pretrained` with `output_loading_info` for one rank's share; also return the plan.

    Args:
        settings: for `from_pretrained`.

    Raises:
        ModelError: the model cannot be sharded.
    """
    with torch.device("meta"):
        blank = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), attn_implementation=settings["attn_implementation"]
        )
    model_class: type[PreTrainedModel] = type(blank)
    share = _Share(plan_shards(blank, comm.rank, comm.size), folder)

    def init(self: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
        model_class.__init__(self, *args, **kwargs)
        share.expect(self)

    # A subclass sees the model before its weights are loaded.
    watched: Any = type(model_class.__name__, (model_class,), {"__init__": init, "__module__": model_class.__module__})
    with share.taken():
        module, loading = watched.from_pretrained(folder, config=config, output_loading_info=True, **settings)
    module.__class__ = model_class
    return module, loading, share.plan


class _Share:
    """Replaces weights by this rank's parts while they are registered with their modules."""

    def __init__(self, plan: ShardPlan, folder: str) -> None:
        self.plan = plan
        self._names: dict[tuple[nn.Module, str], tuple[str, torch.Size]] = {}
        self._taken: dict[int, nn.Parameter] = {}  # tied weights are registered again
        self._pages = MappedFiles(folder)

    def expect(self, model: PreTrainedModel) -> None:
        """Note the names and shapes of the model's weights before they are loaded."""
        for path, module in model.named_modules(remove_duplicate=False):
            for name, parameter in module.named_parameters(recurse=False):
                self._names[module, name] = (f"{path}.{name}", parameter.shape)

    @contextmanager
    def taken(self) -> Iterator[None]:
        take: Any = self._take  # torch's annotation lacks the return value
        hook = register_module_parameter_registration_hook(take)
        try:
            yield
        finally:
            hook.remove()
            self._names.clear()  # the subclass keeps a reference to this object
            self._taken.clear()

    def _take(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        """The parameter to register instead; `None` keeps the given one."""
        full_name, shape = self._names.get((module, name), ("", None))
        if parameter is None or parameter.is_meta or parameter.shape != shape or id(parameter) in self._taken:
            return None  # not loaded, or already the part
        cut = self.plan.cuts.get(full_name)
        weight = parameter.detach()
        taken = nn.Parameter(weight.clone() if cut is None else cut.of(weight), requires_grad=False)
        taken.__dict__.update(parameter.__dict__)  # transformers' mark that the weight needs no initialisation
        self._taken[id(taken)] = taken
        self._pages.note_read(weight.nbytes)
        return taken


def install_collectives(model: PreTrainedModel, plan: ShardPlan, comm: Communicator) -> None:
    """Add the plan's collectives to the modules; from then on all ranks run every forward together.

    Raises:
        ModelError: a module with a collective is missing.
    """
    head = model.get_output_embeddings()
    modules = _modules_by_first_path(model)
    for path, groups in plan.kv_groups.items():
        attention: Any = modules[path]
        attention.num_key_value_groups = groups
    for path, style in plan.styles.items():
        if style not in _COLLECTING:
            continue
        module = modules.get(path)
        if module is None:
            raise ModelError(f"{path} of {model.config.model_type} is not where its tensor-parallel plan says")
        if style in ("rowwise", "rowwise_rep", "moe_tp_experts", "all_reduce"):
            module.register_forward_hook(lambda _, __, output: comm.all_reduce(output))
        elif style == "rowwise_split_input":
            part = slice(*plan.spans[path][plan.rank])
            module.register_forward_pre_hook(lambda _, args, part=part: (args[0][..., part], *args[1:]))
            module.register_forward_hook(lambda _, __, output: comm.all_reduce(output))
        elif style in ("colwise_gather_output", "colwise_rep", "embedding_colwise"):
            sizes = [end - start for start, end in plan.spans[path]]
            collect = comm.gather if module is head else comm.all_gather  # rank 0 samples
            module.register_forward_hook(lambda _, __, output, sizes=sizes, collect=collect: collect(output, sizes))
        elif style == "embedding_rowwise":
            _look_up_part(module, *plan.spans[path][plan.rank], comm)
        elif style == "moe_identity_expert":
            module.register_forward_pre_hook(lambda _, args: (args[0] / plan.size, *args[1:]))


def _modules_by_first_path(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Modules by their paths at load time, before mixers were wrapped."""
    modules: dict[str, nn.Module] = {}
    wrapped: list[str] = []
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, PackedMixer):
            wrapped.append(path)
        modules[unwrapped(path, wrapped)] = module
    return modules


def _look_up_part(module: nn.Module, start: int, end: int, comm: Communicator) -> None:
    """Restrict an embedding to the tokens `start … end - 1`; other ranks have the others."""
    look_up = module.forward
    if isinstance(module, nn.Embedding):
        module.padding_idx = None  # for training only, and possibly outside of this part

    def forward(token_ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        elsewhere = (token_ids < start) | (token_ids >= end)
        rows = look_up((token_ids - start).masked_fill(elsewhere, 0), *args, **kwargs)
        return comm.all_reduce(rows.masked_fill(elsewhere[..., None], 0.0))

    module.forward = forward


class MappedFiles:
    """Releases mapped pages of a checkpoint's weights periodically; later reads come from the page cache. The pages
    must be clean.

    Args:
        model: the checkpoint's folder; nothing is released for a Hub id.
    """

    def __init__(self, model: str) -> None:
        self._files = {str(file.resolve()) for file in Path(model).glob("*.safetensors")}
        self._num_read = 0

    def note_read(self, num_bytes: int) -> None:
        self._num_read += num_bytes
        if self._num_read < _RELEASE_INTERVAL_BYTES:
            return
        self._num_read = 0
        for start, end in self._mapped():
            _libc.madvise(start, end - start, _MADV_DONTNEED)  # a failure only costs memory

    def _mapped(self) -> list[tuple[int, int]]:
        """(start, end) of each mapping of the files."""
        found = []
        for line in Path("/proc/self/maps").read_text().splitlines():
            addresses, _, _, _, _, *path = line.split(maxsplit=5)
            if path and path[0] in self._files:
                start, _, end = addresses.partition("-")
                found.append((int(start, 16), int(end, 16)))
        return found
