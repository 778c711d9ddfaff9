"""Prefix cache on disk: first tokens after a restart, its cost where it finds nothing, and damaged files.

**After a restart.** A process computes prompts of 2,000 tokens, and is killed (SIGKILL) once they are on disk. Then
each prompt is asked of an engine with the store and of one without, in turn; the figure is the ratio of their times to
the first token. The model is the real default one.

**Cost.** Both engines serve the same number of requests with new random prompts, in turn, so that nothing is ever
found; before its neighbour's run all that waits is written. The cache is smaller than a few runs, so that blocks are
evicted.

**Damage.** The files of the toy model's prefixes are damaged at random: bits flipped, cut off, pages overwritten or
moved, files replaced. An engine starts with them each time, and its tokens are compared with those without a store.

**Start.** Reading the index of 10 GB of records, of the real model's size and of 16 KiB.

--quick: short prompts, fewer repeats and damages, 0.2 GB.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import random
import shutil
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks import facts, harness, real_models
from folio.app.config.engine import EngineConfig, KVStore
from folio.app.engine.engine import Engine
from folio.app.engine.sampling.params import SamplingParams
from folio.app.engine.startup import warm_up
from folio.app.models.named import SMOLLM2
from folio.vmem import KVLayout
from folio.vmem.prefix.store.block_store import BlockStore
from folio.vmem.prefix.store.segment import ALIGNMENT, SUFFIX, StoredUnit

STORE_BYTES, CACHE_BYTES, TOY_BYTES = 4 << 30, 1 << 30, 16 << 20
VOCABULARY = range(1000, 40_000)  # the first tokens may have a meaning
TOY_PROMPTS, TOY_TOKENS = 3, 120
RECORD_BYTES = {"smollm2": 368_640, "16_kib": 16 << 10}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Size of the measurements. A load is `load_requests` of `load_prompt` tokens and `load_new` output tokens."""

    prompts: int = 7
    prompt_tokens: int = 2000
    repeats: int = 15
    load_requests: int = 12
    load_prompt: int = 512
    load_new: int = 32
    damages: int = 500
    index_bytes: int = 10_000_000_000


QUICK = Sizes(
    prompts=2,
    prompt_tokens=300,
    repeats=1,
    load_requests=4,
    load_prompt=64,
    load_new=8,
    damages=4,
    index_bytes=200_000_000,
)


def prompts(count: int, num_tokens: int, seed: int, vocabulary: range = VOCABULARY) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocabulary.start, vocabulary.stop, (count, num_tokens), generator=generator).tolist()


@contextmanager
def opened(model: str, folder: Path | None, num_bytes: int = STORE_BYTES, **settings: Any) -> Iterator[Engine]:
    store = None if folder is None else KVStore(dir=str(folder), bytes=num_bytes)
    engine = Engine(EngineConfig(model=model, kv_store=store, **settings))
    try:
        yield engine
    finally:
        engine.close()


def settle(engine: Engine) -> None:
    """Wait until all that waits is written."""
    while engine.store is not None and not engine.store.is_idle:
        time.sleep(0.01)


def ask(engine: Engine, batch: Sequence[list[int]], num_tokens: int) -> tuple[float, list[list[int]]]:
    """Seconds until the first token, and the tokens of each request."""
    start, first = time.perf_counter(), 0.0
    for i, prompt in enumerate(batch):
        engine.submit(str(i), prompt, SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True))
    found: list[list[int]] = [[] for _ in batch]
    while engine.has_work:
        for delta in engine.step():
            if delta.error is not None:
                raise delta.error
            first = first or time.perf_counter() - start
            found[int(delta.request_id)] += delta.token_ids
    return first, found


def _compute(model: str, folder: Path, batch: list[list[int]], done: Connection) -> None:
    with opened(model, folder) as engine:
        for prompt in batch:
            ask(engine, [prompt], 1)
        settle(engine)
        assert engine.store is not None
        done.send(engine.store.counts.written)
        signal.pause()


