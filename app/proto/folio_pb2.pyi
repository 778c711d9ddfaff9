from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Sampling(_message.Message):
    __slots__ = ("n", "best_of", "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias", "bad_words", "seed", "stop", "stop_token_ids", "include_stop_str", "ignore_eos", "min_tokens", "use_beam_search", "length_penalty", "early_stopping", "prompt_logprobs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    N_FIELD_NUMBER: _ClassVar[int]
    BEST_OF_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_STR_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    USE_BEAM_SEARCH_FIELD_NUMBER: _ClassVar[int]
    LENGTH_PENALTY_FIELD_NUMBER: _ClassVar[int]
    EARLY_STOPPING_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    GUIDED_JSON_FIELD_NUMBER: _ClassVar[int]
    GUIDED_REGEX_FIELD_NUMBER: _ClassVar[int]
    GUIDED_CHOICE_FIELD_NUMBER: _ClassVar[int]
    GUIDED_GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    n: int
    best_of: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    bad_words: _containers.RepeatedScalarFieldContainer[str]
    seed: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    include_stop_str: bool
    ignore_eos: bool
    min_tokens: int
    use_beam_search: bool
    length_penalty: float
    early_stopping: str
    prompt_logprobs: int
    guided_json: str
    guided_regex: str
    guided_choice: _containers.RepeatedScalarFieldContainer[str]
    guided_grammar: str
    def __init__(self, n: _Optional[int] = ..., best_of: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., bad_words: _Optional[_Iterable[str]] = ..., seed: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., include_stop_str: _Optional[bool] = ..., ignore_eos: _Optional[bool] = ..., min_tokens: _Optional[int] = ..., use_beam_search: _Optional[bool] = ..., length_penalty: _Optional[float] = ..., early_stopping: _Optional[str] = ..., prompt_logprobs: _Optional[int] = ..., guided_json: _Optional[str] = ..., guided_regex: _Optional[str] = ..., guided_choice: _Optional[_Iterable[str]] = ..., guided_grammar: _Optional[str] = ...) -> None: ...

class Scheduling(_message.Message):
    __slots__ = ("priority", "cache_salt", "pin", "tenant", "timeout_s", "user", "session", "cache_ttl_s")
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    CACHE_TTL_S_FIELD_NUMBER: _ClassVar[int]
    priority: int
    cache_salt: str
    pin: str
    tenant: str
    timeout_s: float
    user: str
    session: str
    cache_ttl_s: float
    def __init__(self, priority: _Optional[int] = ..., cache_salt: _Optional[str] = ..., pin: _Optional[str] = ..., tenant: _Optional[str] = ..., timeout_s: _Optional[float] = ..., user: _Optional[str] = ..., session: _Optional[str] = ..., cache_ttl_s: _Optional[float] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Texts(_message.Message):
    __slots__ = ("texts",)
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, texts: _Optional[_Iterable[str]] = ...) -> None: ...

class TokenIdLists(_message.Message):
    __slots__ = ("lists",)
    LISTS_FIELD_NUMBER: _ClassVar[int]
    lists: _containers.RepeatedCompositeFieldContainer[TokenIds]
    def __init__(self, lists: _Optional[_Iterable[_Union[TokenIds, _Mapping]]] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("model", "text", "token_ids", "texts", "token_id_lists", "max_tokens", "unlimited", "echo", "logprobs", "include_usage", "sampling", "scheduling")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_LISTS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    UNLIMITED_FIELD_NUMBER: _ClassVar[int]
    ECHO_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_USAGE_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SCHEDULING_FIELD_NUMBER: _ClassVar[int]
    model: str
    text: str
    token_ids: TokenIds
    texts: Texts
    token_id_lists: TokenIdLists
    max_tokens: int
    unlimited: bool
    echo: bool
    logprobs: int
    include_usage: bool
    sampling: Sampling
    scheduling: Scheduling
    def __init__(self, model: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., texts: _Optional[_Union[Texts, _Mapping]] = ..., token_id_lists: _Optional[_Union[TokenIdLists, _Mapping]] = ..., max_tokens: _Optional[int] = ..., unlimited: _Optional[bool] = ..., echo: _Optional[bool] = ..., logprobs: _Optional[int] = ..., include_usage: _Optional[bool] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., scheduling: _Optional[_Union[Scheduling, _Mapping]] = ...) -> None: ...

class FunctionCall(_message.Message):
    __slots__ = ("name", "arguments")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    arguments: str
    def __init__(self, name: _Optional[str] = ..., arguments: _Optional[str] = ...) -> None: ...

class ToolCall(_message.Message):
    __slots__ = ("id", "type", "function")
    ID_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    FUNCTION_FIELD_NUMBER: _ClassVar[int]
    id: str
    type: str
    function: FunctionCall
    def __init__(self, id: _Optional[str] = ..., type: _Optional[str] = ..., function: _Optional[_Union[FunctionCall, _Mapping]] = ...) -> None: ...

class Message(_message.Message):
    __slots__ = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_ID_FIELD_NUMBER: _ClassVar[int]
    REASONING_CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    name: str
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCall]
    tool_call_id: str
    reasoning_content: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., name: _Optional[str] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCall, _Mapping]]] = ..., tool_call_id: _Optional[str] = ..., reasoning_content: _Optional[str] = ...) -> None: ...

