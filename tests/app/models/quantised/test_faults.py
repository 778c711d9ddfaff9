"""Damaged and contradictory checkpoints are refused in one line."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from folio.app.config.checkpoint import quantization_fault, weight_faults
from folio.app.errors import ModelError
from folio.app.models.quantised.checkpoint import open_checkpoint
from folio.kernels import QuantisedWeight
from tests.app.models.quantised.packing import INPUTS, NF4_CONFIG, OUTPUTS, compressed, gptq, nf4, scales, write

_GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 64}
_AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 64}
_INT4 = compressed("pack-quantized", num_bits=4, group_size=32, strategy="group")

_UNREAD = {  # what is named → quantization_config
    "GPTQ in 3 bits": _GPTQ | {"bits": 3},
    "GPTQ in the format marlin": _GPTQ | {"is_marlin_format": True},
    "GPTQ in the format bitblas": _GPTQ | {"checkpoint_format": "bitblas"},
    "GPTQ packed in int16": _GPTQ | {"pack_dtype": "int16"},
    "GPTQ with other bits or groups for some modules (dynamic)": _GPTQ | {"dynamic": {"+:.*q_proj": {"bits": 8}}},
    "AWQ in 8 bits": _AWQ | {"bits": 8},
    "AWQ in the version gemv": _AWQ | {"version": "GEMV"},
    "bitsandbytes as int8": {"quant_method": "bitsandbytes", "load_in_8bit": True},
    "bitsandbytes as fp4": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "compressed-tensors, int, in 2 bits": compressed("pack-quantized", num_bits=2, group_size=32),
    "compressed-tensors, int, in 4 bits": compressed("int-quantized", num_bits=4, strategy="channel"),
    "compressed-tensors, int, with the strategy block": compressed("int-quantized", num_bits=8, strategy="block"),
    "compressed-tensors in the format nvfp4-pack-quantized": compressed("nvfp4-pack-quantized", num_bits=4),
    "compressed-tensors of the type float in the format int-quantized": compressed(
        "int-quantized", num_bits=8, type="float"
    ),
    "compressed-tensors with sparsity_config": _INT4 | {"sparsity_config": {"format": "sparse-24-bitmask"}},
    "compressed-tensors with transform_config": _INT4 | {"transform_config": {"config_groups": {"R1": {}}}},
    "compressed-tensors with the status frozen": _INT4 | {"quantization_status": "frozen"},
    "AQLM": {"quant_method": "aqlm"},
    "higgs": {"quant_method": "higgs"},
    "an unknown method": {"load_in_4bit": 1},
    "?": "gptq",
}


@pytest.mark.parametrize("kind", _UNREAD)
def test_what_is_not_read_is_named(tmp_path: Path, kind: str) -> None:
    fault = quantization_fault(_UNREAD[kind])
    assert fault is not None
    assert fault.startswith(f"its weights are quantized by {kind} (quantization_config), which is not read yet: ")
    with pytest.raises(ModelError) as raised:
        open_checkpoint(write(tmp_path, _UNREAD[kind], {}))
    assert str(raised.value) == f"{tmp_path / 'config.json'}: weights quantized by {kind} are not read"


_DAMAGED = {  # what is said → quantization_config
    "bits is four; it must be 4 or 8": _GPTQ | {"bits": "four"},
    "bits is null; it must be 4 or 8": {"quant_method": "gptq"},
    "bits is true; it must be 4": _AWQ | {"bits": True},
    "bits is 10000000000; it must be 4": _AWQ | {"bits": 10**10},
    "group_size is 0; it must be a multiple of 32, or -1": _GPTQ | {"group_size": 0},
    "group_size is 16; it must be a multiple of 32, or -1": _AWQ | {"group_size": 16},
    "group_size is [64]; it must be a multiple of 32, or -1": _AWQ | {"group_size": [64]},
    "config_groups is null; it must be an object with one group at least": {"quant_method": "compressed-tensors"},
    "config_groups.a has no weights": _INT4 | {"config_groups": {"a": 1}},
    "the strategy is group without a group_size": compressed("pack-quantized", num_bits=4, strategy="group"),
    "weight_block_size is [128]; it must be a list of two positive integers": {
        "quant_method": "fp8",
        "weight_block_size": [128],
    },
}


@pytest.mark.parametrize("said", _DAMAGED)
def test_damaged_configs(tmp_path: Path, said: str) -> None:
    assert quantization_fault(_DAMAGED[said]) == f"its quantization_config is damaged: {said}"
    with pytest.raises(ModelError) as raised:
        open_checkpoint(write(tmp_path, _DAMAGED[said], {}))
    assert str(raised.value) == f"{tmp_path / 'config.json'}: {said}"


_KEYS = (
    *("bits", "group_size", "version", "checkpoint_format", "dynamic", "pack_dtype", "config_groups", "format"),
    *("weight_block_size", "load_in_4bit", "bnb_4bit_quant_type", "quant_method", "quantization_status"),
    *("sparsity_config", "transform_config"),
)
_KEYS_OF_WEIGHTS = ("num_bits", "type", "strategy", "group_size", "block_structure")
_VALUES: tuple[Any, ...] = (None, 0, -3, 1.5, True, "", "a\nb", [], [1, "x"], {}, {"a": {"weights": {}}})


@pytest.mark.parametrize("config", [_GPTQ, _AWQ, _INT4, NF4_CONFIG, {"quant_method": "fp8"}], ids=str)
def test_any_json_is_one_sentence(config: dict[str, Any]) -> None:
    assert quantization_fault(config) is None
    for key, value in product(_KEYS, _VALUES):
        fault = quantization_fault(config | {key: value})
        assert fault is None or "\n" not in fault


def test_any_json_of_a_config_group_is_one_sentence() -> None:
    for form, key, value in product(("pack-quantized", "float-quantized"), _KEYS_OF_WEIGHTS, _VALUES):
        weights = {"num_bits": 8, "type": "float" if form[0] == "f" else "int", "strategy": "channel"}
        fault = quantization_fault(compressed(form, **weights | {key: value}))
        assert fault is None or "\n" not in fault


def _gptq(**changed: torch.Tensor | None) -> dict[str, torch.Tensor]:
    tensors = gptq(_GPTQ, OUTPUTS, INPUTS, torch.arange(INPUTS) // 64)
    del tensors["expected"]
    return _with(tensors, changed)


def _int4(**changed: torch.Tensor | None) -> dict[str, torch.Tensor]:
    tensors = {
        "a.weight_packed": torch.zeros(OUTPUTS, INPUTS // 8, dtype=torch.int32),
        "a.weight_scale": scales((OUTPUTS, INPUTS // 32)),
        "a.weight_shape": torch.tensor([OUTPUTS, INPUTS]),
    }
    return _with(tensors, changed)


def _nf4(nested: bool = False, **changed: torch.Tensor | None) -> dict[str, torch.Tensor]:
    tensors = nf4(INPUTS, nested)
    del tensors["expected"]
    return _with(tensors, changed)


def _with(tensors: dict[str, torch.Tensor], changed: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
    tensors |= {f"a.{name.replace('__', '.')}": tensor for name, tensor in changed.items() if tensor is not None}
    return {name: tensors[name] for name in tensors if changed.get(name[2:].replace(".", "__"), tensors) is not None}


def _state(**values: Any) -> torch.Tensor:
    content = {"quant_type": "nf4", "blocksize": 64, "shape": [OUTPUTS, INPUTS]} | values
    return torch.tensor(list(json.dumps(content).encode()), dtype=torch.uint8)


_WORDS = torch.zeros(4, OUTPUTS, dtype=torch.int32)
_TENSORS: dict[str, tuple[dict[str, Any], dict[str, torch.Tensor]]] = {  # end of the message → config and tensors
    "has no tensor a.qzeros": (_GPTQ, _gptq(qzeros=None)),
    "a.qzeros has the shape [2, 2], not [2, 3]": (_GPTQ, _gptq(qzeros=torch.zeros(2, 2, dtype=torch.int32))),
    "a.scales has the shape [1, 24], not [2, 24]": (_GPTQ, _gptq(scales=scales((1, OUTPUTS)))),
    "a.scales has the dtype int32, not float16 or bfloat16 or float32 or float8_e8m0fnu": (
        _GPTQ,
        _gptq(scales=_WORDS),
    ),
    "a.qweight has the dtype int64, not int32": (_GPTQ, _gptq(qweight=_WORDS.long())),
    "a.qweight has the shape [4], which is not of two dimensions": (_GPTQ, _gptq(qweight=_WORDS[:, 0])),
    "a.scales has the shape [2, 24], not [1, 24]": (_GPTQ, _gptq(qweight=_WORDS)),
    "a.g_idx has the shape [3], not [128]": (_GPTQ, _gptq(g_idx=torch.arange(3))),
    "a.scales has the shape [2, 24], not [2, 192]": (_AWQ, _gptq(qweight=torch.zeros(128, 24, dtype=torch.int32))),
    "a: 128 inputs cannot be divided into 3 groups": (_INT4, _int4(weight_scale=scales((OUTPUTS, 3)))),
    "a: groups of 16 inputs; the kernels have those of multiples of 32": (
        _INT4,
        _int4(weight_scale=scales((OUTPUTS, 8))),
    ),
    "a.weight_packed has the shape [24, 16], which is not of [24, 64]": (
        _INT4,
        _int4(weight_shape=torch.tensor([OUTPUTS, 64])),
    ),
    "a.weight_shape has the shape [3], not [2]": (_INT4, _int4(weight_shape=torch.tensor([1, 2, 3]))),
    "has no tensor a.weight_shape": (_INT4, _int4(weight_shape=None)),
    "a.weight_zero_point has the shape [4, 24], which is not of 24 outputs": (_INT4, _int4(weight_zero_point=_WORDS)),
    "a.weight has 24 bytes, which are not of [24, 128]": (
        NF4_CONFIG,
        _nf4(weight=torch.zeros(24, 1, dtype=torch.uint8)),
    ),
    "a.weight.absmax has the shape [3], not [48]": (NF4_CONFIG, _nf4(weight__absmax=torch.ones(3))),
    "a.weight.quant_map has other levels than NF4": (NF4_CONFIG, _nf4(weight__quant_map=torch.linspace(-1, 1, 16))),
    "has no tensor a.weight.nested_absmax": (NF4_CONFIG, _nf4(nested=True, weight__nested_absmax=None)),
    "nf4 has the shape [24]; it must be one of two dimensions": (
        NF4_CONFIG,
        _nf4(weight__quant_state__bitsandbytes__nf4=None)
        | {"a.weight.quant_state.bitsandbytes__nf4": _state(shape=[24])},
    ),
    "nf4 has the blocksize 0": (
        NF4_CONFIG,
        _nf4() | {"a.weight.quant_state.bitsandbytes__nf4": _state(blocksize=0)},
    ),
    "nf4 lacks nested_blocksize or nested_offset": (
        NF4_CONFIG,
        _nf4(nested=True) | {"a.weight.quant_state.bitsandbytes__nf4": _state()},
    ),
    "a.scales has scales that are infinite or no numbers": (
        _GPTQ,
        _gptq(scales=scales((2, OUTPUTS)).fill_(torch.nan)),
    ),
    "a.weight.absmax has scales that are infinite or no numbers": (
        NF4_CONFIG,
        _nf4(weight__absmax=torch.full((48,), torch.inf)),
    ),
    "a.weight has the dtype int8, and lacks its scales": (
        compressed("int-quantized", num_bits=8, strategy="channel"),
        {"a.weight": torch.ones(OUTPUTS, INPUTS, dtype=torch.int8)},
    ),
    "nf4 is no JSON object: maximum recursion depth exceeded while decoding a JSON array from a unicode string": (
        NF4_CONFIG,
        _nf4() | {"a.weight.quant_state.bitsandbytes__nf4": torch.tensor([91] * 9999, dtype=torch.uint8)},
    ),
    "nf4 is no JSON object: Expecting value: line 1 column 1 (char 0)": (
        NF4_CONFIG,
        _nf4() | {"a.weight.quant_state.bitsandbytes__nf4": torch.tensor([120], dtype=torch.uint8)},
    ),
}


@pytest.mark.parametrize("said", _TENSORS)
def test_tensors_that_do_not_fit(tmp_path: Path, said: str) -> None:
    config, tensors = _TENSORS[said]
    checkpoint = open_checkpoint(write(tmp_path, config, tensors))
    assert checkpoint is not None
    with pytest.raises(ModelError) as raised:
        checkpoint.read("a.weight")
    assert str(raised.value).startswith(str(tmp_path))
    assert str(raised.value).endswith(said)


def test_damaged_files(tmp_path: Path) -> None:
    write(tmp_path, _GPTQ, {})
    weights, index = tmp_path / "model.safetensors", tmp_path / "model.safetensors.index.json"
    weights.write_bytes(weights.read_bytes()[:5])
    with pytest.raises(ModelError, match="is missing, truncated or damaged"):
        open_checkpoint(tmp_path)
    weights.unlink()
    with pytest.raises(ModelError, match=r"has neither model\.safetensors nor"):
        open_checkpoint(tmp_path)
    for text, said in {
        "{": "cannot be read",
        "[]": "has no weight_map",
        '{"weight_map": {"a": 1}}': "weight_map",
    }.items():
        index.write_text(text)
        with pytest.raises(ModelError, match=said):
            open_checkpoint(tmp_path)
    index.write_text('{"weight_map": {"a": "gone.safetensors"}}')
    with pytest.raises(ModelError, match=r"gone\.safetensors is missing"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config.json: "):
        open_checkpoint(tmp_path)


def test_experts_of_other_names(tmp_path: Path) -> None:
    """Said by `folio check`, too."""
    tensors = {name.replace("a.", "mlp.experts.up_projs.0."): tensor for name, tensor in _gptq().items()}
    folder, said = write(tmp_path, _GPTQ, tensors), "experts are quantized by gptq as mlp.experts.up_projs.0.qweight"
    with pytest.raises(ModelError, match=said):
        open_checkpoint(folder)
    assert any(said in fault for fault in weight_faults(folder))
    named = {name.replace("a.", "0.block_sparse_moe.experts.0.w3."): tensor for name, tensor in _gptq().items()}
    found = open_checkpoint(write(tmp_path, _GPTQ, named))
    assert found is not None
    assert found.names() == {"0.mlp.experts.0.up_proj.weight"}
    assert isinstance(found.read("0.mlp.experts.0.up_proj.weight"), QuantisedWeight)
    floats = {"mlp.experts.0.weight": torch.ones(2, 32).to(torch.float8_e4m3fn)}
    floats["mlp.experts.0.weight_scale_inv"] = torch.ones(())
    assert open_checkpoint(write(tmp_path, {"quant_method": "fp8"}, floats)) is None, "transformers reads it"


@pytest.mark.parametrize("name", ["_blocks", "_scales"])
def test_damaged_experts_in_mxfp4(tmp_path: Path, name: str) -> None:
    tensors = {
        "_blocks": torch.zeros(2, 64, 1, 16, dtype=torch.uint8),
        "_scales": torch.zeros(2, 64, 1, dtype=torch.uint8),
    }
    tensors[name] = tensors[name][:, :, :, :8] if name == "_blocks" else tensors[name].int()
    folder = write(
        tmp_path, {"quant_method": "mxfp4"}, {f"mlp.experts.down_proj{key}": t for key, t in tensors.items()}
    )
    found = open_checkpoint(folder)
    assert found is not None
    assert found.names() == {f"mlp.experts.{e}.down_proj.weight" for e in range(2)}
    with pytest.raises(ModelError, match=f"down_proj{name} has"):
        found.read("mlp.experts.1.down_proj.weight")


@pytest.mark.parametrize("config", [None, {"quant_method": "mxfp8"}], ids=["plain", "mxfp8"])
def test_what_transformers_reads(tmp_path: Path, config: object) -> None:
    assert quantization_fault(config) is None
    assert open_checkpoint(write(tmp_path, config, {})) is None
