"""A request that another engine has begun continues with the tokens that it would have got there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from folio.app.engine.engine import Engine
from folio.app.engine.memory import kv_plan
from folio.app.engine.request.delta import Delta
from folio.app.engine.request.engine_request import BegunOutput, EngineRequest
from folio.app.engine.sampling.params import SamplingParams, Structure
from folio.app.errors import RequestError
from folio.vmem import CudaBackend, DevicePages
from folio.vmem.backends.cuda import CPU
from tests.app.engine.engines import MakeEngine, run
from tests.vmem.backends.stand_in_driver import StandInDriver

PROMPT = "The capital of France is a city on a river. The capital of Japan is"
SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string", "maxLength": 8}}}'
SEEDED: dict[str, Any] = {"seed": 7, "temperature": 1.2}
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": SEEDED,
    "truncated": SEEDED | {"top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "penalties": SEEDED | {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.5},
    "bad_words": {"temperature": 0, "bad_words": [" the", "a", " river"]},
    "min_tokens": SEEDED | {"min_tokens": 12, "stop_token_ids": list(range(0, 200, 3))},
    "logit_bias": SEEDED | {"logit_bias": {5: 4.0, 9: -8.0}, "allowed_token_ids": list(range(3, 260))},
    "stop": SEEDED | {"stop": ["e a", "qqqq"], "seed": 3},
    "stop_included": SEEDED | {"stop": ["e a", "qqqq"], "include_stop_str": True, "seed": 3},
    "structure": SEEDED | {"structure": Structure("json", SCHEMA)},
    "logprobs": SEEDED | {"logprobs": 3, "prompt_logprobs": 2},
    "several": SEEDED | {"n": 3, "logprobs": 1},
    "bytes": SEEDED | {"allowed_token_ids": list(range(100, 260)), "temperature": 2.0},
}


@pytest.fixture
def engine(make_engine: MakeEngine) -> Engine:
    return make_engine("builtin", dtype="float32")


def outcome(deltas: Sequence[Delta]) -> dict[int, tuple[Any, ...]]:
    """Tokens, text, log probabilities and ends of each output, and the prompt's log probabilities."""
    outputs: dict[int, tuple[Any, ...]] = {}
    for delta in deltas:
        assert delta.error is None
        tokens, text, logprobs, of_prompt, ends = outputs.get(delta.index, ((), "", (), (), ()))
        assert not ends
        ends = (delta.finish_reason, delta.stop_reason) if delta.finished else ()
        known = tuple((token.token_id, round(token.logprob, 2)) for token in delta.logprobs)
        outputs[delta.index] = (
            tokens + delta.token_ids,
            text + delta.text,
            logprobs + known,
            of_prompt + delta.prompt_logprobs,
            ends,
        )
    return outputs


def left_of(deltas: Sequence[Delta], params: SamplingParams) -> tuple[BegunOutput, ...]:
    """The outputs that have not ended after these deltas."""
    tokens: dict[int, list[int]] = {index: [] for index in range(params.n)}
    for delta in deltas:
        tokens[delta.index] += delta.token_ids
        if delta.finished:
            del tokens[delta.index]
    return tuple(BegunOutput(index, of_output) for index, of_output in tokens.items())


@pytest.mark.parametrize("name", CASES)
def test_it_ends_as_undisturbed_after_any_token(name: str, engine: Engine) -> None:
    params = SamplingParams(**({"max_tokens": 24} | CASES[name]))
    prompt = engine.model.tokenizer(PROMPT)["input_ids"]
    request = EngineRequest("request", prompt, params)
    engine.prepare(request)("undisturbed")
    undisturbed = run(engine)["undisturbed"]
    for cut in range(1, len(undisturbed)):
        engine.prepare(replace(request, begun=left_of(undisturbed[:cut], params)))(str(cut))
    for cut, rest in run(engine).items():
        assert outcome([*undisturbed[: int(cut)], *rest]) == outcome(undisturbed), cut
        assert rest[-1].ends_request