class Tool(_message.Message):
    __slots__ = ("name", "description", "parameters", "strict")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    STRICT_FIELD_NUMBER: _ClassVar[int]
    name: str
    description: str
    parameters: str
    strict: bool
    def __init__(self, name: _Optional[str] = ..., description: _Optional[str] = ..., parameters: _Optional[str] = ..., strict: _Optional[bool] = ...) -> None: ...

class ResponseFormat(_message.Message):
    __slots__ = ("type", "name", "schema")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    type: str
    name: str
    schema: str
    def __init__(self, type: _Optional[str] = ..., name: _Optional[str] = ..., schema: _Optional[str] = ...) -> None: ...

class ChatRequest(_message.Message):
    __slots__ = ("model", "messages", "max_tokens", "max_completion_tokens", "logprobs", "top_logprobs", "tools", "tool_choice", "called_tool", "parallel_tool_calls", "response_format", "include_usage", "sampling", "scheduling", "reasoning_effort", "thinking_token_budget")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CHOICE_FIELD_NUMBER: _ClassVar[int]
    CALLED_TOOL_FIELD_NUMBER: _ClassVar[int]
    PARALLEL_TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FORMAT_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_USAGE_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SCHEDULING_FIELD_NUMBER: _ClassVar[int]
    REASONING_EFFORT_FIELD_NUMBER: _ClassVar[int]
    THINKING_TOKEN_BUDGET_FIELD_NUMBER: _ClassVar[int]
    model: str
    messages: _containers.RepeatedCompositeFieldContainer[Message]
    max_tokens: int
    max_completion_tokens: int
    logprobs: bool
    top_logprobs: int
    tools: _containers.RepeatedCompositeFieldContainer[Tool]
    tool_choice: str
    called_tool: str
    parallel_tool_calls: bool
    response_format: ResponseFormat
    include_usage: bool
    sampling: Sampling
    scheduling: Scheduling
    reasoning_effort: str
    thinking_token_budget: int
    def __init__(self, model: _Optional[str] = ..., messages: _Optional[_Iterable[_Union[Message, _Mapping]]] = ..., max_tokens: _Optional[int] = ..., max_completion_tokens: _Optional[int] = ..., logprobs: _Optional[bool] = ..., top_logprobs: _Optional[int] = ..., tools: _Optional[_Iterable[_Union[Tool, _Mapping]]] = ..., tool_choice: _Optional[str] = ..., called_tool: _Optional[str] = ..., parallel_tool_calls: _Optional[bool] = ..., response_format: _Optional[_Union[ResponseFormat, _Mapping]] = ..., include_usage: _Optional[bool] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., scheduling: _Optional[_Union[Scheduling, _Mapping]] = ..., reasoning_effort: _Optional[str] = ..., thinking_token_budget: _Optional[int] = ...) -> None: ...

