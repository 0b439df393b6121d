"""What travels, in bytes: the lengths of encoded messages, headers included."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from cfedavg.files import make_folder, write_atomic
from cfedavg.layout import Layout
from cfedavg.payload import Floats, Payload
from cfedavg.wire import encode, measure


class Ledger:
    """Counts messages, and keeps the clients' as files, with the layout, if a folder is given.

    Counting runs the coders and nothing else of the wire; they let other threads run, so an engine may
    count a round while it trains the next.
    """

    def __init__(self, layout: Layout, keep: Path | None = None) -> None:
        self.layout, self.keep = layout, keep
        if keep is not None:
            make_folder(keep, "--messages")
            write_atomic(keep / "layout.json", layout.text.encode())

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


def dense_bytes(vector: Tensor, layout: Layout) -> int:
    """The bytes of a vector sent whole; none where there is nothing to send."""
    if not len(vector):
        return 0
    dtype = "fp64" if vector.dtype == torch.float64 else "fp32"
    whole = Payload(len(vector), torch.tensor([0, len(vector)]), None, Floats(vector, dtype))
    return measure(whole.numpy(), layout)[0]
