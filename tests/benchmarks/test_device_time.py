"""Device time without a device: the read kernel in Triton's interpreter, variants that differ, and cold memory."""

from __future__ import annotations

import inspect
import json
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import facts
from benchmarks.engine.attention import DEVICES, SHAPES
from benchmarks.engine.attention_memory import Case, setting
from benchmarks.engine.device_time import compare, device_timer, product_limit, read_limit

CPU = torch.device("cpu")
torch_graph = torch.cuda.graph


def test_the_read_kernel_reads_every_number_once() -> None:
    pytest.importorskip("triton")
    from benchmarks.gpu.kernels import READS, read_sums

    numbers = torch.randint(-8, 9, (4 * max(tile for tile, _ in READS),)).float()
    for tile, num_warps in READS:
        assert torch.equal(read_sums(numbers, tile, num_warps), numbers.view(-1, tile).sum(1)), tile


def test_on_cuda_replays_are_timed_between_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host time of passes was counted on CUDA. Here a replay takes 2 ms of the device, and nothing else takes any.

    Only the work refers to the tensors that the graph reads: without it, `read_limit` read memory that was given back.
    """
    state = {"now_ms": 0.0, "launched": 0, "captures": 0, "replays": 0}

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at_ms = state["now_ms"]

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, end: Event) -> float:
            return end.at_ms - self.at_ms

    class Graph:
        def replay(self) -> None:
            state["now_ms"] += 2.0
            state["replays"] += 1

    @contextmanager
    def capture(graph: Graph, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        state["captures"] += 1
        yield

    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name, value in {
        "Stream": lambda device: stream,
        "current_stream": lambda device: stream,
        "stream": lambda side: nullcontext(),
        "CUDAGraph": Graph,
        "graph": capture,
        "Event": Event,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    assert "capture_error_mode" in inspect.signature(torch_graph).parameters

    def work() -> None:
        state["launched"] += 1

    timer = device_timer(work, torch.device("cuda"), least_s=0.02)
    assert (state["launched"], state["captures"]) == (4, 1)  # three times to warm up
    before = state["replays"]
    assert timer() == pytest.approx(0.002)
    assert state["replays"] - before == 10
    kept = weakref.ref(work)
    del work
    assert kept() is not None


def test_limits_are_positive_on_a_cpu() -> None:
    assert read_limit(CPU, 1 << 20, 0.001)() > 0
    assert product_limit(CPU, torch.bfloat16, 32, 0.001)() > 0


def test_a_variant_with_another_result_is_refused_and_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(facts.FILE_VARIABLE, str(tmp_path / "facts.jsonl"))
    ones = torch.ones(8)
    medians = compare("same", {"today": lambda: ones, "other": lambda: ones * 1.001}, CPU, least_s=0.0, num_bytes=8)
    assert all(seconds > 0 for seconds in medians.values())
    with pytest.raises(RuntimeError, match=r"results differ from the first variant's by \{'other'"):
        compare("differs", {"today": lambda: ones, "other": lambda: ones * 1.1}, CPU, least_s=0.0)
    same, differs = map(json.loads, (tmp_path / "facts.jsonl").read_text().splitlines())
    assert (same["fact"], differs["off"]["other"]) == ("same", pytest.approx(0.1, rel=0.1))


@pytest.mark.parametrize("layout", ["interleaved", "per_layer"])
def test_decodes_read_more_than_a_cache_holds(layout: str) -> None:
    """One set of 512 MiB was read again and again, and small ones not often enough for 60 MB of cache."""
    tiny = replace(DEVICES["cpu"], cold_bytes=4 << 20)
    case, prefill = Case(2, 64), Case(1, 64, 64)
    with setting(tiny, SHAPES["Qwen2.5-0.5B"], layout, 16, [case, prefill]) as made:  # type: ignore[arg-type]
        assert made.pass_bytes(case) >= tiny.cold_bytes
        assert made.pass_bytes(prefill) < tiny.cold_bytes
        with made.sequences(case) as sets:
            layers = len(made.caches["region"])
            assert len(sets) * layers * case.num_tokens * made.heads.token_bytes == made.pass_bytes(case)
            assert len({sequence.groups[0].block_ids[0] for some in sets for sequence in some}) == 2 * len(sets)
        made.memory.check_integrity()
    assert DEVICES["cuda"].cold_bytes >= 16 * (60 << 20)
