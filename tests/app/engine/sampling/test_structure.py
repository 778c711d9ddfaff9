"""Outputs sampled at random under the masks have the structure, with every tokenizer."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from folio.app.engine import LLM, SamplingParams
from folio.app.engine.sampling import structure as structure_module
from folio.app.engine.sampling.params import Structure
from folio.app.engine.sampling.structure import StructureCompiler, StructureMatcher
from folio.app.engine.sampling.token_text import TokenBytes
from folio.app.engine.startup import warm_up
from folio.app.errors import EngineError, RequestError
from tests.app.small_tokenizers import byte_level, sentencepiece, wordpiece

BUILTIN = "app/models/builtin/model"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "<tool_call>", "<|im_end|>", "é"]}, "maxItems": 3},
        "nested": {"$ref": "#/$defs/leaf"},
    },
    "required": ["name", "age", "nested"],
    "additionalProperties": False,
    "$defs": {"leaf": {"anyOf": [{"type": "null"}, {"type": "number"}]}},
}
GRAMMAR = """
start: sum
sum: product ("+" product)~0..2
product: NUMBER | "(" NUMBER "*" NUMBER ")"
NUMBER: /[1-9][0-9]{0,2}/
"""
# The same for llama.cpp and xgrammar.
GBNF = """
root ::= sum
sum ::= product ("+" product){0,2}
product ::= number | "(" number "*" number ")"
number ::= [1-9] [0-9]? [0-9]?  # without zeros in front
"""
TAGS = {
    "triggers": ["<call="],
    "structures": [
        {"begin": "<call=a>", "schema": {"enum": [7]}, "end": "</call>"},
        {"begin": "<call=b>", "schema": {"type": "object", "properties": {"x": {"enum": [8]}}}, "end": "</call>"},
    ],
}
CASES: dict[str, tuple[Structure, Callable[[str], object]]] = {
    "schema": (Structure("json", json.dumps(SCHEMA)), lambda text: _must_be_valid(json.loads(text))),
    "regex": (
        Structure("regex", r"[0-9]{3}-[a-f]{2,5}/(x|ü)?"),
        lambda text: _must(re.fullmatch(r"[0-9]{3}-[a-f]{2,5}/(x|ü)?", text), text),
    ),
    "choice": (
        Structure("choice", json.dumps(["yes", "no", "<tool_call>", 'a "b"\n\\', "<|im_end|>"])),
        lambda text: _must(text in ("yes", "no", "<tool_call>", 'a "b"\n\\', "<|im_end|>"), text),
    ),
    "grammar": (Structure("grammar", GRAMMAR), lambda text: _must(eval(text) > 0, text)),
    "gbnf": (Structure("grammar", GBNF), lambda text: _must(eval(text) > 0, text)),
}


def _must(holds: object, text: str) -> None:
    assert holds, text


def _must_be_valid(instance: object) -> None:
    import jsonschema  # a GPU machine may lack it, and still has to collect this file

    jsonschema.validate(instance, SCHEMA)


def load(name: str) -> PreTrainedTokenizerBase:
    made = {"byte_level": byte_level, "sentencepiece": sentencepiece}
    return made[name]() if name in made else AutoTokenizer.from_pretrained(BUILTIN)


TOKENIZER: Any = byte_level()
SIZE = len(TOKENIZER)


def compiler_of(vocab_size: int = SIZE, ends: Iterable[int] = (0,)) -> StructureCompiler:
    return StructureCompiler(TOKENIZER, vocab_size, set(ends))


def matcher_of(kind: Any, spec: str) -> StructureMatcher:
    return compiler_of().matcher(Structure(kind, spec))


def allowed(matcher: StructureMatcher, vocab_size: int = SIZE) -> list[int]:
    mask = np.full((vocab_size + 31) // 32, -1, np.int32)  # what is there before does not matter
    matcher.fill(mask)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    assert not bits[vocab_size:].any()
    return [int(token_id) for token_id in np.flatnonzero(bits)]


def write(matcher: StructureMatcher, text: str) -> None:
    """Accept a text whose characters are all tokens."""
    for character in text.replace(" ", "Ġ"):
        matcher.accept(TOKENIZER.backend_tokenizer.token_to_id(character))


@pytest.mark.parametrize("tokenizer_name", ["byte_level", "sentencepiece", "builtin"])
@pytest.mark.parametrize("case", CASES)
def test_random_outputs_have_the_structure(case: str, tokenizer_name: str) -> None:
    structure, check = CASES[case]
    tokenizer = load(tokenizer_name)
    vocab_size, eos = len(tokenizer) + 45, tokenizer.eos_token_id
    compiler = StructureCompiler(tokenizer, vocab_size, {eos})
    rng = np.random.default_rng(0)
    for _ in range(20):
        matcher = compiler.matcher(structure)
        output: list[int] = []
        while not output or output[-1] != eos:
            candidates = allowed(matcher, vocab_size)
            assert matcher.error is None
            assert max(candidates) < len(tokenizer)
            output.append(int(rng.choice(candidates)))
            matcher.accept(output[-1])
        assert matcher.finished
        # Behind another token, as behind a prompt: the first space of a sentencepiece text would be dropped.
        before = tokenizer.encode("x", add_special_tokens=False)
        text = tokenizer.decode(before + output, skip_special_tokens=True)
        check(text.removeprefix(tokenizer.decode(before)))


def test_json_object_and_any_json() -> None:
    compiler = compiler_of()
    begins = [TOKENIZER.decode([t])[0] for t in allowed(compiler.matcher(Structure("json", "{}")), SIZE)]
    assert set(begins) == {"{"}
    bare = Structure("json", '{"title": "anything"}')
    begins = [TOKENIZER.decode([t])[0] for t in allowed(compiler.matcher(bare), SIZE)]
    assert set(begins) > {"{", "[", '"', "1", "t"}


WIDE = {
    "2,000 choices": Structure("choice", json.dumps([f"option {i}" for i in range(2000)])),
    "64 KiB of choices": Structure("choice", json.dumps([f"{i}" + "x" * 50 for i in range(1100)])),
    "500 optional properties": Structure("json", json.dumps({"properties": {f"p{i}": {} for i in range(500)}})),
    "1,500 rules": Structure("grammar", "start: " + "|".join(f'"o{i}"' for i in range(1500))),
}


@pytest.mark.parametrize("case", WIDE)
def test_a_wide_structure_works(case: str) -> None:
    """The parser stopped at 2,000 items after the first token, and its "internal error" failed the step of all
    requests."""
    matcher = compiler_of().matcher(WIDE[case])
    rng = np.random.default_rng(0)
    for _ in range(4):
        matcher.accept(int(rng.choice(allowed(matcher))))
        assert matcher.error is None


@pytest.mark.parametrize(
    ("structure", "remedy"),
    [
        (Structure("grammar", "start: " + "|".join(f'"o{i}"' for i in range(2500))), "fewer alternatives"),
        (Structure("json", json.dumps({"properties": {f"p{i}": {} for i in range(1500)}})), "fewer optional prop"),
    ],
)
def test_what_is_too_wide_is_refused_before_a_stream_begins(structure: Structure, remedy: str) -> None:
    """The parser's limit is exceeded only after the first token."""
    with pytest.raises(RequestError, match=f"too complex for the parser .*{remedy}") as raised:
        compiler_of().check_structure(structure)
    assert raised.value.param == "structure"