def compute_and_kill(model: str, folder: Path, batch: list[list[int]]) -> int:
    """Compute prompts in a process that is killed once they are on disk; returns the records written."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_compute, args=(model, folder, batch, there))
    process.start()
    there.close()
    written: int = here.recv()
    process.kill()
    process.join()
    return written


def measure_restart(model: str, sizes: Sizes, folder: Path, raw: dict[str, Any]) -> dict[str, float]:
    batch = prompts(sizes.prompts, sizes.prompt_tokens, 1)
    raw["records"] = compute_and_kill(model, folder, batch)
    times: dict[str, list[float]] = {"store": [], "none": []}
    num_equal = 0
    with opened(model, folder) as with_store, opened(model, None) as without:
        for engine in (with_store, without):
            warm_up(engine)
            ask(engine, prompts(1, sizes.prompt_tokens, 2), 2)
        caches = (group.layout.dtype for group in with_store.memory.groups if isinstance(group.layout, KVLayout))
        facts.note_dtypes(with_store.model.module.dtype, *caches)
        for prompt in batch:
            stored_s, found = ask(with_store, [prompt], 8)
            computed_s, expected = ask(without, [prompt], 8)
            times["store"].append(stored_s)
            times["none"].append(computed_s)
            num_equal += found == expected
            print(f"first token after {stored_s * 1e3:.0f} ms, without the store {computed_s * 1e3:.0f} ms", flush=True)
        assert with_store.store is not None
        raw["read"] = with_store.store.counts.read
    raw["first_token_s"] = times
    return {
        "ttft_after_restart_speedup": harness.median_ratio(times["none"], times["store"]),
        "ttft_after_restart_ms": 1e3 * statistics.median(times["store"]),
        "ttft_computed_ms": 1e3 * statistics.median(times["none"]),
        "restart_tokens_equal": num_equal / len(batch),
    }


def measure_cost(model: str, sizes: Sizes, folder: Path, raw: dict[str, Any]) -> dict[str, float]:
    seeds = iter(range(100, 10_000))
    cpu_s: dict[str, list[float]] = {"store": [], "none": []}
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(opened(model, at, kv_memory_bytes=CACHE_BYTES))
            for name, at in (("store", folder), ("none", None))
        }
        for engine in engines.values():
            warm_up(engine)

        def run(name: str) -> Callable[[], float]:
            def rate() -> float:
                batch = prompts(sizes.load_requests, sizes.load_prompt, next(seeds))
                start, cpu_start = time.perf_counter(), time.process_time()
                ask(engines[name], batch, sizes.load_new)
                elapsed = time.perf_counter() - start
                cpu_s[name].append(time.process_time() - cpu_start)
                settle(engines[name])
                return sizes.load_requests * (sizes.load_prompt + sizes.load_new) / elapsed

            return rate

        rates = harness.alternate({name: run(name) for name in engines}, sizes.repeats)
        store = engines["store"].store
        assert store is not None
        raw["cpu_s"] = cpu_s
        raw["tokens_per_s"], raw["written"], raw["dropped"] = rates, store.counts.written, store.counts.dropped
        if store.counts.read:
            raise RuntimeError("new prompts were found on disk")
    return {
        "miss_cost": 1 - harness.median_ratio(rates["store"], rates["none"]),
        "miss_cost_of_processors": harness.median_ratio(cpu_s["store"][1:], cpu_s["none"][1:]) - 1,  # warmed up
    }


def damage(folder: Path, number: random.Random) -> str:
    """Damage one of the files; returns how."""
    path = number.choice(sorted(folder.glob(f"*/*{SUFFIX}")))
    size = path.stat().st_size
    kind = number.choice(("flip", "cut", "overwrite", "move", "replace"))
    if kind == "cut":
        os.truncate(path, number.randrange(size))
    elif kind == "replace":
        path.write_bytes(number.randbytes(number.randrange(1, 1 << 20)))
        path.chmod(0o600)
    else:
        with path.open("r+b") as file:
            for _ in range(number.choice((1, 10, 100))):
                # Most of the file is empty: damage hits what is written.
                at = number.randrange(size // 8 if number.random() < 0.5 else min(size, 1 << 16))
                file.seek(at)
                content = file.read(1 if kind == "flip" else ALIGNMENT)
                if kind == "flip":
                    content = bytes([content[0] ^ 1 << number.randrange(8)])
                elif kind == "overwrite":
                    content = number.randbytes(number.randrange(1, ALIGNMENT))
                else:
                    at = number.randrange(size // ALIGNMENT // 8) * ALIGNMENT
                file.seek(at)
                file.write(content)
    return kind


def measure_damage(sizes: Sizes, folder: Path, raw: dict[str, Any]) -> dict[str, float]:
    settings: dict[str, Any] = {"dtype": "float32", "kv_memory_bytes": 64 << 20}
    batch = prompts(TOY_PROMPTS, TOY_TOKENS, 3, range(10, 200))
    whole, damaged = folder / "whole", folder / "damaged"
    with opened("builtin", None, **settings) as plain:
        expected = [ask(plain, [prompt], 8)[1] for prompt in batch]
    with opened("builtin", whole, TOY_BYTES, **settings) as first:
        for prompt in batch:
            ask(first, [prompt], 8)
        settle(first)
    kinds: Counter[str] = Counter()
    wrong = num_read = num_refused = 0
    for seed in range(sizes.damages):
        shutil.rmtree(damaged, ignore_errors=True)
        shutil.copytree(whole, damaged)
        kinds[damage(damaged, random.Random(seed))] += 1
        with opened("builtin", damaged, TOY_BYTES, **settings) as engine:
            wrong += [ask(engine, [prompt], 8)[1] for prompt in batch] != expected
            engine.check_integrity()
            assert engine.store is not None
            num_read += engine.store.counts.read
            num_refused += engine.store.counts.refused
    raw["damages"], raw["records_read"], raw["records_refused"] = dict(kinds), num_read, num_refused
    return {"wrong": wrong, "damages": sizes.damages}


def measure_index(sizes: Sizes, folder: Path) -> dict[str, float]:
    """Seconds to open a store of so many bytes of records."""
    figures = {}
    for name, record_bytes in RECORD_BYTES.items():
        shape = folder / name, sizes.index_bytes + STORE_BYTES, bytes(16), [record_bytes], 64
        record = memoryview(mmap.mmap(-1, record_bytes))
        store = BlockStore(*shape)
        for number in range(sizes.index_bytes // record_bytes):
            store.write(StoredUnit(0, bytes(16), bytes(16), number.to_bytes(16, "big"), bytes(64)), record)
        store.close()
        times = []
        for _ in range(3):
            start = time.perf_counter()
            store = BlockStore(*shape)
            times.append(time.perf_counter() - start)
            assert store.find(0, number.to_bytes(16, "big")) is not None
            store.close()
        figures[f"index_{name}_s"] = statistics.median(times)
        shutil.rmtree(folder / name)
    return figures


def main() -> None:
    args = harness.arguments(__doc__).parse_args()
    sizes = QUICK if args.quick else Sizes()
    model = real_models.fetched(SMOLLM2)
    raw: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=real_models.FOLDER.parent) as scratch:  # no memory file system
        folder = Path(scratch)
        figures = measure_index(sizes, folder)
        figures |= measure_damage(sizes, folder, raw)
        figures |= measure_restart(str(model), sizes, folder / "restart", raw)
        figures |= measure_cost(str(model), sizes, folder / "cost", raw)
    for name, value in figures.items():
        print(f"{name:32} {value:.4g}")
    harness.finish("store", args, figures, raw)
    harness.fail_if_any(figures, "wrong")


if __name__ == "__main__":
    main()
