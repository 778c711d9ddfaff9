"""Several outputs of one prompt: samples, beams, forks, checked drafts, in one batch and in little memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from folio.app.config.engine import EngineConfig
from folio.app.engine import Delta, SamplingParams, Structure
from folio.app.engine.engine import Engine
from folio.app.engine.request.request import ended_outputs
from folio.app.engine.sampling import sampler
from folio.app.engine.step import token_selection
from folio.app.errors import EngineError, RequestError
from folio.vmem import VmemError
from tests.conftest import ARCHITECTURES, HYBRIDS, VOCAB_SIZE, MakeCheckpoint

NEW_TOKENS = 12
GREEDY = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
MODELS = {name: ARCHITECTURES[name] for name in ("llama", "gemma2")} | {"bamba": ("bamba", HYBRIDS["bamba"])}


def prompt(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCAB_SIZE - 1, (count,), generator=generator).tolist()


def make_engine(folder: Path, **settings: Any) -> Engine:
    defaults = {"max_model_len": 200, "max_num_batched_tokens": 64, "kv_memory_bytes": 16 << 20, "max_num_seqs": 32}
    return Engine(EngineConfig(model=str(folder), skip_tokenizer_init=True, dtype="float32", **(defaults | settings)))


def run(engine: Engine) -> dict[tuple[str, int], list[int]]:
    """Steps until all is done; outputs by request and index."""
    outputs: dict[tuple[str, int], list[int]] = {}
    for delta in steps(engine):
        assert delta.error is None, delta.error
        outputs.setdefault((delta.request_id, delta.index), []).extend(delta.token_ids)
    return outputs


def steps(engine: Engine) -> Iterator[Delta]:
    for _ in range(2000):
        if not engine.has_work:
            break
        yield from engine.step()
        engine.check_integrity()
    assert not engine.has_work


@pytest.fixture(params=list(MODELS))
def folder(request: pytest.FixtureRequest, make_checkpoint: MakeCheckpoint) -> Path:
    kind, settings = MODELS[request.param]
    return make_checkpoint(kind, **settings)


@pytest.fixture(scope="session")
def llama(make_checkpoint: MakeCheckpoint) -> Path:
    kind, settings = ARCHITECTURES["llama"]
    return make_checkpoint(kind, **settings)


# ---- parallel samples ----


def test_samples_share_one_prefill(folder: Path) -> None:
    engine = make_engine(folder)
    engine.submit("n", prompt(70), SamplingParams(n=4, max_tokens=NEW_TOKENS, seed=5, temperature=20, ignore_eos=True))
    computed = 0
    outputs: dict[int, list[int]] = {}
    while engine.has_work:
        for delta in engine.step():
            outputs.setdefault(delta.index, []).extend(delta.token_ids)
        computed += int(engine.scheduler._scheduled and sum(s.num_tokens for s in engine.scheduler._scheduled))
        engine.check_integrity()
    assert computed == 70 + 4 * (NEW_TOKENS - 1)
    assert len({tuple(tokens) for tokens in outputs.values()}) == 4
    # Every one of them is what its own random numbers give, alone or not.
    for count in (1, 3):
        engine.submit(
            "again", prompt(70), SamplingParams(n=count, max_tokens=NEW_TOKENS, seed=5, temperature=20, ignore_eos=True)
        )
        engine.submit("other", prompt(33, 1), SamplingParams(n=2, max_tokens=7, ignore_eos=True))
        again = run(engine)
        for index in range(count):
            assert again["again", index] == outputs[index]
    engine.close()


def test_the_last_delta_of_a_request_says_so(llama: Path) -> None:
    engine = make_engine(llama)
    engine.submit("n", prompt(20), SamplingParams(n=3, max_tokens=4, seed=1, stop_token_ids=()))
    deltas = list(steps(engine))
    assert [delta.ends_request for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    assert sum(delta.finished for delta in deltas) == 3
    engine.close()


def test_best_of_returns_the_likeliest(llama: Path) -> None:
    """They are the likeliest of the same samples, and nothing is said before all have ended."""
    engine = make_engine(llama)
    sampled = SamplingParams(n=6, max_tokens=NEW_TOKENS, seed=9, ignore_eos=True, temperature=2.0)
    engine.submit("all", prompt(40), sampled)
    every = run(engine)
    model = AutoModelForCausalLM.from_pretrained(llama).eval()

    def mean_logprob(tokens: list[int]) -> float:
        with torch.inference_mode():
            logprobs = model(torch.tensor([prompt(40) + tokens])).logits[0].log_softmax(dim=-1)
        return sum(logprobs[39 + i, token].item() for i, token in enumerate(tokens)) / len(tokens)

    best = sorted(every.values(), key=mean_logprob, reverse=True)[:2]
    engine.submit(
        "best",
        prompt(40),
        SamplingParams(n=2, best_of=6, max_tokens=NEW_TOKENS, seed=9, ignore_eos=True, temperature=2.0),
    )
    deltas = list(steps(engine))
    assert [list(delta.token_ids) for delta in deltas] == best
    assert [(delta.index, delta.num_unfinished, delta.logprobs) for delta in deltas] == [(0, 1, ()), (1, 0, ())]
    engine.close()


# ---- beams ----


@pytest.mark.thirds
@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [1.0, -0.5, 2.0])
def test_beams_equal_transformers(folder: Path, early_stopping: Any, length_penalty: float) -> None:
    """Tokens and scores, some beams ending early."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    greedy = model.generate(torch.tensor([prompt(30)]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None)
    ends = sorted({greedy[0, 33].item(), greedy[0, 36].item()})
    engine = make_engine(folder)
    params = SamplingParams(
        n=3,
        best_of=4,
        use_beam_search=True,
        max_tokens=NEW_TOKENS,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        stop_token_ids=ends,
        ignore_eos=True,
    )
    prompts = [prompt(30), prompt(75, 1)]
    for i, tokens in enumerate(prompts):
        engine.submit(str(i), tokens, params)
    found: dict[str, list[Delta]] = {}
    for delta in steps(engine):
        found.setdefault(delta.request_id, []).append(delta)
    for i, tokens in enumerate(prompts):
        expected = model.generate(
            torch.tensor([tokens]),
            num_beams=4,
            num_return_sequences=3,
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=ends,
            pad_token_id=0,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            output_scores=True,
            return_dict_in_generate=True,
        )
        for delta, sequence, score in zip(found[str(i)], expected.sequences, expected.sequences_scores, strict=True):
            output = sequence[len(tokens) :].tolist()
            assert list(delta.token_ids) == output[: len(delta.token_ids)]
            assert set(output[len(delta.token_ids) :]) <= {0, *ends}
            assert delta.score == pytest.approx(score.item(), abs=1e-4)
    engine.close()


