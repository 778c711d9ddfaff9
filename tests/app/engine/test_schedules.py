"""Random schedules over tiny budgets: whatever is cached, evicted, shared, forked, swapped or computed again, every
request gets the tokens that transformers gives it alone.

CI runs a few hundred schedules; `pytest --hypothesis-profile=nightly tests/app/engine/test_schedules.py` thousands.
"""

from __future__ import annotations

import functools
import itertools
import zlib
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest

from tests.app.engine.engines import broken_layer

pytest.importorskip("hypothesis")
import torch
from hypothesis import HealthCheck, example, given, seed, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, PreTrainedModel

from folio.app.engine.engine import Engine
from folio.app.engine.request.delta import Delta
from folio.app.engine.sampling.noise import gumbel
from folio.app.engine.sampling.params import SamplingParams
from folio.app.engine.sampling.sampler import sample
from folio.app.engine.sampling.settings import gather_settings
from folio.app.engine.sampling.state import SamplingState
from folio.app.engine.step import step_loop
from folio.app.errors import RequestError
from tests.app.engine.engines import TINY, engine_of
from tests.conftest import HYBRIDS, VOCAB_SIZE, MakeCheckpoint
from tests.nightly import examples

TWO_LAYERS = TINY | {"num_hidden_layers": 2}
MODELS: dict[str, dict[str, Any]] = {
    "llama": TWO_LAYERS,
    "gemma2": TWO_LAYERS | {"head_dim": 16, "sliding_window": 20, "query_pre_attn_scalar": 16},
    "bamba": HYBRIDS["bamba"],
}
POLICIES = ("swap", "recompute", "auto")
# Three in a row have all models and policies.
CASES = [(model, POLICIES[(row + i) % 3]) for row in range(3) for i, model in enumerate(MODELS)]
MAX_MODEL_LEN = 96
# Prompts begin like one of these; what follows is of few kinds, so that they meet again.
DOCUMENTS = torch.randint(VOCAB_SIZE - 1, (2, 64), generator=torch.Generator().manual_seed(5)).tolist()
# Two paths to one logit differ by rounding; where that could decide, the rest of a request is not compared.
CLOSE = 1e-3


@dataclass(frozen=True)
class Submit:
    document: int
    common: int
    own: tuple[int, ...]
    max_tokens: int
    seed: int | None
    priority: int
    salt: str | None


@dataclass(frozen=True)
class Several:
    """Outputs of one prompt. They end; which tokens they have is tested elsewhere."""

    document: int
    common: int
    max_tokens: int
    params: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Fork:
    which: int
    max_tokens: int
    seed: int | None


@dataclass(frozen=True)
class Cancel:
    which: int


@dataclass(frozen=True)
class Budget:
    share: float


@dataclass(frozen=True)
class Steps:
    count: int
    fails: bool


@dataclass(frozen=True)
class Pin:
    document: int
    common: int


Event = Submit | Several | Fork | Cancel | Budget | Steps | Pin
# (prefix cache, view, tokens of a step, blocks more than the longest sequence takes, turns of tenants)
SETUPS = [
    (True, "auto", 40, 6, False),
    (True, "block_table", 40, 0, True),
    (False, "auto", 40, 3, False),
    (True, "region", 256, 6, True),
]

