"""Block tables, two views of one memory, and copy-on-write, on the classes the server runs on. Read it top to bottom.

PagedAttention (Kwon et al., SOSP 2023) cuts each sequence's KV cache into *blocks* at any place; a *block table* has
their ids, and a paged kernel reads through it. Folio also maps the same pages, in order, into one contiguous range of
addresses, the sequence's *region*, which any kernel reads as a plain array (vAttention, ASPLOS 2025).

1. 20 tokens are appended to a sequence. They are written through the two views in turn; attention is computed through
   both, and compared with plain attention over plain lists of the same keys and values.
2. Two children are forked from the sequence and share its half-filled last block, until they write into it.
3. Everything is freed.

Exits with an error if any attention differs by more than 1e-5. --quick does the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from benchmarks import harness
from folio.kernels import Masking, VarlenBatch, select_provider
from folio.vmem import (
    HostBackend,
    KVMemory,
    LayerGroup,
    LayerSpec,
    MappingOptions,
    SequenceMemory,
    StepDemand,
    View,
    plan_layout,
)

TOLERANCE = 1e-5
NUM_TOKENS, MAX_TOKENS, BLOCK_TOKENS, NUM_PAGES = 20, 32, 4, 24
# A token has 2 · 64 float32 of keys and as many of values: 1 KiB, so that four tokens are a block and a page of 4 KiB.
NUM_HEADS, NUM_KV_HEADS, DIM = 4, 2, 64
VIEWS: tuple[View, View] = ("region", "block_table")


@dataclass(slots=True)
class Tracked:
    """A sequence, and its keys and values `[num_kv_heads, dim]` in plain lists, which its cache must equal."""

    memory: SequenceMemory
    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)

    @property
    def table(self) -> list[int]:
        """The block table of the one layer group: logical block → block id."""
        return self.memory.groups[0].block_ids

    def where(self, view: View) -> list[int]:
        """The kernel's argument: the region's slot, or the block table."""
        region = self.memory.groups[0].region
        return [region.slot] if view == "region" and region is not None else self.table

    def fill(self) -> str:
        """Number of tokens in each block."""
        return " ".join(str(min(len(self.keys) - i * BLOCK_TOKENS, BLOCK_TOKENS)) for i in range(len(self.table)))


class Walkthrough:
    """One layer's KV memory on the host, and the attention kernel that the engine would choose."""

    def __init__(self) -> None:
        backend = HostBackend(1 << 20)
        layers = [LayerSpec(NUM_KV_HEADS, DIM, DIM)]
        granularity = backend.granularity_bytes
        layout = plan_layout(layers, torch.float32, granularity_bytes=granularity, block_tokens=BLOCK_TOKENS)
        self.page_bytes = layout.page_bytes
        self.memory = KVMemory(
            backend,
            [LayerGroup((0,), layout)],
            budget_bytes=NUM_PAGES * layout.page_bytes,
            num_regions=3,
            max_tokens=MAX_TOKENS,
            options=MappingOptions(eager_allocation=False, idle_release_s=1e9),  # no mapping work in the background
        )
        self.num_anchors = self.memory.report().num_mappings  # of the anchor page
        self.caches = {"block_table": self.memory.tensors.home_view(0), "region": self.memory.tensors.region_view(0)}
        self.kernel = select_provider("auto", torch.device("cpu"))
        self.random = torch.Generator().manual_seed(0)
        self.differences: list[float] = []

    def append(self, sequence: Tracked, view: View) -> str:
        """A step of one sequence: allocate a block if necessary, map it, write the token, compute attention."""
        position = len(sequence.keys)
        self.memory.append(sequence.memory, position + 1)
        self.memory.ensure([StepDemand(sequence.memory, position, position + 1)])
        self.memory.map_home(sequence.memory)  # read and written through both views
        key, value = (torch.randn(NUM_KV_HEADS, DIM, generator=self.random) for _ in range(2))
        sequence.keys.append(key)
        sequence.values.append(value)
        key_cache, value_cache = self.caches[view]  # [blocks, tokens, heads, dim]: a block, or a region
        block, within = divmod(position, key_cache.shape[1])
        slot = torch.tensor([sequence.where(view)[block] * key_cache.shape[1] + within])
        self.kernel.write(key[None], value[None], key_cache, value_cache, slot)
        return self.check(sequence)

    def check(self, sequence: Tracked) -> str:
        """Attention of a query at the last token: its difference from plain attention, through each view."""
        query = torch.randn(1, NUM_HEADS, DIM, generator=self.random)
        expected = plain_attention(query[0], torch.stack(sequence.keys), torch.stack(sequence.values))
        texts = []
        for view in VIEWS if sequence.memory.view == "region" else VIEWS[1:]:  # every block is at home
            batch = VarlenBatch(
                cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32),
                cache_seqlens=torch.tensor([len(sequence.keys)], dtype=torch.int32),
                block_table=torch.tensor([sequence.where(view)], dtype=torch.int32),
                max_seqlen_q=1,
                max_seqlen_k=len(sequence.keys),
            )
            out = self.kernel.attend(query, *self.caches[view], batch, Masking(scale=DIM**-0.5))
            self.memory.launched()  # a step is in flight: its mappings stay until it ends
            self.differences.append(float((out[0] - expected).abs().max()))
            texts.append(f"{view.replace('_', ' ')} {self.differences[-1]:.1e}")
        return ", ".join(texts)

    def owners(self, *sequences: Tracked) -> str:
        """Reference counts of these sequences' blocks."""
        pool = self.memory.group_memories[0].pool  # reports have no single blocks
        block_ids = sorted({block_id for sequence in sequences for block_id in sequence.table})
        return "Owners: " + "  ".join(f"#{block_id}: {pool.references[block_id]}" for block_id in block_ids)


