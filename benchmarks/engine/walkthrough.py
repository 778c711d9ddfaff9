"""The worked examples of PagedAttention and vAttention, on the classes the server runs on. Read it top to bottom.

PagedAttention (Kwon et al., SOSP 2023) cuts each sequence's KV cache into *blocks* at any place; a *block table* has
their ids, and a paged kernel reads through it. Folio also maps the same pages, in order, into one contiguous range of
addresses, the sequence's *region*, which any kernel reads as a plain array (vAttention, ASPLOS 2025).

1. PagedAttention's figure 6: "Four score and seven years ago our" in the physical blocks 7 and 1, and its continuation.
2. Figure 5: attention of one query over those blocks, by `flash_attn_with_kvcache` with and without a block table.
3. Figure 8: two samples of one prompt; reference counts and copy-on-write.
4. Figure 9: a step of beam search; blocks whose reference count reaches 0 are freed.
5. vAttention §6.2.2: a finished request's region stays mapped, and the next request adopts it (deferred reclamation).
6. The KV cache of a token in KiB, by the planner, and how many tokens a device of 40 GB holds.

Words in blocks are read from the memory: see `words.py`. Every attention is compared with plain attention over the same
keys and values. Exits with an error if it differs by more than 1e-5, or if a block id, a reference count or a size is
not the one that is told. --quick does the same.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from benchmarks import harness
from benchmarks.engine.words import BLOCK_TOKENS, DIM, EMPTY, NUM_HEADS, Text, WordMemory, plain_attention
from benchmarks.picture import OURS, RIVALS, legend_below, picture
from folio.vmem import LayerSpec, plan_layout, take_snapshot

TOLERANCE = 1e-5
MMU = RIVALS[1]  # colour of what it reads
ANCHOR, OTHER = "(anchor page)", "(another sequence)"
# Colour of the tokens that each stage of figure 6 adds.
STAGES = ((OURS[2], "the prompt"), (OURS[1], "first generated token"), (OURS[0], "second generated token"))
# Name, layers, KV heads of 128 dimensions, KiB of a token, and GiB for the KV cache on a device of 40 GB.
SIZES = {
    "llama2_7b": ("Llama-2-7B", 32, 32, 512, 22),
    "llama3_8b": ("Llama-3-8B", 32, 8, 128, 22),
    "opt_13b": ("OPT-13B", 40, 40, 800, 12),
}


def promise(what: str, found: object, told: object) -> None:
    """Exit with an error unless the memory has what the text says."""
    if found != told:
        raise SystemExit(f"{what}: {found} in the memory, {told} in the text")


def heading(text: str) -> None:
    print(f"{text}\n{'=' * len(text)}\n")


def say(text: str) -> None:
    print(textwrap.fill(text, 110), end="\n\n")


# ---- PagedAttention, figures 5 and 6 ----


def write_prompt(memory: WordMemory, text: Text) -> None:
    """The prompt in the blocks 7 and 1."""
    memory.fill()
    memory.end_neighbour(7)
    memory.write(text, "Four score and seven")
    memory.end_neighbour(1)
    memory.write(text, "years ago our", text.views[-1])
    promise("the prompt's block table", text.table, [7, 1])


def stage(memory: WordMemory, text: Text, after: str) -> dict[str, Any]:
    """Print the block table between the logical and the physical blocks; returns them for the picture."""
    physical = memory.physical()
    table = list(zip(text.table, text.filled, strict=True))
    left = [f"{i}  {line(words)}" for i, words in enumerate(text.blocks)]
    middle = [f"{block_id:8d} {filled:8d}" for block_id, filled in table]
    right = [f"{b}  {line(words) if words else OTHER if b else ANCHOR}" for b, words in enumerate(physical)]
    print(f"After {after}:\n")
    print(f"  {'logical blocks':32s} {'block table':17s}      physical blocks")
    print(f"  {'':32s} physical   filled")
    for logical, entry, block in zip_longest(left, middle, right, fillvalue=""):
        print(f"  {logical:32s} {entry:17s}      {block}")
    print()
    return {"after": after, "logical": text.blocks, "table": table, "physical": physical}


def line(words: Sequence[str]) -> str:
    """A block's words, each in its place."""
    return " ".join(f"{word:6s}" for word in [*words, *[EMPTY] * (BLOCK_TOKENS - len(words))])