SEEDS = st.sampled_from([None, None, 1, 2])
SUBMIT = st.builds(
    Submit,
    document=st.integers(0, 1),
    common=st.sampled_from([0, 5, 16, 24, 32, 33, 48, 60]),
    own=st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple),
    max_tokens=st.sampled_from([1, 2, 8, 20, 30]),
    seed=SEEDS,
    priority=st.sampled_from([0, 0, 1]),
    salt=st.sampled_from([None, None, None, "x"]),
)
EVENTS = st.one_of(
    SUBMIT,
    SUBMIT,
    st.builds(
        Several,
        document=st.integers(0, 1),
        common=st.sampled_from([5, 16, 33]),
        max_tokens=st.sampled_from([1, 8, 20]),
        params=st.sampled_from(
            [(("n", 2),), (("n", 4),), (("best_of", 3),), (("n", 2), ("best_of", 3), ("use_beam_search", True))]
        ),
    ),
    st.builds(Fork, which=st.integers(0, 5), max_tokens=st.integers(1, 12), seed=SEEDS),
    st.builds(Pin, document=st.integers(0, 1), common=st.sampled_from([16, 32])),
    st.builds(Cancel, which=st.integers(0, 9)),
    st.builds(Budget, share=st.floats(0, 1)),
    st.builds(Steps, count=st.integers(1, 8), fails=st.sampled_from([False] * 3 + [True])),
)


BURST: list[Event] = [Submit(0, 33, (0, 1), 30, None, 0, None)]
# Played in every test, so that a short list of random schedules covers these events, too.
EXAMPLE: list[Event] = [
    Steps(4, fails=False),
    Fork(0, max_tokens=8, seed=None),
    Several(1, common=16, max_tokens=8, params=(("n", 2),)),
    Pin(1, common=32),
    Steps(8, fails=False),
    Steps(1, fails=True),
    Budget(0.0),
    Steps(8, fails=False),
    Budget(1.0),
]
COVERED = ("hit_tokens", "evicted_blocks", "copied_blocks", "fork", "several", "failed step", "pin", "preemptions")


class Reference:
    """transformers, one sequence at a time, without any cache; and Folio's sampler over its logits."""

    def __init__(self, folder: str) -> None:
        self._model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
        self._logits: dict[tuple[int, ...], torch.Tensor] = {}

    @torch.inference_mode()
    def logits(self, token_ids: list[int]) -> torch.Tensor:
        key = tuple(token_ids)
        if key not in self._logits:
            self._logits[key] = self._model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0, -1]
        return self._logits[key]

    def check(self, prompt: list[int], params: SamplingParams, tokens: list[int], num_before: int) -> None:
        """Raise unless `tokens` follow from the prompt, as far as rounding cannot decide.

        Args:
            num_before: of the prompt's tokens, those that a fork's parent had generated: random numbers go on there.
        """
        state = SamplingState(params, prompt)
        for token in prompt[len(prompt) - num_before :]:
            state.append(token)
        for i, token in enumerate(tokens):
            logits = self.logits(prompt + tokens[:i])
            expected = sample(logits[None], [state]).token_ids[0]
            key = torch.from_numpy(gather_settings([state], [0], len(logits))["key"])[:, None]
            state.append(token)
            if params.temperature:
                sums = logits / params.temperature + gumbel(key, torch.arange(len(logits))[None])[0]
                close = float(sums[expected] - sums[token]) < CLOSE
            else:
                best = logits.topk(2).values
                close = float(best[0] - best[1]) < CLOSE
            if close and token != expected:
                return
            assert token == expected, f"token {i} of {tokens} after {len(prompt)}: {expected} expected"


@pytest.fixture(scope="module")
def engines(make_checkpoint: MakeCheckpoint) -> Any:
    """`engines(model, …)` → an engine and its reference; the same call, the same engine."""

    @functools.cache
    def reference(model: str) -> tuple[str, Reference]:
        folder = str(make_checkpoint(model, **MODELS[model]))
        return folder, Reference(folder)

    made = []
    patch = pytest.MonkeyPatch()
    patch.setattr(step_loop, "_GIVE_UP_S", 0.1)

    @functools.cache
    def make(model: str, more_blocks: int, **settings: Any) -> tuple[Engine, Reference]:
        folder, expected = reference(model)
        sizes: dict[str, Any] = {"max_model_len": MAX_MODEL_LEN, "block_tokens": 16}
        probe = engine_of(folder, **sizes)
        page_bytes = probe.memory.groups[0].layout.page_bytes
        sizes["kv_memory_bytes"] = (probe.memory.pages_for(MAX_MODEL_LEN) + more_blocks) * page_bytes
        probe.close()
        made.append(engine_of(folder, max_num_seqs=6, swap_bytes=40 * page_bytes, **sizes, **settings))
        return made[-1], expected

    yield make
    patch.undo()
    for engine in made:
        engine.close()


