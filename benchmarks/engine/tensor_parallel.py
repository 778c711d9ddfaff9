"""Tensor parallelism on one machine: cost of step messages and collectives, equality of tokens.

Random weights in the shape of a small Llama (16 query and 4 KV heads of 64), bf16; ranks are child processes that
share the machine's cores. On a CPU this shows the overhead, not the speed of more devices, because all ranks share one
memory bus.

Message: a step of 16 decodes and one of 1,024 prompt tokens is packed, sent to a peer through shared memory, unpacked
there, and answered; the time is that of a round trip. Step: the time of decode steps of 16 sequences, and
the time of rank 0 in collectives within them, waiting included. Tokens: greedy, in fp32, with shared prefixes and a
budget that causes preemption; 1 if all numbers of ranks give the same. Memory: peak resident bytes
of a peer beyond those of one with a tiny model, over the bytes of its share.

--quick has 2 layers instead of 8, no 4 ranks, and fewer repeats.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig

from benchmarks import checkpoints, harness
from folio.app.config.machine import num_threads
from folio.app.engine import LLM, SamplingParams
from folio.app.engine.layers.batch import PlanHeader, PlanRun, StepPlan
from folio.app.engine.ranks.processes import ChildProcesses, pack_step, unpack_step
from folio.app.engine.ranks.rank_group import RankGroup
from folio.app.engine.tensor_parallel import shared_memory
from folio.app.engine.tensor_parallel.communicator import MemoryCommunicator
from folio.app.engine.tensor_parallel.shared_memory import MemoryAddress, RingReader, RingWriter

VOCAB_SIZE = 32_000
AT_ONCE, PROMPT_TOKENS = 16, 64
SIZES = (1, 2, 4)
REPEATS, QUICK_REPEATS = 5, 2
MESSAGES, QUICK_MESSAGES = 3000, 500


def make_checkpoint(folder: Path, num_layers: int) -> int:
    """Make a checkpoint; returns the bytes of its weights."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=num_layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=4096,
    )
    return checkpoints.write_checkpoint(folder, config, seed=0, words=False)


# ---- messages ----


def make_plan(num_seqs: int, num_tokens: int) -> StepPlan:
    """A step plan of sequences of some length, read through their regions, with this many tokens of each."""
    count = num_seqs * num_tokens
    starts = np.arange(num_seqs + 1, dtype=np.int64) * num_tokens
    return StepPlan(
        header=PlanHeader(2, 1, num_seqs),
        runs=(PlanRun(True, num_seqs, count, num_tokens, 1000 + num_tokens, True),),
        num_tokens=np.full(num_seqs, num_tokens, dtype=np.int32),
        states=np.array([], dtype=np.int32),
        adapters=np.array([], dtype=np.int32),
        token_ids=np.arange(count, dtype=np.int64),
        positions=np.tile(np.arange(1000, 1000 + num_tokens), num_seqs),
        logit_rows=starts[1:] - 1,
        pending=np.empty((2, 0), dtype=np.int64),
        rows=np.arange(num_seqs, dtype=np.int64),
        slots=np.arange(count, dtype=np.int64)[None],
        changed=np.array([], dtype=np.int64),
        cu_seqlens=starts.astype(np.int32),
        cache_seqlens=np.full(num_seqs, 1000 + num_tokens, dtype=np.int32),
        regions=np.arange(num_seqs, dtype=np.int32)[None],
        block_ids=np.array([], dtype=np.int32),
    )


def echo(pid: int, fd: int) -> None:
    """The peer: unpack every step and answer."""
    address = MemoryAddress(pid, fd, 1, 1)
    reader = RingReader(address.open(), address, 0, 0)
    while message := reader.receive(10.0):
        unpack_step(message)
        reader.reply(b"")


