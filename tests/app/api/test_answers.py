"""Answers from pieces: choices, roles, echo, log probabilities, tool calls, usage."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from folio.app.api.openai.answers import ChatAnswer, CompletionAnswer
from folio.app.api.openai.bodies import CompletionRequest
from folio.app.api.openai.chat_body import ChatCompletionRequest
from folio.app.api.openai.logprobs import LEAST_LOGPROB, TokenTexts
from folio.app.api.output.formats import REASONING_SYNTAXES, TOOL_SYNTAXES, OutputFormat
from folio.app.api.output.plan import OutputPlan
from folio.app.engine.model.tokenizer import load_tokenizer
from folio.app.engine.request.delta import Delta
from folio.app.engine.sampling.token_logprobs import TokenLogprobs
from folio.app.fleet.messages import Piece, PieceCollector, split_public_id, whole_outputs
from tests.app.small_tokenizers import sentencepiece

TOKENIZER = load_tokenizer("builtin")
TOKENS = TokenTexts(TOKENIZER)
PROMPT = TOKENIZER.encode("The key of €5")
[A], [B] = TOKENIZER.encode(" a"), TOKENIZER.encode(" b")
PLAIN = OutputPlan()
TOOLS = OutputPlan(OutputFormat(REASONING_SYNTAXES["qwen3"], TOOL_SYNTAXES["hermes"][1]), {"f": {}, "g": {}})


def logprob(token_id: int, value: float = -0.5, *top: tuple[int, float]) -> TokenLogprobs:
    return TokenLogprobs(token_id, value, 1, top)


PROMPT_ENTRIES = tuple(map(logprob, PROMPT[1:]))


def piece(text: str, *token_ids: int, **more: Any) -> Piece:
    return Piece(text, token_ids, **({"replica": "r1"} | more))


def completion(prompts: list[list[int]] | None = None, echoed: list[str] | None = None, **fields: Any) -> Any:
    request = CompletionRequest(model="m", prompt="", **fields)
    return CompletionAnswer("cmpl-1", request, TOKENS, [PROMPT] if prompts is None else prompts, echoed)


def chat(plan: OutputPlan = PLAIN, **fields: Any) -> Any:
    request = ChatCompletionRequest(model="m", messages=[], **fields)
    return ChatAnswer("chatcmpl-1", request, TOKENS, [1, 2, 3], plan)


def test_several_prompts_and_outputs() -> None:
    """All outputs of the first prompt come first; the usage has each prompt once, and all outputs."""
    outputs = [
        [piece(f"{p}{i}", A, B, index=i, finish_reason="stop", num_cached_tokens=p + 1) for i in (1, 0)] for p in (0, 1)
    ]
    whole = completion([PROMPT, PROMPT[:2]], n=2).full_answer(outputs)
    assert [(choice.index, choice.text) for choice in whole.choices] == [(0, "00"), (1, "01"), (2, "10"), (3, "11")]
    assert whole.usage.model_dump() == {
        "prompt_tokens": len(PROMPT) + 2,
        "completion_tokens": 8,
        "total_tokens": len(PROMPT) + 10,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    assert whole.id == "cmpl-1"  # several prompts: no public id


def test_the_public_id_names_the_replica() -> None:
    streamed = completion()
    chunks = [streamed.chunk(piece("a", A)), streamed.chunk(piece("", finish_reason="stop")), streamed.last_chunk()]
    assert {chunk.id for chunk in chunks} == {"cmpl-1.r1"}
    assert split_public_id(chunks[0].id) == ("cmpl-1", "r1")
    assert split_public_id("cmpl-1") == ("cmpl-1", "")


def test_chunks_add_up_to_the_full_answer() -> None:
    entries = (logprob(A, -0.1, (A, -0.1), (B, -2.0)), logprob(B, -0.2, (A, -0.1), (B, -0.2)))
    end: dict[str, Any] = {"finish_reason": "stop", "stop_reason": "x"}
    settings: dict[str, Any] = {"logprobs": 1, "echoed": ["The key of €5"]}
    streamed = completion(**settings)
    [first] = streamed.chunk(piece(" a", A, logprobs=entries[:1], prompt_logprobs=PROMPT_ENTRIES)).choices
    [second] = streamed.chunk(piece(" b", B, logprobs=entries[1:], **end)).choices
    whole = completion(**settings).full_answer(
        [[piece(" a b", A, B, logprobs=entries, prompt_logprobs=PROMPT_ENTRIES, **end)]]
    )
    [choice] = whole.choices
    assert first.text + second.text == choice.text == "The key of €5 a b"
    assert (choice.finish_reason, choice.stop_reason) == (second.finish_reason, second.stop_reason) == ("stop", "x")
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert getattr(first.logprobs, name) + getattr(second.logprobs, name) == getattr(choice.logprobs, name)
    assert (choice.logprobs.token_logprobs[0], choice.logprobs.top_logprobs[0]) == (None, None)
    assert choice.logprobs.token_logprobs[-2:] == [-0.1, -0.2]
    assert choice.logprobs.top_logprobs[-2:] == [{" a": -0.1}, {" b": -0.2, " a": -0.1}]  # one, and the token itself
    assert streamed.last_chunk().usage == whole.usage


def test_offsets_are_places_in_the_text() -> None:
    """Also where a character is several tokens, and around special tokens."""
    [end] = TOKENIZER.encode("<|end|>")
    token_ids = [*TOKENIZER.encode("x €"), end, *TOKENIZER.encode("yz")]
    one = piece("x €yz", *token_ids, logprobs=tuple(map(logprob, token_ids)))
    logprobs = completion(logprobs=0).full_answer([[one]]).choices[0].logprobs
    euro, at = logprobs.tokens.index("bytes:\\xe2"), logprobs.tokens.index("<|end|>")
    assert logprobs.text_offset[euro : euro + 3] == [2, 2, 2]
    assert logprobs.text_offset[at : at + 2] == [3, 3]
    assert logprobs.text_offset[-1] == 5 - len(logprobs.tokens[-1])


def test_offsets_where_the_first_token_has_a_space_that_the_text_lacks() -> None:
    """SentencePiece begins every text with a space; the offsets of later tokens are still those in the text."""
    [y] = TOKENIZER.encode("y")
    one = piece("y", y, logprobs=(logprob(y),), prompt_logprobs=(logprob(y),))
    logprobs = completion([[A, y]], logprobs=0, echoed=["ay"]).full_answer([[one]]).choices[0].logprobs
    assert "".join(logprobs.tokens) == " ayy"
    assert logprobs.text_offset == [0, 1, 2]


def test_every_output_echoes_the_prompt_of_the_first() -> None:
    """The engine sends the prompt's log probabilities once."""
    streamed = completion(n=2, logprobs=0, echoed=["p "])
    choices = [
        streamed.chunk(piece("b", B, index=1, prompt_logprobs=PROMPT_ENTRIES, logprobs=(logprob(B),))).choices[0],
        streamed.chunk(piece("a", A, index=0, logprobs=(logprob(A),))).choices[0],
        streamed.chunk(piece("c", A, index=0, logprobs=(logprob(A),))).choices[0],
    ]
    assert [choice.text for choice in choices] == ["p b", "p a", "c"]
    lengths = [len(choice.logprobs.tokens) for choice in choices if choice.logprobs is not None]
    assert lengths == [len(PROMPT) + 1, len(PROMPT) + 1, 1]


