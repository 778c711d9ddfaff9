"""Benchmark harness: arguments, repeats, the table, and the last line of JSON."""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
RESULTS_VARIABLE = "FOLIO_RESULTS"
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


def alternate(runs: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Run every candidate once to warm up, then all of them in turn, `repeats` times. Returns their results."""
    for name, run in runs.items():
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


def read_bandwidth(num_bytes: int = 1 << 30, repeats: int = 5) -> float:
    """Bytes a second that all threads read from memory together, best of several sweeps."""
    data = torch.ones(num_bytes // 4)
    best = 0.0
    for _ in range(repeats):
        start = time.perf_counter()
        data.sum()
        best = max(best, num_bytes / (time.perf_counter() - start))
    return best


def matrix_rate(dtype: torch.dtype, repeats: int = 5) -> float:
    """Floating-point operations a second of a large matrix product, best of several."""
    size = 2048
    a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    best = 0.0
    for _ in range(repeats):
        start = time.perf_counter()
        a @ b
        best = max(best, 2 * size**3 / (time.perf_counter() - start))
    return best


def pyplot() -> Any:
    """matplotlib's pyplot, drawing to files. `None`, with a message, if it is not installed."""
    try:
        matplotlib = importlib.import_module("matplotlib")
    except ImportError:
        print("matplotlib is not installed: no picture")
        return None
    matplotlib.use("Agg")
    return importlib.import_module("matplotlib.pyplot")


def finish(name: str, args: argparse.Namespace, figures: Mapping[str, float], raw: object) -> None:
    """Write the raw figures as JSON and print the result as the last line."""
    result = {
        "benchmark": name,
        "device": _device_name() if args.device == "cpu" else torch.cuda.get_device_name(),
        "versions": versions(args.device),
        "commit": commit(),
        "quick": args.quick,
        "figures": {key: float(f"{value:.4g}") for key, value in figures.items()},
    }
    path = results_folder(args) / f"{name}{'-quick' if args.quick else ''}.json"
    path.write_text(json.dumps(result | {"raw": raw}, indent=1) + "\n")
    print(json.dumps(result))


def fail_if_any(counts: Mapping[str, float], *keys: str) -> None:
    """Exit with an error if a count of unacceptable outcomes is above zero."""
    if bad := [f"{key}: {counts[key]:g}" for key in keys if counts[key]]:
        sys.exit("not as promised: " + ", ".join(bad))


def results_folder(args: argparse.Namespace) -> Path:
    """The folder of results: `FOLIO_RESULTS` if set, else `benchmarks/results/<device>`."""
    folder = Path(os.environ.get(RESULTS_VARIABLE) or RESULTS / str(args.device))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _device_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{model}, {torch.get_num_threads()} threads"


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