def test_a_limit_met_later_belongs_to_the_output() -> None:
    """`accept` took exceeded limits for errors of the engine."""
    wide = "|".join(f'"o{i}"' for i in range(2500))
    matcher = matcher_of(
        "grammar", f'start: "a" | "xyz" ({wide})'
    )  # only the first of the alternatives is tried further
    write(matcher, "xyzo")
    assert isinstance(matcher.error, RequestError)
    assert matcher.finished


@pytest.mark.parametrize(
    ("spec", "begin", "ends"),
    [
        ('{"type": "number", "minimum": 0.25, "maximum": 0.5}', "0.3", True),
        ('{"type": "integer", "minimum": 5}', "7", True),
        ('{"type": "number"}', "1e", True),
        ('{"type": "string"}', '"', False),
        ('{"type": "string", "pattern": "^[0-9]{100}$"}', '"', False),
    ],
)
def test_numbers_end(spec: str, begin: str, ends: bool) -> None:
    """A number between 0.25 and 0.5 had digits up to `max_tokens`. Digits in a text go on."""
    matcher = matcher_of("json", spec)
    write(matcher, begin)
    for _ in range(80):
        digits = [token_id for token_id in allowed(matcher) if TOKENIZER.decode([token_id]) == "3"]
        if not digits:
            break
        matcher = matcher.fork()
        matcher.accept(digits[0])
    assert (not digits) == ends
    assert not ends or 0 in allowed(matcher)


OBJECT = Structure("json", '{"type": "object"}')
SPACED = Structure("json", '{"type": "object", "x-guidance": {"whitespace_pattern": "[ ]"}}')
TAGGED = Structure("tags", json.dumps(TAGS))


