"""The command `cfedavg`: its commands, each with its options, and how it ends.

`training`, `paper`, `looking` and `federate` hold the commands, `options` what their options share, and
`voice` who speaks. What a command needs beyond its options is imported when it runs: `--help` is quick.
"""

from __future__ import annotations

import signal
import sys

import typer

from cfedavg.cli.federate import federation
from cfedavg.cli.looking import compressors, data, inspect_message
from cfedavg.cli.paper import claims, reproduce
from cfedavg.cli.training import report, run, sweep
from cfedavg.cli.voice import fail, first_rank_only
from cfedavg.errors import InputError

__all__ = ["app", "main"]

# The base class of click's errors, wherever this version of typer has its click.
USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[2]

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Communication-efficient federated learning: local steps, error feedback, about 1% sent.",
)


def version() -> None:
    """Print the version."""
    from cfedavg import __version__

    typer.echo(__version__)


# In the order of `--help`.
for command in (run, sweep, report, reproduce, claims, data, compressors):
    app.command()(command)
app.command("inspect")(inspect_message)
app.command()(version)
app.add_typer(federation, name="federate")


def main() -> None:
    """Entry point: bad input is one sentence and exit code 2."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a polite kill checkpoints like Ctrl-C
    if "" not in sys.path:
        sys.path.insert(0, "")  # so that module:name finds a module in the current folder
    try:
        with first_rank_only():
            code = app(standalone_mode=False)
    except InputError as error:
        code = fail(str(error))
    except USAGE_ERROR as error:
        code = fail(error.format_message())  # type: ignore[attr-defined]
    except (KeyboardInterrupt, typer.Abort):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # on the way out, another one changes nothing
        code = 130
    sys.exit(code)
