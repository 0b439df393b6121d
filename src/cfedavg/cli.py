"""The command `cfedavg`. Options of `run` and `sweep` are the fields of Config."""

from __future__ import annotations

import dataclasses
import inspect
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table

from cfedavg.config import DATA, Config, flag, kinds, read_config
from cfedavg.errors import InputError
from cfedavg.files import exists

PLAIN: dict[str, Any] = {"highlight": False, "markup": False, "soft_wrap": True}
# The base class of click's errors, wherever this version of typer has its click.
USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[2]

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Communication-efficient federated learning: local steps, error feedback, about 1% sent.",
)

Out = Annotated[Path | None, typer.Option("--out", help="folder of the run", show_default="runs/DATE-TIME")]
Resume = Annotated[bool, typer.Option("--resume", help="go on where the run in --out stopped")]
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", help="a TOML file with any of the options; those given beside it win"),
]


def takes_config(
    names: Collection[str] | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command one option for each field of Config (or of those named).

    The command receives `given`: the fields whose option was typed, so that they can win over a file.
    """
    hints = kinds()
    fields = [f for f in dataclasses.fields(Config) if names is None or f.name in names]

    def wrap(command: Callable[..., None]) -> Callable[..., None]:
        def typed(**values: Any) -> None:
            given = {f.name: values.pop(f.name) for f in fields}
            command(given={name: v for name, v in given.items() if v is not None}, **values)

        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "given"]
        options = [_option(field, hints[field.name]) for field in fields]
        typed.__signature__ = inspect.Signature(own + options)  # type: ignore[attr-defined]
        typed.__annotations__ = {p.name: p.annotation for p in own + options}
        typed.__doc__, typed.__name__ = command.__doc__, command.__name__
        return typed

    return wrap


def _option(field: dataclasses.Field[Any], hint: Any) -> inspect.Parameter:
    kind = next(k for k in (getattr(hint, "__args__", None) or (hint,)) if k is not type(None))
    shown = field.metadata["shown"] or ("" if field.default in (None, False) else f"{field.default}")
    default = f" [dim]\\[default: {shown}][/dim]" if shown else ""
    switch = f"{flag(field.name)}/--no-{flag(field.name)[2:]}" if kind is bool else flag(field.name)
    option = typer.Option(
        switch,
        help=field.metadata["help"] + default,
        rich_help_panel=field.metadata["group"],
        show_default=False,
    )
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


@app.command()
@takes_config()
def run(
    given: dict[str, Any],
    out: Out = None,
    resume: Resume = False,
    config: ConfigFile = None,
    messages: Annotated[
        Path | None,
        typer.Option(help="folder to keep every client's message in, for `cfedavg inspect`"),
    ] = None,
) -> None:
    """Train, and write a folder with metrics, checkpoint, curves and a page.

    With no options: the MNIST subset inside the package, 10 clients of 2 classes each, top-k 0.99.
    """
    out = _folder(out, resume, "%Y%m%d-%H%M%S")
    base = read_config(config) if config else Config()
    if resume and not config and exists(out / "config.toml"):
        base = read_config(out / "config.toml")
    train(base.replace(**given), out, resume=resume, messages=messages)
    Console().print(f"\nwritten to {out}: curves.png, report.html, metrics.jsonl", **PLAIN)


def _folder(out: Path | None, resume: bool, name: str) -> Path:
    if resume and out is None:
        raise InputError("--resume needs --out, the folder to go on with")
    return out or Path("runs") / time.strftime(name)


def train(
    config: Config, out: Path, *, resume: bool, title: str = "training", messages: Path | None = None
) -> None:
    """One run with its display."""
    from cfedavg.display import Display
    from cfedavg.loop import run as run_loop

    with Display(Console(), config.rounds, title) as display:
        run_loop(config, out=out, resume=resume, observer=display, messages=messages)


@app.command()
@takes_config()
def sweep(
    given: dict[str, Any],
    vary: Annotated[
        list[str], typer.Option("--vary", help='field=value|value|..., for instance "seed=0|1|2"; repeatable')
    ],
    out: Out = None,
    resume: Resume = False,
    config: ConfigFile = None,
) -> None:
    """Run a small grid and compare: mean and spread over the seeds, and one page.

    For instance: cfedavg sweep --vary "compressor=none|topk(0.99) >> bf16" --vary "seed=0|1|2"
    """
    from cfedavg.sweep import cells

    if _ranks() > 1:
        raise InputError("start `cfedavg run` with torchrun; sweep uses --workers")
    out = _folder(out, resume, "sweep-%Y%m%d-%H%M%S")
    base = (read_config(config) if config else Config()).replace(**given)
    grid = cells(base, vary)
    for number, (name, cell) in enumerate(grid.items(), 1):
        train(cell, out / name, resume=resume, title=f"{number}/{len(grid)} {name}")
    _report([out / name for name in grid], out)


@app.command()
def report(
    runs: Annotated[
        list[Path], typer.Argument(help="folders of runs, made by run or sweep", metavar="RUN...")
    ],
    out: Annotated[Path, typer.Option(help="folder for the page and the pictures")] = Path("runs/report"),
) -> None:
    """Compare runs: accuracy over rounds, bytes and simulated time, loss, norms; pictures and one page."""
    _report(runs, out)


def _report(runs: list[Path], out: Path) -> None:
    from cfedavg.report import write_report

    made = write_report(runs, out)
    console = Console()
    header, *rows = made.table()
    shown = [i for i, name in enumerate(header) if name not in ("best", "downlink", "seeds")]
    table = Table(*(Column(header[i], overflow="fold") for i in shown))
    for row in rows:
        table.add_row(*(row[i] for i in shown))
    console.print(table)
    console.print(f"{made.headline}\n{made.page}  {made.picture}", **PLAIN)


@app.command()
def reproduce(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="experiments, or TOML files of your own; none: list them", metavar="NAME..."),
    ] = None,
    scale: Annotated[
        str, typer.Option(help="smoke: minutes on a laptop; small: an hour or so; paper: its own settings")
    ] = "small",
    seeds: Annotated[int, typer.Option(help="runs of each cell, with seeds 0, 1, ...", min=1, max=20)] = 1,
    out: Annotated[
        Path | None, typer.Option(help="folder of cells and figures", show_default="runs/reproduce/SCALE")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on where an earlier call stopped")] = False,
    draw: Annotated[
        bool, typer.Option("--draw", help="train nothing: draw what is there; without names, everything")
    ] = False,
    minutes: Annotated[
        float, typer.Option(help="stop after as many, to go on with --resume", show_default="no limit", min=0)
    ] = float("inf"),
    only: Annotated[
        list[str] | None, typer.Option(help="only cells of these names; * stands for anything; repeatable")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="only so many of each run", show_default="all", min=1)
    ] = None,
    data_dir: Annotated[
        str | None, typer.Option(help="a folder with the parquet files of the data sets, or a folder of each")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    precision: Annotated[str, typer.Option(help="of the local steps: float32, tf32 or bf16")] = "float32",
) -> None:
    """Make the paper's figures again: train what is missing, cell by cell, and draw.

    For instance: cfedavg reproduce fig1-mnist --scale smoke
    """
    from cfedavg.reproduce import command

    how = {"device": device, "precision": precision} | ({"data_dir": data_dir} if data_dir else {})
    console = Console()
    if draw:
        command.draw(names, scale, out, console)
        return
    if not names:
        command.show_all(console)
        return
    if _ranks() > 1:
        raise InputError("start `cfedavg run` with torchrun; reproduce uses one process")
    grid = command.open_grid(names, scale, seeds, out, only, rounds, resume, console)
    command.carry_out(grid, how, minutes, console)


@app.command()
def claims(
    folder: Annotated[Path, typer.Argument(help="--out of `cfedavg reproduce`", metavar="FOLDER")],
    scale: Annotated[str, typer.Option(help="of which cells are judged: smoke, small or paper")] = "paper",
    out: Annotated[Path | None, typer.Option(help="a Markdown file for the whole table")] = None,
    words: Annotated[
        Path | None, typer.Option(help="a TOML file with title, intro and, by claim, [why]; for --out")
    ] = None,
) -> None:
    """Hold the paper's claims against what was reproduced: verdicts with the numbers that decide."""
    from cfedavg.reproduce import command

    command.judge(folder, scale, out, words, Console())


PARTITION = {name.name for name in dataclasses.fields(Config) if name.metadata["group"] == DATA} | {"seed"}


@app.command()
@takes_config(PARTITION)
def data(
    given: dict[str, Any],
    picture: Annotated[Path, typer.Option(help="where to draw who has what")] = Path("partition.png"),
) -> None:
    """Load a data set, deal it out to the clients, and draw who has what."""
    from cfedavg.data import load
    from cfedavg.data.tasks import deal
    from cfedavg.report import plot_partition

    config = Config().replace(**given)
    if picture.suffix != ".png":
        raise InputError(f"--picture is {picture}: it must end in .png")
    images = load(config.dataset, config.data_dir)
    partition = deal(config, images)
    sizes = [len(rows) for rows in partition.train]
    tests = [len(rows) for rows in partition.test]
    plot_partition(
        partition.counts(images.train.labels, images.classes), picture, f"{images.name}: who has what"
    )
    Console().print(
        f"{images.name}: {len(images.train)} train and {len(images.test)} test images of "
        f"{images.classes} classes\n"
        f"{config.clients} clients with {min(sizes)} to {max(sizes)} train and {min(tests)} to {max(tests)} "
        f"test samples; {partition.unused} train samples unused\ndrawn in {picture}",
        **PLAIN,
    )


@app.command()
def compressors(
    d: Annotated[
        int,
        typer.Option("--d", help="length of the vector to compress", min=1, max=2**53),
    ] = 582_026,
) -> None:
    """List the compressors, each with its guaranteed SNR gamma: E|C(p) - p|² <= |p|²/gamma.

    The bytes are an estimate, from a message of Gaussian noise. A run counts the messages that it sends.
    """
    from cfedavg.compress import EXAMPLES, parse
    from cfedavg.inspection import estimated_bytes
    from cfedavg.layout import Layout
    from cfedavg.units import in_bytes

    names = (Column("write", no_wrap=True), "gamma", "bytes (estimate)", "what it does")
    table, console = Table(*names, title=f"selector >> quantiser, for d = {d:,}"), Console()
    with console.status("encoding a message with each"):
        for text in EXAMPLES:
            compressor = parse(text)
            stage = compressor.quantiser or compressor.selector
            words = (stage.__doc__ or "").split("\n")[0] if ">>" not in text else "a composition"
            gamma = f"{compressor.gamma(Layout.flat(d)):.6g}"
            table.add_row(text, gamma, in_bytes(estimated_bytes(compressor, d)), words)
    console.print(table)


@app.command("inspect")
def inspect_message(
    file: Annotated[Path, typer.Argument(help="a message, as `cfedavg run --messages DIR` keeps them")],
    layout: Annotated[
        Path | None, typer.Option(help="layout.json of the model", show_default="the one beside FILE")
    ] = None,
    dense: Annotated[
        Path | None, typer.Option(help=".npy file with the vector that was compressed, for the SNR")
    ] = None,
) -> None:
    """Explain a message: header, sections, bits per index against the entropy bound, bits per value, SNR."""
    from cfedavg.inspection import show

    show(Console(), file, layout, dense)


federate = typer.Typer(
    no_args_is_help=True, help="Train with Flower: real clients, real messages, faults survived."
)
app.add_typer(federate, name="federate")

# Of a simulation's options those that hold for real clients too.
FEDERATED = {
    "dataset", "data_dir", "classes_per_client", "dirichlet", "iid", "model", "local_steps", "local_epochs",
    "deadline", "batch_size", "eta_local", "schedule", "smoothness", "momentum", "weight_decay", "rounds",
    "participation", "update", "eta", "weighting", "compressor", "error_feedback", "seed", "eval_every",
}  # fmt: skip


@federate.command("up")
@takes_config(FEDERATED)
def federate_up(
    given: dict[str, Any],
    nodes: Annotated[
        int | None, typer.Option(help="clients, each a SuperNode of its own", show_default="4", min=1)
    ] = None,
    out: Out = None,
    resume: Resume = False,
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
    from cfedavg.display import Display
    from cfedavg.flower.control import RunFailed
    from cfedavg.flower.up import up

    out = _folder(out, resume, "%Y%m%d-%H%M%S")
    old = out / "config.toml"
    base = read_config(old) if resume and exists(old) else Config(clients=4)
    config = base.replace(**given, **({"clients": nodes} if nodes else {}))
    console = Console()
    try:
        with Display(console, config.rounds, "training") as display:
            up(config, out, display, resume=resume, port=port, round_timeout=round_timeout, quorum=quorum)
    except KeyboardInterrupt:
        if exists(old):
            console.print(f"stopped: `cfedavg federate up --out {out} --resume` goes on from here", **PLAIN)
        raise
    except RunFailed as error:
        _fail(str(error))
        raise typer.Exit(1) from None
    console.print(f"\nwritten to {out}: curves.png, report.html, metrics.jsonl, nodes.jsonl", **PLAIN)


@app.command()
def version() -> None:
    """Print the version."""
    from cfedavg import __version__

    typer.echo(__version__)


def main() -> None:
    """Entry point: bad input is one sentence and exit code 2."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a polite kill checkpoints like Ctrl-C
    if "" not in sys.path:
        sys.path.insert(0, "")  # so that module:name finds a module in the current folder
    try:
        with _stdout():
            code = app(standalone_mode=False)
    except InputError as error:
        code = _fail(str(error))
    except USAGE_ERROR as error:
        code = _fail(error.format_message())  # type: ignore[attr-defined]
    except (KeyboardInterrupt, typer.Abort):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # on the way out, another one changes nothing
        code = 130
    sys.exit(code)


def _fail(sentence: str) -> int:
    if not _silent():
        Console(stderr=True).print(f"error: {sentence}", style="red", **PLAIN)
    return 2


@contextmanager
def _stdout() -> Iterator[None]:
    if not _silent():
        yield
        return
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
        yield


def _ranks() -> int:
    """How many processes torchrun has started, this one among them."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def _silent() -> bool:
    """Whether this is one of several ranks, and not the first, which speaks for all."""
    return _ranks() > 1 and os.environ["RANK"] != "0"
