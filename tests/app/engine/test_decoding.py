"""Several outputs of one prompt: samples, beams, forks, checked drafts, in one batch and in little memory."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from folio.app.engine import SamplingParams, Structure
from folio.app.engine.engine import Engine
from folio.app.engine.request import ended_outputs
from folio.app.engine.sampling import sampler
from folio.app.engine.step import token_selection
from folio.app.errors import EngineError, RequestError
from folio.vmem import VmemError
from tests.app.engine import engines
from tests.app.engine.all_kinds import prompt
from tests.app.engine.engines import BLOCK_BYTES, MakeEngine, answers, folder_of, greedy, outputs, raising, run, steps
from tests.conftest import VOCAB_SIZE, MakeCheckpoint

NEW_TOKENS = 12
GREEDY = greedy(NEW_TOKENS)
MODELS = ("llama", "gemma2", "bamba")


def samples(max_tokens: int = NEW_TOKENS, **params: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": max_tokens, "ignore_eos": True} | params))


def beams(max_tokens: int = NEW_TOKENS, **params: Any) -> SamplingParams:
    return samples(max_tokens, use_beam_search=True, **params)


@pytest.fixture
def make_engine(make_engine: MakeEngine) -> MakeEngine:
    def make(model: Path | str = "llama", **settings: Any) -> Engine:
        defaults = {"max_model_len": 200, "max_num_batched_tokens": 64, "max_num_seqs": 32, "dtype": "float32"}
        return make_engine(model, **(defaults | settings))

    return make


@pytest.fixture
def engine(make_engine: MakeEngine) -> Engine:
    return make_engine()


@pytest.fixture(params=MODELS)
def folder(request: pytest.FixtureRequest, make_checkpoint: MakeCheckpoint) -> Path:
    return folder_of(make_checkpoint, request.param)


# ---- parallel samples ----


def test_samples_share_one_prefill(make_engine: MakeEngine, folder: Path) -> None:
    engine = make_engine(folder)
    engine.submit("n", prompt(70), samples(n=4, seed=5, temperature=20))
    sizes = engines.note_sizes(engine)
    found: dict[int, list[int]] = {}
    while engine.has_work:
        for delta in engine.step():
            found.setdefault(delta.index, []).extend(delta.token_ids)
        engine.check_integrity()
    assert sum(sizes) == 70 + 4 * (NEW_TOKENS - 1)
    assert len({tuple(tokens) for tokens in found.values()}) == 4
    # Every one of them is what its own random numbers give, alone or not.
    for count in (1, 3):
        engine.submit("again", prompt(70), samples(n=count, seed=5, temperature=20))
        engine.submit("other", prompt(33, 1), samples(7, n=2))
        again = outputs(engine)
        assert [again["again", index] for index in range(count)] == [found[index] for index in range(count)]


def test_the_last_delta_of_a_request_says_so(engine: Engine) -> None:
    engine.submit("n", prompt(20), SamplingParams(n=3, max_tokens=4, seed=1, stop_token_ids=()))
    deltas = list(steps(engine))
    assert [delta.ends_request for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    assert sum(delta.finished for delta in deltas) == 3


def test_best_of_returns_the_likeliest(engine: Engine, llama: Path) -> None:
    """They are the likeliest of the same samples, and nothing is said before all have ended."""
    engine.submit("all", prompt(40), samples(n=6, seed=9, temperature=2.0))
    every = outputs(engine)
    model = AutoModelForCausalLM.from_pretrained(llama).eval()

    def mean_logprob(tokens: list[int]) -> float:
        with torch.inference_mode():
            logprobs = model(torch.tensor([prompt(40) + tokens])).logits[0].log_softmax(dim=-1)
        return sum(logprobs[39 + i, token].item() for i, token in enumerate(tokens)) / len(tokens)

    best = sorted(every.values(), key=mean_logprob, reverse=True)[:2]
    engine.submit("best", prompt(40), samples(n=2, best_of=6, seed=9, temperature=2.0))
    deltas = list(steps(engine))
    assert [list(delta.token_ids) for delta in deltas] == best
    assert [(delta.index, delta.num_unfinished, delta.logprobs) for delta in deltas] == [(0, 1, ()), (1, 0, ())]


# ---- beams ----


@pytest.mark.thirds
@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [1.0, -0.5, 2.0])
def test_beams_equal_transformers(
    make_engine: MakeEngine, folder: Path, early_stopping: Any, length_penalty: float
) -> None:
    """Tokens and scores, some beams ending early."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    likeliest = model.generate(
        torch.tensor([prompt(30)]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None
    )
    ends = sorted({likeliest[0, 33].item(), likeliest[0, 36].item()})
    how = {"length_penalty": length_penalty, "early_stopping": early_stopping}
    engine = make_engine(folder)
    prompts = [prompt(30), prompt(75, 1)]
    for i, tokens in enumerate(prompts):
        engine.submit(str(i), tokens, beams(n=3, best_of=4, stop_token_ids=ends, **how))
    found = run(engine)
    for i, tokens in enumerate(prompts):
        expected = model.generate(
            torch.tensor([tokens]),
            num_beams=4,
            num_return_sequences=3,
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=ends,
            pad_token_id=0,
            output_scores=True,
            return_dict_in_generate=True,
            **how,
        )
        for delta, sequence, score in zip(found[str(i)], expected.sequences, expected.sequences_scores, strict=True):
            output = sequence[len(tokens) :].tolist()
            assert list(delta.token_ids) == output[: len(delta.token_ids)]
            assert set(output[len(delta.token_ids) :]) <= {0, *ends}
            assert delta.score == pytest.approx(score.item(), abs=1e-4)


