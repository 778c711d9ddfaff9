"""Penalties: the tokens that a sequence has, with their counts, and the change of these tokens' logits.

Counts are kept with a sequence's sampling state, from its first sampled token to its end: a sampled token changes one
of them. Kernels read them where they are: on a CPU in the state's own array, on another device in a copy that each step
brings up to date.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np
import torch

from folio.app.engine.sampling.settings import PENALISED
from folio.app.engine.sampling.transfer import to_device

if TYPE_CHECKING:
    from folio.app.engine.sampling.state import SamplingState

_FIRST_ROOM = 64
_ENTRY_BYTES = 8


class TokenCounts:
    """Distinct tokens of prompt and output with their counts in the output: the only tokens whose logits are
    penalised.

    Attributes:
        num: number of distinct tokens.
        address: where the first of `num` entries is, each `token id << 32 | count` in int64; valid until `add`.
        copy: the entries on a device other than a CPU; `None` before `copy_to`.
        changed: places of the entries that differ in the copy.
    """

    def __init__(self, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]) -> None:
        distinct = np.unique(np.asarray(prompt_token_ids, dtype=np.int64))
        self.num = self._num_in_prompt = len(distinct)
        self.copy: torch.Tensor | None = None
        self.changed: set[int] = set()
        self._places: dict[int, int] = {}  # of tokens that the prompt lacks
        # The prompt's, sorted; then further ones of the output.
        self._set_entries(np.concatenate([distinct << 32, np.zeros(_FIRST_ROOM, np.int64)]))
        for token_id in output_token_ids:
            self.add(token_id)

    @property
    def token_ids(self) -> np.ndarray:
        """`[num]` int64"""
        return self._entries[: self.num] >> 32

    @property
    def in_output(self) -> np.ndarray:
        """`[num]` float32, counts of `token_ids` in the output."""
        return (self._entries[: self.num] & 0xFFFFFFFF).astype(np.float32)

    def add(self, token_id: int) -> None:
        """Count a token of the output."""
        entry = token_id << 32
        place = int(self._entries[: self._num_in_prompt].searchsorted(entry))
        if place == self._num_in_prompt or self._entries[place] >> 32 != token_id:
            place = self._places.setdefault(token_id, self.num)
            if place == self.num:
                self._append(entry)
        self._entries[place] += 1
        if self.copy is not None:
            self.changed.add(place)

    def fork(self) -> Self:
        """An independent copy."""
        other = type(self)((), ())
        other.num, other._num_in_prompt, other._places = self.num, self._num_in_prompt, self._places.copy()
        other._set_entries(self._entries.copy())
        return other

    def copy_to(self, device: torch.device) -> torch.Tensor:
        """The copy on `device`, equal but for the entries that have `changed`; made when there is none, or no room in
        it."""
        if self.copy is None or len(self.copy) != len(self._entries):
            (self.copy,) = to_device([self._entries], device)
            self.changed.clear()
        return self.copy

    def entries_at(self, places: Sequence[int]) -> list[int]:
        found: list[int] = self._entries[places].tolist()
        return found

    def _append(self, entry: int) -> None:
        if self.num == len(self._entries):
            self._set_entries(np.concatenate([self._entries, np.zeros_like(self._entries)]))
        self._entries[self.num] = entry
        self.num += 1

    def _set_entries(self, entries: np.ndarray) -> None:
        self._entries = entries
        self.address = entries.ctypes.data


def counts_of(states: Sequence[SamplingState], settings: np.ndarray) -> list[TokenCounts | None]:
    """The counts of each row that is penalised."""
    penalised = (settings["features"] & PENALISED).tolist()
    return [state.counts if has else None for state, has in zip(states, penalised, strict=True)]


def penalise(logits: torch.Tensor, counts: Sequence[TokenCounts | None], settings: np.ndarray) -> None:
    """Change `logits [rows, width]` (float32, contiguous) in place; the reference for the kernels: first by repetition,
    as in CTRL §4.1, then by frequency and presence, each operation rounded to float32."""
    values = logits.numpy()
    for row, own in enumerate(counts):
        if own is not None:
            token_ids, times = own.token_ids, own.in_output
            repetition, frequency, presence = (settings[name][row] for name in ("repetition", "frequency", "presence"))
            some = values[row, token_ids]
            some = np.where(some < 0, some * repetition, some / repetition)
            values[row, token_ids] = some - frequency * times - presence * (times > 0)


class PenaltyTable(NamedTuple):
    """What a step sends to the device for penalties: 32 bytes for each penalised row, 16 for each changed count.

    Attributes:
        rows: penalised rows of the logits, `[n]` int64.
        addresses: address of each row's entries on the device, `[n]` int64.
        nums: number of each row's entries, `[n]` int32.
        penalties: repetition, frequency and presence, `[n, 3]` float32.
        changed: addresses of entries that have changed, `[changes]` int64.
        entries: their new values, `[changes]` int64.
    """

    rows: np.ndarray
    addresses: np.ndarray
    nums: np.ndarray
    penalties: np.ndarray
    changed: np.ndarray
    entries: np.ndarray


def gather_penalties(counts: Sequence[TokenCounts | None], settings: np.ndarray, device: torch.device) -> PenaltyTable:
    """The table of rows with these counts. Entries stay `changed` until the caller has launched their replacement: a
    replacement that is launched twice changes nothing."""
    rows, addresses, nums, changed, entries = [], [], [], [], []
    for row, own in enumerate(counts):
        if own is not None:
            address = own.copy_to(device).data_ptr()
            rows.append(row)
            addresses.append(address)
            nums.append(own.num)
            if own.changed:
                places = list(own.changed)
                changed += [address + place * _ENTRY_BYTES for place in places]
                entries += own.entries_at(places)
    penalties = np.stack([settings[name][rows] for name in ("repetition", "frequency", "presence")], axis=-1)
    return PenaltyTable(
        np.array(rows, np.int64),
        np.array(addresses, np.int64),
        np.array(nums, np.int32),
        penalties,
        np.array(changed, np.int64),
        np.array(entries, np.int64),
    )