def test_beams_cost_no_prefill_and_share_blocks(llama: Path) -> None:
    engine = make_engine(llama)
    engine.submit(
        "beams", prompt(90), SamplingParams(n=4, use_beam_search=True, max_tokens=NEW_TOKENS, ignore_eos=True)
    )
    counts, most_pages = [], 0
    while engine.has_work:
        engine.step()
        counts.append(sum(s.num_tokens for s in engine.scheduler._scheduled))
        most_pages = max(most_pages, engine.report().active_bytes)
    assert counts == [64, 26] + [4] * (NEW_TOKENS - 1)
    alone = engine.memory.pages_for(90 + NEW_TOKENS) * engine.memory.groups[0].layout.page_bytes
    assert most_pages < 2 * alone
    engine.check_integrity()
    engine.close()


@pytest.mark.parametrize("way", ["swap", "recompute"])
def test_preempted_beams_go_on_together(folder: Path, way: str) -> None:
    params = SamplingParams(n=3, use_beam_search=True, max_tokens=NEW_TOKENS, ignore_eos=True)
    engine = make_engine(folder)
    engine.submit("beams", prompt(50), params)
    expected = run(engine)
    engine.submit("beams", prompt(50), params)
    found: list[Delta] = []
    for i in range(2000):
        if not engine.has_work:
            break
        if i % 3 == 2 and engine.scheduler.running:
            engine.scheduler.begun.preempt(engine.scheduler.running[-1], way)  # type: ignore[arg-type]
        found += engine.step()
        engine.check_integrity()
    assert {(d.request_id, d.index): list(d.token_ids) for d in found} == expected
    engine.close()


