"""The models that an ingress serves: their names, tokenizers and contexts."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from folio.app.api.input.translate import Translator
from folio.app.api.output.formats import output_format
from folio.app.api.pooled.translate import PooledTranslator
from folio.app.api.replicas import Replicas
from folio.app.compat.transformers import imported_without_torch
from folio.app.config.shelf import ModelConfig
from folio.app.engine.model.context import context_length, read_config, sampling_defaults
from folio.app.engine.model.tokenizer import load_tokenizer
from folio.app.errors import ModelError, ModelUnavailableError, UnknownModelError
from folio.app.fleet.loaded import LoadedTable
from folio.app.fleet.messages import HostedModel, ServedPooling
from folio.app.fleet.overload import LoadShedder
from folio.app.shelf.status import ModelState

logger = logging.getLogger(__name__)

# A tokenizer that cannot be loaded is tried again as an engine is, see `ShelvedModel`.
_FIRST_RETRY_S, _LONGEST_RETRY_S = 5.0, 300.0
# The most ready first.
_STATES: tuple[ModelState, ...] = ("awake", "waking", "asleep", "loading", "new", "failed")


@dataclass(frozen=True, slots=True)
class Seen:
    """A model over all replicas: its most ready state, and its shortest context where it has been loaded, as a request
    may go to any replica."""

    state: ModelState
    max_model_len: int | None


def seen_models(replicas: Iterable[Sequence[HostedModel]]) -> dict[str, Seen]:
    """The models that replicas report, by name."""
    by_name: dict[str, list[HostedModel]] = {}
    for hosted in (hosted for replica in replicas for hosted in replica):
        by_name.setdefault(hosted.status.name, []).append(hosted)
    return {
        name: Seen(
            min((one.status.state for one in of_replicas), key=_STATES.index),
            min((one.max_model_len for one in of_replicas if one.max_model_len is not None), default=None),
        )
        for name, of_replicas in by_name.items()
    }


class ServedModel:
    """What an ingress needs of one model, loaded when the first request asks for the model.

    Attributes:
        translator, pooled: translators of bodies, once `load` has returned.
        shedder: sheds its load while all replicas are full of its requests.
        context_tokens: the context, once a replica that has loaded the model has reported it.
    """

    translator: Translator
    pooled: PooledTranslator
    _longest_tokens: int

    def __init__(self, config: ModelConfig, replicas: Replicas) -> None:
        self.config, self.name = config, config.name
        self.shedder = LoadShedder()
        self.created = int(time.time())
        self.context_tokens: int | None = None
        self.sampling: Mapping[str, float] | None = None
        self._adapters: Mapping[str, str] = {}
        self._replicas = replicas
        self._pooling: ServedPooling | None = None
        self._loading: asyncio.Task[None] | None = None
        self._is_loaded = False
        self._error = ""
        self._num_failures = 0
        self._retry_at = 0.0

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of its adapters."""
        return (*self.config.engine.adapters, *self._adapters)

    def set_adapters(self, ids: Mapping[str, str]) -> None:
        """Set the adapters loaded at run time: name → id."""
        self._adapters = ids
        if self._is_loaded:
            self.translator.added = ids

    def load_now(self) -> None:
        """Load the tokenizer, which takes up to a second. Raises `ModelError`."""
        engine = self.config.engine
        with imported_without_torch():
            tokenizer = load_tokenizer(engine.model)
            self._longest_tokens = engine.max_model_len or context_length(read_config(engine.model))
            self.sampling = sampling_defaults(engine.model)
        parsers = self.config.tool_call_parser, self.config.reasoning_parser
        adapters = tuple(self.config.engine.adapters)
        self.translator = Translator(tokenizer, self.name, adapters, output_format(tokenizer, *parsers))
        self.translator.added = self._adapters
        for fault in self.translator.prompts.template.faults:
            logger.warning("the chat template of %r cannot be used: %s; /v1/completions work", self.name, fault)
        self.pooled = PooledTranslator(
            self.translator.prompts, self.translator.adapter_of, self.translator.key_of, self.name
        )
        self._is_loaded = True

    async def load(self) -> None:
        """Load the tokenizer in a thread, once.

        Raises:
            ModelUnavailableError: it cannot be loaded. Calls after a pause try again.
        """
        if self._is_loaded:
            return
        if self._loading is None or self._loading.done():
            if time.monotonic() < self._retry_at:
                raise self._unavailable()
            self._loading = asyncio.create_task(self._try_to_load())
        await asyncio.shield(self._loading)
        if not self._is_loaded:
            raise self._unavailable()

    async def _try_to_load(self) -> None:
        try:
            await asyncio.to_thread(self.load_now)
        except Exception as error:  # a damaged file may raise anything; other models are served
            is_typed = isinstance(error, ModelError)
            logger.error("the tokenizer of %r cannot be loaded: %s", self.name, error, exc_info=not is_typed)
            self._error = str(error)
            self._retry_at = time.monotonic() + min(_FIRST_RETRY_S * 2 ** min(self._num_failures, 30), _LONGEST_RETRY_S)
            self._num_failures += 1

    def _unavailable(self) -> ModelUnavailableError:
        message = f"the model {self.name!r} cannot be served now: {self._error}"
        return ModelUnavailableError(message, max(self._retry_at - time.monotonic(), 0.0))

    @property
    def longest_tokens(self) -> int:
        """The context in tokens if a replica has reported it; else the most that the model's settings or checkpoint
        allow. Available once `load` has returned."""
        return self._longest_tokens if self.context_tokens is None else self.context_tokens

    async def max_model_len(self) -> int:
        """The context in tokens. The first call waits until a replica has loaded the model."""
        if self.context_tokens is None:
            self.context_tokens = await self._replicas.max_model_len(self.name)
        return self.context_tokens

    async def pooling(self) -> ServedPooling:
        """The vectors that the model makes. Waits as `max_model_len`."""
        if self._pooling is None:
            self._pooling = await self._replicas.pooling(self.name)
        return self._pooling


