"""`cfedavg federate up`: train with a real Flower federation on this machine."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from cfedavg.cli.console import PLAIN, OptionConsole, fail
from cfedavg.cli.options import Out, Resume, Trust, config_from, folder, takes_config
from cfedavg.core.config import fields_where
from cfedavg.core.files import exists
from cfedavg.launch.app import DEFAULT

federation = typer.Typer(
    no_args_is_help=True, help="Train with Flower: real clients, real messages, faults survived."
)

Nodes = Annotated[
    int | None, typer.Option(help="number of clients; each is a SuperNode", show_default="4", min=1)
]
RoundTimeout = Annotated[
    float, typer.Option(help="seconds after which a round continues without missing replies", min=1)
]
Quorum = Annotated[
    float,
    typer.Option(help="share of the needed replies without which a round changes nothing", min=0, max=1),
]
Port = Annotated[
    int | None,
    typer.Option(help="port of the SuperLink on 127.0.0.1", show_default="a free one", min=1, max=65535),
]


@federation.command("up")
@takes_config(fields_where(lambda known: known.federated), DEFAULT)
def federate_up(
    given: dict[str, Any],
    nodes: Nodes = None,
    out: Out = None,
    resume: Resume = False,
    trust: Trust = False,
    round_timeout: RoundTimeout = 120,
    quorum: Quorum = 0.5,
    port: Port = None,
) -> None:
    """Start a whole federation on this machine, train with it, and stop all its processes.

    The federation has a Flower SuperLink and a SuperNode for each client on 127.0.0.1, with TLS and a key
    for every node.
    """
    from cfedavg.cli.progress import Display
    from cfedavg.launch.local_federation import train_federation
    from cfedavg.launch.services import RunFailed

    out = folder(out, resume, "%Y%m%d-%H%M%S")
    old, how = out / "config.toml", {"round_timeout": round_timeout, "quorum": quorum}
    given |= {"clients": nodes} if nodes else {}
    path = old if resume and exists(old) else None
    config = config_from(path, given, trust=trust, base=DEFAULT, written=True)
    console = OptionConsole()
    try:
        with Display(console, config.rounds, "training") as display:
            trained = train_federation(config, out, display, resume=resume, port=port, **how)
    except KeyboardInterrupt:
        if exists(old):
            console.print(f"stopped: continue with `cfedavg federate up --out {out} --resume`", **PLAIN)
        raise
    except RunFailed as error:
        fail(str(error))
        raise typer.Exit(1) from None
    if trained:
        display.say_total()
        files = "curves.png, nodes.png, report.html, metrics.jsonl, nodes.jsonl"
        console.print(f"\nwritten to {out}: {files}", **PLAIN)