def test_beams_that_do_not_fit_any_more_are_given_up(llama: Path) -> None:
    """Beams cannot go on one by one as samples do."""
    engine = make_engine(llama, kv_memory_bytes=60 * 16 * 768, max_model_len=200, prefix_cache=False)
    params = SamplingParams(n=4, use_beam_search=True, max_tokens=60, ignore_eos=True)
    engine.submit("beams", prompt(100), params)
    engine.submit("sound", prompt(10), GREEDY)
    for _ in range(6):
        assert not [delta for delta in engine.step() if delta.error]
    engine.set_budget(engine.memory.least_budget_bytes, 1)
    errors = [delta for delta in steps(engine) if delta.error is not None]
    assert [delta.request_id for delta in errors] == ["beams"]
    assert isinstance(errors[0].error, EngineError)
    engine.close()


@pytest.mark.parametrize(
    ("params", "field"),
    [
        (SamplingParams(n=33), "n"),
        (SamplingParams(n=2, best_of=40), "best_of"),
        (SamplingParams(n=30, max_tokens=190), "n"),
    ],
)
def test_what_cannot_run_together_is_refused_at_once(llama: Path, params: SamplingParams, field: str) -> None:
    engine = make_engine(llama, kv_memory_bytes=60 * 16 * 768)
    with pytest.raises(RequestError) as error:
        engine.submit("many", prompt(10), params)
    assert error.value.param == field
    assert not engine.has_work
    engine.close()


@pytest.mark.parametrize(
    ("view", "beams", "policy"),
    [("auto", True, "block_table"), ("auto", False, "auto"), ("region", True, "region"), ("region", False, "region")],
)
def test_forked_beams_are_read_through_block_tables(llama: Path, view: str, beams: bool, policy: str) -> None:
    """Beams are forked in most steps, and a region would be mapped anew for each; unless regions are configured."""
    engine = make_engine(llama, kv_view=view)
    engine.submit("n", prompt(20), SamplingParams(n=2, use_beam_search=beams, max_tokens=4, ignore_eos=True))
    engine.step()
    memories = [request.memory for request in engine.scheduler.unfinished()]
    assert [memory.policy for memory in memories if memory is not None] == [view, policy]
    engine.cancel("n")
    engine.close()


# ---- failures ----


@pytest.mark.parametrize(
    ("failing", "others", "error"), [("a", "", ValueError), ("a", "b", ValueError), ("ab", "", RequestError)]
)
def test_requests_that_cannot_be_sampled_fail_alone(
    llama: Path, monkeypatch: pytest.MonkeyPatch, failing: str, others: str, error: type[Exception]
) -> None:
    engine = make_engine(llama)
    fail_to_sample(failing, error, monkeypatch)
    for name in failing + others:
        engine.submit(name, prompt(10), SamplingParams(max_tokens=4, seed=ord(name), ignore_eos=True))
    deltas = list(steps(engine))
    assert "".join(delta.request_id for delta in deltas if delta.error is not None) == failing
    assert "".join(delta.request_id for delta in deltas if delta.error is None) == 4 * others
    engine.close()


