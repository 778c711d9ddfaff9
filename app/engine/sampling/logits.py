"""Logits processors: grammar masks, bad words and biases, applied before penalties and before a token is sampled.

The host gathers them for many rows at once; they are applied where the logits are.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import numpy as np
import torch

from folio.app.engine.sampling.settings import BIASED, FORBIDDING, MASKED

if TYPE_CHECKING:
    from folio.app.engine.sampling.state import SamplingState

_Array = TypeVar("_Array", np.ndarray, torch.Tensor)


class Edits(NamedTuple, Generic[_Array]):
    """Changes of the logits of some rows, for one step. Places are `row * width + token id` of logits of that width.

    Attributes:
        masked: rows with a mask, `[m]`.
        masks: their allowed tokens, `[m, ceil(vocab_size / 32)]` int32, 32 tokens per number.
        forbidden: places, with duplicates.
        biased, bias: places, and the addends.
    """

    masked: _Array
    masks: _Array
    forbidden: _Array
    biased: _Array
    bias: _Array


def gather_edits(
    states: Sequence[SamplingState], settings: np.ndarray, positions: Sequence[int], vocab_size: int, width: int
) -> Edits[np.ndarray]:
    """The edits of rows with these states and `SETTINGS`.

    Args:
        positions: for each row, the number of preceding tokens that its state lacks (draft tokens).
        width: width of the logits that are edited, at least `vocab_size`.
    """

    def rows(feature: int) -> list[int]:
        found: list[int] = np.flatnonzero(settings["features"] & feature).tolist()
        return found

    masked, biased = rows(MASKED), rows(BIASED)
    masks = np.empty((len(masked), -(-vocab_size // 32)), np.int32)
    for mask, row in zip(masks, masked, strict=True):
        _fill_mask(mask, states[row], vocab_size)
    forbidding = rows(FORBIDDING)
    forbidden = [states[row].forbidden(positions[row]) for row in forbidding]
    return Edits(
        np.array(masked, np.int64),
        masks,
        _places(forbidding, forbidden, width),
        _places(biased, [states[row].bias_ids for row in biased], width),
        _joined([states[row].bias for row in biased], np.float32),
    )


def _fill_mask(mask: np.ndarray, state: SamplingState, vocab_size: int) -> None:
    allowed = state.allowed(vocab_size)
    if state.matcher is not None:
        state.matcher.fill(mask)
        if allowed is not None:
            mask &= allowed
    else:
        assert allowed is not None, "a structure without its matcher"
        mask[:] = allowed


def _places(rows: Sequence[int], token_ids: Sequence[np.ndarray], width: int) -> np.ndarray:
    places: np.ndarray = np.repeat(np.array(rows, np.int64) * width, [len(own) for own in token_ids])
    return places + _joined(token_ids, np.int64)


def _joined(arrays: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.empty(0, dtype)


def apply_edits(logits: torch.Tensor, edits: Edits[torch.Tensor]) -> None:
    """Change `logits [rows, width]` (float32, contiguous) in place, in vLLM's order, without waiting for the device.

    Forbidden tokens become minus infinity: by masks, by bad words, and stop tokens before `min_tokens`. Then biases are
    added. Penalties come later and see the biases.
    """
    num_rows, width = logits.shape
    if len(edits.masked):
        # Eight tokens at once, by their byte; masks may have more bits than there are tokens.
        eight = _addends_by_byte(logits.device).index_select(0, edits.masks.view(torch.uint8).flatten().int())
        addends = eight.view(len(edits.masked), -1)[:, :width]
        if len(edits.masked) == num_rows:
            logits[:, : addends.shape[-1]] += addends
        else:
            rows = logits.index_select(0, edits.masked)
            rows[:, : addends.shape[-1]] += addends
            logits.index_copy_(0, edits.masked, rows)
    values = logits.view(-1)
    if len(edits.forbidden):
        values.index_fill_(0, edits.forbidden, -torch.inf)
    if len(edits.biased):
        values.index_copy_(0, edits.biased, values.index_select(0, edits.biased) + edits.bias)


@functools.cache
def _addends_by_byte(device: torch.device) -> torch.Tensor:
    """For each byte of a mask, eight addends: -inf for a token that it does not allow, else 0. `[256, 8]` float32"""
    allowed = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=-1, bitorder="little")
    return torch.from_numpy(np.where(allowed, 0, -np.inf).astype(np.float32)).to(device)
