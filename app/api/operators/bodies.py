"""Request bodies for operators: pins, models, adapters and budgets."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from folio.app.api.base import Name, StrictBody, Text
from folio.app.api.openai.bodies import PinName
from folio.app.api.openai.chat_body import Messages
from folio.app.api.openai.sampling_body import TokenIds
from folio.app.config.parsers import ReasoningParserName, ToolParserName
from folio.app.config.shelf import LEAST_WEIGHT, MOST_WEIGHT


class PinRequest(StrictBody):
    """A prefix to pin under a name: a text that prompts begin with, or messages that conversations begin with."""

    name: Annotated[PinName, Field(examples=["rules"])]
    """Pinning the same prefix again has no effect; another prefix of the model under this name is an error."""
    model: Annotated[Text | None, Field(max_length=256, examples=["builtin"])] = None
    """The served model. Needed where there are several."""
    prompt: Text | TokenIds | None = None
    """Text or token ids that prompts begin with. At least one block of tokens."""
    messages: Messages | None = None
    """Messages that conversations begin with."""
    cache_salt: Name | None = None
    """Only requests with the same salt share the prefix."""
    tenant: Name | None = None
    """Only requests of the same tenant share the prefix, unless `isolate_tenants` is off."""


class LoadAdapterRequest(StrictBody):
    """`POST /v1/load_lora_adapter`, as vLLM has it."""

    lora_name: Annotated[PinName, Field(examples=["legal"])]
    """The name by which clients request the adapter as a model."""
    lora_path: Annotated[Text, Field(min_length=1, max_length=4096, examples=["legal-v2"])]
    """Its folder, in PEFT's format, below the setting `adapter_dir`, where relative paths begin."""
    load_inplace: bool | None = None
    """It may replace another adapter, or other files, of this name."""
    base_model_name: Annotated[Text | None, Field(max_length=256)] = None
    """Its model; by default the first one."""


class UnloadAdapterRequest(StrictBody):
    """`POST /v1/unload_lora_adapter`, as vLLM has it."""

    lora_name: Annotated[PinName, Field(examples=["legal"])]
    """The name of an adapter that has been loaded."""
    lora_int_id: int | None = None
    """Ignored: adapters have no numbers here."""


class SloFields(StrictBody):
    """Latency targets of a model."""

    ttft_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Time to first token."""
    tpot_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.1
    """Time per output token after it."""


class AddModelRequest(StrictBody):
    """`POST /v1/models`: a model to serve. It is loaded at its first request."""

    name: Annotated[PinName, Field(examples=["qwen"])]
    """Its name in requests."""
    path: Annotated[Text, Field(min_length=1, max_length=4096, examples=["Qwen2.5-0.5B-Instruct"])]
    """Its folder below the setting `models_dir`, where relative paths begin."""
    keep: Literal["auto", "always"] | Annotated[float, Field(ge=0, allow_inf_nan=False)] = "auto"
    """When its weights leave the device: when other models can use the memory better, never, or after this time
    without a request."""
    weight: Annotated[float, Field(ge=LEAST_WEIGHT, le=MOST_WEIGHT)] = 1.0
    """Its share of the device's time while several models have work."""
    slo: SloFields = SloFields()
    """Its latency targets."""
    max_model_len: Annotated[int | None, Field(ge=1)] = None
    """Longest prompt plus output; by default the model's own limit."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """The type of weights and computation."""
    quantization: Literal["none", "int8", "int4"] = "none"
    """How the weights of linear layers are quantised."""
    tool_call_parser: ToolParserName = "auto"
    """How the model writes calls of functions."""
    reasoning_parser: ReasoningParserName = "auto"
    """How the model writes its reasoning."""


class DrainRequest(StrictBody):
    """A replica that is to have no requests."""

    replica: Annotated[Name, Field(examples=["p3k1x9qa"])]
    """Its name, as in `GET /v1/load`."""
    draining: bool = True
    """`false`: it gets requests again."""


class BudgetRequest(StrictBody):
    """A budget for the KV cache of each engine replica."""

    budget_bytes: Annotated[int, Field(ge=1, examples=[1 << 30])]
    """At most `kv_memory_bytes`, at least what the longest sequence, the floor and pinned prefixes take."""
    revision: Annotated[int | None, Field(ge=1, le=1 << 53)] = None
    """Replicas ignore a request whose revision is not above that of the last one. By default the next one."""
