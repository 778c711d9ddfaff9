"""The frame of the command line: help, mistakes, the end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from folio.app.cli import main as frame
from folio.app.errors import ConfigError, UnavailableError

ROOT = Path(__file__).parents[3]
COMMANDS: dict[str, Any] = typer.main.get_command(frame.folio).commands  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_and_examples(name: str) -> None:
    shown = CliRunner().invoke(frame.folio, [name, "--help"])
    assert shown.exit_code == 0
    assert f"folio {name}" in shown.output.partition("Examples:")[2]
    for parameter in COMMANDS[name].params:
        assert parameter.help or parameter.hidden, f"{name} does not say what {parameter.name} is for"


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert frame.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("folio 0.")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["chek"], "folio: No such command 'chek'. Did you mean 'check'? (folio --help shows all options)\n"),
        (["check"], "folio check: Missing argument 'file'. (folio check --help shows all options)\n"),
        (["check", "a", "--all"], "folio check: No such option: --all (folio check --help shows all options)\n"),
        (["check", "no.yaml"], "no.yaml: cannot be read: No such file or directory\n"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert frame.main(arguments) == 2
    assert capsys.readouterr() == ("", line)


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (ConfigError("port is 0"), 2, "port is 0\n"),
        (UnavailableError("no server at http://127.0.0.1:8000"), 1, "no server at http://127.0.0.1:8000\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_the_end_of_a_command(capsys: pytest.CaptureFixture[str], error: BaseException, status: int, line: str) -> None:
    def raises() -> None:
        raise error

    single = typer.Typer()
    single.callback()(lambda: None)
    single.command("ends")(raises)
    assert frame.main(["ends"], single) == status
    assert capsys.readouterr() == ("", line)


@pytest.mark.processes
def test_help_needs_nothing_heavy() -> None:
    code = (
        "import sys; from folio.app.cli.main import main; main(['--help']); "
        "print(sorted({'ray', 'torch', 'transformers', 'fastapi', 'aiohttp'} & sys.modules.keys()))"
    )
    ran = subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, capture_output=True, text=True)
    assert "Commands" in ran.stdout
    assert ran.stdout.splitlines()[-1] == "[]"
