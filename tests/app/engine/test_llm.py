"""The synchronous API of scripts."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from folio.app.engine import LLM, SamplingParams
from folio.app.errors import EngineError, RequestError

SHORT = SamplingParams(max_tokens=3, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("builtin", kv_memory_bytes=64 << 20) as llm:
        yield llm
        llm.engine.check_integrity()


def ask(question: str) -> str:
    return f"<|user|>{question}<|end|><|assistant|>"


def test_results_are_in_order(llm: LLM) -> None:
    prompts: list[str | list[int]] = [ask("Hello"), [5, 6, 7], ask("What is Folio?")]
    params = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in (30, 3, 9)]
    completions = llm.generate(prompts, params)
    assert [len(c.token_ids) for c in completions] == [30, 3, 9]
    assert completions[0].text.startswith("Hello! I am the toy model")
    assert completions[1].prompt_token_ids == [5, 6, 7]
    assert {c.finish_reason for c in completions} == {"length"}


def test_prompts_are_computed_in_whole_steps() -> None:
    """Nobody waits for single tokens, unless the settings say so."""
    for settings, bound in [({}, None), ({"max_mixed_step_s": 0.1}, 0.1)]:
        with LLM("builtin", kv_memory_bytes=64 << 20, **settings) as llm:
            assert llm.engine.config.max_mixed_step_s == bound


def test_steps_of_decodes_select_no_rows(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: torch did it with all threads, whose spinning took a tenth of a step's time."""
    selected: list[bool] = []
    module = llm.engine.model.module
    forward = module.forward

    def observed(**given: Any) -> Any:
        selected.append(not isinstance(given["logits_to_keep"], int))
        return forward(**given)

    monkeypatch.setattr(module, "forward", observed)
    llm.generate([[5, 6, 7], [8, 9], [10]], SHORT)
    assert selected == [True, False, False]


def test_eos_and_stop_strings(llm: LLM) -> None:
    greedy = SamplingParams(max_tokens=60, temperature=0)
    stopped = SamplingParams(max_tokens=60, temperature=0, stop=[" of Folio", "nothing"])
    whole, cut = llm.generate([ask("Hello")] * 2, [greedy, stopped])
    assert whole.finish_reason == "stop"
    assert whole.token_ids[-1] in llm.engine.model.eos_token_ids
    assert whole.text.endswith("or type help.")
    assert (cut.text, cut.finish_reason) == ("Hello! I am the toy model", "stop")


def test_nothing_is_generated_when_one_prompt_is_bad(llm: LLM) -> None:
    with pytest.raises(RequestError, match="empty"):
        llm.generate(["Hello", []])
    with pytest.raises(RequestError, match="list of prompts"):
        llm.generate("Hello")
    with pytest.raises(RequestError, match="2 prompts but 1 params"):
        llm.generate(["a", "b"], [SamplingParams()])
    assert llm.generate([]) == []
    assert not llm.engine.has_work


def test_an_interrupt_leaves_no_request_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a request that the engine had, and the call had not noted, made every later call fail."""
    add = llm.engine.add_request

    def interrupted(*args: Any, **options: Any) -> None:
        has_first = llm.engine.has_work
        add(*args, **options)
        if has_first:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "add_request", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a", "b"])
    assert not llm.engine.has_work
    assert len(llm.generate(["a"], SHORT)[0].token_ids) == 3


def test_params_may_be_numpy_numbers(llm: LLM) -> None:
    params = SamplingParams(max_tokens=np.int64(3), temperature=np.float32(0), seed=np.int32(1), ignore_eos=True)
    assert len(llm.generate(["a"], params)[0].token_ids) == 3


def test_text_needs_a_tokenizer() -> None:
    with LLM("builtin", skip_tokenizer_init=True, kv_memory_bytes=8 << 20) as llm:
        with pytest.raises(RequestError, match="needs a tokenizer"):
            llm.generate(["text"])
        assert llm.generate([[1, 2]], SamplingParams(max_tokens=2, ignore_eos=True))[0].text == ""


def test_calls_from_several_threads_are_served_in_turn(llm: LLM) -> None:
    """Two threads stepped one engine: `KeyError: 'llm-6'`, a delta of the other one's request."""
    prompts: list[list[str | list[int]]] = [[[5, 6, 7 + i], [8 + i] * 9] for i in range(6)]
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    expected = [llm.generate(pair, params) for pair in prompts]
    together = threading.Barrier(len(prompts))

    def generate(pair: list[str | list[int]]) -> object:
        together.wait(30)
        return llm.generate(pair, params)

    with ThreadPoolExecutor(len(prompts)) as pool:
        assert list(pool.map(generate, prompts)) == expected


def test_nothing_runs_in_a_closed_llm() -> None:
    """`generate` after `close` ended the process (SIGSEGV), and `close` from another thread took the memory from under
    a step."""
    llm = LLM("builtin", skip_tokenizer_init=True, kv_memory_bytes=8 << 20)
    stepping = threading.Event()

    def wait_at_first(*_: object) -> None:
        if not stepping.is_set():
            stepping.set()
            time.sleep(0.3)  # long enough for a `close` that does not wait

    llm.engine.model.module.register_forward_pre_hook(wait_at_first)
    with ThreadPoolExecutor(1) as pool:
        completions = pool.submit(llm.generate, [[1, 2]], SHORT)
        assert stepping.wait(30)
        llm.close()
        assert len(completions.result(30)[0].token_ids) == 3
    llm.close()
    with pytest.raises(EngineError, match="closed; create another one"):
        llm.generate([[1, 2]])
