"""The twelve models of `benchmarks.shelf`: checkpoints, the memory that each needs, and their requests from a trace.

Checkpoints have random weights of fixed seeds, bfloat16, in six published shapes (two of them with fewer layers or a
smaller vocabulary) of 0.13 to 0.49 billion parameters. They are made once, in `~/.cache/folio/benchmarks/shelf`.
"""

from __future__ import annotations

import csv
import random
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import checkpoints, harness
from folio.app.cli.bench.load import Ask

TRACE = harness.ROOT.parent / "shared" / "traces" / "servegen_models.csv"
FOLDER = Path.home() / ".cache" / "folio" / "benchmarks" / "shelf"
NUM_MODELS = 12
# Of prompts and outputs in the trace, which are of models a hundred times larger on GPUs.
SHORTENED = 8
LONGEST_PROMPT, LONGEST_OUTPUT = 384, 128
MAX_MODEL_LEN, MAX_NUM_SEQS, STEP_TOKENS = 512, 8, 256
# Names of models by how often they are asked for, and sizes, meet at random.
SEED = 7
QUICK_LAYERS, QUICK_VOCABULARY = 2, 8192

# Shape → number of models.
COUNTS = {
    "smollm2-135m": 3,
    "pythia-160m": 2,
    "gemma3-180m": 2,
    "qwen3-290m": 2,
    "smollm2-360m": 2,
    "qwen2.5-0.5b": 1,
}
LARGEST = "qwen2.5-0.5b"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchModel:
    """A checkpoint.

    Attributes:
        name: for clients, by rank: "m00" is the model that the trace asks for most.
        traced: its name in the trace.
        weight_bytes: of the checkpoint; kernels may read copies of some weights in other layouts.
        token_bytes: keys and values of a token.
    """

    name: str
    traced: str
    shape: str
    folder: Path
    vocab_size: int
    weight_bytes: int
    token_bytes: int

    @property
    def kv_bytes(self) -> int:
        """Keys and values of as many sequences as run at once, of half the greatest length."""
        return MAX_NUM_SEQS * MAX_MODEL_LEN // 2 * self.token_bytes

    @property
    def need_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes

    @property
    def engine(self) -> dict[str, Any]:
        """Settings of `EngineConfig`, the same for every way of serving: short steps, which take little memory, and no
        warm-up, which would make a start longer by more than the first request waits for."""
        return {
            "model": str(self.folder),
            "max_model_len": MAX_MODEL_LEN,
            "max_num_seqs": MAX_NUM_SEQS,
            "max_num_batched_tokens": STEP_TOKENS,
            "warm_up": False,
        }


@dataclass(frozen=True, slots=True)
class ModelAsk(Ask):
    """A request to one of several models."""

    model: str = ""


@dataclass(frozen=True, slots=True)
class TracedRequest:
    at_s: float
    model: str
    prompt_tokens: int
    output_tokens: int


def make_models(requests: Sequence[TracedRequest], *, quick: bool) -> list[BenchModel]:
    """The models in the order in which `requests` ask for them, most first. Missing checkpoints are made."""
    shapes = [(shape, i) for shape, count in COUNTS.items() for i in range(count)]
    random.Random(SEED).shuffle(shapes)
    ranked = [name for name, _ in Counter(request.model for request in requests).most_common()]
    assert len(ranked) == len(shapes) == NUM_MODELS
    return [
        _make_model(f"m{rank:02}", traced, shape, number, quick)
        for rank, (traced, (shape, number)) in enumerate(zip(ranked, shapes, strict=True))
    ]


def _make_model(name: str, traced: str, shape: str, number: int, quick: bool) -> BenchModel:
    changed = {"max_position_embeddings": 8192, "bos_token_id": 0, "eos_token_id": 1, "dtype": "bfloat16"}
    if quick:
        changed["num_hidden_layers"] = QUICK_LAYERS
        changed["vocab_size"] = min(checkpoints.SHAPES[shape]["vocab_size"], QUICK_VOCABULARY)
    config = checkpoints.config_of(shape, **changed)
    folder = FOLDER / f"{'quick-' if quick else ''}{shape}-{number}"
    if not (folder / ".complete").exists():
        print(f"making {folder}", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        checkpoints.write_checkpoint(folder, config, seed=SEED + number)
        (folder / ".complete").touch()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return BenchModel(
        name=name,
        traced=traced,
        shape=shape,
        folder=folder,
        vocab_size=config.vocab_size,
        weight_bytes=sum(path.stat().st_size for path in folder.glob("*.safetensors")),
        token_bytes=2 * 2 * config.num_hidden_layers * heads * head_dim,
    )


def read_trace(path: Path | None) -> tuple[list[TracedRequest], str]:
    """The requests to the twelve models that are asked for most, with shortened lengths, and the name of their source.

    Args:
        path: for `read_requests`; without such a file, arrivals are Poisson, with rates that fall with the rank.
    """
    if path is None or not path.is_file():
        return list(
            _synthetic()
        ), "synthetic: Poisson arrivals, 1,800 requests in 3 hours ÷ rank, because there is no trace"
    every = read_requests(path)
    chosen = {name for name, _ in Counter(request.model for request in every).most_common(NUM_MODELS)}
    return [
        replace(
            request,
            prompt_tokens=min(max(request.prompt_tokens // SHORTENED, 1), LONGEST_PROMPT),
            output_tokens=min(max(request.output_tokens // SHORTENED, 1), LONGEST_OUTPUT),
        )
        for request in every
        if request.model in chosen
    ], f"{path.name}, lengths ÷ {SHORTENED}"


def read_requests(path: Path) -> list[TracedRequest]:
    """All requests of a trace, a CSV with the columns time_s, model, input_tokens and output_tokens."""
    with path.open() as file:
        return [
            TracedRequest(float(row["time_s"]), row["model"], int(row["input_tokens"]), int(row["output_tokens"]))
            for row in csv.DictReader(file)
        ]


def _synthetic() -> Iterator[TracedRequest]:
    rng = random.Random(SEED)
    duration_s, most, mean_prompt, mean_output = 3 * 3600, 1800, 605 // SHORTENED, 152 // SHORTENED
    drawn = [
        (rng.random() * duration_s, f"model-{rank:02}") for rank in range(NUM_MODELS) for _ in range(most // (rank + 1))
    ]
    for at_s, model in sorted(drawn):
        prompt = min(round(rng.expovariate(1 / mean_prompt)) + 1, LONGEST_PROMPT)
        yield TracedRequest(at_s, model, prompt, min(round(rng.expovariate(1 / mean_output)) + 1, LONGEST_OUTPUT))


def asks_of(requests: Sequence[TracedRequest], served: Sequence[BenchModel], duration_s: float) -> list[ModelAsk]:
    """These requests in `duration_s` seconds, with random prompts that share no prefix."""
    by_traced = {model.traced: model for model in served}
    rng = np.random.default_rng(SEED)
    begin_s, span_s = requests[0].at_s, requests[-1].at_s - requests[0].at_s
    return [
        ModelAsk(
            rng.integers(2, by_traced[request.model].vocab_size, size=request.prompt_tokens).tolist(),
            request.output_tokens,
            (request.at_s - begin_s) / span_s * duration_s,
            by_traced[request.model].name,
        )
        for request in requests
    ]
