"""What the engine does with the prefix cache: nothing is computed twice that need not be."""

from __future__ import annotations

from typing import Any

import pytest

from folio.app.engine.engine import Engine
from folio.app.engine.sampling.params import SamplingParams
from folio.app.errors import ConfigError, RequestError
from tests.app.engine.engines import BLOCK_BYTES, MakeEngine, greedy, note_sizes, raising, run, tokens_of
from tests.conftest import tokens

GREEDY = greedy(8)


class Counted:
    """An engine, how many tokens each of its steps computed, and how many of each request's were cached."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.steps = note_sizes(engine)
        self.cached: dict[str, int] = {}

    def run(self) -> dict[str, list[int]]:
        found = run(self.engine)
        self.cached |= {name: deltas[-1].num_cached_tokens for name, deltas in found.items()}
        return {name: tokens_of(deltas) for name, deltas in found.items()}

    def ask(self, name: str, prompt: list[int], params: SamplingParams = GREEDY, **options: Any) -> list[int]:
        """The tokens of a request that is alone."""
        self.engine.submit(name, prompt, params, **options)
        return self.run()[name]


@pytest.fixture
def make(make_engine: MakeEngine) -> Any:
    def make(model: str = "llama", **settings: Any) -> Counted:
        return Counted(make_engine(model, **({"block_tokens": 16, "max_num_seqs": 32} | settings)))

    return make


@pytest.fixture
def counted(make: Any) -> Counted:
    made: Counted = make()
    return made


def test_requests_that_come_together_compute_their_prefix_once(counted: Counted) -> None:
    for i in range(8):
        counted.engine.submit(str(i), tokens(256) + tokens(16, 1 + i), GREEDY)
    counted.run()
    assert counted.steps[0] == 256 + 8 * 16
    assert [counted.cached[str(i)] for i in range(8)] == [0] + [256] * 7


def test_who_wants_what_is_being_computed_waits_for_it(make: Any) -> None:
    """The prefix takes four steps; meanwhile nobody computes any of it a second time."""
    counted = make(max_num_batched_tokens=64)
    for i in range(3):
        counted.engine.submit(str(i), tokens(256) + tokens(16, 1 + i), GREEDY)
    found = counted.run()
    assert counted.steps[:4] == [64] * 4
    assert [counted.cached[str(i)] for i in range(3)] == [0, 256, 256]
    counted.engine.memory.tree.clear()
    for i in range(3):
        assert counted.ask(str(i), tokens(256) + tokens(16, 1 + i)) == found[str(i)]


def test_a_second_turn_computes_only_what_is_new(counted: Counted) -> None:
    answer = counted.ask("first", tokens(50))
    counted.steps.clear()
    counted.ask("second", tokens(50) + answer + tokens(10, 3))
    # 57 tokens were computed, three blocks of 16 are whole.
    assert counted.cached["second"] == 48
    assert counted.steps[0] == 68 - 48


def test_a_whole_prompt_in_the_cache_computes_one_token(counted: Counted) -> None:
    assert counted.ask("0", tokens(64)) == counted.ask("1", tokens(64))
    assert counted.cached["1"] == 63
    assert counted.steps[8] == 1


def test_salts_and_tenants_share_nothing_and_users_do(counted: Counted) -> None:
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
        ({"cache_salt": "b"}, 0),
        ({"cache_salt": "a"}, 63),
        ({"tenant": "a", "cache_salt": "b"}, 63),
    ]
    for options, cached in whose:
        counted.ask("r", tokens(64), **options)
        assert counted.cached["r"] == cached, options


def test_tenants_need_not_be_isolated(make: Any) -> None:
    counted = make(isolate_tenants=False)
    for tenant, cached in (("a", 0), ("b", 63)):
        counted.ask("r", tokens(64), tenant=tenant)
        assert counted.cached["r"] == cached


def test_what_is_pinned_for_a_tenant_is_its_own(counted: Counted) -> None:
    """Nor do tenants see what the operator has pinned for everybody else."""
    counted.engine.pin("pin", "rules", tokens(48), tenant="a")
    counted.engine.pin("pin for all", "all", tokens(48, 1))
    counted.run()
    for tenant, seed, cached in (("a", 0, 48), ("b", 0, 0), (None, 0, 0), ("b", 1, 0), (None, 1, 48)):
        counted.ask("r", [*tokens(48, seed), len(counted.steps)], tenant=tenant)
        assert counted.cached["r"] == cached
    counted.engine.unpin("rules")
    counted.engine.unpin("all")


def test_forks_stay_with_their_tenant(counted: Counted) -> None:
    """Of a request that has ended too: what it has computed is found by its fork, and by nobody else."""
    counted.ask("0", tokens(64), tenant="a", cache_salt="s")
    counted.engine.fork("0", "fork", GREEDY)
    counted.run()
    counted.ask("1", tokens(64), tenant="b", cache_salt="s")
    assert counted.cached["fork"] >= 63
    assert counted.cached["1"] == 0


def test_a_cancelled_prefill_leaves_what_it_has_computed(make: Any) -> None:
    counted = make(max_num_batched_tokens=64)
    for name in ("0", "1"):
        counted.engine.submit(name, tokens(256), GREEDY)
        counted.engine.step()
    counted.engine.cancel("0")
    counted.run()
    assert counted.cached["1"] == 128


@pytest.mark.parametrize("model", ["bamba", "falcon_h1", "qwen3_next"])
def test_a_recurrent_state_is_found_again(model: str, make: Any) -> None:
    """Two prompts that branch leave a state where they do; the third begins there, and the tokens are the same."""
    counted, fresh = make(model, prefix_cache_release_s=1e9), make(model, prefix_cache=False)
    for i in range(4):
        prompt = tokens(100) + tokens(20, 1 + i % 3)
        assert counted.ask(str(i), prompt) == fresh.ask(str(i), prompt)
    assert [counted.cached[str(i)] for i in range(4)] == [0, 0, 96, 112]


def test_the_lower_priority_number_goes_first(make: Any) -> None:
    counted = make(max_num_seqs=1)
    for i, priority in enumerate((1, 1, 0)):
        counted.engine.submit(str(i), tokens(20, i), GREEDY, priority=priority)
    assert list(counted.run()) == ["2", "0", "1"]


@pytest.mark.parametrize(("policy", "view"), [("swap", "block_table"), ("recompute", "region")])
def test_preemption_changes_nothing_and_lets_nobody_pass(policy: str, view: str, make: Any) -> None:
    """The latest of the lowest priority gives way; as long as it waits nobody is admitted."""
    found = []
    for num_blocks in (1000, 12):
        engine = make(
            kv_memory_bytes=num_blocks * BLOCK_BYTES,
            max_model_len=160,
            max_num_batched_tokens=50,
            preemption=policy,
            prefix_cache=False,
            kv_view=view,
        ).engine
        scheduler = engine.scheduler
        for i, length in enumerate((60, 31, 47, 16, 90, 5)):
            engine.submit(str(i), tokens(length, i), greedy(40), priority=i % 2)
        finished: dict[str, list[int]] = {}
        while engine.has_work:
            waiting = {g.sort_key for g in scheduler.waiting}
            preempted = {g.sort_key for g in scheduler.preempted}
            for delta in engine.step():
                finished.setdefault(delta.request_id, []).extend(delta.token_ids)
            engine.check_integrity()
            if preempted & {g.sort_key for g in scheduler.preempted}:
                assert {g.sort_key for g in scheduler.waiting} == waiting
            if scheduler.preempted and scheduler.running:
                assert min(g.sort_key for g in scheduler.preempted) > max(g.sort_key for g in scheduler.running)
        assert (scheduler.begun.num_preempted[policy] > 0) == (num_blocks == 12)
        assert all(len(output) == 40 for output in finished.values())
        found.append(finished)
    assert found[0] == found[1]


def test_a_fork_goes_on_without_computing_again(counted: Counted) -> None:
    counted.engine.submit("parent", tokens(40), GREEDY)
    assert sum(len(delta.token_ids) for _ in range(3) for delta in counted.engine.step()) == 3
    counted.engine.fork("parent", "child", greedy(5))
    found = counted.run()
    assert found["child"] == found["parent"]
    assert counted.steps == [40, 1, 1] + [2] * 5
    assert counted.engine.report().copied_blocks == 1


def test_forks_that_cannot_run_together_are_refused(counted: Counted) -> None:
    counted.engine.submit("parent", tokens(40), SamplingParams(max_tokens=900))
    counted.engine.memory.pages.budget = 70
    for parent, child, said in (
        ("nobody", "child", "is no longer kept"),
        ("parent", "parent", "in use"),
        ("parent", "child", "do not fit"),
    ):
        with pytest.raises(RequestError, match=said):
            counted.engine.fork(parent, child, SamplingParams(max_tokens=900))
    counted.engine.memory.pages.budget = counted.engine.memory.pages.most


def test_a_pinned_prefix_is_there_from_the_start(make_engine: MakeEngine) -> None:
    system = "You answer in one word. " * 12
    pins = {"pinned_prompts": {"rules": system}, "pinned_system_prompts": {"chat": system}}
    engine = make_engine("builtin", prefix_cache_release_s=0.0, **pins)
    report = engine.report()
    assert [pin.name for pin in report.pins] == ["rules", "chat"]
    assert report.pinned_bytes > 0
    tokenizer: Any = engine.model.tokenizer
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "What is red?"}]
    for prompt in (
        tokenizer.encode(system + "What is red?"),
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False),
    ):
        engine.submit("r", prompt, GREEDY)
        [delta] = engine.step()
        assert delta.num_cached_tokens >= len(tokenizer.encode(system)) // 16 * 16 - 16
        engine.cancel("r")
    engine.unpin("rules")
    with pytest.raises(RequestError, match="no prefix named 'rules'"):
        engine.unpin("rules")


RULES = {"pinned_prompts": {"rules": "x " * 100}}


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"pinned_prompts": {"short": "Hi"}}, "too short to pin"),
        ({"pinned_prompts": {"a": "b"}, "pinned_system_prompts": {"a": "c"}}, "both have a"),
        (RULES | {"prefix_cache": False}, "prefix_cache is off"),
        (RULES | {"pin_quota": 0.0}, "may be pinned"),
        (RULES | {"skip_tokenizer_init": True}, "need a tokenizer"),
        ({"pin_quota": 1.5}, "between 0 and 1"),
        ({"preemption": "maybe"}, "choose one of auto, swap, recompute"),
        ({"expected_tokens": 0}, "at least 1"),
        ({"kv_idle_release_s": float("nan")}, "must be at least 0"),
        ({"prefix_cache_release_s": float("nan")}, "must be at least 0"),
    ],
)
def test_settings_that_cannot_work(make_engine: MakeEngine, settings: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        make_engine("builtin", **settings)


@pytest.mark.parametrize("name", ["kv_idle_release_s", "prefix_cache_release_s"])
def test_never_is_a_time_too(name: str, make: Any) -> None:
    """`.inf` is how YAML says it; the mapper's thread died of it."""
    counted = make(**{name: float("inf")})
    assert len(counted.ask("0", tokens(40))) == 8
    counted.engine.memory.wait_for_progress(0.02)


