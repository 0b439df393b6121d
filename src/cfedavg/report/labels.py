"""Short, unique names for runs, made of what differs between their configurations."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

from cfedavg.core.config import OWN, Config

_LONGEST = 44
_MANY = 5  # parts
_SENT = ("compressor", "compressor_down", "feedback")
_PARTS = {
    "clients": "m={}",
    "classes_per_client": "p={}",
    "dirichlet": "Dir({:g})",
    "local_steps": "K={}",
    "local_epochs": "epochs={}",
    "deadline": "deadline={:g}s",
    "batch_size": "batch={}",
    "eta_local": "η_L={:g}",
    "eta": "η={:g}",
    "rounds": "T={}",
    "drop_rate": "lost={:g}",
    "smoothness": "L={:g}",
}
_BARE = {"dataset", "model", "schedule", "device", "engine", "precision"}


def differences(configs: Sequence[Config]) -> list[str]:
    """The fields, seed aside, that are not the same in all; what is sent comes first."""
    names = [item.name for item in dataclasses.fields(Config) if item.name != "seed"]
    differing = [name for name in names if len({_said(config, name) for config in configs}) > 1]
    return sorted(differing, key=lambda name: name not in _SENT)


def _said(config: Config, name: str) -> Any:
    """Of a Flower app, only what its server decides."""
    return getattr(config, name) if config.says(name) else None


def make_labels(configs: Sequence[Config], folders: Sequence[str]) -> list[str]:
    """One label for each configuration; the folder's name tells apart what would read the same.

    >>> both = [Config(compressor=text, compressor_down=text) for text in ("none", "rd(0.9)")]
    >>> make_labels([*both, Config(compressor="rd(0.9)", compressor_down="none")], ["a", "b", "c"])
    ['none', 'rd(0.9)', 'rd(0.9) up, none down']
    >>> make_labels([both[1], both[1].replace(feedback="none")], ["a", "b"])
    ['rd(0.9)', 'rd(0.9) · no feedback']
    """
    names, sent = differences(configs), _compressors(configs)
    # "no feedback" alone says too little.
    first = [[text] if set(names) & set(_SENT) else [] for text in sent]
    rest = [name for name in names if name not in ("compressor", "compressor_down")]
    parts = [[*own, *_parts(config, rest)] for own, config in zip(first, configs, strict=True)]
    if max(map(len, parts), default=0) > _MANY:  # nobody reads as many: what is sent, and the folder
        rest = [name for name in names if name == "feedback"]
        parts = [
            [*own, *_parts(config, rest), _short(name)]
            for own, config, name in zip(first, configs, folders, strict=True)
        ]
    labels = [" · ".join(own) or text for own, text in zip(parts, sent, strict=True)]
    labels = _tell_apart(labels, [f" · {_short(folder)}" for folder in folders])
    return _tell_apart(labels, [f" ({n})" for n in range(1, len(labels) + 1)])


def _compressors(configs: Sequence[Config]) -> list[str]:
    """What each run sends: one text where both directions are alike or all broadcasts are whole."""
    whole = all(config.compressor_down.strip() == "none" for config in configs)
    texts = [(_short(config.compressor), _short(config.compressor_down)) for config in configs]
    return [up if whole or up == down else f"{up} up, {down} down" for up, down in texts]


def _parts(config: Config, names: Sequence[str]) -> list[str]:
    return [part for name in names if (part := _part(name, _said(config, name)))]


def _part(name: str, value: Any) -> str:
    """How a label says one field; empty where saying nothing is clear enough."""
    if name == "feedback":
        return {"ef": "", "none": "no feedback"}.get(value, str(value))
    if value is None or value is False or (name, value) == ("engine", "auto"):
        return ""
    if value is True:
        return name.replace("_", " ")
    if name == "data_dir":
        value = PurePath(value).name
    if name in ("dataset", "model"):
        value = task_text(value)
    if isinstance(value, float) and name not in _PARTS:
        value = f"{value:g}"
    return _short(_PARTS.get(name, "{}" if name in _BARE else name + "={}").format(value))


def task_text(value: str) -> str:
    """What a task from Python is called, without the words around it; other texts as they are.

    >>> task_text("(a task from Python: digits, 77fe)")
    'digits, 77fe'
    """
    return value[len(OWN) + 2 : -1] if value.startswith(f"{OWN}: ") else value


def _short(text: str) -> str:
    return shortened(" ".join(text.split()), _LONGEST)


def shortened(text: str, longest: int) -> str:
    return text if len(text) <= longest else text[: longest - 1] + "…"


def _tell_apart(labels: list[str], endings: list[str]) -> list[str]:
    count = Counter(labels)
    return [
        label + ending if count[label] > 1 else label for label, ending in zip(labels, endings, strict=True)
    ]
