"""A Llama of one layer whose weights are written by hand, for checkpoints that follow a script.

The residual stream has a dimension that is always 1, one for each known token, and one for each mark: a token that
attention finds anywhere in the prompt. The output layer is a table from the last token and the marks to the next token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

_HEAD_DIM = 16
# Of attention: how much more a mark weighs than another token.
_SHARPNESS = 6.0


@dataclass(frozen=True, slots=True)
class WrittenModel:
    """Args: `table`: [next token, dimension]: 0 is always 1, then those of `last` and `seen`, by token."""

    model: LlamaForCausalLM
    table: Tensor
    last: dict[int, int]
    seen: dict[int, int]


def written_model(
    tokenizer: PreTrainedTokenizerFast, known: Sequence[int], marks: Sequence[int], context: int
) -> WrittenModel:
    """The model with an empty table."""
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    last = {token: place for place, token in enumerate(known, start=1)}
    seen = {token: 1 + len(known) + place for place, token in enumerate(marks)}
    unit = _HEAD_DIM * len(marks)
    hidden = -(-(1 + len(known) + len(marks)) // unit) * unit
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=len(marks),
        num_key_value_heads=len(marks),
        head_dim=_HEAD_DIM,
        max_position_embeddings=context,
        rope_parameters={"rope_type": "default", "rope_theta": 1e12},  # the last dimensions hardly rotate
        bos_token_id=None,
        dtype="float32",
        **ends,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(**ends)
    layer, embeddings, table = model.model.layers[0], model.model.embed_tokens.weight, model.lm_head.weight
    with torch.no_grad():
        for parameter in (embeddings, table, layer.mlp.down_proj.weight, *layer.self_attn.parameters()):
            parameter.zero_()
        embeddings[:, 0] = 1.0
        embeddings[list(last), list(last.values())] = 1.0
        length = (hidden / 2) ** 0.5  # of the two dimensions that are 1, behind the norm
        for head, mark in enumerate(marks):
            first, slow = head * _HEAD_DIM, head * _HEAD_DIM + _HEAD_DIM // 2 - 1
            layer.self_attn.q_proj.weight[slow, 0] = _HEAD_DIM**0.5 * _SHARPNESS / length
            layer.self_attn.k_proj.weight[slow, last[mark]] = _SHARPNESS / length
            layer.self_attn.v_proj.weight[first, last[mark]] = 1 / length
            layer.self_attn.o_proj.weight[seen[mark], first] = 1.0
    table.requires_grad_(False)
    return WrittenModel(model, table, last, seen)
