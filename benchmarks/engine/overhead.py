"""Engine overhead beside the model: scheduling, mapping, planning, sampling, text.

    python -m benchmarks.overhead --quick

Plans and builds decode steps of up to 256 sequences and 32,768 tokens of context; measures the host's time of steps
whose forward is a stub, and what asynchronous scheduling hides of it; counts launches, copies and synchronisations of a
step of Qwen2's layers. `benchmarks.throughput` and `benchmarks.sweep` call the measurements above `main`.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import Qwen2Config

from benchmarks import checkpoints, harness
from benchmarks.engine import planning
from benchmarks.engine.step_counts import HostCalls, Launches
from folio.app.engine import LLM, SamplingParams
from folio.app.engine.execution.work_queue import InlineQueue
from folio.app.engine.layers.batch import StepBatch
from folio.app.engine.sampling.params import Structure
from folio.app.engine.sampling.sampler import PendingSample, Sampled, launch_sampling
from folio.vmem import View

NEW_TOKENS = 64
STUB_SEQS, STUB_VOCAB, STUB_LATENCY_S, STUB_STEPS = 256, 32000, 0.02, 60


class _Timed:
    """Measures the time of forward passes."""

    def __init__(self, run: Any) -> None:
        self._run = run
        self.seconds = 0.0

    def __call__(self, *args: Any) -> torch.Tensor:
        start = time.perf_counter()
        logits: torch.Tensor = self._run(*args)
        self.seconds += time.perf_counter() - start
        return logits


def host_share(folder: Path, prompts: list[list[int]]) -> float:
    """Share of the time of decode steps outside of the model's forward pass. Neither includes the layout of the
    batch."""
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
    shares = []
    with LLM(folder, prefix_cache=False) as llm:
        engine = llm.engine
        forward = _Timed(engine.executor._runner.run)
        engine.executor._runner.run = forward  # type: ignore[assignment, method-assign]
        for _ in range(3):
            for i, prompt in enumerate(prompts):
                engine.submit(str(i), prompt, params)
            while any(request.num_uncomputed > 1 for request in engine.scheduler.unfinished()):
                engine.step()
            forward.seconds, start = 0.0, time.perf_counter()
            while engine.has_work:
                engine.step()
            shares.append(1 - forward.seconds / (time.perf_counter() - start))
    return statistics.median(shares)


def stub_folder(folder: str, num_layers: int = 2) -> None:
    """A model whose forward costs next to nothing beside a stub's."""
    config = Qwen2Config(
        vocab_size=STUB_VOCAB,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=1 << 16,
    )
    checkpoints.write_checkpoint(Path(folder), config)


class Stub:
    """In place of the model's forward: waits, and returns the same logits in each step.

    Attributes:
        latency_s: seconds of each call.
        seconds: of all calls so far.
    """

    def __init__(self, llm: LLM) -> None:
        generator = torch.Generator().manual_seed(0)
        self._logits = torch.randn(STUB_SEQS, STUB_VOCAB, generator=generator).bfloat16()
        self.latency_s = self.seconds = 0.0
        llm.engine.executor._runner.run = self  # type: ignore[method-assign]

    def __call__(self, batch: StepBatch) -> torch.Tensor:
        start = time.perf_counter()
        if self.latency_s:
            time.sleep(self.latency_s)
        logits = self._logits[: len(batch.logit_rows)]
        self.seconds += time.perf_counter() - start
        return logits


def begin(llm: LLM, num_seqs: int, context: int, params: SamplingParams, common: int = 0) -> None:
    """Submit requests, and compute their prompts of `context` tokens, of which they share the first `common`."""
    engine, generator = llm.engine, torch.Generator().manual_seed(1)
    shared = torch.randint(STUB_VOCAB, (common,), generator=generator).tolist()
    for i in range(num_seqs):
        own = torch.randint(STUB_VOCAB, (context - common,), generator=generator).tolist()
        engine.submit(str(i), shared + own, params)
    while engine.scheduler.num_waiting or any(r.num_uncomputed > 1 for r in engine.scheduler.unfinished()):
        engine.step()


