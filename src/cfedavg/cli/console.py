"""The command's console: it prints fields as options and an error as one sentence, on the first rank only."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

PLAIN: dict[str, Any] = {"highlight": False, "markup": False, "soft_wrap": True}


class OptionConsole(Console):
    """A console that prints the library's fields as the command's options: `eta_local` as --eta-local."""

    def print(self, *objects: Any, **how: Any) -> None:
        super().print(*(name_options(each) if isinstance(each, str) else each for each in objects), **how)


def name_options(sentence: str) -> str:
    """Return a sentence with each field in backticks replaced by its option.

    >>> name_options("`eta_local` must be above 0, got -3")
    '--eta-local must be above 0, got -3'
    """
    return re.sub(r"`([a-z_]+)`", lambda found: list_options().get(found[1], found[0]), sentence)


@cache
def list_options() -> dict[str, str]:
    """Return a dict from the name of each parameter of each command to its option."""
    from cfedavg.cli.commands import app  # not above: `commands` imports this module

    found, commands = dict[str, str](), [typer.main.get_command(app)]
    while commands:
        command = commands.pop()
        commands += getattr(command, "commands", {}).values()
        found |= {str(p.name): p.opts[0] for p in command.params if p.param_type_name == "option"}
    return found


def fail(sentence: str) -> int:
    """Print an error and return 2, the exit code for bad input."""
    if not _is_silent():
        OptionConsole(stderr=True).print(f"error: {sentence}", style="red", **PLAIN)
    return 2


@contextmanager
def first_rank_only() -> Iterator[None]:
    """Within the block, discard the output of this process unless it is the first rank of torchrun."""
    if not _is_silent():
        yield
        return
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
        yield


def ranks() -> int:
    """Return how many processes torchrun has started; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def _is_silent() -> bool:
    """Return whether this process is one of several ranks but not the first, the only rank that prints."""
    return ranks() > 1 and os.environ["RANK"] != "0"