class PromptTokensDetails(_message.Message):
    __slots__ = ("cached_tokens",)
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    cached_tokens: int
    def __init__(self, cached_tokens: _Optional[int] = ...) -> None: ...

class CompletionTokensDetails(_message.Message):
    __slots__ = ("reasoning_tokens",)
    REASONING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    reasoning_tokens: int
    def __init__(self, reasoning_tokens: _Optional[int] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details", "completion_tokens_details")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_DETAILS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_DETAILS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails
    def __init__(self, prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., total_tokens: _Optional[int] = ..., prompt_tokens_details: _Optional[_Union[PromptTokensDetails, _Mapping]] = ..., completion_tokens_details: _Optional[_Union[CompletionTokensDetails, _Mapping]] = ...) -> None: ...

class TopLogprob(_message.Message):
    __slots__ = ("token", "logprob", "bytes")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    token: str
    logprob: float
    bytes: bytes
    def __init__(self, token: _Optional[str] = ..., logprob: _Optional[float] = ..., bytes: _Optional[bytes] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token", "logprob", "bytes", "top_logprobs", "text_offset")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TEXT_OFFSET_FIELD_NUMBER: _ClassVar[int]
    token: str
    logprob: float
    bytes: bytes
    top_logprobs: _containers.RepeatedCompositeFieldContainer[TopLogprob]
    text_offset: int
    def __init__(self, token: _Optional[str] = ..., logprob: _Optional[float] = ..., bytes: _Optional[bytes] = ..., top_logprobs: _Optional[_Iterable[_Union[TopLogprob, _Mapping]]] = ..., text_offset: _Optional[int] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("content",)
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    content: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    def __init__(self, content: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ...) -> None: ...

class PromptLogprob(_message.Message):
    __slots__ = ("token_id", "logprob", "rank", "decoded_token")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    DECODED_TOKEN_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    rank: int
    decoded_token: str
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., rank: _Optional[int] = ..., decoded_token: _Optional[str] = ...) -> None: ...

class PromptToken(_message.Message):
    __slots__ = ("candidates",)
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    candidates: _containers.RepeatedCompositeFieldContainer[PromptLogprob]
    def __init__(self, candidates: _Optional[_Iterable[_Union[PromptLogprob, _Mapping]]] = ...) -> None: ...

class CompletionChoice(_message.Message):
    __slots__ = ("index", "text", "logprobs", "finish_reason", "stop_string", "stop_token_id", "score", "prompt_logprobs")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    index: int
    text: str
    logprobs: TokenLogprobs
    finish_reason: str
    stop_string: str
    stop_token_id: int
    score: float
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[PromptToken]
    def __init__(self, index: _Optional[int] = ..., text: _Optional[str] = ..., logprobs: _Optional[_Union[TokenLogprobs, _Mapping]] = ..., finish_reason: _Optional[str] = ..., stop_string: _Optional[str] = ..., stop_token_id: _Optional[int] = ..., score: _Optional[float] = ..., prompt_logprobs: _Optional[_Iterable[_Union[PromptToken, _Mapping]]] = ...) -> None: ...

class Completion(_message.Message):
    __slots__ = ("id", "created", "model", "choices", "usage")
    ID_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    id: str
    created: int
    model: str
    choices: _containers.RepeatedCompositeFieldContainer[CompletionChoice]
    usage: Usage
    def __init__(self, id: _Optional[str] = ..., created: _Optional[int] = ..., model: _Optional[str] = ..., choices: _Optional[_Iterable[_Union[CompletionChoice, _Mapping]]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ...) -> None: ...

class AssistantMessage(_message.Message):
    __slots__ = ("role", "content", "tool_calls", "reasoning_content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    REASONING_CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCall]
    reasoning_content: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCall, _Mapping]]] = ..., reasoning_content: _Optional[str] = ...) -> None: ...

