"""Quality of real models: what packed weights, weights quantised at load and small KV caches cost.

The models of `benchmarks.real_models`; texts are this repository's documentation.

- perplexity of 20,000 words, in windows of 512 tokens whose second halves are scored: the GGUF file as Folio serves it,
  beside transformers on the dequantised weights in float32, and beside llama.cpp's `llama-perplexity` on the file;
  and by SmolLM2 of the first 5,000 words: the dequantised weights in bfloat16, int8 and int4 made from them at load,
  each `kv_dtype`, and the forms of `benchmarks.quality.forms`, each also beside transformers on the weights that its
  codes stand for
- for each, the share of tokens with the same first choice as transformers'
- 100 JSON schemas: the share of sampled outputs that are valid, enforced and only told in the prompt
- speculation, prefix caching and preemption: `benchmarks.quality.features`

--quick: SmolLM2 alone, 900 words, one variant, three schemas, without the last part.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from benchmarks import harness, real_models
from benchmarks.picture import OURS, RIVALS, bars, picture
from benchmarks.quality import features, forms, schemas
from benchmarks.quality.perplexity import WINDOW, Predictions, by_folio, by_transformers, windows
from benchmarks.quality.text import first_words, prose
from benchmarks.rivals import llama_cpp
from benchmarks.rivals.processes import FOLDER
from folio.app.config.engine import KVDtype, Quantization
from folio.app.engine import LLM

NUM_WORDS, QUICK_WORDS = 20_000, 900  # of which llama-perplexity needs two windows
VARIANT_WORDS = 5_000  # of which the variants are scored
NUM_SCHEMAS, QUICK_SCHEMAS, TOLD_SHARE = 100, 3, 10  # one schema of ten is also told without being enforced
INSTRUCTED, HALF_THE_LAYERS = "smollm2", 15  # the model that answers, and of which variants are made
# Variant → settings of the engine, on the dequantised weights. The first is what the others are measured against.
BASE = "bfloat16"
VARIANTS: dict[str, dict[str, str]] = {
    BASE: {"dtype": "bfloat16"},
    **{name: {"dtype": "bfloat16", "quantization": name} for name in get_args(Quantization) if name != "none"},
    **{f"kv_{name}": {"dtype": "bfloat16", "kv_dtype": name} for name in get_args(KVDtype) if name != "auto"},
}
QUICK_VARIANTS = (BASE, "kv_int8")


def measure(file: Path, plain: Path, text: str, quick: bool) -> Iterator[tuple[str, Predictions]]:
    """Predictions by variant: transformers' first, then the packed file's; of SmolLM2 variants and forms, too."""
    tokenizer = AutoTokenizer.from_pretrained(plain)
    parts = windows(tokenizer, text)
    first = parts[: len(windows(tokenizer, first_words(text, VARIANT_WORDS)))]
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    yield "reference", by_transformers(model, parts)
    yield "packed", folio_predicts(file, parts, {})
    if plain.name != INSTRUCTED:
        return
    for name in QUICK_VARIANTS if quick else VARIANTS:
        yield name, folio_predicts(plain, first, VARIANTS[name])
    for form in () if quick else forms.FORMS:
        model.load_state_dict(forms.write(form, plain, plain.with_name(form)), strict=False)
        yield f"{form}_weights", by_transformers(model, first)
        yield form, folio_predicts(plain.with_name(form), first, VARIANTS[BASE])


def folio_predicts(model: Path, parts: list[list[int]], settings: dict[str, Any]) -> Predictions:
    with LLM(model, prefix_cache=False, **settings) as llm:
        return by_folio(llm, parts)


def perplexities(name: str, file: Path, plain: Path, text: str, args: argparse.Namespace) -> dict[str, float]:
    """Perplexities of a model by variant, and shares of equal first choices."""
    found: dict[str, float] = {}
    reference: Predictions | None = None
    for variant, predictions in measure(file, plain, text, args.quick):
        reference = reference or predictions
        found[variant] = predictions.perplexity
        found[f"{variant}_agreement"] = predictions.agreement(reference)
        print(f"{name:10}{variant:16}{predictions.perplexity:10.3f}{found[f'{variant}_agreement']:8.1%}", flush=True)
    if not llama_cpp.is_built(args.rivals):
        print("llama.cpp is not measured: it is not built (python -m benchmarks.llama_cpp --build)")
        return found
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as written:
        written.write(text)
        written.flush()
        found["llama_cpp"] = llama_cpp.perplexity(file, Path(written.name), WINDOW, args.rivals)
    print(f"{name:10}{'llama.cpp':16}{found['llama_cpp']:10.3f}", flush=True)
    return found


def figures_of(by_model: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Ratios of perplexities: those with an aim are the worst of the models'."""
    figures: dict[str, float] = {}
    for name, found in by_model.items():
        figures[f"perplexity_vs_reference_{name}"] = found["packed"] / found["reference"]
        figures[f"first_choices_equal_{name}"] = found["packed_agreement"]
        if "llama_cpp" in found:
            figures[f"perplexity_vs_llama_cpp_{name}"] = found["packed"] / found["llama_cpp"]
        for variant in (*VARIANTS, *forms.FORMS):
            if variant in found and variant != BASE:
                figures[f"{variant}_perplexity_vs_bfloat16_{name}"] = found[variant] / found[BASE]
            if f"{variant}_weights" in found:
                figures[f"{variant}_perplexity_vs_its_weights_{name}"] = found[variant] / found[f"{variant}_weights"]
    for ratio in ("perplexity_vs_reference", "perplexity_vs_llama_cpp"):
        if ratios := [value for key, value in figures.items() if key.startswith(ratio)]:
            figures[ratio] = max(ratios)
    return figures