@pytest.mark.parametrize(
    ("structure", "text", "holds"),
    [
        # A gap allowed a line break and 64 spaces, and small models wrote all of them; unless the schema says so.
        (OBJECT, '{"a":1,"b":[1,2]}', True),
        (OBJECT, '{"a": 1, "b": [1, 2]}', True),
        *((OBJECT, text, False) for text in ('{ "a": 1}', '{"a":  1}', '{"a" :1}', '{"a":[ 1]}', "{ }")),
        *((SPACED, text, True) for text in ('{ "a": 1}', '{"a":  1}', '{"a" :1}', '{"a":[ 1]}', "{ }")),
        # Any text may be written, and a trigger is followed by one of the structures.
        (TAGGED, "any text, and < too", True),
        (TAGGED, "", True),
        (TAGGED, "first <call=a>7</call> then <call=b>{}</call> and more", True),
        (TAGGED, '<call=b>{"x": 8}</call>', True),
        (TAGGED, "<call=a>8</call>", False),
        (TAGGED, "<call=c>", False),
        (TAGGED, "<call=a>7", False),
    ],
)
def test_texts_of_structures(structure: Structure, text: str, holds: bool) -> None:
    matcher = compiler_of().matcher(structure)
    try:
        write(matcher, text)
    except EngineError:
        assert not holds
    else:
        assert (0 in allowed(matcher)) == holds


def test_a_trigger_that_is_a_special_token() -> None:
    end = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
    tags = {"triggers": ["<|im_end|>"], "structures": [{"begin": "<|im_end|>a", "schema": {"enum": [7]}, "end": "b"}]}
    matcher = matcher_of("tags", json.dumps(tags))
    write(matcher, "x")
    matcher.accept(end)
    write(matcher, "a7b")
    assert 0 in allowed(matcher)


def test_only_the_ends_follow_a_complete_structure() -> None:
    ends = {0, TOKENIZER.convert_tokens_to_ids("<|im_end|>")}
    matcher = compiler_of(ends=ends).matcher(Structure("regex", "ab+"))
    write(matcher, "a")
    assert not ends & set(allowed(matcher))
    write(matcher, "b")
    assert ends < set(allowed(matcher))
    assert not matcher.finished
    for end in ends:
        matcher.accept(end)
        assert matcher.finished
        assert set(allowed(matcher)) == ends


def test_without_an_end_of_sequence_token_only_finished_tells() -> None:
    for vocab_size in (SIZE, SIZE + 1, SIZE + 64):
        matcher = compiler_of(vocab_size, ()).matcher(Structure("choice", '["ab", "ac"]'))
        write(matcher, "a")
        assert not matcher.finished
        write(matcher, "c")
        assert matcher.finished
        assert allowed(matcher, vocab_size) == []


def test_a_vocabulary_smaller_than_the_tokenizers() -> None:
    for vocab_size in (257, 288, SIZE - 1):
        compiler = compiler_of(vocab_size)
        assert allowed(compiler.matcher(Structure("regex", ".*")), vocab_size)  # `allowed` looks at the bits after
        with pytest.raises(RequestError, match="no token of this model can begin"):
            compiler.check_structure(Structure("grammar", f"start: <[{SIZE - 1}]>"))


def test_forks_are_independent() -> None:
    matcher = matcher_of("choice", '["abc", "abd"]')
    write(matcher, "ab")
    fork = matcher.fork()
    write(fork, "d")
    assert fork.finished
    assert not matcher.finished
    write(matcher, "c")
    assert matcher.finished


def test_a_token_that_does_not_follow_is_refused() -> None:
    matcher = matcher_of("choice", '["abc"]')
    with pytest.raises(EngineError, match="does not follow"):
        write(matcher, "x")
    assert allowed(matcher) == [0]
    assert matcher.error is not None
    matcher.accept(0)  # that ends it


