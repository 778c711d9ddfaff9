"""Models whose weights stay packed: the same logits and tokens as with their values, also from a stored file."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from folio.app.config.engine import EngineConfig, ResolvedConfig
from folio.app.engine import LLM, SamplingParams
from folio.app.engine.layers.linear import PackedEmbedding, PackedLinear
from folio.app.engine.model import checkpoint_module, stored_module
from folio.app.engine.model.loader import LoadedModel, load_config, load_model
from folio.app.errors import ConfigError, ModelError
from folio.app.models.builtin import resolve_model
from folio.app.models.quantised.checkpoint import open_checkpoint
from folio.app.models.weights.store import WeightStore
from folio.kernels import CpuLinear, QuantisedWeight, quantise
from tests.app.engine.model.quantised_checkpoints import quantised_file, write_quantised
from tests.app.models.gguf.files import tiny_llama, write_gguf
from tests.conftest import MakeCheckpoint

IDS = torch.arange(3, 80)[None]


@pytest.fixture(autouse=True)
def products() -> None:
    if reason := CpuLinear().unsupported(torch.float32):
        pytest.skip(reason)


def config_of(path: Path, **settings: Any) -> ResolvedConfig:
    return EngineConfig(model=str(path), skip_tokenizer_init=True, **settings).on_device("cpu")


def logits_of(loaded: LoadedModel) -> torch.Tensor:
    loaded.module.set_attn_implementation("eager")
    with torch.inference_mode():
        logits: torch.Tensor = loaded.module(input_ids=IDS, use_cache=False).logits[0].float()
    return logits


def plain_model(path: Path) -> Any:
    """transformers' model with the values of the weights, in float32."""
    module: Any = AutoModelForCausalLM.from_config(load_config(str(path), weights=False), dtype=torch.float32)
    checkpoint = open_checkpoint(Path(resolve_model(str(path))))
    assert checkpoint is not None
    values = {name: checkpoint.read(name) for name in checkpoint.names()}
    state = {
        name: value.dequantised() if isinstance(value, QuantisedWeight) else value for name, value in values.items()
    }
    missing, unexpected = module.load_state_dict(state, strict=False)
    assert set(missing) <= {"lm_head.weight"}
    assert not unexpected
    return module.eval()


@pytest.mark.parametrize("untied", [False, True])
@pytest.mark.parametrize(
    "plain", [(), ("blk.0.attn_k.weight", "blk.1.ffn_down.weight"), ("token_embd.weight", "output.weight")]
)
def test_logits_are_those_of_the_values(tmp_path: Path, plain: tuple[str, ...], untied: bool) -> None:
    path = quantised_file(tmp_path / "m.gguf", plain=plain, untied=untied)
    with torch.inference_mode():
        expected = plain_model(path)(input_ids=IDS, use_cache=False).logits[0]
    exact = logits_of(load_model(config_of(path, dtype="float32")))
    torch.testing.assert_close(exact, expected, rtol=1e-4, atol=1e-4)
    rounded = logits_of(load_model(config_of(path)))
    assert ((rounded - expected).norm(dim=-1) / expected.norm(dim=-1)).median().item() < 0.05


def test_everything_stays_packed(tmp_path: Path) -> None:
    """In fewer bytes than the file has and 15 %: codes are not repeated, and tied embeddings exist once."""
    path = quantised_file(tmp_path / "m.gguf")
    module = load_model(config_of(path)).module
    packed = {part.packed for part in module.modules() if isinstance(part, PackedEmbedding | PackedLinear)}
    assert len(packed) == 3 * 4 + 1
    assert all(weight.is_quantised for weight in packed)
    most = 1.15 * sum(tensor.num_bytes for tensor in _tensors(path))
    assert sum(weight.nbytes for weight in packed) + sum(p.nbytes for p in module.parameters()) <= most


def _tensors(path: Path) -> list[Any]:
    from folio.app.models.gguf.files import read_gguf

    return list(read_gguf(path).tensors.values())


