"""Checkpoints and GGUF files of random weights, quantised as the methods do."""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file

from folio.app.config.engine import EngineConfig
from folio.app.engine.model.loader import load_model
from folio.app.engine.tensor_parallel.communicator import Communicator, MemoryCommunicator
from folio.kernels import quantise, shared_group_bytes
from tests.app.models.gguf.files import Tensor, dense, tiny_llama, write_gguf
from tests.app.models.quantised.packing import AWQ_ORDER, NF4_CONFIG, NF4_LEVELS, nf4_state, words

# Of the name of a module: its tensors, and its dequantised weight.
Quantised = tuple[dict[str, torch.Tensor], torch.Tensor]


def steps_of(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`[outputs, groups of 32]`."""
    return (weight.view(len(weight), -1, 32).abs().amax(-1) / 7).to(dtype)


def gptq(weight: torch.Tensor) -> Quantised:
    """In the order of activations."""
    outputs, inputs = weight.shape
    order = torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))
    groups = torch.empty(inputs, dtype=torch.int64).index_copy_(0, order, torch.arange(inputs) // 32)
    steps = steps_of(weight[:, order], torch.float16)
    codes = (weight / steps.float()[:, groups] + 8).round().clamp(0, 15).int()
    tensors = {
        "qweight": words(codes, 4).t(),
        "qzeros": words(torch.full((inputs // 32, outputs), 7), 4),
        "scales": steps.t(),
        "g_idx": groups.int(),
    }
    return tensors, steps.float()[:, groups] * (codes - 8)


def awq(weight: torch.Tensor) -> Quantised:
    steps = steps_of(weight, torch.float16)
    zeros = torch.arange(steps.numel()).view(steps.shape) % 4 + 6
    by_input, zeros_by_input = (part.repeat_interleave(32, 1) for part in (steps.float(), zeros))
    codes = ((weight / by_input).round().int() + zeros_by_input).clamp(0, 15)
    tensors = {
        "qweight": words(codes.t(), 4, AWQ_ORDER),
        "qzeros": words(zeros.t(), 4, AWQ_ORDER),
        "scales": steps.t(),
    }
    return tensors, by_input * (codes - zeros_by_input)


def int4(weight: torch.Tensor) -> Quantised:
    steps = steps_of(weight, torch.bfloat16)
    values = (weight / steps.float().repeat_interleave(32, 1)).round().clamp(-8, 7).int()
    tensors = {
        "weight_packed": words(values + 8, 4),
        "weight_scale": steps,
        "weight_shape": torch.tensor(weight.shape),
    }
    return tensors, values * steps.float().repeat_interleave(32, 1)


def int8(weight: torch.Tensor) -> Quantised:
    steps = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
    values = (weight / steps.float()).round().clamp(-128, 127)
    return {"weight": values.to(torch.int8), "weight_scale": steps}, values * steps.float()


def fp8(weight: torch.Tensor) -> Quantised:
    scale = weight.abs().max() / 448
    values = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": values, "weight_scale_inv": scale}, values.float() * scale


def nf4(weight: torch.Tensor) -> Quantised:
    blocks = weight.reshape(-1, 64)
    scales = blocks.abs().amax(1)
    codes = (blocks / scales[:, None])[..., None].sub(NF4_LEVELS).abs().argmin(-1)
    tensors = {
        "weight": (codes.view(-1, 2)[:, :1] * 16 + codes.view(-1, 2)[:, 1:]).to(torch.uint8),
        "weight.absmax": scales,
        "weight.quant_map": NF4_LEVELS.clone(),
        "weight.quant_state.bitsandbytes__nf4": nf4_state({"blocksize": 64, "shape": list(weight.shape)}),
    }
    return tensors, (NF4_LEVELS[codes] * scales[:, None]).view(weight.shape)


def _compressed(form: str, bits: int, strategy: str, group: int | None) -> dict[str, object]:
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": strategy, "group_size": group}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}


KINDS: dict[str, tuple[Callable[[torch.Tensor], Quantised], dict[str, object]]] = {
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": True}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}),
    "int4": (int4, _compressed("pack-quantized", 4, "group", 32)),
    "int8": (int8, _compressed("int-quantized", 8, "channel", None)),
    "fp8": (fp8, {"quant_method": "fp8"}),
    "nf4": (nf4, NF4_CONFIG),
}

# Differences where a weight is rounded, which layers of random weights amplify: zero points become offsets in float16,
# by 0.04 % of the weight's norm; floats become integers of 8 bits, by 0.5 %.
ROUNDED = {"awq": 0.01, "fp8": 0.1, "nf4": 0.1}


def load(folder: Path, comm: Communicator | None = None, **settings: Any) -> Any:
    config = EngineConfig(**{"model": str(folder), "dtype": "float32", "skip_tokenizer_init": True} | settings)
    module = load_model(config.on_device("cpu"), comm).module
    module.set_attn_implementation("eager")
    return module


@torch.inference_mode()
def logits_of(module: Any) -> torch.Tensor:
    found: torch.Tensor = module(input_ids=torch.arange(3, 90)[None], use_cache=False).logits[0]
    return found


def logits_of_ranks(folder: Path, size: int, **settings: Any) -> torch.Tensor:
    """Those of rank 0, of ranks that are threads."""
    memory = mmap.mmap(-1, shared_group_bytes(size))

    def run(rank: int) -> torch.Tensor:
        comm = MemoryCommunicator(memory, rank, size)
        return logits_of(load(folder, comm, tensor_parallel_size=size, **settings))

    with ThreadPoolExecutor(size) as pool:
        rank_0, *_ = pool.map(run, range(size), timeout=120)
    return rank_0


def write_quantised(source: Path, kind: str, folder: Path) -> tuple[Path, Path]:
    """Write a checkpoint of a kind, and the one with its values; return their folders."""
    make, quantization = KINDS[kind]
    dense = load_file(source / "model.safetensors")
    packed: dict[str, torch.Tensor] = {}
    for name, tensor in list(dense.items()):
        module, _, leaf = name.rpartition(".")
        if leaf == "weight" and tensor.ndim == 2 and "_proj" in name:
            tensors, dense[name] = make(tensor.float())
            packed |= {f"{module}.{part}": value.contiguous() for part, value in tensors.items()}
        else:
            packed[name] = tensor
    config = json.loads((source / "config.json").read_text())
    for name, content, weights in (
        ("dense", config, {name: tensor.contiguous() for name, tensor in dense.items()}),
        ("packed", config | {"quantization_config": quantization}, packed),
    ):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(content))
        save_file(weights, folder / name / "model.safetensors", metadata={"format": "pt"})
    return folder / "packed", folder / "dense"


def mxfp4(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """`[experts, inputs, outputs]` in gpt-oss's blocks, and dequantised."""
    table = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    values = weight.float().transpose(1, 2).unflatten(2, (-1, 32))
    exponents = (values.abs().amax(-1) / 6).log2().ceil()
    scaled = values / torch.exp2(exponents)[..., None]
    codes = (scaled[..., None] - table).abs().argmin(-1)
    found = (table[codes] * torch.exp2(exponents)[..., None]).flatten(2).transpose(1, 2)
    blocks = codes[..., ::2] | codes[..., 1::2] << 4
    return {"_blocks": blocks.to(torch.uint8), "_scales": (exponents + 127).to(torch.uint8)}, found


def write_mixture(source: Path, folder: Path, kind: str) -> tuple[Path, Path]:
    """Folders of the dequantised and of the quantised model."""
    dense, config = load_file(source / "model.safetensors"), json.loads((source / "config.json").read_text())
    packed: dict[str, torch.Tensor] = {}
    quantisation: dict[str, Any] = {"quant_method": "mxfp4"}
    for name, tensor in list(dense.items()):
        stem, _, leaf = name.rpartition(".")
        if kind == "mxfp4" and name.endswith(("gate_up_proj", "down_proj")):
            tensors, dense[name] = mxfp4(tensor)
            packed |= {name + ending: part for ending, part in tensors.items()}
        elif kind != "mxfp4" and leaf == "weight" and (".experts." in name or "_proj." in name):
            quantise, quantisation = KINDS[kind]
            tensors, dense[name] = quantise(tensor.float())
            packed |= {f"{stem}.{part}": value for part, value in tensors.items()}
        else:
            packed[name] = tensor
    for path, content, weights in (
        (folder / "dense", config, dense),
        (folder / "packed", config | {"quantization_config": quantisation}, packed),
    ):
        path.mkdir()
        (path / "config.json").write_text(json.dumps(content))
        contiguous = {name: tensor.contiguous() for name, tensor in weights.items()}
        save_file(contiguous, path / "model.safetensors", metadata={"format": "pt"})
    return folder / "dense", folder / "packed"


def block_tensor(values: torch.Tensor, bits: Literal[4, 8]) -> Tensor:
    """In Q8_0, or Q4_1."""
    found = quantise(values, bits)
    shape = *found.scales.shape, 1
    parts = [found.scales.view(shape).view(torch.uint8)]
    codes = found.codes.view(*found.scales.shape, 32)
    if bits == 8:
        parts.append(codes - 128)
    else:
        assert found.offsets is not None
        parts += [found.offsets.view(shape).view(torch.uint8), codes[..., :16] | codes[..., 16:] << 4]
    return Tensor("Q8_0" if bits == 8 else "Q4_1", tuple(values.shape), torch.cat(parts, -1).numpy().tobytes())


def quantised_file(path: Path, *, plain: tuple[str, ...] = (), untied: bool = False, width: int = 96) -> Path:
    """A model with weights of 4 and 8 bits. Args: `plain`: tensors that are not quantised."""
    settings, tensors = tiny_llama(3, width=width)
    if untied:
        tensors["output.weight"] = dense(torch.randn(tensors["token_embd.weight"].shape).bfloat16())
    for number, (name, tensor) in enumerate(tensors.items()):
        if len(tensor.shape) == 2 and name not in plain:
            values = torch.frombuffer(bytearray(tensor.data), dtype=torch.bfloat16).view(tensor.shape)
            tensors[name] = block_tensor(values, 8 if number % 2 else 4)
    return write_gguf(path, settings, tensors)
