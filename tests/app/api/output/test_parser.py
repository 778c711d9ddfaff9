"""Reasoning, content and calls are found however the text is cut into pieces; all other text stays content."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from folio.app.api.output.formats import HARMONY, REASONING_SYNTAXES, TOOL_SYNTAXES, OutputFormat
from folio.app.api.output.parser import OutputParser, Part
from folio.app.api.output.plan import OutputPlan
from folio.app.api.output.reader import MAX_SPACE
from folio.app.api.output.reasoning import ReasoningTokens
from tests.app.api.output.recorded import CALLS, FUNCTIONS, OUTPUTS, REASONING, TEXTS, calls_of, text_of
from tests.nightly import examples


def parser_of(name: str, syntax: str = "qwen3", functions: Any = FUNCTIONS, **plan: Any) -> OutputParser:
    if name == HARMONY:
        known = OutputFormat(is_harmony=True)
    else:
        known = OutputFormat(REASONING_SYNTAXES[syntax], TOOL_SYNTAXES[name][1])
    parser = OutputPlan(known, functions, **plan).parser()
    assert parser is not None
    return parser


def parse(parser: OutputParser, pieces: Sequence[str]) -> list[Part]:
    """The parts, those of one kind joined."""
    parts: list[Part] = []
    for part in [*itertools.chain.from_iterable(map(parser.push, pieces)), *parser.finish()]:
        if part.kind != "call" and parts and parts[-1].kind == part.kind:
            part = Part(part.kind, parts.pop().text + part.text)
        parts.append(part)
    assert parser.num_held == 0
    return parts


def pieces_of(text: str, cuts: Sequence[int]) -> list[str]:
    ends = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[begin:end] for begin, end in itertools.pairwise(ends)]


def thought(name: str, text: str) -> tuple[str, str]:
    """(Reasoning's syntax, the text behind reasoning in which a call is mentioned.)"""
    syntax = HARMONY if name == HARMONY else "qwen3"
    begin, end = REASONING[syntax]
    return syntax, f"{begin}a <tool_call> {{}} [TOOL_CALLS] b{end}{text}"


@pytest.mark.parametrize("reasons", [False, True])
@pytest.mark.parametrize("name", OUTPUTS)
def test_calls_behind_content_and_reasoning(name: str, reasons: bool) -> None:
    text = thought(name, TEXTS[name])[1] if reasons else TEXTS[name]
    parts = parse(parser_of(name), [text])
    assert calls_of(parts) == CALLS
    assert text_of(parts, "content") == OUTPUTS[name][0]
    assert text_of(parts, "reasoning") == ("a <tool_call> {} [TOOL_CALLS] b" if reasons else "")
    for cut in range(len(text)):
        assert parse(parser_of(name), [text[:cut], text[cut:]]) == parts
    assert parse(parser_of(name), list(text)) == parts


@pytest.mark.parametrize("name", OUTPUTS)
def test_names_may_be_as_long_as_bodies_allow(name: str) -> None:
    """Names of MCP tools in Claude Code have more than 64 characters: their calls were text in most syntaxes."""
    long = "mcp__weather." + "w" * 115
    functions = {long: FUNCTIONS["weather"], "now": FUNCTIONS["now"]}
    parts = parse(parser_of(name, functions=functions), list(TEXTS[name].replace("weather", long)))
    assert calls_of(parts) == [(long, CALLS[0][1]), CALLS[1]]


def test_every_syntax_is_recorded() -> None:
    assert {*OUTPUTS} == {*TOOL_SYNTAXES, HARMONY}


@settings(max_examples=examples(40, nightly=6000), deadline=None)
@given(st.data())
@pytest.mark.parametrize("name", OUTPUTS)
def test_any_split_gives_the_parts_of_the_whole_text(name: str, data: st.DataObject) -> None:
    """Whole outputs, outputs that end early, and outputs in which the model has erred; 17 × 6,000 each night."""
    text = thought(name, TEXTS[name])[1]
    if data.draw(st.booleans()):
        text = text[: data.draw(st.integers(0, len(text)))]
    if data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(text)))
        text = (
            text[:at]
            + data.draw(st.text('{}[]",:<>\\|a1 \n=()/', max_size=4))
            + text[at + data.draw(st.integers(0, 3)) :]
        )
    forced, begun = data.draw(st.booleans()), data.draw(st.booleans())
    plan: dict[str, Any] = {"forced": forced, "reasoning": "begun" if begun and name != HARMONY else "open"}
    whole = parse(parser_of(name, **plan), [text])
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=30))
    assert parse(parser_of(name, **plan), pieces_of(text, cuts)) == whole
    assert parse(parser_of(name, **plan), list(text)) == whole


