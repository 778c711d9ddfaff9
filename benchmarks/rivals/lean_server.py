"""Server of one model without Ray, as quick to start as it can be: for the rivals of `benchmarks.shelf`.

An engine behind aiohttp in one process, with what the load generator asks for of the OpenAI API: streamed completions
of token ids. The process is forked from one that has imported everything, so that a start is reading the model: about
as long as a compiled server takes. There is no tokenizer: the text of a token is its number.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from typing import Any

from folio.app.cli.start.env import prepared_environment
from folio.app.config.engine import EngineConfig
from folio.app.errors import FolioError, OverloadedError

START_TIMEOUT_S = 120.0
_ARCHITECTURES = ("llama", "gpt_neox", "gemma3", "qwen2", "qwen3")
PRELOADED = (
    "aiohttp.web",
    "folio.app.engine.async_engine",
    "folio.app.models.weights.arena",
    "benchmarks.rivals.lean_server",
    *(f"transformers.models.{name}.modeling_{name}" for name in _ARCHITECTURES),
)


class LeanServer:
    """A process that serves one model; it takes requests when it is made. It is made by `LeanServers.start`.

    Attributes:
        url: without `/v1`.
        start_s: from the start to the first possible request.
    """

    def __init__(self, process: multiprocessing.process.BaseProcess, port: int, start_s: float) -> None:
        self.url, self.start_s = f"http://127.0.0.1:{port}", start_s
        self._process = process

    async def memory_bytes(self) -> tuple[int, int]:
        """Memory of the weights, as the kernels read them, and of the KV cache; 0 if it has been killed."""
        import aiohttp

        try:
            async with aiohttp.ClientSession() as session, session.get(f"{self.url}/memory") as response:
                answer = await response.json()
        except aiohttp.ClientError:
            return 0, 0
        return answer["weight_bytes"], answer["kv_bytes"]

    def kill(self) -> None:
        """End the process; returns when its memory is free."""
        self._process.kill()
        self._process.join()
        self._process.close()


class LeanServers:
    """Starts `LeanServer`s, forked from one prepared process."""

    def __init__(self, context: ForkServerContext) -> None:
        self._context = context

    def start(self, name: str, settings: Mapping[str, Any]) -> LeanServer:
        """Args: settings: of `EngineConfig`. Raises `RuntimeError` if the server does not start."""
        began = time.perf_counter()
        ours, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_run, args=(theirs, name, dict(settings)), daemon=True)
        process.start()
        theirs.close()
        try:
            if not ours.poll(START_TIMEOUT_S):
                raise RuntimeError(f"the server of {name} has not started within {START_TIMEOUT_S} s")
            port: int = ours.recv()
        except (EOFError, RuntimeError):
            process.kill()
            process.join()
            raise RuntimeError(f"the server of {name} does not start") from None
        finally:
            ours.close()
        return LeanServer(process, port, time.perf_counter() - began)


@contextmanager
def lean_servers() -> Iterator[LeanServers]:
    """A prepared process with the environment of Folio's own servers; it ends with this one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    with prepared_environment():
        context.Process(target=_nothing, daemon=True).start()  # starts the prepared process
        yield LeanServers(context)


def _nothing() -> None:
    """The first child's task."""


def _run(ready: Connection, name: str, settings: dict[str, Any]) -> None:
    asyncio.run(_serve(ready, name, settings))


async def _serve(ready: Connection, name: str, settings: dict[str, Any]) -> None:
    from aiohttp import web
    from transformers.utils.logging import disable_progress_bar

    from folio.app.engine import AsyncEngine
    from folio.app.engine.memory.size import ModelSize

    disable_progress_bar()
    engine = AsyncEngine(EngineConfig(**settings, skip_tokenizer_init=True))

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": name}]})

    weight_bytes = ModelSize(engine.driver.engine.config).weight_bytes

    async def memory(_: web.Request) -> web.Response:
        return web.json_response({"weight_bytes": weight_bytes, "kv_bytes": engine.report().physical_bytes})

    app = web.Application()
    completions = web.post("/v1/completions", _Completions(engine))
    app.add_routes([web.get("/v1/models", models), web.get("/memory", memory), completions])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    ready.send(runner.addresses[0][1])
    ready.close()
    await asyncio.Event().wait()  # until it is killed


class _Completions:
    """Handler of streamed completions."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    async def __call__(self, request: Any) -> Any:
        from aiohttp import web

        from folio.app.engine import SamplingParams

        body = await request.json()
        params = SamplingParams(max_tokens=body["max_tokens"], temperature=0.0, ignore_eos=True)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        num_tokens = 0
        try:
            async for deltas in self._engine.generate(body["prompt"], params):
                if not num_tokens:
                    await response.prepare(request)
                tokens = [token for delta in deltas for token in delta.token_ids]
                num_tokens += len(tokens)
                await response.write(_event({"choices": [{"index": 0, "text": " ".join(map(str, tokens))}]}))
        except OverloadedError as error:
            return web.json_response({"error": str(error)}, status=429)
        except FolioError as error:
            if not num_tokens:
                return web.json_response({"error": str(error)}, status=500)
            await response.write(_event({"error": str(error)}))
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": num_tokens}
        await response.write(_event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n")
        await response.write_eof()
        return response


def _event(content: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"
