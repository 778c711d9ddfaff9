"""Prefixes over a sleep: first tokens after a wake, and what keeping them adds to the sleep.

The real default model, alone on a shelf's device, is asked for a prompt of 2,000 tokens, put to sleep, woken, and asked
again: once with swap space and once without, in turn. The sleep is timed as in the thread of the shelf's steps. Then
both fall asleep with more cached prompts than the bound of the time of a sleep allows to copy.

--quick: short prompts, two of them.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import facts, harness, real_models
from benchmarks.engine.store import ask, prompts
from folio.app.config.engine import EngineConfig
from folio.app.engine.device.shared_device import SharedDevice
from folio.app.engine.engine import Engine
from folio.app.engine.startup import warm_up
from folio.app.models.named import SMOLLM2
from folio.app.models.weights.store import WeightStore
from folio.vmem import DevicePages, KVLayout

KV_BYTES, DEVICE_BYTES, SWAP_BYTES = 2 << 30, 4 << 30, 1 << 30


@dataclass(frozen=True, slots=True)
class Sizes:
    """Size of the measurements. `many`: prompts that are cached at the last sleep."""

    prompts: int = 9
    prompt_tokens: int = 2000
    many: int = 20


QUICK = Sizes(prompts=2, prompt_tokens=300, many=4)


@contextmanager
def opened(model: str, folder: Path, swap_bytes: int) -> Iterator[Engine]:
    """The model's engine on a device of a shelf."""
    pages = DevicePages(DEVICE_BYTES, swap_bytes=swap_bytes)
    config = EngineConfig(model=model, swap_bytes=swap_bytes, kv_memory_bytes=KV_BYTES)
    engine = Engine(config, device=SharedDevice(pages, WeightStore(folder, charges=pages)))
    try:
        yield engine
        engine.check_integrity()
    finally:
        engine.close()
        pages.close()


def sleep(engine: Engine) -> float:
    """Seconds of a sleep."""
    start = time.perf_counter()
    engine.sleep()
    engine.set_kv_budget(0)
    return time.perf_counter() - start


def wake(engine: Engine) -> float:
    start = time.perf_counter()
    engine.footprint.map_weights()
    engine.wake()
    engine.set_kv_budget(KV_BYTES)
    return time.perf_counter() - start


def measure(model: str, sizes: Sizes, folder: Path, raw: dict[str, Any]) -> dict[str, float]:
    names = ("kept", "none")
    times: dict[str, dict[str, list[float]]] = {what: {n: [] for n in names} for what in ("sleep", "wake", "first")}
    num_equal, cached, full = 0, dict[str, int](), dict[str, float]()
    with ExitStack() as stack:
        engines = {n: stack.enter_context(opened(model, folder, SWAP_BYTES * (n == "kept"))) for n in names}
        for engine in engines.values():
            warm_up(engine)
            ask(engine, prompts(1, sizes.prompt_tokens, 2), 2)
            sleep(engine)
            wake(engine)
        caches = (group.layout.dtype for group in engine.memory.groups if isinstance(group.layout, KVLayout))
        facts.note_dtypes(engine.model.module.dtype, *caches)
        for prompt in prompts(sizes.prompts, sizes.prompt_tokens, 1):
            found = {}
            for name, engine in engines.items():
                ask(engine, [prompt], 1)
                times["sleep"][name].append(sleep(engine))
                times["wake"][name].append(wake(engine))
                first_s, found[name] = ask(engine, [prompt], 8)
                times["first"][name].append(first_s)
                print(
                    f"{name}: {', '.join(f'{what} {1e3 * times[what][name][-1]:.1f} ms' for what in times)}", flush=True
                )
            num_equal += found["kept"] == found["none"]
        for name, engine in engines.items():
            for prompt in prompts(sizes.many, sizes.prompt_tokens, 3):
                ask(engine, [prompt], 1)
            cached[name] = engine.report().cached_bytes
            full[name] = sleep(engine)
            raw[f"{name}_bytes_of_many"] = engine.report().kept_bytes
            wake(engine)
    raw["seconds"], raw["cached_bytes_of_many"], raw["sleep_of_many_s"] = times, cached, full
    first, slept = times["first"], times["sleep"]
    return {
        "ttft_after_sleep_speedup": harness.median_ratio(first["none"], first["kept"]),
        **{f"ttft_after_sleep_{name}_ms": 1e3 * statistics.median(first[name]) for name in names},
        **{f"sleep_{name}_ms": 1e3 * statistics.median(slept[name]) for name in names},
        **{f"sleep_of_many_{name}_ms": 1e3 * full[name] for name in names},
        "kept_of_many_mib": raw["kept_bytes_of_many"] / 2**20,
        "sleep_tokens_equal": num_equal / sizes.prompts,
    }


def main() -> None:
    args = harness.arguments(__doc__).parse_args()
    model = real_models.fetched(SMOLLM2)
    raw: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=real_models.FOLDER.parent) as scratch:  # no memory file system
        figures = measure(str(model), QUICK if args.quick else Sizes(), Path(scratch), raw)
    for name, value in figures.items():
        print(f"{name:32} {value:.4g}")
    harness.finish("shelf_sleep", args, figures, raw)


if __name__ == "__main__":
    main()
