"""Sampler: from logits to the next tokens and their log probabilities, for all sequences of a step at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from folio.app.engine.sampling import choice
from folio.app.engine.sampling.logits import Edits, apply_edits, gather_edits
from folio.app.engine.sampling.logprobs import chunks, launch_logprobs, read_logprobs
from folio.app.engine.sampling.penalties import counts_of, gather_penalties
from folio.app.engine.sampling.settings import BIASED, EDITED, GREEDY, MASKED, PROCESSED, TRUNCATED, gather_settings
from folio.app.engine.sampling.state import SamplingState
from folio.app.engine.sampling.token_logprobs import TokenLogprobs
from folio.app.engine.sampling.transfer import Readback, to_device

# Sound row: its logits are finite and allow a token. Blocked row: its logits are finite, and no token is allowed.
_SOUND, _BLOCKED = 1, 2


@dataclass(frozen=True, slots=True)
class Sampled:
    """Sampled tokens, one for each row.

    Attributes:
        sound: whether the row's logits were numbers and allowed a token.
        logprobs: where they were requested.
        blocked: rows without an allowed token, because their request's parameters contradict each other. They are not
            sound.
    """

    token_ids: list[int]
    sound: list[bool]
    logprobs: list[TokenLogprobs | None]
    blocked: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class PendingSample:
    """Tokens that the device may still be computing.

    Attributes:
        token_ids: `[rows]` int64, on the device of the logits; rows that are not sound have any id of the vocabulary.
        requested: rows with log probabilities, and their numbers of alternatives.
    """

    token_ids: torch.Tensor
    requested: dict[int, int]
    _packed: Readback  # token ids, flags and log probabilities, int32

    def read(self) -> Sampled:
        """Wait for the tokens; the only time that the host waits."""
        packed, num_rows = self._packed.wait(), len(self.token_ids)
        tokens, flags = packed[:num_rows].tolist(), packed[num_rows : 2 * num_rows]
        logprobs: list[TokenLogprobs | None] = [None] * num_rows
        if self.requested:
            own = [tokens[row] for row in self.requested]
            found = read_logprobs(packed[2 * num_rows :], own, list(self.requested.values()))
            for row, value in zip(self.requested, found, strict=True):
                logprobs[row] = value
        blocked = np.flatnonzero(flags == _BLOCKED).tolist()
        return Sampled(tokens, (flags == _SOUND).tolist(), logprobs, frozenset(blocked))


def sample(logits: torch.Tensor, rows: Sequence[SamplingState], positions: Sequence[int] | None = None) -> Sampled:
    """`launch_sampling` and `PendingSample.read`."""
    return launch_sampling(logits, rows, positions).read()


def launch_sampling(
    logits: torch.Tensor, rows: Sequence[SamplingState], positions: Sequence[int] | None = None
) -> PendingSample:
    """Sample the next token of each sequence, from its row of `logits [len(rows), vocab_size]`, where the logits are;
    on a GPU without waiting for it.

    The order is vLLM's: forbidden tokens and biases (`apply_edits`), then penalties, on float32 logits; temperature;
    min_p, top_k, and top_p among the remaining tokens. The token with the highest sum of logit and noise (`noise.py`)
    is drawn, the lower id among equals. Log probabilities are by the unprocessed logits.

    A row's token depends only on its logits and its state, to the last bit: sums are row by row, or of integers.

    Args:
        logits: of any floating type; not changed.
        positions: for each row, the number of preceding tokens that its state lacks (draft tokens); not 0 only for
            states that `can_look_ahead`.
    """
    highest, tokens = _likeliest(logits)
    sound = highest.isfinite()  # a NaN anywhere in a row is its maximum
    flags = sound.int()
    special = [i for i, state in enumerate(rows) if not state.is_plain_greedy]
    requested: dict[int, int] = {}
    parts = [tokens, flags]
    if special:
        positions = positions or [0] * len(rows)
        chosen = [i for i in special if not rows[i].takes_likeliest]
        if chosen:
            indices = np.array(chosen)
            states, ahead = [rows[i] for i in chosen], [positions[i] for i in chosen]
            possible = _choose(logits, indices, states, ahead, tokens)
            flags += (sound & ~possible).int()  # 2, blocked
        requested = {i: top for i in special if (top := rows[i].params.logprobs) is not None}
        if requested:
            (where,) = to_device([np.array(list(requested))], logits.device)
            most = max(requested.values())
            parts.append(launch_logprobs(logits.index_select(0, where), tokens.index_select(0, where), most).flatten())
    return PendingSample(tokens, requested, Readback(torch.cat([part.int() for part in parts])))


def sample_apart(
    logits: torch.Tensor, rows: Sequence[SamplingState], positions: Sequence[int] | None, parts: Sequence[slice]
) -> tuple[Sampled, dict[int, BaseException]]:
    """Call `sample` for each part of the rows; return all results, and errors by part index. Rows of failed parts are
    not sound. `parts` cover all rows.
    """
    tokens, sound, logprobs = [0] * len(rows), [False] * len(rows), list[TokenLogprobs | None]([None] * len(rows))
    blocked: set[int] = set()
    errors: dict[int, BaseException] = {}
    for i, part in enumerate(parts):
        try:
            own = sample(logits[part], rows[part], None if positions is None else positions[part])
        except BaseException as error:  # noqa: BLE001 - returned
            errors[i] = error
            continue
        tokens[part], sound[part], logprobs[part] = own.token_ids, own.sound, own.logprobs
        blocked.update(part.start + row for row in own.blocked)
    return Sampled(tokens, sound, logprobs, frozenset(blocked)), errors


def _likeliest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The maximum of each row, and the lowest token id that has it."""
    if logits.device.type == "cpu":
        return choice.likeliest(logits)
    highest, token_ids = logits.max(dim=-1)
    return highest, token_ids