@pytest.mark.parametrize("name", OUTPUTS)
def test_arguments_arrive_while_they_are_generated(name: str) -> None:
    """Before half of a long argument is generated, some of it has been sent."""
    text = TEXTS[name].replace("São", "São" + "o" * 200)
    middle = text.index("o" * 100) + 100
    parts = parse_unfinished(parser_of(name), text[:middle])
    assert text_of(parts, "call") == "weather"
    is_python = "pythonic" in name  # a value of Python is complete before it is JSON
    assert ("ooooo" in text_of(parts, "arguments")) != is_python


def parse_unfinished(parser: OutputParser, text: str) -> list[Part]:
    return [part for character in text for part in parser.push(character)]


@pytest.mark.parametrize("name", [name for name in OUTPUTS if name != HARMONY])
def test_no_text_of_an_output_without_calls_is_lost(name: str) -> None:
    """Half a call at the end is content, like a call of an unknown function."""
    for text in (
        "x <tool_cal",
        "[TOOL_CALLS",
        "a <tool_call><tool_call",
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        '{"answer": 42}',
        "[1, 2]",
        "[unknown(a=1)]",
        " " * 200,
        "functools <|tool_call|>",
    ):
        parts = parse(parser_of(name), [text])
        assert text_of(parts, "content") == text
        assert {part.kind for part in parts} == {"content"}


ADD = '{"name": "weather", "arguments": {"a": 1, "b": [2.50, "}</tool_call>\\""]}}'
ARGUMENTS = '{"a": 1, "b": [2.50, "}</tool_call>\\""]}'


