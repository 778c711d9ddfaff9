"""Response bodies: completions, chats, their chunks as server-sent events, models, and reports for operators."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict
from pydantic_core import to_json

from app.engine.shelf.status import ModelState
from app.fleet.messages import ReplicaStatus
from app.openai.base import Omitted
from app.openai.tools.bodies import ToolCall, ToolCallDelta
from vmem import BudgetAnswer, PinReport

ChoiceEnd = Literal["stop", "length", "tool_calls"]


class PromptTokensDetails(BaseModel):
    """`cached_tokens` of the prompt were found in the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    """`reasoning_tokens` of the outputs are reasoning."""

    reasoning_tokens: int


class Usage(BaseModel):
    """Each prompt counts once, whatever the number of its outputs. `completion_tokens_details` is left out for models
    that do not reason."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: Omitted[CompletionTokensDetails] = None


class PromptLogprob(BaseModel):
    """A token of the prompt, or an alternative to it. `rank` is 1 for the likeliest."""

    logprob: float
    rank: int
    decoded_token: str


# For each token of the prompt but the first: token id → log probability, of the token and its alternatives.
PromptLogprobs = list[dict[int, PromptLogprob] | None]


class CompletionLogprobs(BaseModel):
    """One entry a token. Incomplete characters are written `bytes:\\xe2\\x82`.

    `text_offset` is the token's offset in the choice's text, in characters. `top_logprobs` is token → log probability.
    `token_logprobs` and `top_logprobs` are null for the first token of an echoed prompt.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """Extensions, left out while null: `stop_reason`, the stop string or token id that ended the output; `score`, of a
    beam; `prompt_logprobs`; `token_ids` of the output, or of the chunk, and `prompt_token_ids`."""

    index: int = 0
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: ChoiceEnd | None = None
    stop_reason: Omitted[str | int] = None
    score: Omitted[float] = None
    prompt_logprobs: Omitted[PromptLogprobs] = None
    token_ids: Omitted[list[int]] = None
    prompt_token_ids: Omitted[list[int]] = None


class Completion(BaseModel):
    """The answer of `/v1/completions`, or one chunk of it when streamed."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TopLogprob(BaseModel):
    """`bytes` of the token's text, which may be part of a character."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """One entry a token."""

    content: list[ChatTokenLogprob]


class AssistantMessage(BaseModel):
    """`content` is null when there are only tool calls. `reasoning_content` and `reasoning` are the same, and left out
    without reasoning."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: Omitted[str] = None
    reasoning: Omitted[str] = None
    tool_calls: Omitted[list[ToolCall]] = None


class ChatChoice(BaseModel):
    """Extensions as in `CompletionChoice`."""

    index: int = 0
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: ChoiceEnd | None = None
    stop_reason: Omitted[str | int] = None
    score: Omitted[float] = None
    token_ids: Omitted[list[int]] = None


class ChatCompletion(BaseModel):
    """The answer of `/v1/chat/completions`; `prompt_logprobs` and `prompt_token_ids` are extensions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    service_tier: Omitted[Literal["default"]] = None
    prompt_logprobs: Omitted[PromptLogprobs] = None
    prompt_token_ids: Omitted[list[int]] = None


class ChatDelta(BaseModel):
    """A chunk's part of the message."""

    role: Omitted[Literal["assistant"]] = None
    content: Omitted[str] = None
    reasoning_content: Omitted[str] = None
    reasoning: Omitted[str] = None
    tool_calls: Omitted[list[ToolCallDelta]] = None


class ChatChunkChoice(BaseModel):
    index: int = 0
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: ChoiceEnd | None = None
    stop_reason: Omitted[str | int] = None
    score: Omitted[float] = None
    token_ids: Omitted[list[int]] = None


