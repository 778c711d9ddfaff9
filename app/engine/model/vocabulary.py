"""Vocabulary: sampling states, detokenizers and structures for a model's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache

from folio.app.engine.model.loader import LoadedModel
from folio.app.engine.sampling.bad_words import BadWords, TokenSearch, encode_word
from folio.app.engine.sampling.params import SamplingParams
from folio.app.engine.sampling.reasoning import Matcher
from folio.app.engine.sampling.state import SamplingState, check_token_ids
from folio.app.engine.sampling.structure import StructureCompiler, is_available
from folio.app.engine.sampling.token_text import IncrementalDetokenizer, has_independent_tokens, token_bytes
from folio.app.errors import RequestError

_KNOWN_BAD_WORDS = 64


class Vocabulary:
    """Create sampling states and detokenizers. From any thread.

    Attributes:
        eos_token_ids: tokens that end an output.
    """

    def __init__(self, model: LoadedModel) -> None:
        self.eos_token_ids = model.eos_token_ids
        self._size = model.vocab_size
        self._tokenizer = model.tokenizer
        self._encode_bad_words = lru_cache(_KNOWN_BAD_WORDS)(self._encode)

    def check_params(self, params: SamplingParams) -> None:
        """Raise `RequestError` unless this model can serve the parameters. Compiles structures, which takes long."""
        for name in ("stop", "bad_words", "structure"):
            if getattr(params, name) and self._tokenizer is None:
                raise RequestError(f"{name} needs a tokenizer, and this engine runs without one", name)
        check_token_ids(params, self._size)
        self._bad_words(params)
        if params.structure is not None and self._structures is not None:
            self._structures.check_structure(params.structure)

    @property
    def has_structures(self) -> bool:
        """Whether outputs may have a structure, which needs llguidance and tokens with bytes of their own."""
        return self._tokenizer is not None and is_available() and has_independent_tokens(self._tokenizer)

    def state(
        self, params: SamplingParams, prompt_token_ids: list[int], index: int = 0, structure_from: int = 0
    ) -> SamplingState:
        """The sampling state of a new output."""
        return SamplingState(
            params,
            prompt_token_ids,
            index=index,
            matcher=self._matcher(params),
            structure_from=structure_from,
            bad_words=self._bad_words(params),
            eos_token_ids=self.eos_token_ids,
        )

    def fork(self, state: SamplingState, params: SamplingParams, index: int) -> SamplingState:
        """The sampling state of a fork. The parent's structure continues; a different structure begins anew."""
        matcher = None if params.structure == state.params.structure else self._matcher(params)
        return state.fork(params, index, matcher=matcher, bad_words=self._bad_words(params))

    def detokenizer(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, output: Sequence[int] = ()
    ) -> IncrementalDetokenizer | None:
        """A detokenizer for an output of which `output` has been sent; `None` without a tokenizer."""
        if self._tokenizer is None:
            return None
        text = IncrementalDetokenizer(
            self._tokenizer.backend_tokenizer,
            prompt_token_ids,
            params.stop,
            include_stop_str=params.include_stop_str,
            kept=params.kept_token_ids if params.skip_special_tokens else self._special_token_ids,
        )
        for token_id in output:
            text.push(token_id)
        text.flush()  # drops the text that the parent still holds back
        return text

    def read(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, control tokens included; empty without a tokenizer."""
        if self._tokenizer is None:
            return ""
        return self._tokenizer.backend_tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def stop_token_ids(self, params: SamplingParams) -> frozenset[int]:
        """Tokens that end an output with these parameters."""
        return frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos_token_ids)

    @cached_property
    def _special_token_ids(self) -> frozenset[int]:
        assert self._tokenizer is not None
        added = self._tokenizer.backend_tokenizer.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    @cached_property
    def _structures(self) -> StructureCompiler | None:
        if self._tokenizer is None:
            return None
        return StructureCompiler(self._tokenizer, self._size, self.eos_token_ids)

    def _matcher(self, params: SamplingParams) -> Matcher | None:
        if params.structure is None or self._structures is None:
            return None
        return self._structures.matcher(params.structure)

    def _bad_words(self, params: SamplingParams) -> BadWords | None:
        if not params.bad_words or self._tokenizer is None:
            return None
        return self._encode_bad_words(tuple(params.bad_words))

    def _encode(self, words: tuple[str, ...]) -> BadWords:
        assert self._tokenizer is not None
        if not has_independent_tokens(self._tokenizer):
            raise RequestError(
                "bad_words needs a tokenizer whose tokens have bytes of their own; leave it out", "bad_words"
            )
        return BadWords(map(encode_word, words), self._token_search)

    @cached_property
    def _token_search(self) -> TokenSearch:
        assert self._tokenizer is not None
        known = token_bytes(self._tokenizer)
        return TokenSearch([b"" if i in known.special else text for i, text in enumerate(known.tokens)])
