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
NUM_TOKENS, NUM_SEEDS = 300, 16
PROMPT = "What is Folio?"
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
        sampled: (seed, text) of answers whose right text is not known yet.
        streams: (begin, end, longest pause between two events) of the answered ones, s.
        last_answered: times at which the last rightly answered request was sent and answered.
    """

    counts: Counter[str] = field(default_factory=Counter)
    strange: list[str] = field(default_factory=list)
    said: Counter[str] = field(default_factory=Counter)
    wrong: list[tuple[str, str]] = field(default_factory=list)
    sampled: list[tuple[int, str]] = field(default_factory=list)
    streams: list[tuple[float, float, float]] = field(default_factory=list)
    last_answered: tuple[float, float] = (0.0, 0.0)  # (sent, answered)

    def check_sampled(self) -> None:
        """Count sampled answers as wrong that an engine does not give without faults."""
        tokenizer: Any = load_tokenizer("builtin")
        seeds = sorted({seed for seed, _ in self.sampled})
        prompt = tokenizer(PROMPT)["input_ids"]
        with LLM("builtin", dtype=DTYPE, kv_memory_bytes=64 << 20) as llm:
            params = [SamplingParams(seed=seed, max_tokens=NUM_TOKENS, ignore_eos=True) for seed in seeds]
            right = {seed: llm.generate([prompt], [one])[0].text for seed, one in zip(seeds, params, strict=True)}
        for seed, text in self.sampled:
            if text != right[seed]:
                self.counts.update({"wrong": 1, "answered": -1})
                self.strange.append(f"seed {seed}: {text}")

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
    """Sends requests until stopped; every third one is a stream, and every sixth one a long whole answer."""

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
                    ask = {0: self._stream, 1: self._whole, 3: self._stream}.get(i % 6, self._look_up)
                    outcome = ask(client)
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

        body = self._sampled() | {"stream": True, "stream_options": {"include_usage": True}}
        num_tokens, text, begun, longest_s = 0, "", time.monotonic(), 0.0
        latest = begun
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
                    if '"choices":[{' in line:
                        text += json.loads(last)["choices"][0]["text"]
                        now = time.monotonic()
                        longest_s, latest = max(longest_s, now - latest), now
                    if '"usage":{' in line:
                        num_tokens = json.loads(last)["usage"]["completion_tokens"]
            except (httpx.ReadError, httpx.RemoteProtocolError):
                return "cut off"
        if last == "[DONE]" and num_tokens == NUM_TOKENS:
            self._outcomes.streams.append((begun, latest, longest_s))
            self._outcomes.sampled.append((body["seed"], text))
            return "answered"
        self._outcomes.strange.append(f"a stream ended with {last!r} after {num_tokens} tokens")
        return "lost" if last != "[DONE]" else "wrong"

    def _whole(self, client: httpx.Client) -> str:
        """`NUM_TOKENS` tokens in one answer."""
        body = self._sampled()
        response = client.post(f"{self._url}/v1/completions", json=body)
        if response.status_code != 200:
            return self._judge(response.status_code, response.text)
        answer = response.json()
        if answer["usage"]["completion_tokens"] != NUM_TOKENS:
            self._outcomes.strange.append(str(answer["usage"]))
            return "wrong"
        self._outcomes.sampled.append((body["seed"], answer["choices"][0]["text"]))
        return "answered"

    def _sampled(self) -> dict[str, Any]:
        """The body of a request for `NUM_TOKENS` sampled tokens."""
        seed = self._random.randrange(NUM_SEEDS)
        return {"model": "builtin", "prompt": PROMPT, "max_tokens": NUM_TOKENS, "ignore_eos": True, "seed": seed}

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
