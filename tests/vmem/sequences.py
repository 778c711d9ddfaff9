"""Sequences of a small memory: with their positions as contents, or with prompts whose prefixes are cached."""

from __future__ import annotations

from folio.vmem import KVMemory, PrefixUse, SequenceMemory, StepDemand, ViewPolicy, key_of
from tests.vmem.small_memory import FlakyCuda, Tokens, pages_read, read, write, write_state


def begin(memory: KVMemory, num_tokens: int, policy: ViewPolicy = "region") -> SequenceMemory:
    """A sequence with blocks, mapped, and its positions written as its content."""
    sequence = memory.create_sequence(policy)
    memory.append(sequence, num_tokens)
    step(memory, sequence, 0, num_tokens)
    return sequence


def step(memory: KVMemory, sequence: SequenceMemory, start: int, end: int) -> StepDemand:
    demand = StepDemand(sequence, start, end)
    memory.ensure([demand])
    write(memory, demand, [float(p) for p in range(start, end)], "own")
    return demand


def reads(memory: KVMemory, sequence: SequenceMemory, num_tokens: int, view: str = "own", layer: int = 0) -> bool:
    """Whether the sequence's first tokens are its positions."""
    return read(memory, StepDemand(sequence, 0, num_tokens), layer, view) == list(range(num_tokens))


def launch(memory: KVMemory, *demands: StepDemand) -> None:
    """Let a step over these demands run until the driver's work is finished."""
    if isinstance(memory.backend, FlakyCuda):
        memory.backend.fake.launch(pages_read(memory, demands))
    memory.launched()


def prompt(length: int, seed: int = 0) -> list[int]:
    return [seed * 1000 + i for i in range(length)]


def submit(
    memory: KVMemory,
    tokens: Tokens,
    found: int | None = None,
    policy: ViewPolicy = "block_table",
    use: PrefixUse | None = None,
) -> SequenceMemory:
    """Create a sequence that shares the cached prefix of its tokens, `found` of them, and will compute the rest."""
    sequence = memory.create_sequence(policy, expected_tokens=len(tokens.ids))
    reused = memory.share_prefix(sequence, tokens.chain, tokens.ids, use)
    assert found is None or reused == found
    memory.append(sequence, len(tokens.ids), start=reused)
    memory.prefixes.announce_prefill(sequence, len(tokens.ids))
    memory.prefixes.stage_prefix(sequence, tokens.ids, reused, len(tokens.ids))
    return sequence


def compute(memory: KVMemory, *begun: tuple[SequenceMemory, Tokens, int]) -> None:
    """Run one step over (sequence, tokens, number of cached tokens) and read all contents back."""
    demands = [StepDemand(sequence, start, len(tokens.ids)) for sequence, tokens, start in begun]
    memory.ensure(demands)
    for demand, (sequence, tokens, start) in zip(demands, begun, strict=True):
        write(memory, demand, tokens.contents[start:], "own")
        if memory.prefixes.has_states:
            write_state(memory, sequence, tokens.contents[-1])
    for sequence, tokens, _ in begun:
        check(memory, sequence, tokens)
    launch(memory, *demands)
    memory.prefixes.commit_prefixes()


def check(memory: KVMemory, sequence: SequenceMemory, tokens: Tokens, view: str = "own") -> None:
    """Every layer has what the sequence has computed."""
    demand = StepDemand(sequence, 0, len(tokens.ids))
    for group in memory.groups:
        for layer in group.layers:
            first = sequence.groups[memory.tensors.group_of(layer)].first * group.layout.block_tokens
            assert read(memory, demand, layer, view) == tokens.contents[first:]


def run(
    memory: KVMemory,
    ids: list[int],
    found: int | None = None,
    keys: tuple[str, ...] = (),
    policy: ViewPolicy = "block_table",
    use: PrefixUse | None = None,
) -> SequenceMemory:
    """Compute a prompt, of which `found` tokens must be cached."""
    tokens = Tokens(memory.prefixes.chain(keys), ids)
    sequence = submit(memory, tokens, found, policy, use)
    compute(memory, (sequence, tokens, sequence.prefix.computed * 16 if found is None else found))
    return sequence


def serve(
    memory: KVMemory,
    ids: list[int],
    found: int | None = None,
    keys: tuple[str, ...] = (),
    use: PrefixUse | None = None,
) -> list[bytes]:
    """Compute a prompt whose sequence ends at once; returns the keys of its prefixes."""
    sequence = run(memory, ids, found, keys, use=use)
    memory.free(sequence)
    assert sequence.prefix.chain is not None
    return [key_of(digest) for digest in sequence.prefix.chain.digests]
