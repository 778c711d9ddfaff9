"""Table of the operations: calls that answer a JSON body. Routes, batches, load shedding, HAProxy and clients read it.

To add one: a row here and in `folio.app.api.routes`, and a method of `Ingress` and of `Folio`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Operation:
    """A call by `POST`.

    Attributes:
        name: of the methods. A body with `stream` also has a method `name_stream`, which yields chunks or events.
        aliases: paths of other servers.
        is_shed: refused by its head while all engine replicas are full.
        is_batchable: batches may have its requests.
        is_repeatable: idempotent: HAProxy sends it again when an ingress dies before it answers.
    """

    name: str
    path: str
    aliases: tuple[str, ...] = ()
    is_shed: bool = False
    is_batchable: bool = False
    is_repeatable: bool = True

    @property
    def paths(self) -> tuple[str, ...]:
        return self.path, *self.aliases


OPERATIONS = (
    Operation("chat", "/v1/chat/completions", is_shed=True, is_batchable=True),
    Operation("generate", "/v1/completions", is_shed=True, is_batchable=True),
    Operation("responses", "/v1/responses", is_shed=True, is_batchable=True),
    Operation("fork", "/v1/forks", is_repeatable=False),
    Operation("messages", "/v1/messages", is_shed=True),
    Operation("count_tokens", "/v1/messages/count_tokens"),
    Operation("embed", "/v1/embeddings", is_shed=True, is_batchable=True),
    Operation("score", "/v1/score", ("/score",), is_shed=True, is_batchable=True),
    Operation("rerank", "/v1/rerank", ("/v2/rerank", "/rerank"), is_shed=True, is_batchable=True),
    Operation("tokenize", "/tokenize"),
    Operation("detokenize", "/detokenize"),
)


def repeatable_ends() -> list[str]:
    """Ends of the paths of all repeatable operations, which are the same below an application's prefix."""
    paths = [path for operation in OPERATIONS if operation.is_repeatable for path in operation.paths]
    return [path for path in paths if not any(path != other and path.endswith(other) for other in paths)]