def plain_attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """softmax(q·k / √dim)·v of one query `[num_heads, dim]`, over all tokens, in float64."""
    shared = NUM_HEADS // NUM_KV_HEADS  # query heads for each head of keys and values
    keys, values = (side.double().repeat_interleave(shared, dim=1) for side in (keys, values))
    weights = (torch.einsum("hd,thd->ht", query.double(), keys) * DIM**-0.5).softmax(dim=-1)
    return torch.einsum("ht,thd->hd", weights, values)


def one_by_one(walk: Walkthrough) -> tuple[Tracked, Tracked]:
    print(f"\n1. {NUM_TOKENS} tokens, one by one\n========================\n")
    print("A block holds 4 tokens and is a page of 4 KiB. A neighbour sequence allocates in turn with ours, so that")
    print("our blocks are scattered. Every page is mapped at home, and ours once more in our region. Attention of each")
    print("new token, through either view, should differ from plain attention by rounding only.\n")
    sequence, neighbour = (Tracked(walk.memory.create_sequence(view)) for view in VIEWS)
    print("token  written through  block table: logical→physical  filled     pages: home + region  difference")
    for position in range(NUM_TOKENS):
        view = VIEWS[position % 2]
        difference = walk.append(sequence, view)
        walk.append(neighbour, "block_table")
        report = walk.memory.report()
        at_home = report.physical_bytes // walk.page_bytes
        pages = f"{at_home:2d} + {report.num_mappings - at_home - walk.num_anchors}"
        table = " ".join(f"{logical}→{physical}" for logical, physical in enumerate(sequence.table))
        written = f"{position:5d}  {view.replace('_', ' '):15s}"
        print(f"{written}  {table:29s}  {sequence.fill():9s}  {pages:20s}  {difference}")
    print("\nThe same pages twice, by the logical numbers of our blocks (dots: the neighbour's blocks):\n")
    ours = {physical: str(logical) for logical, physical in enumerate(sequence.table)}
    print(f"  home    | {' | '.join(ours.get(physical, '.') for physical in range(1, max(ours) + 1))} |")
    print(f"  region  | {' | '.join(ours.values())} |")
    return sequence, neighbour


def fork_twice(walk: Walkthrough, parent: Tracked) -> tuple[Tracked, Tracked, int]:
    """The children, and the number of blocks copied for them."""
    print("\n2. A fork, and copy-on-write\n============================\n")
    walk.append(parent, "region")
    walk.append(parent, "region")
    print(f"The parent gets two more tokens: table {parent.table}, filled {parent.fill()}\n{walk.owners(parent)}\n")
    forks = [walk.memory.fork(parent.memory, len(parent.keys), view) for view in VIEWS]
    a, b = (Tracked(fork, [*parent.keys], [*parent.values]) for fork in forks)
    print("Children A, with a region, and B, with a block table only, share all its blocks; nothing is copied yet.")
    print(walk.owners(parent))
    num_copied = 0
    for name, child in (("A", a), ("B", b)):
        print(f"\n{name} appends three tokens of its own. The first goes into a shared block, which is copied.")
        for _ in range(3):
            before = list(child.table)
            difference = walk.append(child, child.memory.view)
            copied = [f"#{old} copied to #{new}" for old, new in zip(before, child.table, strict=False) if old != new]
            num_copied += len(copied)
            print(f"  {child.table!s:24s}  filled {child.fill():13s}  {', '.join([difference, *copied])}")
        print(walk.owners(parent, child))
    print("\nThe parent owns its last block alone again, unchanged, and each of the three reads its own tokens:\n")
    for name, sequence in (("parent", parent), ("A", a), ("B", b)):
        print(f"  {name:6s}  {sequence.table!s:24s}  filled {sequence.fill():13s}  {walk.check(sequence)}")
    shared = {*parent.table, *a.table, *b.table}
    print(f"\n{sum(len(s.table) for s in (parent, a, b))} entries in three tables, {len(shared)} blocks in memory")
    return a, b, num_copied


def main() -> None:
    args = harness.arguments(__doc__).parse_args()
    walk = Walkthrough()
    parent, neighbour = one_by_one(walk)
    a, b, num_copied = fork_twice(walk, parent)
    print("\n3. Free\n=======\n")
    print("A block is free when its reference count is 0.\n")
    for name, sequence in (("the parent", parent), ("A", a), ("B", b), ("the neighbour", neighbour)):
        before = walk.memory.report().active_bytes // walk.page_bytes
        walk.memory.free(sequence.memory)
        after = walk.memory.report().active_bytes // walk.page_bytes
        print(f"  {before:2d} owned blocks, after {name} was freed {after:2d}")
    walk.memory.check_idle()
    parked = walk.memory.report().parked_bytes // walk.page_bytes
    print(f"\nIntegrity checked. {parked} free blocks are still mapped in regions, for sequences that adopt one.\n")
    walk.memory.close()
    worst = max(walk.differences)
    figures = {"max_difference": worst, "tokens": NUM_TOKENS, "blocks_copied": num_copied}
    harness.finish("walkthrough", args, figures, {"differences": walk.differences})
    if not all(difference <= TOLERANCE for difference in walk.differences):
        raise SystemExit(f"attention differs by {worst:.1e}, more than {TOLERANCE:.0e}")


if __name__ == "__main__":
    main()