def measure_messages(plans: dict[str, StepPlan], repeats: int) -> dict[str, tuple[int, float]]:
    """Bytes, and median microseconds of a round trip."""
    address = shared_memory.create_rings(1, 1)
    command = [sys.executable, "-m", __spec__.name, "--echo", str(os.getpid()), str(address.fd)]
    with subprocess.Popen(command) as peer:
        writer = RingWriter(address.open(), address, 0, lambda: None)
        results = {}
        for name, plan in plans.items():
            times = []
            for _ in range(repeats):
                start = time.perf_counter()
                writer.post(pack_step(plan), answered=True)
                writer.collect()
                times.append(time.perf_counter() - start)
            results[name] = (len(pack_step(plan)), statistics.median(times[repeats // 10 :]) * 1e6)
        writer.post(b"")
        peer.wait()
    os.close(address.fd)
    return results


# ---- steps ----


class Collectives:
    """Time and number of this process's collectives."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.count = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count collectives within this context."""
        names = ("all_reduce", "all_gather", "gather")
        real = {name: getattr(MemoryCommunicator, name) for name in names}
        for name in names:
            setattr(MemoryCommunicator, name, self._timed(real[name]))
        try:
            yield
        finally:
            for name in names:
                setattr(MemoryCommunicator, name, real[name])

    def _timed(self, call):  # type: ignore[no-untyped-def]
        def timed(*args, **kwargs):  # type: ignore[no-untyped-def]
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start
                self.count += 1

        return timed


def decode(llm: LLM, num_steps: int, seed: int) -> tuple[float, float, int]:
    """Median seconds of a decode step, the share of collectives in it, and their number."""
    generator = torch.Generator().manual_seed(seed)
    params = SamplingParams(max_tokens=num_steps + 8, temperature=0, ignore_eos=True)
    for i in range(AT_ONCE):
        prompt = torch.randint(VOCAB_SIZE, (PROMPT_TOKENS,), generator=generator).tolist()
        llm.engine.submit(f"{seed}-{i}", prompt, params)
    for _ in range(6):  # the prompts, and the first decodes
        llm.engine.step()
    times, collectives = [], Collectives()
    with collectives.counted():
        for _ in range(num_steps):
            start = time.perf_counter()
            llm.engine.step()
            times.append(time.perf_counter() - start)
    while llm.engine.has_work:
        llm.engine.step()
    return statistics.median(times), collectives.seconds / sum(times), collectives.count // num_steps


def tokens(llm: LLM) -> list[list[int]]:
    """Greedy outputs of prompts with a common prefix, while the budget is lowered below their demand."""
    generator = torch.Generator().manual_seed(5)
    common = torch.randint(VOCAB_SIZE, (100,), generator=generator).tolist()
    prompts = [common[: 100 - 9 * i] + torch.randint(VOCAB_SIZE, (20,), generator=generator).tolist() for i in range(8)]
    params = SamplingParams(max_tokens=32, temperature=0, ignore_eos=True)
    outputs: dict[str, list[int]] = {}
    for i, prompt in enumerate(prompts):
        llm.engine.submit(str(i), prompt, params)
    while llm.engine.has_work:
        for delta in llm.engine.step():
            outputs.setdefault(delta.request_id, []).extend(delta.token_ids)
        if all(len(output) == 10 for output in outputs.values()) and len(outputs) == len(prompts):
            pages = llm.engine.memory.pages
            llm.engine.set_budget(pages.fewest * pages.page_bytes, 1)
    assert sum(llm.engine.scheduler.begun.num_preempted.values())
    llm.engine.check_integrity()
    return [outputs[str(i)] for i in range(len(prompts))]


def make_llm(model: str | Path, size: int, dtype: str) -> LLM:
    return LLM(
        model,
        tensor_parallel_size=size,
        dtype=dtype,
        skip_tokenizer_init=True,
        kv_memory_bytes=64 << 20,
        max_model_len=256,
    )


def peak_of_a_peer(llm: LLM) -> int:
    """Peak resident bytes of the peer."""
    ranks: RankGroup | None = llm.engine.executor.ranks
    assert ranks is not None
    processes = ranks._processes
    assert isinstance(processes, ChildProcesses)
    status = Path(f"/proc/{processes._children[0].pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) * 1024


def main() -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--echo", nargs=2, type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.echo:
        echo(*args.echo)
        return
    num_layers, repeats = (2, QUICK_REPEATS) if args.quick else (8, REPEATS)
    plans = {"16 decodes": make_plan(16, 1), "1,024 tokens of a prompt": make_plan(1, 1024)}
    messages = measure_messages(plans, QUICK_MESSAGES if args.quick else MESSAGES)
    with tempfile.TemporaryDirectory() as folder:
        num_bytes = make_checkpoint(Path(folder), num_layers)
        outputs: dict[int, list[list[int]]] = {}
        for size in SIZES[: 2 if args.quick else None]:
            with make_llm(folder, size, "float32") as llm:
                outputs[size] = tokens(llm)
        with make_llm("builtin", 2, "auto") as llm:
            base = peak_of_a_peer(llm)
        llms = {size: make_llm(folder, size, "auto") for size in SIZES[:2]}
        peak_over_share = (peak_of_a_peer(llms[2]) - base) / (num_bytes / 2)
        steps: dict[int, list[tuple[float, float, int]]] = {size: [] for size in llms}
        for repeat in range(repeats):
            for size, llm in llms.items():
                torch.set_num_threads(num_threads(llm.engine.config))  # one number for both engines' process
                steps[size].append(decode(llm, 20 if args.quick else 60, repeat))
        for llm in llms.values():
            llm.engine.check_integrity()
            llm.close()

    for name, (size_bytes, us) in messages.items():
        print(f"{name:26} {size_bytes:6} bytes, {us:7.1f} µs for a round trip")
    for size, rows in steps.items():
        step_s, share, count = (statistics.median(column) for column in zip(*rows, strict=True))
        print(
            f"{size} ranks: decode step of {AT_ONCE} {step_s * 1e3:6.2f} ms, {count:.0f} collectives, {share:.0%} of it"
        )
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    equal = all(output == outputs[1] for output in outputs.values())
    print(f"tokens of {', '.join(map(str, outputs))} ranks are {'the same' if equal else 'DIFFERENT'}")
    print(f"peak of a peer over its share of {num_bytes / 2 / 2**20:.0f} MiB: {peak_over_share:.2f}")
    harness.finish(
        "tensor_parallel",
        args,
        {
            "message_us": messages["16 decodes"][1],
            "message_bytes": messages["16 decodes"][0],
            "prompt_message_us": messages["1,024 tokens of a prompt"][1],
            "prompt_message_bytes": messages["1,024 tokens of a prompt"][0],
            "tokens_equal": float(equal),
            "step_vs_one_rank": harness.median_ratio([row[0] for row in steps[2]], [row[0] for row in steps[1]]),
            "collective_share": statistics.median(row[1] for row in steps[2]),
            "collectives": steps[2][0][2],
            "peak_over_share": peak_over_share,
        },
        {"steps": steps, "messages": messages},
    )


if __name__ == "__main__":
    main()
