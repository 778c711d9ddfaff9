"""Pins: named prefixes that every engine replica computes and keeps in its prefix cache."""

from __future__ import annotations

from collections.abc import Sequence

from folio.app.api.input.model_names import ModelNames
from folio.app.api.input.served_models import ServedModel
from folio.app.api.operators.bodies import PinRequest
from folio.app.api.operators.replies import PinList, pin_list
from folio.app.api.replicas import STATUS_TIMEOUT_S, Replicas
from folio.app.errors import FolioError, NoReplicaError, RequestError, UnknownPinError
from folio.app.fleet.messages import GenerateRequest
from folio.app.http.request_context import current_context

UNPIN_TIMEOUT_S = 10.0


class Pins:
    """The pins of all engine replicas.

    Args:
        is_shared: there may be several models, each with pins of its own.
    """

    def __init__(self, names: ModelNames, replicas: Replicas, *, is_shared: bool) -> None:
        self._names, self._replicas, self._is_shared = names, replicas, is_shared

    async def all(self) -> PinList:
        """The pins of the replicas that answer in `STATUS_TIMEOUT_S`."""
        return pin_list(await self._replicas.call_each("status", timeout_s=STATUS_TIMEOUT_S))

    async def pin(self, request: PinRequest) -> str:
        """Compute a prefix on every replica and keep it; returns its model's name when all have done so.

        Raises:
            RequestError: the prompt is too short to be shared, or another prefix of the model has the name; some
                replicas may have pinned the prefix nevertheless, until `unpin`. Or the model must be named.
            EngineError: a replica has no room within its pin quota.
            ForbiddenError: the caller's API key is another tenant's.
            UnavailableError: a replica has not answered in time.
        """
        context = current_context()
        tenant = request.tenant if context is None else context.tenant_of(request.tenant)
        models = [model.name for model in self._names.models]
        if request.model is None and self._is_shared and len(models) > 1:
            raise RequestError(
                f"pins belong to a model, and this server has several: {_listed(models)}; name one of them", "model"
            )
        named, model = await self._names.resolve(request)
        if named.model not in (None, model.name):
            raise _only_for_models(model.name, "model")
        encode, max_model_len = model.translator.prompts.encode_pin, await model.max_model_len()
        prefix = await model.translator.in_thread(encode, named, max_model_len)
        await self._replicas.call_all("pin", request.name, prefix, request.cache_salt, tenant, model.name)
        return model.name

    async def pin_prompt(self, name: str, calls: Sequence[GenerateRequest]) -> None:
        """Pin the prompt of a request, given its calls. Raises as `pin`; the errors name the field `pin`."""
        if len(calls) != 1:
            raise RequestError(f"pin takes one prompt, not {len(calls)}: send them one by one", "pin")
        [call] = calls
        if call.adapter is not None:
            raise _only_for_models(call.model, "pin")
        try:
            await self._replicas.call_all("pin", name, call.prompt_token_ids, call.cache_salt, call.tenant, call.model)
        except RequestError as error:
            raise type(error)(error.message, "pin") from error

    async def unpin(self, name: str, model: str | None = None) -> None:
        """Unpin a prefix on every replica; replicas that started after the pin may not have it.

        Args:
            model: the pin's model; `None`: the only one with a pin of this name.

        Raises:
            UnknownPinError: no replica has a pin of this name.
            RequestError: several models have one, and none is named.
            UnknownModelError: there is no such model.
            EngineError: a replica has not answered, and may still have the pin.
        """
        of_model = await self._model_of(name, model)
        answers = await self._replicas.call_each("unpin", name, of_model.name, timeout_s=UNPIN_TIMEOUT_S)
        if not answers:
            raise NoReplicaError("there is no engine replica; send the request again")
        errors = [answer for answer in answers if isinstance(answer, FolioError)]
        errors.sort(key=lambda error: isinstance(error, UnknownPinError))  # silent replicas may have the pin
        for error in errors:
            if len(errors) == len(answers) or not isinstance(error, UnknownPinError):
                raise error

    async def _model_of(self, name: str, model: str | None) -> ServedModel:
        """The model of a pin. Raises as `unpin`."""
        if model is not None:
            served = self._names.models.served_name(model)
            found = await self._names.find(served)
            if found.name != served:
                raise _only_for_models(found.name, "model")
            return found
        if not self._is_shared:
            return self._names.models.first
        models = [card.model for card in (await self.all()).data if card.id == name]
        if not models:
            raise UnknownPinError(f"no prefix is pinned as {name!r}", "name")
        if len(models) > 1:
            raise RequestError(f"prefixes of {_listed(models)} are pinned as {name!r}; name the model", "model")
        return self._names.models.find(models[0])


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))


def _only_for_models(name: str, param: str) -> RequestError:
    return RequestError(f"prefixes can be pinned for the model {name!r} only, not for its adapters", param)
