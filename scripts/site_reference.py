"""The generated pages of the docs site: every command, every option, every public name of Python."""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

import typer

import cfedavg
from cfedavg.cli.commands import app
from cfedavg.core.config import FIELD_TYPES, OPTIONS, Config, Option

CONFIG_METHODS = ("replace", "to_toml", "from_toml", "from_dict")
FIRST = ("core.config", "simulate.run", "simulate.result", "task")  # what a reader looks for comes first
# Packages whose `__all__` is a part of the public interface, beside that of cfedavg itself.
PACKAGES = ("flower", "compress", "wire", "data", "sweep", "report")


def options_page() -> str:
    """Return the page of the fields of Config, which are options and keys of a TOML file."""
    about = (
        "These are the fields of `Config`. Each is an option of `cfedavg run` (`eta_local` is "
        "`--eta-local`), a key of a TOML file for `--config`, and an argument of `Config` in Python. "
        "`cfedavg federate up` takes those marked ⇄; a resumed run may change those marked ↻."
    )
    lines, group = ["# Options", "", about], ""
    for name, known in OPTIONS.items():
        if known.group != group:
            group = known.group
            lines += ["", f"## {group}", "", "| field | default | meaning |", "|---|---|---|"]
        lines.append(option_row(name, known))
    return "\n".join(lines) + "\n"


def option_row(name: str, known: Option) -> str:
    """Return the row of one field: its name, its default, and what it does with its kind of value."""
    default = getattr(Config, name)
    shown = known.shown or ("" if default is None else code(default))
    if known.otherwise is not None:
        shown = f"{code(known.otherwise)}, if no other of its kind is given"
    marks = "⇄" * known.federated + " ↻" * known.may_change
    rule = known.rule if not known.choices else ""
    value = f"{kind(name)}, {rule}" if rule else kind(name)
    return f'| <span id="{name}"></span>`{name}` {marks} | {shown} | {cell(known.help)} ({value}) |'


def kind(name: str) -> str:
    """Return the kind of a field's value in a word."""
    if OPTIONS[name].per_client:
        return "number, range or list"
    if OPTIONS[name].is_part:
        return "[part](../parts.md)"
    words = {"int": "integer", "float": "number", "bool": "switch", "str": "text"}
    found = str(getattr(FIELD_TYPES[name], "__name__", FIELD_TYPES[name])).split(" | ")[0]
    return words.get(found, found)


def commands_page() -> str:
    """Return the page of all commands with their arguments and options."""
    lines = ["# Commands", "`cfedavg COMMAND --help` prints the same."]
    lines += [line for name, command in commands().items() for line in command_lines(name, command)]
    return "\n\n".join(lines) + "\n"


def commands() -> dict[str, Any]:
    """Return all commands by the words that call them, such as `federate up`."""
    found, left = dict[str, Any](), [("", typer.main.get_command(app))]
    while left:
        name, command = left.pop(0)
        inner = getattr(command, "commands", {})
        left += [(f"{name} {word}".strip(), each) for word, each in inner.items()]
        found |= {} if inner else {name: command}
    return found


def command_lines(name: str, command: Any) -> list[str]:
    """Return the lines of one command: what it does, its own options, and the fields of Config it takes."""
    fields = [p.name for p in command.params if p.name in OPTIONS]
    own = [p for p in command.params if p.name not in OPTIONS and p.name != "help"]
    lines = [f"## `cfedavg {name}`", inspect.cleandoc(command.help or "")]
    if own:
        rows = [f"| `{parameter_text(p)}` | {default_text(p)} | {cell(p.help or '')} |" for p in own]
        lines += ["\n".join(["| option | default | meaning |", "|---|---|---|", *rows])]
    if len(fields) == len(OPTIONS):
        lines += ["It also takes every [option](options.md)."]
    elif fields:
        links = ", ".join(f"[`--{each.replace('_', '-')}`](options.md#{each})" for each in fields)
        lines += [f"It also takes these [options](options.md): {links}."]
    return lines


def parameter_text(parameter: Any) -> str:
    """Return an option or argument as it is typed."""
    if parameter.param_type_name == "argument":
        return str(parameter.metavar or parameter.name.upper())
    value = "" if parameter.is_flag else " " + parameter.type.name.split()[0].upper()
    return str(parameter.opts[0]) + value


def default_text(parameter: Any) -> str:
    """Return the default of an option or argument, in words where it has them."""
    shown = getattr(parameter, "show_default", None)
    if isinstance(shown, str):
        return cell(shown)
    default = parameter.default
    return "" if default in (None, False, (), []) else code(default)


def python_page() -> str:
    """Return the page of the public names of cfedavg, by the module that defines them."""
    lines = ["# Python", "Import these names from `cfedavg`. A heading is the module that defines them."]
    for module in sorted(cfedavg._HOME, key=lambda name: name not in FIRST):
        about = inspect.getdoc(importlib.import_module(f"cfedavg.{module}")) or ""
        lines += [f"## `{module}`", about.splitlines()[0]]
        lines += [directive(getattr(cfedavg, name)) for name in cfedavg._HOME[module]]
    return "\n\n".join(lines) + "\n"


def packages_page() -> str:
    """Return the page of the public names of the packages inside cfedavg."""
    lines = ["# Python, packages", "Names that are imported from a package inside `cfedavg`."]
    for package in PACKAGES:
        module = importlib.import_module(f"cfedavg.{package}")
        lines += [f"## `cfedavg.{package}`", (inspect.getdoc(module) or "").splitlines()[0]]
        names = [name for name in module.__all__ if name not in cfedavg.__all__]
        values = [name for name in names if not documented(getattr(module, name))]
        lines += [f"Constants and types: {', '.join(map(code, values))}."] if values else []
        lines += [directive(getattr(module, name)) for name in names if name not in values]
    return "\n\n".join(lines) + "\n"


def documented(value: Any) -> bool:
    """Return whether a public value has a docstring of its own: whether it is a class or a function."""
    return inspect.isclass(value) or inspect.isfunction(value)


def directive(value: Any) -> str:
    """Return the line for mkdocstrings that shows a class or function, by the module that defines it."""
    line = f"::: {value.__module__}.{value.__qualname__}"
    if value is not Config:
        return line
    options = ["members: []", "separate_signature: false", "show_signature: false"]
    hidden = "\n      ".join([f"{line}\n    options:", *options])
    methods = [f"{line}.{name}\n    options:\n      heading_level: 4" for name in CONFIG_METHODS]
    return "\n\n".join([hidden, "Its fields are the [options](options.md).", *methods])


def code(value: object) -> str:
    """Return a value in backticks, as it is typed.

    >>> code("topk(0.97)"), code(1.0), code(False)
    ('`topk(0.97)`', '`1`', '`false`')
    """
    if isinstance(value, bool):
        value = str(value).lower()
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return "`" + text.replace("|", "\\|") + "`"


def cell(text: str) -> str:
    """Return a text as it stands in a table."""
    return re.sub(r"([|*<])", r"\\\1", " ".join(text.split()))
