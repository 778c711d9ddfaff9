"""The application, for Serve's config files."""

# Serve looks at the builder's annotation for what `args` are: it must not be a string.
from typing import Any

from pydantic import BaseModel, ConfigDict
from ray.serve import Application

from examples.hotel_desk.desk import Desk
from examples.hotel_desk.register import KeyRegister


class DeskArgs(BaseModel):
    """Args: the name of the Folio application beside this one, and what it calls its model."""

    model_config = ConfigDict(extra="forbid")

    folio: str = "folio"
    model: str = "builtin"


def build_desk(args: DeskArgs) -> Application:
    """The desk and its register. Folio is an application of its own, which others may use as well: Serve allows one
    deployment with `serve.ingress` in each."""
    desk: Any = Desk  # a `Deployment`, although Ray's annotations say that it is still the class
    register: Any = KeyRegister
    application: Application = desk.bind(register.bind(), args.folio, args.model)
    return application
