"""Writes small GGUF files."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from folio.app.engine.layers.experts import PROJECTIONS, experts_of, projections_of

NUMBERS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q2_K": 10, "Q3_K": 11}
NUMBERS |= {"Q4_K": 12, "Q5_K": 13, "Q6_K": 14, "IQ2_XXS": 16, "IQ4_NL": 20, "IQ4_XS": 23, "BF16": 30, "MXFP4": 39}


class Tensor(NamedTuple):
    """`data` of the type `kind`; `shape` with the innermost size last."""

    kind: str | int
    shape: tuple[int, ...]
    data: bytes


def dense(values: torch.Tensor) -> Tensor:
    kind = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}[values.dtype]
    return Tensor(kind, tuple(values.shape), values.contiguous().view(torch.uint8).numpy().tobytes())


def gguf_bytes(
    settings: Mapping[str, Any], tensors: Mapping[str, Tensor], *, version: int = 3, order: str = "<", align: int = 32
) -> bytes:
    """Args: order: of bytes, as in `struct`."""

    def pack(layout: str, *values: Any) -> bytes:
        return struct.pack(order + layout, *values)

    def string(text: str) -> bytes:
        return pack("Q", len(data := text.encode())) + data

    def value(item: Any) -> tuple[int, bytes]:
        if isinstance(item, list | tuple):
            kinds = [value(each) for each in item]
            head = pack("IQ", kinds[0][0] if kinds else 8, len(item))
            return 9, head + b"".join(data for _, data in kinds)
        if isinstance(item, str):
            return 8, string(item)
        if isinstance(item, bool):
            return 7, pack("B", item)
        return (5, pack("i", item)) if isinstance(item, int) else (6, pack("f", item))

    out = b"GGUF" + pack("IQQ", version, len(tensors), len(settings))
    for name, item in settings.items():
        kind, data = value(item)
        out += string(name) + pack("I", kind) + data
    body = b""
    for name, tensor in tensors.items():
        number = NUMBERS.get(tensor.kind, tensor.kind) if isinstance(tensor.kind, str) else tensor.kind
        out += string(name) + pack(f"I{len(tensor.shape)}Q", len(tensor.shape), *reversed(tensor.shape))
        out += pack("IQ", number, len(body))
        body += tensor.data + bytes(-len(tensor.data) % align)
    return out + bytes(-len(out) % align) + body


def write_gguf(path: Path, settings: Mapping[str, Any], tensors: Mapping[str, Tensor], **options: Any) -> Path:
    path.write_bytes(gguf_bytes(settings, tensors, **options))
    return path


def split(
    folder: Path, parts: int, settings: dict[str, Any], tensors: dict[str, Tensor], name: str = "m"
) -> list[Path]:
    """A model in several files, as llama.cpp's program `gguf-split` writes it."""
    names, paths = list(tensors), []
    for part in range(parts):
        own = {key: tensors[key] for key in names[part::parts]}
        facts = {"split.no": part, "split.count": parts, "split.tensors.count": len(names)}
        path = folder / f"{name}-{part + 1:05}-of-{parts:05}.gguf"
        paths.append(write_gguf(path, (settings if part == 0 else {}) | facts, own))
    return paths


def byte_tokens(special: Sequence[str] = ("<bos>", "<eos>")) -> dict[str, Any]:
    """Settings of a tokenizer of all bytes and a few merges."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = list(bytes_to_unicode().values())
    tokens = [*special, *letters, "he", "ll", "hell", "hello", "Ġhello", "Ġ1"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(special) + [1] * (len(tokens) - len(special)),
        "tokenizer.ggml.merges": ["h e", "l l", "he ll", "hell o", "Ġ hello", "Ġ 1"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }


def tiny_llama(
    layers: int = 2, *, seed: int = 0, width: int = 96, **settings: Any
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Settings and tensors of a model with random weights, in bfloat16."""
    tokens = byte_tokens()
    count = len(tokens["tokenizer.ggml.tokens"])
    torch.manual_seed(seed)
    shapes = {"token_embd": (count, 64), "output_norm": (64,)}
    for layer in range(layers):
        for leaf, shape in {
            "attn_norm": (64,),
            "ffn_norm": (64,),
            "attn_q": (64, 64),
            "attn_k": (32, 64),
            "attn_v": (32, 64),
            "attn_output": (64, 64),
            "ffn_gate": (width, 64),
            "ffn_up": (width, 64),
            "ffn_down": (64, width),
        }.items():
            shapes[f"blk.{layer}.{leaf}"] = shape
    tensors = {
        f"{name}.weight": dense(torch.ones(shape) if len(shape) == 1 else torch.randn(shape).div(8).bfloat16())
        for name, shape in shapes.items()
    }
    facts = {
        "general.architecture": "llama",
        "llama.block_count": layers,
        "llama.context_length": 256,
        "llama.embedding_length": 64,
        "llama.feed_forward_length": width,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
    }
    return facts | tokens | settings, tensors


def together(weights: dict[str, Any], model: torch.nn.Module) -> dict[str, Any]:
    """Experts as transformers' modules have them."""
    found = {name: weight for name, weight in weights.items() if ".experts." not in name or name.endswith("_bias")}
    for path, module in experts_of(model):
        found.pop(f"{path}.up_proj_bias", None)
        for name in projections_of(module):
            rows = []
            for e in range(module.num_experts):
                parts = [weights[f"{path}.{e}.{part}.weight"] for part in PROJECTIONS[name]]
                one = torch.cat(parts) if module.is_concatenated else torch.stack(parts, 1).flatten(0, 1)
                rows.append(one.t() if module.is_transposed else one)
            found[f"{path}.{name}"] = torch.stack(rows)
    return found
