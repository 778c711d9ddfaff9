"""What Folio uses of transformers beyond its documentation. Versions: pyproject.toml, and `OLDEST` in the Makefile."""

from __future__ import annotations

import inspect

import pytest
from transformers import BloomForCausalLM, DynamicCache, LlamaForCausalLM

from folio.app.compat.transformers import uses_attention_interface
from folio.app.engine.layers.recurrent import StateCache


def test_models_outside_the_attention_interface_are_known() -> None:
    assert uses_attention_interface(LlamaForCausalLM)
    assert not uses_attention_interface(BloomForCausalLM)


@pytest.mark.parametrize(
    "method",
    [
        "has_previous_state",
        "is_recording_past",
        "get_conv_state",
        "get_recurrent_state",
        "update_conv_state",
        "update_recurrent_state",
    ],
)
def test_state_cache_takes_the_arguments_of_a_cache(method: str) -> None:
    """Mixers call a `StateCache` as they call transformers' caches."""
    if not hasattr(DynamicCache, method):
        pytest.skip(f"caches of this transformers have no {method}")
    ours, theirs = (list(inspect.signature(getattr(kind, method)).parameters) for kind in (StateCache, DynamicCache))
    assert ours[: len(theirs) - ("kwargs" in theirs)] == theirs[: len(theirs) - ("kwargs" in theirs)]
