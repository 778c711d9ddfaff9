"""Best of: selects the outputs to send, when a request asks for fewer than it computes."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

from folio.app.engine.request.delta import Delta


class BestOf:
    """Hold outputs back until all have ended, and select those with the highest mean log probability.

    Args:
        n: number of outputs to select.
        keep_logprobs: whether the client asked for the log probabilities.
    """

    def __init__(self, n: int, *, keep_logprobs: bool) -> None:
        self._n = n
        self._keep_logprobs = keep_logprobs
        self._deltas: dict[int, list[Delta]] = {}

    def hold(self, delta: Delta) -> None:
        self._deltas.setdefault(delta.index, []).append(delta)

    def best(self) -> list[Delta]:
        """One delta for each selected output, the best first."""
        outputs = [_joined(deltas) for deltas in self._deltas.values()]
        outputs.sort(key=lambda delta: -fmean(token.logprob for token in delta.logprobs))
        of_prompt = next((delta.prompt_logprobs for delta in outputs if delta.prompt_logprobs), ())
        return [
            replace(
                delta,
                index=index,
                num_unfinished=self._n - 1 - index,
                logprobs=delta.logprobs if self._keep_logprobs else (),
                prompt_logprobs=of_prompt if not index else (),
            )
            for index, delta in enumerate(outputs[: self._n])
        ]


def _joined(deltas: list[Delta]) -> Delta:
    return replace(
        deltas[-1],
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        text="".join(delta.text for delta in deltas),
        logprobs=tuple(logprob for delta in deltas for logprob in delta.logprobs),
        prompt_logprobs=deltas[0].prompt_logprobs,
    )
