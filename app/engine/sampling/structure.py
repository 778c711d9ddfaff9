"""From the structure an output has to have to the tokens that may come next, with llguidance's parser.

A grammar is over bytes. Which tokens may follow is found by walking a trie of all tokens' bytes along the parser's
states; grammars never force a tokenisation, so every way of writing a valid text in tokens is allowed.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import re
import threading
from collections import OrderedDict
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from app.engine.sampling.params import Structure, StructureKind
from app.engine.sampling.token_text import token_bytes
from app.errors import EngineError, RequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher

logger = logging.getLogger(__name__)

MAX_SPEC_BYTES = 64 * 1024
MAX_CACHED = 64
# Its states take one to two KiB each, for each output.
_MAX_LEXER_STATES = 50_000
# Alternatives that the parser may follow at once. A schema has about four for each optional property. More of them make
# steps slower for everybody: a grammar of 8,000 that repeat takes 100 ms a token.
_MAX_ROW_ITEMS = {"json": 4000}
# A structure is tried with so many tokens before it is taken: what is too wide mostly shows behind the first one.
_TRIED_TOKENS = 8
# Compact, with the blank that models write behind a comma and a colon: small ones fill up every gap that they may.
_JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
# The second of a list of grammars: only its options matter. A forced tokenisation would have added tokens in it
# wherever the text happens to have their names, which the parser refuses afterwards.
_OPTIONS_GRAMMAR = {"lark_grammar": '%llguidance {"no_forcing": true}\nstart: "-"'}


def is_available() -> bool:
    """Whether llguidance is installed: the server depends on it, `app.engine` by itself does not."""
    return importlib.util.find_spec("llguidance") is not None


class StructureCompiler:
    """Compiles structures for one tokenizer. May be called from any thread.

    The trie of all tokens is made at the first call, which takes about a second for a large vocabulary.

    Args:
        vocab_size: of the model's logits: at least the largest token id that may be sampled, and one.
        eos_token_ids: what may be sampled where the structure is complete.

    Raises:
        RequestError: llguidance is not installed.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        if not is_available():
            raise RequestError(
                "structured output needs the package llguidance, which is not installed here", "structure"
            )
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._build_lock = threading.Lock()
        self._vocabulary: _TokenTrie | None = None
        self._cache_lock = threading.Lock()
        self._cache: OrderedDict[Structure, StructureMatcher] = OrderedDict()

    def check_structure(self, structure: Structure) -> None:
        """Compile it; the engine finds it done.

        Raises:
            RequestError: it is invalid, unsupported, too large, or nothing can satisfy it.
        """
        self._compiled(structure)

    def matcher(self, structure: Structure) -> StructureMatcher:
        """A matcher for one output, at its beginning. Raises `RequestError` as `check`."""
        return self._compiled(structure).fork()

    def _compiled(self, structure: Structure) -> StructureMatcher:
        with self._cache_lock:
            if (cached := self._cache.get(structure)) is not None:
                self._cache.move_to_end(structure)
                return cached
        # Two threads may compile the same; that is harmless, and others do not wait for it.
        compiled = self._compile(structure)
        with self._cache_lock:
            self._cache[structure] = compiled
            while len(self._cache) > MAX_CACHED:
                self._cache.popitem(last=False)
        return compiled

    def _compile(self, structure: Structure) -> StructureMatcher:
        from llguidance import LLMatcher, LLParserLimits

        grammar = _grammar(structure)
        vocabulary = self._built()
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
        matcher.fill(mask)  # only now some of what cannot work is found
        if matcher.error is not None:
            raise RequestError(f"nothing satisfies this {_NAMES[structure.kind]}: {_brief(parser)}", "structure")
        if not mask.any():
            raise RequestError(f"nothing this model can write begins this {_NAMES[structure.kind]}", "structure")
        self._try(matcher.fork(), mask)
        return matcher

    def _try(self, matcher: StructureMatcher, mask: np.ndarray) -> None:
        """Write beginnings of outputs, one for each first byte, the first further. Raises `RequestError` if that
        is too much for the parser."""
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
        if self._vocabulary is None:
            with self._build_lock:
                if self._vocabulary is None:  # nobody else has built it meanwhile
                    self._vocabulary = _TokenTrie(self._tokenizer, self._vocab_size, self._eos_token_ids)
        return self._vocabulary


