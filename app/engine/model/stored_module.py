"""Module whose tensors are in an arena: from the file of its weights if there is one, else from its checkpoint."""

from __future__ import annotations

import gc
import logging
import traceback
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from folio.app.config.engine import ResolvedConfig
from folio.app.engine.layers import recurrent
from folio.app.engine.layers.fusion_record import FusionRecord
from folio.app.engine.model.checkpoint_files import read_checkpoint
from folio.app.engine.model.checkpoint_module import MadeModule, empty_module, make_module, optimise
from folio.app.engine.model.pooling import Pooling
from folio.app.engine.model.tokenizer import one_line
from folio.app.errors import ModelError
from folio.app.models.weights.arena import ModelTensors, Skeleton, WeightArena, collect
from folio.app.models.weights.key import WeightKey, weight_key
from folio.app.models.weights.model_parts import fingerprint
from folio.app.models.weights.store import StoredFile, WeightStore

logger = logging.getLogger(__name__)


def stored_module(
    config: ResolvedConfig, hf_config: PreTrainedConfig, pooling: Pooling | None, weights: WeightStore
) -> tuple[MadeModule, WeightArena]:
    """The module with its tensors in an arena, before anything keeps their addresses. From its file if there is one."""
    pools = pooling is not None
    key = key_of(config, weights, pools=pools)

    def make() -> tuple[MadeModule, ModelTensors]:
        with ExitStack() as undo:
            taken = undo.enter_context(ExitStack())

            def room(num_bytes: int) -> None:
                taken.callback(weights.room_to_make(num_bytes))

            def build() -> tuple[MadeModule, ModelTensors]:
                made = make_module(config, hf_config, None, pooling, room=room)
                return made, collect(made.module, made.facts, taken.close)

            read_checkpoint(config)
            try:
                built = build()
            except BaseException as error:
                _forget_frames(error)  # their tensors hold the memory that `taken` gives back
                raise
            undo.pop_all()
            return built

    def again() -> ModelTensors:
        if key_of(config, weights, pools=pools) != key:
            raise ModelError(f"the checkpoint {config.model!r} has changed since it was loaded; load it again")
        return make()[1]

    if (found := weights.find(key)) is not None:
        opened: StoredFile | WeightArena | None = found
        try:
            made = _without_values(config, hf_config, found.header.facts)
            skeleton = Skeleton(made.module, found.header.table)
            opened = None  # `map` closes the file if it fails
            opened = arena = weights.map(key, found, again)
            skeleton.fill(arena.contents)
            return made, arena
        except BaseException as error:
            if opened is not None:
                opened.close()
            # Torch: an operation needs values, or a tensor cannot be swapped. The facts: another version wrote them.
            if not isinstance(error, ModelError | RuntimeError | KeyError | TypeError | AttributeError):
                raise
            logger.info("ignoring the weight file of %r, and loading its checkpoint: %s", config.model, error)
    made, tensors = make()
    try:
        before, key = key, key_of(config, weights, pools=pools)
        if key != before and Path(key.place["model"]).is_dir():
            raise ModelError(f"the checkpoint {config.model!r} has changed while it was loaded; load it again")
    except ModelError:
        tensors.drop()
        raise
    # A model of the Hub has been downloaded meanwhile: the key before was of fewer files.
    return made, weights.move(tensors, key, again)


def _forget_frames(error: BaseException) -> None:
    """Free the objects that the frames of an error's traceback, and of the errors that led to it, refer to."""
    errors: list[BaseException | None] = [error]
    for found in errors:  # which grows meanwhile
        if found is not None:
            traceback.clear_frames(found.__traceback__)
            errors += (other for other in (found.__cause__, found.__context__) if other not in errors)
    gc.collect()  # parts of a module may refer to each other


def key_of(config: ResolvedConfig, weights: WeightStore, *, pools: bool) -> WeightKey:
    try:
        return weight_key(config, weights.digests.of, pools=pools)
    except OSError as error:
        raise ModelError(f"cannot load {config.model!r}: {one_line(error)}") from error


def _without_values(config: ResolvedConfig, hf_config: PreTrainedConfig, facts: dict[str, Any]) -> MadeModule:
    """The module of a weight file, on torch's meta device. Raises `ModelError` if the file is of another one."""
    record = FusionRecord.known(facts["fused"])
    module: Any = empty_module(hf_config, getattr(torch, facts["dtype"]))
    if module.generation_config is not None:
        module.generation_config.eos_token_id = facts["eos_token_id"]
    recurrent_layers = recurrent.install(module)
    optimise(module, config, record, movable=True, packed=facts["packed"])
    if fingerprint(module) != facts["fingerprint"]:
        raise ModelError("its modules are not those of the file")
    return MadeModule(module, None, facts["generates"], recurrent_layers, record)
