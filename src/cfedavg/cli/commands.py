"""The commands in the order of `cfedavg --help`, and the exit codes of their errors."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from cfedavg.cli.console import fail, first_rank_only, list_options
from cfedavg.cli.inspect import data, inspect_message, parts
from cfedavg.cli.sweep import sweep
from cfedavg.cli.training import federation, report, run
from cfedavg.cli.tune import tune
from cfedavg.core.config import RETIRED
from cfedavg.core.errors import InputError
from cfedavg.core.names import find_name

# The base class of click's errors. Versions of typer differ in the module that holds click.
USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[2]

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from cfedavg import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def start(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    """Communication-efficient federated learning: local steps, error feedback, about 1% of the bytes."""


for command in (run, sweep, tune, report, data, parts):
    app.command()(command)
app.command("inspect")(inspect_message)
app.add_typer(federation, name="federate")


def _describe(error: Any) -> str:
    """Return the sentence of click's error, and what to write instead."""
    message, context = str(error.format_message()), getattr(error, "ctx", None)
    if not context:
        return message
    if type(error).__name__ == "NoSuchOption":
        return f"no such option: {error.option_name}; {_advise_option(error.option_name, context)}"
    if message.startswith("No such command"):
        name = message.split("'")[1]
        hint = "cfedavg --version" if name == "version" else "one of " + ", ".join(context.command.commands)
        return f"no such command: {name}; write {hint}"
    if message.startswith("Got unexpected extra argument"):
        words = message.partition("(")[2].rstrip(")")
        return f"unexpected argument: {words}; `{_typed(context)} --help` lists the options"
    return message


def _typed(context: Any) -> str:
    """Return the command of a context as a user types it, such as `cfedavg federate up`."""
    return f"{_typed(context.parent)} {context.info_name}" if context.parent else "cfedavg"


def _advise_option(name: str, context: Any) -> str:
    """Return what to write instead of the unknown option `name` of a command."""
    known = [str(parameter.name) for parameter in context.command.params]
    plain = name.lstrip("-").replace("-", "_")
    if plain in list_options() and not find_name(plain, known, near=False):
        return f"`{_typed(context)}` does not have this option of another command"
    if name[1:2] != "-":
        return "options begin with two dashes, as in --rounds 5"
    if found := find_name(RETIRED.get(plain, name), known):
        return f"write `{found}`"
    return f"`{_typed(context)} --help` lists the options"


def run_command() -> int:
    """Run the typed command and return its exit code; on bad input, print one sentence and return 2."""
    try:
        with first_rank_only():
            return app(standalone_mode=False) or 0
    except InputError as error:
        return fail(str(error))
    except USAGE_ERROR as error:
        message = _describe(error)
        return fail(message) if message else 2  # without arguments, the help is shown and says enough
    except typer.Abort:
        raise KeyboardInterrupt from None
