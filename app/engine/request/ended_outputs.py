"""Ended outputs: the latest outputs that have ended, kept so that they can be forked."""

from __future__ import annotations

from array import array
from collections import OrderedDict, abc

from folio.app.engine.request.engine_request import EngineRequest
from folio.app.engine.request.request import Sequence
from folio.app.engine.sampling.params import SamplingParams

# Most outputs in `EndedOutputs`, and most tokens of these with their prompts.
_ENDED_OUTPUTS, _ENDED_TOKENS = 2000, 1 << 20
# Parameters of every ended output. A fork brings its own, and a request's schema or biases may take more bytes than its
# tokens.
_PARAMS = SamplingParams()


class EndedOutputs:
    """The latest outputs that have ended, for forks: each as a request without sampling parameters, whose prompt is the
    sequence's prompt and output."""

    def __init__(self) -> None:
        self._outputs: OrderedDict[tuple[str, int], EngineRequest] = OrderedDict()
        self._num_tokens = 0

    def add(self, sequence: Sequence, index: int, token_ids: abc.Sequence[int]) -> None:
        """Record output `index` of a sequence's request, with its `token_ids`."""
        request = sequence.request
        self._remove((request.request_id, index))
        tokens = array("i", sequence.prompt_token_ids)  # a tuple takes ten times as many bytes
        tokens.extend(token_ids)
        ended = EngineRequest(
            request.request_id,
            tokens,
            _PARAMS,
            priority=request.priority,
            adapter=request.adapter,
            tenant=request.tenant,
            prefix_keys=sequence.chain.keys,
        )
        self._outputs[request.request_id, index] = ended
        self._num_tokens += len(tokens)
        while self._num_tokens > _ENDED_TOKENS or len(self._outputs) > _ENDED_OUTPUTS:
            self._remove(next(iter(self._outputs)))

    def clear(self) -> None:
        self._outputs.clear()
        self._num_tokens = 0

    def get(self, request_id: str, index: int) -> EngineRequest | None:
        return self._outputs.get((request_id, index))

    def _remove(self, key: tuple[str, int]) -> None:
        output = self._outputs.pop(key, None)
        if output is not None:
            self._num_tokens -= len(output.prompt_token_ids)
