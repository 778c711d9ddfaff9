"""From a request to its sequences, if the engine can serve it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from app.engine.generation import BestOf, Generation
from app.engine.model.loader import LoadedModel
from app.engine.prefix_keys import extra_keys
from app.engine.request import Request, RequestOptions, SequenceGroup
from app.engine.sampling.beam import BeamSearch
from app.engine.sampling.params import SamplingParams
from app.engine.sampling.state import SamplingState
from app.engine.scheduler import Scheduler
from app.engine.vocabulary import Vocabulary
from app.errors import ContextLengthError, RequestError
from vmem import KVMemory, PinError


class RequestValidator:
    """Checks requests, from any thread, and makes their sequences, in the engine's.

    Args:
        max_model_len: longest prompt plus output, in tokens.
        isolate_tenants: whether tenants share no cached prefixes.
    """

    def __init__(
        self,
        model: LoadedModel,
        memory: KVMemory,
        vocabulary: Vocabulary,
        scheduler: Scheduler,
        max_model_len: int,
        *,
        isolate_tenants: bool,
    ) -> None:
        self._vocab_size = model.vocab_size
        self._memory = memory
        self._vocabulary = vocabulary
        self._scheduler = scheduler
        self._max_model_len = max_model_len
        self._isolate_tenants = isolate_tenants
        self._num_arrivals = 0

    def validate_request(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> int:
        """The output tokens it may have. Raises as `Engine.validate`."""
        if not prompt_token_ids:
            raise RequestError("the prompt is empty; it needs at least one token", "prompt")
        if not (min(prompt_token_ids) >= 0 and max(prompt_token_ids) < self._vocab_size):
            raise RequestError(
                f"token ids must be between 0 and {self._vocab_size - 1}, "
                f"got {min(prompt_token_ids)} to {max(prompt_token_ids)}",
                "prompt",
            )
        self._vocabulary.check_params(params)
        room = self._max_model_len - len(prompt_token_ids)
        if room < 1 or (params.max_tokens or 1) > room:
            raise ContextLengthError(
                f"the context is {self._max_model_len} tokens, but the prompt has {len(prompt_token_ids)} "
                f"and {params.max_tokens or 1} are to be generated",
                "prompt" if room < 1 else "max_tokens",
            )
        max_tokens = params.max_tokens or room
        if params.num_sequences > 1:
            self._check_together(len(prompt_token_ids), max_tokens, params)
        return max_tokens

    def prefix_keys(self, options: RequestOptions) -> tuple[str, ...]:
        """What requests with these options must have in common to share cached prefixes."""
        tenant = options.get("tenant") if self._isolate_tenants else None
        return extra_keys(options.get("cache_salt"), options.get("adapter"), tenant)

    def prefix_to_pin(self, name: str, prompt_token_ids: Sequence[int], keys: tuple[str, ...]) -> Sequence[int]:
        """As `Engine.validate_pin`."""
        if not self._memory.prefixes.enabled:
            raise RequestError("nothing can be pinned: prefix_cache is off", "name")
        unit = self._memory.prefixes.unit_tokens
        prefix = prompt_token_ids[: len(prompt_token_ids) // unit * unit]
        if not prefix:
            raise RequestError(
                f"a prefix of {len(prompt_token_ids)} tokens is shorter than the {unit} that are shared at least",
                "prompt",
            )
        self.validate_request(prefix, SamplingParams(max_tokens=1))
        try:
            self._memory.pins.check_pin(name, self._memory.prefixes.chain(keys), prefix)
        except PinError as error:
            raise RequestError(str(error), "name") from error
        return prefix

    def create_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        options: RequestOptions,
        keys: tuple[str, ...] | None = None,
    ) -> Generation:
        """A request with its first sequence, in a group of its own that nobody has scheduled yet.

        Args:
            keys: of its prefixes, if not those of the options.
        """
        max_tokens = self.validate_request(prompt_token_ids, params)
        selection: BestOf | BeamSearch | None = None
        own = params
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
        adapter = options.get("adapter")
        group = SequenceGroup(
            options.get("priority", 0),
            self._num_arrivals,
            adapter=adapter,
            lockstep=params.use_beam_search,
            tenant=options.get("tenant") or options.get("user"),
        )
        self._num_arrivals += 1
        prompt = list(prompt_token_ids)
        request = Request(
            request_id,
            prompt,
            own,
            max_tokens,
            None if params.use_beam_search else self._vocabulary.detokenizer(prompt, params),
            self._memory.prefixes.chain(self.prefix_keys(options) if keys is None else keys),
            group,
            prompt.copy(),
            num_forks=params.num_sequences - 1,
            sampling=self._vocabulary.state(own, prompt),
            expected_cached_tokens=options.get("expected_cached_tokens"),
        )
        return Generation(request_id, params, [request], selection)

    def fork_states(self, parent: Request, params: SamplingParams) -> tuple[list[SamplingState], int]:
        """States of the sequences that go on from a running one, and the tokens each may come to have. Raises
        `RequestError` if there is no room for them."""
        check_fork(params)
        most_tokens = len(parent.token_ids) + self.validate_request(parent.token_ids, params)
        most = [r.most_tokens for r in parent.group.members] + [most_tokens] * params.n
        if not self._memory.fit_together(most):
            raise RequestError(
                f"{len(most)} sequences of up to {max(most)} tokens do not fit into the KV cache together", "n"
            )
        if max(self._scheduler.num_running, parent.group.num_sequences) + params.n > self._scheduler.max_num_seqs:
            raise RequestError(
                f"{self._scheduler.max_num_seqs} sequences run at once; there is no room for a fork", "n"
            )
        return [self._vocabulary.fork(parent.sampling, params, index) for index in range(params.n)], most_tokens

    def _check_together(self, num_prompt_tokens: int, max_tokens: int, params: SamplingParams) -> None:
        """Whether all sequences of a request can run at once."""
        count = params.num_sequences
        field = "best_of" if params.best_of is not None else "n"
        if count > self._scheduler.max_num_seqs:
            raise RequestError(
                f"{field} is {count}, but {self._scheduler.max_num_seqs} sequences run at once (max_num_seqs)", field
            )
        shared = num_prompt_tokens if self._memory.prefixes.enabled else 0
        if not self._memory.fit_together([num_prompt_tokens + max_tokens] * count, shared):
            raise RequestError(
                f"{count} sequences of up to {num_prompt_tokens + max_tokens} tokens do not fit into the KV cache "
                "together; ask for fewer, or for fewer tokens",
                field,
            )


def check_fork(params: SamplingParams) -> None:
    """Raise `RequestError` for what only a whole request can have."""
    for name in ("use_beam_search", "prompt_logprobs", "best_of"):
        if getattr(params, name) not in (None, False):
            raise RequestError(f"a fork takes no {name}", name)
