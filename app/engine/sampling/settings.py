"""Settings: each row's sampling parameters in a step, packed for all rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from folio.app.engine.sampling.noise import noise_keys

if TYPE_CHECKING:
    from folio.app.engine.sampling.state import SamplingState

# What a row needs, as bits of `SETTINGS["features"]`: no noise; top_k or top_p; min_p; and changes of its logits.
GREEDY, TRUNCATED, MIN_P = 1, 2, 4
MASKED, FORBIDDING, BIASED, PENALISED = 8, 16, 32, 64
EDITED = MASKED | FORBIDDING | BIASED
PROCESSED = EDITED | PENALISED

# A row's settings in a step, for all devices: packed, so that many are gathered by joining bytes.
SETTINGS = np.dtype(
    [
        ("key", np.int64),  # of the noise
        ("top_p", np.float64),
        ("temperature", np.float32),  # 0 for greedy rows
        ("min_p", np.float32),  # its logarithm
        ("top_k", np.int32),  # 0: all
        ("repetition", np.float32),
        ("frequency", np.float32),
        ("presence", np.float32),
        ("features", np.int32),
    ],
    align=True,
)


def gather_settings(states: Sequence[SamplingState], positions: Sequence[int], vocab_size: int) -> np.ndarray:
    """The rows' `SETTINGS`, with keys of the noise for the output tokens after `positions` further ones. A key is
    independent of the batch and of earlier draws."""
    settings = np.frombuffer(bytearray().join([state.settings for state in states]), SETTINGS)
    settings["key"] = noise_keys(settings["key"], np.array([state.num_output_tokens for state in states]) + positions)
    takes_all = settings["top_k"] >= vocab_size
    settings["top_k"][takes_all] = 0
    settings["features"][takes_all & (settings["top_p"] >= 1)] &= ~TRUNCATED
    return settings
