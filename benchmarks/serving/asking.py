"""HTTP clients for fault injection: send requests, check the answers."""

from __future__ import annotations

import itertools
import json
import random
import re
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from folio.app.engine import LLM, SamplingParams
from folio.app.engine.model.tokenizer import load_tokenizer

if TYPE_CHECKING:
    import httpx

# Of the engines under test.
DTYPE = "float32"
REQUEST_TIMEOUT_S = 120.0
WAIT_BEFORE_RETRY_S = 0.2
NUM_TOKENS = 300
OUTCOMES = ("answered", "to be sent again", "broken off", "cut off", "no connection", "other error", "wrong", "lost")


@dataclass
class Outcomes:
    """Outcomes of requests.

    "answered"; "to be sent again": refused with a retryable error; "broken off": a stream that ended with a retryable
    error; "cut off": a stream that lost its connection before the end mark; "no connection": refused, or lost before an
    answer began; "other error"; "wrong"; "lost": no end at all.

    Attributes:
        said: messages of retryable errors, without numbers.
        wrong: (question, answer) of wrong answers.
        last_answered: times at which the last rightly answered request was sent and answered.
    """

    counts: Counter[str] = field(default_factory=Counter)
    strange: list[str] = field(default_factory=list)
    said: Counter[str] = field(default_factory=Counter)
    wrong: list[tuple[str, str]] = field(default_factory=list)
    last_answered: tuple[float, float] = (0.0, 0.0)  # (sent, answered)

    def forgive_model(self) -> int:
        """Count wrong answers that the model also gives without faults as answered: about one in a thousand. Returns
        their number."""
        if not self.wrong:
            return 0
        tokenizer: Any = load_tokenizer("builtin")
        prompts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=True
            )["input_ids"]
            for question, _ in self.wrong
        ]
        with LLM("builtin", dtype=DTYPE, kv_memory_bytes=64 << 20) as llm:
            in_peace = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=NUM_TOKENS))
        num_same = sum(one.text == answer for one, (_, answer) in zip(in_peace, self.wrong, strict=True))
        self.counts["wrong"] -= num_same
        self.counts["answered"] += num_same
        return num_same


class Client(threading.Thread):
    """Sends requests until stopped; every third one is a stream."""

    def __init__(self, url: str, seed: int, outcomes: Outcomes, stop: threading.Event) -> None:
        super().__init__(daemon=True)
        self._url = url
        self._random = random.Random(seed)
        self._outcomes = outcomes
        self._stop_asking = stop

    def run(self) -> None:
        import httpx

        with httpx.Client(timeout=REQUEST_TIMEOUT_S) as client:
            for i in itertools.count():
                if self._stop_asking.is_set():
                    return
                sent = time.monotonic()
                try:
                    outcome = self._stream(client) if i % 3 == 0 else self._look_up(client)
                except (httpx.ConnectError, httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError):
                    outcome = "no connection"
                except httpx.HTTPError as error:
                    outcome = "lost"
                    self._outcomes.strange.append(f"{type(error).__name__}: {error}")
                self._outcomes.counts[outcome] += 1
                if outcome != "answered":
                    time.sleep(WAIT_BEFORE_RETRY_S)
                else:
                    self._outcomes.last_answered = max(self._outcomes.last_answered, (sent, time.monotonic()))

    def _look_up(self, client: httpx.Client) -> str:
        """Ask for the key of a room."""
        keys = {room: self._random.randrange(10, 99) for room in self._random.sample(range(100, 999), 8)}
        room = self._random.choice(list(keys))
        question = " ".join(f"The key of room {r} is {key}." for r, key in keys.items())
        content = f"{question} What is the key of room {room}?"
        body = {"model": "builtin", "temperature": 0, "messages": [{"role": "user", "content": content}]}
        response = client.post(f"{self._url}/v1/chat/completions", json=body)
        if response.status_code != 200:
            return self._judge(response.status_code, response.text)
        answer = response.json()["choices"][0]["message"]["content"]
        if answer == f"The key of room {room} is {keys[room]}.":
            return "answered"
        self._outcomes.wrong.append((content, answer))
        self._outcomes.strange.append(f"{content} → {answer}")
        return "wrong"

    def _stream(self, client: httpx.Client) -> str:
        """Stream `NUM_TOKENS` tokens."""
        import httpx

        options = {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        body = {"model": "builtin", "prompt": "What is Folio?", "max_tokens": NUM_TOKENS} | options
        num_tokens = 0
        with client.stream("POST", f"{self._url}/v1/completions", json=body) as response:
            if response.status_code != 200:
                return self._judge(response.status_code, response.read().decode())
            last = ""
            try:
                for line in response.iter_lines():
                    last = line.removeprefix("data: ") if line.startswith("data: ") else last
                    if '"error"' in line:
                        outcome = self._judge(503, last)
                        return "broken off" if outcome == "to be sent again" else outcome
                    if '"usage":{' in line:
                        num_tokens = json.loads(last)["usage"]["completion_tokens"]
            except (httpx.ReadError, httpx.RemoteProtocolError):
                return "cut off"
        if last == "[DONE]" and num_tokens == NUM_TOKENS:
            return "answered"
        self._outcomes.strange.append(f"a stream ended with {last!r} after {num_tokens} tokens")
        return "lost" if last != "[DONE]" else "wrong"

    def _judge(self, status: int, text: str) -> str:
        """The outcome of an error answer: whether it is a proper, retryable error."""
        code, message = None, ""
        with suppress(ValueError, KeyError, TypeError):
            code, message = (json.loads(text)["error"][key] for key in ("code", "message"))
        if (status, code) in ((503, "unavailable"), (429, "overloaded")):
            self._outcomes.said[re.sub(r"[0-9.]+", "…", message)] += 1
            return "to be sent again"
        self._outcomes.strange.append(f"{status}: {text[:300]}")
        return "other error"