def test_beams_cost_no_prefill_and_share_blocks(engine: Engine) -> None:
    engine.submit("beams", prompt(90), beams(n=4))
    counts, most_pages = engines.note_sizes(engine), 0
    while engine.has_work:
        engine.step()
        most_pages = max(most_pages, engine.report().active_bytes)
    assert counts == [64, 26] + [4] * (NEW_TOKENS - 1)
    alone = engine.memory.pages_for(90 + NEW_TOKENS) * engine.memory.groups[0].layout.page_bytes
    assert most_pages < 2 * alone


@pytest.mark.parametrize("way", ["swap", "recompute"])
def test_preempted_beams_go_on_together(make_engine: MakeEngine, folder: Path, way: Any) -> None:
    engine = make_engine(folder)
    engine.submit("beams", prompt(50), beams(n=3))
    expected = outputs(engine)
    engine.submit("beams", prompt(50), beams(n=3))
    found = {}
    for i in range(2000):
        if not engine.has_work:
            break
        if i % 3 == 2 and engine.scheduler.running:
            engine.scheduler.begun.preempt(engine.scheduler.running[-1], way)
        found |= {(d.request_id, d.index): list(d.token_ids) for d in engine.step()}
        engine.check_integrity()
    assert found == expected


def test_beams_that_do_not_fit_any_more_are_given_up(make_engine: MakeEngine) -> None:
    """Beams cannot go on one by one as samples do."""
    engine = make_engine(kv_memory_bytes=60 * BLOCK_BYTES, prefix_cache=False)
    engine.submit("beams", prompt(100), beams(60, n=4))
    engine.submit("sound", prompt(10), GREEDY)
    for _ in range(6):
        assert not [delta for delta in engine.step() if delta.error]
    engine.set_budget(engine.memory.least_budget_bytes, 1)
    errors = [delta for delta in steps(engine) if delta.error is not None]
    assert [delta.request_id for delta in errors] == ["beams"]
    assert isinstance(errors[0].error, EngineError)


@pytest.mark.parametrize(
    ("params", "field"),
    [({"n": 33}, "n"), ({"n": 2, "best_of": 40}, "best_of"), ({"n": 30, "max_tokens": 190}, "n")],
)
def test_what_cannot_run_together_is_refused_at_once(
    make_engine: MakeEngine, params: dict[str, int], field: str
) -> None:
    engine = make_engine(kv_memory_bytes=60 * BLOCK_BYTES)
    with pytest.raises(RequestError) as error:
        engine.submit("many", prompt(10), SamplingParams(**params))
    assert error.value.param == field
    assert not engine.has_work


@pytest.mark.parametrize(
    ("view", "searches", "policy"),
    [("auto", True, "block_table"), ("auto", False, "auto"), ("region", True, "region"), ("region", False, "region")],
)
def test_forked_beams_are_read_through_block_tables(
    make_engine: MakeEngine, view: str, searches: bool, policy: str
) -> None:
    """Beams are forked in most steps, and a region would be mapped anew for each; unless regions are configured."""
    engine = make_engine(kv_view=view)
    engine.submit("n", prompt(20), samples(4, n=2, use_beam_search=searches))
    engine.step()
    memories = [request.memory for request in engine.scheduler.unfinished()]
    assert [memory.policy for memory in memories if memory is not None] == [view, policy]