class ChatCompletionChunk(BaseModel):
    """One chunk of a streamed chat completion. `prompt_logprobs` and `prompt_token_ids`, extensions, come with the
    first."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    service_tier: Omitted[Literal["default"]] = None
    prompt_logprobs: Omitted[PromptLogprobs] = None
    prompt_token_ids: Omitted[list[int]] = None


class ModelCard(BaseModel):
    """A served model, or an adapter of the model `parent`.

    `max_model_len` is the context in tokens; null: the model has not been loaded yet. `description` says of the
    built-in model that it is a toy. `state`: of one of several models, at the engine replica where it is the most
    ready.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "folio"
    max_model_len: int | None
    parent: str | None = None
    description: str | None = None
    state: Omitted[ModelState] = None


class ModelDeleted(BaseModel):
    id: str
    object: Literal["model"] = "model"
    deleted: Literal[True] = True


class Version(BaseModel):
    version: str


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


_LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}
# The empty text of a chunk. It occurs once: within strings quotes are escaped.
_EMPTY = {Completion: '"text":""', ChatCompletionChunk: '"content":""'}


class Frames:
    """Writes the chunks of one stream as events. Most chunks differ only in their text, so the JSON around it, which
    takes most of the time, is serialised once."""

    def __init__(self) -> None:
        self._around: dict[tuple[str, int], tuple[str, str]] = {}  # by id and index of the choice

    def event(self, chunk: BaseModel) -> bytes:
        text = _only_text(chunk)
        if text is None:
            return f"data: {on_one_line(chunk.model_dump_json())}\n\n".encode()
        assert isinstance(chunk, Completion | ChatCompletionChunk)
        key = chunk.id, chunk.choices[0].index
        around = self._around.get(key)
        if around is None:
            around = self._around[key] = _around(chunk)
        return f"data: {around[0]}{on_one_line(to_json(text).decode())}{around[1]}\n\n".encode()


def on_one_line(dumped: str) -> str:
    """Escape line ends other than newline. JSON and events allow them, but clients that split a stream like Python's
    `splitlines`, such as httpx's and requests' `iter_lines`, would break there."""
    return dumped if dumped.isascii() else dumped.translate(_LINE_ENDS)


def _only_text(chunk: BaseModel) -> str | None:
    """The text of a chunk, if it carries nothing else."""
    if not isinstance(chunk, Completion | ChatCompletionChunk) or len(chunk.choices) != 1 or chunk.usage is not None:
        return None
    choice = chunk.choices[0]
    if choice.finish_reason is not None or choice.logprobs is not None:
        return None
    if choice.stop_reason is not None or choice.score is not None or choice.token_ids is not None:
        return None
    if isinstance(chunk, ChatCompletionChunk):
        delta = chunk.choices[0].delta
        is_plain = delta.role is None and delta.tool_calls is None and chunk.prompt_logprobs is None
        return delta.content if is_plain else None
    completion = chunk.choices[0]
    return completion.text if completion.prompt_logprobs is None else None


def _around(chunk: Completion | ChatCompletionChunk) -> tuple[str, str]:
    """The JSON before and after the text of such a chunk."""
    [choice] = chunk.choices
    change = {"delta": ChatDelta(content="")} if isinstance(chunk, ChatCompletionChunk) else {"text": ""}
    empty = chunk.model_copy(update={"choices": [choice.model_copy(update=change)]})
    before, key, after = on_one_line(empty.model_dump_json()).partition(_EMPTY[type(chunk)])
    return before + key[:-2], after


class _Report(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)


class LoadFigures(_Report):
    """Load of one engine replica, or of all together. Bytes are of the KV cache."""

    num_running: int
    """Sequences that have memory."""
    num_waiting: int
    """Sequences without memory: not begun yet, or preempted."""
    queued_tokens: int
    """Tokens of prompts that are not computed yet."""
    free_tokens: int
    """Further tokens that the KV cache can hold, evictable blocks included."""
    total_tokens: int
    """Tokens that the KV cache can hold within the budget."""
    budget_bytes: int
    physical_bytes: int
    """Allocated from the device."""
    active_bytes: int
    """Owned by requests and pinned prefixes."""
    cached_bytes: int
    """Evictable blocks of the prefix cache."""
    pinned_bytes: int
    swapped_bytes: int
    """Host memory of preempted requests."""
    prompt_tokens: int
    """Tokens of all prompts since the start."""
    cached_tokens: int
    """Those that were found in the prefix cache."""


