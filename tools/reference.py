"""Pages made from the code: docs/reference/, and the tables of docs/operate/gpu-sizing.md. `python -m tools.reference`
writes them."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, cast, get_args

import typer

from folio.app.api.http import build_api
from folio.app.cli.main import folio
from tools.schema import Schema, allowed, cell
from tools.settings import settings_page
from tools.sizes import sizing_page

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "reference"
_NOTE = "<!-- Made from the code by `python -m tools.reference`. -->"


def command_line_page() -> str:
    """Every command with its arguments, options and examples."""
    group: Any = typer.main.get_command(folio)
    lines = ["# Command line", "", _NOTE, "", group.help, "", "| Command | Effect |", "|---|---|"]
    commands = {name: command for name, command in group.commands.items() if not command.hidden}
    lines += [
        f"| [`folio {name}`](#folio-{name}) | {cell(_first(command.help))} |" for name, command in commands.items()
    ]
    lines += [
        "",
        "Every command has `--help`. `folio --install-completion` adds completion to your shell.",
        "The variables `FOLIO_URL` and `FOLIO_API_KEY` stand for `--url` and `--api-key`.",
    ]
    for name, command in commands.items():
        lines += _command(f"folio {name}", command, "##")
    return "\n".join(lines) + "\n"


def _command(name: str, command: Any, heading: str, above: Collection[str] = ()) -> Iterator[str]:
    """A command's part of the page, and its subcommands'. `above`: options of the command that it is part of."""
    yield from ("", f"{heading} {name}", "", _markdown(command.help))
    shown = [parameter for parameter in command.params if not getattr(parameter, "hidden", False)]
    if rows := [_parameter(parameter) for parameter in shown if parameter.name not in above]:
        yield from ("", "| Argument or option | Default | Meaning |", "|---|---|---|", *rows)
    if command.epilog and not above:
        examples = command.epilog.partition("Examples:")[2].strip()
        yield from ("", "<!-- not run: tests/app/cli runs the commands -->", "```bash", examples, "```")
    for subcommand, below in getattr(command, "commands", {}).items():
        yield from _command(f"{name} {subcommand}", below, f"{heading}#", [parameter.name for parameter in shown])


def _first(text: str) -> str:
    return text.split("\n\n")[0]


def _markdown(text: str) -> str:
    return "\n\n".join(" ".join(part.split()) for part in text.replace("\b", "").split("\n\n"))


def _parameter(parameter: Any) -> str:
    names, values = (*parameter.opts, *parameter.secondary_opts), parameter.metavar
    if parameter.param_type_name == "argument":
        names, values = (parameter.name.upper(),), None
    elif values is None:
        values = "|".join(get_args(parameter.type_descriptor.annotation))
    shown = ", ".join(f"`{name} {values}`" if values else f"`{name}`" for name in names)
    default = parameter.default
    if callable(default) or default is None or default is False or default == () or "UNSET" in repr(default):
        default = "required" if parameter.required else ""
    else:
        if isinstance(default, Path) and default.is_relative_to(ROOT):
            default = default.relative_to(ROOT)
        default = f"`{getattr(default, 'value', default)}`"
    return f"| {cell(shown)} | {default} | {cell(parameter.help or '')} |"


def modules_page() -> str:
    """A line for each module: the first sentence of its docstring."""
    lines = ["# Modules", "", _NOTE, "", "[Architecture](../architecture.md) has the layers and the way of a request."]
    for package in ("app", "vmem", "kernels"):
        for folder in sorted((ROOT / package).rglob(".")):
            rows = [f"- `{path.stem}`: {first}" for path in sorted(folder.glob("*.py")) if (first := _purpose(path))]
            lines += ["", f"## {folder.relative_to(ROOT)}", "", *rows] if rows else []
    return "\n".join(lines) + "\n"


def _purpose(path: Path) -> str | None:
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    return " ".join(re.split(r"(?<=\.)\s", docstring, maxsplit=1)[0].split()) or None


def fields_page() -> str:
    """Every route, and the fields of its body, from the OpenAPI document."""
    document = build_api(cast(Any, None)).openapi()
    lines = [
        "# HTTP fields",
        "",
        _NOTE,
        "",
        "Every route, and every field of its body, as in `/openapi.json`. Explanations are in [HTTP API](http-api.md).",
    ]
    bodies: dict[str, str] = {}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            lines += ["", f"## {method.upper()} {path}", "", cell(operation["description"])]
            body = operation.get("requestBody")
            if body is None:
                continue
            if (form := body["content"].get("multipart/form-data")) is not None:
                lines += ["", "The body is a form (`multipart/form-data`).", "", *_fields(form["schema"])]
                continue
            name = body["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
            if name in bodies:
                lines += ["", f"The body is that of {bodies[name]}."]
                continue
            bodies[name] = f"`{method.upper()} {path}`"
            lines += ["", *_fields(document["components"]["schemas"][name])]
    return "\n".join(lines) + "\n"


def _fields(schema: Schema) -> Iterator[str]:
    yield "| Field | Allowed | Meaning |"
    yield "|---|---|---|"
    for name, field in schema["properties"].items():
        values = allowed(field)
        if values == "null":  # refused unless null
            continue
        values = re.sub(r" or null$", "", values)
        needed = " (required)" if name in schema.get("required", ()) else ""
        yield f"| `{name}`{needed} | {cell(values)} | {cell(field.get('description', ''))} |"


PAGES: dict[str, Callable[[], str]] = {
    "settings.md": settings_page,
    "cli.md": command_line_page,
    "modules.md": modules_page,
    "http-fields.md": fields_page,
    "../operate/gpu-sizing.md": sizing_page,
}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page(), encoding="utf-8")
