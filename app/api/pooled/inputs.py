"""Inputs to pool: texts, and pairs of texts, as token ids of bounded length."""

from __future__ import annotations

import re

from folio.app.api.input.prompts import PromptEncoder
from folio.app.errors import ContextLengthError, RequestError

_PLACES = re.compile(r"(\{query\}|\{document\})")


class InputEncoder:
    """Encodes the inputs of one request. All methods raise `RequestError`.

    Args:
        truncate_to: the request's `truncate_prompt_tokens`.
    """

    def __init__(self, prompts: PromptEncoder, max_model_len: int, truncate_to: int | None) -> None:
        self._encoder, self._bounds = prompts.encoder, prompts.bounds
        self._max_model_len = max_model_len
        if truncate_to is not None and (truncate_to == 0 or truncate_to > max_model_len):
            raise RequestError(
                f"truncate_prompt_tokens is {truncate_to}; it must be -1, or between 1 and the context of "
                f"{max_model_len} tokens",
                "truncate_prompt_tokens",
            )
        self._cuts = truncate_to is not None
        self._most = max_model_len if truncate_to in (None, -1) else truncate_to

    def encode(self, given: str | list[int], param: str) -> list[int]:
        """The token ids of one input, the last ones if it is cut."""
        if not given:
            raise RequestError(f"{param} is empty; it needs at least one token", param)
        if isinstance(given, str):
            if not self._cuts:
                self._bounds.check_length(given, self._max_model_len, param)
            given = self._encoder.encode(given)
        if not self._cuts:
            self._check_length(given, param)
        return given[-self._most :]

    def encode_pair(self, query: str, document: str, template: str | None, param: str) -> list[int]:
        """The token ids of a query with a document, by the template or as the tokenizer joins two texts. A document
        that is cut loses its end.

        Args:
            param: the field that is at fault if the pair is too long.
        """
        if not self._cuts:
            for text in (query, document):
                self._bounds.check_length(text, self._max_model_len, param)
        token_ids = self._joined(query, document, template)
        while self._cuts and document and len(token_ids) > self._most:
            document = self._encoder.without_end(document, len(token_ids) - self._most)
            token_ids = self._joined(query, document, template)
        if len(token_ids) > self._most and self._cuts:
            raise ContextLengthError(f"the query alone has more than {self._most} tokens; send a shorter one", param)
        self._check_length(token_ids, param)
        return token_ids

    def _joined(self, query: str, document: str, template: str | None) -> list[int]:
        if template is None:
            return self._encoder.encode_pair(query, document)
        texts = {"{query}": query, "{document}": document}
        parts = [
            self._encoder.shielded(texts[part], part.strip("{}")) if part in texts else part
            for part in _PLACES.split(template)
        ]
        return self._encoder.encode("".join(parts), add_special_tokens=False)

    def _check_length(self, token_ids: list[int], param: str) -> None:
        if len(token_ids) > self._max_model_len:
            raise ContextLengthError.of_prompt(
                len(token_ids), self._max_model_len, param, advice=" Or let truncate_prompt_tokens cut it."
            )
