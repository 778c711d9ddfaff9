"""Structured output: the allowed next tokens for a JSON schema, regular expression, choice or grammar, by llguidance.

Grammars are over bytes. llguidance walks a trie of all tokens' bytes along the parser's states. Every tokenisation of a
valid text is allowed.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import logging
import re
import threading
from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from folio.app.engine.sampling.params import Structure, StructureKind
from folio.app.engine.sampling.reasoning import BudgetedMatcher, Matcher
from folio.app.engine.sampling.token_text import token_bytes
from folio.app.errors import EngineError, RequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher

logger = logging.getLogger(__name__)

MAX_SPEC_BYTES = 64 * 1024
# Most bytes of a grammar made from tools: agents send a hundred of them, a kilobyte each.
_MAX_CALLS_BYTES = 1 << 20
MAX_CACHED = 64
# Lexer states take 1 to 2 KiB each, for each output.
_MAX_LEXER_STATES = 50_000
# Most alternatives that the parser follows at once; a schema has about four for each optional property. More would make
# steps slower for all requests: a repeated grammar of 8,000 takes 100 ms per token.
_MAX_ROW_ITEMS = {"json": 4000}
# A number ends, if it may, after this many digits in a row; a float64 has 17. Small models repeat digits without end.
_MAX_DIGITS = 32
# Trial tokens before a structure is accepted: one that is too complex mostly fails after the first.
_TRIED_TOKENS = 8
# Compact, with the space that models write after a comma and a colon: small models fill every optional gap.
_JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
# Second grammar, for its option only: a forced tokenisation would contain added tokens wherever the text has their
# names, which the parser then rejects.
_OPTIONS_GRAMMAR = {"lark_grammar": '%llguidance {"no_forcing": true}\nstart: "-"'}


def is_available() -> bool:
    """Whether llguidance is installed; the server depends on it, `folio.app.engine` does not."""
    return importlib.util.find_spec("llguidance") is not None


class StructureCompiler:
    """Compiles structures for one tokenizer, from any thread. The first call builds the trie of all tokens, in about a
    second for a large vocabulary.

    Args:
        vocab_size: columns of the model's logits.
        eos_token_ids: tokens to allow where the structure is complete.

    Raises:
        RequestError: llguidance is not installed.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        if not is_available():
            raise RequestError("structured output needs the package llguidance, which is not installed", "structure")
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._build_lock = threading.Lock()
        self._vocabulary: _TokenTrie | None = None
        # Without a lock around the call: two threads may compile the same structure, and others do not wait.
        self._compiled = functools.lru_cache(MAX_CACHED)(self._compile)

    def check_structure(self, structure: Structure) -> None:
        """Compile and cache a structure.

        Raises:
            RequestError: the structure is invalid, unsupported, too large, or cannot be satisfied, or the tokenizer's
                tokens have no bytes of their own.
        """
        if structure.kind == "any":  # a budget of reasoning alone needs the tokens' bytes
            self._built()
        else:
            self._compiled(replace(structure, budget=None, begun=""))

    def matcher(self, structure: Structure) -> Matcher:
        """A matcher at the beginning of an output. Raises `RequestError` as `check_structure`."""
        budget, begun, structure = structure.budget, structure.begun, replace(structure, budget=None, begun="")
        matcher = self._behind(begun, self._compiled(structure)) if structure.kind != "any" else None
        if budget is None:
            assert matcher is not None, "any output, without a budget"
            return matcher
        end = self._tokenizer.encode(budget.end, add_special_tokens=False)
        return BudgetedMatcher(matcher, budget, self._built().texts, end)

    def _behind(self, begun: str, matcher: StructureMatcher) -> StructureMatcher:
        """A matcher after this text; at the beginning if the text does not follow the structure."""
        behind = matcher.fork()
        try:
            for token_id in self._tokenizer.encode(begun, add_special_tokens=False) if begun else ():
                behind.accept(token_id)
        except EngineError:
            return matcher.fork()
        return matcher.fork() if behind.error is not None or behind.finished else behind

    def _compile(self, structure: Structure) -> StructureMatcher:
        from llguidance import LLMatcher, LLParserLimits

        vocabulary = self._built()
        grammar = _grammar(structure, vocabulary.special)
        limits = LLParserLimits(
            max_items_in_row=_MAX_ROW_ITEMS.get(structure.kind),
            max_lexer_states=_MAX_LEXER_STATES,
            verbose_errors=False,
        )
        parser = LLMatcher(vocabulary.tokenizer, grammar, log_level=0, limits=limits)
        if parser.is_error():
            raise RequestError(f"this {_NAMES[structure.kind]} cannot be used: {_brief(parser)}", "structure")
        matcher = StructureMatcher(vocabulary, parser, structure.kind)
        mask = np.zeros((self._vocab_size + 31) // 32, np.int32)
        matcher.fill(mask)  # llguidance finds some errors only here
        if matcher.error is not None:
            raise RequestError(f"nothing satisfies this {_NAMES[structure.kind]}: {_brief(parser)}", "structure")
        if not mask.any():
            raise RequestError(f"no token of this model can begin this {_NAMES[structure.kind]}", "structure")
        self._try(matcher.fork(), mask)
        return matcher

    def _try(self, matcher: StructureMatcher, mask: np.ndarray) -> None:
        """Try beginnings of outputs, one for each first byte, the first one further. Raises `RequestError` if a limit
        of the parser is exceeded."""
        assert self._vocabulary is not None
        for i, first in enumerate(self._vocabulary.of_each_first_byte(mask)):
            output, ahead, token_id = matcher.fork(), mask.copy(), first
            for _ in range(1 if i else _TRIED_TOKENS):
                output.accept(token_id)
                if output.error is None and not output.finished:
                    output.fill(ahead)
                if output.error is not None:
                    raise output.error
                following = () if output.finished else self._vocabulary.of_each_first_byte(ahead)
                if not following:
                    break
                token_id = following[0]

    def _built(self) -> _TokenTrie:
        with self._build_lock:
            if self._vocabulary is None:
                self._vocabulary = _TokenTrie(self._tokenizer, self._vocab_size, self._eos_token_ids)
            return self._vocabulary


class StructureMatcher:
    """Position of an output in its structure, by llguidance's parser; for one thread at a time.

    Attributes:
        error: the structure exceeded a limit of the parser. Only end-of-sequence tokens are allowed from then on; the
            engine ends the request with this error.
    """

    def __init__(self, vocabulary: _TokenTrie, parser: LLMatcher, kind: StructureKind) -> None:
        self._vocabulary = vocabulary
        self._parser = parser
        self._kind = kind
        self._num_digits = 0  # at the end of the output
        self.error: RequestError | None = None

    def fill(self, mask: np.ndarray) -> None:
        """Set the bits of allowed tokens: `[ceil(vocab_size / 32)]` int32, contiguous.

        Where the output may end, end-of-sequence tokens are allowed; without any, no token may follow a complete
        structure.
        """
        self._vocabulary.fill(self._parser, mask)
        self._note_error()
        if self._num_digits >= _MAX_DIGITS:
            self._vocabulary.end_number(mask)

    def accept(self, token_id: int) -> None:
        """Advance by a token. Raises `EngineError` if it is not allowed."""
        if not self._parser.consume_token(token_id):
            reason = _brief(self._parser)
            if any(text in reason for text in _NOT_ALLOWED):
                raise EngineError(f"token {token_id} does not follow in the structure: {reason}")
            self._note_error()  # a limit of the parser, one of which llguidance calls an internal error
        text = self._vocabulary.texts[token_id]
        num_digits = len(text) - len(text.rstrip(_DIGITS))
        self._num_digits = num_digits + (self._num_digits if num_digits == len(text) else 0)

    def fork(self) -> StructureMatcher:
        """An independent copy, in a few microseconds."""
        fork = StructureMatcher(self._vocabulary, self._parser.deep_copy(), self._kind)
        fork.error, fork._num_digits = self.error, self._num_digits
        return fork

    @property
    def finished(self) -> bool:
        """Whether the structure is complete and cannot continue."""
        return self._parser.is_stopped()

    def _note_error(self) -> None:
        if self.error is None and self._parser.is_error():
            reason = _brief(self._parser)
            # Without the reason, which quotes the structure: that is private.
            logger.warning("the parser of a structure exceeded a limit")
            message = f"this {_NAMES[self._kind]} is too complex for the parser ({reason}); use {_REMEDIES[self._kind]}"
            self.error = RequestError(message, "structure")


class _TokenTrie:
    """Trie of all tokens, and their positions in the engine's masks.

    Attributes:
        texts: bytes of each token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        from llguidance import LLTokenizer

        known = token_bytes(tokenizer)
        tokens = list(known.tokens)
        tokens += [b""] * (max(eos_token_ids, default=-1) + 1 - len(tokens))
        if not eos_token_ids:  # the parser needs one: add a token that the model lacks
            tokens.append(b"end")
        self._no_token = None if eos_token_ids else len(tokens) - 1
        self._vocab_size = vocab_size
        self._num_words = (len(tokens) + 31) // 32
        self._too_many = len(tokens) > vocab_size
        ends = sorted(eos_token_ids) or [len(tokens) - 1]
        self.special = frozenset(tokens[token_id].decode(errors="replace") for token_id in known.special)
        self._first_bytes = np.array([token[0] if token else -1 for token in tokens], np.int16)
        self._first_bytes[[*known.special, *ends]] = -1
        self.texts = tokens
        self._letter = tokens.index(b"Q") if b"Q" in tokens else None  # one that no number has
        self.tokenizer = LLTokenizer(
            _Tokens(tokens, sorted(known.special | set(ends)), ends[0]),  # type: ignore[arg-type]
            eos_token=ends,
        )

    def of_each_first_byte(self, mask: np.ndarray) -> list[int]:
        """For each first byte the lowest allowed token, without special tokens."""
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        allowed = allowed[allowed < len(self._first_bytes)]
        allowed = allowed[self._first_bytes[allowed] >= 0]
        return sorted(allowed[np.unique(self._first_bytes[allowed], return_index=True)[1]].tolist())

    def end_number(self, mask: np.ndarray) -> None:
        """Forbid tokens that begin with a digit, unless only these are allowed, or the digits are part of a text."""
        if self._letter is not None and mask[self._letter // 32] >> self._letter % 32 & 1:
            return
        digits = (self._first_bytes >= _DIGITS[0]) & (self._first_bytes <= _DIGITS[-1])
        bits = np.zeros(len(mask) * 32, np.uint8)
        bits[: len(digits)] = digits[: len(bits)]
        others = mask & ~np.packbits(bits, bitorder="little").view(np.int32)
        if others.any():
            mask[:] = others

    def fill(self, parser: LLMatcher, mask: np.ndarray) -> None:
        assert mask.dtype == np.int32, mask.dtype
        assert mask.flags.c_contiguous
        assert mask.shape == ((self._vocab_size + 31) // 32,), (mask.shape, self._vocab_size)
        words = mask[: self._num_words]
        target = words if len(words) == self._num_words else np.empty(self._num_words, np.int32)
        parser.unsafe_compute_mask_ptr(target.ctypes.data, target.nbytes)
        if self._no_token is not None:
            target.view(np.uint32)[self._no_token // 32] &= np.uint32(~(1 << self._no_token % 32) & 0xFFFFFFFF)
        if target is not words:
            words[:] = target[: len(words)]
        mask[self._num_words :] = 0
        if self._too_many and self._vocab_size % 32:
            mask.view(np.uint32)[-1] &= np.uint32((1 << self._vocab_size % 32) - 1)


class _Tokens:
    """The attributes of a tokenizer that `LLTokenizer` reads."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: list[bytes], special_token_ids: list[int], eos_token_id: int) -> None:
        self.tokens = tokens
        self.special_token_ids = special_token_ids
        self.eos_token_id = eos_token_id

    def __call__(self, text: bytes) -> list[int]:
        raise AssertionError("no grammar forces a tokenisation")


_NAMES = {
    "json": "JSON schema",
    "regex": "regular expression",
    "choice": "choice",
    "grammar": "grammar",
    "calls": "choice of tools",
    "tags": "structural tag",
}
_REMEDIES = {
    "json": "fewer optional properties and alternatives",
    "regex": "a shorter one, with smaller bounds of repetition",
    "choice": "fewer or shorter strings",
    "grammar": "fewer alternatives, and repetition to the left",
    "calls": "fewer tools, with fewer optional properties",
    "tags": "fewer structures, with fewer optional properties",
}
_DIGITS = b"0123456789"
# The parser's messages for a token that the mask forbids.
_NOT_ALLOWED = ("doesn't satisfy the grammar", "out of range")


def _grammar(structure: Structure, special: Collection[str]) -> str:
    """The structure as llguidance's list of grammars, in JSON. `special`: names of special tokens."""
    from llguidance import LLMatcher

    frame = structure.frame or ""
    try:
        size = len(structure.spec.encode()) + len(frame.encode())
    except UnicodeEncodeError as error:
        raise RequestError(f"structure is not valid Unicode at character {error.start}", "structure") from error
    most = _MAX_CALLS_BYTES if structure.kind == "calls" or frame else MAX_SPEC_BYTES
    if size > most:
        raise RequestError(f"{_NAMES[structure.kind]} has {size} bytes; at most {most} are allowed", "structure")
    first: dict[str, Any]
    if structure.kind == "json":
        first = {"json_schema": _schema(structure.spec)}
    elif structure.kind == "regex":
        first = json.loads(LLMatcher.grammar_from_regex(structure.spec))["grammars"][0]
    elif structure.kind == "choice":
        # One terminal: 2,000 rules would be as many parser states, a hundred times slower.
        choices = " | ".join(json.dumps(choice) for choice in _choices(structure.spec))
        first = {"lark_grammar": f"start: CHOICE\nCHOICE: {choices}"}
    elif structure.kind == "tags":
        first = {"lark_grammar": _tagged(structure.spec, special)}
    else:
        first = {"lark_grammar": structure.spec if structure.kind == "calls" else _lark(structure.spec)}
    framed = [first] if structure.frame is None else [{"lark_grammar": frame}, first | {"name": "answer"}]
    return json.dumps({"grammars": [*framed, _OPTIONS_GRAMMAR]})


def _lark(spec: str) -> str:
    """A grammar in Lark's syntax. GBNF, the syntax of llama.cpp and xgrammar, is converted."""
    from llguidance.gbnf_to_lark import any_to_lark

    if "::=" not in spec:
        return spec
    try:
        return any_to_lark(spec)
    except Exception as error:  # the converter raises plain `Exception`s for faults of the grammar
        raise RequestError(f"this grammar cannot be used: {str(error)[:500]}", "structure") from error


def _tagged(spec: str, special: Collection[str]) -> str:
    """The grammar of text with tagged structures. Triggers are special tokens if all of them are some."""
    from llguidance import StructTag

    given = _json(spec, "structural tag")
    tags = []
    try:
        triggers = [str(text) for text in given["triggers"]]
        structures = [(str(tag["begin"]), tag["schema"], str(tag["end"])) for tag in given["structures"]]
    except (KeyError, TypeError) as error:
        raise RequestError(
            "a structural tag has triggers, and structures with begin, schema and end", "structure"
        ) from error
    for begin, schema, end in structures:
        trigger = next((text for text in triggers if text and begin.startswith(text)), None)
        if trigger is None:
            raise RequestError(f"no trigger begins the structural tag {begin[:100]!r}", "structure")
        tags.append(StructTag(trigger=trigger, begin=begin, grammar=_schema(json.dumps(schema)), end=end))
    if not tags:
        raise RequestError("a structural tag needs at least one structure", "structure")
    return StructTag.to_grammar(tags, assume_special=all(tag.trigger in special for tag in tags))


def _schema(spec: str) -> dict[str, Any]:
    schema = _json(spec, "JSON schema") or {"type": "object"}
    if not isinstance(schema, dict):
        raise RequestError(f"a JSON schema is an object, not {str(schema)[:40]}", "structure")
    options = schema.get("x-guidance", {})
    if not isinstance(options, dict):
        raise RequestError(f"x-guidance in a JSON schema is an object, not {str(options)[:40]}", "structure")
    return schema | {"x-guidance": _JSON_OPTIONS | options}


def _choices(spec: str) -> list[str]:
    choices = _json(spec, "choice")
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise RequestError("choice takes a list of strings, at least one", "structure")
    return choices


def _json(text: str, kind: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"this {kind} is not valid JSON: {error}", "structure") from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")  # Python would accept it


def _brief(parser: LLMatcher) -> str:
    """The parser's error message without its state."""
    message = re.split("\n<(state|non-verbose)", parser.get_error())[0].strip()[:500]
    return message.removeprefix("Parser Error: ").split("; consider making your grammar left-recursive")[0]
