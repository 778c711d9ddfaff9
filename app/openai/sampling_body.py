"""How a request says that tokens are to be chosen."""

from __future__ import annotations

import re
from typing import Any

from app.engine.params import EarlyStopping, SamplingParams, Structure
from app.errors import RequestError
from app.openai.strict import JsonObject, StrictBody, Text

_TOKEN_ID = re.compile(r"[0-9]{1,9}")


class StreamOptions(StrictBody):
    """`include_usage` adds a last chunk with the token counts."""

    include_usage: bool = False


class SamplingBody(StrictBody):
    """How to choose tokens, and when to stop. `None` is the default of each.

    OpenAI's are `n`, `temperature`, `top_p`, `frequency_penalty`, `presence_penalty`, `logit_bias` (token id, as a
    string → what is added), `seed`, `stop`, `stream` and `stream_options`. The others are extensions, and mean what
    they mean in `app.engine.params.SamplingParams`:

    - which tokens: `top_k`, `min_p`, `repetition_penalty`, `bad_words`, `min_tokens`;
    - when to stop: `ignore_eos`, `stop_token_ids`, `include_stop_str`;
    - of several outputs the best: `best_of`, `use_beam_search`, `length_penalty`, `early_stopping`;
    - `prompt_logprobs`: log probabilities of the prompt's tokens, and so many alternatives for each;
    - what the output looks like, at most one of: `guided_json` (a JSON schema), `guided_regex`, `guided_choice`,
      `guided_grammar` (Lark).
    """

    model: str
    n: int | None = None
    best_of: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: list[Text] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str: bool = False
    ignore_eos: bool = False
    min_tokens: int | None = None
    use_beam_search: bool = False
    length_penalty: float | None = None
    early_stopping: EarlyStopping | None = None
    prompt_logprobs: int | None = None
    guided_json: str | JsonObject | None = None
    guided_regex: Text | None = None
    guided_choice: list[Text] | None = None
    guided_grammar: Text | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def num_outputs(self) -> int:
        """Of each prompt."""
        return 1 if self.n is None else self.n

    def params(
        self,
        max_tokens: int | None,
        *,
        logprobs: int | None,
        prompt_logprobs: int | None,
        structure: Structure | None,
    ) -> SamplingParams:
        given: dict[str, Any] = {
            "n": self.n,
            "best_of": self.best_of,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
            "repetition_penalty": self.repetition_penalty,
            "bad_words": self.bad_words,
            "stop": self.stop,
            "stop_token_ids": self.stop_token_ids,
            "min_tokens": self.min_tokens,
            "length_penalty": self.length_penalty,
            "early_stopping": self.early_stopping,
        }
        return SamplingParams(
            max_tokens=max_tokens,
            logit_bias=_by_token_id(self.logit_bias or {}),
            seed=self.seed,
            include_stop_str=self.include_stop_str,
            ignore_eos=self.ignore_eos,
            use_beam_search=self.use_beam_search,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            structure=structure,
            **{name: value for name, value in given.items() if value is not None},
        )


def _by_token_id(logit_bias: dict[str, float]) -> dict[int, float]:
    for key in logit_bias:
        if not _TOKEN_ID.fullmatch(key):
            raise RequestError(f"logit_bias has the key {key!r}; keys are token ids", "logit_bias")
    return {int(key): bias for key, bias in logit_bias.items()}
