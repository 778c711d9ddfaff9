"""The stages: which jobs they have, in which order, and how long they may take."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from benchmarks.gpu_day.job import Job
from benchmarks.gpu_day.runner import num_processors

# Seconds of a stage, the ends of its jobs included.
BUDGET_S, BUDGETS_S = 480.0, {"server": 400.0, "fleet": 330.0, "quantised": 590.0}
# Without a device, where jobs share a busy machine.
FAKE_BUDGET_S, FAKE_LIMITS = 480.0, 2
# Of which the most mappings are counted.
NUM_HANDLES, FAKE_HANDLES = (1, 4096), (1, 8)
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "benchmarks.gpu_day.pytest_facts")


def facts(fake: bool) -> list[Job]:
    """Cheap and decisive jobs first: if time runs out, only details are missing."""
    tests = "tests/kernels/triton/test_triton.py"
    return [
        _program("machine", "gpu_machine", fake, 60),
        _pytest(
            "backend",
            "tests/vmem/backends/test_backend_contract.py",
            "",
            fake,
            tiny="page and stand_in",
            limit_s=60,
        ),
        _program("handover", "gpu_handover", fake, 60),
        _pytest("decode", tests, "test_splits", fake, tiny="test_splits and dtype0-3", limit_s=120),
        _pytest("prefill", tests, "test_ragged_batch", fake, tiny="test_ragged_batch and dtype0-16", limit_s=150),
        _pytest("cache write", tests, "test_write", fake, tiny="test_write and dims0-dtype0", limit_s=120),
        _pytest("block copies", tests, "test_copy_blocks", fake, tiny="test_copy_blocks and 100", limit_s=60),
        _pytest(
            "tokens as on the CPU",
            "tests/app/engine/execution/test_cuda.py",
            "test_a_real_device and llama",
            fake,
            tiny="test_cuda_without",
            limit_s=150,
        ),
        _benchmark("attention", fake, 180, "--footprints"),
        _throughput("parts", fake, 120, "qwen2.5-0.5b", "--parts"),
        # Last: a process with so many mappings may take long to end.
        *(
            _program(f"mappings of {count} handles", "gpu_machine", fake, 60, "--mappings", str(count))
            for count in (FAKE_HANDLES if fake else NUM_HANDLES)
        ),
    ]


def whole(fake: bool) -> list[Job]:
    return [
        *_gpu_tests(fake, 220),
        _throughput("Llama-3-8B", fake, 240, "llama-3-8b"),
        _throughput("Llama-3-8B parts", fake, 90, "llama-3-8b", "--parts"),
    ]


def graphs(fake: bool) -> list[Job]:
    """The engine's tokens, then times."""
    tests, small = "tests/app/engine/execution/test_decode_graphs.py", "test_buckets or test_rows"
    return [
        _pytest("captures", tests, "leaves_the_device_usable", fake, tiny=small, limit_s=60),
        _pytest("tokens with graphs", tests, "same_tokens_with_graphs", fake, tiny=small, limit_s=200),
        _program("graphs qwen2.5-0.5b", "gpu_steps", fake, 120, "--decodes", "--shape", "qwen2.5-0.5b"),
        _program("graphs llama-3-8b", "gpu_steps", fake, 180, "--decodes", "--shape", "llama-3-8b"),
    ]


def memory(fake: bool) -> list[Job]:
    return [
        _benchmark("elastic", fake, 120),
        _benchmark("mapping", fake, 110),
        _benchmark("preemption", fake, 140),
    ]


def shelf(fake: bool) -> list[Job]:
    """Under two minutes in all: the rates, then what a driver may refuse, then the engine."""
    return [
        _program("wakes", "gpu_shelf", fake, 90, "--measure", "wakes"),
        _pytest("weight ranges", "tests/vmem/test_uploads.py", "real_device", fake, tiny="same_tensor", limit_s=40),
        _program("turns", "gpu_shelf", fake, 110, "--measure", "turns"),
    ]