def step_us(llm: LLM, stub: Stub, num_steps: int) -> float:
    """Median microseconds of a step beside the stub's; all requests decode."""
    times = []
    for _ in range(num_steps):
        before, start = stub.seconds, time.perf_counter()
        llm.engine.step()
        times.append(time.perf_counter() - start - (stub.seconds - before))
    return statistics.median(times) * 1e6


def step_us_stub() -> float:
    """Microseconds of the host's work in a step of 256 greedy sequences with 32,000 tokens of vocabulary; a stub that
    only waits takes the place of the model."""
    with _of_short_prompts(STUB_STEPS) as llm:
        stub = Stub(llm)
        stub.latency_s = STUB_LATENCY_S
        return step_us(llm, stub, STUB_STEPS)


@contextmanager
def _of_short_prompts(num_steps: int, **settings: Any) -> Iterator[LLM]:
    """An engine in which 256 greedy sequences decode, at least as many steps."""
    params = SamplingParams(max_tokens=num_steps + 20, temperature=0, ignore_eos=True)
    with tempfile.TemporaryDirectory() as folder:
        stub_folder(folder)
        with LLM(
            folder,
            skip_tokenizer_init=True,
            max_model_len=1024,
            max_num_seqs=STUB_SEQS,
            max_num_batched_tokens=4096,
            kv_memory_bytes=1 << 30,
            **settings,
        ) as llm:
            begin(llm, STUB_SEQS, 32, params)
            yield llm
            llm.engine.cancel_all()


def step_parts(llm: LLM, num_steps: int = 10) -> dict[str, float]:
    """Mean microseconds of each part of the next `num_steps` steps, for which there must be running requests.

    - `schedule`; `map`: exposed mapping; `plan`: tokens and block tables as numbers; `ahead`: announcing the next
      step's needs to the mapper; `build`: tensors, copied to the device
    - `launch`: the forward's time on the host; `wait`: from then on until the device has computed it; `fence`;
      `submit`: the rest of launching; `sample`; `apply`; `other`
    - `step`: the sum of these
    - `device`: from the forward's first kernel to its last, by events; on the CPU the same as `launch`
    """
    engine, runner = llm.engine, llm.engine.executor._runner
    on_cuda = engine.model.module.device.type == "cuda"
    seconds: dict[str, float] = defaultdict(float)

    def timed(part: str, work: Any, *args: Any, **settings: Any) -> Any:
        start = time.perf_counter()
        result = work(*args, **settings)
        seconds[part] += time.perf_counter() - start
        return result

    def forward(work: Any, *args: Any) -> Any:
        begin, end = (torch.cuda.Event(enable_timing=True) if on_cuda else None for _ in range(2))
        start = time.perf_counter()
        if begin is not None:
            begin.record()
        logits = work(*args)
        if end is not None:
            end.record()
        launched = time.perf_counter()
        seconds["launch"] += launched - start
        if begin is not None and end is not None:
            end.synchronize()  # otherwise the copy that follows would wait
            seconds["wait"] += time.perf_counter() - launched
            seconds["device"] += begin.elapsed_time(end) / 1e3
        else:
            seconds["wait"] += 0.0
            seconds["device"] += launched - start
        return logits

    parts: dict[str, tuple[Any, str]] = {
        "schedule": (engine.scheduler, "schedule"),
        "map": (engine.memory, "ensure"),
        "plan": (engine.executor.planner, "plan"),
        "ahead": (engine.memory, "plan"),
        "executor": (engine.executor, "launch"),
        "build": (engine.executor._builder, "build"),
        "fence": (engine.memory, "launched"),
        "sample": (engine.chooser, "choose"),
        "apply": (engine.decoder, "apply"),
    }
    with ExitStack() as undo:
        for part, (owner, name) in parts.items():
            undo.enter_context(patch.object(owner, name, partial(timed, part, getattr(owner, name))))
        undo.enter_context(patch.object(runner, "run", partial(forward, runner.run)))
        step = _steps_s(llm, num_steps)
    device = seconds.pop("device")
    seconds["submit"] = seconds.pop("executor") - sum(seconds[name] for name in ("build", "launch", "wait", "fence"))
    seconds["other"] = step - sum(seconds.values())
    return {part: value / num_steps * 1e6 for part, value in (seconds | {"device": device, "step": step}).items()}


