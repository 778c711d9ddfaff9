"""Decode steps and prefills of one shape on one device, by batch size (`benchmarks.throughput --shape`).

Random weights in bfloat16, made on the device (`load_format: dummy`), and random prompts without a common prefix:

- decode steps of 1, 16, 64 and 256 sequences of 1,024 tokens, greedy, and at temperature 1 with top-p 0.9: weights and
  cache read a second, against the rate of reads measured in this run
- prefill of one prompt of 512, 2,048 and 8,192 tokens, against the matrix rate measured in this run
- 1 and 16 requests of 1,024 tokens with 64 new ones over their whole time, beside `transformers.generate` with the same
  weights on the same device, in turn

or, with `--parts`, the parts of ten greedy decode steps of each batch (`overhead.step_parts`), and on
CUDA the kernels of three.

Each result is printed and recorded when it is known (`benchmarks.facts`); outside of gpu_day it is appended to
`throughput.jsonl` in the folder that `FOLIO_RESULTS` names. --quick has batches of 1 and 16 with 128 tokens.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedConfig

from benchmarks import checkpoints, facts, harness
from benchmarks.engine import overhead
from benchmarks.engine.device_time import READ_BYTES, product_limit, read_limit
from benchmarks.rivals.candidates import TransformersGenerate, folio_rate
from folio.app.engine import LLM, SamplingParams
from folio.app.engine.model.checkpoint_module import random_model

DEFAULT_SHAPE = "llama-3-8b"
SHAPES = (DEFAULT_SHAPE, checkpoints.QWEN, "tiny")
DTYPE = torch.bfloat16
WEIGHT_STD = 0.02
# Of logits. Those of untrained models are so flat that top-p leaves most of the vocabulary, which costs a sampler more
# than those of trained models: with this deviation, 0.9 of the mass is on some tens to hundreds of tokens.
LOGIT_STD = 4.8
MODES: dict[str, dict[str, float]] = {"greedy": {"temperature": 0.0}, "top_p": {"temperature": 1.0, "top_p": 0.9}}
MAX_NUM_SEQS, STEP_TOKENS = 256, 8192
WARM_UP_STEPS, LEAST_STEPS, PROFILED_STEPS = 3, 5, 10
KERNEL_STEPS, MOST_KERNELS = 3, 12


@dataclass(frozen=True, slots=True)
class Sizes:
    """Size of the measurements.

    Attributes:
        rival_batches: batches at which transformers is measured, too; after the last of them it is freed.
        steps, most_s: decode steps that are timed, and the seconds after which no further step is timed.
        repeats: of prefills, and of runs beside transformers.
    """

    batches: tuple[int, ...] = (1, 16, 64, 256)
    context: int = 1024
    prefills: tuple[int, ...] = (512, 2048, 8192)
    rival_batches: tuple[int, ...] = (1, 16)
    new_tokens: int = 64
    steps: int = 48
    most_s: float = 5.0
    repeats: int = 3


QUICK = Sizes((1, 16), 128, (512,), (1,), new_tokens=8, steps=8, repeats=1)


class Sweep:
    """Measures one engine and collects the figures.

    Args:
        bandwidth, flops: the device's ceilings.
    """

    def __init__(self, llm: LLM, config: PreTrainedConfig, sizes: Sizes, bandwidth: float, flops: float) -> None:
        self.figures: dict[str, float] = {}
        self.raw: dict[str, list[float]] = {}
        self._llm, self._config, self._sizes = llm, config, sizes
        self._prompts = torch.Generator().manual_seed(time.time_ns() % 2**40)
        self._ids = itertools.count()
        self._bandwidth, self._flops = bandwidth, flops
        # Products read all weights in each step, except a separate input embedding.
        embedding = config.vocab_size * config.hidden_size
        total = sum(math.prod(shape) for shape in parameter_shapes(config))
        self._read_parameters = total if config.tie_word_embeddings else total - embedding
        self._body_parameters = self._read_parameters - embedding
        head_dim = config.hidden_size // config.num_attention_heads
        self._kv_token_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * DTYPE.itemsize
        facts.note(
            self.figures,
            "ceilings",
            f"reads at {self._bandwidth / 1e9:.1f} GB/s, products at {self._flops / 1e12:.3g} TFLOP/s",
            read_bandwidth_gb_per_s=self._bandwidth / 1e9,
            matrix_gflop_per_s=self._flops / 1e9,
        )

    def prompts(self, count: int, length: int) -> list[list[int]]:
        shape = (count, length)
        prompts: list[list[int]] = torch.randint(self._config.vocab_size, shape, generator=self._prompts).tolist()
        return prompts

    @contextmanager
    def decoding(self, batch: int, **params: float) -> Iterator[None]:
        """Compute this many prompts, and run warm-up steps; every later step is a decode of all of them."""
        engine = self._llm.engine
        names = [f"sweep {next(self._ids)}" for _ in range(batch)]
        settings = SamplingParams(max_tokens=most_new_tokens(self._sizes), ignore_eos=True, **params)  # type: ignore[arg-type]
        try:
            for name, prompt in zip(names, self.prompts(batch, self._sizes.context), strict=True):
                engine.submit(name, prompt, settings)
            while any(request.num_uncomputed > 1 for request in engine.scheduler.unfinished()):
                engine.step()
            for _ in range(WARM_UP_STEPS):
                engine.step()
            yield
        finally:
            for name in names:
                engine.cancel(name)

    def decode(self, batch: int, mode: str) -> None:
        engine, sizes, times = self._llm.engine, self._sizes, list[float]()
        with self.decoding(batch, **MODES[mode]):
            end = time.perf_counter() + sizes.most_s
            while len(times) < sizes.steps and (len(times) < LEAST_STEPS or time.perf_counter() < end):
                start = time.perf_counter()
                deltas = engine.step()
                times.append(time.perf_counter() - start)
                if len(deltas) != batch or any(delta.error for delta in deltas):
                    raise RuntimeError(f"a step of {batch} sequences gave {len(deltas)} deltas: {deltas[:1]}")
            cached = sum(len(request.token_ids) for request in engine.scheduler.unfinished()) - batch * len(times) / 2
        median, tail = statistics.median(times), harness.percentile(times, 99)
        rate = batch * len(times) / sum(times)
        read_bytes = self._read_parameters * DTYPE.itemsize + cached * self._kv_token_bytes
        limit = read_bytes / self._bandwidth
        key = f"{mode}_{batch}"
        self.raw[f"decode_s_{key}"] = times
        if key == "greedy_1":
            weights_s = self._read_parameters * DTYPE.itemsize / self._bandwidth
            self.figures["single_share_of_bandwidth"] = weights_s / median
        facts.note(
            self.figures,
            f"decode {mode} batch {batch}",
            f"{median * 1e3:.2f} ms (p99 {tail * 1e3:.2f}, {len(times)} steps), {rate:.0f} tok/s, "
            f"reading {read_bytes / median / 1e12:.2f} TB/s, {limit / median:.1%} of the limit of {limit * 1e3:.2f} ms",
            **{
                f"decode_ms_{key}": median * 1e3,
                f"decode_p99_ms_{key}": tail * 1e3,
                f"decode_tokens_per_s_{key}": rate,
                f"decode_gb_per_s_{key}": read_bytes / median / 1e9,
                f"decode_share_of_limit_{key}": limit / median,
                f"decode_steps_{key}": len(times),
            },
        )

    def prefill(self, length: int) -> None:
        """One prompt of this many tokens, first token included."""
        config = self._config
        times = []
        for _ in range(1 + self._sizes.repeats):
            start = time.perf_counter()
            self._llm.generate(self.prompts(1, length), SamplingParams(max_tokens=1, temperature=0, ignore_eos=True))
            times.append(time.perf_counter() - start)
        self.raw[f"prefill_s_{length}"] = times[1:]
        median = statistics.median(times[1:])
        products = 2 * self._body_parameters * length
        attention = 2 * length**2 * config.hidden_size * config.num_hidden_layers  # the causal half
        share = (products + attention) / median / self._flops
        facts.note(
            self.figures,
            f"prefill {length}",
            f"{median * 1e3:.1f} ms, {length / median:.0f} tok/s, {share:.1%} of the matrix rate",
            **{f"prefill_tokens_per_s_{length}": length / median, f"prefill_share_of_matrix_{length}": share},
        )

    def beside(self, rival: TransformersGenerate, batch: int) -> None:
        """Folio and transformers in turn, over the whole time of requests of the same kind."""
        sizes, new = self._sizes, self._sizes.new_tokens
        runs: dict[str, Callable[[], float]] = {
            "folio": lambda: folio_rate(self._llm, self.prompts(batch, sizes.context), new),
            rival.name: lambda: rival.rate(self.prompts(batch, sizes.context), new),
        }
        rates = harness.alternate(runs, sizes.repeats)
        ratio = harness.median_ratio(rates["folio"], rates[rival.name])
        self.raw |= {f"tokens_per_s_{name}_{batch}": values for name, values in rates.items()}
        medians = {name: statistics.median(values) for name, values in rates.items()}
        facts.note(
            self.figures,
            f"whole requests, batch {batch}",
            " ".join(f"{name} {value:.1f} tok/s," for name, value in medians.items()) + f" Folio is {ratio:.2f}x",
            **{f"batch{batch}_vs_{rival.name}": ratio, f"batch{batch}_tokens_per_s": medians["folio"]},
        )

    def everything(self, rivals: list[TransformersGenerate], device: torch.device) -> None:
        """All but the parts. `rivals` has one, and is emptied when it has been measured, so that its memory is free."""
        sizes = self._sizes
        for batch in sizes.batches:
            for mode in MODES:
                self.decode(batch, mode)
            if batch in sizes.rival_batches:
                self.beside(rivals[0], batch)
            if batch == sizes.rival_batches[-1]:
                rivals.clear()
                let_go(device)
                for length in sizes.prefills:
                    self.prefill(length)

    def kernels(self, batch: int) -> None:
        """Record the kernels of a device that take longest in the next three steps."""
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for _ in range(KERNEL_STEPS):
                self._llm.engine.step()
            torch.cuda.synchronize()
        for event in sorted(profiler.key_averages(), key=lambda event: -event.self_device_time_total)[:MOST_KERNELS]:
            us, launches = event.self_device_time_total / KERNEL_STEPS, event.count / KERNEL_STEPS
            facts.record(f"kernel of a step of {batch}", "", name=event.key[:90], us_a_step=us, launches=launches)

    def parts(self, batch: int) -> None:
        with self.decoding(batch, **MODES["greedy"]):
            parts = overhead.step_parts(self._llm, PROFILED_STEPS)
            if self._llm.engine.model.module.device.type == "cuda":
                self.kernels(batch)
        facts.note(
            self.figures,
            f"parts of a step, batch {batch}, us",
            ", ".join(f"{part} {us:.0f}" for part, us in sorted(parts.items(), key=lambda item: -item[1])),
            **{f"{part}_us_{batch}": us for part, us in parts.items()},
        )


def run(args: argparse.Namespace) -> None:
    shape, sizes = args.shape or DEFAULT_SHAPE, QUICK if args.quick else Sizes()
    if folder := os.environ.get(harness.RESULTS_VARIABLE):
        harness.results_folder(args)
        os.environ.setdefault(facts.FILE_VARIABLE, f"{folder}/throughput.jsonl")
    config = config_of(shape)
    device = torch.device(args.device)
    bandwidth, flops = ceilings(device)
    rivals: list[TransformersGenerate] = []
    if not args.parts:  # first, so that the KV cache's ceiling leaves room for it
        model = random_model(config, device, dtype=DTYPE, attn_implementation="sdpa").eval()
        rivals.append(TransformersGenerate(model))
        del model
    let_go(device)
    llm = make_llm(config, args.device, sizes, num_threads=1 if shape == "tiny" else None)
    sweep = Sweep(llm, config, sizes, bandwidth, flops)
    if args.parts:
        for batch in sizes.batches:
            sweep.parts(batch)
    else:
        sweep.everything(rivals, device)
    llm.engine.check_integrity()
    llm.close()
    harness.finish(f"throughput-{shape}{'-parts' if args.parts else ''}", args, sweep.figures, sweep.raw)


def config_of(shape: str, **changed: Any) -> PreTrainedConfig:
    """The config of a shape whose weights are made on the device."""
    return checkpoints.config_of(shape, initializer_range=WEIGHT_STD, dtype=DTYPE, **changed)


def make_llm(config: PreTrainedConfig, device: str, sizes: Sizes, **settings: Any) -> LLM:
    """An engine for this shape in `DTYPE`, whose logits are about as far apart as those of a trained model.

    Args:
        settings: further ones.
    """
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        llm = LLM(
            folder,
            load_format="dummy",
            dtype=str(DTYPE).removeprefix("torch."),  # the configuration may have none, which means float32
            device=device,
            skip_tokenizer_init=True,
            prefix_cache=False,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=STEP_TOKENS,
            max_model_len=max(*sizes.prefills, sizes.context) + most_new_tokens(sizes),
            **settings,
        )
    harness.note_engine(llm)
    decoder: Any = llm.engine.model.module.get_decoder()
    with torch.inference_mode():
        decoder.norm.weight.fill_(LOGIT_STD / (WEIGHT_STD * math.sqrt(config.hidden_size)))
    seconds, layout = time.perf_counter() - start, llm.engine.memory.groups[0].layout
    budget_bytes, tokens = llm.engine.report().budget_bytes, layout.block_tokens
    facts.record(
        "engine",
        f"ready after {seconds:.1f} s; KV cache to {budget_bytes / 2**30:.1f} GiB, blocks of {tokens} tokens",
        ready_s=seconds,
        budget_bytes=budget_bytes,
        block_tokens=tokens,
        page_bytes=layout.page_bytes,
    )
    return llm


def most_new_tokens(sizes: Sizes) -> int:
    """Most new tokens of a sequence. The first sequences decode while other prompts are computed, at least one in each
    step."""
    return max(sizes.batches) + WARM_UP_STEPS + max(sizes.steps, PROFILED_STEPS + KERNEL_STEPS) + 1


def parameter_shapes(config: PreTrainedConfig) -> list[torch.Size]:
    model = random_model(config, torch.device("meta"), dtype=DTYPE, attn_implementation="eager")
    return [parameter.shape for parameter in model.parameters()]


def ceilings(device: torch.device) -> tuple[float, float]:
    """Rates of the device: bytes a second that it reads, and floating-point operations a second of a product."""
    num_bytes, size = (READ_BYTES, 0) if device.type == "cuda" else (1 << 27, 1024)
    rates = read_limit(device, num_bytes)(), product_limit(device, DTYPE, size)()
    let_go(device)
    return rates


def let_go(device: torch.device) -> None:
    """Free unused memory: the KV cache cannot use memory that torch keeps."""
    gc.collect()  # modules refer to each other
    if device.type == "cuda":
        torch.cuda.empty_cache()
