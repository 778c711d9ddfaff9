"""Texts, windows and schemas of `benchmarks.quality`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from jsonschema import Draft202012Validator
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from benchmarks.quality import forms
from benchmarks.quality.perplexity import WINDOW, by_folio, by_transformers, windows
from benchmarks.quality.schemas import is_valid, make_schemas
from benchmarks.quality.text import prose
from folio.app.engine import LLM
from folio.app.models.builtin import BUILTIN_FOLDER
from folio.app.models.quantised.checkpoint import open_checkpoint
from folio.kernels import QuantisedWeight


def test_the_text_is_prose_of_so_many_words() -> None:
    text = prose(20_000)
    assert len(text.split()) == 20_000
    assert "```" not in text
    assert "<!--" not in text
    assert text.startswith(prose(100))


def test_schemas_are_valid_and_differ() -> None:
    schemas = make_schemas(100)
    for schema in schemas:
        Draft202012Validator.check_schema(schema)
    written = [json.dumps(schema) for schema in schemas]
    assert len(set(written)) == 100
    assert written == [json.dumps(schema) for schema in make_schemas(100)]
    assert all(any(f'"{kind}"' in text for text in written) for kind in ("$ref", "pattern", "enum", "anyOf", "items"))


def test_an_output_that_is_cut_is_not_valid() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    assert is_valid('{"a": 1}', schema)
    assert not is_valid('{"a": 1', schema)
    assert not is_valid('{"a": "1"}', schema)


class _Tokenizer:
    """A token for each character, behind a first one if it adds any."""

    def __init__(self, first: list[int]) -> None:
        self._first = first

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return (self._first if add_special_tokens else []) + list(text.encode())


@pytest.mark.parametrize(("first", "begins"), [([], b"aa"), ([256], [256])])
def test_windows_begin_as_llama_cpp_begins_them(first: list[int], begins: list[int] | bytes) -> None:
    parts = windows(_Tokenizer(first), "a" * (2 * WINDOW + 10))
    assert [len(part) for part in parts] == [WINDOW, WINDOW]
    assert all(part[: len(begins)] == list(begins) for part in parts)


def test_the_engine_and_transformers_predict_the_same() -> None:
    with LLM("builtin", dtype="float32") as llm:
        parts = windows(llm.engine.model.tokenizer, prose(1200), most=2)
        ours = by_folio(llm, parts)
    theirs = by_transformers(AutoModelForCausalLM.from_pretrained(BUILTIN_FOLDER, dtype=torch.float32).eval(), parts)
    assert len(ours.logprobs) == 2 * (WINDOW // 2 - 1)
    assert ours.perplexity == pytest.approx(theirs.perplexity, rel=1e-4)
    assert ours.agreement(theirs) > 0.99


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    folder = tmp_path / "plain"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 2}))
    random = torch.Generator().manual_seed(0)
    names = [f"model.layers.{layer}.mlp.{name}.weight" for layer in range(2) for name in ("up_proj", "norm")]
    save_file({name: torch.randn(200, 192, generator=random) for name in names}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("form", forms.FORMS)
def test_forms_are_read_as_the_weights_that_they_stand_for(form: str, plain: Path, tmp_path: Path) -> None:
    exact = forms.write(form, plain, tmp_path / form)
    given, checkpoint = load_file(plain / "model.safetensors"), open_checkpoint(tmp_path / form)
    assert checkpoint is not None
    assert checkpoint.names() == exact.keys() == given.keys()
    for name, expected in exact.items():
        read = checkpoint.read(name)
        assert isinstance(read, QuantisedWeight) == name.endswith("_proj.weight")
        actual = read.dequantised() if isinstance(read, QuantisedWeight) else read
        assert (actual - expected).norm() / expected.norm() < 0.007
        assert (given[name] - expected).norm() / expected.norm() < 0.15


def test_first_layers(plain: Path, tmp_path: Path) -> None:
    forms.write_first_layers(1, plain, tmp_path / "first")
    assert json.loads((tmp_path / "first" / "config.json").read_text())["num_hidden_layers"] == 1
    assert all(name.startswith("model.layers.0.") for name in load_file(tmp_path / "first" / "model.safetensors"))
