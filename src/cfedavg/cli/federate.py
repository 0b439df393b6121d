"""`cfedavg federate up`: train with a real federation of Flower's, all on this machine."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from cfedavg.cli.console import PLAIN, OptionConsole, fail
from cfedavg.cli.options import Out, Resume, Trust, config_from, folder, takes_config
from cfedavg.core.config import fields_where
from cfedavg.core.files import exists
from cfedavg.launch.app.settings import DEFAULT

federation = typer.Typer(
    no_args_is_help=True, help="Train with Flower: real clients, real messages, faults survived."
)


@federation.command("up")
@takes_config(fields_where(lambda known: known.federated), DEFAULT)
def federate_up(
    given: dict[str, Any],
    nodes: Annotated[
        int | None, typer.Option(help="clients, each a SuperNode of its own", show_default="4", min=1)
    ] = None,
    out: Out = None,
    resume: Resume = False,
    trust: Trust = False,
    round_timeout: Annotated[
        float, typer.Option(help="seconds after which a round goes on without those that are missing", min=1)
    ] = 120,
    quorum: Annotated[
        float, typer.Option(help="share of the nodes asked whose replies a round needs", min=0, max=1)
    ] = 0.5,
    port: Annotated[
        int | None,
        typer.Option(help="of the SuperLink, on 127.0.0.1", show_default="a free one", min=1, max=65535),
    ] = None,
) -> None:
    """Start a whole federation on this machine, train with it, and stop everything that was started.

    A Flower SuperLink and a SuperNode for each client, with TLS and a key for every node, on 127.0.0.1.
    """
    from cfedavg.cli.progress import Display
    from cfedavg.launch.control import RunFailed
    from cfedavg.launch.local_federation import train_federation

    out = folder(out, resume, "%Y%m%d-%H%M%S")
    old = out / "config.toml"
    given |= {"clients": nodes} if nodes else {}
    config = config_from(
        old if resume and exists(old) else None, given, trust=trust, base=DEFAULT, written=True
    )
    console = OptionConsole()
    try:
        with Display(console, config.rounds, "training") as display:
            trained = train_federation(
                config, out, display, resume=resume, port=port, round_timeout=round_timeout, quorum=quorum
            )
    except KeyboardInterrupt:
        if exists(old):
            console.print(f"stopped: `cfedavg federate up --out {out} --resume` goes on from here", **PLAIN)
        raise
    except RunFailed as error:
        fail(str(error))
        raise typer.Exit(1) from None
    if trained:
        display.say_total()
        console.print(
            f"\nwritten to {out}: curves.png, nodes.png, report.html, metrics.jsonl, nodes.jsonl", **PLAIN
        )
