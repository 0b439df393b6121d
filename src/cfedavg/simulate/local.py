"""A client's work up to x_K: the model as a flat vector, batches in keyed order, local steps."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from cfedavg.core.keys import Purpose, key, permutation
from cfedavg.core.layout import Layout
from cfedavg.optimise.local import LocalOptimiser
from cfedavg.optimise.local import State as OptimiserState
from cfedavg.task import Batch, Loss, Samples


class Vectors:
    """A model as two flat vectors: x, its trainable parameters, and b, the buffers that travel with them.

    Buffers are BatchNorm's running statistics and the like. Those of a module whose parameters are all
    frozen, and those that a state_dict leaves out, do not travel: every `write` puts them back.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.layout = Layout.of(model)
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        travelling = list(_travelling_buffers(model))
        found = [model.get_buffer(name) for name in travelling]
        known = {id(buffer) for buffer in found}
        self._still = [(name, b.clone()) for name, b in model.named_buffers() if id(b) not in known]
        self.buffer_layout = Layout(
            tuple(travelling),
            tuple(tuple(buffer.shape) for buffer in found),
            tuple(str(buffer.dtype).removeprefix("torch.") for buffer in found),
        )

    @property
    def _buffers(self) -> list[Tensor]:
        """Looked up by name every time: some modules put new tensors in the place of the old ones."""
        return [self.model.get_buffer(name) for name in self.buffer_layout.names]

    def identity(self) -> int:
        """A number that two models share if they have the same schema and the same frozen values."""
        found = zlib.crc32(f"{self.layout.schema_hash} {self.buffer_layout.schema_hash}".encode())
        frozen = [p.detach() for p in self.model.parameters() if not p.requires_grad]
        for tensor in [*frozen, *(original for _, original in self._still)]:
            found = zlib.crc32(tensor.contiguous().cpu().numpy().data, found)
        return found

    def read(self) -> tuple[Tensor, Tensor]:
        """(x, b) of the model as it stands; b in the dtype of x."""
        x = torch.cat([p.detach().reshape(-1) for p in self._parameters])
        return x, torch.cat([x.new_zeros(0), *(b.detach().reshape(-1).to(x.dtype) for b in self._buffers)])

    @torch.no_grad()
    def write(self, x: Tensor, b: Tensor) -> None:
        """Puts (x, b) into the model."""
        for target, part in zip(self._parameters, self.layout.slices(), strict=True):
            target.copy_(x[part].view_as(target))
        for buffer, part in zip(self._buffers, self.buffer_layout.slices(), strict=True):
            values = b[part].view_as(buffer)
            buffer.copy_(values if buffer.is_floating_point() else values.round())
        for name, original in self._still:
            self.model.get_buffer(name).copy_(original)


def _travelling_buffers(model: nn.Module) -> Iterator[str]:
    """The names of the buffers that travel; a shared one has the first of its names."""
    saved, seen = set(model.state_dict()), set[int]()
    for prefix, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        if own and not any(p.requires_grad for p in own):
            continue
        for name, buffer in module.named_buffers(prefix=prefix, recurse=False):
            if name in saved and id(buffer) not in seen:
                seen.add(id(buffer))
                yield name


def batches(samples: Samples, batch_size: int, seed: int, t: int, client: int) -> Iterator[Batch]:
    """Batches without end: epoch after epoch, each in a new order, the last batch of an epoch short."""
    n, epoch = len(samples), 0
    while True:
        # The epoch is mixed into the seed's place: a key of its own for each (seed, t, client, epoch).
        order = permutation(key(key(seed, t, client, Purpose.BATCH), epoch, 0, Purpose.BATCH), n)
        for start in range(0, n, batch_size):
            yield samples.batch(order[start : start + batch_size])
        epoch += 1


def to_device(batch: Batch, device: torch.device, dtype: torch.dtype) -> Batch:
    """The batch on a device, its floating point tensors in the model's precision."""

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.to(device, dtype if leaf.is_floating_point() else leaf.dtype)

    return tree_map(move, batch)


def channels_last(batch: Batch) -> Batch:
    """The batch with its images lying channels-last, which is how CPUs convolve fastest."""

    def move(leaf: Any) -> Any:
        images = isinstance(leaf, Tensor) and leaf.dim() == 4
        return leaf.contiguous(memory_format=torch.channels_last) if images else leaf

    return tree_map(move, batch)


class LocalWork(NamedTuple):
    """K steps were done, with this mean loss of their minibatches (a 0-d tensor, not yet synchronised)."""

    K: int
    loss: Tensor


def local_steps(
    model: nn.Module,
    loss: Loss,
    batches: Iterable[Batch],
    optimiser: LocalOptimiser,
    eta_L: float,
    enough: Callable[[int], bool],
) -> LocalWork:
    """Lines 6 to 9: steps of the optimiser on the model in place, until `enough(k)` says so after step k.

    K need not be known beforehand: `enough` may count (`after(10)`) or look at a clock (`clock(30.0)`).
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    start = [p.detach().clone() for p in parameters] if optimiser.needs_start else []
    with torch.no_grad():
        state = optimiser.init(parameters)
    total, K = parameters[0].new_zeros(()), 0
    model.train()
    for batch in batches:
        for p in parameters:
            p.grad = None
        minibatch_loss = loss(model, batch)
        minibatch_loss.backward()  # type: ignore[no-untyped-call]
        state = _step(parameters, optimiser, state, eta_L, start)
        total += minibatch_loss.detach()
        K += 1
        if enough(K):
            break
    return LocalWork(K, total / K)


@torch.no_grad()
def _step(
    parameters: list[nn.Parameter],
    optimiser: LocalOptimiser,
    state: OptimiserState,
    eta_L: float,
    start: list[Tensor],
) -> OptimiserState:
    """One step of the parameters that have a gradient; the others, and their state, stay as they are."""
    grads = {i: _dense(p.grad) for i, p in enumerate(parameters) if p.grad is not None}
    if not grads:
        return state
    used: list[Tensor] = [parameters[i] for i in grads]
    before = {name: [each[i] for i in grads] for name, each in state.items()}
    origin = [start[i] for i in grads] if start else []
    following, after = optimiser.step(used, list(grads.values()), before, eta_L, origin)
    for p, new in zip(used, following, strict=True):
        p.copy_(new)
    found = {name: list(each) for name, each in state.items()}
    for name, new_state in after.items():
        for i, each in zip(grads, new_state, strict=True):
            found[name][i] = each
    return found


def _dense(grad: Tensor) -> Tensor:
    """An embedding's gradient may be sparse."""
    return grad.to_dense() if grad.is_sparse else grad


def after(K: int) -> Callable[[int], bool]:
    """Enough after K steps.

    >>> list(map(after(3), [1, 2, 3]))
    [False, False, True]
    """
    return lambda k: k >= K


def clock(seconds: float) -> Callable[[int], bool]:
    """Enough once so many seconds have passed: what a real client checks after every step."""
    end = time.monotonic() + seconds
    return lambda k: time.monotonic() >= end
