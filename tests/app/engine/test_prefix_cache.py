"""What the engine does with the prefix cache: nothing is computed twice that need not be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from folio.app.engine import LLM
from folio.app.engine.engine import Engine, EngineConfig
from folio.app.engine.layers.batch import StepBatch
from folio.app.engine.sampling.params import SamplingParams
from folio.app.engine.step import token_selection
from folio.app.errors import ConfigError, RequestError
from tests.conftest import ARCHITECTURES, HYBRIDS, MakeCheckpoint, tokens

GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


class Counted:
    """An engine, and how many tokens each of its steps computed."""

    def __init__(self, make_checkpoint: MakeCheckpoint, model: str = "llama", **settings: object) -> None:
        config = HYBRIDS[model] if model in HYBRIDS else ARCHITECTURES[model][1]
        defaults = {"kv_memory_bytes": 16 << 20, "skip_tokenizer_init": True, "block_tokens": 16, "max_num_seqs": 32}
        folder = str(make_checkpoint(model, **config))
        self.engine = Engine(EngineConfig(model=folder, **(defaults | settings)))  # type: ignore[arg-type]
        self.steps: list[int] = []
        self.cached: dict[str, int] = {}
        run = self.engine.executor._runner.run

        def count(batch: StepBatch) -> torch.Tensor:
            self.steps.append(len(batch.token_ids))
            return run(batch)

        self.engine.executor._runner.run = count  # type: ignore[method-assign]

    def run(self) -> dict[str, list[int]]:
        outputs: dict[str, list[int]] = {}
        while self.engine.has_work:
            for delta in self.engine.step():
                assert delta.error is None
                outputs.setdefault(delta.request_id, []).extend(delta.token_ids)
                self.cached[delta.request_id] = delta.num_cached_tokens
            self.engine.check_integrity()
        return outputs


@pytest.fixture
def counted(make_checkpoint: MakeCheckpoint) -> Iterator[Counted]:
    counted = Counted(make_checkpoint)
    yield counted
    counted.engine.check_integrity()
    counted.engine.close()


def test_requests_that_come_together_compute_their_prefix_once(counted: Counted) -> None:
    for i in range(8):
        counted.engine.submit(str(i), tokens(256) + tokens(16, 1 + i), GREEDY)
    counted.run()
    assert counted.steps[0] == 256 + 8 * 16
    assert [counted.cached[str(i)] for i in range(8)] == [0] + [256] * 7


def test_who_wants_what_is_being_computed_waits_for_it(make_checkpoint: MakeCheckpoint) -> None:
    """The prefix takes four steps; meanwhile nobody computes any of it a second time."""
    counted = Counted(make_checkpoint, max_num_batched_tokens=64)
    outputs = {}
    for i in range(3):
        counted.engine.submit(str(i), tokens(256) + tokens(16, 1 + i), GREEDY)
    outputs = counted.run()
    assert counted.steps[:4] == [64] * 4
    assert [counted.cached[str(i)] for i in range(3)] == [0, 256, 256]
    counted.engine.memory.tree.clear()
    for i in range(3):
        counted.engine.submit(str(i), tokens(256) + tokens(16, 1 + i), GREEDY)
        assert counted.run() == {str(i): outputs[str(i)]}
    counted.engine.close()


def test_a_second_turn_computes_only_what_is_new(counted: Counted) -> None:
    counted.engine.submit("first", tokens(50), GREEDY)
    answer = counted.run()["first"]
    counted.steps.clear()
    counted.engine.submit("second", tokens(50) + answer + tokens(10, 3), GREEDY)
    counted.run()
    # 57 tokens were computed, three blocks of 16 are whole.
    assert counted.cached["second"] == 48
    assert counted.steps[0] == 68 - 48


def test_a_whole_prompt_in_the_cache_computes_one_token(counted: Counted) -> None:
    outputs = []
    for i in range(2):
        counted.engine.submit(str(i), tokens(64), GREEDY)
        outputs.append(counted.run()[str(i)])
    assert outputs[0] == outputs[1]
    assert counted.cached["1"] == 63
    assert counted.steps[8] == 1


def test_another_salt_shares_nothing(counted: Counted) -> None:
    for i, salt in enumerate((None, "a", "b", "a")):
        counted.engine.submit(str(i), tokens(64), GREEDY, cache_salt=salt)
        counted.run()
    assert [counted.cached[str(i)] for i in range(4)] == [0, 0, 0, 63]


def test_tenants_share_nothing_and_users_do(counted: Counted) -> None:
    """Regardless of how their names and salts are put together."""
    whose: list[tuple[dict[str, str], int]] = [
        ({}, 0),
        ({"tenant": "a"}, 0),
        ({"tenant": "a", "user": "u"}, 63),
        ({"user": "u"}, 63),
        ({"user": "a"}, 63),
        ({"tenant": "b"}, 0),
        ({"tenant": "a", "cache_salt": "b"}, 0),
        ({"tenant": "ab", "cache_salt": ""}, 0),
        ({"cache_salt": "a"}, 0),
        ({"tenant": "a", "cache_salt": "b"}, 63),
    ]
    for i, (options, cached) in enumerate(whose):
        counted.engine.submit(str(i), tokens(64), GREEDY, **options)  # type: ignore[arg-type]
        counted.run()
        assert counted.cached[str(i)] == cached, options


def test_tenants_need_not_be_isolated(make_checkpoint: MakeCheckpoint) -> None:
    counted = Counted(make_checkpoint, isolate_tenants=False)
    for i, tenant in enumerate(("a", "b")):
        counted.engine.submit(str(i), tokens(64), GREEDY, tenant=tenant)
        counted.run()
    assert counted.cached["1"] == 63
    counted.engine.close()


def test_what_is_pinned_for_a_tenant_is_its_own(counted: Counted) -> None:
    """Nor do tenants see what the operator has pinned for everybody else."""
    counted.engine.pin("pin", "rules", tokens(48), tenant="a")
    counted.engine.pin("pin for all", "all", tokens(48, 1))
    counted.run()
    for i, (options, seed, cached) in enumerate(
        [({"tenant": "a"}, 0, 48), ({"tenant": "b"}, 0, 0), ({}, 0, 0), ({"tenant": "b"}, 1, 0), ({}, 1, 48)]
    ):
        counted.engine.submit(str(i), [*tokens(48, seed), i], GREEDY, **options)  # type: ignore[arg-type]
        counted.run()
        assert counted.cached[str(i)] == cached
    counted.engine.unpin("rules")
    counted.engine.unpin("all")


def test_forks_stay_with_their_tenant(counted: Counted) -> None:
    """Of a request that has ended too: what it has computed is found by its fork, and by nobody else."""
    counted.engine.submit("0", tokens(64), GREEDY, tenant="a", cache_salt="s")
    counted.run()
    counted.engine.fork("0", "fork", GREEDY)
    counted.run()
    counted.engine.submit("1", tokens(64), GREEDY, tenant="b", cache_salt="s")
    counted.run()
    assert counted.cached["fork"] >= 63
    assert counted.cached["1"] == 0


def test_a_cancelled_prefill_leaves_what_it_has_computed(make_checkpoint: MakeCheckpoint) -> None:
    counted = Counted(make_checkpoint, max_num_batched_tokens=64)
    counted.engine.submit("0", tokens(256), GREEDY)
    counted.engine.step()
    counted.engine.submit("1", tokens(256), GREEDY)
    counted.engine.step()
    counted.engine.cancel("0")
    counted.run()
    assert counted.cached["1"] == 128
    counted.engine.close()


@pytest.mark.parametrize("model", ["bamba", "falcon_h1", "qwen3_next"])
def test_a_recurrent_state_is_found_again(model: str, make_checkpoint: MakeCheckpoint) -> None:
    """Two prompts that branch leave a state where they do; the third begins there, and the tokens are the same."""
    counted = Counted(make_checkpoint, model, prefix_cache_release_s=1e9)
    fresh = Counted(make_checkpoint, model, prefix_cache=False)
    for i in range(4):
        prompt = tokens(100) + tokens(20, 1 + i % 3)
        counted.engine.submit(str(i), prompt, GREEDY)
        fresh.engine.submit(str(i), prompt, GREEDY)
        assert counted.run() == fresh.run()
    assert [counted.cached[str(i)] for i in range(4)] == [0, 0, 96, 112]
    counted.engine.close()
    fresh.engine.close()


def test_the_lower_priority_number_goes_first(make_checkpoint: MakeCheckpoint) -> None:
    counted = Counted(make_checkpoint, max_num_seqs=1)
    for i, priority in enumerate((1, 1, 0)):
        counted.engine.submit(str(i), tokens(20, i), GREEDY, priority=priority)
    assert list(counted.run()) == ["2", "0", "1"]
    counted.engine.close()


@pytest.mark.parametrize("policy", ["swap", "recompute"])
def test_preemption_changes_nothing_and_lets_nobody_pass(policy: str, make_checkpoint: MakeCheckpoint) -> None:
    """The latest of the lowest priority gives way; as long as it waits nobody is admitted."""
    outputs = []
    for num_blocks in (1000, 12):
        counted = Counted(
            make_checkpoint,
            kv_memory_bytes=num_blocks * 16 * 768,
            max_model_len=160,
            preemption=policy,
            prefix_cache=False,
        )
        scheduler = counted.engine.scheduler
        longer = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
        for i, length in enumerate((60, 31, 47, 16, 90, 5)):
            counted.engine.submit(str(i), tokens(length, i), longer, priority=i % 2)
        finished: dict[str, list[int]] = {}
        while counted.engine.has_work:
            waiting = {g.sort_key for g in scheduler.waiting}
            preempted = {g.sort_key for g in scheduler.preempted}
            for delta in counted.engine.step():
                finished.setdefault(delta.request_id, []).extend(delta.token_ids)
            counted.engine.check_integrity()
            if preempted & {g.sort_key for g in scheduler.preempted}:
                assert {g.sort_key for g in scheduler.waiting} == waiting
            if scheduler.preempted and scheduler.running:
                assert min(g.sort_key for g in scheduler.preempted) > max(g.sort_key for g in scheduler.running)
        assert (scheduler.begun.num_preempted[policy] > 0) == (num_blocks == 12)  # type: ignore[index]
        outputs.append(finished)
        counted.engine.close()
    assert outputs[0] == outputs[1]


def test_a_fork_goes_on_without_computing_again(counted: Counted) -> None:
    counted.engine.submit("parent", tokens(40), GREEDY)
    parent = [token for _ in range(3) for delta in counted.engine.step() for token in delta.token_ids]
    counted.engine.fork("parent", "child", SamplingParams(max_tokens=5, temperature=0, ignore_eos=True))
    outputs = counted.run()
    assert outputs["child"] == outputs["parent"]
    assert len(parent) == 3
    assert counted.steps == [40, 1, 1] + [2] * 5
    assert counted.engine.report().copied_blocks == 1


def test_forks_that_cannot_run_together_are_refused(counted: Counted) -> None:
    with pytest.raises(RequestError, match="is not here"):
        counted.engine.fork("nobody", "child", GREEDY)
    counted.engine.submit("parent", tokens(40), SamplingParams(max_tokens=900))
    with pytest.raises(RequestError, match="in use"):
        counted.engine.fork("parent", "parent", GREEDY)
    counted.engine.memory.pages.budget = 70
    with pytest.raises(RequestError, match="do not fit"):
        counted.engine.fork("parent", "child", SamplingParams(max_tokens=900))
    counted.engine.memory.pages.budget = counted.engine.memory.pages.most
    counted.engine.cancel("parent")


def test_a_pinned_prefix_is_there_from_the_start() -> None:
    system = "You answer in one word. " * 12
    with LLM(
        "builtin",
        kv_memory_bytes=16 << 20,
        pinned_prompts={"rules": system},
        pinned_system_prompts={"chat": system},
        prefix_cache_release_s=0.0,
    ) as llm:
        report = llm.engine.report()
        assert [pin.name for pin in report.pins] == ["rules", "chat"]
        assert report.pinned_bytes > 0
        tokenizer = llm.engine.model.tokenizer
        assert tokenizer is not None
        messages = [{"role": "system", "content": system}, {"role": "user", "content": "What is red?"}]
        for prompt in (
            tokenizer.encode(system + "What is red?"),
            tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False),
        ):
            llm.engine.submit("r", prompt, GREEDY)  # type: ignore[arg-type]
            [delta] = llm.engine.step()
            assert delta.num_cached_tokens >= len(tokenizer.encode(system)) // 16 * 16 - 16
            llm.engine.cancel("r")
        llm.engine.unpin("rules")
        with pytest.raises(RequestError, match="no prefix named 'rules'"):
            llm.engine.unpin("rules")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"pinned_prompts": {"short": "Hi"}}, "too short to pin"),
        ({"pinned_prompts": {"a": "b"}, "pinned_system_prompts": {"a": "c"}}, "both have a"),
        ({"pinned_prompts": {"rules": "x " * 100}, "prefix_cache": False}, "prefix_cache is off"),
        ({"pinned_prompts": {"rules": "x " * 100}, "pin_quota": 0.0}, "may be pinned"),
        ({"pinned_prompts": {"rules": "x " * 100}, "skip_tokenizer_init": True}, "need a tokenizer"),
        ({"pin_quota": 1.5}, "between 0 and 1"),
        ({"preemption": "maybe"}, "choose one of auto, swap, recompute"),
        ({"expected_tokens": 0}, "at least 1"),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        LLM("builtin", kv_memory_bytes=16 << 20, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("model", ["llama", "bamba"])
def test_a_prefix_pinned_after_traffic_stays(model: str, make_checkpoint: MakeCheckpoint) -> None:
    """The pin owned copies of its last block that nobody could find, and lost the ones that had the name."""
    counted = Counted(make_checkpoint, model)
    engine = counted.engine
    engine.submit("before", tokens(70), GREEDY)
    counted.run()
    engine.pin("pin", "rules", tokens(70))
    counted.run()
    for g, group in enumerate(engine.memory.group_memories):
        engine.memory.tree.evict(g, group.pool.num_cached)
    engine.check_integrity()
    engine.submit("after", tokens(70), GREEDY)
    counted.run()
    assert counted.cached["after"] == 64
    engine.close()


def test_who_shares_what_is_not_computed_yet_is_never_swapped(make_checkpoint: MakeCheckpoint) -> None:
    """Its blocks were copied out empty, and came back as computed."""
    counted = Counted(make_checkpoint, preemption="swap")
    engine, scheduler = counted.engine, counted.engine.scheduler
    for i in range(2):
        engine.submit(str(i), tokens(64) + tokens(8, 1 + i), GREEDY)
    scheduler.schedule()
    second = engine.requests["1"].sequences[0]
    assert second.num_computed == 64
    scheduler.begun.preempt(second.request)
    assert second.request.swapped is None
    assert second.num_computed == 0
    scheduler.abort_step()
    fresh = counted.run()
    for i in range(2):
        engine.memory.tree.clear()
        engine.submit(str(i), tokens(64) + tokens(8, 1 + i), GREEDY)
        assert counted.run() == {str(i): fresh[str(i)]}
    engine.close()


def test_forks_that_wait_while_the_budget_is_lowered_go_on_one_by_one(make_checkpoint: MakeCheckpoint) -> None:
    """Admitted together although they did not fit, they were scheduled without memory."""
    counted = Counted(make_checkpoint, kv_memory_bytes=40 * 16 * 768, max_model_len=200, prefix_cache=False)
    engine = counted.engine
    longer = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    engine.submit("0", tokens(150), longer)
    for fork in ("1", "2"):
        engine.fork("0", fork, longer)
    engine.set_budget(13 * 16 * 768, 1)
    outputs = counted.run()
    assert outputs["0"] == outputs["1"] == outputs["2"]
    assert len(outputs["0"]) == 40
    engine.close()


def test_no_more_forks_than_sequences_run_at_once(make_checkpoint: MakeCheckpoint) -> None:
    """The token budget of a step went below zero, and no step worked any more."""
    counted = Counted(make_checkpoint, max_num_seqs=2, max_num_batched_tokens=8)
    for i in range(2):
        counted.engine.submit(str(i), tokens(3, i), GREEDY)
        counted.engine.step()
    with pytest.raises(RequestError, match="at most 2 run at once"):
        counted.engine.fork("0", "2", GREEDY)
    assert {len(output) for output in counted.run().values()} <= {6, 7, 8}
    counted.engine.close()


def test_a_swapped_group_that_lost_a_member_comes_back(make_checkpoint: MakeCheckpoint) -> None:
    """It waited for the pages of both, and was failed although one would have fitted."""
    counted = Counted(
        make_checkpoint,
        kv_memory_bytes=40 * 16 * 768,
        max_model_len=200,
        max_num_batched_tokens=512,
        preemption="swap",
        prefix_cache=False,
    )
    engine = counted.engine
    longer = SamplingParams(max_tokens=50, temperature=0, ignore_eos=True)
    engine.submit("0", tokens(120), longer)
    first = [token for delta in engine.step() for token in delta.token_ids]
    engine.fork("0", "1", SamplingParams(max_tokens=49, temperature=1.0, seed=1, ignore_eos=True))
    for _ in range(30):
        first += [token for delta in engine.step() if delta.request_id == "0" for token in delta.token_ids]
    engine.scheduler.begun.preempt(engine.requests["0"].sequences[0].request, "swap")
    assert engine.report().swapped_bytes > 0
    engine.set_budget(13 * 16 * 768, 1)
    engine.cancel("1")
    first += counted.run()["0"]
    engine.set_budget(40 * 16 * 768, 2)
    engine.submit("alone", tokens(120), longer)
    assert counted.run()["alone"] == first
    engine.close()


def test_without_host_memory_requests_are_computed_again(
    make_checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failed allocation lost the request, and its share of the swap space for ever."""
    counted = Counted(make_checkpoint, preemption="swap", prefix_cache=False)

    def full(*_: object) -> None:
        raise RuntimeError("out of host memory")

    counted.engine.submit("0", tokens(40), GREEDY)
    counted.engine.step()
    monkeypatch.setattr(counted.engine.memory.contents, "save", full)
    counted.engine.scheduler.begun.preempt(counted.engine.requests["0"].sequences[0].request)
    assert counted.engine.scheduler.begun.num_preempted == {"swap": 0, "recompute": 1}
    assert counted.engine.report().swapped_bytes == 0
    assert len(counted.run()["0"]) == 7
    counted.engine.close()