@pytest.mark.parametrize("model", ["llama", "bamba"])
def test_a_prefix_pinned_after_traffic_stays(model: str, make: Any) -> None:
    """The pin owned copies of its last block that nobody could find, and lost the ones that had the name."""
    counted = make(model)
    counted.ask("before", tokens(70))
    counted.engine.pin("pin", "rules", tokens(70))
    counted.run()
    memory = counted.engine.memory
    for g, group in enumerate(memory.group_memories):
        memory.tree.evict(g, group.pool.num_cached)
    counted.engine.check_integrity()
    counted.ask("after", tokens(70))
    assert counted.cached["after"] == 64


def test_who_shares_what_is_not_computed_yet_is_never_swapped(make: Any) -> None:
    """Its blocks were copied out empty, and came back as computed."""
    counted = make(preemption="swap")
    engine, scheduler = counted.engine, counted.engine.scheduler
    prompts = {str(i): tokens(64) + tokens(8, 1 + i) for i in range(2)}
    for name, prompt in prompts.items():
        engine.submit(name, prompt, GREEDY)
    scheduler.schedule()
    second = engine.requests["1"].sequences[0]
    assert second.num_computed == 64
    scheduler.begun.preempt(second.request)
    assert second.request.swapped is None
    assert second.num_computed == 0
    scheduler.abort_step()
    found = counted.run()
    for name, prompt in prompts.items():
        engine.memory.tree.clear()
        assert counted.ask(name, prompt) == found[name]


