"""Calls are found however the text is cut into pieces; all other text stays content, to the last character."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.openai.tools.formats import ToolFormat
from app.openai.tools.parser import ToolCallParser

HERMES = ToolFormat("hermes", "<tool_call>", "</tool_call>")
LLAMA = ToolFormat("llama", "<|python_tag|>", arguments="parameters")
MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]")
FORMATS = {"hermes": HERMES, "llama": LLAMA, "mistral": MISTRAL}
FUNCTIONS = ("add", "look_up")

Call = tuple[str, str]


def parse(tool_format: ToolFormat, pieces: list[str], forced: bool = False) -> tuple[str, list[Call]]:
    parser = ToolCallParser(tool_format, FUNCTIONS, forced=forced)
    outcomes = [parser.push(piece) for piece in pieces] + [parser.finish()]
    calls = [call for _, some in outcomes for call in some]
    assert len({call.id for call in calls}) == len(calls)
    found = [(call.function.name, call.function.arguments) for call in calls]
    return "".join(content for content, _ in outcomes), found


ADD = '{"name": "add", "arguments": {"a": 1, "b": [2.50, "}</tool_call>\\""]}}'
ADD_ARGUMENTS = '{"a": 1, "b": [2.50, "}</tool_call>\\""]}'


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("hermes", "Just words.", "Just words.", []),
        ("hermes", f"<tool_call>\n{ADD}\n</tool_call>", "", [("add", ADD_ARGUMENTS)]),
        (
            "hermes",
            f"Let me see.\n<tool_call>{ADD}</tool_call>\n<tool_call>\n{ADD}\n</tool_call>\n",
            "Let me see.",
            [("add", ADD_ARGUMENTS)] * 2,
        ),
        ("hermes", f"<tool_call>{ADD}</tool_call>  And more. ", "And more. ", [("add", ADD_ARGUMENTS)]),
        ("hermes", f"<tool_call>{ADD}", "", [("add", ADD_ARGUMENTS)]),  # ended before its end marker
        ("hermes", f"<tool_call>{ADD}\n</tool", "", [("add", ADD_ARGUMENTS)]),
        ("hermes", '<tool_call>{"name": "add"}</tool_call>', "", [("add", "{}")]),
        ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("add", '{"a": 1}')]),
        ("hermes", '<tool_call>{"arguments": {}, "name": "add"}</tool_call>', "", [("add", "{}")]),
        ("hermes", f"<tool_call>first <tool_call>{ADD}</tool_call>", "<tool_call>first", [("add", ADD_ARGUMENTS)]),
        ("llama", '{"name": "add", "parameters": {"a": 1e400}}', "", [("add", '{"a": 1e400}')]),
        ("llama", '\n<|python_tag|>{"name": "add", "parameters": {}}', "", [("add", "{}")]),
        ("llama", '{"name": "add", "parameters": {}}; {"name": "add", "parameters": {}}', "", [("add", "{}")] * 2),
        ("llama", '{"name": "add", "parameters": {}}; so', "; so", [("add", "{}")]),
        ("llama", 'It is {"name": "add", "parameters": {}}', 'It is {"name": "add", "parameters": {}}', []),
        ("llama", '{"answer": 42}', '{"answer": 42}', []),
        ("mistral", f"[TOOL_CALLS] [{ADD}, {ADD}]", "", [("add", ADD_ARGUMENTS)] * 2),
        ("mistral", f"Well.[TOOL_CALLS][{ADD}]", "Well.", [("add", ADD_ARGUMENTS)]),
        ("mistral", f"[TOOL_CALLS]{ADD}", f"[TOOL_CALLS]{ADD}", []),
    ],
)  # fmt: skip
def test_calls_and_content(name: str, text: str, content: str, calls: list[Call]) -> None:
    assert parse(FORMATS[name], [text]) == (content, calls)
    assert parse(FORMATS[name], list(text)) == (content, calls)


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call>\n",
        " <tool_call> {",
        "<tool_call>{} </tool_call> ",
        '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "add", "arguments": "1"}</tool_call>',
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        '<tool_call>{"name": ["add"], "arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": \\"\\ud800\\"}"}</tool_call>',  # an unpaired surrogate
        '<tool_call>{"name": "add", "arguments": {}]</tool_call>',
        '<tool_call>{"name": "add", "arguments": {}} and so on',
        '<tool_call>{"name": "add", "arguments": {"a": "</tool_call>',
        "<tool_call>" + '{"a":' * 5000 + "}" * 5000,
        " " * 70 + "<tool_call>" + " " * 70 + "{}",
        "x <tool_cal",
        "a <tool_call><tool_call",
    ],
)
def test_malformed_calls_stay_content(text: str) -> None:
    assert parse(HERMES, [text]) == (text, [])
    assert parse(HERMES, list(text)) == (text, [])


@pytest.mark.parametrize("text", ["[TOOL_CALLS][]", "[TOOL_CALLS][1]", "[TOOL_CALLS]", '[TOOL_CALLS][{"name": 1}] x'])
def test_malformed_lists_stay_content(text: str) -> None:
    assert parse(MISTRAL, [text]) == (text, [])


def test_forced_calls_are_found_without_their_marker() -> None:
    """A marker that is a special token may be missing in the text."""
    assert parse(MISTRAL, [f"[{ADD}]"], forced=True) == ("", [("add", ADD_ARGUMENTS)])
    assert parse(MISTRAL, [f"[TOOL_CALLS][{ADD}]"], forced=True) == ("", [("add", ADD_ARGUMENTS)])
    assert parse(MISTRAL, [f"[{ADD}]"]) == (f"[{ADD}]", [])


def test_content_is_held_back_only_while_it_may_be_a_marker() -> None:
    parser = ToolCallParser(HERMES, FUNCTIONS)
    assert parser.push("a <to") == ("a", [])
    assert parser.push("p> b") == (" <top> b", [])
    assert parser.push(" " * 100) == (" " * 36, [])


def test_ids_are_as_templates_require() -> None:
    for tool_format, length, prefix in ((HERMES, 29, "call_"), (MISTRAL, 9, "")):
        text = f"[TOOL_CALLS][{ADD}]" if tool_format is MISTRAL else f"<tool_call>{ADD}</tool_call>"
        parser = ToolCallParser(tool_format, FUNCTIONS)
        [call] = parser.push(text)[1]
        assert len(call.id) == length
        assert call.id.startswith(prefix)


fragments = st.sampled_from(
    [
        "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "\n", " ", " " * 40, "{", "}", "[", "]", ",",
        ";", '"', "\\", "<", "</tool", "words", "é", ADD, '{"name": "look_up", "parameters": {}}', '{"name": "x"}',
        f"<tool_call>\n{ADD}\n</tool_call>", f"[TOOL_CALLS][{ADD}]",
    ]
)  # fmt: skip
texts = st.lists(fragments, max_size=12).map("".join)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(sorted(FORMATS)), texts, st.booleans(), st.lists(st.integers(0, 300), max_size=20))
def test_pieces_give_the_results_of_the_full_text(name: str, text: str, forced: bool, cuts: list[int]) -> None:
    ends = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[begin:end] for begin, end in itertools.pairwise(ends)]
    whole = parse(FORMATS[name], [text], forced)
    assert parse(FORMATS[name], pieces, forced) == whole
    assert parse(FORMATS[name], list(text), forced) == whole


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(FORMATS)), texts, st.booleans())
def test_no_text_is_lost(name: str, text: str, forced: bool) -> None:
    """Content is the text without calls and the white space next to them."""
    content, calls = parse(FORMATS[name], [text], forced)
    rest = iter(text)
    assert all(character in rest for character in content), (content, text)  # in this order
    if not calls:
        assert content == text
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)


@pytest.mark.parametrize("unit", ["<tool_call>{", "<tool_call>", " ", '<tool_call>{"a":"', "{", "<tool_call>{}", "<"])
@pytest.mark.parametrize("begin", ["", "<tool_call>", '<tool_call>{"name": "add"}'])
@pytest.mark.parametrize("forced", [False, True])
def test_little_text_is_scanned_again(unit: str, begin: str, forced: bool) -> None:
    """A model can be asked to write any text: the cost of a piece must not grow with the text before."""
    parser = ToolCallParser(HERMES, FUNCTIONS, forced=forced)
    parser.push(begin)
    for _ in range(200):
        parser.push(unit)
        assert len(parser.undecided) <= 64 + len(HERMES.marker)
    parser.finish()