def kernels(fake: bool) -> list[Job]:
    """Variants beside today's kernels, all tests marked `gpu`, and in what is left of the time attention's footprints,
    which take long and whose kernels were compared before."""
    return [
        _program("decode kernels", "gpu_decode", fake, 90),
        _program("products", "gpu_products", fake, 60),
        _program("steps", "gpu_steps", fake, 90),
        *_gpu_tests(fake, 100),
        _benchmark("attention", fake, 100, "--footprints"),
    ]


def quantised(fake: bool) -> list[Job]:
    """Products with quantised weights: right, then how fast, then what a decode step gains."""
    tests, tiny = "tests/kernels/triton", "test_tiles_fill"
    return [
        _pytest("codes", f"{tests}/test_codes.py", "", fake, tiny=tiny, limit_s=100),
        _pytest("eight bits", f"{tests}/test_eight_bits.py", "", fake, tiny=tiny, limit_s=100),
        _program("products in 8 bits", "gpu_quantised", fake, 150, "--measure", "eight_bits"),
        _program("experts", "gpu_quantised", fake, 60, "--measure", "experts"),
        _program("quantised steps", "gpu_quantised", fake, 240, "--measure", "steps"),
        _program("quantised products", "gpu_quantised", fake, 160, "--measure", "products"),
    ]


def server(fake: bool) -> list[Job]:
    """The engine without a server comes at once after it, and has time even where the server hangs."""
    return [
        _program("server", "gpu_server", fake, 240, "--measure", "served"),
        _program("bare engine", "gpu_server", fake, 100, "--measure", "bare"),
    ]


def fleet(fake: bool) -> list[Job]:
    """What only several replicas or models show first; `memory` has the elastic pool and preemption in full."""
    return [
        _program("replicas", "gpu_fleet", fake, 130, "--measure", "replicas"),
        _program("turns", "gpu_shelf", fake, 110, "--measure", "beside"),
        _program("features", "gpu_fleet", fake, 100, "--measure", "features"),
        _benchmark("elastic", fake, 80),
    ]


STAGES: Mapping[str, Callable[[bool], list[Job]]] = {
    "facts": facts,
    "whole": whole,
    "graphs": graphs,
    "memory": memory,
    "shelf": shelf,
    "kernels": kernels,
    "quantised": quantised,
    "server": server,
    "fleet": fleet,
}


def _gpu_tests(fake: bool, limit_s: float) -> list[Job]:
    """In one process per processor, because most of their time is compilation."""
    if fake:
        return [_pytest("tests 1/1", "tests/vmem/test_layout.py", "", True, tiny="", limit_s=limit_s)]
    count, folders = num_processors(), ("tests/kernels", "tests/vmem", "tests/app/engine")
    return [
        Job(f"tests {i + 1}/{count}", (*PYTEST, "-m", "gpu", *folders, "--shard", f"{i}/{count}"), limit_s, alone=False)
        for i in range(count)
    ]


def _program(name: str, module: str, fake: bool, limit_s: float, *arguments: str) -> Job:
    return Job(name, ("-m", f"benchmarks.{module}", *arguments, *(["--fake"] if fake else [])), limit_s)


def _pytest(name: str, path: str, chosen: str, fake: bool, *, tiny: str, limit_s: float) -> Job:
    """Tests marked `gpu` that match `chosen`; without a device, those that match `tiny`."""
    select = ("-m", "not gpu", "-k", tiny) if fake else ("-m", "gpu", "-k", chosen)
    return Job(name, (*PYTEST, path, *select), limit_s, alone=False)


def _benchmark(name: str, fake: bool, limit_s: float, *more: str) -> Job:
    size = ("--device", "cpu", "--tiny") if fake else ("--device", "cuda", "--quick")
    job_name = " ".join((name, *(word for word in more if word != "--measure")))
    return Job(job_name.replace("--", ""), ("-m", f"benchmarks.{name}", *size, *more), limit_s)


def _throughput(name: str, fake: bool, limit_s: float, shape: str, *more: str) -> Job:
    size = ("--device", "cpu", "--shape", "tiny", "--quick") if fake else ("--device", "cuda", "--shape", shape)
    return Job(name, ("-m", "benchmarks.throughput", *size, *more), limit_s)
