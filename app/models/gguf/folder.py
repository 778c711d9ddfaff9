"""Folder of a GGUF model's metadata: config and tokenizer in the usual files, and a file that names the GGUF files.

Made once for a file and its header, beside the stored weights; a later process takes it as it is.
"""

from __future__ import annotations

import glob
import hashlib
import json
import logging
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from folio.app import VERSION
from folio.app.models.gguf.architectures import parameters
from folio.app.models.gguf.config import model_config
from folio.app.models.gguf.header import GgufHeader
from folio.app.models.gguf.settings import Settings
from folio.app.models.gguf.tokenizer import GgufTokenizer

logger = logging.getLogger(__name__)

FILES = "gguf.json"
# Changes with the contents of the folders.
_FORM = 2
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_LAYER = re.compile(r"model\.layers\.\d+\.")
_SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}


def gguf_files(folder: Path) -> tuple[Path, ...]:
    """The GGUF files that a folder of metadata stands for; none if it is another folder."""
    path = folder / FILES
    return tuple(map(Path, json.loads(path.read_bytes())["files"])) if path.is_file() else ()


def packed_bytes(folder: Path) -> int | None:
    """Bytes of the tensors in the GGUF files of a folder of metadata; `None` for another folder."""
    path = folder / FILES
    return int(json.loads(path.read_bytes())["num_bytes"]) if path.is_file() else None


def metadata_folder(header: GgufHeader, parents: Iterable[Path]) -> Path:
    """The folder of a model, made if it is missing.

    Args:
        header: of files by absolute paths.
        parents: places for it, made if they are missing; the first one that this user alone can write to has it.

    Raises:
        ValueError: the model cannot be served, with a sentence for the user.
    """
    files = [str(file) for file in header.files]
    name = f"{header.files[0].stem[-60:].lstrip('.-')}-{_digest(files)}-"
    reasons = []
    for parent in parents:
        folder = parent / f"{name}{_digest([header.digest, VERSION, _FORM])}"
        try:
            parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = parent.stat()
            if found.st_uid != os.geteuid() or found.st_mode & _OTHERS_WRITE:
                reasons.append(f"{parent}: others could change it")
                continue
            if not folder.is_dir():
                _publish(header, files, folder)
                for outdated in set(parent.glob(f"{glob.escape(name)}*")) - {folder}:
                    shutil.rmtree(outdated, ignore_errors=True)
            return folder
        except OSError as error:
            reasons.append(f"{parent}: {error.strerror}")
    raise ValueError(f"{files[0]}: there is no place for its tokenizer: {'; '.join(reasons)}; set XDG_CACHE_HOME")


def _digest(value: list[Any]) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def _publish(header: GgufHeader, files: list[str], folder: Path) -> None:
    """Write the folder, all of it or nothing. Another process may do so at the same time."""
    start = time.monotonic()
    unfinished = Path(tempfile.mkdtemp(prefix=".", dir=folder.parent))
    try:
        for name, document in _documents(header, files).items():
            with (unfinished / name).open("x", encoding="utf-8") as file:
                file.write(json.dumps(document, ensure_ascii=False))
                file.flush()
                os.fsync(file.fileno())
        with suppress(FileExistsError):  # ENOTEMPTY is another OSError
            unfinished.rename(folder)
        logger.info("wrote config and tokenizer of %s to %s in %.1f s", files[0], folder, time.monotonic() - start)
    except OSError:
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _documents(header: GgufHeader, files: list[str]) -> dict[str, dict[str, Any]]:
    config = model_config(header)
    _check_parameters(header, config)
    tokenizer = GgufTokenizer(header)
    settings = Settings(header, "general")
    generation: dict[str, Any] = {"eos_token_id": tokenizer.ends or None}
    for name, kind in _SAMPLING.items():
        if settings.has(f"general.sampling.{name}"):
            read = settings.integer if kind == "top_k" else settings.number
            generation |= {"do_sample": True, kind: read(f"general.sampling.{name}")}
    return {
        "config.json": config,
        "generation_config.json": generation,
        "tokenizer.json": tokenizer.document(),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": config["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
            "add_bos_token": tokenizer.adds_bos,
            **tokenizer.special,
            **_templates(settings, tokenizer),
        },
        FILES: {"files": files, "num_bytes": header.num_bytes},
    }


def _check_parameters(header: GgufHeader, config: dict[str, Any]) -> None:
    found, shapes = set[str](), _shapes(config)
    for name, tensor, _ in parameters(header):
        found.add(".".join(name.split(".", 3)[:3]))
        expected = shapes.get(_LAYER.sub("", name), tensor.shape)
        if tensor.shape != expected:
            raise ValueError(
                f"{tensor.file} has the tensor {tensor.name!r} of the shape {list(tensor.shape)}, and by its settings "
                f"it must be {list(expected)}"
            )
    for layer in range(config["num_hidden_layers"]):
        if f"model.layers.{layer}" not in found:
            raise ValueError(
                f"{header.files[0]} has {config['num_hidden_layers']} layers, and no tensors of blk.{layer}"
            )


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Shapes of matrices by their names, those of layers without the layer."""
    width, inner, head_dim = (config[name] for name in ("hidden_size", "intermediate_size", "head_dim"))
    query, shared = (config[f"num_{kind}_heads"] * head_dim for kind in ("attention", "key_value"))
    outputs = {"q_proj": query, "k_proj": shared, "v_proj": shared, "qkv_proj": query + 2 * shared}
    return {
        "model.embed_tokens.weight": (config["vocab_size"], width),
        "self_attn.o_proj.weight": (width, query),
        "mlp.down_proj.weight": (width, inner),
        **{f"self_attn.{name}.weight": (size, width) for name, size in outputs.items()},
        **{f"mlp.{name}.weight": (inner, width) for name in ("gate_proj", "up_proj")},
        "mlp.gate_up_proj.weight": (2 * inner, width),
    }


def _templates(settings: Settings, tokenizer: GgufTokenizer) -> dict[str, Any]:
    """The chat templates; a text of theirs begins with BOS, once, if other texts do."""
    names = [None, *settings.items("tokenizer.chat_templates", str)]
    found = {}
    for name in names:
        key = "tokenizer.chat_template" + (f".{name}" if name else "")
        if settings.has(key):
            source, bos = settings.text(key), tokenizer.special.get("bos_token")
            if tokenizer.adds_bos and bos is not None and "bos_token" not in source and bos not in source:
                source = "{{ bos_token }}" + source
            found[name or "default"] = source
    if not found:
        return {}
    if set(found) == {"default"}:
        return {"chat_template": found["default"]}
    return {"chat_template": [{"name": name, "template": source} for name, source in found.items()]}
