"""Tables of docs/operate/gpu-sizing.md: what fits on GPUs, by the planner of `folio plan`."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from folio.app.cli.plan import choose_target, plan_figures
from folio.app.config.engine import EngineConfig
from folio.app.config.sizes import show_size
from folio.app.engine.memory.size import ModelSize

PAGE = Path(__file__).parents[1] / "docs" / "operate" / "gpu-sizing.md"
NUM_TOKENS = 4096
_COMMON: dict[str, Any] = {
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "dtype": "bfloat16",
}
# Those of Llama 3.1.
SHAPES: dict[str, dict[str, Any]] = {
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
}
# Model, device, ranks, dtype of the cache.
ROWS = (
    ("8B", "l4", 1, "fp8_e4m3"),
    ("8B", "l4", 2, "auto"),
    ("8B", "a100-40", 1, "auto"),
    ("8B", "h100", 1, "auto"),
    ("8B", "h200", 1, "auto"),
    ("70B", "h200", 2, "auto"),
    ("70B", "h100", 4, "auto"),
    ("70B", "h200", 4, "auto"),
    ("70B", "h100", 8, "auto"),
)
SHARED = (("8B", "h100"), ("8B", "h200"))


def sizing_page() -> str:
    """The page with its tables renewed: a page is its own template."""
    text = PAGE.read_text(encoding="utf-8")
    for name, lines in (("models", _models()), ("replicas", _replicas())):
        before, begin, rest = text.partition(f"<!-- {name}: made by `python -m tools.reference` -->\n")
        _, end, after = rest.partition("\n<!-- end -->\n")
        if not begin or not end:
            raise ValueError(f"{PAGE} has no place for the table {name!r}")
        text = "\n".join((before + begin, *lines, end + after))
    return text


def _models() -> Iterator[str]:
    yield "| Model | GPUs | Cache | Weights of each GPU | KV cache of each GPU | Tokens of room | Sequences of 4,096 |"
    yield "|---|---|---|---:|---:|---:|---:|"
    for shape, device, ranks, kv_dtype in ROWS:
        figures = _figures(shape, device, ranks, kv_dtype)
        weights, cache = (show_size(figures[key]) for key in ("weight_bytes", "kv_budget_bytes"))
        yield (
            f"| {shape} | {ranks} {device.upper()} | {kv_dtype.replace('auto', 'bfloat16')} | {weights} | {cache} | "
            f"{figures['room_tokens']:,} | {figures['sequences']:,} |"
        )


def _replicas() -> Iterator[str]:
    yield "| Model | GPU | Replicas | KV cache of each | Sequences of 4,096 of each | of all |"
    yield "|---|---|---:|---:|---:|---:|"
    for shape, device in SHARED:
        for row in _figures(shape, device, 1, "auto")["replicas"]:
            number, sequences, cache = row["num_replicas"], row["sequences"], show_size(row["kv_budget_bytes"])
            yield f"| {shape} | {device.upper()} | {number} | {cache} | {sequences:,} | {number * sequences:,} |"


def _figures(shape: str, device: str, ranks: int, kv_dtype: str) -> dict[str, Any]:
    target = choose_target(device, None)
    with tempfile.TemporaryDirectory() as folder:
        AutoConfig.for_model("llama", **_COMMON, **SHAPES[shape]).save_pretrained(folder)
        engine: dict[str, Any] = {"kv_dtype": kv_dtype, "tensor_parallel_size": ranks}
        size = ModelSize(EngineConfig(model=folder, device=target.kind, **engine))
    return plan_figures(size, target, NUM_TOKENS)
