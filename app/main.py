"""The application: `serve run serve_config.yaml` calls `build` with the YAML's `args`."""

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict
from ray import serve
from ray.serve import Application

from app.config import EngineConfig
from app.errors import ConfigError
from app.serving.ingress import Ingress
from app.serving.replica import EngineReplica

# Serve's own default is 5, too few for an engine that batches. The engine's queue is where requests wait.
MAX_ONGOING_REQUESTS = 1000


class AppArgs(BaseModel):
    """`args` of the YAML.

    Attributes:
        engine: the model and how to run it.
        model_name: what clients call it; by default the last part of `engine.model`.
    """

    model_config = ConfigDict(extra="forbid")

    engine: EngineConfig
    model_name: str | None = None


def build(args: AppArgs) -> Application:
    """The deployments of one model: an ingress in front of engine replicas.

    Raises:
        ConfigError: a setting is out of bounds.
    """
    model_name = args.model_name or Path(args.engine.model).name
    if args.engine.skip_tokenizer_init:
        raise ConfigError("skip_tokenizer_init is for scripts; a server needs the tokenizer")
    engine: Any = serve.deployment(max_ongoing_requests=MAX_ONGOING_REQUESTS)(EngineReplica)
    ingress: Any = serve.deployment(max_ongoing_requests=MAX_ONGOING_REQUESTS)(Ingress)
    application: Application = ingress.bind(args.engine.model, model_name, engine.bind(args.engine))
    return application