def _steps_s(llm: LLM, num_steps: int) -> float:
    start = time.perf_counter()
    for _ in range(num_steps):
        if not llm.engine.step():
            raise RuntimeError("no step was computed: the requests have ended")
    return time.perf_counter() - start


# ---- the benchmark ----

NUM_SEQS, CONTEXTS = (1, 16, 64, 256), (256, 4096, 32768)
VIEWS: tuple[View, ...] = ("region", "block_table")
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "top_p": {"top_p": 0.9, "seed": 1},
    "penalties": {"temperature": 0, "repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "grammar": {"temperature": 0, "structure": Structure("regex", "(?s:.*)")},
}
PLAN_ROUNDS = 5  # a second in which the machine is slow takes no more than one time of a cell
OWN_TOKENS = 48  # of each prompt; the rest is shared, so that memory does not limit contexts
_MOST_STEPS = 40
EXPOSED = {"async": "on", "sync": "off"}


def host_us(folder: str, num_seqs: tuple[int, ...], contexts: tuple[int, ...], num_steps: int) -> dict[str, float]:
    """Host time of a step, block table view, by sequences, context and sampling."""
    found = {}
    for context in contexts:
        with stub_llm(folder, context) as (llm, stub):
            for count in num_seqs:
                for name, settings in SAMPLINGS.items():
                    params = SamplingParams(max_tokens=_MOST_STEPS, ignore_eos=True, **settings)
                    begin(llm, count, context, params, common=context - OWN_TOKENS)
                    key = f"host_us_{count}_{context}_{name}"
                    found[key] = step_us(llm, stub, num_steps)
                    print(f"{key:36s}{found[key]:12.4g}", flush=True)
                    llm.engine.cancel_all()
    return found


@contextmanager
def stub_llm(folder: str, context: int, **settings: Any) -> Iterator[tuple[LLM, Stub]]:
    """An engine for 256 sequences of this context, and its stub."""
    with LLM(
        folder,
        kv_view="block_table",
        max_model_len=context + 2 * _MOST_STEPS,
        max_num_seqs=STUB_SEQS,
        max_num_batched_tokens=4096,
        kv_memory_bytes=1 << 29,
        **settings,
    ) as llm:
        yield llm, Stub(llm)


class FixedLatencyDevice:
    """In place of the model's forward: a device that computes each forward in a fixed time, one after the other, while
    the host goes on. What is sampled from it can be read when it is done."""

    def __init__(self, llm: LLM, latency_s: float) -> None:
        generator = torch.Generator().manual_seed(0)
        self._logits = torch.randn(STUB_SEQS, STUB_VOCAB, generator=generator).bfloat16()
        self._latency_s = latency_s
        self._done_at = 0.0
        llm.engine.executor._runner.run = self._forward  # type: ignore[method-assign]

    def _forward(self, batch: StepBatch) -> torch.Tensor:
        self._done_at = max(time.perf_counter(), self._done_at) + self._latency_s
        return self._logits[: len(batch.logit_rows)]

    def launch_sampling(self, *args: Any) -> _Late:
        return _Late(launch_sampling(*args), self._done_at)


class _Late:
    """Sampled tokens that can be read from some time on."""

    def __init__(self, pending: PendingSample, done_at: float) -> None:
        self.token_ids = pending.token_ids
        self._pending, self._done_at = pending, done_at

    def read(self) -> Sampled:
        time.sleep(max(0.0, self._done_at - time.perf_counter()))
        return self._pending.read()


