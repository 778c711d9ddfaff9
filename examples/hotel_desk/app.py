"""Builder of the application, for Serve's config files."""

# Serve reads the type of `args` from the builder's annotation, which must not be a string.
from typing import Any

from pydantic import BaseModel, ConfigDict
from ray.serve import Application

from examples.hotel_desk.desk import Desk
from examples.hotel_desk.register import KeyRegister


class DeskArgs(BaseModel):
    """Args: the name of the Folio application, and the name of its model."""

    model_config = ConfigDict(extra="forbid")

    folio: str = "folio"
    model: str = "builtin"


def build_desk(args: DeskArgs) -> Application:
    """The desk and its register. Folio is a separate application, which others may use as well: Serve allows one
    deployment with `serve.ingress` per application."""
    desk: Any = Desk  # a `Deployment`, although Ray annotates it as the class
    register: Any = KeyRegister
    application: Application = desk.bind(register.bind(), args.folio, args.model)
    return application
