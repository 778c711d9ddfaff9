"""Architectures of GGUF files: names of their tensors, and what llama.cpp's converter did to the weights."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from folio.app.models.gguf.header import READ_KINDS, GgufHeader, GgufTensor, shown

# What undoes a change of the converter: rows of each head are in pairs, or a norm's weight is one more.
Undo = Literal["pairs of q", "pairs of k", "plus one"]

_NAMES = {"token_embd": "model.embed_tokens", "output": "lm_head", "output_norm": "model.norm"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.*.gate_proj",
    "ffn_up_exps": "mlp.experts.*.up_proj",
    "ffn_down_exps": "mlp.experts.*.down_proj",
}
_SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_GPT_OSS = _EXPERTS | {
    "ffn_gate_inp": "mlp.router",
    "attn_sinks": "self_attn.sinks",
    "post_attention_norm": "post_attention_layernorm",
}
_FUSED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
# Tensors that are not the model's: factors of its rope, which its config has.
_ROPE = re.compile(r"(blk\.\d+\.)?rope_(freqs|factors_long|factors_short)\.weight")
_TENSOR = re.compile(r"(?:blk\.(?P<layer>\d{1,5})\.)?(?P<leaf>\w+)\.(?P<kind>weight|bias)")


@dataclass(frozen=True, slots=True)
class Architecture:
    """How transformers names a model.

    Attributes:
        model_type: in `config.json`.
        module: its class.
        layer: names of a layer's modules that differ from Llama's.
        has_pairs: rows of the query and key projections are in pairs for each head: for rope on neighbouring values.
        adds_one: weights of norms are one more.
    """

    model_type: str
    module: str
    layer: Mapping[str, str] = field(default_factory=dict)
    has_pairs: bool = False
    adds_one: bool = False


ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", has_pairs=True),
    "smollm3": Architecture("smollm3", "SmolLM3ForCausalLM", has_pairs=True),
    "granite": Architecture("granite", "GraniteForCausalLM", has_pairs=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM"),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", _QK_NORMS),
    "phi3": Architecture("phi3", "Phi3ForCausalLM", _FUSED),
    "gemma": Architecture("gemma", "GemmaForCausalLM", adds_one=True),
    "gemma2": Architecture("gemma2", "Gemma2ForCausalLM", _FOUR_NORMS, adds_one=True),
    "gemma3": Architecture("gemma3_text", "Gemma3ForCausalLM", _QK_NORMS | _FOUR_NORMS, adds_one=True),
    "qwen2moe": Architecture("qwen2_moe", "Qwen2MoeForCausalLM", _EXPERTS | _SHARED_EXPERT),
    "qwen3moe": Architecture("qwen3_moe", "Qwen3MoeForCausalLM", _EXPERTS | _QK_NORMS),
    "gpt-oss": Architecture("gpt_oss", "GptOssForCausalLM", _GPT_OSS),
}
_MIXTRAL = Architecture("mixtral", "MixtralForCausalLM", _EXPERTS, has_pairs=True)
_WITH_EXPERTS = ("llama", "qwen2moe", "qwen3moe", "gpt-oss")


def architecture_name(header: GgufHeader) -> str:
    """The name of a file's architecture, which has an entry in `ARCHITECTURES`. Raises `ValueError`."""
    file, name = header.files[0], header.settings.get("general.architecture")
    if not isinstance(name, str):
        raise ValueError(f"{file} does not say its general.architecture; it holds no language model")
    if name not in ARCHITECTURES:
        raise ValueError(
            f"{file} has the architecture {shown(name)}; of GGUF files Folio reads {', '.join(ARCHITECTURES)}"
        )
    if name not in _WITH_EXPERTS and (experts := header.settings.get(f"{name}.expert_count")):
        raise ValueError(
            f"{file} is a mixture of {shown(experts)} experts of the architecture {name!r}; of GGUF files Folio "
            f"reads those of {', '.join(_WITH_EXPERTS)}"
        )
    return name


def architecture_of(header: GgufHeader) -> Architecture:
    """A file's architecture. Raises `ValueError`."""
    name = architecture_name(header)
    return _MIXTRAL if name == "llama" and header.settings.get("llama.expert_count") else ARCHITECTURES[name]


def parameters(header: GgufHeader) -> Iterator[tuple[str, GgufTensor, Undo | None]]:
    """Each parameter's name in transformers, its tensor, and the change to undo. Names of experts have a `*`.

    Raises:
        ValueError: the architecture, a tensor or its type is not known.
    """
    name = architecture_name(header)
    architecture = architecture_of(header)
    layer = {**_LAYER, **architecture.layer}
    for tensor in header.tensors.values():
        if _ROPE.fullmatch(tensor.name):
            continue
        found = _TENSOR.fullmatch(tensor.name)
        names, prefix = (_NAMES, "") if not found or not found["layer"] else (layer, f"model.layers.{found['layer']}.")
        if found is None or (module := names.get(found["leaf"])) is None:
            raise ValueError(f"{tensor.file} has the tensor {tensor.name!r}, which Folio does not know of {name!r}")
        if tensor.kind not in READ_KINDS:
            raise ValueError(
                f"{tensor.file} has the tensor {tensor.name!r} in {tensor.kind}; of GGUF's types Folio reads "
                f"{', '.join(READ_KINDS)}"
            )
        undo = _undo(architecture, found["leaf"])
        is_bare = found["leaf"] == "attn_sinks"
        yield f"{prefix}{module}" + ("" if is_bare else f".{found['kind']}"), tensor, undo


def _undo(architecture: Architecture, leaf: str) -> Undo | None:
    if architecture.has_pairs and leaf in ("attn_q", "attn_k"):
        return "pairs of q" if leaf == "attn_q" else "pairs of k"
    return "plus one" if architecture.adds_one and leaf.endswith("norm") else None