@pytest.mark.parametrize("parent", ["plain", "same structure", "ended"])
@pytest.mark.parametrize("name", ["seeded", "penalties", "bad_words", "min_tokens", "stop", "structure", "several"])
def test_forks_end_as_undisturbed(name: str, parent: str, engine: Engine) -> None:
    """Also a fork of a fork, whose structure may have begun in what the first one inherited."""
    params = SamplingParams(**({"max_tokens": 12} | CASES[name]))
    of_parent = SamplingParams(
        max_tokens=8, structure=params.structure if parent == "same structure" else None, **SEEDED
    )
    engine.submit("parent", engine.model.tokenizer(PROMPT)["input_ids"], of_parent)
    for _ in range(20 if parent == "ended" else 5):
        engine.step()
    asked = {"fork": engine.fork("parent", "fork", params)}
    deltas = [delta for _ in range(4) for delta in engine.step()]
    asked["fork of fork"] = engine.fork("fork", "fork of fork", params)
    deltas += [delta for of_request in run(engine).values() for delta in of_request]
    for fork, request in asked.items():
        undisturbed = [delta for delta in deltas if delta.request_id == fork]
        given = {output.index: output for output in request.begun}
        for cut in range(len(undisturbed)):
            left = left_of(undisturbed[:cut], params)
            begun = tuple(
                replace(output, token_ids=[*output.token_ids, *rest.token_ids])
                for rest in left
                if (output := given.get(rest.index, replace(rest, token_ids=())))
            )
            engine.prepare(replace(request, begun=begun))(str(cut))
        for number, rest in run(engine).items():
            assert outcome([*undisturbed[: int(number)], *rest]) == outcome(undisturbed), (fork, number)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> StandInDriver:
    """Of the device that has the memories of all engines; what is submitted to it is done at once."""
    driver, completed = StandInDriver(1 << 28), CudaBackend.completed
    driver.granularity_bytes = 1 << 14

    def select(*args: object, pages: DevicePages | None = None, **options: object) -> CudaBackend:
        return CudaBackend(driver=driver, tensor_device=CPU, pages=pages)

    monkeypatch.setattr(kv_plan, "select_backend", select)
    monkeypatch.setattr(CudaBackend, "completed", lambda *args: driver.finish_work() or completed(*args))
    return driver


def test_its_blocks_come_on_the_device(driver: StandInDriver, make_engine: MakeEngine) -> None:
    test_its_blocks_come_from_the_engine_that_has_begun_it("there", make_engine)
    assert "cuMemImportFromShareableHandle" in driver.calls


@pytest.mark.parametrize("held_at", ["there", "nowhere", ""])
def test_its_blocks_come_from_the_engine_that_has_begun_it(held_at: str, make_engine: MakeEngine) -> None:
    """And nothing is computed twice but the last unit's tokens; without them, everything is."""
    first, second = make_engine("builtin", dtype="float32"), make_engine("builtin", dtype="float32")
    prompt = first.model.tokenizer(PROMPT * 8)["input_ids"]
    params = SamplingParams(max_tokens=120, ignore_eos=True, **SEEDED)
    first.submit("request", prompt, params)
    deltas: list[Delta] = []
    while len(deltas) < 60:
        deltas += first.step()
    request = EngineRequest("request", prompt, params, begun=left_of(deltas, params))
    assert first.handover is not None
    address = first.handover.address() if held_at == "there" else held_at
    second.recovery.observe_step(100, 0, 10.0)  # computing is known to take long
    second.prepare(replace(request, held_at=address))("elsewhere")
    rest = run(second)["elsewhere"]
    cached = (len(prompt) + 60) // second.memory.prefixes.unit_tokens * second.memory.prefixes.unit_tokens
    assert rest[0].num_cached_tokens == (min(cached, len(prompt) + 59) if held_at == "there" else 0)
    undisturbed = deltas + run(first)["request"]
    assert outcome([*deltas, *rest]) == outcome(undisturbed)


@pytest.mark.parametrize(
    ("params", "output"),
    [
        (SamplingParams(max_tokens=4), BegunOutput(1, [5])),
        (SamplingParams(max_tokens=4), BegunOutput(0, [5, 6, 7, 8])),
        (SamplingParams(max_tokens=4), BegunOutput(0, [-1])),
        (SamplingParams(max_tokens=4), BegunOutput(0, [1 << 30])),
        (SamplingParams(max_tokens=4, n=2, best_of=3), BegunOutput(0, [5])),
    ],
)
def test_what_cannot_be_continued_is_refused(params: SamplingParams, output: BegunOutput, engine: Engine) -> None:
    with pytest.raises(RequestError):
        engine.prepare(EngineRequest("request", [1, 2, 3], params, begun=(output,)))
    engine.check_integrity()
