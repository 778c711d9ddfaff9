"""Private interfaces of transformers. Seen to work: 5.17.0 and 5.23.0."""

from __future__ import annotations

from transformers import PreTrainedModel


def uses_attention_interface(model: PreTrainedModel | type[PreTrainedModel]) -> bool:
    """Whether the model's attention layers look up their function in `AttentionInterface`.

    Private: `_can_set_attn_implementation`. `set_attn_implementation` only logs a warning for such models, and some of
    them (MPT) fail in a forward without masks before their attention could be observed.
    """
    return model._can_set_attn_implementation()
