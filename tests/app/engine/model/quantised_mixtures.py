"""GGUF files of mixtures of experts, written by llama.cpp's package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.app.models.gguf.files import byte_tokens

gguf: Any = pytest.importorskip("gguf")
HIDDEN, EXPERT, EXPERTS, LAYERS = 64, 64, 4, 2


def write_mixture_file(path: Path, architecture: str) -> None:
    """Weights in Q8_0 and Q4_0."""
    tokens = byte_tokens()
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(16)
    writer.add_value_length(16)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(2)
    writer.add_expert_feed_forward_length(EXPERT)
    writer.add_expert_shared_feed_forward_length(64)
    writer.add_tokenizer_model(tokens["tokenizer.ggml.model"])
    writer.add_tokenizer_pre(tokens["tokenizer.ggml.pre"])
    writer.add_token_list(tokens["tokenizer.ggml.tokens"])
    writer.add_token_types(tokens["tokenizer.ggml.token_type"])
    writer.add_token_merges(tokens["tokenizer.ggml.merges"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    add_tensors(writer, architecture, len(tokens["tokenizer.ggml.tokens"]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tensors(writer: Any, architecture: str, vocab_size: int) -> None:
    generator = np.random.default_rng(0)

    def add(name: str, *shape: int, kind: str = "F32") -> None:
        values = generator.standard_normal(shape, np.float32) / (1 if len(shape) == 1 else 4)
        if kind == "F32":
            writer.add_tensor(name, values)
        else:
            found = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(name, gguf.quantize(values, found), raw_dtype=found)

    add("token_embd.weight", vocab_size, HIDDEN, kind="Q8_0")
    add("output_norm.weight", HIDDEN)
    add("output.weight", vocab_size, HIDDEN, kind="Q8_0")
    for layer in range(LAYERS):
        blk = f"blk.{layer}."
        for name, outputs in (("q", 64), ("k", 32), ("v", 32), ("output", 64)):
            add(f"{blk}attn_{name}.weight", outputs, HIDDEN, kind="Q8_0")
            if architecture == "qwen2moe" and name != "output":
                add(f"{blk}attn_{name}.bias", outputs)
        for norm in ("attn_norm", "ffn_norm"):
            add(f"{blk}{norm}.weight", HIDDEN)
        add(f"{blk}ffn_gate_inp.weight", EXPERTS, HIDDEN)
        for name, shape in (("gate", (EXPERT, HIDDEN)), ("up", (EXPERT, HIDDEN)), ("down", (HIDDEN, EXPERT))):
            add(f"{blk}ffn_{name}_exps.weight", EXPERTS, *shape, kind="Q4_0")
        if architecture == "qwen3moe":
            add(f"{blk}attn_q_norm.weight", 16)
            add(f"{blk}attn_k_norm.weight", 16)
        else:
            add(f"{blk}ffn_gate_inp_shexp.weight", HIDDEN)
            for name, shape in (("gate", (64, HIDDEN)), ("up", (64, HIDDEN)), ("down", (HIDDEN, 64))):
                add(f"{blk}ffn_{name}_shexp.weight", *shape, kind="Q4_0")