# ---- failures ----


@pytest.mark.parametrize(
    ("failing", "others", "error"), [("a", "", ValueError), ("a", "b", ValueError), ("ab", "", RequestError)]
)
def test_requests_that_cannot_be_sampled_fail_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, failing: str, others: str, error: type[Exception]
) -> None:
    """Unless all fail, and not by their own fault (`test_a_step_that_fails_loses_nothing`)."""
    real = sampler.launch_sampling

    def sample(logits: torch.Tensor, states: Any, positions: Any = None) -> Any:
        if any(chr(state.params.seed) in failing for state in states):
            raise error("injected")
        return real(logits, states, positions)

    for module in (token_selection, sampler):
        monkeypatch.setattr(module, "launch_sampling", sample)
    for name in failing + others:
        engine.submit(name, prompt(10), samples(4, seed=ord(name)))
    deltas = list(steps(engine))
    assert "".join(delta.request_id for delta in deltas if delta.error is not None) == failing
    assert "".join(delta.request_id for delta in deltas if delta.error is None) == 4 * others


# ---- forks ----


def test_forks_of_running_and_of_ended_requests(make_engine: MakeEngine, folder: Path) -> None:
    """They go on as if the request had gone on."""
    engine = make_engine(folder)
    engine.submit("whole", prompt(50), greedy(2 * NEW_TOKENS))
    whole = answers(engine)["whole"]
    engine.submit("parent", prompt(50), GREEDY)
    tokens: list[int] = []
    while len(tokens) < 5:
        tokens += [token for delta in engine.step() for token in delta.token_ids]
    engine.fork("parent", "running", greedy(2 * NEW_TOKENS - len(tokens), n=2))
    found = outputs(engine)
    assert found["running", 0] == found["running", 1] == whole[len(tokens) :]
    assert tokens + found["parent", 0] == whole[:NEW_TOKENS]
    engine.fork("parent", "ended", GREEDY)
    deltas = list(steps(engine))
    assert [token for delta in deltas for token in delta.token_ids] == whole[NEW_TOKENS:]
    assert deltas[-1].num_cached_tokens >= (50 + NEW_TOKENS - 1) // 16 * 16  # all but a block that was not full


