"""Formats found in templates, and outputs that follow their grammar whatever the model prefers."""

from __future__ import annotations

import copy
import json
from collections.abc import Collection
from dataclasses import replace
from typing import Any, get_args

import jsonschema
import numpy as np
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from folio.app.api.output.formats import HARMONY, REASONING_SYNTAXES, TOOL_SYNTAXES, OutputFormat, output_format
from folio.app.api.output.parser import HARMONY_LITERALS, Part
from folio.app.api.output.plan import OutputPlan, plan_output
from folio.app.api.output.syntaxes import closed
from folio.app.api.tools.choice import ChosenTools
from folio.app.config.parsers import ReasoningParserName, ToolParserName
from folio.app.engine.sampling.params import Structure
from folio.app.engine.sampling.structure import StructureCompiler
from folio.app.errors import EngineError, RequestError
from tests.app.api.output.recorded import CITY, FUNCTIONS, OUTPUTS, REASONING, TEXTS, calls_of, text_of
from tests.app.small_tokenizers import byte_level

# Texts of the models' own templates, by which syntaxes are found.
TEMPLATES = {
    "qwen3_coder": "{{ tools }}<tool_call>\n<function=example_function_name>",
    "glm45": "{{ tools }}<tool_call>{function-name}<arg_key>",
    "minimax_m2": "{{ tools }}<minimax:tool_call>",
    "kimi_k2": "{{ tools }}<|tool_calls_section_begin|>",
    "deepseek_v3": "{{ tools }}<｜tool▁calls▁begin｜>\n```json",
    "deepseek_v31": "{{ tools }}<｜tool▁calls▁begin｜>",
    "mistral_v11": "{{ tools }}[TOOL_CALLS]name[ARGS]{}",
    "mistral": '{{ "[AVAILABLE_TOOLS] " + tools | tojson }}{{ "[TOOL_CALLS] [" }}',
    "minimax": "{{ tools }}<tool_calls>",
    "granite": "{{ tools }}<|tool_call|>",
    "hermes": "{{ tools }} within <tool_call></tool_call> XML tags",
    "phi4_mini_json": "{{ tools }} functools",
    "llama4_pythonic": "{{ tools }}<|python_start|>",
    "pythonic": "{{ tools }}[func_name1(params_name1=params_value1)]",
    "llama3_json": 'Respond in the format {"name": function name, "parameters": dictionary of names}. {{ tools }}',
}
ARGUMENTS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"$ref": "#/$defs/unit"},
        "kind": {"type": "string", "enum": ["a b", "c"]},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"unit": {"enum": ["°C", "K"]}},
}
CALLABLE = {"weather": ARGUMENTS, "now": FUNCTIONS["now"]}
ANSWER = {"type": "object", "properties": {"a": {"maximum": 99, "type": "integer"}}, "required": ["a"]} | {
    "additionalProperties": False
}


def tokenizer_with(special: Collection[str]) -> PreTrainedTokenizerBase:
    tokenizer = copy.deepcopy(byte_level())
    tokenizer.add_special_tokens({"additional_special_tokens": sorted(special)})
    tokenizer.chat_template = None
    return tokenizer


def literals(name: str) -> set[str]:
    """The texts of a syntax that are special tokens of its models."""
    tags = HARMONY_LITERALS if name == HARMONY else (*TOOL_SYNTAXES[name][1].literals, "<think>", "</think>")
    return {text for text in tags if text.startswith(("<", "[")) and text.isprintable()}


