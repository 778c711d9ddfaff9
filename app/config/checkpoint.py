"""Faults of a checkpoint's folder, found in the headers of its files, without torch and without reading weights."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from folio.app.config.checkpoint_sizes import read_header, shape_faults, size_faults, text_config
from folio.app.config.quantised import READ, READ_AS_BFLOAT16, UnreadError, expert_fault, read_scheme
from folio.app.config.shares import share_faults
from folio.app.errors import ModelError
from folio.app.models.chat_template.template import ChatTemplate
from folio.app.models.gguf.folder import gguf_files
from folio.app.models.gguf.hub import is_hub_file
from folio.app.models.gguf.names import resolve_gguf
from folio.app.models.named import NAMED, missing_fault

# Names of transformers' tables of model types.
_CAUSAL, _MASKED, _SEQ2SEQ = "CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM"
_INDEX = "model.safetensors.index.json"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tekken.json")
_LFS_POINTER = b"version https://git-lfs"
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_READ = "Folio reads safetensors in float32, bfloat16 and float16"


def name_fault(model: str) -> str | None:
    """Why a name that is no folder, and no GGUF file that can be read, cannot be a Hub id either; `None` if it can."""
    if model in NAMED:
        return missing_fault(model)
    if os.path.exists(model):  # False for a name that is too long, where Path raises
        try:
            resolve_gguf(model)
        except ModelError as error:
            return str(error)
        return "it is a file, and must be GGUF, a folder with config.json, or a Hub id"
    if is_hub_file(model):
        return None
    if model.lower().endswith(".gguf"):  # as of a file, though a Hub id could end so
        return "no such file exists"
    if _HUB_ID.fullmatch(model) and not model.startswith((".", "/", "~")):
        return None
    return "no such folder exists, and a Hub id has the form name or owner/name"


def quantization_fault(quantization: object) -> str | None:
    """Why weights with this `quantization_config` cannot be read; `None` if they can, or have none."""
    if quantization is None:
        return None
    try:
        read_scheme(quantization)
    except UnreadError as unread:
        return (
            f"its weights are quantized by {unread.kind} (quantization_config), which is not read yet: {_READ}, and of "
            f"quantized ones {READ}; use the model that it was made from, on CPUs with quantization int8 for 8 bits"
        )
    except ValueError as error:
        return f"its quantization_config is damaged: {error}"
    return None


def format_fault(folder: Path) -> str | None:
    """Why the GGUF file or the quantized weights of a folder cannot be read; `None` if they can, or there are none."""
    path = folder / "config.json"
    try:
        resolve_gguf(str(folder))
    except ModelError as error:
        return str(error)
    try:
        fault = quantization_fault(_json(path).get("quantization_config"))
    except ValueError:
        return None  # a fault of `checkpoint_faults`
    return None if fault is None else f"{path}: {fault}"


def checkpoint_faults(folder: Path, *, weights: bool = True) -> Iterator[str]:
    """A sentence for each fault that would make loading fail or outputs wrong; each names its file.

    Args:
        weights: check the weights, too.
    """
    if (fault := format_fault(folder)) is not None:
        yield fault
        return
    folder = Path(resolve_gguf(str(folder)) or folder)
    try:
        config = _json(folder / "config.json")
    except ValueError as error:
        yield str(error)
    else:
        yield from _architecture_faults(folder, config)
        yield from size_faults(config, folder / "config.json")
        yield from _tokenizer_faults(folder, text_config(config).get("vocab_size"))
    yield from _template_faults(folder)
    if weights:
        yield from weight_faults(folder)


def rank_faults(folder: Path, tensor_parallel_size: int) -> Iterator[str]:
    """Why the model cannot be divided among the ranks: no head is cut, and no group of inputs with one scale; several
    ranks may have the same KV head."""
    try:
        config = _json(folder / "config.json")
    except ValueError:
        return  # a fault of `checkpoint_faults`
    if any(size_faults(config, "")):
        return  # likewise
    query, key_value = (text_config(config).get(name) for name in ("num_attention_heads", "num_key_value_heads"))
    model = next(iter(gguf_files(folder)), folder)
    if isinstance(query, int) and query % tensor_parallel_size:
        yield f"it must divide the {query} attention heads of {model}"
    elif isinstance(key_value, int) and min(key_value % tensor_parallel_size, tensor_parallel_size % key_value):
        yield f"it must divide the {key_value} KV heads of {model}, or be a multiple of their number"
    elif tensor_parallel_size > 1:
        with suppress(ValueError, OSError):  # faults of `checkpoint_faults`
            yield from share_faults(folder, config, tensor_parallel_size)


def weight_bytes(folder: Path) -> int:
    """Bytes of the weights in a checkpoint's files of safetensors or GGUF; 0 if it has none."""
    patterns = ("model.safetensors", "*.safetensors", "*.gguf")
    found = (tuple(folder.glob(pattern)) for pattern in patterns)
    files = gguf_files(folder) or next((files for files in found if files), ())
    return sum(file.stat().st_size for file in files)


