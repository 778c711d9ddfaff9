"""Bad words: strings that the text of an output never contains, however it is cut into tokens.

A token is forbidden if it contains a bad word, or if it completes one whose beginning is at the end of the output so
far. An Aho-Corasick automaton over the words' bytes tracks these beginnings; its state is one number per output.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

from folio.app.errors import RequestError

# No word contains this byte: it does not occur in UTF-8.
_SEPARATOR = b"\xff"
_NONE = np.empty(0, np.int64)


class TokenSearch:
    """Index of all tokens' bytes, built once per model: 60 ms for 150,000 tokens.

    Args:
        texts: bytes by token id; empty for tokens that outputs do not show.
    """

    def __init__(self, texts: Sequence[bytes]) -> None:
        self.texts = texts
        self._joined = _SEPARATOR.join(texts)
        self._ends = np.cumsum([len(text) + 1 for text in texts])
        self._order = np.array(sorted(range(len(texts)), key=texts.__getitem__), np.int64)
        self._sorted = [texts[token_id] for token_id in self._order]

    def containing(self, word: bytes) -> list[int]:
        """Tokens that contain the word."""
        found, at = [], self._joined.find(word)
        while at >= 0:
            token_id = int(np.searchsorted(self._ends, at, "right"))
            found.append(token_id)
            at = self._joined.find(word, int(self._ends[token_id]))
        return found

    def beginning(self, text: bytes) -> np.ndarray:
        """Tokens that begin with the text."""
        behind = text[:-1] + bytes([text[-1] + 1])  # the last byte of a word is at most 0xBF
        return self._order[bisect_left(self._sorted, text) : bisect_left(self._sorted, behind)]


class BadWords:
    """An immutable set of words, none of them empty.

    A state is a node of the words' trie: the longest beginning of a word that is at the end of the output; 0: none.
    """

    def __init__(self, words: Iterable[bytes], tokens: TokenSearch) -> None:
        self._tokens = tokens
        self._next: list[dict[int, int]] = [{}]
        self._rests: list[list[bytes]] = [[]]  # what completes the words that begin so
        distinct = {*words}
        assert b"" not in distinct
        for word in distinct:
            state = 0
            for place, byte in enumerate(word):
                if place:
                    self._rests[state].append(word[place:])
                if byte not in self._next[state]:
                    self._next[state][byte] = len(self._next)
                    self._next.append({})
                    self._rests.append([])
                state = self._next[state][byte]
        self._shorter = self._links()
        self._anywhere = np.unique(np.array([t for word in distinct for t in tokens.containing(word)], np.int64))
        self._completing: dict[int, np.ndarray] = {}
        self._masks: dict[int, np.ndarray] = {}

    def _links(self) -> list[int]:
        """Failure links: for each state the one of the longest beginning of a word that is its proper suffix."""
        links, queue = [0] * len(self._next), deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for byte, child in self._next[state].items():
                shorter = links[state]
                while shorter and byte not in self._next[shorter]:
                    shorter = links[shorter]
                links[child] = self._next[shorter].get(byte, 0)
                queue.append(child)
        return links

    @property
    def depend_on_output(self) -> bool:
        """Whether forbidden tokens depend on preceding ones."""
        return any(self._rests)

    def mask(self, vocab_size: int) -> np.ndarray:
        """Bits of the tokens that contain no word: `[ceil(vocab_size / 32)]` int32."""
        if (mask := self._masks.get(vocab_size)) is None:
            bits = np.ones(-(-vocab_size // 32) * 32, np.uint8)
            bits[self._anywhere[self._anywhere < vocab_size]] = 0
            mask = self._masks[vocab_size] = np.packbits(bits, bitorder="little").view("<i4")
        return mask

    def advance(self, state: int, token_id: int) -> int:
        """The state after a further token."""
        texts = self._tokens.texts
        for byte in texts[token_id] if token_id < len(texts) else b"":
            while state and byte not in self._next[state]:
                state = self._shorter[state]
            state = self._next[state].get(byte, 0)
        return state

    def completing(self, state: int) -> np.ndarray:
        """Tokens that would complete a word that has begun."""
        if state == 0:
            return _NONE
        if (found := self._completing.get(state)) is None:
            parts, begin = [_NONE], state
            while begin:
                parts += map(self._tokens.beginning, self._rests[begin])
                begin = self._shorter[begin]
            found = self._completing[state] = np.unique(np.concatenate(parts))
        return found


def encode_word(word: str) -> bytes:
    """Raises `RequestError` for an unpaired surrogate."""
    try:
        return word.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"bad_words is not valid Unicode at character {error.start}", "bad_words") from error
