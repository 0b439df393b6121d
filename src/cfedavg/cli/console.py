"""The command's output: it names options, an error is one sentence, and only the first rank prints."""

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
    """Replace the fields in a sentence by their options.

    >>> name_options("`eta_local` must be above 0, got -3")
    '--eta-local must be above 0, got -3'
    """
    return re.sub(r"`([a-z_]+)`", lambda found: list_options().get(found[1], found[0]), sentence)


@cache
def list_options() -> dict[str, str]:
    """Return every option of every command by the name of its parameter."""
    from cfedavg.cli.commands import app  # which imports this module

    found, commands = dict[str, str](), [typer.main.get_command(app)]
    while commands:
        command = commands.pop()
        commands += getattr(command, "commands", {}).values()
        found |= {str(p.name): p.opts[0] for p in command.params if p.param_type_name == "option"}
    return found


def fail(sentence: str) -> int:
    """Print an error and return the exit code 2."""
    if not _is_silent():
        OptionConsole(stderr=True).print(f"error: {sentence}", style="red", **PLAIN)
    return 2


@contextmanager
def first_rank_only() -> Iterator[None]:
    """Discard the output of all ranks but the first in the block."""
    if not _is_silent():
        yield
        return
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
        yield


def ranks() -> int:
    """Return how many processes torchrun has started; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def _is_silent() -> bool:
    """Whether this is one of several ranks and not the first, which prints for all."""
    return ranks() > 1 and os.environ["RANK"] != "0"
