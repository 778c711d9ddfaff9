"""KV plan on machines of several sizes: ceilings, swap space, pages, and settings that do not fit."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import cast

import pytest
import torch

from folio.app.config.engine import EngineConfig
from folio.app.config.machine import SPARE_SHARE
from folio.app.engine.engine import Engine
from folio.app.engine.memory import kv_plan
from folio.app.engine.sampling.params import SamplingParams
from folio.app.errors import ConfigError
from folio.vmem import DevicePages, PeerRanks
from tests.conftest import VOCAB_SIZE, MakeCheckpoint

GIB = 1 << 30
BLOCK_BYTES = 16 * 768
WEIGHT_BYTES = 16 << 20
# What sampling works on at once, and what a token takes: 2 · 64 + 3 · 96 numbers and its logits.
SAMPLING_BYTES, TOKEN_BYTES = 40 << 21, 4 * (2 * 64 + 3 * 96 + VOCAB_SIZE)
GREEDY = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)


@pytest.fixture
def set_machine(use_machine: Callable[..., None]) -> Callable[..., None]:
    """`set_machine(memory_bytes, available_bytes)`: engines start on such a machine from now on."""
    machine = {"limited": True, "num_cores": 8, "max_map_count": 65_530, "resident_bytes": WEIGHT_BYTES}
    return lambda memory_bytes, available_bytes, **changes: use_machine(
        memory_bytes=memory_bytes, available_bytes=available_bytes, **(machine | changes)
    )


@pytest.fixture
def make_engine(checkpoint: MakeCheckpoint) -> Callable[..., Engine]:
    defaults = {"skip_tokenizer_init": True, "num_threads": 1, "max_num_batched_tokens": 64}
    return lambda **settings: Engine(EngineConfig(model=str(checkpoint("llama")), **(defaults | settings)))


def taken_bytes(memory_bytes: int) -> int:
    """Bytes of a step, and the spare share."""
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


def test_a_small_container_meets_out_of_pages(
    set_machine: Callable[..., None], make_engine: Callable[..., Engine]
) -> None:
    """The default ignored the container's limit, and the process was killed for memory. Now requests are preempted and
    recomputed, with the same tokens."""
    engine = make_engine()
    expected = run(engine)
    engine.close()
    set_machine(256 << 20, taken_bytes(256 << 20) + 14 * BLOCK_BYTES)
    engine = make_engine()
    assert run(engine) == expected
    assert sum(engine.load.take_activity().num_preempted.values()) > 0
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
    set_machine: Callable[..., None],
    make_engine: Callable[..., Engine],
    memory_bytes: int,
    available_bytes: int,
    settings: dict[str, int],
    budget_bytes: int,
    swap_bytes: int,
) -> None:
    """By default a quarter of the memory, and the remainder for swap space; a configured ceiling is kept."""
    set_machine(memory_bytes, available_bytes)
    budget, swap = ceilings(make_engine(**settings))
    assert budget_bytes - BLOCK_BYTES < budget <= budget_bytes
    assert swap == swap_bytes


@pytest.mark.parametrize(
    ("settings", "most_bytes", "budget_bytes"),
    [
        ({}, None, 600 << 20),  # not a quarter of the machine
        ({}, 80 << 20, 80 << 20),
        ({"kv_memory_bytes": 8 << 20}, 80 << 20, 8 << 20),
        ({"kv_memory_bytes": 90 << 20}, 80 << 20, 80 << 20),
    ],
)
def test_models_on_one_device(
    set_machine: Callable[..., None],
    make_engine: Callable[..., Engine],
    settings: dict[str, int],
    most_bytes: int | None,
    budget_bytes: int,
) -> None:
    """Each may have what the device gives it at most, and gives all of it back; mappings are counted together, and
    swap space leaves the others their part."""
    set_machine(GIB, GIB)
    pages = DevicePages(600 << 20)
    engines = [make_engine(**settings) for _ in range(2)]
    memories = []
    for engine in engines:
        layers = engine.executor.layers
        memories.append(kv_plan.build_memory(engine.config, engine.model, layers, pages=pages, most_bytes=most_bytes))
        assert budget_bytes - 48 * BLOCK_BYTES < memories[-1].most_budget_bytes <= budget_bytes
        assert memories[-1].report().swap_budget_bytes == GIB - taken_bytes(GIB) - (most_bytes or 600 << 20)
    first, second = memories
    assert first.least_budget_bytes == 0
    assert first.policy.mappings_left == second.policy.mappings_left < 50_000
    # As many pages as there are mappings for in the whole process hold the whole device.
    assert pages.capacity_bytes // first.pages.page_bytes <= kv_plan.MAX_PAGES["cpu"]
    assert pages.used_bytes == 2 * first.pages.handle_bytes  # anchor pages
    for memory in memories:
        memory.close()
    pages.close()
    for engine in engines:
        engine.close()


def test_ranks_do_not_share_a_device(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    peers = cast(PeerRanks, object())
    with pytest.raises(ConfigError, match="one rank"):
        kv_plan.build_memory(engine.config, engine.model, engine.executor.layers, peers, pages=DevicePages(GIB))
    engine.close()


def test_the_log_names_the_limit_of_the_default_ceiling(
    set_machine: Callable[..., None], make_engine: Callable[..., Engine], caplog: pytest.LogCaptureFixture
) -> None:
    """The ceiling was 750 MiB of 23 GiB instead of the documented quarter, without a reason in the log."""
    caplog.set_level(logging.INFO, "folio.app.engine.memory.kv_plan")
    for count, num_pages in ((65_530, 24_000), (131_060, 48_000), (10**9, 200_000)):
        caplog.clear()
        set_machine(24 * GIB, 20 * GIB, max_map_count=count)
        assert ceilings(make_engine())[0] == num_pages * BLOCK_BYTES
        assert f"vm.max_map_count, {count}, has mappings for {num_pages} pages" in caplog.text
    caplog.clear()
    set_machine(256 << 20, 20 * GIB)
    ceilings(make_engine())
    assert "max_map_count" not in caplog.text


@pytest.mark.parametrize(
    ("settings", "messages"),
    [
        (
            {"kv_memory_bytes": 1 << 40, "max_num_seqs": 10**9, "num_threads": 10**4},
            ["kv_memory_bytes is", "num_threads is", "max_num_seqs is"],
        ),
        (
            {"max_num_batched_tokens": 10**6},
            [f"at most {((256 << 20) - WEIGHT_BYTES - SAMPLING_BYTES) // TOKEN_BYTES}: each takes up to {TOKEN_BYTES}"],
        ),
        (
            {"kv_memory_bytes": 250 << 20},
            ["kv_memory_bytes is 262144000; it must be at most 1", "weights and steps take 0.1 GiB"],
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused_at_the_start(
    set_machine: Callable[..., None], make_engine: Callable[..., Engine], settings: dict[str, int], messages: list[str]
) -> None:
    """They were accepted, and the process was killed for memory later; some depend on the model."""
    set_machine(256 << 20, 200 << 20)
    with pytest.raises(ConfigError) as refused:
        make_engine(**({"swap_bytes": 0} | settings))
    lines = str(refused.value).splitlines()
    assert len(lines) == len(settings)
    assert all(part in str(refused.value) for part in messages), lines