def figure_6(memory: WordMemory) -> tuple[Text, list[dict[str, Any]]]:
    heading("1. PagedAttention's figure 6: block table translation")
    say(
        "A block holds 4 tokens and is a page of 4 KiB. Neighbours hold all blocks. They end one after another: blocks "
        "7, 1 and 3 become free in this order, and the allocator takes them. Tokens are written through the two views "
        "in turn. Block 0 is the anchor page, which no sequence owns."
    )
    text = memory.begin("region")
    write_prompt(memory, text)
    stages = [stage(memory, text, "the prompt of 7 tokens")]
    memory.write(text, "fathers")
    stages.append(stage(memory, text, '"fathers", which goes into the last block'))
    memory.end_neighbour(3)
    memory.write(text, "brought", "region")
    stages.append(stage(memory, text, '"brought", for which a block is allocated'))
    promise("the block table", [entry["table"] for entry in stages], [
        [(7, 4), (1, 3)],
        [(7, 4), (1, 4)],
        [(7, 4), (1, 4), (3, 1)],
    ])  # fmt: skip
    promise("block 7", memory.words_at_home(7), ["Four", "score", "and", "seven"])
    promise("block 1", memory.words_at_home(1), ["years", "ago", "our", "fathers"])
    promise("block 3", memory.words_at_home(3), ["brought", EMPTY, EMPTY, EMPTY])
    promise("the region", memory.words_in_region(text), text.words)
    say("The same pages are mapped once more, in order. The sequence's region reads, from its first address on:")
    print(f"  {' '.join(memory.words_in_region(text))}\n")
    return text, stages


def figure_5(memory: WordMemory, text: Text) -> None:
    heading("2. PagedAttention's figure 5: attention over blocks")
    memory.write(text, "forth")
    query = torch.randn(1, NUM_HEADS, DIM, generator=torch.Generator().manual_seed(1))
    say(
        'The query of "forth" attends to the ten words in three blocks. A call that a user of flash-attention knows, '
        "with the memory's home view and a block table, and with the region view without one:"
    )
    print(f"  flash_attn_with_kvcache(q, *memory.tensors.home_view(layer), cache_seqlens={len(text.words)},")
    print(f"                          block_table={[text.table]}, causal=True)")
    print(f"  flash_attn_with_kvcache(q, *memory.tensors.region_view(layer), cache_seqlens={len(text.words)},")
    print(f"                          cache_batch_idx=[{text.slot}], causal=True)\n")
    outputs = {view: memory.attend(text, query, view) for view in text.views}
    memory.compare(text, query, outputs)
    shown = {view.replace("_", " "): out for view, out in outputs.items()}
    shown["plain attention"] = plain_attention(query, text.keys, text.values)
    for name, out in shown.items():
        print(f"  {name:15s}  [{', '.join(f'{value:9.6f}' for value in out[0, 0, :6])}, …]")
    largest = f"{memory.views_differ[-1]:.1e}; from plain attention {memory.differences[-1]:.1e}"
    print(f"\nLargest difference of the two views, of {query.numel()} numbers: {largest}\n")


# ---- PagedAttention, figures 8 and 9 ----


def counts(memory: WordMemory, block_ids: list[int], told: list[int]) -> str:
    """Reference counts, which must be those told."""
    found = memory.references(block_ids)
    promise(f"reference counts of the blocks {block_ids}", list(found.values()), told)
    return "reference counts  " + "  ".join(f"#{block_id}: {count}" for block_id, count in found.items())


