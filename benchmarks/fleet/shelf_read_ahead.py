"""Reading weights ahead: what it costs a busy model, and what it saves a wake.

The model of `benchmarks.shelf` that is asked for most decodes with as many sequences as it runs at once, in rounds:
alone, and while the thread of the shelf reads files of other weights beside its steps, which are dropped from the page
cache before each pass. Then the weights of the largest model are mapped: from the disk, and after read-ahead.

--quick: one round, a small model.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np

from benchmarks import harness
from benchmarks.fleet.shelf_models import FOLDER, MAX_NUM_SEQS, TRACE, BenchModel, make_models, read_trace
from folio.app.config.machine import Machine
from folio.app.engine import LLM, SamplingParams
from folio.app.shelf.read_ahead import STEPS_ON_CPU_BYTES_PER_S, ReadAhead
from folio.vmem.weights import HUGE_PAGE_BYTES, FileRange, read_ahead

ROUNDS, NEW_TOKENS, PROMPT_TOKENS = 10, 160, 16
WAKES = 5
_CHUNK = bytes(2 * HUGE_PAGE_BYTES)


class ColdFiles:
    """Files that are read ahead again and again, from the disk."""

    weight_bytes = 0

    def __init__(self, files: Sequence[int]) -> None:
        self._files, self.num_bytes = files, 0

    def read_ahead(self) -> Iterator[int]:
        while True:
            for fd in self._files:
                drop(fd)
                for num_bytes in read_ahead(fd, 0, os.fstat(fd).st_size):
                    self.num_bytes += num_bytes
                    yield num_bytes


def drop(fd: int) -> None:
    """Drop a file from the page cache."""
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def files_of(sizes: Sequence[int]) -> Iterator[list[int]]:
    with ExitStack() as stack:
        files = []
        for i, size in enumerate(sizes):
            path = FOLDER / f"read-ahead-{i}"
            stack.callback(path.unlink, missing_ok=True)
            with path.open("wb") as file:
                for _ in range(0, size, len(_CHUNK)):
                    file.write(os.urandom(len(_CHUNK)))
                os.fsync(file.fileno())
            fd = os.open(path, os.O_RDONLY)
            stack.callback(os.close, fd)
            files.append(fd)
        yield files


def _harm(model: BenchModel, cold: ColdFiles, rounds: int) -> dict[str, float]:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, model.vocab_size, size=PROMPT_TOKENS).tolist() for _ in range(MAX_NUM_SEQS)]
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
    reads = ReadAhead(lambda _: True, STEPS_ON_CPU_BYTES_PER_S * Machine.detect().num_cores)
    llm = LLM(**model.engine)
    shares, read_s = [], 0.0

    def rate(beside: dict[str, ColdFiles]) -> float:
        reads.want(beside, beside_steps=True)
        began = time.perf_counter()
        llm.generate(prompts, params)
        seconds = time.perf_counter() - began
        reads.want({}, beside_steps=True)
        return MAX_NUM_SEQS * NEW_TOKENS / seconds

    try:
        rate({})
        for number in range(rounds):
            before = time.perf_counter()
            pair = {}
            for is_beside in (number % 2 == 0, number % 2 == 1):  # first and second by turns
                pair[is_beside] = rate({"cold": cold} if is_beside else {})
            shares.append(pair[True] / pair[False])
            read_s += (time.perf_counter() - before) / 2
            print(f"{model.name}: {pair[False]:.1f} tokens/s, beside read-ahead {pair[True]:.1f}", flush=True)
    finally:
        reads.close()
        llm.close()
    return {
        "prefetch_harm": statistics.median(shares),
        "prefetch_harm_min": min(shares),
        "prefetch_mib_per_s": cold.num_bytes / 2**20 / read_s,
    }


def _wakes(fd: int, wakes: int) -> dict[str, float]:
    """Seconds to map the file's bytes, cold and after read-ahead at full rate."""
    size = os.fstat(fd).st_size
    seconds: dict[str, list[float]] = {"cold_wake_s": [], "prefetch_s": [], "prefetched_wake_s": []}

    def timed_map() -> float:
        weights = FileRange(size)
        began = time.perf_counter()
        weights.map(fd, 0)
        took_s = time.perf_counter() - began
        weights.close()
        return took_s

    for _ in range(wakes):
        drop(fd)
        seconds["cold_wake_s"].append(timed_map())
        drop(fd)
        began = time.perf_counter()
        for _ in read_ahead(fd, 0, size):
            pass
        seconds["prefetch_s"].append(time.perf_counter() - began)
        seconds["prefetched_wake_s"].append(timed_map())
    return {key: statistics.median(values) for key, values in seconds.items()}


def main() -> None:
    args = harness.arguments(__doc__).parse_args()
    harness.note_missing(TRACE)
    requests, _ = read_trace(TRACE)
    models = make_models(requests, quick=args.quick)
    rounds, wakes = (1, 1) if args.quick else (ROUNDS, WAKES)
    with files_of(sorted(model.weight_bytes for model in models)[-2:]) as files:
        figures = _harm(models[0], ColdFiles(files), rounds) | _wakes(files[-1], wakes)
    print(
        f"beside read-ahead {figures['prefetch_harm']:.3f} of the tokens ({figures['prefetch_mib_per_s']:.0f} MiB/s); "
        f"a wake from the disk {figures['cold_wake_s']:.3f} s, after read-ahead {figures['prefetched_wake_s']:.4f} s"
    )
    harness.finish("shelf_read_ahead", args, figures, {})


if __name__ == "__main__":
    main()
