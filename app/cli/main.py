"""The command `folio`. Exit status: 1 after a failure, 2 after faults that the user can correct, 130 after Ctrl-C."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from folio.app.cli import chat, check, models, pins, plan, pull, serve
from folio.app.cli.bench import command as bench
from folio.app.cli.start import budget, drain, env
from folio.app.cli.text import printable
from folio.app.cli.top import command as top
from folio.app.errors import ConfigError, FolioError

folio = typer.Typer(
    name="folio",
    help="Folio serves language models, with a KV cache that takes memory as requests need it and gives it back.",
    epilog="Begin with:\n\nfolio pull smollm2\n\nfolio serve\n\nand, in another terminal:\n\nfolio chat",
    pretty_exceptions_enable=False,
)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        from folio.app import VERSION

        print(f"folio {VERSION}")
        raise typer.Exit()


@folio.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version, and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    pass


def add(command: Callable[..., Any], examples: str) -> None:
    """Add a command. Its name is the function's, and its help the docstring's; `examples`: command lines."""
    folio.command(command.__name__, epilog=f"Examples:\n\n{examples.strip()}")(command)


# In the order of the help.
add(pull.pull, pull.EXAMPLES)
add(serve.serve, serve.EXAMPLES)
add(chat.chat, chat.EXAMPLES)
add(top.top, top.EXAMPLES)
add(plan.plan, plan.EXAMPLES)
add(bench.bench, bench.EXAMPLES)
add(budget.budget, budget.EXAMPLES)
add(drain.drain, drain.EXAMPLES)
folio.add_typer(models.models)
folio.add_typer(pins.pins)
add(check.check, check.EXAMPLES)
add(env.env, env.EXAMPLES)


def main(arguments: Sequence[str] | None = None, folio: typer.Typer = folio) -> int:
    """Run a command line, by default this process's. Returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # an encoding may lack characters of an answer or a path
    try:
        # With `standalone_mode` typer would print a box of several lines for each mistake.
        return folio(list(arguments) or ["--help"], prog_name="folio", standalone_mode=False) or 0
    except typer.TyperException as error:
        context = getattr(error, "ctx", None)
        path = context.command_path if context else "folio"
        message = " ".join(error.format_message().replace("Value error, ", "").split())
        print(f"{path}: {message} ({path} --help shows all options)", file=sys.stderr)
        return error.exit_code
    except FolioError as error:
        print(printable(str(error)), file=sys.stderr)  # it may quote a server
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:  # before or after the command itself, where typer does not catch it
        return 130