def test_forks_that_wait_while_the_budget_is_lowered_go_on_one_by_one(make: Any) -> None:
    """Admitted together although they did not fit, they were scheduled without memory."""
    counted = make(kv_memory_bytes=40 * BLOCK_BYTES, max_model_len=200, prefix_cache=False)
    counted.engine.submit("0", tokens(150), greedy(40))
    for fork in ("1", "2"):
        counted.engine.fork("0", fork, greedy(40))
    counted.engine.set_budget(13 * BLOCK_BYTES, 1)
    found = counted.run()
    assert found["0"] == found["1"] == found["2"]
    assert len(found["0"]) == 40


def test_no_more_forks_than_sequences_run_at_once(make: Any) -> None:
    """The token budget of a step went below zero, and no step worked any more."""
    counted = make(max_num_seqs=2, max_num_batched_tokens=8)
    for i in range(2):
        counted.engine.submit(str(i), tokens(3, i), GREEDY)
        counted.engine.step()
    with pytest.raises(RequestError, match="at most 2 run at once"):
        counted.engine.fork("0", "2", GREEDY)
    assert {len(output) for output in counted.run().values()} <= {6, 7, 8}


def test_a_swapped_group_that_lost_a_member_comes_back(make: Any) -> None:
    """It waited for the pages of both, and was failed although one would have fitted."""
    counted = make(
        kv_memory_bytes=40 * BLOCK_BYTES,
        max_model_len=200,
        max_num_batched_tokens=512,
        preemption="swap",
        prefix_cache=False,
    )
    engine = counted.engine
    engine.submit("0", tokens(120), greedy(50))
    first = [token for delta in engine.step() for token in delta.token_ids]
    engine.fork("0", "1", SamplingParams(max_tokens=49, temperature=1.0, seed=1, ignore_eos=True))
    for _ in range(30):
        first += [token for delta in engine.step() if delta.request_id == "0" for token in delta.token_ids]
    engine.scheduler.begun.preempt(engine.requests["0"].sequences[0].request, "swap")
    assert engine.report().swapped_bytes > 0
    engine.set_budget(13 * BLOCK_BYTES, 1)
    engine.cancel("1")
    first += counted.run()["0"]
    engine.set_budget(40 * BLOCK_BYTES, 2)
    assert counted.ask("alone", tokens(120), greedy(50)) == first


