"""A step's batch as it follows from requests and block tables alone, without anything kept from the steps before."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from folio.app.engine.layers.batch import StepBatch, memory_of
from folio.app.engine.schedule.scheduled import Scheduled
from folio.vmem import KVMemory


def check_batch(
    batch: StepBatch,
    scheduled: Sequence[Scheduled],
    memory: KVMemory,
    *,
    all_logits: bool = False,
    sampled: torch.Tensor | None = None,
) -> None:
    """Raise unless the batch is that of the scheduled sequences, in their order."""
    sequences = [memory_of(s) for s in scheduled]
    firsts, counts = [s.start for s in scheduled], [s.num_tokens for s in scheduled]
    ends = list(itertools.accumulate(counts))
    token_ids: list[int] = []
    for s, first in zip(scheduled, firsts, strict=True):
        if s.pending_row is not None:
            assert sampled is not None
            token_ids.append(int(sampled[s.pending_row]))
        else:
            token_ids += [*s.sequence.token_ids[first:], *s.drafts][: s.num_tokens]
    assert batch.token_ids.tolist() == token_ids
    assert batch.positions.tolist() == [p for f, n in zip(firsts, counts, strict=True) for p in range(f, f + n)]
    num_logits = counts if all_logits else [s.num_logits for s in scheduled]
    assert batch.logit_rows.tolist() == [r for e, n in zip(ends, num_logits, strict=True) for r in range(e - n, e)]
    assert all(t.dtype == torch.int64 for t in (batch.token_ids, batch.positions, batch.logit_rows))

    views = [sequence.view for sequence in sequences]
    runs = [[i for i, _ in run] for _, run in itertools.groupby(enumerate(views), key=lambda pair: pair[1])]
    for g, group in enumerate(memory.groups):
        if group.is_state:
            assert batch.parts[g] == ()
            continue
        assert [part.view for part in batch.parts[g]] == [views[run[0]] for run in runs]
        for part, run in zip(batch.parts[g], runs, strict=True):
            tables = [sequences[i].groups[g] for i in run]
            assert part.tokens == slice(ends[run[0]] - counts[run[0]], ends[run[-1]])
            attention = part.attention
            assert attention.cu_seqlens_q.tolist() == [0, *itertools.accumulate(counts[i] for i in run)]
            cached = [firsts[i] + counts[i] for i in run]
            assert attention.cache_seqlens.tolist() == cached
            assert (attention.max_seqlen_q, attention.max_seqlen_k) == (max(counts[i] for i in run), max(cached))
            if part.view == "region":
                slots = [table.region.slot for table in tables if table.region is not None]
                assert attention.block_table.tolist() == [[slot] for slot in slots]
                block_tokens, blocks_of = memory.tensors.region_tokens[g], [[slot] for slot in slots]
            else:
                block_tokens, blocks_of = group.layout.block_tokens, [table.block_ids for table in tables]
                for row, table in zip(attention.block_table.tolist(), tables, strict=True):
                    size = len(table.block_ids)
                    assert row[table.first : size] == table.block_ids[table.first :][: len(row)]
                    assert not any(row[size:]), "after the last block there is the anchor"
                assert attention.block_table.shape[1] * block_tokens >= max(cached)
            expected = []
            for blocks, i in zip(blocks_of, run, strict=True):
                for p in range(firsts[i], firsts[i] + counts[i]):
                    expected.append(blocks[p // block_tokens] * block_tokens + p % block_tokens)
            assert part.slots.tolist() == expected
    at = memory.tensors.state_group
    if at is None:
        assert batch.states is None
    else:
        assert batch.states is not None
        assert batch.states.blocks == [sequence.groups[at].block_ids[0] for sequence in sequences]
        assert batch.states.cu_seqlens == [0, *ends]
        assert batch.states.fresh == [first == 0 for first in firsts]
