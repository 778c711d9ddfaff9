"""Logits processors: grammar masks, bad words, biases and penalties, applied before a token is sampled."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Self

import numpy as np
import torch

from app.engine.sampling.params import SamplingParams
from app.errors import RequestError

if TYPE_CHECKING:
    from app.engine.sampling.reasoning import Matcher
    from app.engine.sampling.state import SamplingState

_FIRST_ROOM = 64


class TokenCounts:
    """Distinct tokens of prompt and output with their counts in the output: the only tokens whose logits are
    penalised."""

    def __init__(self, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]) -> None:
        distinct = np.unique(np.asarray(prompt_token_ids, dtype=np.int64))
        self._num = self._num_in_prompt = len(distinct)
        # The prompt's, sorted; then further ones of the output.
        self._ids = np.concatenate([distinct, np.zeros(_FIRST_ROOM, np.int64)])
        self._counts = np.zeros(len(self._ids), np.float32)
        self._places: dict[int, int] = {}  # of the further ones
        for token_id in output_token_ids:
            self.add(token_id)

    @property
    def token_ids(self) -> np.ndarray:
        """`[num]` int64, a view that the next `add` may replace."""
        return self._ids[: self._num]

    @property
    def in_output(self) -> np.ndarray:
        """`[num]` float32, counts of `token_ids` in the output."""
        return self._counts[: self._num]

    def add(self, token_id: int) -> None:
        """Count a token of the output."""
        place = int(self._ids[: self._num_in_prompt].searchsorted(token_id))
        if place == self._num_in_prompt or self._ids[place] != token_id:
            place = self._places.setdefault(token_id, self._num)
            if place == self._num:
                self._append(token_id)
        self._counts[place] += 1

    def fork(self) -> Self:
        """An independent copy."""
        other = type(self)((), ())
        other._num, other._num_in_prompt = self._num, self._num_in_prompt
        other._ids, other._counts, other._places = self._ids.copy(), self._counts.copy(), self._places.copy()
        return other

    def _append(self, token_id: int) -> None:
        if self._num == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[self._num] = token_id
        self._num += 1


def penalise(
    logits: torch.Tensor, rows: Sequence[int], params: Sequence[SamplingParams], counts: Sequence[TokenCounts]
) -> None:
    """Change some `rows` of `logits [num_rows, vocab_size]` (float32) in place: first repetition, as in CTRL §4.1, then
    frequency and presence. `params` and `counts` have one entry for each row."""
    lengths = [len(c.token_ids) for c in counts]
    where = torch.from_numpy(np.repeat(rows, lengths)), torch.from_numpy(np.concatenate([c.token_ids for c in counts]))
    times = torch.from_numpy(np.concatenate([c.in_output for c in counts]))

    def each(name: str) -> torch.Tensor:
        return torch.from_numpy(np.repeat([getattr(p, name) for p in params], lengths).astype(np.float32))

    penalty = each("repetition_penalty")
    values = logits[where]
    values = torch.where(values < 0, values * penalty, values / penalty)
    values -= each("frequency_penalty") * times
    values -= each("presence_penalty") * (times > 0)
    logits[where] = values


# Text before a word, for tokenizers that treat the beginning of a text like a space.
_PREFIX = "\n"


class BadWords:
    """Immutable set of token sequences that must not occur in an output.

    Args:
        sequences: none of them empty.
    """

    def __init__(self, sequences: Iterable[Sequence[int]]) -> None:
        distinct = {tuple(sequence) for sequence in sequences}
        assert () not in distinct
        # A sequence that ends with another one is redundant.
        lengths = {len(sequence) for sequence in distinct}
        kept = sorted(s for s in distinct if not any(s[-n:] in distinct for n in lengths if n < len(s)))
        self.single = tuple(s[0] for s in kept if len(s) == 1)
        self._longer: dict[int, list[tuple[int, ...]]] = {}  # by the token before the last
        for sequence in kept:
            if len(sequence) > 1:
                self._longer.setdefault(sequence[-2], []).append(sequence)

    @property
    def depend_on_output(self) -> bool:
        """Whether forbidden tokens depend on preceding ones."""
        return bool(self._longer)

    def completing(self, output: list[int]) -> list[int]:
        """Tokens that would complete a sequence of two or more after `output`; `single` has the sequences of one."""
        if not output:
            return []
        return [s[-1] for s in self._longer.get(output[-1], ()) if tuple(output[1 - len(s) :]) == s[:-1]]


def encode_bad_words(words: Iterable[str], encode: Callable[[str], list[int]], vocab_size: int) -> BadWords:
    """Encode words as at the beginning of a text, inside one, and after a space.

    Args:
        encode: text → tokens without special ones.
        vocab_size: the model's; sequences with larger token ids cannot occur.

    Raises:
        RequestError: a word has no tokens, or is not valid Unicode.
    """
    sequences = []
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError as error:  # a lone surrogate, which tokenizers reject
            raise RequestError(f"bad_words is not valid Unicode at character {error.start}", "bad_words") from error
        variants = [variant for variant in _variants(word, encode) if variant]
        if not variants:
            raise RequestError(f"the tokenizer has no tokens for the bad word {word!r}; leave it out", "bad_words")
        sequences += [variant for variant in variants if max(variant) < vocab_size]
    return BadWords(sequences)


def _variants(word: str, encode: Callable[[str], list[int]]) -> list[list[int]]:
    bare = word.lstrip()
    if not bare:  # white space only
        return [encode(word)]
    variants = [encode(bare), encode(" " + bare)]
    before, inside = encode(_PREFIX), encode(_PREFIX + bare)
    if inside[: len(before)] == before:
        variants.append(inside[len(before) :])
    return variants


def apply_logits_processors(logits: torch.Tensor, states: Sequence[SamplingState], positions: Sequence[int]) -> None:
    """Change `logits [len(states), vocab_size]` (float32) in place, in vLLM's order.

    Forbidden tokens become minus infinity: by the structure, beside the allowed tokens, by bad words, and stop tokens
    before `min_tokens`. Then biases are added. Penalties come last and see the biases.

    Args:
        positions: for each row, the number of preceding tokens that its state lacks (draft tokens).
    """
    _mask_structures(logits, states)
    for i, state in enumerate(states):
        if len(state.allowed):
            allowed = torch.from_numpy(state.allowed)
            kept = logits[i, allowed]
            logits[i] = -torch.inf
            logits[i, allowed] = kept
    forbidden = [state.forbidden(position) for state, position in zip(states, positions, strict=True)]
    if any(forbidden):
        where = _places([np.asarray(tokens, np.int64) for tokens in forbidden])
        logits[where] = -torch.inf
    if any(len(state.bias) for state in states):
        where = _places([state.bias_ids for state in states])
        logits[where] += torch.from_numpy(np.concatenate([state.bias for state in states]))
    penalised = [i for i, state in enumerate(states) if state.params.penalises]
    if penalised:
        rows = [states[i] for i in penalised]
        penalise(logits, penalised, [row.params for row in rows], [row.counts for row in rows])


def _places(token_ids: Sequence[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    rows = np.repeat(np.arange(len(token_ids)), [len(tokens) for tokens in token_ids])
    return torch.from_numpy(rows), torch.from_numpy(np.concatenate(token_ids))


def _mask_structures(logits: torch.Tensor, states: Sequence[SamplingState]) -> None:
    matchers: list[tuple[int, Matcher]] = []
    for i, state in enumerate(states):
        if state.matcher is not None:
            matchers.append((i, state.matcher))
        else:
            assert state.params.structure is None, "a structure without its matcher"
    if not matchers:
        return
    vocab_size = logits.shape[-1]
    masks = np.zeros((len(matchers), -(-vocab_size // 32)), "<i4")
    for mask, (_, matcher) in zip(masks, matchers, strict=True):
        matcher.fill(mask)
    allowed = np.unpackbits(masks.view(np.uint8), axis=-1, count=vocab_size, bitorder="little")
    forbidden = torch.from_numpy(allowed) == 0
    if len(matchers) == len(states):  # always, in calls from `sample`: no copy
        logits.masked_fill_(forbidden, -torch.inf)
    else:
        rows = [i for i, _ in matchers]
        logits[rows] = logits[rows].masked_fill_(forbidden, -torch.inf)