def test_forks_that_share_nothing_wait_from_when_they_were_made(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: they counted as waiting since the machine was started."""
    monkeypatch.setattr(engine.memory, "fork", raising(VmemError("injected")))
    start = time.perf_counter()
    engine.submit("n", prompt(10), samples(4, n=2, seed=5))
    waited_s = {delta.index: delta.queue_s for delta in steps(engine)}
    queue_s = engine.load.take_activity().queue_s
    assert len(queue_s) == 2
    assert list(waited_s.values()) == list(queue_s)
    assert all(0 <= waited < time.perf_counter() - start for waited in queue_s)


def test_beams_are_forked_when_they_have_ended(engine: Engine) -> None:
    engine.submit("beams", prompt(50), beams(6, n=2))
    with pytest.raises(RequestError, match="has not ended"):
        engine.fork("beams", "fork", GREEDY)
    found = outputs(engine)
    engine.fork("beams", "fork", GREEDY, index=1)
    fork = answers(engine)["fork"]
    engine.submit("same", prompt(50) + found["beams", 1], GREEDY)
    assert answers(engine)["same"] == fork


def test_one_output_that_fails_ends_its_request_and_nobody_elses() -> None:
    """The step went on to rows of a request that was not there any more, and failed everybody's."""
    engine = engines.engine_of("builtin")
    params = SamplingParams(n=2, max_tokens=8, structure=Structure("regex", "ab"), bad_words=["b", "ab"])
    engine.submit("contradiction", prompt(20), params)
    engine.submit("victim", prompt(20, 1), GREEDY)
    deltas = run(engine)
    assert [type(d.error) for d in deltas["contradiction"] if d.finished] == [RequestError]
    assert sum(len(d.token_ids) for d in deltas["victim"]) == NEW_TOKENS
    engine.close()


def test_few_ended_outputs_are_remembered(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were kept with all they had been computed with: gigabytes."""
    monkeypatch.setattr(ended_outputs, "_ENDED_OUTPUTS", 2)
    for name in "abc":
        engine.submit(name, prompt(20), samples(2, logit_bias={17: 5.0}))
        run(engine)
        ended = engine.decoder.ended.get(name, 0)
        assert ended is not None
        assert not ended.params.logit_bias
    with pytest.raises(RequestError, match="is no longer kept"):
        engine.fork("a", "fork", GREEDY)
    engine.fork("b", "fork", GREEDY)
    assert len(answers(engine)["fork"]) == NEW_TOKENS


# ---- log probabilities of prompts ----


def test_beams_hand_on_what_their_prompt_had(engine: Engine) -> None:
    for i in range(3):
        engine.submit(str(i), prompt(40, i), beams(6, n=3, prompt_logprobs=1))
    assert [len(d.prompt_logprobs) for d in steps(engine) if d.index == 0] == [39] * 3


def test_a_step_has_few_logits_of_prompts(make_engine: MakeEngine) -> None:
    """Each request had a bound of its own, and all together made gigabytes."""
    engine = make_engine(max_num_batched_tokens=1024, max_model_len=300)
    for i in range(4):
        engine.submit(str(i), prompt(150, i), samples(1, prompt_logprobs=0))
    nums: list[int] = []
    engine.model.module.register_forward_hook(lambda _, __, out: nums.append(out.logits.shape[1]))
    deltas = list(steps(engine))
    assert max(nums) <= 128
    assert [len(d.prompt_logprobs) for d in deltas] == [149] * 4


def test_prompt_logprobs(make_engine: MakeEngine, folder: Path) -> None:
    """Of every token, cached prefixes and chunks or not."""
    engine = make_engine(folder)
    tokens = prompt(100)
    engine.submit("before", tokens, GREEDY)
    run(engine)
    engine.submit("asked", tokens, SamplingParams(max_tokens=3, temperature=0, prompt_logprobs=2))
    engine.submit("beside", prompt(30, 3), GREEDY)
    deltas = run(engine)["asked"]
    assert [len(delta.prompt_logprobs) for delta in deltas] == [99, 0, 0]
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0].log_softmax(dim=-1)
    for i, logprob in enumerate(deltas[0].prompt_logprobs):
        assert logprob.token_id == tokens[i + 1]
        assert logprob.logprob == pytest.approx(expected[i, tokens[i + 1]].item(), abs=1e-3)
        assert logprob.rank == 1 + (expected[i] > expected[i, tokens[i + 1]]).sum().item()
        assert [token for token, _ in logprob.top] == expected[i].topk(2).indices.tolist()


# ---- drafts ----


@pytest.mark.parametrize("params", [GREEDY, samples(seed=3)])
@pytest.mark.parametrize("model", ["llama", "gemma2"])
def test_drafts_change_nothing(make_engine: MakeEngine, model: str, params: SamplingParams) -> None:
    """Right and wrong guesses of any length, in any company."""
    engine = make_engine(model)
    prompts = {str(i): prompt(20 + 30 * i, i) for i in range(3)}
    for request_id, tokens in prompts.items():
        engine.submit(request_id, tokens, params)
    expected = answers(engine)
    schedule = engine.scheduler.schedule
    random = torch.Generator().manual_seed(1)

    def guessing(_: Any, **ahead: bool) -> Any:
        drafts = {}
        for request in engine.scheduler.decoding():
            done = request.num_output_tokens
            right = expected[request.request_id][done : done + int(torch.randint(6, (1,), generator=random))]
            if right and torch.rand(1, generator=random) < 0.5:
                right[-1] = (right[-1] + 1) % VOCAB_SIZE
            drafts[request] = right[: request.max_tokens - done - 1]
        scheduled = schedule(drafts, **ahead)
        decodes = [s for s in scheduled if s.start >= len(s.sequence.prompt_token_ids)]
        assert all(s.num_tokens == 1 + len(s.drafts) for s in decodes), "what was accepted is not computed again"
        return scheduled

    engine.scheduler.schedule = guessing  # type: ignore[method-assign]
    for request_id, tokens in prompts.items():
        engine.submit(request_id, tokens, params)
    deltas = run(engine)
    assert {name: engines.tokens_of(found) for name, found in deltas.items()} == expected
    assert sum(len(delta.token_ids) - 1 for found in deltas.values() for delta in found) > NEW_TOKENS
