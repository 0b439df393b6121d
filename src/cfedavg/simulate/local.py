"""A client's local work: the model as flat vectors, batches in an order drawn by key, local steps."""

from __future__ import annotations

import copy
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from cfedavg.core.keys import Purpose, key, permutation, signed
from cfedavg.core.layout import Layout
from cfedavg.optimise.local import LocalOptimiser
from cfedavg.optimise.local import State as OptimiserState
from cfedavg.task import Batch, Loss, Samples

# The dtype of the model for each `precision`; tf32 and bf16 concern only products of tensors.
PRECISIONS = dict.fromkeys(("float32", "tf32", "bf16"), torch.float32) | {"float64": torch.float64}


class Vectors:
    """A model as two flat vectors: x, the trainable parameters, and b, the buffers sent along with x.

    Buffers are, for example, BatchNorm's running statistics. Two kinds of buffers are not sent: buffers of a
    module whose parameters are all frozen, and buffers that the state_dict leaves out. `write` resets both
    kinds to their first values.
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
        """Return the sent buffers, looked up by name every time: some modules replace their tensors."""
        return [self.model.get_buffer(name) for name in self.buffer_layout.names]

    def identity(self) -> int:
        """Return a checksum of the model's names, shapes, dtypes and frozen values."""
        found = zlib.crc32(f"{self.layout.schema_hash} {self.buffer_layout.schema_hash}".encode())
        frozen = [p.detach() for p in self.model.parameters() if not p.requires_grad]
        for tensor in [*frozen, *(original for _, original in self._still)]:
            found = zlib.crc32(tensor.contiguous().cpu().numpy().data, found)
        return found

    def read(self) -> tuple[Tensor, Tensor]:
        """Return the vectors (x, b) of the model; b has the dtype of x."""
        x = torch.cat([p.detach().reshape(-1) for p in self._parameters])
        return x, torch.cat([x.new_zeros(0), *(b.detach().reshape(-1).to(x.dtype) for b in self._buffers)])

    @torch.no_grad()
    def write(self, x: Tensor, b: Tensor) -> None:
        """Write the vectors (x, b) into the model."""
        for target, part in zip(self._parameters, self.layout.slices(), strict=True):
            target.copy_(x[part].view_as(target))
        for buffer, part in zip(self._buffers, self.buffer_layout.slices(), strict=True):
            values = b[part].view_as(buffer)
            buffer.copy_(values if buffer.is_floating_point() else values.round())
        for name, original in self._still:
            self.model.get_buffer(name).copy_(original)


def model_of(blank: nn.Module, x: Tensor, b: Tensor) -> nn.Module:
    """Return a copy of the model `blank` on the CPU, with parameters `x` and buffers `b`."""
    vectors = Vectors(copy.deepcopy(blank))
    vectors.write(x, b)
    return vectors.model.cpu()


def _travelling_buffers(model: nn.Module) -> Iterator[str]:
    """Yield the names of the buffers that are sent; a shared buffer is named once, by its first name."""
    saved, seen = set(model.state_dict()), set[int]()
    for prefix, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        if own and not any(p.requires_grad for p in own):
            continue
        for name, buffer in module.named_buffers(prefix=prefix, recurse=False):
            if name in saved and id(buffer) not in seen:
                seen.add(id(buffer))
                yield name


@contextmanager
def reproducible(device: torch.device, precision: str = "float32") -> Iterator[None]:
    """Inside `with`, compute the same bits every time: no kernel is chosen by timing.

    TF32 is used only if `precision` allows it. The user's generators and settings are restored at the end.
    """
    devices = [device] if device.type == "cuda" else []
    tf32 = precision in ("tf32", "bf16")
    flags = torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=tf32)
    before = torch.backends.cuda.matmul.allow_tf32
    with torch.random.fork_rng(devices=devices), flags:
        torch.backends.cuda.matmul.allow_tf32 = tf32
        try:
            yield
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before


def seed_generators(device: torch.device, seed: int, t: int, client: int) -> None:
    """Seed torch's generators, from which dropout draws, by a key of round and client."""
    word = signed(key(seed, t, client, Purpose.DROPOUT))
    torch.default_generator.manual_seed(word)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(word)


def batches(samples: Samples, batch_size: int, seed: int, t: int, client: int) -> Iterator[Batch]:
    """Yield batches without end; each epoch has a new order, and an epoch's last batch may be short."""
    n, epoch = len(samples), 0
    while True:
        # The inner key is the seed of the outer key, so that each (seed, t, client, epoch) has its own key.
        order = permutation(key(key(seed, t, client, Purpose.BATCH), epoch, 0, Purpose.BATCH), n)
        for start in range(0, n, batch_size):
            yield samples.batch(order[start : start + batch_size])
        epoch += 1


def to_device(batch: Batch, device: torch.device, dtype: torch.dtype) -> Batch:
    """Return the batch on `device`, with floating-point tensors converted to `dtype`."""

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.to(device, dtype if leaf.is_floating_point() else leaf.dtype)

    return tree_map(move, batch)


def channels_last(batch: Batch) -> Batch:
    """Return the batch with its images in channels-last order, which CPUs convolve fastest."""

    def move(leaf: Any) -> Any:
        images = isinstance(leaf, Tensor) and leaf.dim() == 4
        return leaf.contiguous(memory_format=torch.channels_last) if images else leaf

    return tree_map(move, batch)


class LocalWork(NamedTuple):
    """The number K of steps done and the mean minibatch loss, a 0-D tensor that the GPU may still compute."""

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
    """Run lines 6 to 9 of Algorithm 1: step the model in place until `enough(k)` is true after step k.

    The number of steps need not be known beforehand: `enough` may count steps (`after(10)`) or read a clock
    (`clock(30.0)`).
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
    """Step the parameters that have a gradient, not the others; return the new optimiser state."""
    # An embedding's gradient may be sparse.
    grads = {
        i: p.grad.to_dense() if p.grad.is_sparse else p.grad
        for i, p in enumerate(parameters)
        if p.grad is not None
    }
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


def after(K: int) -> Callable[[int], bool]:
    """Return a function for `enough` that is true after K steps.

    >>> list(map(after(3), [1, 2, 3]))
    [False, False, True]
    """
    return lambda k: k >= K


def clock(seconds: float) -> Callable[[int], bool]:
    """Return a function for `enough` that is true once `seconds` have passed from now."""
    end = time.monotonic() + seconds
    return lambda k: time.monotonic() >= end