def exposed_us(async_scheduling: str, num_steps: int = STUB_STEPS) -> float:
    """Microseconds by which a step of 256 greedy sequences takes longer than the device's 20 ms."""
    with (
        patch("folio.app.engine.ranks.executor.ThreadQueue", _inline_queue),
        _of_short_prompts(num_steps, async_scheduling=async_scheduling) as llm,
    ):
        device = FixedLatencyDevice(llm, STUB_LATENCY_S)
        with patch("folio.app.engine.step.token_selection.launch_sampling", device.launch_sampling):
            for _ in range(5):
                llm.engine.step()
            start = time.perf_counter()
            for _ in range(num_steps):
                llm.engine.step()
            seconds = (time.perf_counter() - start) / num_steps
    return (seconds - STUB_LATENCY_S) * 1e6


def _inline_queue(_: int) -> InlineQueue:
    """The queue of a CUDA device, whose calls return before their work is done."""
    return InlineQueue()


def counts(folder: Path) -> dict[str, float]:
    """Launches a layer, copies and synchronisations of a greedy decode step of 16 sequences. Layers are computed
    operation by operation, as on a GPU, and not in one call of C++."""
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    prompts = [[i + 1] * 20 for i in range(16)]
    launches, calls = {}, HostCalls()
    for num_layers in (2, 4):
        stub_folder(str(folder / str(num_layers)), num_layers)
        mode = Launches()
        with (
            patch("folio.app.engine.model.loader.run_in_one_call", lambda _: 0),
            mode.of_kernels(),
            LLM(folder / str(num_layers)) as llm,
        ):
            for i, prompt in enumerate(prompts):
                llm.engine.submit(str(i), prompt, params)
            for _ in range(3):
                llm.engine.step()
            mode.count = 0
            with mode:
                llm.engine.step()
            launches[num_layers] = mode.count
            with HostCalls() as calls:
                llm.engine.step()
            llm.engine.cancel_all()
    return {
        "launches_per_layer": (launches[4] - launches[2]) / 2,
        "copies_per_step": calls.uploads,
        "syncs_per_step": len(calls.read),
    }


def main() -> None:
    parser = harness.arguments(__doc__)
    args = parser.parse_args()
    torch.set_num_threads(1)
    num_seqs, contexts = (NUM_SEQS, CONTEXTS) if not args.quick else ((16, 256), (256, 4096))
    rounds: list[dict[str, float]] = [
        {
            f"plan_us_{count}_{context}_{view}": planning.plan_us(count, context, view, 48, torch.device("cpu"))
            for count in num_seqs
            for context in contexts
            for view in VIEWS
        }
        for _ in range(1 if args.quick else PLAN_ROUNDS)
    ]
    plans = {key: statistics.median(found[key] for found in rounds) for key in rounds[0]}
    with tempfile.TemporaryDirectory() as folder:
        stub_folder(folder)
        times = host_us(folder, num_seqs, contexts, 3 if args.quick else 20)
    with tempfile.TemporaryDirectory() as folder:
        counted = counts(Path(folder))
    num_steps = 20 if args.quick else STUB_STEPS
    exposed = {f"exposed_us_256_{name}": exposed_us(setting, num_steps) for name, setting in EXPOSED.items()}
    hidden = 1 - exposed["exposed_us_256_async"] / exposed["exposed_us_256_sync"]
    most = max(us for key, us in plans.items() if key.startswith("plan_us_256_"))
    figures = {"plan_us_256": most, "hidden_share": hidden, **exposed, **counted, **plans, **times}
    for key, value in {"plan_us_256": most, "hidden_share": hidden, **exposed, **counted, **plans}.items():
        print(f"{key:36s}{value:12.4g}")
    harness.finish("overhead", args, figures, {})


if __name__ == "__main__":
    main()
