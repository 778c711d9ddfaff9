"""Parameters that need the model's tokens, through the whole engine."""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterator

import pytest

from folio.app.engine.engine import Engine
from folio.app.engine.model.vocabulary import Vocabulary
from folio.app.engine.request.delta import Delta
from folio.app.engine.request.engine_request import EngineRequest
from folio.app.engine.sampling.params import SamplingParams, Structure
from folio.app.errors import RequestError
from tests.app.engine.engines import engine_of, run, steps

STORY = "The key of room 417 is 93. The key of room"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = engine_of("builtin", max_num_seqs=32)
    yield engine
    engine.check_integrity()
    engine.close()


def encode(engine: Engine, text: str) -> list[int]:
    assert engine.model.tokenizer is not None
    token_ids: list[int] = engine.model.tokenizer.encode(text)
    return token_ids


def merged(engine: Engine) -> dict[str, Delta]:
    """Each request's deltas as one."""
    return {
        name: dataclasses.replace(
            parts[-1],
            token_ids=tuple(token for delta in parts for token in delta.token_ids),
            text="".join(delta.text for delta in parts),
            logprobs=tuple(logprob for delta in parts for logprob in delta.logprobs),
        )
        for name, parts in run(engine).items()
    }


def test_a_batch_of_everything_at_once(engine: Engine) -> None:
    """Each output is as its parameters say, and as it is alone."""
    stop = encode(engine, "93.")[-1]
    settings: dict[str, dict[str, object]] = {
        "greedy": {"temperature": 0, "ignore_eos": True},
        "sampled": {"top_p": 0.9, "min_p": 0.01, "temperature": 1.5},
        "penalised": {
            "temperature": 0,
            "ignore_eos": True,
            "presence_penalty": 2.0,
            "frequency_penalty": 2.0,
            "repetition_penalty": 1.5,
        },
        "words": {"temperature": 0, "bad_words": ["417", "is"]},
        "biased": {"temperature": 0, "logit_bias": {7: 100.0}},
        "long": {"temperature": 1.0, "logit_bias": dict.fromkeys(engine.model.eos_token_ids, 100.0), "min_tokens": 9},
        "choice": {"temperature": 2.0, "structure": Structure("choice", '["north by", "north", "south"]')},
        "number": {"temperature": 2.0, "structure": Structure("regex", "[1-9]{3},[a-c]+;")},
        "stop": {"temperature": 0, "stop_token_ids": [stop], "logprobs": 2},
        "end": {"temperature": 0, "stop": ["is"], "include_stop_str": True},
    }
    params = {
        name: SamplingParams(max_tokens=24, seed=i, **s)  # type: ignore[arg-type]
        for i, (name, s) in enumerate(settings.items())
    }
    for name, one in params.items():
        engine.submit(name, encode(engine, STORY), one)
    found = merged(engine)
    assert all(delta.error is None for delta in found.values())
    assert found["greedy"].text.startswith(" 417 is 93.")
    assert not re.search("417|is", found["words"].text)
    assert set(found["biased"].token_ids) == {7}
    assert len(found["long"].token_ids) == 10
    assert found["long"].finish_reason == "stop"
    assert found["choice"].text in ("north by", "north", "south")
    assert re.fullmatch("[1-9]{3},[a-c]+;", found["number"].text) or found["number"].finish_reason == "length"
    assert found["end"].text.endswith("is")
    assert found["end"].stop_reason == "is"
    repeated = [len(found[name].token_ids) - len(set(found[name].token_ids)) for name in ("greedy", "penalised")]
    assert repeated[1] < repeated[0]
    assert found["stop"].text == " 417 is 93"
    assert found["stop"].stop_reason == found["stop"].token_ids[-1] == stop
    assert [logprob.token_id for logprob in found["stop"].logprobs] == list(found["stop"].token_ids)
    assert all(logprob.rank == 1 and len(logprob.top) == 2 for logprob in found["stop"].logprobs)
    for name, one in params.items():
        engine.submit(name, encode(engine, STORY), one)
        assert merged(engine)[name].token_ids == found[name].token_ids, name


def test_forks_take_over_what_their_parameters_share(engine: Engine) -> None:
    """A fork stays at its place in its structure; bad words of its own hold from there on."""
    structure = Structure("regex", "[ab]{4}c[12]{3}z")
    engine.submit("parent", encode(engine, STORY), SamplingParams(structure=structure, seed=1, max_tokens=30))
    texts: dict[str, str] = {"parent": ""}
    while len(texts["parent"]) < 3:
        for delta in engine.step():
            texts["parent"] += delta.text
    before = texts["parent"]
    engine.fork("parent", "same", SamplingParams(n=2, structure=structure, seed=2, max_tokens=30))
    engine.fork("parent", "free", SamplingParams(temperature=0, max_tokens=5, bad_words=["a", "b", "c"]))
    outputs: dict[tuple[str, int], str] = defaultdict(str)
    for delta in steps(engine):
        assert delta.error is None
        outputs[delta.request_id, delta.index] += delta.text
    for name in (("parent", 0), ("same", 0), ("same", 1)):
        assert re.fullmatch("[ab]{4}c[12]{3}z", before + outputs[name])
    assert not re.search("[abc]$", outputs["free", 0])


def test_contradictions_end_the_request_alone(engine: Engine) -> None:
    """An error that says whose fault it is; a neighbour goes on."""
    choice = Structure("choice", '["north"]')
    engine.submit("never", encode(engine, STORY), SamplingParams(structure=choice, bad_words=list("north")))
    engine.submit("fine", encode(engine, STORY), SamplingParams(structure=choice))
    found = merged(engine)
    assert isinstance(found["never"].error, RequestError)
    assert "contradict each other" in str(found["never"].error)
    assert found["fine"].text == "north"


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"logit_bias": {10**6: 1.0}}, "logit_bias"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids"),
        ({"allowed_token_ids": [0, 10**6]}, "allowed_token_ids"),
        ({"structure": Structure("regex", "(")}, "structure"),
    ],
)
def test_what_the_model_does_not_have_is_refused(engine: Engine, params: dict[str, object], field: str) -> None:
    with pytest.raises(RequestError) as error:
        engine.prepare(EngineRequest("r", [1], SamplingParams(**params)))  # type: ignore[arg-type]
    assert error.value.param == field


@pytest.mark.parametrize(
    "params", [{"bad_words": ["x"]}, {"structure": Structure("json", "{}")}, {"stop": "x"}], ids=str
)
def test_words_need_a_tokenizer(engine: Engine, params: dict[str, object]) -> None:
    vocabulary = Vocabulary(dataclasses.replace(engine.model, tokenizer=None))
    with pytest.raises(RequestError, match="without one") as error:
        vocabulary.check_params(SamplingParams(**params))  # type: ignore[arg-type]
    assert error.value.param in params
