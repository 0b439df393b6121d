"""What travels, in bytes: the lengths of encoded messages, headers included."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from cfedavg.core.errors import InputError
from cfedavg.core.files import exists, make_folder, read_file, write_atomic
from cfedavg.core.layout import Layout
from cfedavg.core.payload import Floats, Payload
from cfedavg.wire import encode, measure, plain_length


class Ledger:
    """Counts messages, and keeps the clients' as files, with the layout, if a folder is given.

    Counting runs the coders and nothing else of the wire; they let other threads run, so an engine may
    count a round while it trains the next.
    """

    def __init__(self, layout: Layout, keep: Path | None = None, *, owner: bool = True) -> None:
        self.layout, self.keep, self.opened = layout, keep, not owner

    def replies(self, t: int, clients: list[int], payload: Payload) -> list[int]:
        """The bytes that each client of a block sends in round t."""
        block = payload.numpy()
        if self.keep is None:
            return measure(block, self.layout)
        lengths = []
        for client, one in zip(clients, block.clients(), strict=True):
            message = encode(one, self.layout, client=client, sequence=t, round=t)
            write_atomic(self.keep / f"{t:05}-{client:05}.cfa", message)
            lengths.append(len(message))
        return lengths

    def known(self, payload: Payload) -> list[int] | None:
        """The same where it takes no look at the values, which may then stay where they are."""
        length = plain_length(payload) if self.keep is None else None
        return None if length is None else [length] * len(payload)

    def open(self, t: int) -> None:
        """At the first round, when a run is found to be in order; never among messages of another one."""
        if self.keep is None or self.opened:
            return
        make_folder(self.keep, "`messages`")
        beside = self.keep / "layout.json"
        try:
            known = read_file(beside) if exists(beside) else self.layout.text.encode()
        except OSError as error:
            raise InputError(f"`messages`: cannot read {beside} ({error.strerror})") from None
        if known != self.layout.text.encode():
            raise InputError(f"`messages`: {self.keep} holds messages of another model; give another folder")
        if t == 0 and next(self.keep.glob("*.cfa"), None) is not None:
            raise InputError(f"`messages`: {self.keep} holds messages of another run; give another folder")
        write_atomic(beside, self.layout.text.encode())
        self.opened = True


def dense_bytes(vector: Tensor, layout: Layout) -> int:
    """The bytes of a vector sent whole; none where there is nothing to send."""
    if not len(vector):
        return 0
    dtype = "fp64" if vector.dtype == torch.float64 else "fp32"
    whole = Payload(len(vector), torch.tensor([0, len(vector)]), None, Floats(vector, dtype))
    return measure(whole.numpy(), layout)[0]
