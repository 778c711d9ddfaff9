"""Intake: validate requests and create their sequences."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple

from folio.app.config.engine import EngineConfig
from folio.app.engine.model.loader import LoadedModel
from folio.app.engine.model.vocabulary import Vocabulary
from folio.app.engine.request.best_of import BestOf
from folio.app.engine.request.engine_request import BegunOutput, EngineRequest, check_timeout
from folio.app.engine.request.pooled import PooledPrompt, PoolingParams
from folio.app.engine.request.prefix_keys import extra_keys
from folio.app.engine.request.request import Request, Sequence
from folio.app.engine.sampling.beam import BeamSearch
from folio.app.engine.sampling.params import SamplingParams
from folio.app.engine.sampling.state import SamplingState
from folio.app.engine.sampling.token_text import IncrementalDetokenizer
from folio.app.engine.schedule.scheduler import Scheduler
from folio.app.errors import ConfigError, ContextLengthError, RequestError
from folio.vmem import KVMemory, PinError, PrefixUse

logger = logging.getLogger(__name__)


class BegunState(NamedTuple):
    """An output that another engine has begun, in the state in which it continues. `text`: `None` without a
    tokenizer."""

    output: BegunOutput
    sampling: SamplingState
    text: IncrementalDetokenizer | None


class RequestValidator:
    """Validate requests, from any thread, and create their sequences, in the engine's thread.

    Each request is validated once: `validate_request` or `prefix_to_pin` before `create_request`.

    Args:
        isolate_tenants: tenants share no cached prefixes.
        max_cache_ttl_s: bound of a request's `cache_ttl_s`.
    """

    def __init__(
        self,
        model: LoadedModel,
        memory: KVMemory,
        vocabulary: Vocabulary,
        scheduler: Scheduler,
        *,
        isolate_tenants: bool,
        max_cache_ttl_s: float,
    ) -> None:
        self._vocab_size = model.vocab_size
        self._pooling, self._hidden_size = model.pooling, model.module.config.get_text_config().hidden_size
        self._generates = model.generates
        self._memory = memory
        self._prefixes = memory.prefixes
        self._vocabulary = vocabulary
        self._scheduler = scheduler
        self._isolate_tenants = isolate_tenants
        self._max_cache_ttl_s = max_cache_ttl_s
        self._arrivals = itertools.count()

    def validate_request(self, request: EngineRequest) -> int:
        """Check a request against the model and the KV memory; returns its `max_tokens`.

        Raises:
            RequestError: an empty prompt, an unknown token, or parameters that this model cannot serve.
            ContextLengthError: prompt and output do not fit.
        """
        prompt_token_ids, params = request.prompt_token_ids, request.params
        num_tokens = len(prompt_token_ids) + max((output.num_inherited for output in request.begun), default=0)
        check_timeout(request.timeout_s)
        if not prompt_token_ids:
            raise RequestError("the prompt is empty; it needs at least one token", "prompt")
        if not (min(prompt_token_ids) >= 0 and max(prompt_token_ids) < self._vocab_size):
            raise RequestError(
                f"token ids must be between 0 and {self._vocab_size - 1}, "
                f"got {min(prompt_token_ids)} to {max(prompt_token_ids)}",
                "prompt",
            )
        self._vocabulary.check_params(params)
        if request.pooling is not None:
            self._check_pooled(len(prompt_token_ids), request.pooling)
            return 0
        context_tokens = self._memory.context_tokens
        room = context_tokens - num_tokens
        if room < 1:
            why = self._why_short(context_tokens)
            raise ContextLengthError.of_prompt(num_tokens, context_tokens, "prompt", advice=why)
        if (params.max_tokens or 1) > room:
            raise ContextLengthError.of_output(
                num_tokens,
                params.max_tokens or 1,
                context_tokens,
                "prompt",
                "max_tokens",
                self._why_short(context_tokens),
            )
        max_tokens = params.max_tokens or room
        self._check_begun(request.begun, params, max_tokens)
        if params.num_sequences > 1:
            self._check_together(num_tokens, max_tokens, params)
        return max_tokens

    def check_generates(self) -> None:
        """Raise `RequestError` for a checkpoint without an output layer."""
        if not self._generates:
            assert self._pooling is not None
            routes = "/v1/embeddings" if self._pooling.kind == "embedding" else "/v1/score and /v1/rerank"
            raise RequestError(
                f"this model's checkpoint has no output layer: it generates no text; use {routes}", "model"
            )

    def _check_pooled(self, num_tokens: int, params: PoolingParams) -> None:
        if self._pooling is None:
            raise RequestError(
                "this model was not made for embeddings or scores: its checkpoint names no pooling; to use it all the "
                "same, set pooling: last or mean in the server's settings",
                "model",
            )
        self._pooling.check_params(params, self._hidden_size)
        if num_tokens > (context_tokens := self._memory.context_tokens):
            why = f" Or let truncate_prompt_tokens cut it.{self._why_short(context_tokens)}"
            raise ContextLengthError.of_prompt(num_tokens, context_tokens, "input", advice=why)

    def _why_short(self, context_tokens: int) -> str:
        if context_tokens == self._memory.max_tokens:
            return ""
        pages = self._memory.pages
        return (
            f" The limit is {self._memory.max_tokens} with enough memory: weights, step workspace, pinned prefixes, "
            f"and models with keep: always leave {(pages.attainable - pages.num_pinned) * pages.page_bytes} bytes of "
            "KV memory; send less, or raise device_memory_bytes."
        )

    def prefix_keys(self, request: EngineRequest) -> tuple[str, ...]:
        """Keys that requests must have in common to share cached prefixes."""
        if request.prefix_keys is not None:
            return request.prefix_keys
        tenant = request.tenant if self._isolate_tenants else None
        return extra_keys(request.cache_salt, request.adapter, tenant)

    def prefix_to_pin(self, name: str, request: EngineRequest) -> EngineRequest:
        """Check a pin; returns the request with the whole blocks of the prompt, and its keys. May wait for the memory's
        lock.

        Raises:
            RequestError: the prompt is invalid or shorter than a block, another prefix has the name, the quota is used
                up, or prefixes are not cached.
        """
        if not self._prefixes.enabled:
            raise RequestError("nothing can be pinned: prefix_cache is off", "name")
        unit = self._prefixes.unit_tokens
        num_tokens = len(request.prompt_token_ids)
        prefix = request.prompt_token_ids[: num_tokens // unit * unit]
        if not prefix:
            raise RequestError(
                f"a prefix of {num_tokens} tokens is too short to pin; the shortest has {unit}", "prompt"
            )
        keys = self.prefix_keys(request)
        to_pin = replace(request, prompt_token_ids=prefix, prefix_keys=keys)
        self.validate_request(to_pin)
        try:
            self._memory.pins.check_pin(name, self._prefixes.chain(keys), prefix)
        except PinError as error:
            raise RequestError(str(error), "name") from error
        return to_pin

    def replay(self, request: EngineRequest) -> list[BegunState]:
        """The states of the outputs that another engine has begun. Takes long after many tokens; from any thread."""
        states: list[BegunState] = []
        prompt = list(request.prompt_token_ids)
        params = replace(request.params, prompt_logprobs=None) if request.begun else request.params  # delivered
        for output in request.begun:
            state = self._vocabulary.state(params, prompt, output.index, output.structure_from)
            text = self._vocabulary.detokenizer(prompt, params, output.token_ids[: output.num_inherited])
            for number, token_id in enumerate(output.token_ids):
                state.append(token_id)
                if text is not None and number >= output.num_inherited:
                    text.push(token_id)  # again, what is certain has been delivered, and the rest is held back
            states.append(BegunState(output, state, text))
        return states

    def create_request(
        self,
        request_id: str,
        asked: EngineRequest,
        max_tokens: int,
        *,
        begun: Collection[BegunState] = (),
        pin_name: str | None = None,
    ) -> Request:
        """Create a validated request with its first sequence, or with those that another engine has begun. Arguments:
        see `Engine.add_request`."""
        selection: BestOf | BeamSearch | None = None
        own = params = asked.params
        if params.use_beam_search:
            selection = BeamSearch(
                params.num_sequences,
                max_tokens,
                self._vocabulary.stop_token_ids(params),
                params.length_penalty,
                params.early_stopping,
            )
        elif params.num_sequences > params.n:
            selection = BestOf(params.n, keep_logprobs=params.logprobs is not None)
            own = replace(params, logprobs=params.logprobs or 0)
        tenant = asked.tenant or asked.user
        request = Request(
            request_id, params, asked.priority, next(self._arrivals), asked.adapter, tenant, selection=selection
        )
        request.held_at = asked.held_at
        prompt, turn = list(asked.prompt_token_ids), asked.turn
        num_forks = 0 if begun else params.num_sequences - 1
        if not begun:
            detokenizer = None if params.use_beam_search else self._vocabulary.detokenizer(prompt, params)
            begun = [BegunState(BegunOutput(0, ()), self._vocabulary.state(own, prompt), detokenizer)]
        for output, state, text in begun:
            Sequence(
                request,
                prompt,
                state.params,
                max_tokens + output.num_inherited,
                text,
                self._prefixes.chain(self.prefix_keys(asked)),
                [*prompt, *output.token_ids],
                index=output.index,
                num_forks=num_forks,
                sampling=state,
                expected_cached_tokens=asked.expected_cached_tokens,
                turn=turn,
                use=PrefixUse(
                    turn.kind,
                    len(prompt),
                    retain_s=min(asked.cache_ttl_s or 0.0, self._max_cache_ttl_s),
                    retains_output=turn.kind != "completion",
                    owner=tenant or "",
                ),
                pin_name=pin_name,
                pooled=self._pooled_prompt(asked.pooling),
                submitted_at=time.perf_counter(),
            )
        return request

    def _pooled_prompt(self, params: PoolingParams | None) -> PooledPrompt | None:
        if params is None:
            return None
        assert self._pooling is not None
        return PooledPrompt(params, self._pooling.method)

    def create_fork(
        self, request_id: str, parent: Sequence, params: SamplingParams
    ) -> tuple[EngineRequest, Request, list[SamplingState], int]:
        """Validate forks of a running sequence; returns the request that other engines would need for them, their
        request here, which has no sequences yet, their sampling states, and the most tokens of each.

        Raises:
            RequestError: the forks do not fit beside the sequences of their parent's request.
        """
        of_parent, output = parent.request, parent.token_ids[len(parent.prompt_token_ids) :]
        check_fork(params)
        most_tokens = len(parent.token_ids) + self.validate_request(EngineRequest(request_id, parent.token_ids, params))
        most = [sequence.most_tokens for sequence in of_parent.sequences] + [most_tokens] * params.n
        if not self._memory.fit_together(most):
            raise RequestError(
                f"{len(most)} sequences of up to {max(most)} tokens do not fit into the KV cache together", "n"
            )
        if max(self._scheduler.num_running, of_parent.num_sequences) + params.n > self._scheduler.max_num_seqs:
            raise RequestError(
                f"no room for {params.n} more sequences: at most {self._scheduler.max_num_seqs} run at once "
                "(max_num_seqs)",
                "n",
            )
        request = Request(
            request_id,
            params,
            of_parent.priority,
            next(self._arrivals),
            of_parent.adapter,
            of_parent.tenant,
            due=of_parent.due,
        )
        states = [self._vocabulary.fork(parent.sampling, params, index) for index in range(params.n)]
        asked = EngineRequest(
            request_id,
            parent.prompt_token_ids,
            params,
            priority=request.priority,
            adapter=request.adapter,
            tenant=request.tenant,
            prefix_keys=parent.chain.keys,
            begun=tuple(
                BegunOutput(index, output, len(output), state.structure_from) for index, state in enumerate(states)
            ),
        )
        return asked, request, states, most_tokens

    def _check_begun(self, begun: tuple[BegunOutput, ...], params: SamplingParams, max_tokens: int) -> None:
        if begun and params.num_sequences > params.n:
            raise RequestError("outputs of best_of or of a beam search cannot be continued; send the request again")
        for output in begun:
            num_tokens = len(output.token_ids) - output.num_inherited
            if not 0 <= output.index < params.n or not 0 <= num_tokens < max_tokens:
                raise RequestError(f"output {output.index} with {num_tokens} tokens cannot be continued")
            if output.token_ids and not 0 <= min(output.token_ids) <= max(output.token_ids) < self._vocab_size:
                raise RequestError(f"output {output.index} has a token that the model does not know")

    def _check_together(self, num_prompt_tokens: int, max_tokens: int, params: SamplingParams) -> None:
        """Raise `RequestError` unless all sequences of a request can run at once."""
        count = params.num_sequences
        field = "best_of" if params.best_of is not None else "n"
        if count > self._scheduler.max_num_seqs:
            raise RequestError(
                f"{field} is {count}, but {self._scheduler.max_num_seqs} sequences run at once (max_num_seqs)", field
            )
        shared = num_prompt_tokens if self._prefixes.enabled else 0
        if not self._memory.fit_together([num_prompt_tokens + max_tokens] * count, shared):
            raise RequestError(
                f"{count} sequences of up to {num_prompt_tokens + max_tokens} tokens do not fit into the KV cache "
                "together; ask for fewer, or for fewer tokens",
                field,
            )


def check_fork(params: SamplingParams) -> None:
    """Raise `RequestError` for parameters that a fork cannot have."""
    for name in ("use_beam_search", "prompt_logprobs", "best_of"):
        if getattr(params, name) not in (None, False):
            raise RequestError(f"a fork takes no {name}", name)


def fit_context(config: EngineConfig, model: LoadedModel, memory: KVMemory) -> int:
    """The configured context, else the model's, limited to the longest sequence that the KV cache can hold."""
    if config.max_model_len is not None and config.max_model_len > memory.max_tokens:
        raise ConfigError(
            f"max_model_len {config.max_model_len} does not fit into the KV cache of {memory.max_tokens} tokens; "
            "raise kv_memory_bytes or lower max_model_len"
        )
    if config.max_model_len is None and model.max_positions > memory.max_tokens:
        logger.warning("the KV cache limits the context from %d to %d tokens", model.max_positions, memory.max_tokens)
    return memory.max_tokens
