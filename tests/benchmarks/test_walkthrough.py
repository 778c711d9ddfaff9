"""Worked examples: the memory is as the text says, or the program exits."""

from __future__ import annotations

import pytest

from benchmarks.engine import walkthrough
from benchmarks.engine.words import EMPTY, WordMemory


def test_all_examples_hold() -> None:
    figures, _ = walkthrough.examples()
    assert figures["max_difference"] <= walkthrough.TOLERANCE
    assert figures["blocks_copied"] == 1
    assert figures["kib_token_llama3_8b"] == 128


def test_a_block_that_the_text_does_not_name_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = WordMemory(8)
    end = memory.end_neighbour
    monkeypatch.setattr(memory, "end_neighbour", lambda block_id: end({7: 5}.get(block_id, block_id)))
    with pytest.raises(SystemExit, match=r"block table: \[5, 1\] in the memory, \[7, 1\] in the text"):
        walkthrough.figure_6(memory)
    memory.memory.check_integrity()


def test_words_are_read_from_the_memory_and_not_from_tables() -> None:
    memory = WordMemory(3)
    text = memory.begin("region")
    memory.write(text, "a b c d e", "region")
    assert memory.words_at_home(text.table[0]) == ["a", "b", "c", "d"]
    assert max(memory.differences) < walkthrough.TOLERANCE
    memory.caches["block_table"][0][text.table[0], 1] = 0
    assert memory.words_in_region(text) == ["a", EMPTY, "c", "d", "e"]
    memory.write(text, "f")
    assert min(memory.differences[-2:]) > walkthrough.TOLERANCE
    memory.free(text)
    assert memory.close() == 0
