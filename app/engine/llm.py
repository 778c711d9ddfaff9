"""LLM: the engine for scripts, prompts in, completions out."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from folio.app.config.engine import EngineConfig
from folio.app.engine.engine import Engine
from folio.app.engine.request.delta import Delta, FinishReason
from folio.app.engine.request.engine_request import EngineRequest
from folio.app.engine.request.pooled import PoolingParams
from folio.app.engine.sampling.params import SamplingParams
from folio.app.engine.sampling.token_logprobs import TokenLogprobs
from folio.app.errors import EngineError, RequestError


@dataclass(slots=True)
class Output:
    """One output for a prompt. `token_ids` includes the end-of-sequence token when one was generated.

    Attributes:
        stop_reason: the stop string or token id that ended the output, unless an end-of-sequence token did.
        logprobs: for each token, if requested.
        score: score of a beam.
        pooled: see `Delta`.
    """

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason = "length"
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    score: float | None = None
    pooled: bytes | None = None

    def add(self, delta: Delta) -> None:
        self.token_ids += delta.token_ids
        self.text += delta.text
        self.logprobs += delta.logprobs
        self.finish_reason = delta.finish_reason or self.finish_reason
        self.stop_reason, self.score, self.pooled = delta.stop_reason, delta.score, delta.pooled


@dataclass(frozen=True, slots=True)
class Completion:
    """The `params.n` outputs for one prompt. The properties are the first output's.

    Attributes:
        prompt_logprobs: for each prompt token but the first, if requested.
    """

    prompt_token_ids: list[int]
    outputs: list[Output]
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def finish_reason(self) -> FinishReason:
        return self.outputs[0].finish_reason


class LLM:
    """A model with a synchronous interface, in this process, except for ranks other than 0.

    Threads may share it: one call at a time is served. Prompts of one call are computed together.

    >>> with LLM("builtin") as llm:
    ...     llm.generate(["The key of room 417 is 93. The key of room 417 is"], SamplingParams(max_tokens=2))

    Args:
        model: "builtin", a local checkpoint folder, or a Hugging Face Hub id.
        settings: further fields of `EngineConfig`, where they are described. `max_mixed_step_s` is `None` by default:
            nobody waits for single tokens.

    Raises:
        ConfigError, ModelError: the settings or the model cannot work.
        UnavailableError: a rank died.
    """

    def __init__(self, model: str | Path, **settings: Any) -> None:
        self.engine = Engine(EngineConfig(model=str(model), **{"max_mixed_step_s": None} | settings))
        self._num_requests = 0
        self._closed = False
        self._lock = threading.Lock()  # an engine has one thread at a time

    def generate(
        self,
        prompts: Sequence[str | list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Any,
    ) -> list[Completion]:
        """Complete every prompt, a string or token ids; results are in the prompts' order.

        Args:
            params: for all prompts, or one for each.
            options: for all prompts, such as `adapter`, `priority` and `cache_salt`: the fields of `EngineRequest`.

        Raises:
            RequestError: a prompt or a parameter is invalid; nothing was generated.
            OverloadedError: more prompts than `max_queued_requests`.
            EngineError: the model's logits are not finite, or this LLM is closed.
            UnavailableError: a rank is lost; no call will succeed any more.
        """
        with self._lock:
            if self._closed:
                raise EngineError("this LLM is closed; create another one")
            return self._generate(prompts, params, options)

    def _generate(
        self,
        prompts: Sequence[str | list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        options: Mapping[str, Any],
    ) -> list[Completion]:
        if isinstance(prompts, str):
            raise RequestError("prompts must be a list of prompts, got one string", "prompts")
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise RequestError(f"{len(prompts)} prompts but {len(params)} params", "params")
        encoded = [self._encode(prompt) for prompt in prompts]
        requests = [
            EngineRequest(f"llm-{number}", token_ids, param, **options)
            for number, (token_ids, param) in enumerate(zip(encoded, params, strict=True), self._num_requests)
        ]
        begins = [self.engine.prepare(request) for request in requests]
        self._num_requests += len(requests)
        completions: dict[str, Completion] = {}  # a request is in it before the engine has it
        try:
            for request, token_ids, begin in zip(requests, encoded, begins, strict=True):
                self.engine.load.check_queue()
                outputs = [Output() for _ in range(request.params.n)]
                completions[request.request_id] = Completion(token_ids, outputs)
                begin(request.request_id)
            while self.engine.has_work:
                for delta in self.engine.step():
                    if delta.error is not None:
                        raise delta.error
                    completion = completions[delta.request_id]
                    completion.outputs[delta.index].add(delta)
                    completion.prompt_logprobs.extend(delta.prompt_logprobs)
        finally:
            for request_id in completions:  # after a failure
                self.engine.cancel(request_id)
        return list(completions.values())

    def embed(
        self,
        prompts: Sequence[str | list[int]],
        *,
        dimensions: int | None = None,
        **options: Any,
    ) -> list[list[float]]:
        """Embed every prompt, a string or token ids, with a model that makes embeddings (`pooling`). The tokenizer adds
        its special tokens to strings.

        Args:
            dimensions: keep this many first components, normalised anew; for models that were trained for it.
            options: see `generate`.

        Raises: as `generate`.
        """
        options["pooling"] = PoolingParams("embedding", dimensions)
        completions = self.generate(prompts, SamplingParams(max_tokens=1), **options)
        return [np.frombuffer(completion.outputs[0].pooled or b"", "<f4").tolist() for completion in completions]

    def close(self) -> None:
        """Free all memory, after the running call. Idempotent."""
        with self._lock:
            if self.engine.store is not None and not self._closed:
                self.engine.store.flush()
            self._closed = True
            self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _encode(self, prompt: str | list[int]) -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        if self.engine.model.tokenizer is None:
            raise RequestError("a text prompt needs a tokenizer, and this engine runs without one", "prompts")
        token_ids: list[int] = self.engine.model.tokenizer.encode(prompt)
        return token_ids