class StructureMatcher:
    """Where one output is in its structure; a `Matcher`. Used by one thread at a time.

    Args:
        kind: of structure, for messages.

    Attributes:
        error: why the parser gave up: the structure turned out to be too complex. Only end-of-sequence tokens are
            allowed from then on, and whoever runs the request has to end it with this error.
    """

    def __init__(self, vocabulary: _TokenTrie, parser: LLMatcher, kind: StructureKind) -> None:
        self._vocabulary = vocabulary
        self._parser = parser
        self._kind = kind
        self.error: RequestError | None = None

    def fill(self, mask: np.ndarray) -> None:
        """Set the bits of the tokens that may follow: `[ceil(vocab_size / 32)]` int32, contiguous.

        Where the output may end these are the end-of-sequence tokens too, if the model has any; without any, nothing
        may follow a complete structure.
        """
        self._vocabulary.fill(self._parser, mask)
        self._note_error()

    def accept(self, token_id: int) -> None:
        """Go on by a token. Raises `EngineError` if it may not follow."""
        if not self._parser.consume_token(token_id):
            reason = _brief(self._parser)
            if any(complaint in reason for complaint in _DOES_NOT_FOLLOW):
                raise EngineError(f"token {token_id} does not follow in the structure: {reason}")
            self._note_error()  # a limit of the parser: it calls one of them an internal error

    def fork(self) -> StructureMatcher:
        """Another one at the same place; a few microseconds."""
        fork = StructureMatcher(self._vocabulary, self._parser.deep_copy(), self._kind)
        fork.error = self.error
        return fork

    @property
    def finished(self) -> bool:
        """Whether the structure is complete and no text can follow."""
        return self._parser.is_stopped()

    def _note_error(self) -> None:
        if self.error is None and self._parser.is_error():
            reason = _brief(self._parser)
            logger.warning("a structure's parser gave up")  # why is for its owner: it quotes the structure
            message = f"this {_NAMES[self._kind]} is too complex for the parser ({reason}); use {_REMEDIES[self._kind]}"
            self.error = RequestError(message, "structure")


class _TokenTrie:
    """The trie of all tokens, and where they are in the engine's masks."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        from llguidance import LLTokenizer

        known = token_bytes(tokenizer)
        tokens = list(known.tokens)
        tokens += [b""] * (max(eos_token_ids, default=-1) + 1 - len(tokens))
        if not eos_token_ids:  # the parser wants one: a token that the model does not have
            tokens.append(b"end")
        self._no_token = None if eos_token_ids else len(tokens) - 1
        self._vocab_size = vocab_size
        self._num_words = (len(tokens) + 31) // 32
        self._too_many = len(tokens) > vocab_size
        ends = sorted(eos_token_ids) or [len(tokens) - 1]
        self._first_bytes = np.array([token[0] if token else -1 for token in tokens], np.int16)
        self._first_bytes[[*known.special, *ends]] = -1
        self.tokenizer = LLTokenizer(
            _Tokens(tokens, sorted(known.special | set(ends)), ends[0]),  # type: ignore[arg-type]
            eos_token=ends,
        )

    def of_each_first_byte(self, mask: np.ndarray) -> list[int]:
        """Of the tokens that a mask allows, special ones left out, the lowest for each byte that they begin with."""
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        allowed = allowed[allowed < len(self._first_bytes)]
        allowed = allowed[self._first_bytes[allowed] >= 0]
        return sorted(allowed[np.unique(self._first_bytes[allowed], return_index=True)[1]].tolist())

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
    """What `LLTokenizer` reads of a tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: list[bytes], special_token_ids: list[int], eos_token_id: int) -> None:
        self.tokens = tokens
        self.special_token_ids = special_token_ids
        self.eos_token_id = eos_token_id

    def __call__(self, text: bytes) -> list[int]:
        raise AssertionError("no grammar forces a tokenisation")


_NAMES = {"json": "JSON schema", "regex": "regular expression", "choice": "choice", "grammar": "grammar"}
_REMEDIES = {
    "json": "fewer optional properties and alternatives",
    "regex": "a shorter one, with smaller bounds of repetition",
    "choice": "fewer or shorter strings",
    "grammar": "fewer alternatives, and repetition to the left",
}
# The parser's words for a token that the mask would have forbidden.
_DOES_NOT_FOLLOW = ("doesn't satisfy the grammar", "out of range")


def _grammar(structure: Structure) -> str:
    """llguidance's own form of it: a list of grammars as JSON."""
    from llguidance import LLMatcher

    try:
        size = len(structure.spec.encode())
    except UnicodeEncodeError as error:
        raise RequestError(f"structure is not valid Unicode at character {error.start}", "structure") from error
    if size > MAX_SPEC_BYTES:
        raise RequestError(f"structure has {size} bytes; at most {MAX_SPEC_BYTES} are allowed", "structure")
    first: dict[str, Any]
    if structure.kind == "json":
        first = {"json_schema": _schema(structure.spec)}
    elif structure.kind == "regex":
        first = json.loads(LLMatcher.grammar_from_regex(structure.spec))["grammars"][0]
    elif structure.kind == "choice":
        # A terminal: 2,000 rules would be as many states of the parser, a hundred times slower.
        choices = " | ".join(json.dumps(choice) for choice in _choices(structure.spec))
        first = {"lark_grammar": f"start: CHOICE\nCHOICE: {choices}"}
    else:
        first = {"lark_grammar": structure.spec}
    return json.dumps({"grammars": [first, _OPTIONS_GRAMMAR]})


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


def _json(text: str, what: str) -> Any:
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"this {what} is not valid JSON: {error}", "structure") from error


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")  # Python would take it


def _brief(parser: LLMatcher) -> str:
    """The parser's complaint without its state."""
    complaint = re.split("\n<(state|non-verbose)", parser.get_error())[0].strip()[:500]
    return complaint.removeprefix("Parser Error: ").split("; consider making your grammar left-recursive")[0]
