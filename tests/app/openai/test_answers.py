"""Completions from pieces: choices, echo, log probabilities, usage."""

from __future__ import annotations

from typing import Any

import pytest

from app.engine.model.loader import load_tokenizer
from app.engine.request import Delta, TokenLogprobs
from app.fleet.messages import Piece, PieceCollector, split_public_id
from app.openai.answers import CompletionAnswer
from app.openai.logprobs import LEAST_LOGPROB, TokenTexts

TOKENIZER = load_tokenizer("builtin")
TOKENS = TokenTexts(TOKENIZER)
PROMPT = TOKENIZER.encode("The key of €5")
A, B = TOKENIZER.encode(" a")[0], TOKENIZER.encode(" b")[0]


def logprob(token_id: int, value: float = -0.5, *top: tuple[int, float]) -> TokenLogprobs:
    return TokenLogprobs(token_id, value, 1, top)


def piece(text: str, *token_ids: int, **more: Any) -> Piece:
    return Piece(text, token_ids, **({"replica": "r1"} | more))


def answer(prompts: list[list[int]] | None = None, **more: Any) -> CompletionAnswer:
    return CompletionAnswer("cmpl-1", "m", TOKENS, [PROMPT] if prompts is None else prompts, **more)


def test_several_prompts_and_outputs() -> None:
    """All outputs of the first prompt come first; the usage has each prompt once, and all outputs."""
    prompts = [PROMPT, PROMPT[:2]]
    outputs = [
        [piece(f"{p}{i}", A, B, index=i, finish_reason="stop", num_cached_tokens=p + 1) for i in (1, 0)] for p in (0, 1)
    ]
    whole = answer(prompts, num_outputs=2).full_answer(outputs)
    assert [(choice.index, choice.text) for choice in whole.choices] == [(0, "00"), (1, "01"), (2, "10"), (3, "11")]
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == len(PROMPT) + 2
    assert whole.usage.completion_tokens == 8
    assert whole.usage.total_tokens == len(PROMPT) + 10
    assert whole.usage.prompt_tokens_details.cached_tokens == 3
    assert whole.id == "cmpl-1"  # nothing that could be forked


def test_the_id_says_where_the_request_is() -> None:
    streamed = answer()
    chunks = [streamed.chunk(piece("a", A)), streamed.chunk(piece("", finish_reason="stop")), streamed.last_chunk()]
    assert {chunk.id for chunk in chunks} == {"cmpl-1.r1"}
    assert split_public_id(chunks[0].id) == ("cmpl-1", "r1")
    assert split_public_id("cmpl-1") == ("cmpl-1", "")


def test_chunks_add_up_to_the_whole() -> None:
    entries = [logprob(A, -0.1, (A, -0.1), (B, -2.0)), logprob(B, -0.2, (A, -0.1), (B, -0.2))]
    pieces = [
        piece(" a", A, logprobs=(entries[0],)),
        piece(" b", B, logprobs=(entries[1],), finish_reason="stop", stop_reason="x"),
    ]
    settings: dict[str, Any] = {"num_top": 1, "echo": ["The key of €5"]}
    prompt_entries = tuple(logprob(token_id) for token_id in PROMPT[1:])
    streamed = answer(**settings)
    chunks = [
        streamed.chunk(Piece(**{**_fields(pieces[0]), "prompt_logprobs": prompt_entries})),
        streamed.chunk(pieces[1]),
    ]
    both = Piece(
        " a b",
        (A, B),
        logprobs=tuple(entries),
        prompt_logprobs=prompt_entries,
        finish_reason="stop",
        stop_reason="x",
        replica="r1",
    )
    [choice] = answer(**settings).full_answer([[both]]).choices
    first, second = chunks[0].choices[0], chunks[1].choices[0]
    assert first.text + second.text == choice.text == "The key of €5 a b"
    assert (choice.finish_reason, choice.stop_reason) == (second.finish_reason, second.stop_reason) == ("stop", "x")
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        parts = [getattr(c.logprobs, name) for c in (first, second)]
        assert parts[0] + parts[1] == getattr(choice.logprobs, name)
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs[0] is None
    assert choice.logprobs.top_logprobs[0] is None
    assert choice.logprobs.token_logprobs[-2:] == [-0.1, -0.2]
    # one alternative, and the token itself
    assert choice.logprobs.top_logprobs[-2:] == [{" a": -0.1}, {" b": -0.2, " a": -0.1}]
    assert streamed.last_chunk().usage == answer(**settings).full_answer([[both]]).usage


