"""The file of a client's or a server's state, with a checksum and the names of the owner.

A file is replaced in one step. A checksum detects damage, but does not tell who wrote the file. So every
value is checked when it is read. The `check_` functions return the value if it is right. Else they raise
ValueError, which names the field, the rule and the value.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from cfedavg.core.errors import InputError
from cfedavg.core.files import lock_folder, make_folder
from cfedavg.core.layout import Layout
from cfedavg.core.tensors import UNREADABLE, checksum, read_tensors, save_tensors
from cfedavg.federate.protocol import Mark, Stamp
from cfedavg.federate.server import Primary
from cfedavg.federate.versions import Copy, Version, compute_digest, list_versions

FILE = "state.safetensors"
FORMATS = {"client": (3, 4), "server": (4, 5)}  # formats that can be read; the last one is written
APART = "copy"  # the tensor that the checksum leaves out: it has its own digest, and can be sent again
_W, _MESSAGES = "w", "messages"  # names of a server's tensors
_DTYPES = ("float32", "int16")  # of a model copy: numbers, or the bits of bf16
_DEEPER = 50  # how much deeper the call stack may be when a value is written than when it is read


class OtherModel(InputError):
    """The error of a stored state that belongs to another model."""


class OtherCopy(InputError):
    """The error of a state whose model copy has another dtype: its broadcasts had another compressor."""


class StateStore:
    """A folder with the state file of one owner (a client or a server), for a model of this layout.

    `copy_dtype` is the dtype of a model copy on disk: "float32", or "int16" for the bits of bf16.
    """

    busy: ClassVar[str]  # the error if another process holds the folder
    remedy: ClassVar[str]  # what to do if the state is damaged

    def __init__(self, folder: Path, owner: dict[str, str], layout: Layout, copy_dtype: str) -> None:
        self.folder, self.owner, self.layout = folder, owner, layout
        self.copy_form = CopyForm(layout.d, copy_dtype)

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
        """Turn every error that a damaged state causes into an InputError of one sentence."""
        try:
            yield
        except InputError:
            raise
        except UNREADABLE as error:
            why = f"it has no {error}" if isinstance(error, KeyError) else error
            raise InputError(f"{self.path} is damaged ({why}); {self.remedy}") from None

    def _write(self, tensors: dict[str, np.ndarray], about: dict[str, Any]) -> None:
        """Store a state durably, in one step."""
        about = {"format": FORMATS[self.owner["kind"]][-1], **self.owner, "layout": self.layout.text, **about}
        about = json.loads(json.dumps(about))  # as JSON will return it: all keys are text
        save_tensors(tensors, self.path, {**about, "checksum": _checksum(tensors, about)})

    def _read(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Return the tensors and the metadata of the stored state.

        Raise ValueError if the checksum is wrong. Raise InputError if the state has another owner, another
        model, or a format that cannot be read.
        """
        tensors, about = read_tensors(self.path, "np")
        if about.pop("checksum") != _checksum(tensors, about):
            raise ValueError("its checksum is wrong")
        for name, value in self.owner.items():
            if about.get(name) != value:
                found, here = reprlib.repr(about.get(name)), reprlib.repr(value)
                raise InputError(f"{self.path} is of another {name}: it must be {here}, got {found}")
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
        return tensors, about


def _checksum(tensors: dict[str, np.ndarray], about: dict[str, Any]) -> int:
    """Return the checksum of a state. A 0-D tensor, such as BatchNorm's counter, counts as a 1-D tensor."""
    vectors = {name: array.reshape(array.shape or (1,)) for name, array in tensors.items() if name != APART}
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
    """Return `value` if it is a list, of length `length` if given; else raise ValueError."""
    if type(value) is not list or (length is not None and len(value) != length):
        of = "" if length is None else f" of {length}"
        raise ValueError(f"{name} must be a list{of}, got {reprlib.repr(value)}")
    return value


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
    """Return `array` if it is 1-D, of this dtype, and of length `length` if given; else raise ValueError."""
    if array.dtype != dtype or array.ndim != 1 or length not in (None, len(array)):
        of = "" if length is None else f" {length}"
        found = f"shape {list(array.shape)} of {array.dtype}"
        raise ValueError(f"{name} must be a vector of{of} {dtype}, got {found}")
    return array


def check_stamp(name: str, value: Any, least: int = 1) -> Stamp:
    """Return the stamp of a stored list: two integers from `least` to 2^32 - 1; else raise ValueError."""
    generation, number = check_list(name, value, 2)
    return Stamp(check_integer(name, generation, least, 2**32), check_integer(name, number, least, 2**32))


