"""Context length of a checkpoint, from its config alone. Imports no torch: an ingress needs it, too."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from huggingface_hub.errors import StrictDataclassError

from folio.app.config.checkpoint import quantization_fault
from folio.app.config.checkpoint_sizes import size_faults
from folio.app.engine.model.tokenizer import one_line
from folio.app.errors import ModelError
from folio.app.models.builtin import resolve_model
from folio.app.models.named import NAMED, missing_fault

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

logger = logging.getLogger(__name__)

# Ropes whose frequencies depend on the length of the text; a packed batch has no single length.
LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}
DEFAULT_CONTEXT = 2048
# What transformers raises for a file that is missing, is not JSON, or has values of other types.
_NO_CONFIG = (OSError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError, StrictDataclassError)
_SAMPLING = ("temperature", "top_p", "top_k", "min_p")


def context_length(config: PreTrainedConfig) -> int:
    """The longest context within the model's positions for which the rope does not depend on the length."""
    text_config = config.get_text_config()
    longest: int = getattr(text_config, "max_position_embeddings", None) or DEFAULT_CONTEXT
    for rope in _rope_parameters(text_config):
        if rope.get("rope_type") in LENGTH_DEPENDENT_ROPE:
            original = rope.get("original_max_position_embeddings") or getattr(
                text_config, "original_max_position_embeddings", None
            )
            longest = min(longest, original or longest)
            logger.warning("rope %r depends on the length: the context is limited to %d", rope["rope_type"], longest)
    return longest


def read_config(model: str) -> PreTrainedConfig:
    """The model's config. Raises `ModelError` if it is not found, or describes no model."""
    from transformers import AutoConfig, PreTrainedConfig  # not with this module, for `imported_without_torch`

    if (fault := missing_fault(model)) is not None:
        raise ModelError(f"cannot load {model!r}: {fault}")
    folder = resolve_model(model)
    try:
        found, _ = PreTrainedConfig.get_config_dict(folder)
        if faults := list(size_faults(found, "config.json")):  # before lists of as many items are made
            raise ModelError(f"cannot load {model!r}: {'; '.join(faults)}")
        config = AutoConfig.from_pretrained(folder)
    except _NO_CONFIG as error:
        raise ModelError(f"cannot load {model!r}: {one_line(error)}") from error
    if (fault := quantization_fault(getattr(config, "quantization_config", None))) is not None:
        raise ModelError(f"cannot load {model!r}: {fault}")
    return config


def sampling_defaults(model: str) -> dict[str, float] | None:
    """Temperature, top-p, top-k and min-p of a model's `generation_config.json`, or of Folio's table of named models;
    `None` if it has none of them."""
    from transformers import GenerationConfig  # not with this module, for `imported_without_torch`

    if model in NAMED:
        return dict(NAMED[model].sampling) or None
    try:
        settings = GenerationConfig.from_pretrained(resolve_model(model)).to_diff_dict()
    except (OSError, ValueError, TypeError, AttributeError) as error:  # there is none, or it is damaged
        logger.debug("generation_config.json of %r: %s", model, one_line(error))
        return None
    found = {name: settings[name] for name in _SAMPLING if isinstance(settings.get(name), int | float)}
    return found or None


def _rope_parameters(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """Parameters of every rope: one for all layers, or one for each layer type."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return [rope, *(value for value in rope.values() if isinstance(value, dict))]
