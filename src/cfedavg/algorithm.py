"""Algorithm 1 (CFedAvg), line by line. Read this first; everything else serves these four functions.

Each round t, the server sends x to the clients. Client i does K_i local SGD steps from x (lines 5-9, in
`local.py`), which end at x_K. Then:

    g       = x_K - x            or (x_K - x) / K_i             lines 10, 11   local_update
    p       = g + e                                              line 12        feed_back
    payload = C(p)                                               lines 13, 14   feed_back
    e_next  = p - C(p)                                           line 15        feed_back
    delta_tilde = mean of C(p) over the clients                  lines 17, 18   average
    x_next  = x + eta * delta_tilde                              line 19        server_update

What a client cannot send now stays in its residual e and is sent later. That is why the mean model with
all residuals added, x + eta * mean(e), moves exactly as if nothing had been compressed (the paper's
Iterative Step lemma).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from cfedavg.compress import Compressor, client_of_value, values_of
from cfedavg.layout import Layout
from cfedavg.payload import Payload


def local_update(x: Tensor, x_K: Tensor, K: int | Tensor, update: str) -> Tensor:
    """What the local steps changed: line 10 for `sum` (all clients do the same K), line 11 for `mean`.

    For one client, (d,) with its K, or for a block, (n, d) with K of shape (n, 1).
    """
    return x_K - x if update == "sum" else (x_K - x) / K


def feed_back(
    g: Tensor, e: Tensor, compressor: Compressor, key: int | Tensor, layout: Layout | None = None
) -> tuple[Payload, Tensor]:
    """Lines 12 to 15 for one client, (d,), or for a block, (n, d): the payload to send and the next residual.

    >>> import torch
    >>> from cfedavg.compress import parse
    >>> g, e = torch.tensor([1.0, -3.0, 0.5]), torch.tensor([0.5, 0.0, 0.0])
    >>> payload, e_next = feed_back(g, e, parse("topk(0.6)"), key=0)
    >>> payload.indices.tolist(), payload.values.data.tolist(), e_next.tolist()
    ([1], [-3.0], [1.5, 0.0, 0.5])
    """
    p = g + e
    payload = compressor.compress(p, key, layout)
    return payload, subtract(p, payload)


def subtract(p: Tensor, payload: Payload) -> Tensor:
    """p - C(p), at the cost of the coordinates sent."""
    values = values_of(payload).to(p.dtype)
    if payload.indices is None:
        return p - values.view_as(p)
    e_next = p.clone()
    e_next.view(-1)[payload.indices + payload.d * client_of_value(payload.offsets)] -= values
    return e_next


def average(like: Tensor, payloads: Iterable[tuple[Payload, Sequence[float]]]) -> Tensor:
    """Lines 17 and 18: delta_tilde, the weighted mean of what arrived, summed in the order given.

    Each payload, of a client or of a block, comes with its clients' weights; a weight of 0 leaves a client
    out. The cost is that of the coordinates received, and the order is fixed, so the sum is the same bit for
    bit wherever and however often it is made. `like` gives length, dtype and device.
    """
    total, weight = like.new_zeros(like.shape), 0.0
    for payload, weights in payloads:
        values, shares = values_of(payload).to(total.dtype), total.new_tensor(weights)
        if payload.indices is None:
            for row, share in zip(values.view(len(payload), -1), shares, strict=True):
                total += row * share
        else:
            _add_in_order(total, payload.indices, values * shares[client_of_value(payload.offsets)])
        weight += sum(weights)
    return total / weight if weight else total


def _add_in_order(total: Tensor, indices: Tensor, values: Tensor) -> None:
    """Adds each value to its coordinate, one after another where a coordinate occurs more than once."""
    if total.is_cuda:
        total.index_put_((indices,), values, accumulate=True)  # sorts by coordinate, and so keeps the order
    else:
        total.index_add_(0, indices, values)


def server_update(x: Tensor, delta_tilde: Tensor, eta: float) -> Tensor:
    """Line 19. If nothing arrived, delta_tilde is zero and x stays."""
    return x + eta * delta_tilde
