"""Generation: a request with its outputs, `best_of` selection, and the record of outputs that have ended."""

from __future__ import annotations

import math
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from folio.app.engine.delta import Delta
from folio.app.engine.engine_request import EngineRequest
from folio.app.engine.request import Request
from folio.app.engine.sampling.beam import BeamSearch
from folio.app.engine.sampling.params import SamplingParams

# Most outputs in `EndedOutputs`, and most tokens of these with their prompts.
_ENDED_OUTPUTS, _ENDED_TOKENS = 2000, 1 << 20


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


@dataclass(frozen=True, slots=True)
class EndedOutput:
    """A sequence that has ended, as a request: its prompt is the sequence's prompt and output. `keys`: of its
    prefixes."""

    request: EngineRequest
    keys: tuple[str, ...]


class EndedOutputs:
    """The latest outputs that have ended, for forks."""

    def __init__(self) -> None:
        self._outputs: OrderedDict[tuple[str, int], EndedOutput] = OrderedDict()
        self._num_tokens = 0

    def add(self, request: Request, index: int, token_ids: Sequence[int]) -> None:
        """Record output `index`, `token_ids`, of the request of a sequence."""
        self._remove((request.request_id, index))
        group = request.group
        tokens = array("i", request.prompt_token_ids)  # a tuple takes ten times as many bytes
        tokens.extend(token_ids)
        ended = EngineRequest(
            request.request_id,
            tokens,
            request.params,
            priority=group.priority,
            adapter=group.adapter,
            tenant=group.tenant,
        )
        self._outputs[request.request_id, index] = EndedOutput(ended, request.chain.keys)
        self._num_tokens += len(tokens)
        while self._num_tokens > _ENDED_TOKENS or len(self._outputs) > _ENDED_OUTPUTS:
            self._remove(next(iter(self._outputs)))

    def clear(self) -> None:
        self._outputs.clear()
        self._num_tokens = 0

    def get(self, request_id: str, index: int) -> EndedOutput | None:
        return self._outputs.get((request_id, index))

    def _remove(self, key: tuple[str, int]) -> None:
        output = self._outputs.pop(key, None)
        if output is not None:
            self._num_tokens -= len(output.request.prompt_token_ids)


@dataclass(slots=True, eq=False)
class Generation:
    """A request with its sequences.

    Attributes:
        sequences: sequences that have not ended.
        selection: selects the outputs to send, with `best_of` or beam search.
        deadline: when the request ends with an error, by `time.monotonic`.
    """

    request_id: str
    params: SamplingParams
    sequences: list[Request] = field(default_factory=list)
    selection: BestOf | BeamSearch | None = None
    deadline: float = math.inf

    def __iter__(self) -> Iterator[Request]:
        return iter(self.sequences)

    @property
    def num_unfinished(self) -> int:
        """Outputs that have not ended, coming forks included, before any selection."""
        return sum(1 + request.num_forks for request in self.sequences)

    def emit(self, delta: Delta) -> list[Delta]:
        """The deltas to send for a sequence's delta. A sequence that has ended must be out of `sequences`."""
        if delta.error is not None:
            return [delta]
        if isinstance(self.selection, BestOf):
            self.selection.hold(delta)
            return [] if self.sequences else self.selection.best()
        return [replace(delta, num_unfinished=self.num_unfinished) if delta.finished else delta]


def _joined(deltas: list[Delta]) -> Delta:
    return replace(
        deltas[-1],
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        text="".join(delta.text for delta in deltas),
        logprobs=tuple(logprob for delta in deltas for logprob in delta.logprobs),
        prompt_logprobs=deltas[0].prompt_logprobs,
    )