def test_only_an_echo() -> None:
    one = piece("a", A, logprobs=(logprob(A),), prompt_logprobs=PROMPT_ENTRIES, finish_reason="stop", stop_reason=A)
    whole = completion(logprobs=0, echoed=["p"], max_tokens=0).full_answer([[one]])
    [choice] = whole.choices
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("p", "length", None)
    assert len(choice.logprobs.tokens) == len(PROMPT)
    assert whole.usage.completion_tokens == 0


def test_log_probabilities_are_finite() -> None:
    """JSON has no infinity, and FastAPI would answer 500."""
    one = piece("a", A, logprobs=(logprob(A, float("-inf"), (B, float("-inf"))),))
    logprobs = completion(logprobs=1).full_answer([[one]]).choices[0].logprobs
    assert logprobs.token_logprobs == [LEAST_LOGPROB]
    assert logprobs.top_logprobs == [{" a": LEAST_LOGPROB, " b": LEAST_LOGPROB}]


def test_extensions_are_left_out_while_they_are_null() -> None:
    plain = completion().chunk(piece("a", A)).choices[0].model_dump()
    assert plain == {"index": 0, "text": "a", "logprobs": None, "finish_reason": None}
    entries = (TokenLogprobs(PROMPT[1], -3.0, 7, ((A, -0.5),)),)
    one = piece("a", A, score=-1.5, stop_reason=A, prompt_logprobs=entries)
    choice = completion([PROMPT[:2]], prompt_logprobs=1).full_answer([[one]]).choices[0].model_dump(mode="json")
    assert (choice["score"], choice["stop_reason"]) == (-1.5, A)
    assert choice["prompt_logprobs"][0] is None
    assert choice["prompt_logprobs"][1][str(PROMPT[1])]["rank"] == 7
    assert choice["prompt_logprobs"][1][str(A)] == {"logprob": -0.5, "rank": 1, "decoded_token": " a"}


def test_the_first_chunk_of_each_output_has_the_role() -> None:
    answer = chat()
    chunks = [
        answer.chunk(piece("a", A, index=1)),
        answer.chunk(piece("b", B, index=0)),
        answer.chunk(piece("c", A, index=1, finish_reason="stop", stop_reason="x")),
        answer.chunk(piece("", B, index=0, finish_reason="length")),
    ]
    assert [chunk.model_dump(mode="json")["choices"][0] for chunk in chunks if chunk is not None] == [
        {"index": 1, "delta": {"role": "assistant", "content": "a"}, "logprobs": None, "finish_reason": None},
        {"index": 0, "delta": {"role": "assistant", "content": "b"}, "logprobs": None, "finish_reason": None},
        {"index": 1, "delta": {"content": "c"}, "logprobs": None, "finish_reason": "stop", "stop_reason": "x"},
        {"index": 0, "delta": {"content": ""}, "logprobs": None, "finish_reason": "length"},
    ]
    last = answer.last_chunk()
    assert last.id == "chatcmpl-1.r1"
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (3, 4)


def test_log_probabilities_of_a_chat() -> None:
    entry = TokenLogprobs(A, -0.5, 2, ((B, -0.1), (A, -0.5)))
    whole = chat(logprobs=True, top_logprobs=1).full_answer([[piece(" a", A, logprobs=(entry,), finish_reason="stop")]])
    assert whole.choices[0].model_dump(mode="json")["logprobs"]["content"] == [
        {
            "token": " a",
            "logprob": -0.5,
            "bytes": [32, 97],
            "top_logprobs": [{"token": " b", "logprob": -0.1, "bytes": [32, 98]}],
        }
    ]
    assert chat().full_answer([[piece(" a", A)]]).choices[0].logprobs is None


def test_log_probabilities_of_the_prompt_come_once() -> None:
    """With the first chunk, even where it is not that of the first piece."""
    first = piece("<tool", A, prompt_logprobs=(TokenLogprobs(2, -1.0, 1), TokenLogprobs(3, -2.0, 4)))
    streamed = chat(prompt_logprobs=0, plan=TOOLS)
    held, begun, later = [streamed.chunk(p) for p in (first, piece(" bar", B), piece("x", B))]
    assert held is None
    ranks = [token and {token_id: entry.rank for token_id, entry in token.items()} for token in begun.prompt_logprobs]
    assert ranks == [None, {2: 1}, {3: 4}]
    assert "prompt_logprobs" not in later.model_dump()
    assert chat(prompt_logprobs=0).full_answer([[first]]).prompt_logprobs == begun.prompt_logprobs
    assert "prompt_logprobs" not in chat().full_answer([[first]]).model_dump()


@pytest.mark.parametrize(
    ("text", "stop", "reason", "arguments"),
    [
        ('<tool_call>{"name": "f", "arguments": {"a": "x', "STOP", "stop", '{"a": "x'),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}\n', "</tool_call>", "tool_calls", '{"a": 1}'),
        ('<tool_call>{"name": "f", "arguments": {"a": "x', None, "length", '{"a": "x'),
        ('<tool_call>{"name": "f", "arg', None, "length", ""),
        ('<tool_call>{"na', None, "length", None),
    ],
)
def test_forced_calls_that_are_cut(text: str, stop: str | None, reason: str, arguments: str | None) -> None:
    """Their syntax was the content, and one that a stop string had cut had the reason "tool_calls"."""
    plan = dataclasses.replace(TOOLS, forced=True)
    last = piece(text, A, finish_reason="length" if stop is None else "stop", stop_reason=stop)
    [choice] = chat(plan=plan).full_answer([[last]]).choices
    chunk = chat(plan=plan).chunk(last)
    for one, message in ((choice, choice.message), (chunk.choices[0], chunk.choices[0].delta)):
        assert (one.finish_reason, message.content or "") == (reason, "")
        calls = message.tool_calls or []
        assert [call.function and call.function.arguments for call in calls] == (
            [] if arguments is None else [arguments]
        )


