"""Answers from pieces: choices, roles, echo, log probabilities, tool calls, usage."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from folio.app.api.openai.answers import ChatAnswer, CompletionAnswer
from folio.app.api.openai.bodies import CompletionRequest
from folio.app.api.openai.chat_body import ChatCompletionRequest
from folio.app.api.openai.logprobs import LEAST_LOGPROB, TokenTexts
from folio.app.api.output.formats import REASONING_SYNTAXES, TOOL_SYNTAXES, OutputFormat
from folio.app.api.output.plan import OutputPlan
from folio.app.engine.model.tokenizer import load_tokenizer
from folio.app.engine.request.delta import Delta
from folio.app.engine.sampling.token_logprobs import TokenLogprobs
from folio.app.fleet.messages import Piece, PieceCollector, split_public_id

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


def completion(
    prompts: list[list[int]] | None = None, echoed: list[str] | None = None, **fields: Any
) -> CompletionAnswer:
    request = CompletionRequest(model="m", prompt="", **fields)
    return CompletionAnswer("cmpl-1", request, TOKENS, [PROMPT] if prompts is None else prompts, echoed)


def chat(plan: OutputPlan = PLAIN, **fields: Any) -> ChatAnswer:
    request = ChatCompletionRequest(model="m", messages=[], **fields)
    return ChatAnswer("chatcmpl-1", request, TOKENS, [1, 2, 3], plan)


def num_tokens(text: str) -> int:
    return len(TOKENIZER.encode(text))


def call(name: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>'


def test_several_prompts_and_outputs() -> None:
    """All outputs of the first prompt come first; the usage has each prompt once, and all outputs."""
    outputs = [
        [piece(f"{p}{i}", A, B, index=i, finish_reason="stop", num_cached_tokens=p + 1) for i in (1, 0)] for p in (0, 1)
    ]
    whole = completion([PROMPT, PROMPT[:2]], n=2).full_answer(outputs)
    assert [(choice.index, choice.text) for choice in whole.choices] == [(0, "00"), (1, "01"), (2, "10"), (3, "11")]
    assert whole.usage is not None
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
    assert choice.logprobs is not None
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
    assert logprobs is not None
    euro, at = logprobs.tokens.index("bytes:\\xe2"), logprobs.tokens.index("<|end|>")
    assert logprobs.text_offset[euro : euro + 3] == [2, 2, 2]
    assert logprobs.text_offset[at : at + 2] == [3, 3]
    assert logprobs.text_offset[-1] == 5 - len(logprobs.tokens[-1])


def test_offsets_where_the_first_token_has_a_space_that_the_text_lacks() -> None:
    """SentencePiece begins every text with a space; the offsets of later tokens are still those in the text."""
    [y] = TOKENIZER.encode("y")
    one = piece("y", y, logprobs=(logprob(y),), prompt_logprobs=(logprob(y),))
    logprobs = completion([[A, y]], logprobs=0, echoed=["ay"]).full_answer([[one]]).choices[0].logprobs
    assert logprobs is not None
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
    assert choice.logprobs is not None
    assert len(choice.logprobs.tokens) == len(PROMPT)
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 0


def test_log_probabilities_are_finite() -> None:
    """JSON has no infinity, and FastAPI would answer 500."""
    one = piece("a", A, logprobs=(logprob(A, float("-inf"), (B, float("-inf"))),))
    logprobs = completion(logprobs=1).full_answer([[one]]).choices[0].logprobs
    assert logprobs is not None
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
    assert last.usage is not None
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
    assert begun is not None
    assert begun.prompt_logprobs is not None
    assert later is not None
    ranks = [token and {token_id: entry.rank for token_id, entry in token.items()} for token in begun.prompt_logprobs]
    assert ranks == [None, {2: 1}, {3: 4}]
    assert "prompt_logprobs" not in later.model_dump()
    assert chat(prompt_logprobs=0).full_answer([[first]]).prompt_logprobs == begun.prompt_logprobs
    assert "prompt_logprobs" not in chat().full_answer([[first]]).model_dump()


@pytest.mark.parametrize(
    ("text", "end", "content", "names", "reason"),
    [
        (f"Let me see. {call('f')}{call('g')}", "stop", "Let me see.", ["f", "g"], "tool_calls"),
        (call("f"), "stop", None, ["f"], "tool_calls"),
        (call("f"), "length", None, ["f"], "length"),  # the output might have continued
        (call("unknown"), "stop", call("unknown"), [], "stop"),
        ("", "stop", "", [], "stop"),
    ],
)
def test_tool_calls_of_a_full_answer(text: str, end: Any, content: str | None, names: list[str], reason: str) -> None:
    [choice] = chat(plan=TOOLS).full_answer([[piece(text, A, finish_reason=end)]]).choices
    message = choice.model_dump(mode="json")["message"]
    calls = message.pop("tool_calls", [])
    assert len({call.pop("id") for call in calls}) == len(names)
    assert calls == [{"type": "function", "function": {"name": name, "arguments": "{}"}} for name in names]
    assert (message, choice.finish_reason) == ({"role": "assistant", "content": content}, reason)


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
    assert chunk is not None
    for one, message in ((choice, choice.message), (chunk.choices[0], chunk.choices[0].delta)):
        assert (one.finish_reason, message.content or "") == (reason, "")
        calls = message.tool_calls or []
        assert [call.function and call.function.arguments for call in calls] == (
            [] if arguments is None else [arguments]
        )


def test_tool_calls_of_streamed_outputs() -> None:
    """Text that may be a call is held back with its log probabilities. At the end all text has been sent."""
    answer = chat(logprobs=True, plan=TOOLS)
    begin, end = call("f").partition("{}")[0] + "{", "}}</tool_call>"
    pieces = [
        piece("x", A, logprobs=(logprob(A, -1.0),)),
        piece("no call", A, index=1),
        piece(begin[:9], B, logprobs=(logprob(B, -2.0),)),
        piece(begin[9:], A, logprobs=(logprob(A, -3.0),)),
        piece(end, B, logprobs=(logprob(B, -4.0),)),
        piece(" <tool", A, index=1),
        piece(call("g"), A, logprobs=(logprob(A, -5.0),)),
        piece("", B, finish_reason="stop", logprobs=(logprob(B, -6.0),), num_unfinished=1),
        piece("", index=1, finish_reason="stop"),
    ]
    chunks = [chunk for p in pieces if (chunk := answer.chunk(p)) is not None]
    dumped = [chunk.model_dump(mode="json")["choices"][0] for chunk in chunks]
    first, other = ([choice for choice in dumped if choice["index"] == index] for index in (0, 1))
    for choice in (first[1], first[3]):
        assert choice["delta"]["tool_calls"][0].pop("id").startswith("call_")
    assert [choice["delta"] for choice in first] == [
        {"role": "assistant", "content": "x"},
        {"tool_calls": [{"index": 0, "type": "function", "function": {"name": "f", "arguments": "{"}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]},
        {"tool_calls": [{"index": 1, "type": "function", "function": {"name": "g", "arguments": "{}"}}]},
        {"content": ""},
    ]
    assert [entry["logprob"] for choice in first for entry in choice["logprobs"]["content"]] == [-1, -2, -3, -4, -5, -6]
    assert first[-1]["finish_reason"] == "tool_calls"
    assert "".join(choice["delta"].get("content", "") for choice in other) == "no call <tool"
    assert other[-1]["finish_reason"] == "stop"


def test_reasoning_of_a_full_answer() -> None:
    text = f"<think>\nhm\n</think>\n\nWell.{call('f')}"
    tokens = [piece(text, *TOKENIZER.encode(text), finish_reason="stop")]
    whole = chat(plan=TOOLS).full_answer([tokens])
    [choice] = whole.choices
    message = choice.model_dump(mode="json")["message"]
    [function] = message.pop("tool_calls")
    assert function["function"] == {"name": "f", "arguments": "{}"}
    assert message == {"role": "assistant", "content": "Well.", "reasoning_content": "hm", "reasoning": "hm"}
    assert choice.finish_reason == "tool_calls"
    assert whole.usage.completion_tokens_details is not None
    assert whole.usage.completion_tokens_details.reasoning_tokens == num_tokens(text[: text.index("</think>") + 8])
    assert "completion_tokens_details" not in chat().full_answer([tokens]).usage.model_dump()


def test_reasoning_of_a_streamed_answer() -> None:
    answer = chat(plan=TOOLS)
    texts = ("<th", "ink>", "a", "b", "</think>", "\n\nWell", ".")
    pieces = [piece(text, *TOKENIZER.encode(text)) for text in texts]
    pieces.append(piece("", B, finish_reason="stop"))
    chunks = [chunk for p in pieces if (chunk := answer.chunk(p)) is not None]
    assert [chunk.model_dump(mode="json")["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "reasoning_content": "a", "reasoning": "a"},
        {"reasoning_content": "b", "reasoning": "b"},
        {"content": "Well"},
        {"content": "."},
        {"content": ""},
    ]
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == sum(map(num_tokens, texts[:5]))


@pytest.mark.parametrize("streamed", [True, False])
def test_deltas_collect_into_pieces(streamed: bool) -> None:
    """Deltas without text wait; the prompt's log probabilities go with the first piece of any output."""
    entries = (logprob(7),)
    deltas = [
        Delta("r", (1,), "", index=0, prompt_logprobs=entries, logprobs=(logprob(1),)),
        Delta("r", (2,), "b", index=1, num_cached_tokens=4),
        Delta("r", (3,), "a", index=0, logprobs=(logprob(3),)),
        Delta("r", (4,), "", "length", index=1, num_unfinished=1),
        Delta("r", (5,), "", "stop", index=0, stop_reason=5, score=-1.0),
    ]
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
        assert (first.prompt_logprobs, first.score) == (entries, -1.0)
    assert {piece.replica for piece in pieces} == {"here"}


def test_several_steps_at_once_are_a_piece_of_each_output() -> None:
    """The piece that ends the request comes last, although its output was the first to grow."""
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
