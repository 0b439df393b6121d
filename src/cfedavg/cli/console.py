"""Who speaks: of several ranks the first alone, in terms of options, and an error in one sentence."""

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
    """Prints sentences of the library as the command's: `eta_local` becomes --eta-local."""

    def print(self, *objects: Any, **how: Any) -> None:
        super().print(*(with_options(each) if isinstance(each, str) else each for each in objects), **how)


def with_options(sentence: str) -> str:
    """Write the options that a sentence names by their fields.

    >>> with_options("`eta_local` must be above 0, got -3")
    '--eta-local must be above 0, got -3'
    """
    return re.sub(r"`([a-z_]+)`", lambda found: _options().get(found[1], found[0]), sentence)


@cache
def _options() -> dict[str, str]:
    """Every option of every command, by the name of its parameter."""
    from cfedavg.cli.commands import app  # which imports this module

    found, commands = dict[str, str](), [typer.main.get_command(app)]
    while commands:
        command = commands.pop()
        commands += getattr(command, "commands", {}).values()
        found |= {str(p.name): p.opts[0] for p in command.params if p.param_type_name == "option"}
    return found


def fail(sentence: str) -> int:
    """Says what is wrong; the exit code."""
    if not _silent():
        OptionConsole(stderr=True).print(f"error: {sentence}", style="red", **PLAIN)
    return 2


@contextmanager
def first_rank_only() -> Iterator[None]:
    """Within it, what other ranks print goes nowhere."""
    if not _silent():
        yield
        return
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
        yield


def ranks() -> int:
    """How many processes torchrun has started, this one among them."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def _silent() -> bool:
    """Whether this is one of several ranks, and not the first, which speaks for all."""
    return ranks() > 1 and os.environ["RANK"] != "0"
