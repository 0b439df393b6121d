"""Options that several commands share, and options that are made from the fields of Config."""

from __future__ import annotations

import dataclasses
import inspect
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, Any

import typer

from cfedavg.core.config import FIELD_TYPES, OPTIONS, Config, read_config, refuse_code
from cfedavg.core.errors import InputError

Out = Annotated[Path | None, typer.Option("--out", help="folder to write to", show_default="runs/DATE-TIME")]
Resume = Annotated[bool, typer.Option("--resume", help="continue what --out holds, or start")]
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", help="TOML file with any of the options; typed options win over it"),
]
Trust = Annotated[
    bool,
    typer.Option("--trust", help="let the file or folder that is read import the module:Class it names"),
]

_DEFAULT = Config()


def flag(name: str) -> str:
    """Return the command-line option of a field of Config.

    >>> flag("eta_local")
    '--eta-local'
    """
    return "--" + name.replace("_", "-")


def folder(out: Path | None, resume: bool, name: str) -> Path:
    """Return the folder of a run: `out`, else a new path in `runs` named by the strftime format `name`."""
    if resume and out is None:
        raise InputError("--resume needs --out, the folder of the run to continue")
    return out or Path("runs") / time.strftime(name)


def config_from(
    path: Path | None, given: dict[str, Any], *, trust: bool, base: Config = _DEFAULT, written: bool = False
) -> Config:
    """Return the configuration in the file `path`, or `base` without a file, with the typed options `given`.

    The file may be from a stranger: a class that the file names needs --trust, unless a typed option
    replaces the class.
    """
    if path is None:
        return base.replace(**given)
    config = read_config(path, written=written)
    if not trust:
        left = {name: value for name, value in dataclasses.asdict(config).items() if name not in given}
        refuse_code(left, str(path), "add --trust if you trust who wrote it")
    return config.replace(**given)


def takes_config(
    names: Collection[str] | None = None, base: Config = _DEFAULT
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that gives a command an option for each field of Config, or for each in `names`.

    The help shows the defaults in `base`. The command receives `given`: the fields whose options were typed,
    which override a configuration file.
    """
    hints = FIELD_TYPES
    fields = [name for name in OPTIONS if names is None or name in names]

    def wrap(command: Callable[..., None]) -> Callable[..., None]:
        def typed(**values: Any) -> None:
            given = {name: values.pop(name) for name in fields}
            command(given={name: v for name, v in given.items() if v is not None}, **values)

        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "given"]
        options = [_option(name, hints[name], base) for name in fields]
        typed.__signature__ = inspect.Signature(own + options)  # type: ignore[attr-defined]
        typed.__annotations__ = {p.name: p.annotation for p in own + options}
        typed.__doc__, typed.__name__ = command.__doc__, command.__name__
        return typed

    return wrap


def _option(name: str, hint: Any, base: Config) -> inspect.Parameter:
    known, value = OPTIONS[name], getattr(base, name)
    kind = next(k for k in (getattr(hint, "__args__", None) or (hint,)) if k is not type(None))
    shown = known.shown if value in (None, False) else f"{value}"
    default = f" [dim]\\[default: {shown}][/dim]" if shown else ""
    switch = f"{flag(name)}/--no-{flag(name)[2:]}" if kind is bool else flag(name)
    option = typer.Option(switch, help=known.help + default, rich_help_panel=known.group, show_default=False)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )
