"""A draft model proposes the tokens that it would generate itself, whatever the acceptance of earlier ones."""

from __future__ import annotations

import dataclasses
import random
from collections import abc
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from folio.app.config.engine import EngineConfig, ResolvedConfig
from folio.app.engine.ranks.executor import Executor
from folio.app.engine.ranks.processes import spawn_ranks
from folio.app.engine.request.request import Sequence
from folio.app.engine.sampling.params import SamplingParams
from folio.app.engine.sampling.sampler import sample
from folio.app.engine.schedule.scheduled import Scheduled
from folio.app.engine.speculation.draft import DraftProposer
from folio.app.errors import ConfigError
from folio.vmem import MapError
from tests.app.engine.engines import TINY, raising
from tests.app.engine.speculation.requests import generate, make_sequence
from tests.conftest import ARCHITECTURES, HYBRIDS, VOCAB_SIZE, MakeCheckpoint, tokens

GREEDY = SamplingParams(temperature=0, max_tokens=None)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=3, max_tokens=None)


class Drafting:
    """A draft proposer, and the tokens of every forward of its model."""

    def __init__(self, config: ResolvedConfig, target: Executor, max_model_len: int) -> None:
        self.proposer = DraftProposer(config, target.model, target.layers)
        self.proposer.open(max_model_len)
        self.target = target
        assert config.draft_model is not None
        alone = dataclasses.replace(config, model=config.draft_model, speculation="off", draft_model=None)
        self.alone = Executor(alone, spawn_ranks)  # the draft model
        self.forwards: list[int] = []
        run = self.proposer.run

        def note(scheduled: abc.Sequence[Scheduled]) -> torch.Tensor:
            self.forwards.append(sum(s.num_tokens for s in scheduled))
            return run(scheduled)

        self.proposer.run = note  # type: ignore[method-assign]

    def propose(self, sequences: abc.Sequence[Sequence], most: abc.Sequence[int]) -> list[list[int]]:
        guesses = self.proposer.propose(sequences, most)
        self.proposer.check_integrity()
        assert all(len(g) <= k for g, k in zip(guesses, most, strict=True))
        return guesses

    def check(self, sequence: Sequence, guesses: list[int], count: int) -> None:
        """They are what the draft model generates by itself, through transformers' attention, without a cache."""
        assert len(guesses) == count
        if count:
            logits = self.alone.own_logits(torch.tensor(sequence.token_ids + guesses[:-1]))[-count:]
            assert guesses == sample(logits, [sequence.sampling] * count, list(range(count))).token_ids


MakeDrafting = Callable[..., Drafting]


@pytest.fixture
def make_drafting(make_checkpoint: MakeCheckpoint) -> Iterator[MakeDrafting]:
    made: list[Drafting] = []

    def make(
        model_type: str = "llama", draft: dict[str, Any] | None = None, max_model_len: int = 1024, **settings: Any
    ) -> Drafting:
        folder = str(make_checkpoint("llama", **ARCHITECTURES["llama"][1]))
        defaults = {"kv_memory_bytes": 16 << 20, "skip_tokenizer_init": True, "max_num_seqs": 8, "num_threads": 1}
        config = EngineConfig(
            model=folder,
            speculation="draft",
            draft_model=str(make_checkpoint(model_type, **(draft or TINY))),
            **(defaults | settings),
        ).on_device("cpu")
        target = Executor(dataclasses.replace(config, speculation="off", draft_model=None), spawn_ranks)
        made.append(Drafting(config, target, max_model_len))
        return made[-1]

    yield make
    for drafting in made:
        drafting.proposer.close()


def go_on(sequence: Sequence, guesses: list[int], accepted: int) -> None:
    """As if the model had accepted the first draft tokens and then sampled another token."""
    generate(sequence, *guesses[:accepted])
    generate(
        sequence, (guesses[accepted] + 7 if accepted < len(guesses) else 11 + len(sequence.token_ids)) % VOCAB_SIZE
    )


@pytest.mark.parametrize("view", ["region", "block_table"])
def test_drafts_are_the_draft_models_own_tokens(make_drafting: MakeDrafting, view: str) -> None:
    """Greedy and sampled requests together, with rejected, accepted and missing drafts before."""
    drafting = make_drafting(kv_view=view)
    choice = random.Random(5)
    params = [GREEDY, SAMPLED, dataclasses.replace(SAMPLED, top_p=1.0), GREEDY]
    sequences = [make_sequence(tokens(n, n), p) for n, p in zip((33, 5, 64, 1), params, strict=True)]
    for _ in range(9):
        most = [choice.choice((0, 1, 3, 5)) for _ in sequences]
        guesses = drafting.propose(sequences, most)
        for sequence, k, guessed in zip(sequences, most, guesses, strict=True):
            drafting.check(sequence, guessed, k)
            if choice.random() < 0.8:  # else the step failed, and nothing was chosen
                go_on(sequence, guessed, choice.randint(0, len(guessed)))
    assert len({len(sequence.token_ids) for sequence in sequences}) == 4


def test_one_forward_for_each_draft_token(make_drafting: MakeDrafting) -> None:
    """Of all requests that need a further draft token; accepted tokens are not recomputed."""
    drafting = make_drafting()
    sequences = [make_sequence(tokens(n, n)) for n in (20, 30, 40)]
    guesses = drafting.propose(sequences, [1, 3, 4])
    assert drafting.forwards == [90, 2, 2, 1]
    for sequence, guessed, accepted in zip(sequences, guesses, (1, 1, 4), strict=True):
        go_on(sequence, guessed, accepted)
    drafting.forwards.clear()
    drafting.propose(sequences, [2, 2, 2])
    # The first lacks its guess and the token after it; the second only the token after; the third like the first.
    assert drafting.forwards == [2 + 1 + 2, 3]


def test_long_prompts_are_computed_in_chunks_beside_other_requests(make_drafting: MakeDrafting) -> None:
    drafting = make_drafting(max_num_batched_tokens=64)
    short, long = make_sequence(tokens(30, 1)), make_sequence(tokens(200, 2))
    for step in range(5):
        drafting.forwards.clear()
        guesses = drafting.propose([short, long], [2, 2])
        drafting.check(short, guesses[0], 2)
        drafting.check(long, guesses[1], 2 if step >= 3 else 0)
        assert drafting.forwards[0] <= 64
        go_on(short, guesses[0], 1)
        generate(long, 5)


def test_common_prefixes_are_computed_once(make_drafting: MakeDrafting) -> None:
    drafting = make_drafting(max_num_batched_tokens=128)
    sequences = [make_sequence(tokens(256) + tokens(8, 1 + i)) for i in range(4)]
    for _ in range(4):
        guesses = drafting.propose(sequences, [2] * 4)
    for sequence, guessed in zip(sequences, guesses, strict=True):
        drafting.check(sequence, guessed, 2)
    assert sum(drafting.forwards) < 256 + 4 * 8 + 4 * 4 * 3
    salted = make_sequence(sequences[0].token_ids, salt="mine")
    drafting.forwards.clear()
    for _ in range(3):
        drafting.propose([salted], [1])
    assert sum(drafting.forwards) >= 264  # nothing is shared across salts


def test_rejected_drafts_are_not_in_the_prefix_cache(make_drafting: MakeDrafting) -> None:
    """They fill a block; a request with the same tokens must not hit it."""
    drafting = make_drafting()
    sequence = make_sequence(tokens(27))
    [guesses] = drafting.propose([sequence], [8])
    go_on(sequence, guesses, 0)
    [again] = drafting.propose([sequence], [8])
    drafting.check(sequence, again, 8)
    other = make_sequence(tokens(27) + guesses)
    drafting.check(other, drafting.propose([other], [4])[0], 4)
    drafting.proposer.forget_sequence(sequence)
    drafting.check(other, drafting.propose([other], [4])[0], 4)