def test_without_host_memory_requests_are_computed_again(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The failed allocation lost the request, and its share of the swap space for ever."""
    counted = make(preemption="swap", prefix_cache=False)
    engine = counted.engine
    engine.submit("0", tokens(40), GREEDY)
    engine.step()
    monkeypatch.setattr(engine.memory.contents, "save", raising(RuntimeError("out of host memory")))
    engine.scheduler.begun.preempt(engine.requests["0"].sequences[0].request)
    assert engine.scheduler.begun.num_preempted == {"swap": 0, "recompute": 1}
    assert engine.report().swapped_bytes == 0
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


def test_a_fork_does_not_say_what_its_parent_holds_back(make_engine: MakeEngine) -> None:
    """Text that may begin a stop string came out of the child."""
    engine = make_engine("builtin")
    tokenizer: Any = engine.model.tokenizer
    prompt = tokenizer.encode("<|user|>What is Folio?<|end|><|assistant|>")
    short = {"max_tokens": 12, "temperature": 0}
    engine.submit("whole", prompt, SamplingParams(**short))
    whole = "".join(delta.text for delta in run(engine)["whole"])
    engine.submit("parent", prompt, SamplingParams(**short, stop=whole[:20] + "#"))
    said = {"parent": "", "child": ""}
    for step in range(40):
        if step == 3:
            engine.fork("parent", "child", SamplingParams(max_tokens=9, temperature=0))
        for delta in engine.step():
            said[delta.request_id] += delta.text
    assert said["parent"] == whole
    assert whole.endswith(said["child"])
    assert 0 < len(said["child"]) < len(whole)


def test_a_step_is_shared_across_views(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One view after the other wrote and read; who came first read what the second had not written."""
    found = []
    for views in (("region", "block_table"), ("block_table", "region"), ()):
        counted = make(prefix_cache=bool(views))
        policies, real = iter(views), counted.engine.memory.create_sequence
        if views:
            monkeypatch.setattr(
                counted.engine.memory, "create_sequence", lambda _, real=real, p=policies, **kw: real(next(p), **kw)
            )
        for i in range(2):
            counted.engine.submit(str(i), tokens(64) + tokens(8, 1 + i), GREEDY)
        found.append(counted.run())
        assert counted.cached["1"] == (64 if views else 0)
    assert found[0] == found[1] == found[2]
