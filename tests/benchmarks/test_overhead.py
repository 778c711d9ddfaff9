"""The parts of a step, as benchmarks tell them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.engine import sweep
from benchmarks.engine.overhead import step_parts
from folio.app.engine import LLM, SamplingParams


@pytest.fixture
def llm() -> Iterator[LLM]:
    with sweep.make_llm(sweep.config_of("tiny"), "cpu", sweep.QUICK, num_threads=1) as engine:
        yield engine


def attributes(owner: object, depth: int = 3) -> dict[int, set[str]]:
    """Names of the attributes of an object and of its collaborators."""
    found = {id(owner): set(vars(owner))}
    for part in list(vars(owner).values()) if depth > 1 else ():
        if hasattr(part, "__dict__") and type(part).__module__.startswith(("folio.app.", "folio.vmem.")):
            found |= attributes(part, depth - 1)
    return found


def test_parts_add_up_and_the_engine_is_left_as_it_was(llm: LLM) -> None:
    """A part that is counted twice, or a collaborator that goes by another name now, and a wrapper left behind."""
    engine = llm.engine
    before = attributes(engine)
    for i in range(3):
        engine.submit(str(i), [3 + i] * 20, SamplingParams(max_tokens=9, temperature=0, ignore_eos=True))
    engine.step()
    parts = step_parts(llm, 4)
    step, device = parts.pop("step"), parts.pop("device")
    assert sum(parts.values()) == pytest.approx(step)
    assert device == parts["launch"] > 0
    assert {part for part, us in parts.items() if us <= 0} == {"wait"}, "there is no device to wait for"
    with pytest.raises(RuntimeError, match="the requests have ended"):
        step_parts(llm, 10)
    after = attributes(engine)
    assert len(before.keys() & after.keys()) > 10
    assert all(after[part] == names for part, names in before.items() if part in after)
