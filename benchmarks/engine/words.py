"""A KV memory whose tokens are words, for examples in print: what is stored at an address is read as text.

Each token's key and value are random numbers, which stand for a model's. A key is told from all others, so that the
words of a block or of a region are those whose keys lie there, whichever table led to it. The memory is the `KVMemory`
that the server runs on; tokens are written and attention is computed by `flash_attn_with_kvcache`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from folio.kernels import flash_attn_with_kvcache
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

BLOCK_TOKENS = 4
# A token has 2 · 64 float32 of keys and as many of values: 1 KiB, so that four tokens are a block and a page of 4 KiB.
NUM_HEADS, NUM_KV_HEADS, DIM = 4, 2, 64
EMPTY = "·"


@dataclass(slots=True)
class Text:
    """A sequence, its words, and their keys and values `[num_words, num_kv_heads, dim]`, which its cache must equal."""

    memory: SequenceMemory
    words: list[str] = field(default_factory=list)
    keys: torch.Tensor = field(default_factory=lambda: torch.empty(0, NUM_KV_HEADS, DIM))
    values: torch.Tensor = field(default_factory=lambda: torch.empty(0, NUM_KV_HEADS, DIM))

    @property
    def table(self) -> list[int]:
        """The block table of the one layer group: logical block → block id."""
        return self.memory.groups[0].block_ids

    @property
    def slot(self) -> int | None:
        """Of its region; `None` without one."""
        region = self.memory.groups[0].region
        return None if region is None else region.slot

    @property
    def views(self) -> list[View]:
        """Views through which it can be read: every block is at home."""
        return ["block_table"] if self.slot is None else ["block_table", "region"]

    @property
    def filled(self) -> list[int]:
        """Number of tokens in each block."""
        return [min(len(self.words) - i * BLOCK_TOKENS, BLOCK_TOKENS) for i in range(len(self.table))]

    @property
    def blocks(self) -> list[list[str]]:
        """The words by logical block."""
        return [self.words[i : i + BLOCK_TOKENS] for i in range(0, len(self.words), BLOCK_TOKENS)]


class WordMemory:
    """One layer's KV memory on the host, of `num_blocks` blocks with the ids 1, 2, …

    Attributes:
        differences: of every attention from plain attention, the largest of an output.
        views_differ: of every attention through a region from the same through the block table.
        num_tokens: tokens written.
    """

    def __init__(self, num_blocks: int) -> None:
        backend = HostBackend(1 << 20)
        layers = [LayerSpec(NUM_KV_HEADS, DIM, DIM)]
        granularity = backend.granularity_bytes
        layout = plan_layout(layers, torch.float32, granularity_bytes=granularity, block_tokens=BLOCK_TOKENS)
        self.num_blocks = num_blocks
        self.memory = KVMemory(
            backend,
            [LayerGroup((0,), layout)],
            budget_bytes=num_blocks * layout.page_bytes,
            num_regions=3,
            max_tokens=num_blocks * BLOCK_TOKENS,
            options=MappingOptions(background=False),  # nothing is mapped but by the steps below
        )
        self.caches = {"block_table": self.memory.tensors.home_view(0), "region": self.memory.tensors.region_view(0)}
        self.differences: list[float] = []
        self.views_differ: list[float] = []
        self.num_tokens = 0
        self._random = torch.Generator().manual_seed(0)
        self._neighbours: dict[int, SequenceMemory] = {}
        self._word_of: dict[bytes, str] = {}

    # ---- sequences ----

    def begin(self, view: View) -> Text:
        return Text(self.memory.create_sequence(view))

    def fork(self, text: Text, view: View) -> Text:
        """A sequence that shares all blocks of another one."""
        child = self.memory.fork(text.memory, len(text.words), view)
        return Text(child, text.words.copy(), text.keys, text.values)

    def free(self, text: Text) -> None:
        self.memory.free(text.memory)

    def write(self, text: Text, words: str, through: View = "block_table") -> None:
        """A step of one sequence: allocate blocks if necessary, map them, write tokens through one view, and compute
        attention through each."""
        start, new = len(text.words), words.split()
        self.memory.append(text.memory, start + len(new))
        self.memory.ensure([StepDemand(text.memory, start, start + len(new))])
        self.memory.map_home(text.memory)  # read and written through both views
        keys, values = torch.randn(2, len(new), NUM_KV_HEADS, DIM, generator=self._random)
        self._word_of |= {_bytes(key): word for key, word in zip(keys, new, strict=True)}
        query = torch.randn(len(new), NUM_HEADS, DIM, generator=self._random)
        outputs = {through: self.attend(text, query, through, keys, values)}
        text.words += new
        text.keys, text.values = torch.cat([text.keys, keys]), torch.cat([text.values, values])
        self.num_tokens += len(new)
        outputs |= {view: self.attend(text, query, view) for view in text.views if view != through}
        self.compare(text, query, outputs)

    def attend(
        self,
        text: Text,
        query: torch.Tensor,
        view: View,
        keys: torch.Tensor | None = None,
        values: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of the last tokens' queries `[num_queries, num_heads, dim]` over the sequence, as plain
        flash-attention: through the block table, or as a row of a contiguous cache. `keys`, `values` are stored first.
        """
        key_cache, value_cache = self.caches[view]
        out = flash_attn_with_kvcache(
            query[None],
            key_cache,
            value_cache,
            k=None if keys is None else keys[None],
            v=None if values is None else values[None],
            cache_seqlens=len(text.words),
            block_table=torch.tensor([text.table], dtype=torch.int32) if view == "block_table" else None,
            cache_batch_idx=torch.tensor([text.slot], dtype=torch.int32) if view == "region" else None,
            causal=True,
        )
        assert isinstance(out, torch.Tensor)  # no logarithms of sums were asked for
        return out[0]

    def compare(self, text: Text, query: torch.Tensor, outputs: dict[View, torch.Tensor]) -> None:
        """Note how far a step's outputs are from plain attention, and from each other."""
        self.memory.launched()  # a step is in flight: its mappings stay until it ends
        expected = plain_attention(query, text.keys, text.values)
        self.differences += [_largest(out, expected) for out in outputs.values()]
        if "region" in outputs:
            self.views_differ.append(_largest(outputs["region"], outputs["block_table"]))

    # ---- neighbours ----

    def fill(self) -> None:
        """Let neighbours, sequences of one block each, take all blocks."""
        while len(self._neighbours) < self.num_blocks:
            neighbour = self.memory.create_sequence("block_table")
            self.memory.append(neighbour, BLOCK_TOKENS)
            self._neighbours[neighbour.groups[0].block_ids[0]] = neighbour

    def end_neighbour(self, block_id: int) -> None:
        """Free the neighbour with this block, which is the only free one then."""
        self.memory.free(self._neighbours.pop(block_id))

    def close(self) -> int:
        """Free the neighbours; check that nothing else is owned, and give the memory back. Returns the number of blocks
        that were copied on write."""
        for neighbour in self._neighbours.values():
            self.memory.free(neighbour)
        self.memory.check_idle()
        num_copied = self.memory.report().copied_blocks
        self.memory.close()
        return num_copied

    # ---- what lies in memory ----

    def references(self, block_ids: list[int]) -> dict[int, int]:
        """Reference counts by block id."""
        references = self.memory.group_memories[0].pool.references  # reports have no single blocks
        return {block_id: references[block_id] for block_id in block_ids}

    def words_at_home(self, block_id: int) -> list[str]:
        """The words whose keys are in a block."""
        return [self._word_of.get(_bytes(key), EMPTY) for key in self.caches["block_table"][0][block_id]]

    def words_in_region(self, text: Text) -> list[str]:
        """The words whose keys are in a sequence's region, from its first address on."""
        keys = self.caches["region"][0][text.slot]
        return [self._word_of.get(_bytes(key), EMPTY) for key in keys[: len(text.words)]]  # a hole follows

    def physical(self) -> list[list[str]]:
        """The words of every block by block id, `[]` for the anchor and for the neighbours' blocks."""
        others = {0, *self._neighbours}
        return [[] if b in others else self.words_at_home(b) for b in range(self.num_blocks + 1)]


def plain_attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """softmax(q·k / √dim)·v of the last tokens' queries `[num_queries, num_heads, dim]` in float64, each over the
    tokens up to its own."""
    shared = NUM_HEADS // NUM_KV_HEADS  # query heads for each head of keys and values
    keys, values = (side.double().repeat_interleave(shared, dim=1) for side in (keys, values))
    scores = torch.einsum("qhd,thd->hqt", query.double(), keys) * DIM**-0.5
    visible = torch.ones(scores.shape[1:], dtype=torch.bool).tril(len(keys) - len(query))
    return torch.einsum("hqt,thd->qhd", scores.where(visible, -torch.inf).softmax(dim=-1), values)


def _largest(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max())


def _bytes(key: torch.Tensor) -> bytes:
    return key.numpy().tobytes()
