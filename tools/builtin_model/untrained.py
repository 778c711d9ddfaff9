"""The untrained model: a small Llama whose weights already sketch what training would find only after hours."""

from __future__ import annotations

import math

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HIDDEN_SIZE, HEAD_DIM = 256, 64
MAX_POSITIONS = 4096
# Finding a token far back needs dimensions that hardly rotate within the context: half of them, with this base.
ROPE_THETA = 1e7
LOOK_BACK_FREQUENCIES, LOOK_BACK_STRENGTH = 8, 6.0
WRITE_GAIN, MATCH_GAIN = 0.06, 1.5  # relative to embeddings of 0.02
NUM_DIGITS = 3


def build_model(vocab_size: int, end: int, pad: int, seed: int) -> LlamaForCausalLM:
    """An untrained model; `end` and `pad` are token ids."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=640,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=HEAD_DIM,
        attention_bias=True,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=pad,
    )
    model = LlamaForCausalLM(config)
    look_back(model)
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=pad)
    return model


@torch.no_grad()
def look_back(model: LlamaForCausalLM) -> None:
    """Initialise an induction head in the first two layers: find the last occurrence of a token, and read on.

    From random weights this circuit emerges only after more tokens than two CPU cores compute in an hour. Training
    sharpens the sketch.

    - Layer 0, heads 0 and 1 attend one and two tokens back (a constant query, rotated by the offset against a constant
      key, scores highest there) and write these tokens into two subspaces of the residual stream.
    - Layer 1, head 0 attends where the token two back equals the token one back here, and reads the token there.
    """
    size, head_dim, half = HIDDEN_SIZE, HEAD_DIM, HEAD_DIM // 2
    first, second = model.model.layers[0].self_attn, model.model.layers[1].self_attn
    orthonormal = torch.linalg.qr(torch.randn(size, size))[0]
    reading = torch.linalg.qr(torch.randn(size, size))[0]

    frequencies = model.model.rotary_emb.inv_freq[:LOOK_BACK_FREQUENCIES]
    n = LOOK_BACK_FREQUENCIES
    first.k_proj.bias[:n] = LOOK_BACK_STRENGTH  # KV head 0, which query heads 0 and 1 share
    first.v_proj.weight[:head_dim] = reading[:head_dim]
    subspaces = orthonormal[:head_dim], orthonormal[head_dim : 2 * head_dim]  # [head_dim, size] each
    for head, offset in enumerate((1, 2)):
        query = first.q_proj.bias[head * head_dim : (head + 1) * head_dim]
        query[:n] = LOOK_BACK_STRENGTH * torch.cos(-offset * frequencies)
        query[half : half + n] = LOOK_BACK_STRENGTH * torch.sin(-offset * frequencies)
        first.o_proj.weight[:, head * head_dim : (head + 1) * head_dim] = WRITE_GAIN * subspaces[head].T

    # Only the slowly rotating half of the dimensions compares equally at every distance.
    slow = torch.cat([torch.arange(half // 2, half), torch.arange(half + half // 2, head_dim)])
    second.q_proj.weight[:head_dim][slow] = MATCH_GAIN * subspaces[0][slow]
    second.k_proj.weight[:head_dim][slow] = MATCH_GAIN * subspaces[1][slow]
    second.v_proj.weight[:head_dim] = reading[head_dim : 2 * head_dim]
    second.o_proj.weight[:, :head_dim] = WRITE_GAIN * reading[head_dim : 2 * head_dim].T


@torch.no_grad()
def sketch_numbers(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, strength: float = 0.7) -> None:
    """Add to the embedding of each number its digits, of `strength` times the embeddings' length.

    A sum of two digits is then a table of 100 entries, all of them in the training data, whichever pairs of numbers are not.
    """
    table = model.model.embed_tokens.weight
    directions = torch.linalg.qr(torch.randn(HIDDEN_SIZE, HIDDEN_SIZE, generator=torch.Generator().manual_seed(7)))[0]
    digits_of = directions[: 10 * NUM_DIGITS]
    length = strength * table.norm(dim=1).mean()
    vocabulary = tokenizer.get_vocab()
    for n in range(10**NUM_DIGITS):
        places = [10 * place + n // 10**place % 10 for place in range(NUM_DIGITS)]
        digits = digits_of[places].sum(0) / math.sqrt(NUM_DIGITS)
        for token in (f"Ġ{n}", str(n)):
            if token in vocabulary:
                table[vocabulary[token]] += length * digits