def _json(path: Path) -> dict[str, Any]:
    """A file's JSON object. Raises `ValueError` with a sentence for the user if there is none."""
    if not path.is_file():  # a FIFO would be waited for
        inside = sorted(entry.name for entry in path.parent.iterdir())[:5]
        raise ValueError(f"{str(path.parent)!r} has no {path.name}: it has {', '.join(inside) or 'no files at all'}")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} is a JSON {type(value).__name__}; it must be an object")
    return value


def _architecture_faults(folder: Path, config: Mapping[str, Any]) -> Iterator[str]:
    path, kind = folder / "config.json", config.get("model_type")
    if not isinstance(kind, str):
        yield f"{path} has no model_type; the architecture is unknown"
        return
    if config.get("is_encoder_decoder", kind in _model_types(_SEQ2SEQ)):
        yield f"{path}: {kind} is an encoder-decoder model; Folio serves text-generating decoders only"
    elif kind in _model_types(_MASKED) and not config.get("is_decoder", False):
        yield f"{path}: {kind} is an encoder; Folio serves text-generating decoders only"
    elif not {kind, text_config(config).get("model_type")} & _model_types(_CAUSAL):
        yield f"{path}: {kind} is no text-generating decoder that transformers {_transformers()[1]} knows"


def _model_types(table: str) -> frozenset[str]:
    return _transformers()[0][table]


@cache
def _transformers() -> tuple[Mapping[str, frozenset[str]], str]:
    """Model types of transformers' tables, and its version, from its source, because importing it takes seconds.

    Raises:
        LookupError: this version of transformers has no such tables.
    """
    spec = find_spec("transformers")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).parent / "models" / "auto" / "modeling_auto.py"
    found = {}
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Call):
            name = node.targets[0].id.removeprefix("MODEL_FOR_").removesuffix("_MAPPING_NAMES")
            if name in (_CAUSAL, _MASKED, _SEQ2SEQ):
                found[name] = frozenset(dict(ast.literal_eval(node.value.args[0])))
    if len(found) < 3:
        raise LookupError(f"{source} lacks the tables of model types")
    return found, importlib.metadata.version("transformers")


def _tokenizer_faults(folder: Path, vocab_size: object) -> Iterator[str]:
    path = folder / "tokenizer.json"
    if not path.is_file():
        if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
            yield f"{str(folder)!r} has no tokenizer: none of {', '.join(_TOKENIZER_FILES)}"
        return
    try:
        ids = _ids_of_text(_json(path))
    except ValueError as error:
        yield str(error)
        return
    except (AttributeError, LookupError, TypeError) as error:
        yield f"{path} is no file of the tokenizers library: {type(error).__name__}: {error}"
        return
    if isinstance(vocab_size, int) and ids and (most := max(ids.values())) >= vocab_size:
        beyond = sum(token_id >= vocab_size for token_id in ids.values())
        yield (
            f"{path} has token ids up to {most}, {beyond} of them beyond the vocab_size in config.json, {vocab_size}: "
            "it is another model's tokenizer"
        )


