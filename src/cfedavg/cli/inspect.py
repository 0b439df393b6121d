"""`cfedavg data` and `inspect`: look at what a run deals out and sends."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from cfedavg.cli.console import PLAIN, OptionConsole
from cfedavg.cli.options import takes_config
from cfedavg.core.config import DATA, Config, fields_where
from cfedavg.core.errors import InputError

PARTITION = {*fields_where(lambda known: known.group == DATA), "seed"}


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
    OptionConsole().print(
        f"{images.name}: {len(images.train)} train and {len(images.test)} test images of "
        f"{images.classes} classes\n"
        f"{config.clients} clients with {min(sizes)} to {max(sizes)} train and {min(tests)} to {max(tests)} "
        f"test samples; {partition.unused} train samples unused\ndrawn in {picture}",
        **PLAIN,
    )


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
    from cfedavg.cli.inspect_message import show

    show(OptionConsole(), file, layout, dense)