class ServedModels:
    """The models and adapters by their names: those of the settings, and those added at run time.

    Args:
        aliases: further names: names or patterns with `*` → a served name.
        shedders: is filled with the load shedder of each model; `None`: there is one model, whose load is shed from
            requests' heads.

    Attributes:
        first: the model of requests that name none.
        by_name: served name, also of adapters → its model.
        reserved: names that the settings give to models, adapters and aliases, without patterns.
    """

    def __init__(
        self,
        models: Sequence[ModelConfig],
        replicas: Replicas,
        aliases: Mapping[str, str],
        shedders: dict[str, LoadShedder] | None,
    ) -> None:
        self._replicas = replicas
        self._aliases = aliases
        self._shedders = shedders
        self._settled = {config.name: ServedModel(config, replicas) for config in models}
        self._added: dict[str, ServedModel] = {}
        self.first = self._settled[models[0].name]
        self.first.load_now()
        names = (name for model in self._settled.values() for name in (model.name, *model.adapters))
        self.reserved = frozenset((*names, *(alias for alias in aliases if "*" not in alias)))
        self._index()

    def __iter__(self) -> Iterator[ServedModel]:
        return iter((*self._settled.values(), *self._added.values()))

    def apply(self, table: LoadedTable) -> None:
        """Replace the models and adapters that were added at run time by the table's."""
        table = table.beside(self.reserved)
        self._added = {
            config.name: known
            if (known := self._added.get(config.name)) is not None and known.config == config
            else ServedModel(config, self._replicas)
            for config in table.models
        }
        for model in self:
            model.set_adapters({s.name: s.id for s in table.sources if (s.model or self.first.name) == model.name})
        self._index()

    def served_name(self, name: str) -> str:
        """The served name that a client's name stands for: an alias's, or the name itself."""
        if name in self.by_name:
            return name
        matching = (served for alias, served in self._aliases.items() if fnmatchcase(name, alias))
        return self._aliases.get(name) or next(matching, name)

    def check_tokenizer(self, config: ModelConfig) -> None:
        """Load the tokenizer of a model that may be added, which takes up to a second. Raises `ModelError`."""
        ServedModel(config, self._replicas).load_now()

    def knows(self, name: str) -> bool:
        return name in self.by_name

    def note(self, seen: Mapping[str, Seen]) -> None:
        """Take over the models' contexts from the replicas' reports."""
        for name, of_replicas in seen.items():
            if of_replicas.max_model_len is not None and name in self.by_name:
                self.by_name[name].context_tokens = of_replicas.max_model_len

    def find(self, name: str) -> ServedModel:
        """The model of a served name, an adapter's included. Raises `UnknownModelError` if there is none."""
        if (model := self.by_name.get(name)) is None:
            served = ", ".join(map(repr, self.by_name))
            raise UnknownModelError(f"the model {name!r} does not exist; this server has {served}", "model")
        return model

    def _index(self) -> None:
        # Names of the settings come first, as in lists of models.
        self.by_name = {name: model for model in self for name in (model.name, *model.adapters)}
        if self._shedders is not None:
            self._shedders.clear()
            self._shedders.update({model.name: model.shedder for model in self})