@pytest.mark.parametrize("untied", [False, True])
def test_the_stored_file_gives_the_same_model(tmp_path: Path, untied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the file of a model with tied embeddings was taken for another model's, and written again."""
    path = quantised_file(tmp_path / "m.gguf", plain=("blk.0.attn_k.weight",), untied=untied)
    store, logits = WeightStore(tmp_path / "weights"), []
    for start in range(2):  # the second one from the file that the first one has written
        if start:
            monkeypatch.delattr(stored_module, "make_module")
        loaded = load_model(config_of(path), weights=store)
        logits.append(logits_of(loaded))
        assert loaded.weights is not None
        loaded.weights.close()
    assert torch.equal(*logits)
    assert len(list((tmp_path / "weights").glob("*.weights"))) == 1


@pytest.mark.parametrize("untied", [False, True])
def test_products_of_cuda(tmp_path: Path, untied: bool, triton_products: None) -> None:
    """Plain weights stay as they are; neighbours of one kind are one part; a stored file gives the same model."""
    plain = ("blk.0.attn_output.weight", *(["output.weight"] if untied else []))
    path = quantised_file(tmp_path / "m.gguf", plain=plain, untied=untied)
    with torch.inference_mode():
        expected = plain_model(path)(input_ids=IDS, use_cache=False).logits[0]
    store, logits = WeightStore(tmp_path / "weights"), []
    for _ in range(2):
        loaded = load_model(config_of(path), weights=store)
        logits.append(logits_of(loaded))
        layers: Any = loaded.module.model.layers
        assert type(layers[0].self_attn.o_proj) is nn.Linear
        assert type(loaded.module.lm_head) is (nn.Linear if untied else PackedLinear)
        assert {len(layer.mlp.gate_up_proj.packed.parts) for layer in layers} <= {1, 2}
        assert loaded.weights is not None
        loaded.weights.close()
    assert torch.equal(*logits)
    assert ((logits[0] - expected).norm(dim=-1) / expected.norm(dim=-1)).median().item() < 0.02


@pytest.mark.parametrize(("kind", "dtype", "most"), [("int8", torch.int8, 0.05), ("fp8", torch.float8_e4m3fn, 0.15)])
def test_codes_of_8_bits_on_cuda(
    kind: str, dtype: torch.dtype, most: float, checkpoint: MakeCheckpoint, triton_products: None, tmp_path: Path
) -> None:
    """As many rows as these are rounded, whose differences random layers amplify; also from a stored file."""
    from folio.kernels.triton.eight_bits import EightBitProduct

    packed, dense = write_quantised(checkpoint("llama", num_hidden_layers=1), kind, tmp_path)
    expected, store, logits = logits_of(load_model(config_of(dense, dtype="bfloat16"))), WeightStore(tmp_path / "w"), []
    for _ in range(2):
        loaded = load_model(config_of(packed), weights=store)
        logits.append(logits_of(loaded))
        layers = [module for module in loaded.module.modules() if isinstance(module, PackedLinear)]
        parts = [part for layer in layers for part in layer.packed.parts]
        assert {part.codes.dtype for part in parts} == {dtype}
        assert all(EightBitProduct().fits(part) for part in parts)
        assert loaded.weights is not None
        loaded.weights.close()
    assert torch.equal(*logits)
    assert ((logits[0] - expected).norm(dim=-1) / expected.norm(dim=-1)).median().item() < most


@pytest.mark.parametrize(
    ("settings", "stays"),
    [
        ({}, True),
        ({"dtype": "float16"}, True),
        ({"dtype": "float32"}, False),
        ({"quantization": "int4"}, False),
        ({"tensor_parallel_size": 2}, True),
        ({"device": "cpu"}, True),
        ({"dtype": "float16", "device": "cpu"}, False),
    ],
    ids=str,
)
def test_where_floats_of_8_bits_stay_packed(
    settings: dict[str, Any], stays: bool, checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """Elsewhere transformers reads them, in the settings' dtype."""
    packed, _ = write_quantised(checkpoint("llama", num_hidden_layers=1), "fp8", tmp_path)
    given = dict(settings)
    device, hf_config = given.pop("device", "cuda"), load_config(str(packed), weights=False)
    config = EngineConfig(model=str(packed), skip_tokenizer_init=True, **given).on_device(device)
    assert (checkpoint_module.find_quantised(config, hf_config) is not None) == stays


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_made_at_load_on_cuda(
    quantization: str, checkpoint: MakeCheckpoint, triton_products: None, tmp_path: Path
) -> None:
    """As close as bfloat16, and rows in 8 bits, are to float32, in which the values are another model's; also from a
    stored file."""
    folder = checkpoint("qwen2", tie_word_embeddings=quantization == "int4")
    values = _rounded_model(folder, 8 if quantization == "int8" else 4)
    with torch.inference_mode():
        expected = values(input_ids=IDS, use_cache=False).logits[0]
    store, found = WeightStore(tmp_path / "weights"), []
    for _ in range(2):
        loaded = load_model(config_of(folder, dtype="bfloat16", quantization=quantization), weights=store)
        found.append(logits_of(loaded))
        packed = [module.packed for module in loaded.module.modules() if isinstance(module, PackedLinear)]
        assert [len(weight.parts) for weight in packed] == [1] * (3 * 4 + 1)
        assert all(weight.is_quantised for weight in packed)
        assert loaded.weights is not None
        loaded.weights.close()
    assert torch.equal(*found)
    most = 0.1 if quantization == "int8" else 0.05
    assert ((found[0] - expected).norm(dim=-1) / expected.norm(dim=-1)).median().item() < most
    with pytest.raises(ConfigError, match=rf"'{quantization}', which is not possible with torch\.float32 here"):
        load_model(config_of(folder, quantization=quantization))


def _rounded_model(folder: Path, bits: Literal[4, 8]) -> Any:
    """transformers' model in float32, with the values that the weights of its linear layers are rounded to."""
    module: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            group = 128 if bits == 8 else None
            layer.weight = nn.Parameter(quantise(layer.weight.detach().bfloat16(), bits, group).dequantised())
    return module.eval()


def test_greedy_tokens_of_the_engine_are_those_of_the_values(tmp_path: Path) -> None:
    path = quantised_file(tmp_path / "m.gguf")
    prompts = [[(i * 37 + j * 11) % 250 for j in range(5 + 7 * i)] for i in range(6)]
    model, expected = plain_model(path), []
    for prompt in prompts:
        out = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None)
        expected.append(out[0, len(prompt) :].tolist())
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    with LLM(path, dtype="float32", kv_memory_bytes=8 << 20, skip_tokenizer_init=True) as llm:
        assert [completion.token_ids for completion in llm.generate(prompts, params)] == expected


@pytest.mark.processes  # pip fetches the model
def test_a_real_models_greedy_texts_are_those_of_the_values(smollm2: Path) -> None:
    texts = ["The capital of France is", "def fibonacci(n):", "Once upon a time there was"]
    params = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
    with LLM(smollm2, dtype="float32", kv_memory_bytes=64 << 20) as llm:
        found = llm.generate(texts, params)
    model = plain_model(smollm2)
    for completion in found:
        prompt = torch.tensor([completion.prompt_token_ids])
        out = model.generate(prompt, max_new_tokens=16, do_sample=False, eos_token_id=None)
        assert completion.token_ids == out[0, prompt.shape[1] :].tolist()


def test_what_cannot_be_done_is_said(tmp_path: Path) -> None:
    path = quantised_file(tmp_path / "m.gguf")
    with pytest.raises(ConfigError, match=r"'int8', but .* is quantised already"):
        load_model(config_of(path, quantization="int8"))
    with pytest.raises(ConfigError, match=r"not possible with torch\.float16"):
        load_model(config_of(path, dtype="float16"))


def test_missing_weights_are_named(tmp_path: Path) -> None:
    settings, tensors = tiny_llama(2)
    del tensors["blk.1.ffn_up.weight"]
    with pytest.raises(ModelError, match=r"lacks 1 weights, model.layers.1.mlp.up_proj.weight among them|ffn_up"):
        load_model(config_of(write_gguf(tmp_path / "m.gguf", settings, tensors)))


def test_a_model_that_is_made_leaves_other_threads_alone() -> None:
    """Regression: parameters that another thread loaded meanwhile lost their values."""
    with checkpoint_module._parameters_on_meta(), ThreadPoolExecutor(1) as pool:
        own, other = nn.Linear(2, 2), pool.submit(nn.Linear, 2, 2).result()
    assert (own.weight.is_meta, other.weight.is_meta) == (True, False)