@pytest.mark.parametrize(
    ("structure", "message"),
    [
        (Structure("json", "{"), "not valid JSON"),
        (Structure("json", "[" * 50_000), "not valid JSON"),
        (Structure("json", '{"a": NaN}'), "NaN"),
        (Structure("json", "[1]"), "object"),
        (Structure("json", '{"type": "foo"}'), "foo"),
        (Structure("json", '{"not": {"type": "string"}}'), "not"),
        (Structure("json", '{"$ref": "http://localhost/schema"}'), "retriev"),
        (Structure("json", '{"type": "integer", "minimum": 5, "maximum": 1}'), "minimum"),
        (Structure("json", '{"x-guidance": 1}'), "x-guidance"),
        (Structure("regex", "a(b"), "unclosed"),
        (Structure("regex", "(?=a)b"), "look"),
        (Structure("regex", r"(a)\1"), "backreference"),
        (Structure("regex", "[^\\x00-\U0010ffff]"), "nothing"),
        (Structure("regex", "\ud800"), "Unicode"),
        (Structure("regex", "a" * 70_000), "65536"),
        (Structure("choice", "[]"), "at least one"),
        (Structure("choice", '["a", 1]'), "strings"),
        (Structure("choice", '"a"'), "list"),
        (Structure("grammar", ""), "no start rule"),
        (Structure("grammar", "start: nothing"), "nothing"),
        (Structure("grammar", 'start: start "x"'), "nothing satisfies"),
        (Structure("grammar", "start: <nonsense>"), "nonsense"),
        (Structure("grammar", "root ::= missing"), "'missing' not found"),
        (Structure("grammar", 'first ::= "a"'), "No 'root' rule"),
        (Structure("grammar", "root ::= ["), "Unexpected end"),
        (Structure("grammar", "root ::= " + "(" * 30_000), "recursion"),
        (Structure("tags", "[]"), "has triggers"),
        (Structure("tags", '{"triggers": [], "structures": [{"begin": "a"}]}'), "has triggers"),
        (Structure("tags", '{"triggers": ["a"], "structures": []}'), "at least one"),
        (Structure("tags", '{"triggers": ["", "b"], "structures": [{"begin": "a", "schema": {}, "end": ""}]}'), "'a'"),
        (Structure("tags", '{"triggers": ["a"], "structures": [{"begin": "a", "schema": 5, "end": ""}]}'), "object"),
    ],
)
def test_invalid_structures_are_refused(structure: Structure, message: str) -> None:
    with pytest.raises(RequestError, match=message) as raised:
        compiler_of().check_structure(structure)
    assert raised.value.param == "structure"
    assert len(str(raised.value)) < 700


def test_a_tokenizer_whose_tokens_depend_on_their_neighbours_is_refused() -> None:
    with pytest.raises(RequestError, match=r"WordPiece.*, and only byte-level"):
        StructureCompiler(wordpiece(), 3, ()).check_structure(Structure("regex", "a"))


def test_without_llguidance_only_structures_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package the import failed in `generate`, and an engine with a tokenizer did not start, because the
    warm-up uses a structure."""
    monkeypatch.setitem(sys.modules, "llguidance", None)
    structured = SamplingParams(max_tokens=2, structure=Structure("regex", "a"))
    with LLM("builtin", kv_memory_bytes=16 << 20) as llm:
        with pytest.raises(RequestError, match="needs the package llguidance") as raised:
            llm.generate(["a"], structured)
        assert raised.value.param == "structure"
        warm_up(llm.engine)
        assert len(llm.generate(["a"], SamplingParams(max_tokens=2, ignore_eos=True))[0].token_ids) == 2


def test_a_parser_that_gives_up_ends_only_its_own_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structure_module, "_MAX_LEXER_STATES", 100)
    matcher = matcher_of("regex", "(a|b)*a(a|b){18}")
    rng = np.random.default_rng(0)
    for _ in range(1000):
        write(matcher, "ab"[rng.integers(2)])
        candidates = allowed(matcher)
        if matcher.error is not None:
            break
    assert matcher.error is not None
    assert "too complex" in str(matcher.error)
    assert "\n" not in str(matcher.error)
    assert candidates == [0]
    assert matcher.finished
    assert matcher.fork().error is matcher.error


def test_compiled_structures_are_kept_and_the_longest_unused_forgotten() -> None:
    compiled = []

    class Noted(StructureCompiler):
        def _compile(self, structure: Structure) -> StructureMatcher:
            compiled.append(structure.spec)
            return super()._compile(structure)

    compiler = Noted(TOKENIZER, SIZE, {0})
    others = ["c" * (i + 1) for i in range(structure_module.MAX_CACHED - 1)]
    for spec in ("a", "b", "a", *others, "a", "b"):
        compiler.check_structure(Structure("regex", spec))
    assert compiled == ["a", "b", *others, "b"]


def test_threads_that_come_first_together_build_once(monkeypatch: pytest.MonkeyPatch) -> None:
    built, outcomes, barrier, all_came = [], [], threading.Barrier(8), threading.Event()
    original = structure_module.token_bytes

    def build_when_all_have_come(tokenizer: PreTrainedTokenizerBase) -> TokenBytes:
        built.append(tokenizer)
        assert all_came.wait(60)
        return original(tokenizer)

    monkeypatch.setattr(structure_module, "token_bytes", build_when_all_have_come)
    compiler = compiler_of()
    assert not built

    def use(number: int) -> None:
        if barrier.wait() == 0:
            all_came.set()
        matcher = compiler.matcher(Structure("choice", json.dumps([f"a{number % 3}"])))
        write(matcher, f"a{number % 3}")
        outcomes.append(matcher.finished)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == [True] * 8
    assert len(built) == 1