def figure_8(memory: WordMemory) -> None:
    heading("3. PagedAttention's figure 8: parallel sampling")
    a1 = memory.begin("region")
    write_prompt(memory, a1)
    a2 = memory.fork(a1, "block_table")
    say("Two samples of the same prompt share its blocks. A1 is read through its region, A2 through its block table.")
    print(f"  A1 {a1.table}, A2 {a2.table}   {counts(memory, [7, 1, 3], [2, 2, 1])}   (#3 is a neighbour's)")
    memory.end_neighbour(3)
    memory.write(a1, "fathers", "region")
    promise("the block tables", [a1.table, a2.table], [[7, 3], [7, 1]])
    print()
    say('A1 appends "fathers". Its last block has two owners, so it is copied to block 3:')
    print(f"  A1 {a1.table}, A2 {a2.table}   {counts(memory, [7, 1, 3], [2, 1, 1])}")
    memory.write(a2, "mothers")
    promise("the block tables", [a1.table, a2.table], [[7, 3], [7, 1]])
    promise("copied blocks", memory.memory.report().copied_blocks, 1)
    print()
    say('A2 appends "mothers", into block 1, which it owns alone by now. Nothing is copied:')
    print(f"  A1 {a1.table}, A2 {a2.table}   {counts(memory, [7, 1, 3], [2, 1, 1])}\n")
    for block_id in (7, 1, 3):
        print(f"  block {block_id}      {line(memory.words_at_home(block_id))}")
    promise("block 1", memory.words_at_home(1), ["years", "ago", "our", "mothers"])
    promise("block 3", memory.words_at_home(3), ["years", "ago", "our", "fathers"])
    promise("A1's region", memory.words_in_region(a1), a1.words)
    print(f"  A1's region  {' '.join(memory.words_in_region(a1))}")
    memory.free(a1)
    print(f"\nA1 ends:             {counts(memory, [7, 1, 3], [1, 1, 0])}")
    memory.free(a2)
    print(f"A2 ends:             {counts(memory, [7, 1, 3], [0, 0, 0])}\n")


def show_branches(tables: Sequence[Sequence[int]]) -> None:
    """Print each candidate's blocks, a bar in place of those that it shares with the candidate above."""
    for c, (above, table) in enumerate(zip([[], *tables], tables, strict=False)):
        shared = [one == other for one, other in zip_longest(table, above[: len(table)])]
        print(
            f"  candidate {c}   " + "".join(f"{'|' if s else f'#{b}':>5s}" for b, s in zip(table, shared, strict=True))
        )
    print()


def figure_9(memory: WordMemory) -> None:
    heading("4. PagedAttention's figure 9: beam search")
    say(
        "Ids are the figure's plus 1, because block 0 is the anchor page. Four candidates share the prompt's block; "
        "candidate 3 went its own way after it, candidates 0, 1 and 2 after the third block."
    )
    beams = [memory.begin("block_table")]
    memory.write(beams[0], "p0 p1 p2 p3")
    lone = memory.fork(beams[0], "block_table")
    for i in range(2):
        memory.write(beams[0], " ".join(f"a{4 * i + j}" for j in range(4)))
        memory.write(lone, " ".join(f"b{4 * i + j}" for j in range(4)))
    beams += [memory.fork(beams[0], "block_table") for _ in range(2)] + [lone]
    for c, beam in enumerate(beams):
        memory.write(beam, " ".join(f"c{c}{j}" for j in range(4)))
    before = [beam.table for beam in beams]
    promise("the candidates' blocks", before, [[1, 2, 4, 6], [1, 2, 4, 7], [1, 2, 4, 8], [1, 3, 5, 9]])
    every = list(range(1, 10))
    show_branches(before)
    print(f"  {counts(memory, every, [4, 3, 1, 3, 1, 1, 1, 1, 1])}\n")

    forked = [memory.fork(beams[parent], "block_table") for parent in (1, 1, 2, 2)]
    for beam in beams:
        memory.free(beam)
    say(
        "The four best next tokens follow candidates 1 and 2. Both are forked twice, and the old candidates are freed; "
        "blocks whose count reaches 0 are free (in the figure: 2, 4, 5 and 8):"
    )
    print(f"  {counts(memory, every, [4, 4, 0, 4, 0, 0, 2, 2, 0])}\n")
    for c, beam in enumerate(forked):
        memory.write(beam, f"d{c}")
    after = [beam.table for beam in forked]
    promise("the new candidates' blocks", after, [[1, 2, 4, 7, 3], [1, 2, 4, 7, 5], [1, 2, 4, 8, 6], [1, 2, 4, 8, 9]])
    say(
        "Each writes its token into a block of its own. The lowest free ids are taken first, so that the freed blocks "
        "are used again at once; the figure draws blocks 9 to 12. No block was copied:"
    )
    show_branches(after)
    print(f"  {counts(memory, every, [4, 4, 1, 4, 1, 1, 2, 2, 1])}\n")
    promise("copied blocks", memory.memory.report().copied_blocks, 0)
    for beam in forked:
        memory.free(beam)


# ---- vAttention ----