def _fields(piece: Piece) -> dict[str, Any]:
    return {name: getattr(piece, name) for name in Piece.__dataclass_fields__}


def test_offsets_are_places_in_the_text() -> None:
    """Also when a character is several tokens, and where special tokens are in between."""
    [end] = TOKENIZER.encode("<|end|>")
    token_ids = [*TOKENIZER.encode("x €"), end, *TOKENIZER.encode("yz")]
    entries = tuple(map(logprob, token_ids))
    [choice] = answer(num_top=0).full_answer([[piece("x €yz", *token_ids, logprobs=entries)]]).choices
    assert choice.logprobs is not None
    euro = choice.logprobs.tokens.index("bytes:\\xe2")
    assert choice.logprobs.text_offset[euro : euro + 3] == [2, 2, 2]
    at = choice.logprobs.tokens.index("<|end|>")
    assert choice.logprobs.text_offset[at : at + 2] == [3, 3]
    assert choice.logprobs.text_offset[-1] == 5 - len(choice.logprobs.tokens[-1])


def test_offsets_where_tokens_have_a_space_that_the_text_has_not() -> None:
    """SentencePiece begins a text with one: what comes behind is where it is in the text nevertheless."""
    [y] = TOKENIZER.encode("y")
    one = piece("y", y, logprobs=(logprob(y),), prompt_logprobs=(logprob(y),))
    [choice] = answer([[A, y]], num_top=0, echo=["ay"]).full_answer([[one]]).choices
    assert choice.logprobs is not None
    assert "".join(choice.logprobs.tokens) == " ayy"
    assert choice.logprobs.text_offset == [0, 1, 2]


def test_every_output_echoes_with_the_prompt_of_the_first() -> None:
    """The engine sends the prompt's log probabilities once."""
    entries = tuple(logprob(token_id) for token_id in PROMPT[1:])
    streamed = answer(num_outputs=2, num_top=0, echo=["p "])
    first = streamed.chunk(piece("b", B, index=1, prompt_logprobs=entries, logprobs=(logprob(B),))).choices[0]
    other = streamed.chunk(piece("a", A, index=0, logprobs=(logprob(A),))).choices[0]
    again = streamed.chunk(piece("c", A, index=0, logprobs=(logprob(A),))).choices[0]
    assert [first.text, other.text, again.text] == ["p b", "p a", "c"]
    assert first.logprobs is not None
    assert other.logprobs is not None
    assert again.logprobs is not None
    assert len(first.logprobs.tokens) == len(other.logprobs.tokens) == len(PROMPT) + 1
    assert len(again.logprobs.tokens) == 1


def test_only_an_echo() -> None:
    entries = tuple(logprob(token_id) for token_id in PROMPT[1:])
    settings: dict[str, Any] = {"num_top": 0, "echo": ["p"], "only_echoes": True}
    one = piece("a", A, logprobs=(logprob(A),), prompt_logprobs=entries, finish_reason="stop", stop_reason=A)
    whole = answer(**settings).full_answer([[one]])
    [choice] = whole.choices
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("p", "length", None)
    assert choice.logprobs is not None
    assert len(choice.logprobs.tokens) == len(PROMPT)
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 0