def check_mark(name: str, value: Any, before: Stamp) -> Mark:
    """Return the mark of a stored list; raise ValueError unless its stamp comes before `before`."""
    stamp, incarnation, digest = check_list(name, value, 3)
    numbers = check_integer(name, incarnation, 0, 2**63), check_integer(name, digest, 0, 2**64)
    found = Mark(check_stamp(name, stamp), *numbers)
    if found.stamp >= before:
        raise ValueError(f"{name} must have a stamp before {list(before)}, got {list(found.stamp)}")
    return found


def check_depth(name: str, value: Any) -> None:
    """Raise ValueError if a value that was read is nested too deeply to be written again."""
    for _ in range(_DEEPER):
        value = [value]
    try:
        json.dumps(value)
    except RecursionError:
        raise ValueError(f"{name} has too many nested lists") from None


def _check_version(name: str, stored: Any) -> Version:
    parts = zip(check_list(name, stored, 3), ((1, 2**32), (0, 2**32), (0, 2**64)), strict=True)
    return Version(*(check_integer(name, each, *ends) for each, ends in parts))


@dataclass(frozen=True)
class CopyForm:
    """The form of a model copy or a server's primary in a state file: w is a 1-D tensor of length d."""

    d: int
    dtype: str

    def tensors(self, held: Copy | Primary | None) -> dict[str, np.ndarray]:
        """Return the tensors of a client's model copy or a server's primary; an empty dict for None."""
        if held is None:
            return {}
        w = check_vector("w", np.ascontiguousarray(held.w), self.dtype, self.d)
        return {APART: w} if isinstance(held, Copy) else {_W: w, _MESSAGES: as_array(b"".join(held.messages))}

    def describe_copy(self, copy: Copy | None) -> list[int] | None:
        """Return the version of a model copy and the digest of its bytes, as a list; None for None."""
        return None if copy is None else [*copy.version, compute_digest(np.ascontiguousarray(copy.w).data)]

    def read_copy(self, tensors: dict[str, np.ndarray], about: dict[str, Any]) -> Copy | None:
        """Remove a client's model copy from `tensors` and return the copy; None if it is missing or damaged.

        Without a copy, the client keeps its residual and needs the whole model. Raise ValueError if no client
        can have stored these values.
        """
        if _is_earlier(about) or about["copy"] is None:
            return None
        *version, digest = check_list("copy", about["copy"], 4)
        found, w = _check_version("copy", version), tensors.pop(APART)
        check_integer("the digest of the copy", digest, 0, 2**64)
        fits = w.dtype == self.dtype and w.shape == (self.d,) and compute_digest(w.data) == digest
        return Copy(found, w) if fits else None

    def describe_primary(self, primary: Primary | None) -> dict[str, Any] | None:
        """Return the first and last version of a primary's history and the lengths of its messages."""
        if primary is None:
            return None
        lengths = [len(message) for message in primary.messages]
        return {"start": primary.versions[0], "version": primary.version, "lengths": lengths}

    def read_primary(
        self, tensors: dict[str, np.ndarray], about: dict[str, Any], now: tuple[int, int]
    ) -> Primary | None:
        """Remove a server's primary (model copy with history) from `tensors` and return it, or None.

        `now` is the server's generation and round. Raise ValueError if no server can have stored these
        values. Raise OtherCopy if w has another dtype than `dtype`.
        """
        if _is_earlier(about) or about["primary"] is None:
            return None
        stored, w = check_table("primary", about["primary"]), tensors.pop(_W)
        if w.dtype in _DTYPES and w.dtype != self.dtype:
            raise OtherCopy(f"w must be a vector of {self.d} {self.dtype}, got one of {w.dtype}")
        check_vector("w", w, self.dtype, self.d)
        if w.dtype.kind == "f" and not np.isfinite(w).all():
            raise ValueError("w holds NaN or Inf")
        data = check_vector("messages", tensors.pop(_MESSAGES), "uint8").tobytes()
        lengths = check_list("lengths", stored["lengths"])
        ends = list(accumulate((check_integer("lengths", n, 0, 2**63) for n in lengths), initial=0))
        if ends[-1] != len(data):
            raise ValueError(f"messages must have {ends[-1]} bytes, got {len(data)}")
        messages = tuple(data[one:other] for one, other in pairwise(ends))
        versions = list_versions(_check_version("start", stored["start"]), messages)
        if versions[-1] != _check_version("version", stored["version"]) or versions[-1][:2] != now:
            raise ValueError("the stored messages do not lead to the stored version")
        return Primary(w, versions, messages)


def _is_earlier(about: dict[str, Any]) -> bool:
    """Return whether a state has an earlier format, which has no model copies."""
    return bool(about["format"] < FORMATS[about["kind"]][-1])