@pytest.mark.parametrize(
    ("name", "text", "content", "arguments"),
    [
        ("hermes", f"<tool_call>{ADD}</tool_call>  And more. ", "And more. ", [ARGUMENTS]),
        ("hermes", f"<tool_call>{ADD}", "", [ARGUMENTS]),  # ended before its end marker
        ("hermes", f"<tool_call>{ADD}\n</tool", "</tool", [ARGUMENTS]),
        ("hermes", '<tool_call>{"name": "weather"}</tool_call>', "", ["{}"]),
        ("hermes", '<tool_call>{"name": "weather", "arguments": "{\\"a\\": 1}"}</tool_call>', "", ['{"a": 1}']),
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "weather"}</tool_call>', "", ['{"a": 1}']),
        ("hermes", '<tool_call>{"id": 7, "name": "weather", "arguments": {}, "x": [1]}</tool_call>', "", ["{}"]),
        ("hermes", f"<tool_call>first <tool_call>{ADD}</tool_call>", "<tool_call>first", [ARGUMENTS]),
        ("llama3_json", '{"name": "weather", "parameters": {"a": 1e400}}', "", ['{"a": 1e400}']),
        ("llama3_json", '\n<|python_tag|>{"name": "weather", "parameters": {}}', "", ["{}"]),
        ("llama3_json", '{"name": "weather", "parameters": {}}; so', "; so", ["{}"]),
        ("llama3_json", 'It is {"name": "weather", "parameters": {}}', None, []),
        ("mistral", f"Well.[TOOL_CALLS][{ADD}]", "Well.", [ARGUMENTS]),
        ("mistral", "[TOOL_CALLS][]", None, []),
        ("mistral", '[TOOL_CALLS][{"name": 1}] x', None, []),
        ("hermes", '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>', None, []),
        ("hermes", '<tool_call>{"name": ["weather"], "arguments": {}}</tool_call>', None, []),
        ("hermes", "<tool_call>" + '{"a":' * 5000 + "}" * 5000, None, []),
        ("hermes", " " * 70 + "<tool_call>" + " " * 70 + "{}", None, []),
    ],
)  # fmt: skip
def test_calls_and_content(name: str, text: str, content: str | None, arguments: list[str]) -> None:
    """Arguments are as the model wrote them: numbers keep their digits. `content` `None`: all of the text."""
    for pieces in ([text], list(text)):
        parts = parse(parser_of(name), pieces)
        assert [part.text for part in parts if part.kind == "arguments"] == arguments
        assert text_of(parts, "content") == (text if content is None else content)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("pythonic", r"[weather(city='S', b='\u00e9')]"),
        ("hermes", r'<tool_call>{"name": "weather", "arguments": {"city": "S", "b": "\u00e9"}}</tool_call>'),
        ("hermes", r'<tool_call>{"name": "weather", "arguments": "{\"city\": \"S\", \"b\": \"é\"}"}</tool_call>'),
        ("hermes", r'<tool_call>{"arguments": {"city": "S", "b": "\u00e9"}, "name": "weather"}</tool_call>'),
        (
            "qwen3_coder",
            '<tool_call>\n<function=weather>\n<parameter=days>\n["S", "\\u00e9"]\n</parameter>\n</function>',
        ),
    ],
)
@pytest.mark.parametrize(
    ("written", "shown"), [(r"\ud83d", "\ufffd"), (r"\udc00x", "\ufffdx"), (r"\ud83d\ud83d\ude00", "\ufffd\U0001f600")]
)
def test_unpaired_surrogates_of_a_model_are_replaced(name: str, text: str, written: str, shown: str) -> None:
    """They were answered with 500: UTF-8 cannot carry them."""
    text = text.replace("S", written)
    for pieces in ([text], list(text)):
        [(_, arguments)] = calls_of(parse(parser_of(name), pieces))
        assert shown in str(arguments.get("city", arguments.get("days", [""])[0]))
        assert "é" in str(arguments)


@pytest.mark.parametrize("syntax", [name for name in REASONING if name != HARMONY])
def test_reasoning(syntax: str) -> None:
    begin, end = REASONING[syntax]
    for text, reasoning, content in (
        (f"{begin}so{end}Yes.", "so", "Yes."),
        (f"\n{begin}so{end}", "so", ""),
        (f"{begin}so", "so", ""),
        (f"{begin}{end}Yes.", "", "Yes."),
        ("Yes.", "", "Yes."),
    ):
        parts = parse(parser_of("hermes", syntax), list(text))
        assert (text_of(parts, "reasoning"), text_of(parts, "content").lstrip()) == (reasoning, content)
    parts = parse(parser_of("hermes", syntax, reasoning="begun"), list(f"so{end}Yes."))
    assert (text_of(parts, "reasoning"), text_of(parts, "content")) == ("so", "Yes.")


def test_forced_calls_are_found_without_their_marker() -> None:
    """A marker that is a special token may be missing in the text."""
    text = OUTPUTS["mistral"][1]
    for shown in (text, text.removeprefix("[TOOL_CALLS]")):
        assert calls_of(parse(parser_of("mistral", forced=True), [shown])) == CALLS


@pytest.mark.parametrize("name", OUTPUTS)
def test_a_forced_call_that_is_cut_is_the_begun_call(name: str) -> None:
    """Its syntax was the content, and arguments between tags looked complete."""
    text = OUTPUTS[name][1].lstrip("\n")
    for cut in range(1, len(text)):
        parser = parser_of(name, forced=True)
        parts = parse(parser, list(text[:cut]))
        assert {part.kind for part in parts} <= {"call", "arguments"}, text[:cut]
        called = [part.text for part in parts if part.kind == "call"]
        assert called in ([], ["weather"], ["weather", "now"])
        assert parse(parser_of(name, forced=True), [text[:cut]]) == parts
    parser = parser_of(name, forced=True)
    parts = parse(parser, [text[: text.index("São") + 2]])
    assert (text_of(parts, "call"), parser.is_cut) == ("weather", True)
    with pytest.raises(ValueError, match=r"Expecting|Unterminated|Invalid"):
        json.loads(text_of(parts, "arguments"))
    whole = parser_of(name, forced=True)
    assert calls_of(parse(whole, [text])) == CALLS
    assert not whole.is_cut
    known = OutputFormat(is_harmony=True) if name == HARMONY else OutputFormat(tools=TOOL_SYNTAXES[name][1])
    only = OutputPlan(known, {"now": {}}, forced=True).parser()
    assert only is not None
    assert parse(only, [text[:1]]) == [Part("call", "now")]


def test_content_is_held_back_only_while_it_may_be_a_marker() -> None:
    parser = parser_of("hermes")
    assert parser.push("a <to") == [Part("content", "a")]
    assert parser.push("p> b") == [Part("content", " <top> b")]
    assert parser.push(" " * 100) == [Part("content", " " * (100 - MAX_SPACE))]


@pytest.mark.thirds
@pytest.mark.parametrize("unit", ["<tool_call>{", "<tool_call>", " ", '<tool_call>{"a":"', "{", "<tool_call>{}", "<"])
@pytest.mark.parametrize("begin", ["", "<tool_call>", '<tool_call>{"name": "weather", "arguments": {', "<think>"])
@pytest.mark.parametrize("name", OUTPUTS)
def test_little_text_is_held_back(name: str, begin: str, unit: str) -> None:
    """A model can be asked to write any text: what a piece costs must not grow with the text before."""
    parser = parser_of(name)
    parser.push(begin)
    for _ in range(3000):
        parser.push(unit)
        assert parser.num_held <= 40 << 10
    parser.finish()


def test_looking_for_calls_ends() -> None:
    """Regression: 300 KB of begun calls took 40 s, since each was read as far as a call's begin may reach."""
    parser = parser_of("hermes")
    false, call = '<tool_call>{"x":[' * 4000, TEXTS["hermes"]
    parts = parse(parser, [false + call])
    assert [part.kind for part in parts] == ["content"]
    few = parse(parser_of("hermes"), ["<tool_call>{} " * 4000 + call])
    assert calls_of(few) == CALLS


@pytest.mark.parametrize(
    ("begin", "tokens", "count"),
    [
        ("<think>", ["<think>", "a", "b", "</think>", "c", "</think>"], 4),
        ("<think>", ["\n", "<th", "ink>a", "b</thi", "nk> c", "d"], 5),
        ("<think>", ["Yes", "<think>", "a", "</think>"], 0),
        ("<think>", ["<thi"], 0),
        ("<think>", ["<think>", "a"], 2),
        ("", ["a", "b</think>c", "d"], 2),
        ("", ["</think>", "a"], 1),
    ],
)
def test_tokens_of_the_reasoning(begin: str, tokens: list[str], count: int) -> None:
    """However the marks are cut into tokens."""
    texts = [token.encode() for token in tokens]
    whole, one_by_one = (ReasoningTokens(begin, "</think>", texts.__getitem__) for _ in range(2))
    whole.push(range(len(tokens)))
    for token_id in range(len(tokens)):
        one_by_one.push([token_id])
    assert whole.count == one_by_one.count == count
