"""Readers agree with weights computed from the codes of which the checkpoints were packed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from folio.app.config.quantised import LEAST_GROUP as READ_GROUP
from folio.app.errors import ModelError
from folio.app.models.quantised.checkpoint import open_checkpoint
from folio.kernels import QuantisedWeight
from folio.kernels.quantised import LEAST_GROUP, as_integers
from tests.app.models.quantised.packing import (
    AWQ_ORDER,
    INPUTS,
    NF4_CONFIG,
    OUTPUTS,
    codes,
    compressed,
    gptq,
    nf4,
    scales,
    words,
    write,
)

# Offsets in float16 are rounded: of the largest value.
CLOSE = 2**-10


def weight(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> QuantisedWeight:
    """The weight of the only module, `a`."""
    checkpoint = open_checkpoint(write(folder, config, tensors))
    assert checkpoint is not None
    assert checkpoint.names() == {"a.weight"}
    read = checkpoint.read("a.weight")
    assert isinstance(read, QuantisedWeight)
    return read


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = CLOSE) -> None:
    difference = (actual.float() - expected).abs().max() / expected.abs().max()
    assert difference <= tolerance, f"{difference:.2e} of the largest value"


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("form", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("group", [32, 96, -1])
def test_gptq(tmp_path: Path, bits: int, form: str, sym: bool, group: int) -> None:
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": sym, "checkpoint_format": form}
    tensors = gptq(config, OUTPUTS, INPUTS, torch.arange(INPUTS) // (group if group > 0 else INPUTS))
    expected = tensors.pop("expected")
    read = weight(tmp_path, config, tensors)
    assert_close(read.dequantised(), expected, 0 if sym else CLOSE)
    assert read.order is None
    assert (read.offsets is None) == sym, "one zero point for all needs no offsets"


def test_gptq_in_the_order_of_activations(tmp_path: Path) -> None:
    """With desc_act, neighbours have different groups."""
    groups = (torch.arange(INPUTS) // 32)[torch.randperm(INPUTS, generator=torch.Generator().manual_seed(0))]
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}
    tensors = gptq(config, OUTPUTS, INPUTS, groups)
    expected = tensors.pop("expected")
    read = weight(tmp_path, config, tensors)
    assert read.order is not None
    assert_close(read.dequantised(), expected)
    tensors["a.g_idx"][0] = (groups[0] + 1) % 4
    with pytest.raises(ModelError, match=r"a: g_idx does not give 32 inputs to the group \d$"):
        weight(tmp_path, config, tensors)
    tensors["a.g_idx"][0] = 4
    with pytest.raises(ModelError, match=r"a: g_idx does not give 32 inputs to the group \d$"):
        weight(tmp_path, config, tensors)


def test_zero_points_of_gptq_that_borrowed(tmp_path: Path) -> None:
    """GPTQModel subtracts 1 from whole words: a zero point of 0 borrows from its neighbour."""
    config = {"quant_method": "gptq", "bits": 4, "group_size": 64}
    tensors = gptq(config | {"checkpoint_format": "gptq_v2"}, OUTPUTS, INPUTS, torch.arange(INPUTS) // 64)
    expected, by_group = tensors.pop("expected"), tensors["a.scales"].float()
    zeros = codes((2, OUTPUTS), 4, 1)
    expected += by_group.repeat_interleave(64, 0).t() * zeros.repeat_interleave(64, 0).t()
    zeros[:, 3] = 0
    expected -= by_group.repeat_interleave(64, 0).t() * zeros.repeat_interleave(64, 0).t()
    tensors["a.qzeros"] = words(zeros, 4) - 0x11111111
    assert_close(weight(tmp_path, config, tensors).dequantised(), expected)


@pytest.mark.parametrize("group", [32, -1])
def test_awq(tmp_path: Path, group: int) -> None:
    groups = torch.arange(INPUTS) // (group if group > 0 else INPUTS)
    count = int(groups.max()) + 1
    values, zeros, by_group = codes((INPUTS, OUTPUTS), 4), codes((count, OUTPUTS), 4), scales((count, OUTPUTS))
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}
    tensors = {
        "a.qweight": words(values, 4, AWQ_ORDER),
        "a.qzeros": words(zeros, 4, AWQ_ORDER),
        "a.scales": by_group,
    }
    expected = ((values - zeros[groups]) * by_group.float()[groups]).t()
    assert_close(weight(tmp_path, config, tensors).dequantised(), expected)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [32, None])
def test_packed_compressed_tensors(tmp_path: Path, bits: int, symmetric: bool, group: int | None) -> None:
    count, middle = INPUTS // (group or INPUTS), 2 ** (bits - 1)
    values, outputs = codes((OUTPUTS - 3, INPUTS), bits), OUTPUTS - 3  # no whole word of zero points
    by_group = scales((outputs, count), torch.bfloat16)
    zeros = torch.full((outputs, count), middle) if symmetric else codes((outputs, count), bits)
    tensors = {
        "a.weight_packed": words(values, bits),
        "a.weight_scale": by_group,
        "a.weight_shape": torch.tensor([outputs, INPUTS]),
    }
    if not symmetric:
        tensors["a.weight_zero_point"] = words(zeros.t(), bits).t()
    strategy = "group" if group else "channel"
    config = compressed(
        "pack-quantized", num_bits=bits, type="int", symmetric=symmetric, strategy=strategy, group_size=group
    )
    expected = (by_group.float()[..., None] * (values.view(outputs, count, -1) - zeros[..., None])).view(
        outputs, INPUTS
    )
    assert_close(weight(tmp_path, config, tensors).dequantised(), expected, 0 if symmetric else CLOSE)


def test_groups_of_compressed_tensors_in_the_order_of_activations(tmp_path: Path) -> None:
    groups = (torch.arange(INPUTS) // 32)[torch.randperm(INPUTS, generator=torch.Generator().manual_seed(0))]
    values, by_group = codes((OUTPUTS, INPUTS), 4), scales((OUTPUTS, 4))
    tensors = {
        "a.weight_packed": words(values, 4),
        "a.weight_scale": by_group,
        "a.weight_shape": torch.tensor([OUTPUTS, INPUTS]),
        "a.weight_g_idx": groups.int(),
    }
    config = compressed("pack-quantized", num_bits=4, group_size=32, strategy="group", actorder="group")
    assert_close(weight(tmp_path, config, tensors).dequantised(), by_group.float()[:, groups] * (values - 8), 0)
    tensors["a.weight_g_idx"] = torch.full((INPUTS,), -1, dtype=torch.int32)  # as it was initialised
    expected = by_group.float().repeat_interleave(32, 1) * (values - 8)
    assert_close(weight(tmp_path, config, tensors).dequantised(), expected, 0)


@pytest.mark.parametrize("shape", [(OUTPUTS, 1), (OUTPUTS,), (1,), ()], ids=str)
@pytest.mark.parametrize("symmetric", [True, False])
def test_integers_of_compressed_tensors(tmp_path: Path, shape: tuple[int, ...], symmetric: bool) -> None:
    values = codes((OUTPUTS, INPUTS), 8) - 128
    by_output = scales(shape, torch.float32)
    tensors = {"a.weight": values.to(torch.int8), "a.weight_scale": by_output, "a.input_scale": torch.ones(1)}
    zeros = torch.zeros(shape)
    if not symmetric:
        zeros = (by_output * 1000).round()
        tensors["a.weight_zero_point"] = zeros.to(torch.int8)
    strategy = "channel" if by_output.numel() > 1 else "tensor"
    config = compressed("int-quantized", num_bits=8, strategy=strategy, symmetric=symmetric)
    by_output, zeros = (part.reshape(-1, 1) for part in (by_output, zeros))
    # Of float32's scales, 11 bits remain.
    assert_close(weight(tmp_path, config, tensors).dequantised(), by_output * (values - zeros))


def test_scales_beyond_float16(tmp_path: Path) -> None:
    values = codes((OUTPUTS, INPUTS), 8) - 128
    by_output = scales((OUTPUTS, 1), torch.bfloat16) * torch.tensor([1e-7, 1e7] * (OUTPUTS // 2))[:, None].bfloat16()
    tensors = {"a.weight": values.to(torch.int8), "a.weight_scale": by_output}
    read = weight(tmp_path, compressed("int-quantized", num_bits=8, strategy="channel"), tensors)
    assert read.factors is not None
    assert torch.equal(read.dequantised(), by_output.float() * values)


_FLOATS = {  # config, shape of the scales
    "channel": (compressed("float-quantized", num_bits=8, type="float", strategy="channel"), (OUTPUTS, 1)),
    "tensor": (compressed("float-quantized", num_bits=8, type="float", strategy="tensor"), (1,)),
    "block": (
        compressed("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[16, 64]),
        (2, 2),
    ),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [16, 64]}, (2, 2)),
    "fp8 of one scale": ({"quant_method": "fp8"}, ()),
}


@pytest.mark.parametrize("kind", _FLOATS)
def test_floats_of_8_bits(tmp_path: Path, kind: str) -> None:
    """They are read as they are, and rounded to integers for CPUs."""
    config, shape = _FLOATS[kind]
    values = torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    by_block = scales(shape, torch.float32)
    name = "a.weight_scale_inv" if config["quant_method"] == "fp8" else "a.weight_scale"
    whole = by_block.repeat_interleave(16, 0)[:OUTPUTS].repeat_interleave(64, 1) if shape == (2, 2) else by_block
    expected = values.float() * whole
    read = weight(tmp_path, config, {"a.weight": values, name: by_block})
    assert torch.equal(read.codes.float(), values.float())
    assert_close(read.dequantised(), expected)  # of float32's scales, 11 bits remain
    rounded = as_integers(read)
    assert (rounded.codes.dtype, rounded.group) == (torch.uint8, 32)
    wide = weight(tmp_path, config, {"a.weight": values.to(torch.float8_e5m2), name: by_block})
    assert wide.codes.dtype == torch.uint8, "no kernel has e5m2"
    assert (rounded.dequantised() - expected).norm() / expected.norm() < 0.007
    if shape == (2, 2):
        with pytest.raises(ModelError, match=r"scale\w* has the shape \[2, 1\], not \[2, 2\]$"):
            weight(tmp_path, config, {"a.weight": values, name: by_block[:, :1]})


@pytest.mark.parametrize("nested", [False, True])
def test_nf4(tmp_path: Path, nested: bool) -> None:
    tensors = nf4(INPUTS, nested)
    expected = tensors.pop("expected")
    actual = weight(tmp_path, NF4_CONFIG, tensors).dequantised()
    assert (actual - expected).norm() / expected.norm() < 0.006, "levels are rounded to a table of integers"


@pytest.mark.parametrize(("inputs", "is_packed"), [(96, True), (80, False)])
def test_blocks_of_nf4_that_go_on_in_the_next_output(tmp_path: Path, inputs: int, is_packed: bool) -> None:
    """They become groups of the inputs that the block and the output share, if the kernels have such groups."""
    tensors = nf4(inputs, nested=False)
    expected = tensors.pop("expected")
    checkpoint = open_checkpoint(write(tmp_path, NF4_CONFIG, tensors))
    assert checkpoint is not None
    read = checkpoint.read("a.weight")
    assert isinstance(read, QuantisedWeight) == is_packed
    if isinstance(read, QuantisedWeight):
        assert read.group == 32
        assert (read.dequantised() - expected).norm() / expected.norm() < 0.006
    else:
        assert torch.equal(read, expected.bfloat16())


def test_other_tensors_and_files(tmp_path: Path) -> None:
    """Norms, embeddings and biases are read as they are, from the file that the index names."""
    config = {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True}
    tensors = gptq(config, OUTPUTS, INPUTS, torch.arange(INPUTS) // 64)
    expected = tensors.pop("expected")
    write(tmp_path, config, {})
    (tmp_path / "model.safetensors").unlink()
    tensors = {name.replace("a.", "model.layers.0.q_proj."): tensor for name, tensor in tensors.items()}
    plain = {"model.norm.weight": torch.rand(3), "model.layers.0.q_proj.bias": torch.rand(OUTPUTS).half()}
    table: dict[str, str] = {}
    for number, part in enumerate((dict(list(tensors.items())[:2]), dict(list(tensors.items())[2:]) | plain)):
        name = f"model-0000{number + 1}-of-00002.safetensors"
        save_file({key: tensor.contiguous() for key, tensor in part.items()}, tmp_path / name)
        table |= dict.fromkeys(part, name)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint is not None
    assert checkpoint.names() == {"model.layers.0.q_proj.weight", *plain}
    for name, tensor in plain.items():
        read = checkpoint.read(name)
        assert isinstance(read, torch.Tensor)
        assert torch.equal(read, tensor)
    read = checkpoint.read("model.layers.0.q_proj.weight")
    assert isinstance(read, QuantisedWeight)
    assert torch.equal(read.dequantised(), expected)
    with pytest.raises(ModelError, match="has no tensor lm_head"):
        checkpoint.read("lm_head.weight")


def test_groups_are_those_of_the_kernels() -> None:
    assert LEAST_GROUP[4] == LEAST_GROUP[8] == READ_GROUP
