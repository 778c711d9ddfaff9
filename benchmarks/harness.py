"""Benchmark harness: arguments, repeats, the table, and the last line of JSON."""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import itertools
import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import facts, measured, picture
from benchmarks.figures import row_of
from folio.vmem.layout import KVLayout

if TYPE_CHECKING:
    from folio.app.engine import LLM

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
# Git ignores them: a quick run must not replace a result that documents cite.
QUICK_RESULTS = RESULTS / "quick"
RESULTS_VARIABLE = "FOLIO_RESULTS"
Draw = Callable[[Mapping[str, Any], Path], None]  # a result, as in its JSON, and the picture's file
_BEGUN = time.monotonic()
_missing_traces: list[str] = []
PACKAGES = ("folio-serve", "torch", "triton", "transformers", "cuda-bindings", "ray")


def arguments(description: str | None, devices: Sequence[str] = ("cpu",)) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="under a minute on 2 CPU cores")
    parser.add_argument("--device", default="cpu", choices=devices)
    return parser


def needs(*packages: str) -> None:
    """Exit with one line if packages are not installed; a GPU machine may lack those of the server."""
    if missing := [package for package in packages if importlib.util.find_spec(package) is None]:
        sys.exit(f"this benchmark needs {', '.join(missing)}, not installed here; `make bench` installs it")


def note_missing(*traces: Path) -> None:
    """Say which traces are missing. Synthetic requests take their place, and the result names them."""
    for trace in traces:
        if not trace.is_file():
            print(f"synthetic requests: there is no {trace} (docs/benchmarks/index.md tells where it is from)")
            _missing_traces.append(trace.name)


def alternate(
    runs: Mapping[str, Callable[[], float]], repeats: int, warm_ups: int | None = None
) -> dict[str, list[float]]:
    """Run every candidate once to warm up, or the first `warm_ups` of them; then all of them in turn, `repeats` times.
    Returns their results."""
    for name, run in itertools.islice(runs.items(), warm_ups):
        print(f"warming up {name}", flush=True)
        run()
    results: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(repeats):
        for name, run in runs.items():
            results[name].append(run())
            print(f"run {i + 1}/{repeats}  {name}: {results[name][-1]:.4g}", flush=True)
    return results


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Median of the ratios of paired runs, which does not depend on drifts of the machine's speed."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that this many percent do not exceed; NaN for no values."""
    ordered = sorted(values)
    return ordered[max(math.ceil(percent / 100 * len(ordered)), 1) - 1] if ordered else math.nan


def note_engine(llm: LLM) -> None:
    """Note the dtypes of an engine's weights and KV cache, which every later fact and the result then have."""
    layouts = (group.layout for group in llm.engine.memory.groups)
    caches = (layout.dtype for layout in layouts if isinstance(layout, KVLayout))
    facts.note_dtypes(llm.engine.model.module.dtype, *caches)


def finish(
    name: str, args: argparse.Namespace, figures: Mapping[str, float], raw: object, draw: Draw | None = None
) -> None:
    """Write figures and raw data as JSON, draw the picture from that file, and print the result as the last line.

    Exits with an error, and writes nothing, if the measured dtypes are not those of the benchmark's row in
    `benchmarks/figures.yaml`.
    """
    dtype, row = facts.noted_dtypes(), row_of(name)
    if row is not None:
        try:
            row.check_dtype(dtype)
        except ValueError as error:
            sys.exit(str(error))
    result = {
        "benchmark": name,
        "dtype": dtype,
        "device": _device_name() if args.device == "cpu" else torch.cuda.get_device_name(),
        "machine": machine(),
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
        "duration_s": round(time.monotonic() - _BEGUN),
        "command": command(),
        "versions": versions(args.device),
        "commit": commit(),
        **({} if row is None else {"measured": measured.digests(row)}),
        "quick": args.quick,
        **({"without_traces": _missing_traces} if _missing_traces else {}),
        "figures": {key: float(f"{value:.4g}") for key, value in figures.items()},
    }
    path = results_folder(args) / f"{name}.json"
    path.write_text(json.dumps(result | {"raw": raw}, indent=1) + "\n")
    if draw is not None:
        if picture.is_possible():
            draw(json.loads(path.read_text()), path.with_suffix(".png"))
        else:
            print("matplotlib is not installed: no picture")
    print(json.dumps(result))


def fail_if_any(counts: Mapping[str, float], *keys: str) -> None:
    """Exit with an error if a count of unacceptable outcomes is above zero."""
    if bad := [f"{key}: {counts[key]:g}" for key in keys if counts[key]]:
        sys.exit("not as promised: " + ", ".join(bad))


def results_folder(args: argparse.Namespace) -> Path:
    """The folder of results: `FOLIO_RESULTS` if set, else `benchmarks/results/<device>`, or of quick runs
    `benchmarks/results/quick/<device>`."""
    usual = (QUICK_RESULTS if args.quick else RESULTS) / str(args.device)
    folder = Path(os.environ.get(RESULTS_VARIABLE) or usual)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def committed(name: str, device: str = "cpu") -> dict[str, Any]:
    """The committed result of a benchmark, raw data included."""
    found: dict[str, Any] = json.loads((RESULTS / device / f"{name}.json").read_text())
    return found


def _device_name() -> str:
    return f"{_processor()}, {torch.get_num_threads()} threads"


def machine() -> dict[str, Any]:
    """Processor, cores that this process may use, memory in GiB, and system."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(aliased=True, terse=True),
    }


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def has_fast_bfloat16() -> bool:
    """Whether the processor has instructions for products of bfloat16; without them float32 is faster."""
    flags = Path("/proc/cpuinfo").read_text()
    return any(flag in flags for flag in ("avx512_bf16", "amx_bf16"))


def command() -> str:
    """The command line of this process, as in `python -m benchmarks.mapping --quick`."""
    spec = sys.modules["__main__"].__spec__
    module = spec.name.removesuffix(".__main__") if spec is not None else Path(sys.argv[0]).name
    return shlex.join(["python", "-m", module, *sys.argv[1:]])


def versions(device: str) -> dict[str, str]:
    """Versions of packages that measurements depend on, of Python and, for a CUDA device, of CUDA and the driver."""
    found = {package: _version(package) for package in PACKAGES} | {"python": platform.python_version()}
    if device != "cpu":
        found |= {"cuda": str(torch.version.cuda), "driver": _driver_version()}
    return found


def _driver_version() -> str:
    """NVML's version, such as 580.65.06; torch knows only the CUDA version that the driver supports."""
    text = ctypes.create_string_buffer(96)
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return "unknown"
    if nvml.nvmlInit_v2() or nvml.nvmlSystemGetDriverVersion(text, len(text)):
        return "unknown"
    return text.value.decode()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def commit() -> str:
    """The checkout's commit, with "+changes" if sources differ from it; "unknown" without git or a repository."""
    git = ["git", "-C", str(ROOT)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
        dirty = subprocess.run([*git, "status", "--porcelain", "--", "*.py", "*.cpp"], capture_output=True, text=True)
    except FileNotFoundError:
        return "unknown"
    if head.returncode:  # no repository, or another user's
        return "unknown"
    return head.stdout.strip() + ("+changes" if dirty.stdout.strip() else "")
