"""A gRPC server in front of an HTTP API, as Serve's is in front of an ingress."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from starlette.types import ASGIApp

from folio.app.proto.folio_pb2_grpc import add_FolioServicer_to_server
from folio.app.serving.grpc_ingress import GrpcIngress

MAX_MESSAGE_BYTES = 1 << 20


@contextmanager
def grpc_listening(api: ASGIApp) -> Iterator[str]:
    """On a port of this machine, in a thread; gives the URL."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def started() -> tuple[Any, int]:
        server = grpc.aio.server(options=[("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)])
        ingress = GrpcIngress()
        ingress._api = api
        add_FolioServicer_to_server(ingress, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        return server, port

    server, port = asyncio.run_coroutine_threadsafe(started(), loop).result(60)
    yield f"grpc://127.0.0.1:{port}"
    asyncio.run_coroutine_threadsafe(server.stop(None), loop).result(60)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
