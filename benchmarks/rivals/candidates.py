"""Baselines for comparison: transformers in the same process, and servers with the OpenAI API.

Each function generates exactly `new_tokens` tokens for each prompt of token ids, and returns output tokens per second.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from folio.app.engine import LLM, SamplingParams

Prompts = Sequence[list[int]]

_TIMEOUT_S = 1200.0
_SETTLED_S = 2.0  # before a measurement: vLLM's threads spin for a second after its last request


def folio_rate(llm: LLM, prompts: Prompts, new_tokens: int, **settings: Any) -> float:
    """Tokens per second of all outputs."""
    params = SamplingParams(max_tokens=new_tokens, ignore_eos=True, **({"temperature": 0.0} | settings))
    start = time.perf_counter()
    completions = llm.generate(list(prompts), params)
    elapsed = time.perf_counter() - start
    outputs = [output for completion in completions for output in completion.outputs]
    assert all(len(output.token_ids) == new_tokens for output in outputs)
    return len(outputs) * new_tokens / elapsed


class TransformersGenerate:
    """`model.generate` on a left-padded batch."""

    name = "transformers_generate"

    def __init__(self, model: Any) -> None:
        self._model = model

    def rate(self, prompts: Prompts, new_tokens: int, **settings: Any) -> float:
        """
        Args:
            settings: more of `generate`'s: samples or beams, and how many are returned.
        """
        longest = max(map(len, prompts))
        device = self._model.device
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device)
        start = time.perf_counter()
        out = self._model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=new_tokens,
            eos_token_id=None,
            pad_token_id=0,
            **({"do_sample": False} | settings),
        ).cpu()  # waits for the device
        elapsed = time.perf_counter() - start
        assert out.shape[1] == longest + new_tokens
        return len(out) * new_tokens / elapsed


class TransformersContinuousBatching:
    """`model.generate_batch`."""

    name = "transformers_cb"

    def __init__(self, model: Any) -> None:
        self._model = model

    def rate(self, prompts: Prompts, new_tokens: int) -> float:
        generation = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
        batching = ContinuousBatchingConfig(page_size=256, num_blocks=64, max_batch_tokens=1024)
        start = time.perf_counter()
        outputs = self._model.generate_batch(
            list(prompts), generation_config=generation, continuous_batching_config=batching, progress_bar=False
        )
        elapsed = time.perf_counter() - start
        assert [len(o.generated_tokens) for o in outputs.values()] == [new_tokens] * len(prompts)
        return len(prompts) * new_tokens / elapsed


@dataclass(frozen=True, slots=True)
class Server:
    """A server with the same checkpoint at `url` (without `/v1`): vLLM, OpenVINO GenAI, llama.cpp. It must take prompts
    of token ids and `ignore_eos`; shorter answers than requested are an error."""

    name: str
    url: str

    def rate(self, prompts: Prompts, new_tokens: int, **settings: Any) -> float:
        """All prompts at once. `settings` are more of the API's, such as `n`."""
        return asyncio.run(self._rate(prompts, new_tokens, settings))

    async def _rate(self, prompts: Prompts, new_tokens: int, settings: dict[str, Any]) -> float:
        import httpx

        async with httpx.AsyncClient(base_url=self.url, timeout=_TIMEOUT_S) as client:
            models = (await client.get("/v1/models")).raise_for_status().json()
            await asyncio.sleep(_SETTLED_S)
            fixed = {"model": models["data"][0]["id"], "max_tokens": new_tokens, "ignore_eos": True, "temperature": 0}
            start = time.perf_counter()
            answers = await asyncio.gather(
                *(client.post("/v1/completions", json=fixed | {"prompt": prompt} | settings) for prompt in prompts)
            )
            elapsed = time.perf_counter() - start
        counts = [answer.raise_for_status().json()["usage"]["completion_tokens"] for answer in answers]
        expected = new_tokens * settings.get("n", 1)
        if counts != [expected] * len(prompts):
            raise RuntimeError(f"{self.name} was asked for {expected} tokens a prompt and gave {sorted(set(counts))}")
        return sum(counts) / elapsed