def _choose(
    logits: torch.Tensor,
    indices: np.ndarray,
    states: Sequence[SamplingState],
    positions: Sequence[int],
    tokens: torch.Tensor,
) -> torch.Tensor:
    """Set `tokens [rows]` in the rows `indices`, which have these states; return which of all rows allow a token."""
    device = logits.device
    settings = gather_settings(states, positions, logits.shape[-1])
    choose_alike = _choose_on_cpu if device.type == "cpu" else _choose_on_gpu
    possible = torch.ones(len(tokens), dtype=torch.bool, device=device)
    for group in _alike(settings["features"], device):
        for part in chunks(len(group), logits.shape[-1], device):
            own: list[int] = group[part].tolist()
            where, drawn, allowed = choose_alike(
                logits, indices[own], [states[i] for i in own], settings[own], [positions[i] for i in own]
            )
            tokens.index_copy_(0, where, drawn)
            possible.index_copy_(0, where, allowed)
    return possible


def _alike(features: np.ndarray, device: torch.device) -> Iterator[np.ndarray]:
    """Groups of rows to choose for together: on a CPU those with the same kind of processing, so that no row is copied
    or masked for others; elsewhere those whose logits change, and the others."""
    if device.type == "cpu":
        kinds = features & (MASKED | GREEDY | TRUNCATED) | np.where(features & EDITED, BIASED, 0)
    else:
        kinds = np.where(features & PROCESSED, PROCESSED, 0)
    for kind in np.unique(kinds):
        yield np.flatnonzero(kinds == kind)


def _choose_on_cpu(
    logits: torch.Tensor,
    indices: np.ndarray,
    states: Sequence[SamplingState],
    settings: np.ndarray,
    positions: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The rows, a token for each of them, and whether any is allowed. Only logits with edits are copied."""
    where, vocab_size, rows = torch.from_numpy(indices), logits.shape[-1], indices
    if (settings["features"] & EDITED).any():
        logits, rows = choice.copy_rows(logits, indices), np.arange(len(indices))
        edits = gather_edits(states, settings, positions, vocab_size, logits.shape[-1])
        apply_edits(logits, Edits(*to_device(edits, logits.device)))
    return where, *choice.choose(logits, rows, settings, counts_of(states, settings))


def _choose_on_gpu(
    logits: torch.Tensor,
    indices: np.ndarray,
    states: Sequence[SamplingState],
    settings: np.ndarray,
    positions: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `_choose_on_cpu`. Only logits that change are copied."""
    from folio.kernels.triton import penalties, sampling  # a machine without a GPU has no Triton

    vocab_size, device = logits.shape[-1], logits.device
    arrays = [indices, *(np.ascontiguousarray(settings[name]) for name in sampling.SETTINGS)]
    if not (settings["features"] & PROCESSED).any():
        where, *columns = to_device(arrays, device)
        return where, *sampling.choose(logits, where, *columns)
    edits = gather_edits(states, settings, positions, vocab_size, choice.padded_width(vocab_size))
    counts = counts_of(states, settings)
    table = gather_penalties(counts, settings, device)
    where, *columns = to_device([*arrays, *edits, *table], device)
    num_settings, num_edits = len(sampling.SETTINGS), len(edits)
    values = choice.padded(logits.index_select(0, where))
    apply_edits(values, Edits(*columns[num_settings : num_settings + num_edits]))
    if len(table.rows):
        penalties.penalise(values, int(table.nums.max()), *columns[num_settings + num_edits :])
        for own in counts:
            if own is not None:
                own.changed.clear()
    own_rows = torch.arange(len(values), device=device)
    return where, *sampling.choose(values, own_rows, *columns[:num_settings])
