"""The commands in the order of `cfedavg --help`, and the exit codes of their errors."""

from __future__ import annotations

import typer

from cfedavg.cli.console import fail, first_rank_only
from cfedavg.cli.inspect import data, inspect_message, parts
from cfedavg.cli.sweep import sweep
from cfedavg.cli.training import federation, report, run
from cfedavg.core.errors import InputError

# The base class of click's errors. Versions of typer differ in the module that holds click.
USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[2]

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Communication-efficient federated learning: local steps, error feedback, about 1% of the bytes.",
)


def version() -> None:
    """Print the version."""
    from cfedavg import __version__

    typer.echo(__version__)


for command in (run, sweep, report, data, parts):
    app.command()(command)
app.command("inspect")(inspect_message)
app.command()(version)
app.add_typer(federation, name="federate")


def run_command() -> int:
    """Run the typed command and return its exit code; on bad input, print one sentence and return 2."""
    try:
        with first_rank_only():
            return app(standalone_mode=False) or 0
    except InputError as error:
        return fail(str(error))
    except USAGE_ERROR as error:
        message: str = error.format_message()  # type: ignore[attr-defined]
        return fail(message) if message else 2  # without arguments, the help is shown and says enough
    except typer.Abort:
        raise KeyboardInterrupt from None