@pytest.mark.parametrize("architecture", ["mistral", "gemma2"])
def test_windows_are_rolled_back_after_rejected_drafts(make_drafting: MakeDrafting, architecture: str) -> None:
    drafting = make_drafting(*ARCHITECTURES[architecture], max_num_batched_tokens=64)
    sequence = make_sequence(tokens(100))
    generator = random.Random(1)
    for step in range(24):
        [guesses] = drafting.propose([sequence], [8])
        if step % 8 == 7:
            drafting.check(sequence, guesses, 8)
        go_on(sequence, guesses, generator.choice((0, 0, 1, 8)) if guesses else 0)


@pytest.mark.thirds
@pytest.mark.parametrize("view", ["region", "block_table", "auto"])
def test_full_memory_costs_drafts_only(make_drafting: MakeDrafting, view: str) -> None:
    """There is room for most of eight at first, and for three in the end: those give way that would have most to
    compute, and do not take each other's place again and again."""
    drafting = make_drafting(max_model_len=128, kv_memory_bytes=100 * 4096, kv_view=view)
    assert drafting.proposer.memory.most_budget_bytes == 14 * 4096
    sequences = [make_sequence(tokens(30, i)) for i in range(8)]
    served = []
    for _ in range(22):
        guesses = drafting.propose(sequences, [3] * 8)
        served.append(sum(map(bool, guesses)))
        for sequence, guessed in zip(sequences, guesses, strict=True):
            drafting.check(sequence, guessed, 3 if guessed else 0)
            go_on(sequence, guessed, 2 if guessed else 0)
    assert 6 <= served[0] <= 7
    assert 3 <= served[-1] <= 4
    assert sum(drafting.forwards) <= served[0] * 30 + 3 * sum(served)
    # Those without a turn give way to those with one.
    waiting = [sequence for sequence, guessed in zip(sequences, guesses, strict=True) if not guessed][:2]
    for sequence, guessed in zip(waiting, drafting.propose(waiting, [3, 3]), strict=True):
        drafting.check(sequence, guessed, 3)


def test_no_drafts_beyond_the_draft_models_context(make_drafting: MakeDrafting) -> None:
    drafting = make_drafting(draft=TINY | {"max_position_embeddings": 64})
    sequence = make_sequence(tokens(60))
    lengths = []
    for _ in range(8):
        [guesses] = drafting.propose([sequence], [4])
        lengths.append(len(guesses))
        generate(sequence, 5)
    assert lengths == [4, 4, 3, 2, 1, 0, 0, 0]
    drafting.proposer.memory.check_idle()


def test_a_failed_step_is_recovered(make_drafting: MakeDrafting, monkeypatch: pytest.MonkeyPatch) -> None:
    drafting = make_drafting()
    sequences = [make_sequence(tokens(n, n)) for n in (20, 30)]
    drafting.propose(sequences, [3, 3])

    proposer = drafting.proposer
    for holder, name, error in (
        (proposer, "run", RuntimeError("out of memory")),
        (proposer.memory, "ensure", MapError("mmap failed")),
    ):
        for sequence in sequences:
            generate(sequence, 9)
        with monkeypatch.context() as patch:
            patch.setattr(holder, name, raising(error))
            with pytest.raises(RuntimeError) if name == "run" else nullcontext():
                assert drafting.propose(sequences, [3, 3]) == [[], []]
        proposer.check_integrity()
        for sequence, guessed in zip(sequences, drafting.propose(sequences, [3, 3]), strict=True):
            drafting.check(sequence, guessed, 3)


def test_unsupported_draft_models(make_drafting: MakeDrafting) -> None:
    with pytest.raises(ConfigError, match="vocabulary of 300 tokens and the model one of 512"):
        make_drafting(draft=TINY | {"vocab_size": 300})
    with pytest.raises(ConfigError, match="recurrent state in 2 layers"):
        make_drafting("lfm2", HYBRIDS["lfm2"])
    with pytest.raises(ConfigError, match="below two blocks"):
        make_drafting(kv_memory_bytes=20_000, block_tokens=16)
