"""A rank's share of a model: only its part of the weights is loaded, and forwards add up what the ranks have.

transformers loads, renames and merges the weights of a checkpoint and registers each with its module. At that moment
the rank's part, a copy, takes its place. The whole weight was only mapped from the file, and its pages are let go of,
so that the peak of a rank's memory is near its share; unless weights have to be converted to another dtype: that is
done before.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from app.engine.recurrent import PackedMixer
from app.engine.tensor_parallel.communicator import Communicator
from app.engine.tensor_parallel.mapped_files import MappedFiles
from app.engine.tensor_parallel.plan import ShardPlan, plan_shards
from app.errors import ModelError

# Styles whose forwards collect something; the others need nothing but their part of the weights.
_COLLECTING = {"rowwise", "rowwise_rep", "rowwise_split_input", "moe_tp_experts", "all_reduce", "moe_identity_expert"}
_COLLECTING |= {"colwise_gather_output", "colwise_rep", "embedding_rowwise", "embedding_colwise"}


def load_share(
    folder: str, config: PreTrainedConfig, comm: Communicator, **settings: Any
) -> tuple[PreTrainedModel, dict[str, Any], ShardPlan]:
    """Like `from_pretrained` with `output_loading_info`, but for one rank's share, which is returned, too.

    Args:
        settings: for `from_pretrained`.

    Raises:
        ModelError: the ranks cannot share the model.
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

    # Only a class of its own sees the model before its weights come.
    watched: Any = type(model_class.__name__, (model_class,), {"__init__": init, "__module__": model_class.__module__})
    with share.taken():
        module, loading = watched.from_pretrained(folder, config=config, output_loading_info=True, **settings)
    module.__class__ = model_class
    return module, loading, share.plan


class _Share:
    """Cuts the weights of one model while they are registered with its modules."""

    def __init__(self, plan: ShardPlan, folder: str) -> None:
        self.plan = plan
        self._names: dict[tuple[nn.Module, str], tuple[str, torch.Size]] = {}
        self._taken: dict[int, nn.Parameter] = {}  # tied weights are registered again
        self._pages = MappedFiles(folder)

    def expect(self, model: PreTrainedModel) -> None:
        """The model's weights are going to come."""
        for path, module in model.named_modules(remove_duplicate=False):
            for name, parameter in module.named_parameters(recurse=False):
                self._names[module, name] = (f"{path}.{name}", parameter.shape)

    @contextmanager
    def taken(self) -> Iterator[None]:
        take: Any = self._take  # torch's annotation does not know that it may return something
        hook = register_module_parameter_registration_hook(take)
        try:
            yield
        finally:
            hook.remove()
            self._names.clear()  # the class that knows this lives on for a while, and weights are replaced soon
            self._taken.clear()

    def _take(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        """What is registered instead, `None` for the parameter itself."""
        full_name, shape = self._names.get((module, name), ("", None))
        if parameter is None or parameter.is_meta or parameter.shape != shape or id(parameter) in self._taken:
            return None  # no weights, or its part already
        cut = self.plan.cuts.get(full_name)
        weight = parameter.detach()
        taken = nn.Parameter(weight.clone() if cut is None else cut.of(weight), requires_grad=False)
        taken.__dict__.update(parameter.__dict__)  # the loader's note that it need not be initialised
        self._taken[id(taken)] = taken
        self._pages.note_read(weight.nbytes)
        return taken


def install_collectives(model: PreTrainedModel, plan: ShardPlan, comm: Communicator) -> None:
    """Let forwards collect what the other ranks have. After this every forward is one of all ranks.

    Raises:
        ModelError: a module whose results have to be collected was replaced by something else.
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
            _sum_output(module, comm)
        elif style == "rowwise_split_input":
            _split_input(module, *plan.spans[path][plan.rank])
            _sum_output(module, comm)
        elif style in ("colwise_gather_output", "colwise_rep", "embedding_colwise"):
            sizes = [end - start for start, end in plan.spans[path]]
            _collect_output(module, sizes, comm, on_first_rank_only=module is head)
        elif style == "embedding_rowwise":
            _look_up_part(module, *plan.spans[path][plan.rank], comm)
        elif style == "moe_identity_expert":
            module.register_forward_pre_hook(lambda _, args: (args[0] / plan.size, *args[1:]))


def _modules_by_first_path(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Modules by the paths that they had when the model was loaded: mixers are wrapped since."""
    modules: dict[str, nn.Module] = {}
    wrapped: list[str] = []
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, PackedMixer):
            wrapped.append(path)
        first = path
        for wrapper in wrapped:
            if f"{path}.".startswith(f"{wrapper}.mixer."):
                first = wrapper + path[len(wrapper) + len(".mixer") :]
        modules[first] = module
    return modules


def _sum_output(module: nn.Module, comm: Communicator) -> None:
    module.register_forward_hook(lambda _, __, output: comm.all_reduce(output))


def _split_input(module: nn.Module, start: int, end: int) -> None:
    module.register_forward_pre_hook(lambda _, args: (args[0][..., start:end], *args[1:]))


def _collect_output(module: nn.Module, sizes: list[int], comm: Communicator, *, on_first_rank_only: bool) -> None:
    if on_first_rank_only:  # it samples
        module.register_forward_hook(lambda _, __, output: comm.gather(output, sizes))
    else:
        module.register_forward_hook(lambda _, __, output: comm.all_gather(output, sizes))


def _look_up_part(module: nn.Module, start: int, end: int, comm: Communicator) -> None:
    """An embedding of the tokens `start … end - 1`, the others are another rank's."""
    look_up = module.forward
    if isinstance(module, nn.Embedding):
        module.padding_idx = None  # for training, and perhaps not in this part

    def forward(token_ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        elsewhere = (token_ids < start) | (token_ids >= end)
        rows = look_up((token_ids - start).masked_fill(elsewhere, 0), *args, **kwargs)
        return comm.all_reduce(rows.masked_fill(elsewhere[..., None], 0.0))

    module.forward = forward
