"""Sizes in a checkpoint's `config.json`, checked against bounds and the weights before a module is built: one of
200,000 layers takes minutes, and transformers names no tensor that is too small for the config."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias, TypeGuard

from safetensors import SafetensorError, safe_open

# Tensor of a safetensors file → its shape, and where its bytes end in the file.
Header: TypeAlias = Mapping[str, tuple[tuple[int, ...], int]]

_LAYERS, _VOCAB = ("num_hidden_layers", "n_layer", "n_layers"), "vocab_size"
_WIDTHS = ("hidden_size", "n_embd", "d_model")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
# Least and most; the most is far above any model, and far below what takes long to build.
_BOUNDS: dict[str, tuple[int, int]] = {
    **dict.fromkeys(_LAYERS, (1, 2048)),
    _VOCAB: (1, 1 << 24),
    **dict.fromkeys(_WIDTHS, (1, 1 << 18)),
    **dict.fromkeys((*_HEADS, "num_key_value_heads"), (1, 1 << 14)),
    "head_dim": (1, 1 << 14),
    "intermediate_size": (0, 1 << 22),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), (0, 1 << 14)),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), (1, 1 << 31)),
}
# Names of input embeddings, whose first dimension is the vocabulary, and the second one the width; and of output ones.
_EMBEDDINGS = re.compile(r"(?:^|\.)(?:embed_tokens|wte|word_embeddings|embed_in)\.weight$")
_OUTPUTS = re.compile(r"(?:^|\.)(?:lm_head|embed_out)\.weight$")
# Widths of embeddings that a projection follows.
_OWN_WIDTHS = ("word_embed_proj_dim", "embedding_size", "embed_dim")
_LAYER = re.compile(r"^(.*?\b(?:layers|h|blocks))\.(\d+)\.")
_START = struct.Struct("<Q")


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config that describes the text model."""
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def size_faults(config: Mapping[str, Any], path: str | Path) -> Iterator[str]:
    """A sentence for each size in a config that no model can have. Args: `path`: of the config, for the sentence."""
    text = config.get("text_config")
    if text is not None and not isinstance(text, dict):
        yield f"{path}: text_config is {_show(text)}; it must be an object"
    text = text_config(config)
    for name, (least, most) in _BOUNDS.items():
        values = text.get(name)
        for value in values if isinstance(values, list) else () if values is None else (values,):
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
                yield f"{path}: {name} is {_show(value)}; it must be an integer from {least} to {most}"
                break
    heads, shared = (text.get(name) for name in ("num_attention_heads", "num_key_value_heads"))
    if _is_size(heads) and _is_size(shared) and heads % shared:
        yield f"{path}: num_attention_heads is {heads}; it must be a multiple of num_key_value_heads, {shared}"


def shape_faults(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], path: Path) -> Iterator[str]:
    """Tensors of the weights that are missing or of another shape than the config says. Args: `path`: see
    `size_faults`."""
    text = text_config(config)
    vocab, width = text.get(_VOCAB), next((text[name] for name in _WIDTHS if name in text), None)
    projected = any(name in text for name in _OWN_WIDTHS)
    for name, shape in shapes.items():
        if len(shape) != 2 or not (_EMBEDDINGS.search(name) or _OUTPUTS.search(name)):
            continue
        if _is_size(vocab) and shape[0] != vocab:
            yield f"{path}: vocab_size is {vocab}, but the tensor {name} has the shape {list(shape)}"
        elif _is_size(width) and shape[1] != width and _EMBEDDINGS.search(name) and not projected:
            yield f"{path}: the hidden size is {width}, but the tensor {name} has the shape {list(shape)}"
    yield from _layer_faults(text, shapes, path)


def _layer_faults(text: Mapping[str, Any], shapes: Iterable[str], path: Path) -> Iterator[str]:
    numbers: dict[str, set[int]] = {}
    for name in shapes:
        if (found := _LAYER.match(name)) is not None:
            numbers.setdefault(found[1], set()).add(int(found[2]))
    count = next((text[name] for name in _LAYERS if name in text), None)
    if numbers and _is_size(count) and all(max(found) < count - 1 for found in numbers.values()):
        stack = max(numbers, key=lambda stack: len(numbers[stack]))
        first = next(i for i in range(count) if i not in numbers[stack])
        yield f"{path}: the number of layers is {count}, but no tensor begins with {stack}.{first}"


def read_header(path: Path) -> Header:
    """The tensors of a safetensors file.

    Raises:
        ValueError: with a sentence; the file is truncated or damaged.
        OSError: it cannot be read.
    """
    size = path.stat().st_size
    try:
        # This checks the header: offsets, shapes and the file's size.
        with safe_open(path, framework="numpy", backend="pread"):
            pass
    except SafetensorError as error:
        reason = _truncation(path, size) or error
        raise ValueError(f"{path} has {size} bytes and is truncated or damaged ({reason}); copy it again") from None
    return _parse(path)


def _truncation(path: Path, size: int) -> str | None:
    """Where a truncated file ends; `None` if it has another fault."""
    try:
        header = _parse(path)
        missing = [name for name, (_, end) in header.items() if end > size]
        if missing:
            first = min(missing, key=lambda name: header[name][1])
            return f"{len(missing)} of its {len(header)} tensors end beyond it, {first} is the first one"
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError, struct.error):
        pass
    return None


def _parse(path: Path) -> Header:
    with path.open("rb") as file:
        (length,) = _START.unpack(file.read(_START.size))
        if length > path.stat().st_size:
            raise ValueError("the header ends beyond the file")
        content = json.loads(file.read(length))
    start = _START.size + length
    return {
        name: (tuple(tensor["shape"]), start + tensor["data_offsets"][1])
        for name, tensor in content.items()
        if name != "__metadata__"
    }


def _is_size(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _show(value: object) -> str:
    return json.dumps(value)[:40]