def valid_shares(model: Path, count: int) -> tuple[dict[str, float], list[dict[str, str]]]:
    """Shares of outputs that are valid under their schemas, enforced or only told, and those that are not
    although enforced."""
    asked = schemas.make_schemas(count)
    with LLM(model) as llm:
        enforced, told = schemas.ask(llm, asked, -(-count // TOLD_SHARE))
    wrong = [
        {"schema": json.dumps(schema), "output": output}
        for schema, output in zip(asked, enforced, strict=True)
        if not schemas.is_valid(output, schema)
    ]
    valid = sum(map(schemas.is_valid, told, asked))
    return {"schemas_valid": 1 - len(wrong) / count, "schemas_valid_unenforced": valid / len(told)}, wrong


def main() -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--rivals", type=Path, default=FOLDER, help="where llama.cpp is built")
    args = parser.parse_args()
    harness.needs("jsonschema")
    disable_progress_bar()
    names = [INSTRUCTED] if args.quick else list(real_models.MODELS)
    files = {name: file for name in names if (file := real_models.fetched(name)) is not None}
    if INSTRUCTED not in files:
        raise SystemExit("this benchmark needs the real model, which the package index has")
    text = prose(QUICK_WORDS if args.quick else NUM_WORDS)
    by_model: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        plain = {name: Path(folder, name) for name in files}
        for name, file in files.items():
            plain[name].mkdir()
            real_models.write_dequantised(file, plain[name])
            by_model[name] = perplexities(name, file, plain[name], text, args)
        shares, wrong = valid_shares(files[INSTRUCTED], QUICK_SCHEMAS if args.quick else NUM_SCHEMAS)
        figures = figures_of(by_model) | shares
        if not args.quick:
            half = Path(folder, "half")
            forms.write_first_layers(HALF_THE_LAYERS, plain[INSTRUCTED], half)
            drafts = {"int4": Path(folder, "awq"), "half": half}
            figures |= features.measure(str(files[INSTRUCTED]), features.Sizes(), drafts)
    for key, value in figures.items():
        print(f"  {key:44}{value:9.4f}")
    harness.finish("quality", args, figures, {"perplexity": by_model, "invalid": wrong}, draw)


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Perplexity by variant, a plot for each model."""
    by_model = result["raw"]["perplexity"]
    with picture(result, path, "Perplexity of this documentation", columns=len(by_model)) as (_, plots):
        for plot, (name, found) in zip(plots, by_model.items(), strict=True):
            values = {key: value for key, value in found.items() if not key.endswith("_agreement")}
            others = ("reference", "llama_cpp", "_weights")
            bars(plot, values, [RIVALS[0] if key.endswith(others) else OURS[0] for key in values], "%.2f")
            plot.set_title(real_models.MODELS[name].title)


if __name__ == "__main__":
    main()
