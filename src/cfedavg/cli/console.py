"""What the commands share: output on the console, and options made from the fields of Config."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from cfedavg.core.config import FIELD_TYPES, OPTIONS, Config, read_config, refuse_code
from cfedavg.core.errors import InputError
from cfedavg.core.files import exists
from cfedavg.core.run_files import CONFIG

PLAIN: dict[str, Any] = {"highlight": False, "markup": False, "soft_wrap": True}

Out = Annotated[Path | None, typer.Option("--out", help="folder to write to", show_default="runs/DATE-TIME")]
Resume = Annotated[bool, typer.Option("--resume", help="continue the run in --out, or start one")]
Track = Annotated[
    list[str] | None,
    typer.Option(help="also log to tensorboard or wandb (Weights & Biases); repeatable", metavar="TRACKER"),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", help="TOML file with any of the options; typed options win over it"),
]
Formats = Annotated[
    list[str] | None,
    typer.Option(
        "--format", help="format of each figure: png, pdf, svg or csv; repeatable", show_default="png"
    ),
]

_DEFAULT = Config()


def trust_option(file: str) -> Any:
    """Return the option --trust of a command that reads `file`."""
    return typer.Option("--trust", help=f"import the module:Class that {file} names")


class OptionConsole(Console):
    """A console that prints a field in backticks as the command's option: `eta_local` as --eta-local."""

    def print(self, *objects: Any, **how: Any) -> None:
        super().print(*(name_options(each) if isinstance(each, str) else each for each in objects), **how)


def say(text: str) -> None:
    """Print a text without colours; do not wrap its lines."""
    OptionConsole().print(text, **PLAIN)


def fail(sentence: str) -> int:
    """Print an error and return 2, the exit code for bad input."""
    if not _is_silent():
        OptionConsole(stderr=True).print(f"error: {sentence}", style="red", **PLAIN)
    return 2


def name_options(sentence: str) -> str:
    """Return a sentence with each field in backticks replaced by its option.

    >>> name_options("`eta_local` must be above 0, got -3")
    '--eta-local must be above 0, got -3'
    """
    return re.sub(r"`([a-z_]+)`", lambda found: list_options().get(found[1], found[0]), sentence)


@cache
def list_options() -> dict[str, str]:
    """Return a dict from parameters to options, of all commands: `eta_local` to --eta-local, and so on."""
    from cfedavg.cli.commands import app  # not above: `commands` imports this module

    found, commands = dict[str, str](), [typer.main.get_command(app)]
    while commands:
        command = commands.pop()
        commands += getattr(command, "commands", {}).values()
        found |= {str(p.name): p.opts[0] for p in command.params if p.param_type_name == "option"}
    return found


@contextmanager
def first_rank_only() -> Iterator[None]:
    """Under torchrun, discard what a process prints in the `with` block, unless it is the first process."""
    if not _is_silent():
        yield
        return
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
        yield


def ranks() -> int:
    """Return how many processes torchrun has started; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def _is_silent() -> bool:
    return ranks() > 1 and os.environ["RANK"] != "0"


def flag(name: str) -> str:
    """Return the command-line option of a field of Config.

    >>> flag("eta_local")
    '--eta-local'
    """
    return "--" + name.replace("_", "-")


def choose_folder(out: Path | None, resume: bool, name: str = "%Y%m%d-%H%M%S") -> Path:
    """Return the folder of a run: `out`, or else a new one in `runs`, with the time as `name` formats it."""
    if resume and out is None:
        raise InputError("--resume needs --out, the folder of the run to continue")
    return out or Path("runs") / time.strftime(name)


def config_from(
    file: Path | None, stored: Path | None, given: dict[str, Any], *, trust: bool, base: Config = _DEFAULT
) -> Config:
    """Return the configuration in `file`, or else that of the run in the folder `stored`, or else `base`.

    The typed options in `given` replace its fields. The file may be from a stranger: if it names a class to
    import, --trust is needed, unless a typed option replaces that class.
    """
    path = file or (stored / CONFIG if stored and exists(stored / CONFIG) else None)
    if path is None:
        return base.replace(**given)
    config = read_config(path, written=not file)
    if not trust:
        left = {name: value for name, value in dataclasses.asdict(config).items() if name not in given}
        refuse_code(left, str(path), "add --trust if you trust who wrote it")
    return config.replace(**given)


def takes_config(
    names: Collection[str] = tuple(OPTIONS), base: Config = _DEFAULT
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that gives a command an option for each field of Config in `names`.

    The help shows the defaults in `base`. The command receives the typed options as the dict `given`, from
    fields to values; it does not contain options that were not typed.
    """
    fields = [name for name in OPTIONS if name in names]

    def wrap(command: Callable[..., None]) -> Callable[..., None]:
        def typed(**values: Any) -> None:
            given = {name: values.pop(name) for name in fields}
            command(given={name: v for name, v in given.items() if v is not None}, **values)

        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "given"]
        parameters = [*own, *(_make_option(name, getattr(base, name)) for name in fields)]
        typed.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        typed.__annotations__ = {p.name: p.annotation for p in parameters}
        typed.__doc__, typed.__name__ = command.__doc__, command.__name__
        return typed

    return wrap


def _make_option(name: str, default: Any) -> inspect.Parameter:
    known, hint = OPTIONS[name], FIELD_TYPES[name]
    kind = next(k for k in getattr(hint, "__args__", (hint,)) if k is not type(None))
    shown = known.shown if default in (None, False) else f"{default}"
    words = known.help + (f" [dim]\\[default: {shown}][/dim]" if shown else "")
    switch = f"{flag(name)}/--no-{flag(name)[2:]}" if kind is bool else flag(name)
    option = typer.Option(switch, help=words, rich_help_panel=known.group, show_default=False)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )
