"""Minimal OpenAI endpoint for OpenVINO GenAI, which is a library without a server.

    python -m benchmarks.openvino_server FOLDER [--port 8002] [--precision bf16]

in an environment with openvino-genai, fastapi and uvicorn, FOLDER being a checkpoint that
`optimum-cli export openvino --model CHECKPOINT --weight-format fp16 FOLDER` made. Knows nothing of Folio.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from fastapi import FastAPI


class Batcher:
    """One thread steps a continuous batching pipeline; requests join at any time."""

    def __init__(self, folder: str, cache_gib: int, precision: str) -> None:
        self._genai: Any = importlib.import_module("openvino_genai")
        self._openvino: Any = importlib.import_module("openvino")
        scheduler = self._genai.SchedulerConfig()
        scheduler.cache_size = cache_gib
        scheduler.max_num_batched_tokens = 1024
        scheduler.enable_prefix_caching = True
        settings = {"INFERENCE_PRECISION_HINT": precision, "KV_CACHE_PRECISION": precision}
        self._pipeline = self._genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", settings)
        self._changed = threading.Condition()
        self._handles: dict[int, tuple[Any, asyncio.AbstractEventLoop, asyncio.Future[int]]] = {}
        self._next = 0
        threading.Thread(target=self._run, daemon=True).start()

    async def generate(self, prompt: list[int], max_tokens: int) -> int:
        """The generated tokens."""
        config = self._genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = max_tokens, True, False
        config.set_eos_token_id(0)  # required even where it is ignored
        loop = asyncio.get_running_loop()
        done: asyncio.Future[int] = loop.create_future()
        with self._changed:
            handle = self._pipeline.add_request(
                self._next, self._openvino.Tensor(np.array([prompt], dtype=np.int64)), config
            )
            self._handles[self._next] = (handle, loop, done)
            self._next += 1
            self._changed.notify()
        return await done

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._handles))
            self._pipeline.step()
            with self._changed:
                for number, (handle, loop, done) in list(self._handles.items()):
                    if handle.get_status() == self._genai.GenerationStatus.FINISHED:
                        [output] = handle.read_all()
                        loop.call_soon_threadsafe(done.set_result, len(output.generated_ids))
                        del self._handles[number]


def build(batcher: Batcher) -> FastAPI:
    from fastapi import FastAPI

    api = FastAPI()

    @api.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": "openvino", "object": "model"}]}

    @api.post("/v1/completions")
    async def completions(body: dict[str, Any]) -> dict[str, Any]:
        count = await batcher.generate(body["prompt"], body["max_tokens"])
        return {"choices": [], "usage": {"completion_tokens": count}}

    return api


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--port", type=int, default=8002)
    parser.add_argument("--cache-gib", type=int, default=2)
    parser.add_argument("--precision", default="bf16")
    args = parser.parse_args()
    uvicorn: Any = importlib.import_module("uvicorn")
    uvicorn.run(build(Batcher(args.folder, args.cache_gib, args.precision)), host="127.0.0.1", port=args.port)


if __name__ == "__main__":
    main()