def deferred_reclamation(memory: WordMemory) -> None:
    heading("5. vAttention §6.2.2: the next request adopts a mapped region")
    say(
        "A request has a region of its own, to which pages are mapped as it grows. A finished request's region stays "
        "mapped, and the next request adopts it with its pages (deferred reclamation)."
    )
    print(f"  {'':28s} {'pages in region 1':20s} {'pages in region 2':20s} pages mapped so far")
    texts = {"R1": memory.begin("region"), "R2": memory.begin("region")}
    first = memory.memory.report().map_calls

    def show(step: str, *told: str) -> None:
        """Print the pages and the holder of both regions, and the number of pages mapped so far, which must be those
        told."""
        snapshot = take_snapshot(memory.memory, most_sequences=len(texts), most_parked=len(texts))
        assert snapshot is not None  # no other thread holds the lock
        regions = dict.fromkeys((1, 2), "none") | {slot: f"{pages}, parked" for slot, pages in snapshot.parked[0]}
        name_of = {text.memory: name for name, text in texts.items()}
        for sequence in snapshot.sequences:
            [table] = sequence.tables
            if table.slot is not None:
                regions[table.slot] = f"{table.num_mapped}, {name_of[sequence.memory]}"
        found = (*regions.values(), str(memory.memory.report().map_calls - first))
        promise(step, found, told)
        print(f"  {step:28s} {found[0]:20s} {found[1]:20s} {found[2]}")

    show("R1 and R2 arrive", "none", "none", "0")
    memory.write(texts["R1"], "Call me Ishmael .", "region")
    show("R1 has written 4 tokens", "1, R1", "none", "1")
    memory.write(texts["R1"], "Some years ago", "region")
    memory.write(texts["R2"], "All happy families", "region")
    show("R1 has 7, R2 has 3", "2, R1", "1, R2", "3")
    memory.free(texts.pop("R1"))
    show("R1 ends", "2, parked", "1, R2", "3")
    texts["R3"] = memory.begin("region")
    memory.write(texts["R3"], "It was the best of times", "region")
    show("R3 has written 6 tokens", "2, R3", "1, R2", "3")
    for text in texts.values():
        memory.free(text)
    print()
    say("R3 needed no mapping. (Pages are counted in regions; at home they have been since the beams above.)")


# ---- sizes ----


def sizes() -> dict[str, float]:
    """Figures: KiB of a token, and tokens on a device of 40 GB."""
    heading("6. The KV cache of a token")
    say(
        "Keys and values of every layer and KV head, 128 dimensions of 2 bytes. PagedAttention's table 1 has 12 GiB "
        "for the KV cache of OPT-13B on a device of 40 GB, 15.7K tokens; weights of 16 GB in place of 26 leave 22 GiB."
    )
    print("              layers  KV heads  KiB a token  GiB for it   tokens  requests of 2,048")
    figures: dict[str, float] = {}
    for key, (name, layers, heads, kib, gib) in SIZES.items():
        specs = [LayerSpec(heads, 128, 128)] * layers
        layout = plan_layout(specs, torch.float16, granularity_bytes=2 << 20, kind="sliced")  # as on CUDA
        promise(f"KiB of a token of {name}", layout.payload_bytes / 1024, kib)
        tokens = (gib << 30) // layout.block_bytes * layout.block_tokens
        print(f"  {name:10s}  {layers:6d}  {heads:8d}  {kib:11d}  {gib:10d}  {tokens:7,d}  {tokens // 2048:17d}")
        figures |= {f"kib_token_{key}": layout.payload_bytes / 1024, f"tokens_40gb_{key}": tokens}
    print()
    say(
        "The often quoted 512 KiB a token of an 8B model is Llama-2-7B's, with a KV head for each of 32 query heads. "
        "Llama-3-8B shares a KV head among four, so that the device holds four times as many tokens."
    )
    return figures


