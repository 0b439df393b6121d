"""The command `cfedavg`: how it begins and how it ends.

`commands` lists the commands; `training`, `paper`, `looking`, `parts` and `federate` hold them, `options`
what their options share, and `voice` who speaks. What a command needs beyond its options is imported when it
runs: `--help` is quick. Nothing slow is imported here either, so that Ctrl-C is handled from the start.
"""

from __future__ import annotations

import signal
import sys

from cfedavg.cli.outlet import outlets
from cfedavg.core.interrupts import handle_stops, leave

__all__ = ["main"]


def main() -> None:
    """Entry point. A command that was asked to stop ends with 128 and the number of the signal."""
    interrupted = 128 + signal.SIGINT  # typer's code too, whatever the signal was
    with handle_stops() as request:
        try:
            with outlets(request.stop):
                from cfedavg.cli.commands import run_command

                code = run_command()
            request.finish()
        except KeyboardInterrupt:
            code = interrupted
    code = request.code if code == interrupted else code
    ranks = sys.modules.get("cfedavg.simulate.engines.ranks")  # not imported for this: it takes long
    if ranks and ranks.Ranks.under_torchrun:
        leave(code)
    sys.exit(code)
