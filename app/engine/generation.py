"""A request as its sender sees it: one or more outputs, perhaps the best of several."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from app.engine.request import Delta, Request, RequestOptions, TokenLogprobs
from app.engine.sampling.beam import BeamSearch
from app.engine.sampling.params import SamplingParams

# Outputs that have ended are remembered as long as they are no more, and have with their prompts no more tokens.
_ENDED_OUTPUTS, _ENDED_TOKENS = 2000, 1 << 20


class BestOf:
    """Holds outputs back until all have ended, and lets the likeliest ones go (by the mean log probability of their
    tokens).

    Args:
        n: outputs to let go.
        keep_logprobs: whether the sender wants the log probabilities that the choice is made by.
    """

    def __init__(self, n: int, *, keep_logprobs: bool) -> None:
        self._n = n
        self._keep_logprobs = keep_logprobs
        self._deltas: dict[int, list[Delta]] = {}

    def hold(self, delta: Delta) -> None:
        self._deltas.setdefault(delta.index, []).append(delta)

    def best(self) -> list[Delta]:
        """A delta for each of the `n` likeliest outputs, the best first, when all have ended."""
        outputs = [_joined(deltas) for deltas in self._deltas.values()]
        outputs.sort(key=lambda delta: -_mean(delta.logprobs))
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
    """Prompt and output of a sequence that has ended, and what it was computed with.

    `keys`: of its prefixes.
    """

    token_ids: array[int]  # four bytes each, a tuple has ten times as many
    options: RequestOptions
    keys: tuple[str, ...]


class EndedOutputs:
    """The outputs that ended last, so that they can be gone on from."""

    def __init__(self) -> None:
        self._outputs: OrderedDict[tuple[str, int], EndedOutput] = OrderedDict()
        self._num_tokens = 0

    def add(self, request: Request, index: int, token_ids: Sequence[int]) -> None:
        """
        Args:
            request: a sequence of the request.
            token_ids: of the output.
        """
        self._remove((request.request_id, index))
        group = request.group
        options: RequestOptions = {"priority": group.priority, "adapter": group.adapter, "tenant": group.tenant}
        tokens = array("i", request.prompt_token_ids)
        tokens.extend(token_ids)
        output = EndedOutput(tokens, options, request.chain.keys)
        self._outputs[request.request_id, index] = output
        self._num_tokens += len(output.token_ids)
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
            self._num_tokens -= len(output.token_ids)


@dataclass(slots=True, eq=False)
class Generation:
    """A request and its sequences.

    Attributes:
        sequences: those that go on.
        selection: what holds outputs back, if not all that run are wanted, or none before the end.
    """

    request_id: str
    params: SamplingParams
    sequences: list[Request] = field(default_factory=list)
    selection: BestOf | BeamSearch | None = None

    def __iter__(self) -> Iterator[Request]:
        return iter(self.sequences)

    @property
    def num_unfinished(self) -> int:
        """Outputs that are still to come, were they all sent as they are."""
        return sum(1 + request.num_forks for request in self.sequences)

    def emit(self, delta: Delta) -> list[Delta]:
        """What the sender is to hear of that, once a sequence that ends with it is out of `sequences`."""
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


def _mean(logprobs: tuple[TokenLogprobs, ...]) -> float:
    return sum(token.logprob for token in logprobs) / len(logprobs)
