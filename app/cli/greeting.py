"""The text for a terminal when the server is ready."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from ray.serve.schema import ServeDeploySchema

from app.builtin import BUILTIN
from app.checks import FOLIO
from app.cli.address import from_here
from app.config.args import AppArgs


def base_url(config: ServeDeploySchema) -> str:
    """The server's URL from this machine."""
    http = config.http_options
    return f"{'https' if http.ssl_certfile else 'http'}://{from_here(http.host)}:{http.port}"


def greeting(config: ServeDeploySchema, *, ray_dashboard: bool = False) -> str:
    """What to do now, with commands that work in another terminal of the same directory. `ray_dashboard`: it runs."""
    folio = _command("folio")
    paragraphs = [f"\n==> Folio is ready at {base_url(config)}. Ctrl-C stops it. Try, in another terminal:"]
    has_toy = False
    for application in config.applications:
        if application.import_path == FOLIO:
            url = base_url(config) + (application.route_prefix or "").rstrip("/")
            args = AppArgs.model_validate(application.args)
            has_toy |= any(model.engine.model == BUILTIN for model in args.shelf.models)
            paragraphs += [_curl(url, args), f"{folio} chat --url {url}", f"Dashboard: {url}/dashboard"]
    if has_toy:
        paragraphs.append(
            "The built-in model is a toy of 3 million parameters. To serve a real model:\n"
            f"{folio} serve Qwen/Qwen2.5-0.5B-Instruct    (or: make serve MODEL=Qwen/Qwen2.5-0.5B-Instruct)"
        )
    if ray_dashboard and os.environ.get("RAY_AUTH_MODE") == "token":  # set by Ray 2.60 for a cluster that it starts
        paragraphs.append(f"Ray's own commands need a variable: RAY_AUTH_MODE=token {_command('serve')} status")
    return "\n\n".join(paragraphs) + "\n"


def _curl(url: str, args: AppArgs) -> str:
    def words() -> Iterator[str]:
        yield f"curl {url}/v1/chat/completions -H 'Content-Type: application/json'"
        if args.http.api_keys is not None:
            yield '-H "Authorization: Bearer $YOUR_KEY"'
        messages = [{"role": "user", "content": "What is Folio?"}]
        body = {"model": args.shelf.first.name, "temperature": 0, "messages": messages}
        yield f"-d {shlex.quote(json.dumps(body))}"

    return " ".join(words())


def _command(name: str) -> str:
    """How to call a command installed beside this Python: by its name where that finds it, else by its path, relative
    to the working directory if inside it."""
    path = Path(sys.executable).parent / name
    if shutil.which(name) == str(path):
        return name
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
