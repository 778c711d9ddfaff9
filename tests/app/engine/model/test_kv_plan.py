"""The KV memory that a machine has room for: ceilings, swap space, pages; and settings that it has no room for."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from app.config.engine import EngineConfig
from app.config.machine import SPARE_SHARE, Machine
from app.engine.engine import Engine
from app.engine.model import kv_plan
from app.engine.sampling.params import SamplingParams
from app.errors import ConfigError
from tests.conftest import SMALL, VOCAB_SIZE, MakeCheckpoint

GIB = 1 << 30
BLOCK_BYTES = 16 * 768
WEIGHT_BYTES = 16 << 20
# What sampling works on at once, and what a token takes: 2 · 64 + 3 · 96 numbers and its logits.
SAMPLING_BYTES, TOKEN_BYTES = 40 << 21, 4 * (2 * 64 + 3 * 96 + VOCAB_SIZE)
GREEDY = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)


def be_on(
    monkeypatch: pytest.MonkeyPatch, memory_bytes: int, available_bytes: int, max_map_count: int = 65_530
) -> None:
    machine = Machine(memory_bytes, available_bytes, limited=True, num_cores=8, max_map_count=max_map_count)
    monkeypatch.setattr(Machine, "detect", lambda: machine)
    monkeypatch.setattr(kv_plan, "resident_bytes", lambda: WEIGHT_BYTES)


def make_engine(make_checkpoint: MakeCheckpoint, **settings: Any) -> Engine:
    defaults = {"skip_tokenizer_init": True, "num_threads": 1, "max_num_batched_tokens": 64}
    return Engine(EngineConfig(model=str(make_checkpoint("llama", **SMALL)), **(defaults | settings)))


def taken_bytes(memory_bytes: int) -> int:
    """By a step, and what is spare."""
    return SAMPLING_BYTES + 64 * TOKEN_BYTES + int(SPARE_SHARE * memory_bytes)


def ceilings(engine: Engine) -> tuple[int, int]:
    report = engine.report()
    engine.check_integrity()
    engine.close()
    return report.budget_bytes, report.swap_budget_bytes


def run(engine: Engine) -> list[list[int]]:
    generator = torch.Generator().manual_seed(9)
    for i in range(6):
        engine.submit(f"{i}", torch.randint(VOCAB_SIZE - 1, (60,), generator=generator).tolist(), GREEDY)
    outputs: list[list[int]] = [[] for _ in range(6)]
    while engine.has_work:
        for delta in engine.step():
            assert delta.error is None
            outputs[int(delta.request_id)] += delta.token_ids
        assert engine.report().physical_bytes <= engine.report().budget_bytes + BLOCK_BYTES  # the anchor page
    return outputs


def test_a_small_container_meets_out_of_pages(monkeypatch: pytest.MonkeyPatch, make_checkpoint: MakeCheckpoint) -> None:
    """By default the cache could be a quarter of the machine's memory whatever the container's limit was, and the swap
    space 1 GiB: the OOM killer came. Now requests are preempted and computed again, to the same tokens."""
    engine = make_engine(make_checkpoint)
    expected = run(engine)
    engine.close()
    be_on(monkeypatch, 256 << 20, taken_bytes(256 << 20) + 14 * BLOCK_BYTES)
    engine = make_engine(make_checkpoint)
    assert run(engine) == expected
    assert sum(engine.take_activity().num_preempted.values()) > 0
    budget, swap = ceilings(engine)
    assert (budget, swap) == (14 * BLOCK_BYTES, 0)


@pytest.mark.parametrize(
    ("memory_bytes", "available_bytes", "settings", "budget_bytes", "swap_bytes"),
    [
        (GIB, GIB, {}, GIB // 4, GIB - taken_bytes(GIB) - GIB // 4),
        (GIB, GIB // 2, {}, GIB // 4, GIB // 2 - taken_bytes(GIB) - GIB // 4),
        (GIB, GIB // 4, {}, GIB // 4 - taken_bytes(GIB), 0),
        (2 * GIB, 8 * GIB, {"kv_memory_bytes": 8 << 20}, 8 << 20, GIB),
        (2 * GIB, 8 * GIB, {"kv_memory_bytes": 8 << 20, "swap_bytes": 5 << 20}, 8 << 20, 5 << 20),
        (2 * GIB, 1, {"kv_memory_bytes": 8 << 20}, 8 << 20, 0),
    ],
)
def test_ceilings(
    monkeypatch: pytest.MonkeyPatch,
    make_checkpoint: MakeCheckpoint,
    memory_bytes: int,
    available_bytes: int,
    settings: dict[str, int],
    budget_bytes: int,
    swap_bytes: int,
) -> None:
    """A quarter of the memory, and for swaps what the cache leaves; a ceiling that is asked for stays."""
    be_on(monkeypatch, memory_bytes, available_bytes)
    budget, swap = ceilings(make_engine(make_checkpoint, **settings))
    assert budget_bytes - BLOCK_BYTES < budget <= budget_bytes
    assert swap == swap_bytes


def test_the_log_says_what_limits_the_default_ceiling(
    monkeypatch: pytest.MonkeyPatch, make_checkpoint: MakeCheckpoint, caplog: pytest.LogCaptureFixture
) -> None:
    """It was 750 MiB of 23 GiB, the documentation says a quarter, and nothing told why."""
    caplog.set_level(logging.INFO, "app.engine.model.kv_plan")
    for count, num_pages in ((65_530, 24_000), (131_060, 48_000), (10**9, 200_000)):
        caplog.clear()
        be_on(monkeypatch, 24 * GIB, 20 * GIB, count)
        assert ceilings(make_engine(make_checkpoint))[0] == num_pages * BLOCK_BYTES
        assert f"vm.max_map_count, {count}, has mappings for {num_pages} pages" in caplog.text
    caplog.clear()
    be_on(monkeypatch, 256 << 20, 20 * GIB)
    ceilings(make_engine(make_checkpoint))
    assert "max_map_count" not in caplog.text


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            {"kv_memory_bytes": 1 << 40, "max_num_seqs": 10**9, "num_threads": 10**4},
            ["kv_memory_bytes is", "num_threads is", "max_num_seqs is"],
        ),
        (
            {"max_num_batched_tokens": 10**6},
            [f"at most {((256 << 20) - WEIGHT_BYTES - SAMPLING_BYTES) // TOKEN_BYTES}: each takes up to {TOKEN_BYTES}"],
        ),
        ({"kv_memory_bytes": 250 << 20}, ["kv_memory_bytes is 262144000; at most 1", "weights and steps take 0.1 GiB"]),
    ],
)
def test_settings_that_do_not_fit_are_refused_at_the_start(
    monkeypatch: pytest.MonkeyPatch, make_checkpoint: MakeCheckpoint, settings: dict[str, int], told: list[str]
) -> None:
    """They were accepted, and the OOM killer came when they were used; some only show when the model is known."""
    be_on(monkeypatch, 256 << 20, 200 << 20)
    with pytest.raises(ConfigError) as refused:
        make_engine(make_checkpoint, **({"swap_bytes": 0} | settings))
    lines = str(refused.value).splitlines()
    assert len(lines) == len(settings)
    assert all(part in str(refused.value) for part in told), lines
