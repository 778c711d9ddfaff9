"""A prefix handed over between two processes on a GPU, by exported pages and through host memory (a job of
`benchmarks.gpu_day`).

The giver is a process of its own, with blocks of Llama-3-8B's layout whose words tell block and place. Recorded are the
seconds of either way, and how many blocks arrived with their content; before that, what a page costs that can be
exported, and one that cannot.

--fake is small, over the stand-in for the driver with host memory, and measures nothing.
"""

from __future__ import annotations

import importlib
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch

from benchmarks.facts import record
from benchmarks.gpu.parts import Parts, arguments
from folio.vmem import CudaBackend, KVMemory, LayerGroup, LayerSpec, StepDemand, plan_layout
from folio.vmem.backends.cuda import CPU
from folio.vmem.prefix.store.exported_pages import PageImporter
from folio.vmem.prefix.store.handover import PrefixGiver, PrefixReceiver
from folio.vmem.prefix.store.records import Records

NUM_LAYERS, NUM_TOKENS, REPEATS, NUM_PAGES = 32, 8192, 5, 64
FAKE_LAYERS, FAKE_TOKENS = 8, 256
LONGEST_S = 20.0
WAYS = {"exported pages": True, "host memory": False}


def cuda(fake: bool) -> CudaBackend:
    if fake:
        return CudaBackend(driver=importlib.import_module("cuda.bindings.driver"), tensor_device=CPU)
    return CudaBackend()


@contextmanager
def opened(fake: bool) -> Iterator[tuple[KVMemory, list[int]]]:
    """A memory, and the tokens of a prompt whose prefix takes half of it."""
    backend = cuda(fake)
    layers = [LayerSpec(8, 128, 128)] * (FAKE_LAYERS if fake else NUM_LAYERS)
    layout = plan_layout(layers, torch.bfloat16, granularity_bytes=backend.granularity_bytes, kind="sliced")
    ids = list(range(FAKE_TOKENS if fake else NUM_TOKENS))
    memory = KVMemory(
        backend,
        [LayerGroup(tuple(range(len(layers))), layout)],
        budget_bytes=2 * layout.num_blocks(len(ids) + 1) * layout.block_bytes,
        num_regions=1,
        max_tokens=len(ids) + 1,
    )
    yield memory, ids
    memory.close()


def content(home: int, number: int, words: torch.Tensor) -> torch.Tensor:
    """What block `number` of the prefix has at a home."""
    return torch.arange(words.shape[1], device=words.device) + (home << 56 | number << 32)


def give(fake: bool) -> None:
    """Print the giver's address, and give until the standard input ends."""
    with opened(fake) as (memory, ids):
        sequence = memory.create_sequence("block_table")
        memory.share_prefix(sequence, memory.prefixes.chain(), ids)
        memory.append(sequence, len(ids))
        memory.prefixes.announce_prefill(sequence, len(ids))
        memory.prefixes.stage_prefix(sequence, ids, 0, len(ids))
        memory.ensure([StepDemand(sequence, 0, len(ids))])
        for home, words in enumerate(memory.tensors.home_words(0)):
            for number, block_id in enumerate(sequence.groups[0].block_ids):
                words[block_id] = content(home, number, words)
        memory.launched()
        memory.backend.wait(memory.mapper.fence)
        memory.prefixes.commit_prefixes()
        memory.free(sequence)
        giver = PrefixGiver(memory, Records(memory), lambda: "")
        print(giver.address, flush=True)
        sys.stdin.read()
        giver.close()


def hand_over(fake: bool, address: str) -> None:
    with opened(fake) as (memory, ids):
        receiver = PrefixReceiver(memory, Records(memory), lambda: "")
        for way, imports in WAYS.items():
            if imports and not receiver.imports:
                record(way, "pages cannot be exported here: see the warning in the log")
                continue
            with patch.object(PageImporter, "imports", imports):
                runs = [fetch(memory, receiver, ids, address) for _ in range(1 + REPEATS)][1:]
            num_bytes, num_equal, num_blocks = *runs[-1][2:], len(ids) // memory.prefixes.unit_tokens
            read_s, install_s = (statistics.median(run[i] for run in runs) for i in range(2))
            record(
                way,
                f"{num_bytes / (1 << 20):.0f} MiB read in {read_s:.4f} s, installed in {install_s:.4f} s: "
                f"{num_bytes / (read_s + install_s) / 1e9:.2f} GB/s; {num_equal} of {num_blocks} blocks are equal",
                read_s=read_s,
                install_s=install_s,
                equal_blocks=num_equal,
            )
            if num_equal != num_blocks:
                raise AssertionError(f"{way}: only {num_equal} blocks have their content")
        receiver.close()
        memory.check_integrity()
        memory.prefixes.evict_prefixes(())


def fetch(memory: KVMemory, receiver: PrefixReceiver, ids: list[int], address: str) -> tuple[float, float, int, int]:
    """Seconds to read a prefix and to install it, its bytes, and its blocks with the giver's content."""
    memory.prefixes.evict_prefixes(())
    chain, begun = memory.prefixes.chain(), time.perf_counter()
    prefix = receiver.find(chain, [*ids, 0])
    assert prefix is not None
    receiver.read(prefix, address)
    while not prefix.is_done and time.perf_counter() < begun + LONGEST_S:
        time.sleep(1e-4)
    read_s, begun = time.perf_counter() - begun, time.perf_counter()
    if not prefix.is_done or not receiver.install(prefix):
        raise TimeoutError("the prefix was not handed over")
    memory.backend.wait(memory.backend.fence())
    install_s = time.perf_counter() - begun
    nodes = memory.prefixes.match(chain, [*ids, 0]).nodes
    block_ids = [block_id for node in nodes for block_id in node.blocks[0] or ()]
    num_equal = sum(
        all(
            torch.equal(words[block_id], content(home, number, words))
            for home, words in enumerate(memory.tensors.home_words(0))
        )
        for number, block_id in enumerate(block_ids)
    )
    return read_s, install_s, prefix.num_bytes, num_equal


def pages(fake: bool) -> None:
    """Microseconds to create a page that can be exported, and one that cannot."""
    found = {}
    for kind, probe in {"exportable": CudaBackend._probe_exports, "plain": lambda *_: False}.items():
        with patch.object(CudaBackend, "_probe_exports", probe):
            backend = cuda(fake)
        begun = time.perf_counter()
        handles = [backend.create(backend.granularity_bytes) for _ in range(NUM_PAGES)]
        found[f"{kind}_us"] = (time.perf_counter() - begun) / NUM_PAGES * 1e6
        for handle in handles:
            backend.destroy(handle)
        backend.close()
    record("pages", ", ".join(f"{kind} {us:.1f}" for kind, us in found.items()), **found)


def two_processes(fake: bool) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu.gpu_handover", "--give", *(["--fake"] if fake else [])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as giver:
        assert giver.stdout is not None
        hand_over(fake, giver.stdout.readline().strip())


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--give", action="store_true", help="be the giver")
    args = parser.parse_args()
    if not args.fake:
        torch.zeros(1, device="cuda")  # torch's context first, as in the engine
    if args.give:
        give(args.fake)
        return
    parts = Parts(math.inf)
    parts.run("pages", lambda: pages(args.fake))
    parts.run("handover", lambda: two_processes(args.fake))
    parts.finish()


if __name__ == "__main__":
    main()