def test_what_fails_for_all_requests_is_no_requests_failure(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(llama)
    for name in "ab":
        engine.submit(name, prompt(10), SamplingParams(max_tokens=4, seed=ord(name), ignore_eos=True))
    with monkeypatch.context() as patch:
        fail_to_sample("ab", ValueError, patch)
        with pytest.raises(ValueError, match="injected"):
            engine.step()
    assert [len(tokens) for tokens in run(engine).values()] == [4, 4]
    engine.close()


def fail_to_sample(failing: str, error: type[Exception], patch: pytest.MonkeyPatch) -> None:
    """Fail for requests whose seed is one of these letters."""

    def sample(logits: torch.Tensor, states: Any, positions: Any = None) -> Any:
        if any(chr(state.params.seed) in failing for state in states):
            raise error("injected")
        return real(logits, states, positions)

    real = sampler.launch_sampling
    for module in (token_selection, sampler):
        patch.setattr(module, "launch_sampling", sample)


# ---- forks ----


def test_forks_of_running_and_of_ended_requests(folder: Path) -> None:
    """They go on as if the request had gone on."""
    engine = make_engine(folder)
    longer = SamplingParams(max_tokens=2 * NEW_TOKENS, temperature=0, ignore_eos=True)
    engine.submit("whole", prompt(50), longer)
    whole = run(engine)["whole", 0]
    engine.submit("parent", prompt(50), GREEDY)
    tokens: list[int] = []
    while len(tokens) < 5:
        tokens += [token for delta in engine.step() for token in delta.token_ids]
    rest = SamplingParams(n=2, max_tokens=2 * NEW_TOKENS - len(tokens), temperature=0, ignore_eos=True)
    engine.fork("parent", "running", rest)
    outputs = run(engine)
    assert outputs["running", 0] == outputs["running", 1] == whole[len(tokens) :]
    assert tokens + outputs["parent", 0] == whole[:NEW_TOKENS]
    engine.fork("parent", "ended", SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True))
    deltas = list(steps(engine))
    assert [token for delta in deltas for token in delta.token_ids] == whole[NEW_TOKENS:]
    assert deltas[-1].num_cached_tokens >= (50 + NEW_TOKENS - 1) // 16 * 16  # all but a block that was not full
    with pytest.raises(RequestError, match="is not here"):
        engine.fork("nobody", "nothing", rest)
    engine.close()