# ---- the picture ----


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Logical blocks, block table and physical blocks after the last stage of figure 6, and the region."""
    stages, region = result["raw"]["figure_6"], result["raw"]["region"]
    table, physical, logical = (stages[-1][key] for key in ("table", "physical", "logical"))
    words_after = [sum(map(len, each["logical"])) for each in stages]
    colours = {word: STAGES[sum(i >= end for end in words_after)][0] for i, word in enumerate(region)}
    columns, width, height, step = (4.0, 42.0, 67.0), 8.0, 3.7, 4.6  # left edges; of a word's cell; between blocks
    title = "One block table, two readers: PagedAttention's figure 6, and its region in Folio"
    with picture(result, path, title, height=4.9) as (figure, [plot]):
        plot.axis("off")
        plot.set(xlim=(0, 100), ylim=(47, 0))

        def cell(x: float, y: float, text: object, colour: str = "white", wide: float = width) -> None:
            plot.barh(y, wide, height, x, color=colour, edgecolor="#5f656d", linewidth=0.8)
            ink = "white" if colour == OURS[0] else "#1c1f23"
            plot.text(x + wide / 2, y, text, ha="center", va="center_baseline", fontsize=8, color=ink)

        def block(x: float, y: float, label: object, words: Sequence[str]) -> None:
            plot.text(x - 1, y, label, ha="right", va="center_baseline")
            for i, word in enumerate([*words, *[""] * (BLOCK_TOKENS - len(words))]):
                cell(x + i * width, y, word.strip(EMPTY), colours.get(word, "white"))

        def arrow(x: float, y: float, block_id: int, colour: str, style: str) -> None:
            look = {"arrowstyle": "->", "color": colour, "linestyle": style, "linewidth": 1.2, "shrinkA": 0}
            plot.annotate("", (columns[2] - 3.5, 8 + step * block_id), (x, y), arrowprops=look)

        for x, text in zip(columns, ("Logical blocks", "Block table", "Physical blocks (home)"), strict=True):
            plot.text(x, 1, text, fontweight="bold", va="center")
        for x, text in ((columns[1], "physical"), (columns[1] + width, "# filled")):
            plot.text(x + width / 2, 4.5, text, ha="center", va="center", fontsize=8)
        for i, (block_id, _) in enumerate(table):
            y = 8 + step * i
            block(columns[0], y, i, logical[i])
            cell(columns[1], y, block_id)
            filled = dict.fromkeys(str(each["table"][i][1]) for each in stages if i < len(each["table"]))
            cell(columns[1] + width, y, " → ".join(filled))
            arrow(columns[1] + 2 * width, y, block_id, OURS[0], "-")
        for b, words in enumerate(physical):
            if words:
                block(columns[2], 8 + step * b, b, words)
            else:
                plot.text(columns[2] - 1, 8 + step * b, b, ha="right", va="center_baseline")
                cell(columns[2], 8 + step * b, OTHER if b else ANCHOR, "#eceef1", BLOCK_TOKENS * width)
        plot.text(columns[0], 29, "Region: contiguous addresses", fontweight="bold", va="center")
        for i, (block_id, _) in enumerate(table):
            y = 33 + height * i  # no gap: the addresses are contiguous
            block(columns[0], y, f"+{4 * i} KiB", region[i * BLOCK_TOKENS : (i + 1) * BLOCK_TOKENS])
            arrow(columns[0] + BLOCK_TOKENS * width, y, block_id, MMU, "--")
        for colour, label in STAGES:
            plot.plot([], [], "s", color=colour, markersize=9, label=label)
        plot.plot([], [], color=OURS[0], label="a kernel looks up the block table")
        plot.plot([], [], color=MMU, linestyle="--", label="the MMU finds the same page")
        legend_below(figure, plot, 3)


def examples() -> tuple[dict[str, float], dict[str, Any]]:
    """Show all of them. Returns the figures, and the raw data."""
    memories = small, larger = WordMemory(8), WordMemory(13)
    text, stages = figure_6(small)
    region = small.words_in_region(text)
    figure_5(small, text)
    small.free(text)
    figure_8(small)
    figure_9(larger)
    deferred_reclamation(larger)
    figures = sizes()
    differences = [difference for memory in memories for difference in memory.differences]
    figures |= {
        "max_difference": max(differences),
        "max_difference_of_views": max(difference for memory in memories for difference in memory.views_differ),
        "tokens": sum(memory.num_tokens for memory in memories),
        "blocks_copied": sum(memory.close() for memory in memories),
    }
    return figures, {"figure_6": stages, "region": region, "differences": differences}


def main() -> None:
    args = harness.arguments(__doc__).parse_args()
    figures, raw = examples()
    harness.finish("walkthrough", args, figures, raw, draw)
    if not all(difference <= TOLERANCE for difference in raw["differences"]):
        raise SystemExit(f"attention differs by {figures['max_difference']:.1e}, more than {TOLERANCE:.0e}")


if __name__ == "__main__":
    main()