class Run:
    """One schedule on an engine that others have used before."""

    def __init__(self, engine: Engine, reference: Reference, counts: Counter[str]) -> None:
        self.engine = engine
        self.counts = counts
        self.reference = reference
        engine.memory.tree.clear()
        self.begun: dict[str, tuple[list[int], SamplingParams, int]] = {}
        self.outputs: dict[str, list[int]] = {}
        self.several: dict[str, int] = {}  # outputs to come
        self.ids = map(str, itertools.count())
        self.revision = engine.report().budget_revision
        self.set_budget(1.0)

    def play(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case Submit():
                    self.submit(event)
                case Several():
                    self.submit_several(event)
                case Fork():
                    self.fork(event)
                case Cancel(which):
                    if (request_id := self.at(which)) is not None:
                        self.engine.cancel(request_id)
                        self.outputs.pop(request_id, None)
                        self.several.pop(request_id, None)
                case Pin():
                    self.pin(event)
                case Budget(share):
                    self.set_budget(share)
                case Steps(count, fails):
                    if fails:
                        self.fail()
                    for _ in range(count):
                        self.step()
        for _ in range(2000):
            if not self.engine.has_work:
                break
            self.step()
        assert not self.engine.has_work, "no end in sight"
        self.engine.check_integrity()
        assert not any(self.several.values()), "outputs are missing"
        for request_id, tokens in self.outputs.items():
            prompt, params, num_before = self.begun[request_id]
            assert len(tokens) == params.max_tokens
            self.reference.check(prompt, params, tokens, num_before)

    def submit(self, event: Submit) -> None:
        prompt = DOCUMENTS[event.document][: event.common] + list(event.own)
        request_id = next(self.ids)
        params = params_of(event.max_tokens, event.seed)
        self.begun[request_id], self.outputs[request_id] = (prompt, params, 0), []
        tenant = f"{event.own[0]}"
        self.engine.submit(
            request_id, prompt, params, priority=event.priority, cache_salt=event.salt, tenant=tenant, timeout_s=1e6
        )

    def submit_several(self, event: Several) -> None:
        request_id = next(self.ids)
        params = SamplingParams(max_tokens=event.max_tokens, temperature=0, ignore_eos=True, **dict(event.params))
        try:
            self.engine.submit(request_id, [*DOCUMENTS[event.document][: event.common], 3], params)
        except RequestError:  # they could never run together
            return
        self.counts["several"] += 1
        self.several[request_id] = params.n

    def fork(self, event: Fork) -> None:
        parent = self.at(event.which)
        if parent is None or parent not in self.outputs:  # it computes a prefix to pin
            return
        request_id, params = next(self.ids), params_of(event.max_tokens, event.seed)
        try:
            self.engine.fork(parent, request_id, params)
        except RequestError:
            return
        self.counts["fork"] += 1
        prompt = self.engine.requests[request_id].sequences[0].token_ids.copy()
        first, _, num_before = self.begun[parent]
        num_before = num_before + len(prompt) - len(first) if parent in self.engine.requests else 0
        self.begun[request_id], self.outputs[request_id] = (prompt, params, num_before), []

    def pin(self, event: Pin) -> None:
        """Pin what a document begins with, or unpin what is pinned."""
        if pins := self.engine.report().pins:
            self.engine.unpin(pins[0].name)
            return
        try:
            self.engine.pin(next(self.ids), "document", DOCUMENTS[event.document][: event.common])
        except RequestError:
            return
        self.counts["pin"] += 1

    def set_budget(self, share: float) -> None:
        pages = self.engine.memory.pages
        self.revision += 1
        fewest = pages.fewest + pages.num_pinned
        self.engine.set_budget(round(fewest + share * (pages.most - fewest)) * pages.page_bytes, self.revision)

    def step(self) -> None:
        self.take(self.engine.step())

    def take(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            if delta.request_id in self.several:
                self.several[delta.request_id] -= delta.finished
                if delta.error is not None:  # a budget that was lowered has no room for all beams
                    self.several[delta.request_id] = 0
                continue
            assert delta.error is None or isinstance(delta.error, RequestError)
            if delta.request_id in self.outputs:
                self.outputs[delta.request_id] += delta.token_ids
        self.engine.check_integrity()

    def fail(self) -> None:
        """The next step fails halfway. With asynchronous scheduling the call after it says so."""
        with broken_layer(self.engine, RuntimeError("broken")):
            for _ in range(100):
                if not self.engine.has_work:
                    break
                try:
                    self.take(self.engine.step())
                except RuntimeError as error:
                    assert str(error) == "broken"  # noqa: PT017 - not every call raises
                    self.counts["failed step"] += 1
                    break
                assert self.engine.executor.is_async
            else:
                pytest.fail("no step has failed")
            self.engine.executor.queue.wait_until_idle()
        self.engine.check_integrity()

    def at(self, which: int) -> str | None:
        running = list(self.engine.requests)
        return running[which % len(running)] if running else None


def params_of(max_tokens: int, seed: int | None) -> SamplingParams:
    temperature = 0.0 if seed is None else 1.0
    return SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed, ignore_eos=True)


@pytest.mark.daily(1)
@pytest.mark.parametrize(("model", "policy"), CASES)
def test_every_schedule_gives_the_tokens_of_transformers(model: str, policy: str, engines: Any) -> None:
    counts: Counter[str] = Counter()

    @settings(
        max_examples=examples(20, nightly=300),
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @example(setup=SETUPS[0], is_async=False, burst=BURST, events=EXAMPLE)
    @example(setup=SETUPS[0], is_async=True, burst=BURST, events=EXAMPLE)
    @example(setup=(True, "auto", 40, 40, False), is_async=True, burst=BURST, events=EXAMPLE)
    @given(
        setup=st.sampled_from(SETUPS),
        is_async=st.booleans(),
        burst=st.lists(SUBMIT, min_size=4, max_size=6),
        events=st.lists(EVENTS, min_size=3, max_size=30),
    )
    def play(setup: tuple[bool, str, int], is_async: bool, burst: list[Event], events: list[Event]) -> None:
        cached, view, num_tokens, more_blocks, fair = setup
        engine, reference = engines(
            model,
            more_blocks,
            prefix_cache=cached,
            kv_view=view,
            max_num_batched_tokens=num_tokens,
            preemption=policy,
            fair_tenants=fair,
            async_scheduling="on" if is_async else "off",
        )
        before, preempted_before = engine.report(), sum(engine.scheduler.begun.num_preempted.values())
        try:
            Run(engine, reference, counts).play(burst + events)
        finally:
            for request_id in list(engine.requests):
                engine.cancel(request_id)
            for pin in engine.report().pins:
                engine.unpin(pin.name)
        report = engine.report()
        for name in ("hit_tokens", "evicted_blocks", "copied_blocks"):
            counts[name] += getattr(report, name) - getattr(before, name)
        counts["preemptions"] += sum(engine.scheduler.begun.num_preempted.values()) - preempted_before

    if settings.default is not None and settings.default.derandomize:  # else all of them play the same schedules
        seed(zlib.crc32(f"{model} {policy}".encode()))(play)
    play()
    print(dict(counts))
    missing = [name for name in COVERED if not counts[name]]
    assert not missing, f"the schedules covered no {', '.join(missing)}"
