"""The application, for Serve's config files."""

from __future__ import annotations

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
    application: Application = Desk.bind(KeyRegister.bind(), args.folio, args.model)
    return application