class ChatChoice(_message.Message):
    __slots__ = ("index", "message", "logprobs", "finish_reason", "stop_string", "stop_token_id", "score")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    index: int
    message: AssistantMessage
    logprobs: TokenLogprobs
    finish_reason: str
    stop_string: str
    stop_token_id: int
    score: float
    def __init__(self, index: _Optional[int] = ..., message: _Optional[_Union[AssistantMessage, _Mapping]] = ..., logprobs: _Optional[_Union[TokenLogprobs, _Mapping]] = ..., finish_reason: _Optional[str] = ..., stop_string: _Optional[str] = ..., stop_token_id: _Optional[int] = ..., score: _Optional[float] = ...) -> None: ...

class ChatCompletion(_message.Message):
    __slots__ = ("id", "created", "model", "choices", "usage", "prompt_logprobs")
    ID_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    id: str
    created: int
    model: str
    choices: _containers.RepeatedCompositeFieldContainer[ChatChoice]
    usage: Usage
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[PromptToken]
    def __init__(self, id: _Optional[str] = ..., created: _Optional[int] = ..., model: _Optional[str] = ..., choices: _Optional[_Iterable[_Union[ChatChoice, _Mapping]]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[PromptToken, _Mapping]]] = ...) -> None: ...

class ToolCallDelta(_message.Message):
    __slots__ = ("index", "id", "type", "function")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    FUNCTION_FIELD_NUMBER: _ClassVar[int]
    index: int
    id: str
    type: str
    function: FunctionCall
    def __init__(self, index: _Optional[int] = ..., id: _Optional[str] = ..., type: _Optional[str] = ..., function: _Optional[_Union[FunctionCall, _Mapping]] = ...) -> None: ...

class ChatDelta(_message.Message):
    __slots__ = ("role", "content", "tool_calls", "reasoning_content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    REASONING_CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCallDelta]
    reasoning_content: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCallDelta, _Mapping]]] = ..., reasoning_content: _Optional[str] = ...) -> None: ...

class ChatChunkChoice(_message.Message):
    __slots__ = ("index", "delta", "logprobs", "finish_reason", "stop_string", "stop_token_id", "score")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    index: int
    delta: ChatDelta
    logprobs: TokenLogprobs
    finish_reason: str
    stop_string: str
    stop_token_id: int
    score: float
    def __init__(self, index: _Optional[int] = ..., delta: _Optional[_Union[ChatDelta, _Mapping]] = ..., logprobs: _Optional[_Union[TokenLogprobs, _Mapping]] = ..., finish_reason: _Optional[str] = ..., stop_string: _Optional[str] = ..., stop_token_id: _Optional[int] = ..., score: _Optional[float] = ...) -> None: ...

class ChatCompletionChunk(_message.Message):
    __slots__ = ("id", "created", "model", "choices", "usage", "prompt_logprobs")
    ID_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    id: str
    created: int
    model: str
    choices: _containers.RepeatedCompositeFieldContainer[ChatChunkChoice]
    usage: Usage
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[PromptToken]
    def __init__(self, id: _Optional[str] = ..., created: _Optional[int] = ..., model: _Optional[str] = ..., choices: _Optional[_Iterable[_Union[ChatChunkChoice, _Mapping]]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[PromptToken, _Mapping]]] = ...) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("name", "text", "token_ids", "messages", "cache_salt", "tenant", "model")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    name: str
    text: str
    token_ids: TokenIds
    messages: _containers.RepeatedCompositeFieldContainer[Message]
    cache_salt: str
    tenant: str
    model: str
    def __init__(self, name: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., messages: _Optional[_Iterable[_Union[Message, _Mapping]]] = ..., cache_salt: _Optional[str] = ..., tenant: _Optional[str] = ..., model: _Optional[str] = ...) -> None: ...

