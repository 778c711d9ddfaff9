"""Which tokens would complete a word that the output must not have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from app.errors import RequestError

# A tokenizer that marks the beginning of a text like a space shows a word inside a text only behind something.
_SOMETHING = "\n"


class BadWords:
    """Sequences of tokens that are not in an output. It does not change; forks and parallel outputs share it.

    Args:
        sequences: none of them empty.
    """

    def __init__(self, sequences: Iterable[Sequence[int]]) -> None:
        distinct = {tuple(sequence) for sequence in sequences}
        assert () not in distinct
        # One that ends with another is never completed: the other would have to be.
        lengths = {len(sequence) for sequence in distinct}
        kept = sorted(s for s in distinct if not any(s[-n:] in distinct for n in lengths if n < len(s)))
        self.single = tuple(s[0] for s in kept if len(s) == 1)
        self._longer: dict[int, list[tuple[int, ...]]] = {}  # by the token before the last
        for sequence in kept:
            if len(sequence) > 1:
                self._longer.setdefault(sequence[-2], []).append(sequence)

    @property
    def depend_on_output(self) -> bool:
        """Whether some of the tokens that may not follow are decided by those before."""
        return bool(self._longer)

    def completing(self, output: list[int]) -> list[int]:
        """Tokens that would complete a sequence of two or more after `output`; those of one are in `single`."""
        if not output:
            return []
        return [s[-1] for s in self._longer.get(output[-1], ()) if tuple(output[1 - len(s) :]) == s[:-1]]


def encode_bad_words(words: Iterable[str], encode: Callable[[str], list[int]], vocab_size: int) -> BadWords:
    """The tokens of words as they are at the beginning of a text, inside one, and after a space.

    Args:
        encode: from text to tokens, without special ones.
        vocab_size: of the model; it never chooses tokens beyond.

    Raises:
        RequestError: a word has no tokens, or is no valid Unicode.
    """
    sequences = []
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError as error:  # half of a surrogate pair, which no tokenizer takes
            raise RequestError(f"bad_words is not valid Unicode at character {error.start}", "bad_words") from error
        variants = [variant for variant in _variants(word, encode) if variant]
        if not variants:
            raise RequestError(f"the tokenizer has no tokens for the bad word {word!r}; leave it out", "bad_words")
        sequences += [variant for variant in variants if max(variant) < vocab_size]
    return BadWords(sequences)


def _variants(word: str, encode: Callable[[str], list[int]]) -> list[list[int]]:
    bare = word.lstrip()
    if not bare:  # white space is what it is
        return [encode(word)]
    variants = [encode(bare), encode(" " + bare)]
    before, inside = encode(_SOMETHING), encode(_SOMETHING + bare)
    if inside[: len(before)] == before:
        variants.append(inside[len(before) :])
    return variants
