"""Weights of sleeping models on a GPU (jobs of `benchmarks.gpu_day`).

--measure wakes: a range with the bytes of Llama-3-8B in bfloat16 sleeps and wakes, from its copy in pinned memory and
from a file in the page cache. Gigabytes a second of each wake, beside those of copies alone into pages that are mapped,
which is the limit; milliseconds of each sleep; after each wake a sample of the bytes is compared.

--measure turns: three small models on a shelf that has memory for two of them. --measure beside: then also with a large
model that is kept always. Tokens must be those that each small model gives alone, and those of the large one the same
in each turn. Gigabytes a second of each wake, and how many decode steps after it replay graphs captured before.

--fake is small, over the stand-in for the driver with host memory, and measures nothing.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from benchmarks import checkpoints, facts, harness
from benchmarks.gpu.models import write_model
from benchmarks.gpu.parts import arguments
from folio.app.config.engine import EngineConfig
from folio.app.config.shelf import ModelConfig
from folio.app.engine import LLM, EngineRequest, SamplingParams
from folio.app.engine.execution.decode_graphs import DecodeGraphs, decode_view
from folio.app.engine.layers.batch import StepBatch
from folio.app.engine.memory import kv_plan
from folio.app.engine.memory.kv_plan import estimated_activations
from folio.app.engine.memory.size import ModelSize
from folio.app.engine.model.device import resolve
from folio.app.shelf import device as shelf_device
from folio.app.shelf.shelf import Shelf
from folio.app.shelf.shelved_model import ShelvedModel
from folio.kernels import num_compilations
from folio.vmem import AddressRange, CudaBackend, DevicePages
from folio.vmem.backends.cuda import CPU
from folio.vmem.uploads import CudaRange, FilePart, PinnedMemory, Uploads

# Of Llama-3-8B: 8,030,261,248 parameters of two bytes.
WEIGHT_BYTES, FAKE_BYTES = 16_060_522_496, 41 * 65536 + 4096
NUM_WAKES, FAKE_WAKES = 6, 2
STAMP_BYTES = 4096  # the first eight of which are their number
SAMPLE = 2048
# Rounds, and prompts in each.
TURNS, FAKE_TURNS = (3, 2), (2, 1)
GREEDY = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
LIMITS: dict[str, Any] = {
    "max_model_len": 1024,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 512,
    "skip_tokenizer_init": True,
}
KV_BYTES = 512 << 20
# Of the shape for --fake: its weights still take more than the least KV memory.
SMALL = {
    "vocab_size": 2048,
    "hidden_size": 448,
    "num_hidden_layers": 4,
    "num_attention_heads": 7,
    "num_key_value_heads": 1,
}


class Wakes:
    """One range on the device, and the bytes that it should show."""

    def __init__(self, uploads: Uploads, pages: DevicePages, num_bytes: int, num_wakes: int) -> None:
        self._uploads, self._pages, self._num_wakes = uploads, pages, num_wakes
        self._range = CudaRange(num_bytes, uploads)
        self._random = torch.randint(0, 256, (uploads.piece_bytes,), dtype=torch.uint8)
        self._generator = torch.Generator().manual_seed(1)
        self.figures: dict[str, float] = {}

    def fill(self, memory: PinnedMemory) -> None:
        for start in range(0, memory.num_bytes, self._uploads.piece_bytes):
            num_bytes = min(self._uploads.piece_bytes, memory.num_bytes - start)
            piece = torch.frombuffer(memory.view(start, num_bytes), dtype=torch.uint8)
            piece.copy_(self._random[:num_bytes])
            stamps = piece.view(torch.int64).view(-1, STAMP_BYTES // 8)[:, 0]
            stamps.copy_(torch.arange(len(stamps)) + start // STAMP_BYTES)

    def check(self) -> None:
        """Raise `RuntimeError` unless the first, the last and random pieces of 4 KiB are right."""
        rows = self._range.tensor().view(-1, STAMP_BYTES)
        chosen = torch.randint(0, len(rows), (SAMPLE,), generator=self._generator)
        chosen[0], chosen[1] = 0, len(rows) - 1
        found = rows[chosen.to(rows.device)].cpu()
        expected = self._random.view(-1, STAMP_BYTES)[chosen % (len(self._random) // STAMP_BYTES)]
        expected.view(torch.int64)[:, 0] = chosen
        if not torch.equal(found, expected):
            wrong = (found != expected).any(dim=1).sum().item()
            raise RuntimeError(f"{wrong} of {SAMPLE} samples of 4 KiB are wrong after a wake")

    def run(self, kind: str, source: PinnedMemory | FilePart, *, copies_alone: bool = False) -> None:
        """Wake and sleep some times; the first wake creates pages and staging buffers, and does not count."""
        wakes, sleeps, num_bytes = [], [], self._range.num_bytes
        for _ in range(self._num_wakes):
            start = time.perf_counter()
            self._range.map(source)
            wakes.append(time.perf_counter() - start)
            self.check()
            if copies_alone:
                assert isinstance(source, PinnedMemory)
                self._copies_alone(source)
                copies_alone = False
            start = time.perf_counter()
            self._range.unmap()
            sleeps.append(time.perf_counter() - start)
            self._pages.check_integrity()
        rates = [num_bytes / seconds / 1e9 for seconds in wakes[1:]]
        median, sleep_ms = statistics.median(rates), 1e3 * statistics.median(sleeps)
        facts.note(
            self.figures,
            kind,
            f"{median:.1f} GB/s (least {min(rates):.1f}, of {len(rates)}; the first {num_bytes / wakes[0] / 1e9:.1f}), "
            f"{num_bytes / median / 1e9:.3f} s a wake, {sleep_ms:.1f} ms a sleep",
            **{f"{kind}_gb_per_s": median, f"{kind}_least_gb_per_s": min(rates), f"{kind}_sleep_ms": sleep_ms},
        )

    def close(self) -> None:
        self._range.close()

    def _copies_alone(self, source: PinnedMemory) -> None:
        start = time.perf_counter()
        with self._uploads.lane() as lane:
            for at in range(0, source.num_bytes, self._uploads.piece_bytes):
                num_bytes = min(self._uploads.piece_bytes, source.num_bytes - at)
                lane.copy(AddressRange(self._range.reserved.address + at, num_bytes), source.address_of(at))
            lane.wait()
        rate = source.num_bytes / (time.perf_counter() - start) / 1e9
        facts.note(self.figures, "copies alone", f"{rate:.1f} GB/s", copies_gb_per_s=rate)


def measure_wakes(fake: bool) -> dict[str, float]:
    num_bytes = FAKE_BYTES if fake else WEIGHT_BYTES
    pages = DevicePages(2 * num_bytes)
    if fake:
        uploads = Uploads(_fake_backend(pages=pages), page_bytes=2 << 20, piece_bytes=4 << 20)
    else:
        uploads = Uploads(shelf_device.open_cuda(pages))
    wakes = Wakes(uploads, pages, num_bytes, FAKE_WAKES if fake else NUM_WAKES)
    start = time.perf_counter()
    memory = uploads.pin(num_bytes)
    seconds = time.perf_counter() - start
    facts.record("pinning", f"{num_bytes / 1e9:.2f} GB in {seconds:.1f} s", pin_s=round(seconds, 2))
    wakes.fill(memory)
    wakes.run("pinned", memory, copies_alone=True)
    with tempfile.TemporaryFile() as file:
        for at in range(0, num_bytes, uploads.piece_bytes):
            file.write(memory.view(at, min(uploads.piece_bytes, num_bytes - at)))
        file.flush()
        memory.close()
        wakes.run("file", FilePart(file.fileno(), 0))
    wakes.close()
    uploads.close()
    pages.close()
    return wakes.figures


def measure_turns(fake: bool, folder: Path, *, beside: bool) -> dict[str, float]:
    """Args: beside: a second time with a large model beside the small ones."""
    device, limits = "cpu" if fake else "cuda", LIMITS | {"warm_up": not fake}
    num_prompts = (FAKE_TURNS if fake else TURNS)[1]
    engines = {name: EngineConfig(model=_checkpoint(folder, name, fake), device=device, **limits) for name in "abc"}
    expected: dict[tuple[str, int], list[int]] = {}
    for name, engine in engines.items():
        with LLM(engine.model, device=device, kv_memory_bytes=KV_BYTES, **limits) as llm:
            harness.note_engine(llm)
            for i in range(num_prompts):  # one at a time, so that every step has the same shape on the shelf
                expected[name, i] = list(llm.generate([_prompt(i)], GREEDY)[0].token_ids)
    models = [ModelConfig(name=name, engine=engine) for name, engine in engines.items()]
    figures = _measure_shelf(models, None, folder, expected, fake)
    if beside:
        large = EngineConfig(model=_large(folder, fake), device=device, load_format="dummy", **limits)
        found = _measure_shelf(models, ModelConfig(name="large", engine=large, keep="always"), folder, expected, fake)
        figures |= {f"{name}_beside": value for name, value in found.items()}
    return figures


def _measure_shelf(
    models: list[ModelConfig],
    large: ModelConfig | None,
    folder: Path,
    expected: dict[tuple[str, int], list[int]],
    fake: bool,
) -> dict[str, float]:
    size, every = ModelSize(resolve(models[0].engine)), models if large is None else [large, *models]
    of_large = None if large is None else ModelSize(resolve(large.engine))
    large_bytes = 0 if of_large is None else of_large.weight_bytes
    workspace = estimated_activations(resolve(every[0].engine), (of_large or size).model)
    # Never enough for the weights of all small ones.
    memory_bytes = workspace + large_bytes + int(2.6 * size.weight_bytes)
    with ExitStack() as undo:
        if fake:
            undo.enter_context(patch.object(kv_plan, "select_backend", _fake_backend))
            undo.enter_context(patch.object(shelf_device, "select_backend", _fake_backend))
            undo.enter_context(patch.object(shelf_device, "resolve", lambda _: SimpleNamespace(device="cuda")))
            small = partial(Uploads, page_bytes=2 << 20, piece_bytes=4 << 20)
            undo.enter_context(patch.object(shelf_device, "Uploads", small))
        replays = undo.enter_context(_counted_replays())
        shelf = Shelf(every, device_memory_bytes=memory_bytes, weights_dir=folder / "weights")
        try:
            wakes = asyncio.run(_turns(shelf, expected, replays, *(FAKE_TURNS if fake else TURNS)))
        finally:
            shelf.close()
    figures = {
        "wakes": len(wakes),
        "wake_gb_per_s": statistics.median(wake.gb_per_s for wake in wakes),
        "wake_least_gb_per_s": min(wake.gb_per_s for wake in wakes),
        "first_token_s": statistics.median(wake.first_token_s for wake in wakes),
        "replayed_share": sum(wake.replayed for wake in wakes) / max(1, sum(wake.steps for wake in wakes)),
        "captured_after_wakes": sum(wake.captured for wake in wakes),
    }
    facts.record(
        "turns" if large is None else "turns beside a large model",
        f"{len(models)} models of {size.weight_bytes / 1e9:.2f} GB on memory for two, {large_bytes / 1e9:.1f} GB "
        f"beside, tokens equal; {len(wakes)} wakes at {figures['wake_gb_per_s']:.1f} GB/s (least "
        f"{figures['wake_least_gb_per_s']:.1f}), {figures['first_token_s']:.3f} s to the first token; "
        f"{figures['replayed_share']:.0%} of decode steps after a wake replayed, {figures['captured_after_wakes']} "
        "graphs captured anew",
        **figures,
    )
    return figures


def _prompt(i: int) -> list[int]:
    return torch.randint(1, 1000, (50 + 40 * i,), generator=torch.Generator().manual_seed(i)).tolist()


@dataclass(frozen=True, slots=True)
class Wake:
    """A request to a sleeping model.

    Attributes:
        first_token_s: from the request.
        steps, replayed: decode steps, and of these the replays of graphs.
        captured: kernels compiled and graphs captured meanwhile.
    """

    gb_per_s: float
    first_token_s: float
    steps: int
    replayed: int
    captured: int


async def _turns(
    shelf: Shelf,
    expected: dict[tuple[str, int], list[int]],
    replays: list[bool],
    num_rounds: int,
    num_prompts: int,
) -> list[Wake]:
    """Ask each model in turn. Returns the wakes.

    Args:
        expected: by model and prompt; where there is none yet, the first answer becomes the expected one.
        replays: grows by each decode step: whether it was a replay.
    """
    wakes = []
    for turn in range(num_rounds):
        for name, i in itertools.product(shelf.names, range(num_prompts)):
            model = shelf.model(name)
            slept, before, compiled = model.state == "asleep", len(replays), num_compilations()
            tokens, first_s = await _tokens(model, _prompt(i))
            if expected.setdefault((name, i), tokens) != tokens:
                raise RuntimeError(f"turn {turn}: {name} gave {tokens} for request {i}, expected {expected[name, i]}")
            status, steps = model.status, replays[before:]
            if slept:
                rate = status.weight_bytes / status.last_wake_s / 1e9
                wakes.append(Wake(rate, first_s, len(steps), sum(steps), num_compilations() - compiled))
                facts.record(f"wake of {name}", **asdict(wakes[-1]), wake_s=status.last_wake_s)
            elif turn == 0 and not i:
                facts.record(f"load of {name}", f"{status.last_wake_s:.1f} s, {status.weight_bytes / 1e9:.2f} GB")
    await shelf.check_integrity()
    if len(wakes) < num_rounds:
        raise RuntimeError(f"the models were asleep {len(wakes)} times only: {shelf.statuses()}")
    return wakes


@contextmanager
def _counted_replays() -> Iterator[list[bool]]:
    """A list that grows by each step that a model with decode graphs computes: whether it was a replay. Prefills are
    not in it."""
    replays: list[bool] = []
    run = DecodeGraphs.run

    def counted(graphs: DecodeGraphs, batch: StepBatch) -> torch.Tensor | None:
        logits = run(graphs, batch)
        if logits is not None or decode_view(batch) is not None:
            replays.append(logits is not None)
        return logits

    with patch.object(DecodeGraphs, "run", counted):
        yield replays


async def _tokens(model: ShelvedModel, prompt: list[int]) -> tuple[list[int], float]:
    start, first_s = time.perf_counter(), 0.0
    tokens: list[int] = []
    async for deltas in model.stream(EngineRequest("request", prompt, GREEDY)):
        for delta in deltas:
            tokens += delta.token_ids
        first_s = first_s or time.perf_counter() - start
    return tokens, first_s


def _checkpoint(folder: Path, name: str, fake: bool) -> str:
    """A folder with random weights."""
    dtype, where = (torch.float32, "cpu") if fake else (torch.bfloat16, "cuda")
    small = SMALL if fake else {}
    write_model(folder / name, checkpoints.QWEN, device=where, weights=True, roll=ord(name), dtype=dtype, **small)
    return str(folder / name)


def _large(folder: Path, fake: bool) -> str:
    """A folder without weights."""
    small = SMALL | {"num_hidden_layers": 6, "intermediate_size": 4864} if fake else {}
    config = checkpoints.config_of("llama-3-8b", dtype=torch.float32 if fake else torch.bfloat16, **small)
    config.save_pretrained(folder / "large")
    return str(folder / "large")


def _fake_backend(*_: object, pages: DevicePages | None = None, **__: object) -> CudaBackend:
    return CudaBackend(driver=importlib.import_module("cuda.bindings.driver"), tensor_device=CPU, pages=pages)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--measure", choices=("wakes", "turns", "beside"), required=True)
    args = parser.parse_args()
    args.device, args.quick = "cpu" if args.fake else "cuda", False
    if args.measure == "wakes":
        figures = measure_wakes(args.fake)
    else:
        with tempfile.TemporaryDirectory() as folder:
            figures = measure_turns(args.fake, Path(folder), beside=args.measure == "beside")
    harness.finish(f"gpu_shelf_{args.measure}", args, figures, {})


if __name__ == "__main__":
    main()
