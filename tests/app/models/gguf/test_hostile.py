"""GGUF files that are whole, and whose settings attack who reads them: one short line each, in little time."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from folio.app.errors import ModelError
from folio.app.models.gguf.names import resolve_gguf
from tests.app.models.gguf.files import Tensor, byte_tokens, dense, tiny_llama, write_gguf

TOKENS = byte_tokens()["tokenizer.ggml.tokens"]
LONG = "z" * 1_000_000
PIECES = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.merges": []}
YARN = {
    "llama.rope.scaling.type": "yarn",
    "llama.rope.scaling.factor": 4.0,
    "llama.rope.scaling.original_context_length": 64,
}
MIXTURE = {"llama.expert_count": 4, "llama.expert_used_count": 2}
ROPE, LAYER = "rope_freqs.weight", "blk.{}.attn_norm.weight"


def _renamed(architecture: str, **settings: Any) -> dict[str, Any]:
    own = {name.replace("llama.", f"{architecture}."): value for name, value in tiny_llama(1)[0].items()}
    own["general.architecture"] = architecture
    return own | {f"{architecture}.{name.replace('__', '.')}": value for name, value in settings.items()}


SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "a long architecture": ({"general.architecture": LONG}, "has the architecture 'zzz"),
    "a long tokenizer": ({"tokenizer.ggml.model": LONG}, "tokenizer.ggml.model is 'zzz"),
    "a long split": ({"tokenizer.ggml.pre": LONG}, "tokenizer.ggml.pre is 'zzz"),
    "a long merge": ({"tokenizer.ggml.merges": [LONG]}, "tokenizer.ggml.merges has 'zzz"),
    "a long count of files": ({"split.count": LONG}, "is of a model of 'zzz"),
    "a list for a text": ({"tokenizer.chat_template": ["a", "b"]}, "it must be of the type str"),
    "a token twice": ({"tokenizer.ggml.tokens": [TOKENS[2], *TOKENS[1:]]}, "it has the token '!' 2 times"),
    "a long token": (
        PIECES | {"tokenizer.ggml.tokens": [*TOKENS[1:], LONG], "tokenizer.ggml.scores": [0.0] * len(TOKENS)},
        "its longest token has 1000000 characters",
    ),
    "scores": (PIECES | {"tokenizer.ggml.scores": [float("nan")] * len(TOKENS)}, "that are no numbers"),
    "layers": ({"llama.block_count": 2**31 - 1}, "has 2147483647 layers (block_count) and 11 tensors"),
    "layers with windows": (_renamed("gemma2", block_count=2**31 - 1), "has 2147483647 layers"),
    "no layers": ({"llama.block_count": 0}, "llama.block_count 0; it must be at least 1"),
    "no heads": ({"llama.attention.head_count": 0}, "head_count 0; it must be at least 1"),
    "more heads than values": ({"llama.attention.head_count": 1000}, "embedding_length 64; it must be at least 1000"),
    "a head of no size": (_renamed("phi3", attention__key_length=0), "key_length 0; it must be at least 1"),
    **{
        f"a frequency of {base}": ({"llama.rope.freq_base": base}, f"freq_base {base}; it must be a number from 1 to")
        for base in (0.0, -1.0, 0.5, 2.0**60, math.nan)
    },
    "a frequency of windows": (_renamed("gemma3", rope__freq_base_swa=0.0), "rope.freq_base_swa 0.0; it must be"),
    "a negative epsilon": (
        {"llama.attention.layer_norm_rms_epsilon": -1.0},
        "epsilon -1.0; it must be a number from 0",
    ),
    "no epsilon": ({"llama.attention.layer_norm_rms_epsilon": math.nan}, "epsilon nan; it must be a number from 0"),
    "no inner size": ({"llama.feed_forward_length": 0}, "feed_forward_length 0; it must be at least 1"),
    "another inner size": (
        {"llama.feed_forward_length": 7},
        "of the shape [96, 64], and by its settings it must be [7,",
    ),
    "another width": ({"llama.embedding_length": 128}, "'token_embd.weight' of the shape"),
    "another head": ({"llama.attention.key_length": 32}, "'blk.0.attn_q.weight' of the shape [64, 64], and by its"),
    "other KV heads": ({"llama.attention.head_count_kv": 1}, "it must be [16, 64]"),
    "heads that cannot share": (
        {"llama.attention.head_count_kv": 3},
        "it must be [48, 64]",
    ),
    "a negative factor": (YARN | {"llama.rope.scaling.factor": -1.0}, "factor -1.0; it must be a number from 0"),
    "a factor below 1": (YARN | {"llama.rope.scaling.factor": 0.5}, "factor 0.5; it must be a number from 1"),
    "no old context": (YARN | {"llama.rope.scaling.original_context_length": 0}, "length 0; it must be at least 1"),
    "a negative beta": (YARN | {"llama.rope.scaling.yarn_beta_fast": -1.0}, "beta_fast -1.0; it must be a number from"),
    "no experts used": (MIXTURE | {"llama.expert_used_count": 0}, "expert_used_count 0; it must be at least 1"),
    "more experts used": (MIXTURE | {"llama.expert_used_count": 5}, "expert_used_count 5; it must be at most 4"),
    "a scale of 0": (_renamed("granite", logit_scale=0.0), "logit_scale 0.0; it must be a number from"),
}
TENSORS: dict[str, tuple[dict[str, Tensor], str]] = {
    "factors of 0": ({ROPE: dense(torch.zeros(8))}, "it must have 8 above 0"),
    "too few factors": ({ROPE: dense(torch.ones(3))}, "has 3 values in rope_freqs.weight"),
    "many layers": ({LAYER.format(i): dense(torch.ones(1)) for i in range(0, 4000, 2)}, "no tensors of blk.1"),
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("kind", [*SETTINGS, *TENSORS])
def test_one_short_line(kind: str, tmp_path: Path) -> None:
    """Regression: most of them were lines of a megabyte, tracebacks, or minutes."""
    settings, tensors = tiny_llama(1)
    if kind in SETTINGS:
        changed, named = SETTINGS[kind]
        settings |= changed
    else:
        added, named = TENSORS[kind]
        settings, tensors = settings | {"llama.block_count": 2000 if "layers" in kind else 1}, tensors | added
    path = write_gguf(tmp_path / "m.gguf", settings, tensors)
    begun = time.thread_time()
    with pytest.raises(ModelError) as error:
        resolve_gguf(str(path))
    assert named in str(error.value)
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < len(str(path)) + 300
    assert time.thread_time() - begun < 5
