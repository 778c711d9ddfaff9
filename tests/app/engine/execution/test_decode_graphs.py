"""Decode graphs: buckets, padding rows, what is captured when; tokens with graphs on and off."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from folio.app.engine import LLM, EngineConfig, SamplingParams
from folio.app.engine.device.charges import DeviceCharges
from folio.app.engine.execution import decode_graphs
from folio.app.engine.execution.captured_graphs import STEPS_TO_RECAPTURE, CapturedGraphs, GraphPlan
from folio.app.engine.execution.decode_graphs import DecodeGraphs, DecodeInputs, decode_buckets, decode_view
from folio.app.engine.execution.graph import CaptureError, CudaGraph, cuda_graphs
from folio.app.engine.execution.mixed_graphs import TOKEN_BUCKETS, MixedGraphs, _Between
from folio.app.engine.layers.attention import CachedAttention, RotaryLayer
from folio.app.engine.layers.batch import BatchPart, StepBatch
from folio.app.errors import ConfigError, ModelError
from folio.kernels import Elementwise, Masking, VarlenBatch, num_compilations
from folio.vmem import DevicePages, KVMemory, View
from tests.app.engine.runs import on_gpu
from tests.conftest import ARCHITECTURES, MakeCheckpoint, tokens
from tests.fakes.recorded_graph import RecordedGraph
from tests.vmem.backends.stand_in_driver import StandInDriver
from tests.vmem.small_memory import MAX_TOKENS, FlakyHost, make_memory

CPU = torch.device("cpu")
VOCAB_SIZE = 7
GREEDY = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)


# ---- buckets ----


def test_buckets() -> None:
    assert decode_buckets(256) == (1, 2, 4, *range(8, 65, 8), *range(80, 257, 16))
    assert decode_buckets(1000)[-2:] == (992, 1000)
    for most in range(1, 300):
        buckets = decode_buckets(most)
        assert list(buckets) == sorted(set(buckets))
        assert buckets[-1] == most
        assert set(buckets[:-1]) <= set(decode_buckets(512))


# ---- inputs ----


@pytest.fixture
def memory() -> Iterator[KVMemory]:
    memory, _ = make_memory(FlakyHost, windowed=True)
    yield memory
    memory.check_idle()
    memory.close()


def decodes(lengths: Sequence[int], view: View = "block_table", groups: int = 2, **changes: Any) -> StepBatch:
    """A batch of one token a sequence, with tables and slots that belong to other rows' blocks, too."""
    count = len(lengths)
    cached = torch.tensor(lengths, dtype=torch.int32)
    width = 1 if view == "region" else max(-(-length // 16) for length in lengths)
    table = torch.arange(1, count * width + 1, dtype=torch.int32).view(count, width)
    attention = VarlenBatch(torch.arange(count + 1, dtype=torch.int32), cached, table, 1, max(lengths))
    part = BatchPart(view, slice(0, count), torch.arange(count) + 100, attention)
    fields = {
        "token_ids": torch.arange(count) + 1,
        "positions": cached.long() - 1,
        "logit_rows": torch.arange(count),
        "parts": ((part,),) * groups,
        "pending": torch.empty(2, 0, dtype=torch.int64),
    }
    return StepBatch(**(fields | changes))


def test_rows_that_are_no_sequences_are_padding(memory: KVMemory) -> None:
    inputs = DecodeInputs(memory.tensors, "block_table", 8, CPU)
    batch = inputs.batch(8)
    addresses = [tensor.data_ptr() for tensor in all_tensors(batch)]
    for lengths in ((17, 40, 3, 64, 9), (20, 5), (33,) * 8, (1,)):
        inputs.load(decodes(lengths))
        count = len(lengths)
        assert batch.token_ids.tolist() == [*range(1, count + 1)] + [0] * (8 - count)
        assert batch.positions.tolist() == [length - 1 for length in lengths] + [0] * (8 - count)
        assert batch.logit_rows.tolist() == list(range(8))
        for [part] in batch.parts:
            attention = part.attention
            assert part.slots.tolist() == [*range(100, 100 + count)] + [0] * (8 - count)
            assert attention.cache_seqlens.tolist() == [*lengths] + [1] * (8 - count)
            assert attention.cu_seqlens_q.tolist() == list(range(9))
            assert attention.block_table.shape == (8, MAX_TOKENS // 16)
            assert attention.block_table[count:, 0].tolist() == [0] * (8 - count)
            assert (attention.max_seqlen_q, attention.max_seqlen_k) == (1, MAX_TOKENS)
            expected = decodes(lengths).parts[0][0].attention.block_table
            assert torch.equal(attention.block_table[:count, : expected.shape[1]], expected)
    assert [tensor.data_ptr() for tensor in all_tensors(batch)] == addresses
    assert inputs.batch(2).parts[0][0].attention.block_table.shape == (2, MAX_TOKENS // 16)
    assert DecodeInputs(memory.tensors, "region", 4, CPU).batch(4).parts[1][0].attention.block_table.shape == (4, 1)


def all_tensors(batch: StepBatch) -> list[torch.Tensor]:
    of_parts = [
        tensor
        for [part] in batch.parts
        for tensor in (
            part.slots,
            part.attention.cu_seqlens_q,
            part.attention.cache_seqlens,
            part.attention.block_table,
        )
    ]
    return [batch.token_ids, batch.positions, batch.logit_rows, *of_parts]


def test_only_decodes_in_one_view_without_adapters_are_replayed() -> None:
    assert decode_view(decodes((3, 9))) == "block_table"
    assert decode_view(decodes((3, 9), "region")) == "region"
    [part], *_ = decodes((3, 9)).parts
    chunk = BatchPart(part.view, slice(0, 5), part.slots, part.attention)
    assert decode_view(decodes((3, 9), token_ids=torch.arange(5), parts=((chunk,),))) is None
    assert decode_view(decodes((3, 9), logit_rows=torch.arange(1))) is None
    assert decode_view(decodes((3, 9), parts=((part, part),))) is None
    assert decode_view(decodes((3, 9), adapters=object())) is None
    assert decode_view(decodes((3, 9), states=object(), parts=((part,), ()))) is None


# ---- what is captured when ----


class FakeGraph:
    """A graph of a given size that refuses, or runs its work at each replay, and launches what lies between its pieces
    as it comes."""

    def __init__(self, num_bytes: int, error: Exception | None = None) -> None:
        self.num_bytes = 0
        self._size, self._error = num_bytes, error

    def capture(self, work: Callable[[], None]) -> None:
        self.num_bytes = self._size
        if self._error is not None:
            raise self._error
        work()
        self.replay = work

    def launch_between(self, call: Callable[[], object]) -> None:
        call()


class Graphs:
    """Makes graphs of a size. Each takes the first of the errors; `made` has weak references."""

    def __init__(self, num_bytes: int = 10, *errors: Exception | None) -> None:
        self.num_bytes, self.errors = num_bytes, list(errors)
        self.made: list[weakref.ref[FakeGraph]] = []

    def __call__(self) -> FakeGraph:
        graph = FakeGraph(self.num_bytes, self.errors.pop(0) if self.errors else None)
        self.made.append(weakref.ref(graph))
        return graph


class Runner:
    """Graphs over a small memory; `seen` has the slots and lengths of each forward, `pauses` counts the mapper's."""

    def __init__(
        self, memory: KVMemory, graphs: Graphs | None = None, pages: DevicePages | None = None, **plan: Any
    ) -> None:
        self.seen: list[tuple[list[int], list[int]]] = []
        self.pauses = 0
        real = memory.mapper.paused

        @contextmanager
        def paused() -> Iterator[None]:
            self.pauses += 1
            with real():
                yield

        memory.mapper.paused = paused  # type: ignore[method-assign]
        fields: dict[str, Any] = {"budget_bytes": 1_000_000 if pages is None else 1 << 19} | plan
        self.plan = GraphPlan(buckets=decode_buckets(32), new_graph=graphs or Graphs(), **fields)
        self.charges = None if pages is None else DeviceCharges(pages, lambda: self.promised_bytes)
        self.promised_bytes = 0
        self.graphs = CapturedGraphs(self.plan, memory, CPU, self.charges)
        self.decode = DecodeGraphs(self.plan, self.graphs, memory.tensors, CPU, self.forward)

    @torch.inference_mode()
    def run(self, batch: StepBatch) -> torch.Tensor | None:
        return self.decode.run(batch)

    @property
    def captured(self) -> list[int]:
        """Buckets, in the order of their captures."""
        return [bucket for _, bucket in self.graphs.captured]

    def forward(self, batch: StepBatch) -> torch.Tensor:
        [part], *_ = batch.parts
        self.seen.append((part.slots.tolist(), part.attention.cache_seqlens.tolist()))
        return batch.token_ids[batch.logit_rows, None] * torch.ones(VOCAB_SIZE)


def test_a_graph_is_captured_at_its_first_use_with_padding_rows_alone(memory: KVMemory) -> None:
    """Regression: the rows of the step before were computed again, and written to blocks that others own by now."""
    runner = Runner(memory)
    for lengths, captured in (((17, 40, 3), {4}), ((5, 6), {2, 4}), ((9,) * 5, {2, 4, 8}), ((7, 8, 9), {2, 4, 8})):
        before = len(runner.seen)
        logits = runner.run(decodes(lengths))
        assert logits is not None
        assert logits[:, 0].tolist() == list(range(1, len(lengths) + 1))
        *captures, replay = runner.seen[before:]
        for slots, cached in captures:
            assert slots == [0] * len(slots)
            assert cached == [1] * len(slots)
        padding = len(replay[0]) - len(lengths)
        assert replay[1] == [*lengths] + [1] * padding
        assert set(runner.captured) == captured
    assert runner.pauses == 3
    assert runner.run(decodes((1,) * 33)) is None  # more than the largest bucket
    assert runner.graphs.num_bytes == 30
    assert runner.run(decodes((9, 9), "region")) is not None  # each view has its own
    assert {view for view, bucket in runner.graphs.captured if bucket == 2} == {"region", "block_table"}


def test_the_start_takes_half_of_the_budget(memory: KVMemory) -> None:
    runner = Runner(memory, Graphs(200_000))
    runner.decode.capture_all("region")
    assert runner.captured == [32, 24]
    assert runner.run(decodes((9,) * 3, "region")) is not None  # captured now
    assert runner.run(decodes((9,) * 2, "region")) is not None
    assert runner.run(decodes((9,), "region")) is not None
    assert runner.graphs.num_bytes == 1_000_000
    assert runner.run(decodes((9,) * 13, "region")) is not None  # no room: that of 24 does
    assert runner.run(decodes((9,) * 7, "region")) is None  # it would be padded threefold
    assert runner.captured == [32, 24, 4, 2, 1]
    smaller = Runner(memory)
    smaller.decode.capture_all("block_table")
    assert smaller.captured == [32, 24, 16, 8, 4, 2, 1]
    assert smaller.run(decodes((9,) * 7)) is not None
    assert len(smaller.captured) == 7


def test_without_memory_no_more_is_captured(memory: KVMemory) -> None:
    graphs = Graphs(10, None, torch.OutOfMemoryError("out of memory"))
    runner = Runner(memory, graphs, required=True)
    for count, is_replayed in ((8, True), (1, False), (1, False), (7, True)):
        assert (runner.run(decodes((9,) * count)) is not None) == is_replayed
    assert len(graphs.made) == 2


def test_a_model_that_cannot_be_captured_is_launched_kernel_by_kernel(
    memory: KVMemory, caplog: pytest.LogCaptureFixture
) -> None:
    graphs = Graphs(10, *[CaptureError("it reads a value")] * 2)
    runner = Runner(memory, graphs)
    runner.decode.capture_all("region")
    assert runner.run(decodes((9,) * 8, "region")) is None
    assert len(graphs.made) == 1
    assert "it reads a value" in caplog.text
    with pytest.raises(ModelError, match=r"decode_graphs is 'on'.*it reads a value; use 'auto'"):
        Runner(memory, graphs, required=True).decode.capture_all("region")


# ---- memory ----


def charged(runner: Runner, pages: DevicePages) -> int:
    """What is charged, which must be what the graphs hold."""
    assert pages.charged_bytes == runner.graphs.held_bytes
    return pages.charged_bytes


def test_a_sleeping_model_gives_its_graphs_back(memory: KVMemory) -> None:
    """Regression: `sleep` kept them, up to 1 GiB for each model of a shelf. Those wanted again are captured again, but
    not for a few steps, and count as no late compilations."""
    pages, graphs = DevicePages(1 << 20), Graphs(1000)
    runner = Runner(memory, graphs, pages)
    for is_first in (True, False, False):
        for lengths in ((9,) * 7, (9,)):
            for _ in range(STEPS_TO_RECAPTURE + 1):
                runner.run(decodes(lengths))
        num_compiled = num_compilations()
        assert set(runner.captured) == {8, 1}
        assert charged(runner, pages) > 2000
        runner.graphs.release()
        assert charged(runner, pages) == runner.graphs.num_bytes == 0
        assert not any(made() for made in graphs.made), "their memory is theirs while anything refers to them"
        for step in range(1, STEPS_TO_RECAPTURE + 1):
            assert runner.run(decodes((9,) * 6)) is None
            assert not runner.graphs.captured, step
        logits = runner.run(decodes((9,) * 6))
        assert logits is not None
        assert logits[:, 0].tolist() == [1, 2, 3, 4, 5, 6]
        assert runner.run(decodes((9,) * 3)) is not None  # the bucket of 4 was never captured before: now
        runner.graphs.release()
        assert num_compilations() - num_compiled == is_first
    assert charged(runner, pages) == 0


def test_graphs_take_no_memory_that_others_have(memory: KVMemory) -> None:
    """Of a shared device: neither what is used nor what is promised. Those that do not fit are captured later."""
    pages = DevicePages(1 << 20)
    runner = Runner(memory, Graphs(100_000), pages)
    pages.charge(1 << 19)
    runner.promised_bytes = (1 << 19) - 50_000
    assert runner.run(decodes((9, 9))) is None
    assert (pages.charged_bytes, runner.graphs.held_bytes) == (1 << 19, 0)
    wanted = runner.graphs.wanted_bytes  # with the buffers
    assert 100_000 < wanted < 150_000
    num_captures = len(runner.seen)
    runner.promised_bytes = (1 << 19) - wanted + 1
    assert runner.run(decodes((9, 9))) is None
    assert len(runner.seen) == num_captures, "its size is known"
    runner.promised_bytes -= 1
    assert runner.run(decodes((9, 9))) is not None
    assert (pages.charged_bytes, runner.graphs.wanted_bytes) == ((1 << 19) + wanted, 0)
    runner.graphs.limit_bytes = 199_999
    runner.promised_bytes = 0
    assert runner.run(decodes((9,) * 8)) is not None  # its size is not known; from now on the bound is passed
    assert runner.run(decodes((9,) * 4)) is not None  # by the graph of 8
    assert set(runner.graphs.captured) == {("block_table", 2), ("block_table", 8)}
    runner.graphs.release()
    pages.discharge(1 << 19)
    pages.close()


def test_a_graph_beyond_the_bound_is_not_wanted(memory: KVMemory) -> None:
    """Regression: a shelf kept memory for a graph that there was no memory for, and that no longer fitted its bound."""
    pages = DevicePages(1 << 20)
    runner = Runner(memory, Graphs(100_000), pages)
    pages.charge(others := pages.available_bytes - 10)
    assert runner.run(decodes((9, 9))) is None
    assert runner.graphs.wanted_bytes > 100_000
    runner.graphs.limit_bytes = 100_000
    assert runner.run(decodes((9, 9))) is None
    assert runner.graphs.wanted_bytes == 0
    pages.discharge(others)


@pytest.mark.parametrize("error", [None, torch.OutOfMemoryError("no memory"), ValueError("a bug")])
def test_the_first_graph_of_another_view_may_not_fit(memory: KVMemory, error: Exception | None) -> None:
    """Regression: its buffers stayed and were not charged, so that the step failed with more bytes held than charged.
    The graphs of the first view stay, if there is memory for what is left in their pool."""
    pages, graphs = DevicePages(1 << 20), Graphs(1000)
    runner = Runner(memory, graphs, pages)
    assert runner.run(decodes((9, 9))) is not None
    held_bytes = charged(runner, pages)
    graphs.errors.append(error)
    others = pages.available_bytes - 10 if error is None else 0
    pages.charge(others)
    if isinstance(error, ValueError):
        with pytest.raises(ValueError, match="a bug"):
            runner.run(decodes((9, 9), "region"))
    else:
        assert runner.run(decodes((9, 9), "region")) is None
    pages.discharge(others)
    left_bytes = {type(None): -held_bytes, torch.OutOfMemoryError: 1000}.get(type(error), 0)
    assert runner.charges is not None
    assert charged(runner, pages) == runner.charges.charged_bytes == held_bytes + left_bytes
    assert (runner.run(decodes((9, 9))) is None) == (error is None)
    runner.graphs.release()
    pages.close()


def test_there_may_be_no_memory_for_the_buffers_of_a_view(memory: KVMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: block tables of all sequences, tens of MiB for long contexts, were allocated before the graph, and a
    device without so much failed the step instead of launching its kernels."""

    def no_memory(*_: object) -> DecodeInputs:
        raise torch.OutOfMemoryError("no memory")

    pages = DevicePages(1 << 20)
    runner = Runner(memory, Graphs(1000), pages)
    assert runner.run(decodes((9, 9), "region")) is not None
    held_bytes = charged(runner, pages)
    with monkeypatch.context() as patched:
        patched.setattr(decode_graphs, "DecodeInputs", no_memory)
        assert runner.run(decodes((9, 9))) is None
    assert charged(runner, pages) == held_bytes
    assert runner.run(decodes((9, 9), "region")) is not None
    runner.graphs.release()
    assert charged(runner, pages) == 0


# ---- engines ----


def prompts() -> list[list[int]]:
    return [tokens(n, seed=n) for n in (1, 17, 63, 120, 9)]


def generate(folder: Any, *, capture: bool = False, **settings: Any) -> list[list[int]]:
    """Greedy tokens of prompts of which one comes late and two leave early.

    Args:
        capture: capture all graphs at the start.
    """
    shared = {"skip_tokenizer_init": True, "kv_memory_bytes": 16 << 20, "max_num_seqs": 12, "max_model_len": 200}
    params = [SamplingParams(max_tokens=most, temperature=0, ignore_eos=True) for most in (20, 5, 12, 20, 3)]
    outputs: list[list[int]] = [[] for _ in prompts()]
    with LLM(folder, **(shared | settings)) as llm:
        engine = llm.engine
        if capture:
            engine.executor.capture_graphs(engine.config.kv_view)
        for i, prompt in enumerate(prompts()[:-1]):
            engine.submit(str(i), prompt, params[i])
        num_steps = 0
        while engine.has_work or num_steps < 4:
            if num_steps == 3:
                engine.submit("4", prompts()[-1], params[-1])
            for delta in engine.step():
                assert delta.error is None
                outputs[int(delta.request_id)] += delta.token_ids
            engine.check_integrity()
            num_steps += 1
    return outputs


MIXED = {"max_num_batched_tokens": 70, "mixed_graphs": "on"}


@pytest.mark.thirds
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *((name, {}) for name in ARCHITECTURES),
        *(
            ("gemma2", {"kv_view": view, "block_tokens": 16, "async_scheduling": overlaps})
            for view in ("region", "block_table")
            for overlaps in ("off", "on")
        ),
        ("llama", {"kv_view": "region", **MIXED}),
        ("llama", {"async_scheduling": "on"}),  # here, so that steps overlap in one case of each day
        ("gemma2", {"kv_view": "region", **MIXED}),
        ("qwen3", {"kv_view": "block_table", **MIXED}),
    ],
    ids=str,
)
def test_replayed_steps_give_the_same_tokens(
    name: str,
    settings: dict[str, Any],
    checkpoint: MakeCheckpoint,
    replays: list[RecordedGraph],
    without_compiler: None,
) -> None:
    """Mixed graphs replay steps with prompts, too: chunks beside decodes, some of them padded; attention sees the real
    tokens only."""
    folder, plain = checkpoint(name), {key: value for key, value in settings.items() if key != "mixed_graphs"}
    expected = generate(folder, decode_graphs="off", **plain)
    assert not replays
    assert generate(folder, decode_graphs="on", **plain) == expected
    num_decodes = len(replays)
    assert num_decodes >= 15  # all steps but those with a prompt
    assert len(set(replays)) >= 3  # of 4, 2 and 1 sequences, at least
    if plain != settings:
        replays.clear()
        assert generate(folder, decode_graphs="on", **settings) == expected
        assert len(replays) >= num_decodes + 4


@pytest.mark.thirds
@pytest.mark.parametrize("view", ["region", "block_table", "auto"])
def test_graphs_stay_valid_while_pages_come_and_go(
    view: Any,
    checkpoint: MakeCheckpoint,
    use_device: Callable[[], StandInDriver],
    replays: list[RecordedGraph],
    without_compiler: None,
) -> None:
    """Over the fake driver: regions grow, windows move on and idle pages go back between replays. Nothing is mapped
    during a capture, and no kernel is given the address of a hole."""
    folder = checkpoint("gemma2")
    shared = {"kv_view": view, "max_num_batched_tokens": 96, "kv_memory_bytes": 4 << 20}
    expected = generate(folder, decode_graphs="off", **shared)
    driver = use_device()
    capture, changes = RecordedGraph.capture, []

    def noted(graph: RecordedGraph, work: Callable[[], None]) -> None:
        before = len(driver.calls)
        capture(graph, work)
        changes.append([call for call in driver.calls[before:] if call.startswith("cuMem")])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RecordedGraph, "capture", noted)
        released = {"kv_idle_release_s": 0.0, "prefix_cache_release_s": 0.0}
        assert generate(folder, decode_graphs="on", **shared, **released) == expected
    assert len(replays) >= 15
    assert changes
    assert not any(changes)
    calls = [call for call in driver.calls if call in ("cuMemMap", "cuMemUnmap")]
    assert calls.count("cuMemUnmap") > 10


def test_blocks_that_share_handles_are_captured_by_block_table(
    checkpoint: MakeCheckpoint,
    use_device: Callable[[], StandInDriver],
    replays: list[RecordedGraph],
    without_compiler: None,
) -> None:
    """Regression: graphs of regions were captured, which there are none of, and on a GPU wrote to address 0."""
    folder = checkpoint("llama")
    shared = {"skip_tokenizer_init": True, "max_num_seqs": 4, "max_model_len": 200, "kv_memory_bytes": 8 << 20}
    use_device()
    with LLM(folder, kv_layout="sliced", decode_graphs="on", **shared) as llm:
        assert llm.engine.memory.groups[0].layout.extent_blocks > 1
        llm.engine.executor.capture_graphs("auto")
        graphs = llm.engine.executor.graphs
        assert graphs is not None
        assert {view for view, _ in graphs.captured} == {"block_table"}


def test_models_with_states_and_steps_with_drafts_are_not_replayed(
    checkpoint: MakeCheckpoint, replays: list[RecordedGraph], without_compiler: None
) -> None:
    hybrid = checkpoint("bamba")
    assert generate(hybrid, decode_graphs="on") == generate(hybrid, decode_graphs="off")
    assert not replays
    folder = checkpoint("llama")
    assert generate(folder, decode_graphs="on", speculation="ngram") == generate(folder, decode_graphs="off")


def test_ranks_and_processors_have_no_graphs() -> None:
    with pytest.raises(ConfigError, match=r"decode_graphs is 'on' and device 'cpu'; .* use decode_graphs 'auto'"):
        LLM("builtin", device="cpu", decode_graphs="on")
    with pytest.raises(ConfigError, match="decode_graphs is 'on' and tensor_parallel_size 2"):
        EngineConfig(model="builtin", decode_graphs="on", tensor_parallel_size=2)


# ---- on a device ----


@on_gpu
@pytest.mark.parametrize("view", ["region", "block_table", "auto"])
@pytest.mark.parametrize(("name", "mixed"), [("llama", "off"), ("llama", "on"), ("gemma2", "off"), ("gemma2", "on")])
def test_a_real_device_gives_the_same_tokens_with_graphs(
    name: str, mixed: Any, view: Any, checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All buckets are captured; between replays pages come and go."""
    folder = checkpoint(name)
    shared = {"device": "cuda", "dtype": "float32", "kv_view": view, "kv_memory_bytes": 1 << 30}
    released = {"kv_idle_release_s": 0.0, "prefix_cache_release_s": 0.0}
    expected = generate(folder, decode_graphs="off", **shared, **released)
    replayed: list[CudaGraph] = []
    replay = CudaGraph.replay
    monkeypatch.setattr(CudaGraph, "replay", lambda graph: (replayed.append(graph), replay(graph))[1])
    assert generate(folder, decode_graphs="on", mixed_graphs=mixed, capture=True, **shared, **released) == expected
    assert len(replayed) >= (15 if mixed == "off" else 18)


@on_gpu
@pytest.mark.parametrize("quantization", ["none", "int4"])
def test_experts_on_a_real_device_are_replayed(quantization: str, checkpoint: MakeCheckpoint) -> None:
    """In bfloat16: torch's product over experts reads their counts on the host in others, which is refused. Padded
    products are rounded in another way there, so that an output may leave the other at a near tie."""
    folder = checkpoint("gpt_oss")
    shared = {"device": "cuda", "kv_memory_bytes": 1 << 30, "dtype": "bfloat16", "quantization": quantization}
    expected = generate(folder, decode_graphs="off", **shared)
    actual = generate(folder, decode_graphs="on", capture=True, **shared)
    equal = [
        next((i for i, pair in enumerate(zip(*both, strict=True)) if len(set(pair)) > 1), len(both[0]))
        for both in zip(actual, expected, strict=True)
    ]
    assert sum(equal) >= sum(map(len, expected)) / 2, (actual, expected)


@on_gpu
def test_work_that_cannot_be_captured_leaves_the_device_usable() -> None:
    device = torch.device("cuda")
    new_graph = cuda_graphs(device)
    x, out = torch.ones(4, device=device), torch.zeros(4, device=device)
    for work in (lambda: out.fill_(x.sum().item()), lambda: out.copy_(x[x > 0])):
        with pytest.raises(CaptureError):
            new_graph().capture(work)
        assert (x + 1).tolist() == [2.0] * 4
    graph = cuda_graphs(device)()  # a pool is not used again after a failure
    graph.capture(lambda: out.copy_(x * 2))
    x.fill_(3.0)
    graph.replay()
    assert out.tolist() == [6.0] * 4
    assert graph.num_bytes >= 0


class _NoPiece:
    """In place of `torch.cuda.CUDAGraph`."""

    def capture_begin(self, **_: Any) -> None:
        self.is_valid = True

    def capture_end(self) -> None:
        if not self.is_valid:
            raise RuntimeError("the capture was invalidated")


@pytest.fixture
def no_graph(monkeypatch: pytest.MonkeyPatch) -> CudaGraph:
    """A graph without a device: reserved and free memory before and after its capture are given."""
    reserved, free = iter([1000, 300]), iter([5000, 5700])
    fakes: dict[str, Any] = {
        "current_stream": lambda: SimpleNamespace(wait_stream=lambda _: None),
        "stream": lambda _: nullcontext(),
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
        "mem_get_info": lambda: (next(free), 9000),
        "memory_reserved": lambda: next(reserved),
        "CUDAGraph": _NoPiece,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    stream: Any = SimpleNamespace(wait_stream=lambda _: None)
    return CudaGraph(cast(Any, SimpleNamespace(handle=None)), stream)


def test_a_graph_never_has_less_than_nothing(no_graph: CudaGraph) -> None:
    """Regression: a model that was loaded in another thread gave more back during a capture than the graph took. The
    graph's negative size then gave back what others had been charged."""
    no_graph.capture(lambda: None)
    assert no_graph.num_bytes == 0


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (torch.OutOfMemoryError("no memory"), torch.OutOfMemoryError),
        (RuntimeError("it reads a value"), CaptureError),
        (ValueError("a bug"), ValueError),
    ],
)
def test_the_error_of_the_work_is_the_error_of_a_capture(
    error: Exception, raised: type[Exception], no_graph: CudaGraph
) -> None:
    """Regression: that of ending an invalid capture took its place: a device without memory looked like a model that
    cannot be captured, an error where graphs are required."""

    def work() -> None:
        if no_graph._pieces:  # while it is captured, not while it is run
            cast(_NoPiece, no_graph._pieces[-1]).is_valid = False
            raise error

    with pytest.raises(raised, match=str(error)):
        no_graph.capture(work)


# ---- mixed graphs ----


@on_gpu
def test_the_memory_of_graphs_that_are_gone_goes_back_to_a_real_device() -> None:
    """All of it, each time, and a graph's size is what it takes."""
    device = torch.device("cuda")
    new_graph, step_bytes = cuda_graphs(device), 256 << 20
    x, out = torch.ones(step_bytes // 4 // 64, device=device), torch.zeros(step_bytes // 4 // 64, device=device)

    def free_bytes() -> int:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]

    left: list[int] = []
    for _ in range(3):
        before = free_bytes()
        graphs = [new_graph(), new_graph()]
        for graph in graphs:
            graph.capture(lambda: out.copy_((x * 2).repeat(64).view(64, -1).sum(0)))
        assert step_bytes <= graphs[0].num_bytes <= 2 * step_bytes
        assert graphs[1].num_bytes <= 64 << 20, "it takes the first one's memory"
        assert before - free_bytes() >= step_bytes
        out.zero_()
        graphs[0].replay()
        assert out.tolist()[:2] == [128.0, 128.0]
        graphs.clear()
        del graph
        left.append(free_bytes())
    assert max(left) - min(left) <= 32 << 20
    assert before - left[-1] <= 32 << 20


def test_rotary_layers_are_launched_for_the_tokens_of_the_step() -> None:
    """Between pieces, over copies of what the piece before has made; the angles of all layers are copied once."""
    given: list[list[torch.Tensor]] = []

    class Attention:
        def attend_rotary(self, layer: RotaryLayer, *tensors: torch.Tensor) -> torch.Tensor:
            given.append([*tensors])
            return tensors[0][:, : layer.num_q_heads] + layer.layer

    class Pieces:
        def __init__(self) -> None:
            self.launch_between = (calls := []).append
            self.calls: list[Callable[[], object]] = calls

    between, graph, ops = _Between(Attention()), Pieces(), cast(Elementwise, None)  # type: ignore[arg-type]
    between.graph = graph  # type: ignore[assignment]
    cos, sin = torch.randn(2, 1, 16, 8)
    layers = [RotaryLayer(i, ops, 4, 1, 8, Masking(scale=1.0)) for i in range(2)]
    heads = [torch.randn(16, 6, 8) for _ in layers]
    outs = [
        between.attend_rotary(layer, *each) for layer, each in zip(layers, ((h, cos, sin) for h in heads), strict=True)
    ]
    between.end()
    between.num_tokens = 5
    graph.calls[1]()
    assert torch.equal(given[0][0], heads[1][:5])
    assert [torch.equal(kept, angles[0, :5]) for kept, angles in zip(given[0][1:], (cos, sin), strict=True)] == [
        True,
        True,
    ]
    assert torch.equal(outs[1][:5], heads[1][:5, :4] + 1)
    assert not outs[1][5:].any()
    graph.calls[0]()
    assert [a.data_ptr() for a in given[0]] == [b.data_ptr() for b in given[1]]
    assert outs[0].data_ptr() == outs[1].data_ptr()


class Attention:
    """Doubles the queries."""

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, masking: object) -> torch.Tensor:
        return q * 2

    def forget_calls(self) -> None: ...


class MixedRunner(Runner):
    """With mixed graphs beside: their one layer has `HEADS` query heads and as many of keys and values."""

    HEADS, DIM = 4, 8

    def __init__(self, *args: Any, **plan: Any) -> None:
        super().__init__(*args, **plan)
        self.bound: list[Any] = []
        attention = cast(CachedAttention, Attention())
        self.mixed = MixedGraphs(self.plan, self.graphs, CPU, attention, self.forward_mixed, self.bound.append)

    @torch.inference_mode()
    def run(self, batch: StepBatch) -> torch.Tensor | None:
        logits = self.decode.run(batch)
        return self.mixed.run(batch) if logits is None else logits

    def forward_mixed(self, ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        heads = ids[:, None, None].expand(-1, self.HEADS, self.DIM).float()
        out = self.bound[-1].attend(0, heads, heads, heads, Masking(scale=1.0))
        return out[rows, 0, :1] * torch.ones(VOCAB_SIZE)


def prompt(count: int) -> StepBatch:
    """Of which the last token's logits are wanted."""
    return decodes((9,) * count, logit_rows=torch.tensor([count - 1]))


def test_all_graphs_are_charged_with_their_buffers_and_given_back(memory: KVMemory) -> None:
    """Regression: the places of mixed graphs' tensors, and graphs of steps with prompts, were outside of the bound and
    of a device's charges, and a sleeping model kept them."""
    pages, graphs = DevicePages(1 << 20), Graphs(1000)
    runner = MixedRunner(memory, graphs, pages, new_mixed_graph=graphs, budget_bytes=1_000_000)
    places = TOKEN_BUCKETS[-1] * (3 * 8 + 4 * MixedRunner.HEADS * MixedRunner.DIM * 4)  # inputs; q, k, v and the result
    logits = 32 * VOCAB_SIZE * 4  # of both kinds
    for _ in range(2):
        for _ in range(STEPS_TO_RECAPTURE + 1):  # of the second round
            found = runner.run(prompt(5))
        assert found is not None
        assert found.tolist() == [[10.0] * VOCAB_SIZE]
        assert charged(runner, pages) == 1000 + places + logits
        for _ in range(STEPS_TO_RECAPTURE + 1):
            runner.run(prompt(17))
            decoded = runner.run(decodes((9, 9)))
        assert decoded is not None
        assert decoded[:, 0].tolist() == [1, 2]
        assert set(runner.graphs.captured) == {("mixed", 16), ("mixed", 32), ("block_table", 2)}
        assert charged(runner, pages) == 3000 + places + logits + runner.decode.buffer_bytes
        runner.graphs.release()
        assert charged(runner, pages) == 0
        gc.collect()  # these graphs keep their work, which refers to them
        assert not any(graph() for graph in graphs.made)
    runner.graphs.limit_bytes = places + logits + 1500
    for _ in range(STEPS_TO_RECAPTURE + 1):
        decoded = runner.run(decodes((9, 9)))
    assert decoded is not None
    for _ in range(STEPS_TO_RECAPTURE + 1):
        assert runner.run(prompt(5)) is None  # beyond the bound with its places
    runner.graphs.release()
    pages.close()


@pytest.mark.parametrize("error", [None, CaptureError("no"), torch.OutOfMemoryError("no memory")])
@pytest.mark.parametrize("free", [100_000, 10])
def test_what_a_discarded_graph_leaves_in_a_pool_is_charged(
    memory: KVMemory, error: Exception | None, free: int
) -> None:
    """Regression: other graphs keep the pool, and so its memory, which nothing was charged for. Where it cannot be
    charged, they are dropped, too."""
    pages = DevicePages(1 << 20)
    runner = MixedRunner(memory, Graphs(1000, None, error), pages, new_mixed_graph=Graphs(500), budget_bytes=1_000_000)
    for batch in (decodes((9,) * 2), prompt(5)):
        assert runner.run(batch) is not None
    held_bytes = charged(runner, pages)
    pages.charge(others := pages.available_bytes - free)
    runner.run(decodes((9,) * 4))
    pages.discharge(others)
    if free == 10:
        assert not runner.graphs.captured
        assert charged(runner, pages) == 0
    else:
        assert (("block_table", 4) in runner.graphs.captured) == (error is None)
        assert charged(runner, pages) == held_bytes + 1000
    runner.graphs.release()
    assert charged(runner, pages) == 0
    pages.close()


def test_steps_that_cannot_be_replayed_in_pieces_are_launched(memory: KVMemory) -> None:
    pages, graphs = DevicePages(1 << 20), Graphs(10, *[CaptureError("it reads a value")] * 9)

    def runner(**plan: Any) -> MixedRunner:
        return MixedRunner(memory, None, pages, new_mixed_graph=graphs, **plan)

    refusing = runner()
    for _ in range(2):
        assert refusing.run(prompt(3)) is None
    assert len(refusing.bound) == 2  # it was not tried again
    assert isinstance(refusing.bound[-1], Attention)
    assert refusing.run(decodes((9, 9))) is not None
    refusing.graphs.release()
    with pytest.raises(ModelError, match=r"mixed_graphs is 'on'.*it reads a value; use 'off'"):
        runner(required=True).run(prompt(3))
    assert pages.charged_bytes == 0
    graphs.made.clear()
    for batch in (decodes((9,) * 33), prompt(641), decodes((9,), adapters=object()), decodes((9,), states=())):
        assert runner(required=True).run(batch) is None
    assert not graphs.made
    pages.close()
