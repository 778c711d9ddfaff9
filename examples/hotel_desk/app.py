"""Both ways to put it together, for Serve's config files."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict
from ray.serve import Application

from app.main import AppArgs, build
from examples.hotel_desk.desk import Desk
from examples.hotel_desk.register import KeyRegister


class DeskArgs(BaseModel):
    """Args: the name of the Folio application beside this one, and what it calls its model."""

    model_config = ConfigDict(extra="forbid")

    folio: str = "folio"
    model: str = "builtin"


class TogetherArgs(BaseModel):
    """Args: those of Folio."""

    model_config = ConfigDict(extra="forbid")

    folio: AppArgs
    model: str = "builtin"


def build_desk(args: DeskArgs) -> Application:
    """The desk and its register; Folio is an application of its own, which others may use as well."""
    application: Application = Desk.bind(KeyRegister.bind(), args.folio, args.model)
    return application


def build_together(args: TogetherArgs) -> Application:
    """One application of all deployments. Only the desk is reached over HTTP."""
    application: Application = Desk.bind(KeyRegister.bind(), build(args.folio), args.model)
    return application
