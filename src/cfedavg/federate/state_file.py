"""The file that stores the state of a client or a server, with a checksum and the owner's names.

The file is replaced in one step. The checksum detects damage, but does not prove who wrote the file. So every
value is checked when it is read. A `check_` function returns the value, or raises ValueError with the name of
the field, the rule and the value.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from cfedavg.core.errors import InputError
from cfedavg.core.files import lock_folder, make_folder
from cfedavg.core.layout import Layout
from cfedavg.core.tensors import UNREADABLE, checksum, read_tensors, save_tensors

FILE = "state.safetensors"
FORMATS = {"client": (3, 4), "server": (4, 5)}  # formats that can be read; the last one is written
COPY = "copy"  # the tensor of a client's model copy: the checksum leaves it out, since it has its own digest


class OtherModel(InputError):
    """An error: the stored state belongs to another model."""


class OtherCopy(InputError):
    """An error: the stored model copy has another dtype, because `compressor_down` was different."""


class StateStore:
    """A folder with the state file of one owner (a client or a server), for a model of this layout.

    `copy_dtype` is the dtype of a model copy on disk: "float32", or "int16" for the bits of bf16.
    """

    busy: ClassVar[str]  # the error if another process holds the folder
    remedy: ClassVar[str]  # what to do if the state is damaged

    def __init__(self, folder: Path, owner: dict[str, str], layout: Layout, copy_dtype: str) -> None:
        self.folder, self.owner, self.layout = folder, owner, layout
        self.copy_dtype = copy_dtype

    @property
    def path(self) -> Path:
        """The path of the state file."""
        return self.folder / FILE

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Create the folder and lock it, so that one process at a time works in it."""
        make_folder(self.folder, f"the {self.owner['kind']}'s state")
        with lock_folder(self.folder, self.busy.format(self.folder)):
            yield

    @contextmanager
    def naming_damage(self) -> Iterator[None]:
        """Turn every error that a damaged state causes into an InputError, which names a remedy."""
        try:
            yield
        except InputError:
            raise
        except UNREADABLE as error:
            why = f"the file has no {error}" if isinstance(error, KeyError) else error
            raise InputError(f"{self.path} is damaged ({why}); {self.remedy}") from None

    def _check_copy(self, w: np.ndarray) -> np.ndarray:
        return check_vector("the model copy w", np.ascontiguousarray(w), self.copy_dtype, self.layout.d)

    def _write(self, tensors: dict[str, np.ndarray], about: dict[str, Any]) -> None:
        about = {"format": FORMATS[self.owner["kind"]][-1], **self.owner, "layout": self.layout.text, **about}
        about = json.loads(json.dumps(about))  # as JSON will return it: all keys are text
        save_tensors(tensors, self.path, {**about, "checksum": _checksum(tensors, about)})

    def _read(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Return the stored tensors and metadata; raise InputError if owner, model or format differs."""
        tensors, about = read_tensors(self.path, "np")
        if about.pop("checksum") != _checksum(tensors, about):
            raise ValueError("the checksum of the file is wrong")
        for name, value in self.owner.items():
            if about.get(name) != value:
                found, here = reprlib.repr(about.get(name)), reprlib.repr(value)
                raise InputError(
                    f"{self.path} is of another {name}: the {name} must be {here}, got {found}; "
                    "use another folder"
                )
        formats = FORMATS[self.owner["kind"]]
        if about.get("format") not in formats:
            raise InputError(
                f"the format of {self.path} must be {' or '.join(map(str, formats))}, "
                f"got {reprlib.repr(about.get('format'))}; "
                "go on with the version of cfedavg that wrote it, or start another federation"
            )
        if about["layout"] != self.layout.text:
            stored = Layout.from_text(about["layout"])
            why = stored.difference(self.layout) or "the arrays are in another order"
            raise OtherModel(f"{self.path} is of another model: in the present model {why}")
        if about["format"] < formats[-1]:
            about |= {"copy": None, "primary": None}  # earlier formats have no model copies
        return tensors, about


def _checksum(tensors: dict[str, np.ndarray], about: dict[str, Any]) -> int:
    """Return the checksum of a state. Treat a 0-D tensor, such as BatchNorm's counter, as a 1-D tensor."""
    vectors = {name: array.reshape(array.shape or (1,)) for name, array in tensors.items() if name != COPY}
    return checksum(vectors, about)


def as_array(message: bytes) -> np.ndarray:
    """Return the bytes as a uint8 array, which a file of tensors can hold."""
    return np.frombuffer(message, np.uint8)


def check_integer(name: str, value: Any, least: int, below: int) -> int:
    """Return `value` if it is an integer from `least` to `below` - 1; else raise ValueError."""
    if type(value) is not int or not least <= value < below:
        raise ValueError(
            f"{name} must be a whole number from {least} to {below - 1}, got {reprlib.repr(value)}"
        )
    return value


def check_list(name: str, value: Any, length: int | None = None) -> list[Any]:
    """Return `value` if it is a list, and has the length `length` if that is given; else raise ValueError."""
    if type(value) is not list or (length is not None and len(value) != length):
        of = "" if length is None else f" of {length} values"
        raise ValueError(f"{name} must be a list{of}, got {reprlib.repr(value)}")
    return value


def check_integers(name: str, value: Any, *allowed: range) -> list[int]:
    """Return `value` if it is a list of integers, one in each range of `allowed`; else raise ValueError."""
    values = check_list(name, value, len(allowed))
    return [check_integer(name, each, r.start, r.stop) for each, r in zip(values, allowed, strict=True)]


def check_table(name: str, value: Any) -> dict[str, Any]:
    """Return `value` if it is a dict; else raise ValueError."""
    return _check_kind(name, value, dict, "table")  # type: ignore[no-any-return]


def check_text(name: str, value: Any) -> str:
    """Return `value` if it is a text; else raise ValueError."""
    return _check_kind(name, value, str, "text")  # type: ignore[no-any-return]


def _check_kind(name: str, value: Any, kind: type, word: str) -> Any:
    if type(value) is not kind:
        raise ValueError(f"{name} must be a {word}, got {reprlib.repr(value)}")
    return value


def check_vector(name: str, array: np.ndarray, dtype: str, length: int | None = None) -> np.ndarray:
    """Return `array` if it is 1-D, of this dtype and of this length (if given); else raise ValueError."""
    if array.dtype != dtype or array.ndim != 1 or length not in (None, len(array)):
        of = "" if length is None else f" {length}"
        found = f"{array.dtype} values of shape {list(array.shape)}"
        raise ValueError(f"{name} must be a vector of{of} {dtype} values, got {found}")
    return array
