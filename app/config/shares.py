"""Shares of quantised weights: whether ranks can divide the inputs of a layer, whose groups have one scale."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from folio.app.config.checkpoint_sizes import read_header, text_config
from folio.app.config.quantised import LEAST_GROUP, read_scheme
from folio.app.models.gguf.architectures import parameters
from folio.app.models.gguf.files import read_gguf
from folio.app.models.gguf.folder import gguf_files
from folio.app.models.gguf.header import block_values

# Layers of which a rank has some inputs and all outputs.
_SPLIT_INPUTS = re.compile(r"\.self_attn\.o_proj$|\.(mlp|experts?|shared_experts?)(\.[\d*]+)?\.(down_proj|w2)$")
# What layers, and experts, have in common without it.
_NUMBERS = re.compile(r".*\.layers\.\d+\.|(?<=experts)\.[\d*]+")
# Endings that a quantised layer's tensors have besides `.weight`; MXFP4's of all experts.
_MARKS = (".qweight", ".weight_packed", ".weight_scale", ".weight_scale_inv", ".weight.absmax", "_blocks")


def share_faults(folder: Path, config: Mapping[str, Any], size: int) -> Iterator[str]:
    """Why `size` ranks cannot share the quantised weights of a checkpoint; sentences that follow their number.

    Raises:
        ValueError: of a checkpoint that has other faults.
        OSError: likewise.
    """
    quantization, text, files = config.get("quantization_config"), text_config(config), gguf_files(folder)
    scheme = None if quantization is None else read_scheme(quantization)
    if scheme is not None and scheme.group is not None and config["quantization_config"].get("desc_act"):
        reason = f"the inputs of {folder} are grouped by their activations (desc_act)"
        yield f"{reason}, which one rank can compute: use 1"
        return
    found = _of_gguf(files[0]) if files else () if scheme is None else _of_tensors(folder, text)
    layers = sorted({(_NUMBERS.sub("", name), inputs, group) for name, inputs, group in found})  # of all layers one
    if cut := [layer for layer in layers if not _can_share(layer, size)]:
        name, inputs, group = cut[0]
        heads = _integer(text, "num_attention_heads")
        fitting = [n for n in range(1, size) if heads % n == 0 and all(_can_share(layer, n) for layer in layers)]
        yield (
            f"it would cut groups of the {inputs} inputs of {name} in {files[0] if files else folder}, which have one "
            f"scale for each {group}: use {fitting[-1]}"
        )


def _can_share(layer: tuple[str, int, int], size: int) -> bool:
    _, inputs, group = layer
    return size == 1 or inputs % (size * group) == 0


def _of_gguf(file: Path) -> Iterator[tuple[str, int, int]]:
    """(name, inputs, inputs that cannot be divided) of each layer whose inputs ranks share."""
    for name, tensor, _ in parameters(read_gguf(file)):
        if _SPLIT_INPUTS.search(layer := name.removesuffix(".weight")):
            yield layer, tensor.shape[-1], block_values(tensor.kind)


def _of_tensors(folder: Path, config: Mapping[str, Any]) -> Iterator[tuple[str, int, int]]:
    """The same of a quantised checkpoint. Args: `config`: of the text model."""
    for file in folder.glob("*.safetensors"):
        for name in read_header(file):
            layer = next((name.removesuffix(mark) for mark in _MARKS if name.endswith(mark)), "")
            if _SPLIT_INPUTS.search(layer):
                yield layer, _inputs(layer, config), LEAST_GROUP


def _inputs(layer: str, config: Mapping[str, Any]) -> int:
    """Of one of `_SPLIT_INPUTS`."""
    heads, width = _integer(config, "num_attention_heads"), _integer(config, "hidden_size")
    if layer.endswith("o_proj"):
        return heads * (_integer(config, "v_head_dim") or _integer(config, "head_dim") or width // max(heads, 1))
    inputs, of_expert = (_integer(config, name) for name in ("intermediate_size", "moe_intermediate_size"))
    if ".shared_expert" in layer:
        return _integer(config, "shared_expert_intermediate_size") or of_expert * _integer(config, "n_shared_experts")
    return of_expert or inputs if ".experts." in layer else inputs


def _integer(config: Mapping[str, Any], name: str) -> int:
    """A size; 0 if it is missing, or differs by layer."""
    return value if isinstance(value := config.get(name), int) else 0