def test_forks_that_share_nothing_wait_from_when_they_were_made(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: they counted as waiting since the machine was started."""
    engine = make_engine(llama)

    def no_region(*_: object) -> None:
        raise VmemError("injected")

    monkeypatch.setattr(engine.memory, "fork", no_region)
    start = time.perf_counter()
    engine.submit("n", prompt(10), SamplingParams(n=2, max_tokens=4, seed=5, ignore_eos=True))
    waited_s = {delta.index: delta.queue_s for delta in steps(engine)}
    queue_s = engine.load.take_activity().queue_s
    assert len(queue_s) == 2
    assert list(waited_s.values()) == list(queue_s)
    assert all(0 <= waited < time.perf_counter() - start for waited in queue_s)
    engine.close()


def test_beams_are_forked_when_they_have_ended(llama: Path) -> None:
    engine = make_engine(llama)
    engine.submit("beams", prompt(50), SamplingParams(n=2, use_beam_search=True, max_tokens=6, ignore_eos=True))
    with pytest.raises(RequestError, match="has not ended"):
        engine.fork("beams", "fork", GREEDY)
    beams = run(engine)
    engine.fork("beams", "fork", GREEDY, index=1)
    fork = run(engine)["fork", 0]
    engine.submit("same", prompt(50) + beams["beams", 1], GREEDY)
    assert run(engine)["same", 0] == fork
    engine.close()


def test_one_output_that_fails_ends_its_request_and_nobody_elses() -> None:
    """The step went on to rows of a request that was not there any more, and failed everybody's."""
    engine = Engine(EngineConfig(model="builtin", kv_memory_bytes=16 << 20))
    params = SamplingParams(n=2, max_tokens=8, structure=Structure("regex", "ab"), bad_words=["b", "ab"])
    engine.submit("contradiction", prompt(20), params)
    engine.submit("victim", prompt(20, 1), GREEDY)
    deltas = list(steps(engine))
    assert [type(d.error) for d in deltas if d.request_id == "contradiction" and d.finished] == [RequestError]
    assert sum(len(d.token_ids) for d in deltas if d.request_id == "victim") == NEW_TOKENS
    engine.close()


def test_few_ended_outputs_are_remembered(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were kept with all they had been computed with: gigabytes."""
    monkeypatch.setattr(ended_outputs, "_ENDED_OUTPUTS", 2)
    engine = make_engine(llama)
    for name in "abc":
        engine.submit(name, prompt(20), SamplingParams(max_tokens=2, ignore_eos=True, logit_bias={17: 5.0}))
        run(engine)
        ended = engine.decoder.ended.get(name, 0)
        assert ended is not None
        assert not ended.request.params.logit_bias
    with pytest.raises(RequestError, match="is not here"):
        engine.fork("a", "fork", GREEDY)
    engine.fork("b", "fork", GREEDY)
    assert len(run(engine)["fork", 0]) == NEW_TOKENS
    engine.close()


# ---- log probabilities of prompts ----


def test_beams_hand_on_what_their_prompt_had(llama: Path) -> None:
    engine = make_engine(llama)
    params = SamplingParams(n=3, use_beam_search=True, max_tokens=6, prompt_logprobs=1, ignore_eos=True)
    for i in range(3):
        engine.submit(str(i), prompt(40, i), params)
    deltas = list(steps(engine))
    assert [len(d.prompt_logprobs) for d in deltas if d.index == 0] == [39] * 3
    engine.close()


def test_a_step_has_few_logits_of_prompts(llama: Path) -> None:
    """Each request had a bound of its own, and all together made gigabytes."""
    engine = make_engine(llama, max_num_batched_tokens=1024, max_model_len=300)
    for i in range(4):
        engine.submit(str(i), prompt(150, i), SamplingParams(max_tokens=1, prompt_logprobs=0, ignore_eos=True))
    most = 0
    deltas = []
    while engine.has_work:
        deltas += engine.step()
        most = max(most, sum(s.num_logits for s in engine.scheduler._scheduled))
        engine.check_integrity()
    assert most <= 128
    assert [len(d.prompt_logprobs) for d in deltas] == [149] * 4
    engine.close()


def test_prompt_logprobs(folder: Path) -> None:
    """Of every token, cached prefixes and chunks or not."""
    engine = make_engine(folder)
    tokens = prompt(100)
    engine.submit("before", tokens, GREEDY)
    run(engine)
    engine.submit("asked", tokens, SamplingParams(max_tokens=3, temperature=0, prompt_logprobs=2))
    engine.submit("beside", prompt(30, 3), GREEDY)
    deltas = [delta for delta in steps(engine) if delta.request_id == "asked"]
    assert [len(delta.prompt_logprobs) for delta in deltas] == [99, 0, 0]
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0].log_softmax(dim=-1)
    for i, logprob in enumerate(deltas[0].prompt_logprobs):
        assert logprob.token_id == tokens[i + 1]
        assert logprob.logprob == pytest.approx(expected[i, tokens[i + 1]].item(), abs=1e-3)
        assert logprob.rank == 1 + (expected[i] > expected[i, tokens[i + 1]]).sum().item()
        assert [token for token, _ in logprob.top] == expected[i].topk(2).indices.tolist()
    engine.close()


# ---- drafts ----


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(max_tokens=NEW_TOKENS, seed=3, ignore_eos=True)])
@pytest.mark.parametrize("model", ["llama", "gemma2"])
def test_drafts_change_nothing(model: str, params: SamplingParams, make_checkpoint: MakeCheckpoint) -> None:
    """Right and wrong guesses of any length, in any company."""
    kind, settings = ARCHITECTURES[model]
    engine = make_engine(make_checkpoint(kind, **settings))
    prompts = {str(i): prompt(20 + 30 * i, i) for i in range(3)}
    for request_id, tokens in prompts.items():
        engine.submit(request_id, tokens, params)
    expected = run(engine)
    schedule = engine.scheduler.schedule
    random = torch.Generator().manual_seed(1)
    accepted = 0

    def guessing(_: Any, **ahead: bool) -> Any:
        drafts = {}
        for request in engine.scheduler.decoding():
            done = request.num_output_tokens
            right = expected[request.request_id, 0][done : done + int(torch.randint(6, (1,), generator=random))]
            if right and torch.rand(1, generator=random) < 0.5:
                right[-1] = (right[-1] + 1) % VOCAB_SIZE
            drafts[request] = right[: request.max_tokens - done - 1]
        return schedule(drafts, **ahead)

    engine.scheduler.schedule = guessing  # type: ignore[method-assign]
    for request_id, tokens in prompts.items():
        engine.submit(request_id, tokens, params)
    outputs: dict[tuple[str, int], list[int]] = {}
    for delta in steps(engine):
        outputs.setdefault((delta.request_id, delta.index), []).extend(delta.token_ids)
        accepted += len(delta.token_ids) - 1
    assert outputs == expected
    assert accepted > NEW_TOKENS
    engine.close()