def test_log_probabilities_are_finite() -> None:
    """JSON has no infinity, and FastAPI would answer 500."""
    one = piece("a", A, logprobs=(logprob(A, float("-inf"), (B, float("-inf"))),))
    [choice] = answer(num_top=1).full_answer([[one]]).choices
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs == [LEAST_LOGPROB]
    assert choice.logprobs.top_logprobs == [{" a": LEAST_LOGPROB, " b": LEAST_LOGPROB}]


def test_extensions_are_left_out_unless_there_is_something() -> None:
    plain = answer().chunk(piece("a", A)).choices[0].model_dump()
    assert plain == {"index": 0, "text": "a", "logprobs": None, "finish_reason": None}
    entries = (TokenLogprobs(PROMPT[1], -3.0, 7, ((A, -0.5),)),)
    one = piece("a", A, score=-1.5, stop_reason=A, prompt_logprobs=entries)
    choice = answer([PROMPT[:2]], num_prompt_top=1).full_answer([[one]]).choices[0].model_dump(mode="json")
    assert (choice["score"], choice["stop_reason"]) == (-1.5, A)
    assert choice["prompt_logprobs"][0] is None
    assert choice["prompt_logprobs"][1][str(PROMPT[1])]["rank"] == 7
    assert choice["prompt_logprobs"][1][str(A)] == {"logprob": -0.5, "rank": 1, "decoded_token": " a"}


@pytest.mark.parametrize("streamed", [True, False])
def test_deltas_collect_into_pieces(streamed: bool) -> None:
    """What has no text yet waits; the prompt's log probabilities go with the first piece, whoever's it is."""
    entries = (logprob(7),)
    deltas = [
        Delta("r", (1,), "", index=0, prompt_logprobs=entries, logprobs=(logprob(1),)),
        Delta("r", (2,), "b", index=1, num_cached_tokens=4),
        Delta("r", (3,), "a", index=0, logprobs=(logprob(3),)),
        Delta("r", (4,), "", "length", index=1),
        Delta("r", (5,), "", "stop", index=0, stop_reason=5, score=-1.0),
    ]
    deltas[3:] = [Delta("r", (4,), "", "length", index=1, num_unfinished=1), deltas[4]]
    collector = PieceCollector("here")
    if streamed:
        pieces = [piece for delta in deltas for piece in collector.push([delta])]
        assert [(p.index, p.token_ids, p.text) for p in pieces] == [
            (1, (2,), "b"),
            (0, (1, 3), "a"),
            (1, (4,), ""),
            (0, (5,), ""),
        ]
        assert [bool(p.prompt_logprobs) for p in pieces] == [True, False, False, False]
        assert [p.ends_request for p in pieces] == [False, False, False, True]
        assert [entry.token_id for entry in pieces[1].logprobs] == [1, 3]
    else:
        collector.hold(deltas)
        first, second = pieces = collector.held_pieces()
        assert (first.text, first.token_ids, first.finish_reason, first.stop_reason) == ("a", (1, 3, 5), "stop", 5)
        assert (second.text, second.token_ids, second.finish_reason) == ("b", (2, 4), "length")
        assert first.prompt_logprobs == entries
        assert first.score == -1.0
    assert {piece.replica for piece in pieces} == {"here"}


def test_several_steps_at_once_are_a_piece_of_each_output() -> None:
    """The one that ends the request comes last, although its output was the first to grow."""
    deltas = [
        Delta("r", (1,), "a", index=0),
        Delta("r", (2,), "b", index=1),
        Delta("r", (3,), "", index=2),
        Delta("r", (4,), "c", "length", index=1, num_unfinished=2),
        Delta("r", (5,), "d", "stop", index=0),
    ]
    pieces = PieceCollector("here").push(deltas)
    assert [(p.index, p.token_ids, p.text) for p in pieces] == [(1, (2, 4), "bc"), (0, (1, 5), "ad")]
    assert [p.ends_request for p in pieces] == [False, True]
