"""The file of a state: whole or not there, with a checksum, and with the names of its owner.

A checksum proves that nothing broke, not who wrote the file. So every value is checked when it is read; the
`check_` functions return the value, and raise ValueError that names the field, the rule and the value.
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
from cfedavg.core.tensors import UNREADABLE, checksum, read_arrays, save_tensors
from cfedavg.federate.protocol import Mark, Stamp
from cfedavg.federate.server import Primary
from cfedavg.federate.versions import Copy, Version, compute_digest, list_versions

FILE = "state.safetensors"
FORMATS = {"client": (3, 4), "server": (4, 5)}  # that can be read; the last is written
APART = "copy"  # a tensor that the checksum leaves out: it has a digest of its own, and can be replaced
_W, _MESSAGES = "w", "messages"  # tensors of a server
_DTYPES = ("float32", "int16")  # of a copy: numbers, or the bits of bf16
_DEEPER = 50  # how much deeper the stack may be when a value that was read is written again


class OtherModel(InputError):
    """A state that is of another model."""


class OtherCopy(InputError):
    """A state whose copy is kept in another dtype, since its broadcasts were compressed otherwise."""


class StateStore:
    """A folder with the file of one owner's state, for a model of this layout.

    `copy_dtype` is how a copy lies on the disk: "int16" for the bits of bf16, with 2 bytes a number.
    """

    busy: ClassVar[str]  # why the folder cannot be locked
    remedy: ClassVar[str]  # for a damaged state

    def __init__(self, folder: Path, owner: dict[str, str], layout: Layout, copy_dtype: str) -> None:
        self.folder, self.owner, self.layout = folder, owner, layout
        self.copy_form = CopyForm(layout.d, copy_dtype)

    @property
    def path(self) -> Path:
        """The file of the state."""
        return self.folder / FILE

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Make the folder and hold it: one process at a time works in it."""
        make_folder(self.folder, f"the {self.owner['kind']}'s state")
        with lock_folder(self.folder, self.busy.format(self.folder)):
            yield

    @contextmanager
    def naming_damage(self) -> Iterator[None]:
        """Turn every error that shows a damaged state into one sentence."""
        try:
            yield
        except InputError:
            raise
        except UNREADABLE as error:
            why = f"it has no {error}" if isinstance(error, KeyError) else error
            raise InputError(f"{self.path} is damaged ({why}); {self.remedy}") from None

    def _write(self, tensors: dict[str, np.ndarray], about: dict[str, Any]) -> None:
        """Make a state durable in one step."""
        about = {"format": FORMATS[self.owner["kind"]][-1], **self.owner, "layout": self.layout.text, **about}
        about = json.loads(json.dumps(about))  # as it will be read, names as text
        save_tensors(tensors, self.path, {**about, "checksum": _checksum(tensors, about)})

    def _read(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Return the tensors of a state and what it says of itself.

        Raise ValueError if its checksum is wrong, and InputError unless it is of this owner, of this model,
        and of a format that is read here.
        """
        tensors, about = read_arrays(self.path)
        if about.pop("checksum") != _checksum(tensors, about):
            raise ValueError("its checksum is wrong")
        for name, value in self.owner.items():
            if about.get(name) != value:
                found, here = reprlib.repr(about.get(name)), reprlib.repr(value)
                raise InputError(f"{self.path} is of another {name}: {found}, here {here}")
        formats = FORMATS[self.owner["kind"]]
        if about.get("format") not in formats:
            raise InputError(
                f"{self.path} is of another format: {reprlib.repr(about.get('format'))}, here {formats[-1]}; "
                "go on with the version of cfedavg that wrote it, or start another federation"
            )
        if about["layout"] != self.layout.text:
            stored = Layout.from_text(about["layout"])
            why = stored.difference(self.layout) or "the arrays are in another order"
            raise OtherModel(f"{self.path} is of another model: in that of now {why}")
        return tensors, about


def _checksum(tensors: dict[str, np.ndarray], about: dict[str, Any]) -> int:
    """Return the checksum of a state, a single number such as BatchNorm's counter taken as a vector."""
    vectors = {name: array.reshape(array.shape or (1,)) for name, array in tensors.items() if name != APART}
    return checksum(vectors, about)


def as_array(message: bytes) -> np.ndarray:
    """Return bytes as they lie in a file of arrays."""
    return np.frombuffer(message, np.uint8)


def check_integer(name: str, value: Any, least: int, below: int) -> int:
    """Return the value, a whole number in this range."""
    if type(value) is not int or not least <= value < below:
        raise ValueError(
            f"{name} must be a whole number from {least} to {below - 1}, got {reprlib.repr(value)}"
        )
    return value


def check_list(name: str, value: Any, length: int | None = None) -> list[Any]:
    """Return the value, a list, of this length if one is given."""
    if type(value) is not list or (length is not None and len(value) != length):
        of = "" if length is None else f" of {length}"
        raise ValueError(f"{name} must be a list{of}, got {reprlib.repr(value)}")
    return value


def check_table(name: str, value: Any) -> dict[str, Any]:
    """Return the value, a table."""
    return _check_kind(name, value, dict, "table")  # type: ignore[no-any-return]


def check_text(name: str, value: Any) -> str:
    """Return the value, a text."""
    return _check_kind(name, value, str, "text")  # type: ignore[no-any-return]


def _check_kind(name: str, value: Any, kind: type, word: str) -> Any:
    if type(value) is not kind:
        raise ValueError(f"{name} must be a {word}, got {reprlib.repr(value)}")
    return value


def check_vector(name: str, array: np.ndarray, dtype: str, length: int | None = None) -> np.ndarray:
    """Return the array, a vector of this dtype, and of this length if one is given."""
    if array.dtype != dtype or array.ndim != 1 or length not in (None, len(array)):
        of = "" if length is None else f" {length}"
        raise ValueError(f"{name} must be a vector of{of} {dtype}, got {list(array.shape)} of {array.dtype}")
    return array


def check_stamp(name: str, value: Any, least: int = 1) -> Stamp:
    """Return a stamp that was stored as a list; the wire has 32 bits for each of its numbers."""
    generation, number = check_list(name, value, 2)
    return Stamp(check_integer(name, generation, least, 2**32), check_integer(name, number, least, 2**32))


def check_mark(name: str, value: Any, before: Stamp) -> Mark:
    """Return the mark of an answer that was given before this stamp."""
    stamp, incarnation, digest = check_list(name, value, 3)
    numbers = check_integer(name, incarnation, 0, 2**63), check_integer(name, digest, 0, 2**64)
    found = Mark(check_stamp(name, stamp), *numbers)
    if found.stamp >= before:
        raise ValueError(f"{name} must be before {list(before)}, got {list(found.stamp)}")
    return found


def check_depth(name: str, value: Any) -> None:
    """Raise ValueError if the value could just be read, and is too deep to be written again."""
    for _ in range(_DEEPER):
        value = [value]
    try:
        json.dumps(value)
    except RecursionError:
        raise ValueError(f"{name} has too many lists in lists") from None


def _check_version(name: str, stored: Any) -> Version:
    parts = zip(check_list(name, stored, 3), ((1, 2**32), (0, 2**32), (0, 2**64)), strict=True)
    return Version(*(check_integer(name, each, *ends) for each, ends in parts))


@dataclass(frozen=True)
class CopyForm:
    """How a copy or a primary lies in the file of a state: w is a vector of d numbers of this dtype."""

    d: int
    dtype: str

    def tensors(self, held: Copy | Primary | None) -> dict[str, np.ndarray]:
        """Return the tensors of a copy or of a primary; none if there is none."""
        if held is None:
            return {}
        w = check_vector("w", np.ascontiguousarray(held.w), self.dtype, self.d)
        return {APART: w} if isinstance(held, Copy) else {_W: w, _MESSAGES: as_array(b"".join(held.messages))}

    def describe_copy(self, copy: Copy | None) -> list[int] | None:
        """Return the version of a copy and the digest of its bytes."""
        return None if copy is None else [*copy.version, compute_digest(np.ascontiguousarray(copy.w).data)]

    def read_copy(self, tensors: dict[str, np.ndarray], about: dict[str, Any]) -> Copy | None:
        """Take a client's copy out of its tensors; None if there is none, or if w is not what was stored.

        The client needs the whole model then, and keeps its residual. ValueError if no client stored this.
        """
        if _is_earlier(about) or about["copy"] is None:
            return None
        *version, digest = check_list("copy", about["copy"], 4)
        found, w = _check_version("copy", version), tensors.pop(APART)
        check_integer("the digest of the copy", digest, 0, 2**64)
        fits = w.dtype == self.dtype and w.shape == (self.d,) and compute_digest(w.data) == digest
        return Copy(found, w) if fits else None

    def describe_primary(self, primary: Primary | None) -> dict[str, Any] | None:
        """Return the first and last version of a history and the lengths of its messages."""
        if primary is None:
            return None
        lengths = [len(message) for message in primary.messages]
        return {"start": primary.versions[0], "version": primary.version, "lengths": lengths}

    def read_primary(
        self, tensors: dict[str, np.ndarray], about: dict[str, Any], now: tuple[int, int]
    ) -> Primary | None:
        """Take a server's primary out of its tensors.

        ValueError if no server of this round stored it, OtherCopy if one did that keeps w in another dtype.
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
            raise ValueError(f"its messages must have {ends[-1]} bytes, got {len(data)}")
        messages = tuple(data[one:other] for one, other in pairwise(ends))
        versions = list_versions(_check_version("start", stored["start"]), messages)
        if versions[-1] != _check_version("version", stored["version"]) or versions[-1][:2] != now:
            raise ValueError("its messages do not lead to its version")
        return Primary(w, versions, messages)


def _is_earlier(about: dict[str, Any]) -> bool:
    """Whether a state was written before there were copies."""
    return bool(about["format"] < FORMATS[about["kind"]][-1])