class PinCard(_message.Message):
    __slots__ = ("id", "num_tokens", "num_bytes", "num_replicas", "model", "num_computed")
    ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_FIELD_NUMBER: _ClassVar[int]
    id: str
    num_tokens: int
    num_bytes: int
    num_replicas: int
    model: str
    num_computed: int
    def __init__(self, id: _Optional[str] = ..., num_tokens: _Optional[int] = ..., num_bytes: _Optional[int] = ..., num_replicas: _Optional[int] = ..., model: _Optional[str] = ..., num_computed: _Optional[int] = ...) -> None: ...

class UnpinRequest(_message.Message):
    __slots__ = ("name", "model")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    name: str
    model: str
    def __init__(self, name: _Optional[str] = ..., model: _Optional[str] = ...) -> None: ...

class PinDeleted(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class PinsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PinList(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: _containers.RepeatedCompositeFieldContainer[PinCard]
    def __init__(self, data: _Optional[_Iterable[_Union[PinCard, _Mapping]]] = ...) -> None: ...

class LoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LoadFigures(_message.Message):
    __slots__ = ("num_running", "num_waiting", "queued_tokens", "free_tokens", "total_tokens", "budget_bytes", "physical_bytes", "active_bytes", "cached_bytes", "pinned_bytes", "swapped_bytes", "prompt_tokens", "cached_tokens")
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FREE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    PHYSICAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CACHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PINNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SWAPPED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    num_waiting: int
    queued_tokens: int
    free_tokens: int
    total_tokens: int
    budget_bytes: int
    physical_bytes: int
    active_bytes: int
    cached_bytes: int
    pinned_bytes: int
    swapped_bytes: int
    prompt_tokens: int
    cached_tokens: int
    def __init__(self, num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., queued_tokens: _Optional[int] = ..., free_tokens: _Optional[int] = ..., total_tokens: _Optional[int] = ..., budget_bytes: _Optional[int] = ..., physical_bytes: _Optional[int] = ..., active_bytes: _Optional[int] = ..., cached_bytes: _Optional[int] = ..., pinned_bytes: _Optional[int] = ..., swapped_bytes: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class ModelLoad(_message.Message):
    __slots__ = ("name", "state", "num_running", "num_waiting", "queued_tokens", "queued_s", "weight_bytes", "kv_bytes", "wake_s", "num_wakes", "num_evictions", "error", "kept_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_S_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    WAKE_S_FIELD_NUMBER: _ClassVar[int]
    NUM_WAKES_FIELD_NUMBER: _ClassVar[int]
    NUM_EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    KEPT_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    state: str
    num_running: int
    num_waiting: int
    queued_tokens: int
    queued_s: float
    weight_bytes: int
    kv_bytes: int
    wake_s: float
    num_wakes: int
    num_evictions: int
    error: str
    kept_bytes: int
    def __init__(self, name: _Optional[str] = ..., state: _Optional[str] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., queued_tokens: _Optional[int] = ..., queued_s: _Optional[float] = ..., weight_bytes: _Optional[int] = ..., kv_bytes: _Optional[int] = ..., wake_s: _Optional[float] = ..., num_wakes: _Optional[int] = ..., num_evictions: _Optional[int] = ..., error: _Optional[str] = ..., kept_bytes: _Optional[int] = ...) -> None: ...

class ReplicaLoad(_message.Message):
    __slots__ = ("num_running", "num_waiting", "queued_tokens", "free_tokens", "total_tokens", "budget_bytes", "physical_bytes", "active_bytes", "cached_bytes", "pinned_bytes", "swapped_bytes", "prompt_tokens", "cached_tokens", "name", "queued_s", "busy_share", "max_num_seqs", "ready_s", "models")
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FREE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    PHYSICAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CACHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PINNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SWAPPED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    QUEUED_S_FIELD_NUMBER: _ClassVar[int]
    BUSY_SHARE_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    READY_S_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    num_waiting: int
    queued_tokens: int
    free_tokens: int
    total_tokens: int
    budget_bytes: int
    physical_bytes: int
    active_bytes: int
    cached_bytes: int
    pinned_bytes: int
    swapped_bytes: int
    prompt_tokens: int
    cached_tokens: int
    name: str
    queued_s: float
    busy_share: float
    max_num_seqs: int
    ready_s: float
    models: _containers.RepeatedCompositeFieldContainer[ModelLoad]
    def __init__(self, num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., queued_tokens: _Optional[int] = ..., free_tokens: _Optional[int] = ..., total_tokens: _Optional[int] = ..., budget_bytes: _Optional[int] = ..., physical_bytes: _Optional[int] = ..., active_bytes: _Optional[int] = ..., cached_bytes: _Optional[int] = ..., pinned_bytes: _Optional[int] = ..., swapped_bytes: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., name: _Optional[str] = ..., queued_s: _Optional[float] = ..., busy_share: _Optional[float] = ..., max_num_seqs: _Optional[int] = ..., ready_s: _Optional[float] = ..., models: _Optional[_Iterable[_Union[ModelLoad, _Mapping]]] = ...) -> None: ...

class LoadReport(_message.Message):
    __slots__ = ("num_replicas", "num_silent", "total", "least_queued_s", "replicas")
    NUM_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    NUM_SILENT_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    LEAST_QUEUED_S_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    num_replicas: int
    num_silent: int
    total: LoadFigures
    least_queued_s: float
    replicas: _containers.RepeatedCompositeFieldContainer[ReplicaLoad]
    def __init__(self, num_replicas: _Optional[int] = ..., num_silent: _Optional[int] = ..., total: _Optional[_Union[LoadFigures, _Mapping]] = ..., least_queued_s: _Optional[float] = ..., replicas: _Optional[_Iterable[_Union[ReplicaLoad, _Mapping]]] = ...) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GroupReport(_message.Message):
    __slots__ = ("block_tokens", "block_bytes", "active_blocks", "free_blocks", "cached_blocks", "parked_blocks", "eager_blocks")
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PARKED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EAGER_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    block_tokens: int
    block_bytes: int
    active_blocks: int
    free_blocks: int
    cached_blocks: int
    parked_blocks: int
    eager_blocks: int
    def __init__(self, block_tokens: _Optional[int] = ..., block_bytes: _Optional[int] = ..., active_blocks: _Optional[int] = ..., free_blocks: _Optional[int] = ..., cached_blocks: _Optional[int] = ..., parked_blocks: _Optional[int] = ..., eager_blocks: _Optional[int] = ...) -> None: ...

class PinReport(_message.Message):
    __slots__ = ("name", "num_tokens", "num_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    num_tokens: int
    num_bytes: int
    def __init__(self, name: _Optional[str] = ..., num_tokens: _Optional[int] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class MemoryReport(_message.Message):
    __slots__ = ("budget_bytes", "budget_revision", "reserved_bytes", "mapped_bytes", "physical_bytes", "anchor_bytes", "active_bytes", "cached_bytes", "pinned_bytes", "swapped_bytes", "swap_budget_bytes", "parked_bytes", "eager_bytes", "num_mappings", "map_calls", "unmap_calls", "alias_calls", "create_calls", "destroy_calls", "exposed_us", "hidden_us", "num_exposed", "num_hidden", "mapper_failures", "adoptions", "adopted_blocks", "demotions", "queried_tokens", "hit_tokens", "evicted_blocks", "cached_prefixes", "copied_blocks", "pins", "groups", "in_flight_us", "kept_bytes")
    BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    BUDGET_REVISION_FIELD_NUMBER: _ClassVar[int]
    RESERVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAPPED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PHYSICAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    ANCHOR_BYTES_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CACHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PINNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SWAPPED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SWAP_BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    PARKED_BYTES_FIELD_NUMBER: _ClassVar[int]
    EAGER_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_MAPPINGS_FIELD_NUMBER: _ClassVar[int]
    MAP_CALLS_FIELD_NUMBER: _ClassVar[int]
    UNMAP_CALLS_FIELD_NUMBER: _ClassVar[int]
    ALIAS_CALLS_FIELD_NUMBER: _ClassVar[int]
    CREATE_CALLS_FIELD_NUMBER: _ClassVar[int]
    DESTROY_CALLS_FIELD_NUMBER: _ClassVar[int]
    EXPOSED_US_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_US_FIELD_NUMBER: _ClassVar[int]
    NUM_EXPOSED_FIELD_NUMBER: _ClassVar[int]
    NUM_HIDDEN_FIELD_NUMBER: _ClassVar[int]
    MAPPER_FAILURES_FIELD_NUMBER: _ClassVar[int]
    ADOPTIONS_FIELD_NUMBER: _ClassVar[int]
    ADOPTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DEMOTIONS_FIELD_NUMBER: _ClassVar[int]
    QUERIED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_PREFIXES_FIELD_NUMBER: _ClassVar[int]
    COPIED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_US_FIELD_NUMBER: _ClassVar[int]
    KEPT_BYTES_FIELD_NUMBER: _ClassVar[int]
    budget_bytes: int
    budget_revision: int
    reserved_bytes: int
    mapped_bytes: int
    physical_bytes: int
    anchor_bytes: int
    active_bytes: int
    cached_bytes: int
    pinned_bytes: int
    swapped_bytes: int
    swap_budget_bytes: int
    parked_bytes: int
    eager_bytes: int
    num_mappings: int
    map_calls: int
    unmap_calls: int
    alias_calls: int
    create_calls: int
    destroy_calls: int
    exposed_us: float
    hidden_us: float
    num_exposed: int
    num_hidden: int
    mapper_failures: int
    adoptions: int
    adopted_blocks: int
    demotions: int
    queried_tokens: int
    hit_tokens: int
    evicted_blocks: int
    cached_prefixes: int
    copied_blocks: int
    pins: _containers.RepeatedCompositeFieldContainer[PinReport]
    groups: _containers.RepeatedCompositeFieldContainer[GroupReport]
    in_flight_us: float
    kept_bytes: int
    def __init__(self, budget_bytes: _Optional[int] = ..., budget_revision: _Optional[int] = ..., reserved_bytes: _Optional[int] = ..., mapped_bytes: _Optional[int] = ..., physical_bytes: _Optional[int] = ..., anchor_bytes: _Optional[int] = ..., active_bytes: _Optional[int] = ..., cached_bytes: _Optional[int] = ..., pinned_bytes: _Optional[int] = ..., swapped_bytes: _Optional[int] = ..., swap_budget_bytes: _Optional[int] = ..., parked_bytes: _Optional[int] = ..., eager_bytes: _Optional[int] = ..., num_mappings: _Optional[int] = ..., map_calls: _Optional[int] = ..., unmap_calls: _Optional[int] = ..., alias_calls: _Optional[int] = ..., create_calls: _Optional[int] = ..., destroy_calls: _Optional[int] = ..., exposed_us: _Optional[float] = ..., hidden_us: _Optional[float] = ..., num_exposed: _Optional[int] = ..., num_hidden: _Optional[int] = ..., mapper_failures: _Optional[int] = ..., adoptions: _Optional[int] = ..., adopted_blocks: _Optional[int] = ..., demotions: _Optional[int] = ..., queried_tokens: _Optional[int] = ..., hit_tokens: _Optional[int] = ..., evicted_blocks: _Optional[int] = ..., cached_prefixes: _Optional[int] = ..., copied_blocks: _Optional[int] = ..., pins: _Optional[_Iterable[_Union[PinReport, _Mapping]]] = ..., groups: _Optional[_Iterable[_Union[GroupReport, _Mapping]]] = ..., in_flight_us: _Optional[float] = ..., kept_bytes: _Optional[int] = ...) -> None: ...

class MemoryReports(_message.Message):
    __slots__ = ("replicas",)
    class ReplicasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: MemoryReport
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[MemoryReport, _Mapping]] = ...) -> None: ...
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    replicas: _containers.MessageMap[str, MemoryReport]
    def __init__(self, replicas: _Optional[_Mapping[str, MemoryReport]] = ...) -> None: ...

class ReadyRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReadyReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
