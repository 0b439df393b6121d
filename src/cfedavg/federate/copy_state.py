"""The copy of a client and the primary of a server, as they lie in the file of a state."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from cfedavg.core.errors import InputError
from cfedavg.federate import checks
from cfedavg.federate.primary import Primary
from cfedavg.federate.state_file import APART, FORMATS, as_array
from cfedavg.federate.versions import Copy, Version, digest_of, versions_from

_W, _MESSAGES = "w", "messages"  # tensors of a server
_DTYPES = ("float32", "int16")  # of a copy: numbers, or the bits of bf16


class OtherCopy(InputError):
    """A state whose copy is kept in another dtype, since its broadcasts were compressed otherwise."""


@dataclass(frozen=True)
class CopyForm:
    """The form of w: a vector of d numbers of this dtype, which is the caller's choice."""

    d: int
    dtype: str

    def tensors(self, held: Copy | Primary | None) -> dict[str, np.ndarray]:
        """Return the tensors of a copy or of a primary; none if there is none."""
        if held is None:
            return {}
        w = checks.vector("w", np.ascontiguousarray(held.w), self.dtype, self.d)
        if isinstance(held, Copy):
            return {APART: w}
        return {_W: w, _MESSAGES: as_array(b"".join(held.messages))}

    def describe_copy(self, copy: Copy | None) -> list[int] | None:
        """Return the version of a copy and the digest of its bytes."""
        return None if copy is None else [*copy.version, digest_of(np.ascontiguousarray(copy.w).data)]

    def read_copy(self, tensors: dict[str, np.ndarray], about: dict[str, Any]) -> Copy | None:
        """Take a client's copy out of its tensors; None if there is none, or if w is not what was stored.

        The client needs the whole model then, and keeps its residual. ValueError if no client stored this.
        """
        if _is_earlier(about) or about["copy"] is None:
            return None
        *version, digest = checks.listed("copy", about["copy"], 4)
        found, w = _version("copy", version), tensors.pop(APART)
        checks.whole("the digest of the copy", digest, 0, 2**64)
        fits = w.dtype == self.dtype and w.shape == (self.d,) and digest_of(w.data) == digest
        return Copy(found, w) if fits else None

    def describe_primary(self, primary: Primary | None) -> dict[str, Any] | None:
        """Return the first and last version of a history and the lengths of its messages."""
        if primary is None:
            return None
        return {
            "start": primary.versions[0],
            "version": primary.version,
            "lengths": [len(message) for message in primary.messages],
        }

    def read_primary(
        self, tensors: dict[str, np.ndarray], about: dict[str, Any], now: tuple[int, int]
    ) -> Primary | None:
        """Take a server's primary out of its tensors.

        ValueError if no server of this round stored it, OtherCopy if one did that keeps w in another dtype.
        """
        if _is_earlier(about) or about["primary"] is None:
            return None
        stored = checks.table("primary", about["primary"])
        w = tensors.pop(_W)
        if w.dtype in _DTYPES and w.dtype != self.dtype:
            raise OtherCopy(f"w must be a vector of {self.d} {self.dtype}, got one of {w.dtype}")
        checks.vector("w", w, self.dtype, self.d)
        if w.dtype.kind == "f" and not np.isfinite(w).all():
            raise ValueError("w holds NaN or Inf")
        data = checks.vector("messages", tensors.pop(_MESSAGES), "uint8").tobytes()
        lengths = checks.listed("lengths", stored["lengths"])
        ends = list(accumulate((checks.whole("lengths", n, 0, 2**63) for n in lengths), initial=0))
        if ends[-1] != len(data):
            raise ValueError(f"its messages must have {ends[-1]} bytes, got {len(data)}")
        messages = tuple(data[one:other] for one, other in pairwise(ends))
        versions = versions_from(_version("start", stored["start"]), messages)
        if versions[-1] != _version("version", stored["version"]) or versions[-1][:2] != now:
            raise ValueError("its messages do not lead to its version")
        return Primary(w, versions, messages)


def _is_earlier(about: dict[str, Any]) -> bool:
    """Whether a state was written before there were copies."""
    return bool(about["format"] < FORMATS[about["kind"]][-1])


def _version(name: str, stored: Any) -> Version:
    generation, round, hash = checks.listed(name, stored, 3)
    return Version(
        checks.whole(name, generation, 1, 2**32),
        checks.whole(name, round, 0, 2**32),
        checks.whole(name, hash, 0, 2**64),
    )