class ReplicaLoad(LoadFigures):
    name: str
    queued_s: float
    """Expected time to compute the queued tokens."""
    busy_share: float
    """Share of the last seconds spent in steps with prefill."""
    max_num_seqs: int
    """Most sequences that run at once."""
    ready_s: float
    """Seconds that the engine took to start."""


class LoadReport(_Report):
    """All engine replicas that answered, in order of their names; `num_silent` did not."""

    object: Literal["load"] = "load"
    num_replicas: int
    num_silent: int
    total: LoadFigures
    least_queued_s: float | None
    """The least `queued_s` of a replica; null when none answered."""
    replicas: list[ReplicaLoad]


class PinCard(_Report):
    """A pinned prefix. Replicas that started after a request pinned it may not have it."""

    id: str
    object: Literal["pin"] = "pin"
    num_tokens: int
    num_bytes: int
    """On one replica, blocks shared with other pins included."""
    num_replicas: int
    """Replicas that have the prefix."""
    model: str
    """Whose prefix it is."""


class PinList(BaseModel):
    object: Literal["list"] = "list"
    data: list[PinCard]


class PinDeleted(BaseModel):
    id: str
    object: Literal["pin"] = "pin"
    deleted: Literal[True] = True


class BudgetReport(_Report):
    """The change of every engine replica's budget. Replicas that start later begin with `kv_memory_bytes`."""

    object: Literal["budget"] = "budget"
    budget_bytes: int
    revision: int
    answers: list[BudgetAnswer]
    """Of each replica: `applied`; `deferred`, until requests that hold more have ended or are preempted; or `stale`:
    the revision is old."""


def load_report(answers: Sequence[Any]) -> LoadReport:
    """Args: the `ReplicaStatus` of every replica, or the error instead of it."""
    statuses = sorted(_statuses(answers), key=lambda status: status.name)
    replicas = [_replica_load(status) for status in statuses]
    total = {name: sum(getattr(replica, name) for replica in replicas) for name in LoadFigures.model_fields}
    return LoadReport(
        num_replicas=len(answers),
        num_silent=len(answers) - len(replicas),
        total=LoadFigures(**total),
        least_queued_s=min((replica.queued_s for replica in replicas), default=None),
        replicas=replicas,
    )


def pin_list(answers: Sequence[Any]) -> PinList:
    """Args: see `load_report`. Raises the first error when no replica answered."""
    statuses = _statuses(answers)
    if answers and not statuses:
        raise answers[0]
    found: defaultdict[tuple[str, str], list[PinReport]] = defaultdict(list)
    for status in statuses:
        for model, memory in status.memories.items():
            for pin in memory.pins:
                found[pin.name, model].append(pin)
    cards = [
        PinCard(
            id=name,
            num_tokens=pins[0].num_tokens,
            num_bytes=max(pin.num_bytes for pin in pins),
            num_replicas=len(pins),
            model=model,
        )
        for (name, model), pins in sorted(found.items())
    ]
    return PinList(data=cards)


def _statuses(answers: Sequence[Any]) -> list[ReplicaStatus]:
    return [answer for answer in answers if isinstance(answer, ReplicaStatus)]


def _replica_load(status: ReplicaStatus) -> ReplicaLoad:
    """The figures of the memory's report, and those that only the load report has."""
    load, memory = status.load, status.memory
    named: dict[str, Any] = {"name": status.name, "ready_s": status.ready_s}
    named |= {"prompt_tokens": memory.queried_tokens, "cached_tokens": memory.hit_tokens}
    others = ReplicaLoad.model_fields.keys() - named
    return ReplicaLoad(**named, **{n: getattr(memory if hasattr(memory, n) else load, n) for n in others})
