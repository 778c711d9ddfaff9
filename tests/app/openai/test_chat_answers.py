"""Chats from pieces: roles, log probabilities, tool calls."""

from __future__ import annotations

from typing import Any

from app.engine.model.loader import load_tokenizer
from app.engine.request import TokenLogprobs
from app.fleet.messages import Piece
from app.openai.chat_answers import ChatAnswer
from app.openai.logprobs import TokenTexts
from app.openai.tools.bodies import FunctionCallDelta, ToolCallDelta

TOKENIZER = load_tokenizer("builtin")
TOKENS = TokenTexts(TOKENIZER)
[A], [B] = TOKENIZER.encode(" a"), TOKENIZER.encode(" b")


class BracketParser:
    """Everything in brackets is the name of a function to call; what may be one is held back."""

    def __init__(self) -> None:
        self._held = ""
        self._num_calls = 0

    def push(self, text: str) -> tuple[str, list[ToolCallDelta]]:
        self._held += text
        content, calls = "", []
        while "]" in self._held and "[" in self._held:
            before, _, rest = self._held.partition("[")
            name, _, self._held = rest.partition("]")
            content += before
            for function in (FunctionCallDelta(name=name), FunctionCallDelta(arguments="{"), _BRACE):
                first = function.name is not None
                call_id, kind = (f"call_{self._num_calls}", "function") if first else (None, None)
                calls.append(ToolCallDelta(index=self._num_calls, id=call_id, type=kind, function=function))  # type: ignore[arg-type]
            self._num_calls += 1
        if "[" not in self._held:
            content, self._held = content + self._held, ""
        return content, calls

    def finish(self) -> tuple[str, list[ToolCallDelta]]:
        held, self._held = self._held, ""
        return held, []


_BRACE = FunctionCallDelta(arguments="}")


def piece(text: str, *token_ids: int, **more: Any) -> Piece:
    return Piece(text, token_ids, **({"replica": "r1"} | more))


def answer(**more: Any) -> ChatAnswer:
    return ChatAnswer("chatcmpl-1", "m", TOKENS, [1, 2, 3], **more)


def test_the_first_chunk_of_each_output_has_the_role() -> None:
    chat = answer()
    chunks = [
        chat.chunk(piece("a", A, index=1)),
        chat.chunk(piece("b", B, index=0)),
        chat.chunk(piece("c", A, index=1, finish_reason="stop", stop_reason="x")),
        chat.chunk(piece("", B, index=0, finish_reason="length")),
    ]
    dumped = [chunk.model_dump(mode="json")["choices"][0] for chunk in chunks if chunk is not None]
    assert [(choice["index"], choice["delta"]) for choice in dumped] == [
        (1, {"role": "assistant", "content": "a"}),
        (0, {"role": "assistant", "content": "b"}),
        (1, {"content": "c"}),
        (0, {"content": ""}),
    ]
    assert [choice["finish_reason"] for choice in dumped] == [None, None, "stop", "length"]
    assert [choice.get("stop_reason") for choice in dumped] == [None, None, "x", None]
    last = chat.last_chunk()
    assert last.id == "chatcmpl-1.r1"
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (3, 4)


def test_log_probabilities() -> None:
    entry = TokenLogprobs(A, -0.5, 2, ((B, -0.1), (A, -0.5)))
    whole = answer(num_top=1).full_answer([piece(" a", A, logprobs=(entry,), finish_reason="stop")])
    assert whole.choices[0].model_dump(mode="json")["logprobs"] == {
        "content": [
            {
                "token": " a",
                "logprob": -0.5,
                "bytes": [32, 97],
                "top_logprobs": [{"token": " b", "logprob": -0.1, "bytes": [32, 98]}],
            }
        ]
    }
    assert answer().full_answer([piece(" a", A)]).choices[0].logprobs is None


def test_log_probabilities_of_the_prompt_come_once() -> None:
    entries = (TokenLogprobs(2, -1.0, 1), TokenLogprobs(3, -2.0, 4))
    first = piece("[", A, prompt_logprobs=entries)
    streamed = answer(num_prompt_top=0, parser=BracketParser)
    chunks = [streamed.chunk(first), streamed.chunk(piece("f]", B)), streamed.chunk(piece("x", B))]
    assert chunks[0] is None
    assert chunks[1] is not None
    assert chunks[2] is not None
    assert chunks[1].prompt_logprobs is not None
    assert [
        None if token is None else {i: t.rank for i, t in token.items()} for token in chunks[1].prompt_logprobs
    ] == [
        None,
        {2: 1},
        {3: 4},
    ]
    assert "prompt_logprobs" not in chunks[2].model_dump()
    assert answer(num_prompt_top=0).full_answer([first]).prompt_logprobs == chunks[1].prompt_logprobs
    assert "prompt_logprobs" not in answer().full_answer([first]).model_dump()


def test_tool_calls_whole() -> None:
    whole = answer(parser=BracketParser).full_answer([piece("Let me see. [f][g]", A, finish_reason="stop")])
    choice = whole.model_dump(mode="json")["choices"][0]
    assert choice["message"] == {
        "role": "assistant",
        "content": "Let me see. ",
        "tool_calls": [
            {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": "{}"}},
            {"id": "call_1", "type": "function", "function": {"name": "g", "arguments": "{}"}},
        ],
    }
    assert choice["finish_reason"] == "tool_calls"


def test_nothing_but_a_call_has_no_content() -> None:
    message = answer(parser=BracketParser).full_answer([piece("[f]", A, finish_reason="stop")]).choices[0].message
    assert message.content is None
    cut = answer(parser=BracketParser).full_answer([piece("[f]", A, finish_reason="length")]).choices[0]
    assert cut.finish_reason == "length"  # more might have come


def test_tool_calls_streamed_by_output() -> None:
    """What may be a call is held back, with its log probabilities; at the end everything has been said."""
    chat = answer(num_top=0, parser=BracketParser)
    pieces = [
        piece("x", A, logprobs=(TokenLogprobs(A, -1.0, 1),)),
        piece("[", A, logprobs=(TokenLogprobs(A, -2.0, 1),)),
        piece("no call", A, index=1, logprobs=(TokenLogprobs(A, -7.0, 1),)),
        piece("f]", A, B, logprobs=(TokenLogprobs(A, -3.0, 1), TokenLogprobs(B, -4.0, 1))),
        piece(" [", A, index=1),
        piece("", B, finish_reason="stop", logprobs=(TokenLogprobs(B, -5.0, 1),), num_unfinished=1),
        piece("", index=1, finish_reason="stop"),
    ]
    chunks = [chunk for p in pieces if (chunk := chat.chunk(p)) is not None]
    dumped = [chunk.model_dump(mode="json")["choices"][0] for chunk in chunks]
    first = [choice for choice in dumped if choice["index"] == 0]
    other = [choice for choice in dumped if choice["index"] == 1]
    assert [choice["delta"] for choice in first] == [
        {"role": "assistant", "content": "x"},
        {
            "tool_calls": [
                {"index": 0, "id": "call_0", "type": "function", "function": {"name": "f"}},
                {"index": 0, "function": {"arguments": "{"}},
                {"index": 0, "function": {"arguments": "}"}},
            ]
        },
        {"content": ""},
    ]
    assert [entry["logprob"] for choice in first for entry in choice["logprobs"]["content"]] == [-1, -2, -3, -4, -5]
    assert first[-1]["finish_reason"] == "tool_calls"
    assert "".join(choice["delta"].get("content", "") for choice in other) == "no call ["
    assert other[-1]["finish_reason"] == "stop"
