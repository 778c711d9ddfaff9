"""Real files: their blocks against llama.cpp's package, their tokens as llama.cpp gives them, and a text."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from folio.app.models.builtin import resolve_model
from folio.app.models.gguf.architectures import parameters
from folio.app.models.gguf.files import read_gguf
from folio.app.models.quantised.checkpoint import open_checkpoint
from folio.kernels import QuantisedWeight

TEXT = "Hello  world\n\n  x = 12345 # it's 日本 🎉<end_of_turn>\n<|im_end|>"
TOKENS = {  # of llama.cpp's `llama_tokenize`
    "smollm2": [
        *(19556, 216, 905, 8866, 1792, 446, 216, 33, 34, 35, 36, 37, 907, 357, 506, 17097, 241, 115, 40993, 15107),
        *(232, 227, 44, 486, 79, 1714, 79, 20589, 46, 198, 2),
    ],
    "gemma3_270m": [
        *(2, 9259, 138, 12392, 108, 138, 236781, 578, 236743, 236770, 236778, 236800, 236812, 236810, 997),
        *(625, 236789, 236751, 33375, 204906, 106, 107, 236820, 236909, 548, 236779, 643, 111038),
    ],
}


@pytest.mark.processes
@pytest.mark.parametrize("model", TOKENS)
def test_tokens(model: str, request: pytest.FixtureRequest) -> None:
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(str(request.getfixturevalue(model))))
    assert tokenizer(TEXT).input_ids == TOKENS[model]
    assert tokenizer.decode(tokenizer(TEXT, add_special_tokens=False).input_ids) == TEXT


@pytest.mark.processes
@pytest.mark.parametrize("model", TOKENS)
def test_a_tensor_of_each_kind(model: str, request: pytest.FixtureRequest) -> None:
    gguf: Any = pytest.importorskip("gguf")
    path: Path = request.getfixturevalue(model)
    checkpoint = open_checkpoint(Path(resolve_model(str(path))))
    assert checkpoint is not None
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    unchanged = {t.kind: (name, t.name) for name, t, undo in parameters(read_gguf(path)) if undo is None}
    for kind, (name, original) in unchanged.items():
        weight, tensor = checkpoint.read(name), stored[original]
        values = weight.dequantised() if isinstance(weight, QuantisedWeight) else weight
        np.testing.assert_array_equal(values.numpy(), gguf.dequantize(tensor.data, tensor.tensor_type), kind)


@pytest.mark.processes
@torch.inference_mode()
def test_a_text_of_dequantised_weights(smollm2: Path) -> None:
    folder = Path(resolve_model(str(smollm2)))
    checkpoint = open_checkpoint(folder)
    assert checkpoint is not None
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32).eval()
    weights = {name: checkpoint.read(name) for name in checkpoint.names()}
    model.load_state_dict(
        {name: w.dequantised() if isinstance(w, QuantisedWeight) else w for name, w in weights.items()}, strict=False
    )
    model.tie_weights()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer("The capital of France is", return_tensors="pt").input_ids
    assert tokenizer.decode(model.generate(prompt, max_new_tokens=2, do_sample=False)[0]).endswith(" is Paris.")