@given(
    texts=st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["", "a", "bc"])), max_size=12),
    order=st.permutations(range(3)),
    cuts=st.sets(st.integers(1, 14)),
)
def test_deltas_collect_into_pieces(texts: list[tuple[int, str]], order: list[int], cuts: set[int]) -> None:
    """Deltas without text wait; the prompt's log probabilities go with the first piece of any output. The piece that
    ends the request comes last, although its output may have been the first to grow."""
    deltas = [Delta("r", (i,), text, index=index, logprobs=(logprob(i),)) for i, (index, text) in enumerate(texts)]
    for unfinished, index in zip((2, 1, 0), order, strict=True):
        end: Any = "length" if index else "stop"
        deltas.append(Delta("r", (99,), "", end, index=index, num_unfinished=unfinished, stop_reason=5, score=-1.0))
    deltas[0] = dataclasses.replace(deltas[0], prompt_logprobs=PROMPT_ENTRIES)
    whole, streamed = PieceCollector("here"), PieceCollector("here")
    whole.hold(deltas)
    ends = [0, *sorted(cut for cut in cuts if cut < len(deltas)), len(deltas)]
    pushed: list[list[Piece]] = []
    for begin, end in itertools.pairwise(ends):
        streamed.hold(deltas[begin:end])
        pushed.append(streamed.pieces())
    pieces = list(itertools.chain.from_iterable(pushed))
    assert all(piece.text or piece.finish_reason for piece in pieces)
    assert all(len({piece.index for piece in step}) == len(step) for step in pushed)
    assert [piece.ends_request for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert [piece.prompt_logprobs for piece in pieces] == [PROMPT_ENTRIES] + [()] * (len(pieces) - 1)
    outputs = whole_outputs(whole.pieces())
    assert whole_outputs(pieces) == outputs
    for index, one in enumerate(outputs):
        mine, own = ([each for each in found if each.index == index] for found in (pieces, deltas))
        assert one.text == "".join(delta.text for delta in own) == "".join(piece.text for piece in mine)
        for name in ("token_ids", "logprobs"):
            joined = sum((getattr(piece, name) for piece in mine), ())
            assert getattr(one, name) == joined == sum((getattr(delta, name) for delta in own), ())
        assert bool(one.prompt_logprobs) == (index == 0)
        for name in ("index", "finish_reason", "stop_reason", "score"):
            assert getattr(one, name) == getattr(mine[-1], name) == getattr(own[-1], name)
        assert {one.replica, *(piece.replica for piece in mine)} == {"here"}


# ---- bytes of tokens, with tokenizers of the kinds that models have ----

TEXT = "Hello wörld, 3 € and 🙂 \n\t end"


def plain() -> PreTrainedTokenizerFast:
    """A tokenizer whose decoder only joins tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.train_from_iterator([TEXT], BpeTrainer(vocab_size=60, show_progress=False))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize("make", [lambda: TOKENIZER, sentencepiece, plain])
def test_bytes_of_a_text_join_to_it(make: Callable[[], PreTrainedTokenizerFast]) -> None:
    tokenizer = make()
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    assert b"".join(map(TokenTexts(tokenizer).bytes_of, ids)).decode().removeprefix(" ") == TEXT


@pytest.mark.parametrize("make", [lambda: TOKENIZER, sentencepiece])
def test_a_character_in_parts(make: Callable[[], PreTrainedTokenizerFast]) -> None:
    tokenizer = make()
    tokens = TokenTexts(tokenizer)
    parts = tokenizer.encode("🙂", add_special_tokens=False)[-4:]
    assert [tokens.chat_token(i) for i in parts] == ["\\xf0", "\\x9f", "\\x99", "\\x82"]
    assert tokens.completion_token(parts[0]) == "bytes:\\xf0"
    assert tokens.bytes_of(parts[0]) == b"\xf0"


def test_special_tokens_and_ids_beyond_the_vocabulary() -> None:
    tokenizer = sentencepiece()
    tokens = TokenTexts(tokenizer)
    begin, word = tokenizer.convert_tokens_to_ids(["<s>", "▁He"])
    assert (tokens.is_special(begin), tokens.chat_token(begin)) == (True, "<s>")
    assert (tokens.is_special(word), tokens.chat_token(word)) == (False, " He")
    assert tokens.bytes_of(10**6) == b""  # a model may have more tokens than its tokenizer
