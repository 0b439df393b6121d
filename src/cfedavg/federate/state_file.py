"""The file of a state: whole or not there, with a checksum, and with the names of those whose state it is."""

from __future__ import annotations

import hashlib
import json
import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from cfedavg.core.errors import InputError
from cfedavg.core.layout import Layout
from cfedavg.core.tensors import UNREADABLE, checksum, read_arrays, save_tensors

FILE = "state.safetensors"
FORMATS = {"client": (3, 4), "server": (4, 5)}  # that can be read; the last is written
APART = "copy"  # a tensor that the checksum leaves out: it has a digest of its own, and can be replaced


class OtherModel(InputError):
    """A state that is of another model."""


def write_state(path: Path, tensors: dict[str, np.ndarray], about: dict[str, Any]) -> None:
    """Make a state durable in one step."""
    about = {"format": FORMATS[about["kind"]][-1], **about}
    about = json.loads(json.dumps(about))  # as it will be read, names as text
    save_tensors(tensors, path, {**about, "checksum": _checksum(tensors, about)})


def read_state(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return the tensors of a state and what it says of itself; ValueError if its checksum is wrong."""
    tensors, about = read_arrays(path)
    if about.pop("checksum") != _checksum(tensors, about):
        raise ValueError("its checksum is wrong")
    return tensors, about


def _checksum(tensors: dict[str, np.ndarray], about: dict[str, Any]) -> int:
    """As a vector each, also a single number such as BatchNorm's counter."""
    vectors = {name: array.reshape(array.shape or (1,)) for name, array in tensors.items() if name != APART}
    return checksum(vectors, about)


@contextmanager
def name_damage(path: Path, remedy: str) -> Iterator[None]:
    """Make one sentence of whatever shows that a state is damaged."""
    try:
        yield
    except InputError:
        raise
    except UNREADABLE as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else error
        raise InputError(f"{path} is damaged ({why}); {remedy}") from None


def check_owner(path: Path, about: dict[str, Any], wanted: dict[str, Any], layout: Layout) -> None:
    """Raise InputError unless a state is of these names, of this model, and of a format that is read here."""
    for name, value in wanted.items():
        if about.get(name) != value:
            raise InputError(
                f"{path} is of another {name}: {reprlib.repr(about.get(name))}, here {reprlib.repr(value)}"
            )
    formats = FORMATS[wanted["kind"]]
    if about.get("format") not in formats:
        raise InputError(
            f"{path} is of another format: {reprlib.repr(about.get('format'))}, here {formats[-1]}; "
            "go on with the version of cfedavg that wrote it, or start another federation"
        )
    if about["layout"] != layout.text:
        found = Layout.from_text(about["layout"]).difference(layout) or "the arrays are in another order"
        raise OtherModel(f"{path} is of another model: in that of now {found}")


def shorten(name: str) -> str:
    """Return a folder's name for any name: keys are long, and have characters that a disk takes otherwise."""
    return hashlib.sha256(name.encode()).hexdigest()[:32]


def as_array(message: bytes) -> np.ndarray:
    """Return bytes as they lie in a file of arrays."""
    return np.frombuffer(message, np.uint8)