def walk(tokenizer: PreTrainedTokenizerBase, structure: Structure, rng: np.random.Generator, lead: str = "") -> str:
    """A random text that the structure allows, behind `lead`."""
    compiler = compiler_of(tokenizer)
    compiler.check_structure(structure)
    matcher = compiler.matcher(structure)
    mask = np.empty((len(tokenizer) + 31) // 32, np.int32)
    output = tokenizer.encode(lead, add_special_tokens=False)
    for token_id in output:
        matcher.accept(token_id)
    special = set(tokenizer.all_special_ids)
    while not output or output[-1] != tokenizer.eos_token_id:
        matcher.fill(mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        # Ends of texts and outputs are made likely, or outputs would be very long.
        ends = [token_id for token_id in allowed if token_id in special]
        output.append(int(rng.choice(ends if ends and rng.random() < 0.25 else allowed)))
        matcher.accept(output[-1])
        assert matcher.error is None
    text = tokenizer.decode(output[:-1], skip_special_tokens=False)
    assert isinstance(text, str)
    return text


def structure_of(plan: OutputPlan, given: Structure | None = None) -> Structure:
    structure = plan.structure(given)
    assert structure is not None
    return structure


def compiler_of(tokenizer: PreTrainedTokenizerBase) -> StructureCompiler:
    return StructureCompiler(tokenizer, len(tokenizer), {tokenizer.eos_token_id})


def parsed(plan: OutputPlan, text: str) -> list[Part]:
    parser = plan.parser()
    assert parser is not None
    return parser.push(text) + parser.finish()


def format_of(name: str, tokenizer: PreTrainedTokenizerBase) -> OutputFormat:
    return output_format(tokenizer, name, HARMONY if name == HARMONY else "qwen3")


@pytest.mark.thirds
@pytest.mark.parametrize("reasoning", ["begun", "open", "closed"])
@pytest.mark.parametrize("forced", [True, False])
@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_follow_their_grammar(name: str, forced: bool, reasoning: Any) -> None:
    """Forced calls are calls and nothing else; an output with a schema is JSON or calls, behind the reasoning."""
    tokenizer = tokenizer_with(literals(name))
    plan = OutputPlan(format_of(name, tokenizer), CALLABLE, forced, True, reasoning)
    structure = structure_of(plan, Structure("json", json.dumps(ANSWER)))
    rng = np.random.default_rng(0)
    for _ in range(5):
        text = walk(tokenizer, structure, rng)
        parts = parsed(plan, text)
        calls, content = calls_of(parts), text_of(parts, "content")
        for function, arguments in calls:
            jsonschema.validate(arguments, CALLABLE[function])
        assert bool(calls) != bool(content), text
        if content:
            assert not forced
            jsonschema.validate(json.loads(content), ANSWER)


def accepts(
    tokenizer: PreTrainedTokenizerBase, structure: Structure, text: str, compiler: StructureCompiler | None = None
) -> bool:
    """Whether a structure allows a text, and its end behind it."""
    matcher = (compiler or compiler_of(tokenizer)).matcher(structure)
    try:
        for token_id in tokenizer.encode(text, add_special_tokens=False):
            matcher.accept(token_id)
    except EngineError:
        return False
    assert matcher.error is None
    mask = np.empty((len(tokenizer) + 31) // 32, np.int32)
    matcher.fill(mask)
    eos: Any = tokenizer.eos_token_id
    return bool(mask[eos // 32] >> eos % 32 & 1)


# What the grammars write otherwise: JSON in Python's calls, and one call in harmony, whose end is that of the output.
WRITTEN = {
    name: text.replace(f"city='{CITY}'", f"city={json.dumps(CITY, ensure_ascii=False)}") for name, text in TEXTS.items()
} | {
    "xlam": TEXTS["xlam"].replace('"now"}', '"now", "arguments": {}}'),
    HARMONY: TEXTS[HARMONY].partition("<|call|>")[0],
}
WRONG = [('"days": 3', '"days": "x"'), ("days=3", 'days="x"'), ("\n3\n", "\nx\n"), (">3<", ">x<")]


@pytest.mark.thirds
@pytest.mark.parametrize("is_special", [True, False])
@pytest.mark.parametrize("name", OUTPUTS)
def test_a_call_that_has_begun_follows_the_schema_of_a_strict_function(name: str, is_special: bool) -> None:
    """Text, reasoning and calls of other functions stay free; the markers may be special tokens or text."""
    tokenizer = tokenizer_with(literals(name) if is_special or name == HARMONY else ())
    known, text = format_of(name, tokenizer), WRITTEN[name]
    compiler = compiler_of(tokenizer)
    wrong = text
    for right, other in WRONG:
        wrong = wrong.replace(right, other)
    assert wrong != text
    assert OutputPlan(known, FUNCTIONS).structure(None) is None
    if name == HARMONY:
        thoughts = [("<|channel|>analysis<|message|>to=functions.weather", REASONING[HARMONY][1])]
    else:
        marks = TOOL_SYNTAXES[name][1].literals
        mention = "" if is_special else " ".join(mark for mark in marks if mark != "[TOOL_CALLS]")  # always special
        thoughts = [("", ""), (f"<think>\na {mention} <tool_cal> {{}}", "\n</think>\n\n"), ("No. <think>", "</think>")]
    for strict in (["weather"], ["weather", "now"], ["now"]):
        structure = structure_of(OutputPlan(known, FUNCTIONS, strict=strict))
        for begin, end in thoughts:
            assert accepts(tokenizer, structure, begin + end + text, compiler)
            assert accepts(tokenizer, structure, begin + end + wrong, compiler) == (strict == ["now"])
        if name != HARMONY:
            assert accepts(tokenizer, structure, 'A list: [1], {"name": 1}, <tool, and more', compiler)
            begun = structure_of(OutputPlan(known, FUNCTIONS, strict=strict, reasoning="begun"))
            assert accepts(tokenizer, begun, f"a {mention}</think>{text}", compiler)


BEGUN = '<tool_call>\n{"name": "weather", "arguments": {"city": "Pa'


@pytest.mark.parametrize(
    ("continued", "begun", "follows"),
    [
        ("Well. " + BEGUN, BEGUN, True),
        (f"{TEXTS['hermes']} {BEGUN}", BEGUN, True),
        (BEGUN.replace('"city": "Pa', '"days": "Pa'), BEGUN.replace('"city": "Pa', '"days": "Pa'), False),
        (TEXTS["hermes"], "", False),
        ("Well. <tool_call>", "", False),
        ("Well.", "", False),
    ],
)
def test_a_call_that_the_prompt_has_begun_goes_on(continued: str, begun: str, follows: bool) -> None:
    """It was content from its middle on, and followed no schema."""
    tokenizer = tokenizer_with(())
    tools = ChosenTools(FUNCTIONS, strict=frozenset({"weather"}))
    plan = plan_output(format_of("hermes", tokenizer), tools, str, None, continued)
    structure = structure_of(plan)
    assert plan.begun == structure.begun == begun
    compiler = compiler_of(tokenizer)
    compiler.check_structure(structure)
    assert accepts(tokenizer, structure, 'ris", "days": "x"}}', compiler) != follows
    assert accepts(tokenizer, structure, 'ris", "days": 3}}\n</tool_call> So.', compiler)
    parts = parsed(plan, 'ris", "days": 3}}\n</tool_call> So.')
    assert calls_of(parts) == ([("weather", {"city": "Paris", "days": 3})] if follows else calls_of(parts))
    assert text_of(parts, "content").endswith("So.")


@pytest.mark.thirds
@pytest.mark.parametrize("name", OUTPUTS)
def test_random_calls_of_a_strict_function_follow_its_schema(name: str) -> None:
    tokenizer = tokenizer_with(literals(name))
    plan = OutputPlan(format_of(name, tokenizer), CALLABLE, strict=["weather"], reasoning="closed")
    structure = structure_of(plan)
    text = WRITTEN[name]
    lead = text[: text.index("weather")].removeprefix("\n") if name != "minimax_m2" else "<minimax:tool_call>"
    rng = np.random.default_rng(0)
    for _ in range(5):
        calls = calls_of(parsed(plan, walk(tokenizer, structure, rng, lead)))
        for function, arguments in calls:
            jsonschema.validate(arguments, CALLABLE[function] if function == "weather" else {"type": "object"})


@pytest.mark.parametrize("syntax", [name for name in REASONING if name != HARMONY])
def test_reasoning_that_is_text_precedes_a_forced_output(syntax: str) -> None:
    """Where the marks are no special tokens."""
    tokenizer = tokenizer_with(())
    begin, end = REASONING[syntax]
    known = output_format(tokenizer, "hermes", syntax)
    assert not known.special_tokens
    rng = np.random.default_rng(0)
    for reasoning in ("begun", "open"):
        plan = OutputPlan(known, CALLABLE, False, True, reasoning)  # type: ignore[arg-type]
        structure = structure_of(plan, Structure("json", json.dumps(ANSWER)))
        lead = f"{'' if reasoning == 'begun' else begin.rstrip()}{{}} <tool_call> no {end.rstrip()}"
        parts = parsed(plan, walk(tokenizer, structure, rng, lead))
        assert text_of(parts, "reasoning") == "{} <tool_call> no"
        assert calls_of(parts) or json.loads(text_of(parts, "content"))


@pytest.mark.parametrize("name", [*OUTPUTS, "builtin"])
def test_one_call_where_several_are_not_allowed(name: str) -> None:
    if name == "builtin":
        tokenizer: Any = AutoTokenizer.from_pretrained("app/models/builtin/model")
        plan = OutputPlan(output_format(tokenizer), {"now": FUNCTIONS["now"]}, True, False)
    else:
        tokenizer = tokenizer_with(literals(name))
        plan = OutputPlan(format_of(name, tokenizer), {"now": FUNCTIONS["now"]}, True, False, "closed")
    text = walk(tokenizer, structure_of(plan), np.random.default_rng(0))
    assert calls_of(parsed(plan, text)) == [("now", {})]


def test_every_name_of_the_settings_has_a_syntax() -> None:
    assert {*get_args(ToolParserName)} == {"auto", "none", HARMONY, *TOOL_SYNTAXES}
    assert {*get_args(ReasoningParserName)} == {"auto", "none", HARMONY, *REASONING_SYNTAXES}


@pytest.mark.parametrize("name", TEMPLATES)
def test_syntaxes_are_found_in_templates(name: str) -> None:
    tokenizer = tokenizer_with(())
    for template in (TEMPLATES[name], {"default": "{{ messages }}", "tool_use": TEMPLATES[name]}):
        tokenizer.chat_template = template
        known = output_format(tokenizer)
        assert known.tools is TOOL_SYNTAXES[name][1]
        assert (known.reasoning, known.is_harmony) == (None, False)
    assert output_format(tokenizer, "none").tools is None


@pytest.mark.parametrize("mark", ["<think>", "</think>", "[THINK]", "Here is my thought process:", "<seed:think>"])
def test_reasoning_is_found_in_templates(mark: str) -> None:
    tokenizer = tokenizer_with(())
    tokenizer.chat_template = f"{{% if thinking %}}{mark}{{% endif %}}"
    known = output_format(tokenizer)
    assert known.reasoning is not None
    assert mark in (known.reasoning.begin, known.reasoning.end)
    assert output_format(tokenizer, reasoning="none").reasoning is None


def test_harmony_is_found_in_templates() -> None:
    tokenizer = tokenizer_with(HARMONY_LITERALS)
    tokenizer.chat_template = "<|start|>assistant<|channel|>final<|message|>"
    known = output_format(tokenizer)
    assert known.is_harmony
    assert {*known.special_tokens} == {*HARMONY_LITERALS}
    assert len(OutputPlan(known).kept_token_ids) == len(HARMONY_LITERALS)


def test_the_end_of_the_prompt_tells_whether_reasoning_has_begun() -> None:
    known = output_format(tokenizer_with(()), "none", "qwen3")
    implied = output_format(tokenizer_with(()), "none", "deepseek_r1")
    for end, reasoning, of_implied in (
        ("<|assistant|><think>\n", "begun", "begun"),
        ("<|assistant|>", "open", "begun"),
        ("<think>\n\n</think>\n\n", "closed", "closed"),
    ):
        for one, expected in ((known, reasoning), (implied, of_implied)):
            assert plan_output(one, ChosenTools(), lambda end=end: end, None).reasoning == expected  # type: ignore[misc]


@pytest.mark.parametrize(
    ("continued", "expected"),
    [
        ("Paris is", "closed"),
        ("<think>\nOkay", "begun"),
        ("<think>a</think>Paris", "closed"),
        ("<think>a</think><think>", "begun"),
    ],
)
def test_a_message_that_is_continued_tells_whether_it_reasons(continued: str, expected: str) -> None:
    """Even if the model always reasons: its answer goes on in the middle."""
    implied = replace(REASONING_SYNTAXES["deepseek_r1"], implied=True)
    known = OutputFormat(reasoning=implied)
    plan = plan_output(known, ChosenTools(), lambda: "<think>", None, continued)
    assert plan.reasoning == expected
    structure = structure_of(plan, Structure("json", "{}"))
    assert (structure.frame is None) == (expected == "closed")


@pytest.mark.parametrize(
    "structure",
    [
        Structure("grammar", 'root ::= "a" "7"'),
        Structure("tags", '{"triggers": ["a"], "structures": [{"begin": "a", "schema": {"const": 7}, "end": ""}]}'),
    ],
)
def test_structures_of_other_servers_begin_behind_the_reasoning(structure: Structure) -> None:
    tokenizer = byte_level()
    plan = plan_output(OutputFormat(reasoning=REASONING_SYNTAXES["deepseek_r1"]), ChosenTools(), str, None)
    framed = structure_of(plan, structure)
    matcher = StructureCompiler(tokenizer, len(tokenizer), {0}).matcher(framed)
    for character in "<think>x</think>a7":
        matcher.accept(tokenizer.backend_tokenizer.token_to_id(character))
    mask = np.zeros((len(tokenizer) + 31) // 32, np.int32)
    matcher.fill(mask)
    assert mask[0] & 1  # the end may follow


def test_special_tokens_are_kept_only_where_they_are_parsed() -> None:
    tokenizer = tokenizer_with(literals("mistral"))
    plan = OutputPlan(output_format(tokenizer, "mistral", "none"))
    assert plan.parser() is None
    assert not plan.kept_token_ids
    with_tools = OutputPlan(plan.format, FUNCTIONS)
    assert [*with_tools.kept_token_ids] == [tokenizer.convert_tokens_to_ids("[TOOL_CALLS]")]


def test_calls_that_are_not_known() -> None:
    known = OutputFormat()
    assert plan_output(known, ChosenTools(FUNCTIONS), str, None).parser() is None
    with pytest.raises(RequestError, match="not supported"):
        plan_output(known, ChosenTools(FUNCTIONS, required=True), str, None)


def test_ids_are_as_templates_require() -> None:
    for name, length, prefix in (("hermes", 29, "call_"), ("mistral", 9, ""), ("mistral_v11", 9, "")):
        call_id = output_format(tokenizer_with(()), name).new_call_id()
        assert len(call_id) == length
        assert call_id.startswith(prefix)


def test_forced_arguments_are_the_declared_ones() -> None:
    """A forced call with additional properties might never end."""
    inner = {"type": "object", "properties": {"b": {"type": "string"}}}
    either = {"anyOf": [{"type": "object", "properties": {"c": {}}}]}
    open_ = {"type": "object", "properties": {}, "additionalProperties": True}
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": inner}, "d": either, "e": open_}}
    assert closed(schema) == {
        "type": "object",
        "properties": {
            "a": {"type": "array", "items": inner | {"additionalProperties": False}},
            "d": either,
            "e": open_,
        },
        "additionalProperties": False,
    }
    for unchanged in ({"type": "object"}, {"type": "object", "properties": {}, "required": ["undeclared"]}):
        assert closed(unchanged) == unchanged


def test_the_kind_of_turn_tells_the_prefix_cache_whether_a_call_may_follow() -> None:
    hermes = OutputFormat(tools=TOOL_SYNTAXES["hermes"][1])
    assert plan_output(hermes, ChosenTools(), str, None).turn.kind == "chat"
    assert plan_output(hermes, ChosenTools(FUNCTIONS, required=True), str, None).turn.kind == "calls"
    turn = plan_output(hermes, ChosenTools(FUNCTIONS), str, None).turn
    assert (turn.kind_of("No."), turn.kind_of('<tool_call>\n{"name": "f"}')) == ("tools", "calls")
