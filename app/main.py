"""The application: `serve run serve_config.yaml` calls `build` with the YAML's `args`."""

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict
from ray import serve
from ray.serve import Application

from app.config import EngineConfig
from app.serving.ingress import Ingress
from app.serving.replica import EngineReplica


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
    engine: Any = serve.deployment(EngineReplica)
    ingress: Any = serve.deployment(Ingress)
    application: Application = ingress.bind(args.engine.model, model_name, engine.bind(args.engine))
    return application