def test_a_sampler_that_fails_loses_nothing(counted: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it was to sample from was counted as computed, and the request never went on."""

    def fail(*_: object) -> None:
        raise IndexError

    counted.engine.submit("0", tokens(40), GREEDY)
    counted.engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(token_selection, "launch_sampling", fail)
        patch.setattr(token_selection, "sample_apart", fail)
        with pytest.raises(IndexError):
            counted.engine.step()
    assert len(counted.run()["0"]) == 7


def test_pinning_one_name_twice_at_once(counted: Counted) -> None:
    counted.engine.pin("1", "rules", tokens(40))
    counted.engine.pin("2", "rules", tokens(40, 1))
    deltas = {delta.request_id: delta for _ in range(3) for delta in counted.engine.step()}
    assert deltas["1"].error is None
    assert isinstance(deltas["2"].error, RequestError)
    assert "pinned already" in str(deltas["2"].error)


@pytest.mark.parametrize("options", [{"adapter": "unknown"}, {"timeout_s": 0.0}, {"timeout_s": float("nan")}])
def test_options_of_a_pin_are_validated(counted: Counted, options: dict[str, Any]) -> None:
    """Regression: a pin for an unknown adapter waited for ever, and one with a timeout of NaN had no deadline."""
    with pytest.raises(RequestError, match=next(iter(options))):
        counted.engine.pin("0", "rules", tokens(40), **options)
    assert not counted.engine.has_work


def test_a_fork_does_not_say_what_its_parent_holds_back() -> None:
    """Text that may begin a stop string came out of the child."""
    with LLM("builtin", kv_memory_bytes=16 << 20) as llm:
        tokenizer = llm.engine.model.tokenizer
        assert tokenizer is not None
        prompt = tokenizer.encode("<|user|>What is Folio?<|end|><|assistant|>")
        [whole] = llm.generate([prompt], SamplingParams(max_tokens=12, temperature=0))
        params = SamplingParams(max_tokens=12, temperature=0, stop=whole.text[:20] + "#")
        llm.engine.submit("parent", prompt, params)
        said = {"parent": "", "child": ""}
        for step in range(40):
            if step == 3:
                llm.engine.fork("parent", "child", SamplingParams(max_tokens=9, temperature=0))
            for delta in llm.engine.step():
                said[delta.request_id] += delta.text
        assert said["parent"] == whole.text
        assert whole.text.endswith(said["child"])
        assert 0 < len(said["child"]) < len(whole.text)


@pytest.mark.parametrize("name", ["kv_idle_release_s", "prefix_cache_release_s"])
def test_never_is_a_time_too(name: str, make_checkpoint: MakeCheckpoint) -> None:
    """`.inf` is how YAML says it; the mapper's thread died of it."""
    counted = Counted(make_checkpoint, **{name: float("inf")})
    counted.engine.submit("0", tokens(40), GREEDY)
    assert len(counted.run()["0"]) == 8
    counted.engine.memory.wait_for_progress(0.02)
    counted.engine.close()
    with pytest.raises(ConfigError, match="must not be negative"):
        Counted(make_checkpoint, **{name: float("nan")})


def test_a_step_is_shared_across_views(make_checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """One view after the other wrote and read; who came first read what the second had not written."""
    outputs = []
    for views in (("region", "block_table"), ("block_table", "region")):
        counted = Counted(make_checkpoint)
        policies = iter(views)
        real = counted.engine.memory.create_sequence
        monkeypatch.setattr(
            counted.engine.memory, "create_sequence", lambda _, real=real, p=policies, **kw: real(next(p), **kw)
        )
        for i in range(2):
            counted.engine.submit(str(i), tokens(64) + tokens(8, 1 + i), GREEDY)
        outputs.append(counted.run())
        assert counted.cached["1"] == 64
        counted.engine.close()
    assert outputs[0] == outputs[1]
    fresh = Counted(make_checkpoint, prefix_cache=False)
    for i in range(2):
        fresh.engine.submit(str(i), tokens(64) + tokens(8, 1 + i), GREEDY)
    assert fresh.run() == outputs[0]
    fresh.engine.close()