def _ids_of_text(content: Mapping[str, Any]) -> dict[str, int]:
    """Ids of the tokens that text can become. A text model may lack special tokens, such as those of images."""
    vocabulary = (content["model"]).get("vocab") or {}
    ids = dict(vocabulary) if isinstance(vocabulary, dict) else {piece[0]: i for i, piece in enumerate(vocabulary)}
    for token in content.get("added_tokens") or ():
        if token.get("special"):
            ids.pop(token["content"], None)
        else:
            ids[token["content"]] = token["id"]
    return ids


def _template_faults(folder: Path) -> Iterator[str]:
    """Faults of the chat templates, by rendering small conversations."""
    settings = folder / "tokenizer_config.json"
    try:
        config = _json(settings) if settings.is_file() else {}
    except ValueError as error:
        yield str(error)
        return
    given = config.get("chat_template")
    named = {one.get("name"): one.get("template") for one in given} if isinstance(given, list) else {"default": given}
    found = {name: (settings, source) for name, source in named.items()}
    # As in transformers, a file of its own comes first.
    for path in (folder / "chat_template.jinja", *sorted((folder / "additional_chat_templates").glob("*.jinja"))):
        if path.is_file():
            name = "default" if path.parent == folder else path.stem
            found[name] = path, path.read_text(encoding="utf-8", errors="replace")
    tokens = {name: value for name, value in config.items() if name.endswith("_token")}
    tokens = {name: value.get("content") if isinstance(value, dict) else value for name, value in tokens.items()}
    for path, source in found.values():
        if source is not None and (fault := ChatTemplate(str(source), tokens).fault) is not None:
            yield f"{path}: the chat template cannot be used: {fault}"


def _shapes_in(files: Iterable[Path]) -> dict[str, tuple[int, ...]]:
    """Tensor → its shape. Raises `ValueError` for a file that has none."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        if _starts_with(file, _LFS_POINTER):
            raise ValueError(f"{file} is a Git LFS pointer and not the file itself: run `git lfs pull` in its folder")
        shapes |= {name: shape for name, (shape, _) in read_header(file).items()}
    return shapes


def weight_faults(folder: Path) -> Iterator[str]:
    """A sentence for each fault of a checkpoint's weights: missing, damaged, or not those of its config."""
    if gguf_files(folder):
        return  # there is no folder of damaged ones
    files, index = sorted(file for file in folder.glob("*.safetensors") if file.is_file()), folder / _INDEX
    if (single := folder / "model.safetensors").is_file():  # preferred by transformers
        files = [single]
    elif index.is_file():
        try:
            names = sorted({str(name) for name in _json(index)["weight_map"].values()})
        except (ValueError, KeyError, AttributeError) as error:
            yield str(error) if isinstance(error, ValueError) else f"{index} has no weight_map"
            return
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            yield f"{index} names {len(missing)} of {len(names)} files that are not there: {', '.join(missing[:5])}"
        files = [folder / name for name in names if name not in missing]
    elif not files and not any(folder.glob("pytorch_model*.bin")):
        yield f"{str(folder)!r} has no weights: neither model.safetensors nor {_INDEX}"
    try:
        shapes = _shapes_in(files)
    except ValueError as error:
        yield str(error)
        return
    with suppress(ValueError):  # a fault of `checkpoint_faults`
        config = _json(folder / "config.json")
        yield from shape_faults(config, shapes, folder / "config.json")
        yield from _expert_faults(folder, config.get("quantization_config"), shapes)


def _expert_faults(folder: Path, quantization: object, names: Iterable[str]) -> Iterator[str]:
    scheme = None if quantization is None else read_scheme(quantization)
    if scheme is not None and scheme.method not in READ_AS_BFLOAT16:
        fault = expert_fault(scheme.method, names)
        if fault is not None:
            yield f"{folder}: {fault}"


def _starts_with(path: Path, magic: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(magic)) == magic
