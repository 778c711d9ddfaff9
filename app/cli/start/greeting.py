"""The text for a terminal when the server is ready."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from ray.serve.schema import ServeDeploySchema

from folio.app.checks import FOLIO
from folio.app.cli.address import from_here
from folio.app.config.args import AppArgs
from folio.app.models.named import BUILTIN, SMOLLM2


def base_url(config: ServeDeploySchema) -> str:
    """The server's URL from this machine."""
    http = config.http_options
    return f"{'https' if http.ssl_certfile else 'http'}://{from_here(http.host)}:{http.port}"


def greeting(config: ServeDeploySchema, ray_address: str, *, ray_dashboard: bool = False) -> str:
    """The next steps, with commands that work in any other terminal.

    Args:
        ray_address: of the cluster.
        ray_dashboard: it runs.
    """
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
            "The built-in model is a toy of 3 million parameters. To serve a real one, a small assistant of 98 MB:\n"
            f"{folio} pull {SMOLLM2} && {folio} serve {SMOLLM2}"
        )
    # The mode is set by Ray 2.60 for a cluster that it starts.
    variables = f"RAY_ADDRESS={ray_address}" + " RAY_AUTH_MODE=token" * (os.environ.get("RAY_AUTH_MODE") == "token")
    paragraphs.append(f"Other Ray apps join with: {variables} python app.py")
    if ray_dashboard:
        paragraphs.append(f"Ray's own commands: {variables} {_command('serve')} status")
    return "\n\n".join(paragraphs) + "\n"


def _curl(url: str, args: AppArgs) -> str:
    def words() -> Iterator[str]:
        yield f"curl {url}/v1/chat/completions -H 'Content-Type: application/json'"
        if args.http.api_keys is not None:
            yield '-H "Authorization: Bearer $YOUR_KEY"'
        first = args.shelf.first
        question = "What is Folio?" if first.engine.model == BUILTIN else "What is the capital of Japan?"
        messages = [{"role": "user", "content": question}]
        body = {"model": first.name, "temperature": 0, "messages": messages}
        yield f"-d {shlex.quote(json.dumps(body))}"

    return " ".join(words())


def _command(name: str) -> str:
    """How to call a command installed beside this Python from any folder and environment."""
    path = Path(sys.executable).parent / name
    return shlex.quote(str(path)) if path.exists() else f"{shlex.quote(sys.executable)} -m folio.app.cli"
