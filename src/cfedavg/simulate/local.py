"""Work on one model: its flat vectors, a client's batches and local steps, evaluation on the test set."""

from __future__ import annotations

import copy
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from cfedavg.core.errors import InputError
from cfedavg.core.keys import Purpose, key, permutation, signed
from cfedavg.core.layout import Layout
from cfedavg.core.run_files import Record
from cfedavg.optimise.local import SGD, Fixed, LocalOptimiser, Tensors
from cfedavg.optimise.local import State as OptimiserState
from cfedavg.task import Batch, Loss, Samples, Task, accuracy, check_number, cross_entropy, wrap_errors

# The dtype of the model for each `precision`; tf32 and bf16 concern only products of tensors.
PRECISIONS = dict.fromkeys(("float32", "tf32", "bf16"), torch.float32) | {"float64": torch.float64}
EVALUATION_BATCH = {"cpu": 512, "cuda": 2500}  # samples in a batch of the test set


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
        sent = dict(_sent_buffers(model))
        known = set(map(id, sent.values()))
        self._unsent = [(name, b.clone()) for name, b in model.named_buffers() if id(b) not in known]
        self.buffer_layout = Layout(
            tuple(sent),
            tuple(tuple(buffer.shape) for buffer in sent.values()),
            tuple(str(buffer.dtype).removeprefix("torch.") for buffer in sent.values()),
        )

    @property
    def _buffers(self) -> list[Tensor]:
        """Return the sent buffers, looked up by name every time: some modules replace their tensors."""
        return [self.model.get_buffer(name) for name in self.buffer_layout.names]

    def identity(self) -> int:
        """Return a checksum of the model's names, shapes, dtypes and frozen values."""
        found = zlib.crc32(f"{self.layout.schema_hash} {self.buffer_layout.schema_hash}".encode())
        frozen = [p.detach() for p in self.model.parameters() if not p.requires_grad]
        for tensor in [*frozen, *(original for _, original in self._unsent)]:
            found = zlib.crc32(tensor.contiguous().cpu().numpy().data, found)
        return found

    def read(self) -> tuple[Tensor, Tensor]:
        """Return the vectors (x, b) of the model; b has the dtype of x."""
        x = torch.cat([p.detach().reshape(-1) for p in self._parameters])
        return x, torch.cat([x.new_zeros(0), *(b.detach().reshape(-1).to(x.dtype) for b in self._buffers)])

    def split(self, x: Tensor) -> list[Tensor]:
        """Return views of vector x: a tensor for each parameter."""
        return [x[at].view_as(p) for p, at in zip(self._parameters, self.layout.slices(), strict=True)]

    @torch.no_grad()
    def write(self, x: Tensor, b: Tensor) -> None:
        """Write the vectors (x, b) into the model."""
        for target, values in zip(self._parameters, self.split(x), strict=True):
            target.copy_(values)
        for buffer, part in zip(self._buffers, self.buffer_layout.slices(), strict=True):
            values = b[part].view_as(buffer)
            buffer.copy_(values if buffer.is_floating_point() else values.round())
        for name, original in self._unsent:
            self.model.get_buffer(name).copy_(original)


def model_of(blank: nn.Module, x: Tensor, b: Tensor) -> nn.Module:
    """Return a copy of the model `blank` on the CPU, with parameters `x` and buffers `b`."""
    vectors = Vectors(copy.deepcopy(blank))
    vectors.write(x, b)
    return vectors.model.cpu()


def _sent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers that are sent, with their names; a shared buffer comes once, with its first name."""
    saved, seen = set(model.state_dict()), set[int]()
    for prefix, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        if own and not any(p.requires_grad for p in own):
            continue
        for name, buffer in module.named_buffers(prefix=prefix, recurse=False):
            if name in saved and id(buffer) not in seen:
                seen.add(id(buffer))
                yield name, buffer


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
    """Seed torch's generators, from which dropout draws, with a key made of `seed`, round and client."""
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

    def move(leaf: Tensor) -> Tensor:
        return leaf.to(device, dtype if leaf.is_floating_point() else leaf.dtype)

    return tree_map_only(Tensor, move, batch)


def channels_last(batch: Batch) -> Batch:
    """Return the batch with its images in channels-last order, which CPUs convolve fastest."""

    def move(leaf: Tensor) -> Tensor:
        return leaf.contiguous(memory_format=torch.channels_last) if leaf.dim() == 4 else leaf

    return tree_map_only(Tensor, move, batch)


class LocalWork(NamedTuple):
    """The number K of steps done and their mean loss, a 0-D tensor that a GPU may not have computed yet."""

    K: int
    loss: Tensor


def local_steps(
    model: nn.Module,
    loss: Loss,
    batches: Iterable[Batch],
    optimiser: LocalOptimiser,
    eta_L: float,
    enough: Callable[[int], bool],
    correction: Tensors = (),
) -> LocalWork:
    """Run lines 6 to 9 of Algorithm 1: step the model in place until `enough(k)` is true after step k.

    The number of steps need not be known beforehand: `enough` may count steps (`after(10)`) or read a clock
    (`clock(30.0)`). `correction` is c - c_i, a tensor for each trainable parameter; without it, c = c_i.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    fixed = Fixed.begin(optimiser, parameters, correction)
    with torch.no_grad():
        state = optimiser.init(parameters)
    total, K = parameters[0].new_zeros(()), 0
    model.train()
    for batch in batches:
        minibatch_loss, state = local_step(model, parameters, loss, batch, optimiser, state, eta_L, fixed)
        total += minibatch_loss
        K += 1
        if enough(K):
            break
    return LocalWork(K, total / K)


def local_step(
    model: nn.Module,
    parameters: list[nn.Parameter],
    loss: Loss,
    batch: Batch,
    optimiser: LocalOptimiser,
    state: OptimiserState,
    eta_L: float,
    fixed: Fixed,
) -> tuple[Tensor, OptimiserState]:
    """Run lines 7 and 8 of Algorithm 1: step the model in place; return the loss and the new optimiser state.

    `parameters` are the model's trainable parameters; `fixed` is what stays the same in all steps.
    """
    for p in parameters:
        p.grad = None
    minibatch_loss = loss(model, batch)
    minibatch_loss.backward()  # type: ignore[no-untyped-call]
    return minibatch_loss.detach(), _descend(parameters, optimiser, state, eta_L, fixed)


@torch.no_grad()
def _descend(
    parameters: list[nn.Parameter],
    optimiser: LocalOptimiser,
    state: OptimiserState,
    eta_L: float,
    fixed: Fixed,
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
    if optimiser == SGD() and isinstance(eta_L, float):
        # The same numbers as below, without new tensors; these take 4% of the CNN's step on a CPU.
        for p, g in zip(used, grads.values(), strict=True):
            p.add_(g, alpha=-eta_L)
        return state
    before = {name: [each[i] for i in grads] for name, each in state.items()}
    following, after = optimiser.step(used, list(grads.values()), before, eta_L, fixed.part(list(grads)))
    for p, new in zip(used, following, strict=True):
        p.copy_(new)
    found = {name: list(each) for name, each in state.items()}
    for name, new_state in after.items():
        for i, each in zip(grads, new_state, strict=True):
            found[name][i] = each
    return found


def after(K: int) -> Callable[[int], bool]:
    """Return a value for `enough` in `local_steps`: a function that is true after K steps.

    >>> list(map(after(3), [1, 2, 3]))
    [False, False, True]
    """
    return lambda k: k >= K


def clock(seconds: float) -> Callable[[int], bool]:
    """Return a value for `enough` in `local_steps`: a function that is true `seconds` from now and later."""
    end = time.monotonic() + seconds
    return lambda k: time.monotonic() >= end


class EvaluatedBatches(NamedTuple):
    """Results of some test batches; each list has one entry for each batch."""

    starts: Sequence[int]  # the place of the batch's first sample in the test set
    losses: list[float]  # the batch's mean loss times its number of samples
    values: list[np.ndarray]  # the metric of each sample


def evaluate(model: nn.Module, task: Task, device: torch.device, dtype: torch.dtype) -> Record:
    """Evaluate a model on the test set; return the test columns of a row of metrics.

    These are `test_loss`, the metric, and the metric's mean and minimum over the clients' test sets.
    """
    return summarise_batches(task, [evaluate_batches(model, task, device, dtype)])


@torch.no_grad()
def evaluate_batches(
    model: nn.Module,
    task: Task,
    device: torch.device,
    dtype: torch.dtype,
    first: int = 0,
    every: int = 1,
    prepare: Callable[[Batch], Batch] = lambda batch: batch,
) -> EvaluatedBatches:
    """Evaluate test batches `first`, `first + every`, ...; `prepare` converts each batch for the model."""
    n, size = 0 if task.test is None else len(task.test), EVALUATION_BATCH.get(device.type, 512)
    starts = range(first * size, n, every * size)
    if task.test is None or not starts:
        return EvaluatedBatches([], [], [])
    model.eval()
    losses, metrics = [], []
    for start in starts:
        rows = np.arange(start, min(start + size, n))
        batch = wrap_errors(task.test.batch, "Task.test gives no batch")(rows)
        loss, metric = _loss_and_metric(model, task, prepare(to_device(batch, device, dtype)), len(rows))
        losses.append(loss.double() * len(rows))
        metrics.append(metric)
    values = torch.cat(metrics).cpu().numpy()
    each = np.split(values, np.cumsum([len(m) for m in metrics])[:-1])
    return EvaluatedBatches(starts, torch.stack(losses).tolist(), each)


def evaluate_first(model: nn.Module, task: Task, device: torch.device, dtype: torch.dtype) -> None:
    """Evaluate the first batch of the test set, so that an error is raised before the run starts."""
    evaluate_batches(model, task, device, dtype, every=sys.maxsize)


def summarise_batches(task: Task, parts: Sequence[EvaluatedBatches]) -> Record:
    """Return the test columns of a row of metrics; batches are summed in the order of the test set."""
    batches = sorted(
        (batch for part in parts for batch in zip(*part, strict=True)), key=lambda batch: batch[0]
    )
    if not batches:
        return {}
    _, losses, each = zip(*batches, strict=True)
    values = np.concatenate(each)
    record: Record = {"test_loss": float(torch.tensor(losses, dtype=torch.float64).sum()) / len(values)}
    record[f"test_{task.metric_name}"] = float(values.mean())
    means = np.empty(sum(len(clients) for clients, _ in task.test_groups))
    for clients, rows in task.test_groups:
        means[clients] = values[rows].mean(axis=1)
    if len(means):
        record[f"client_{task.metric_name}_mean"] = float(means.mean())
        record[f"client_{task.metric_name}_min"] = float(means.min())
    return record


def _loss_and_metric(model: nn.Module, task: Task, batch: Batch, n: int) -> tuple[Tensor, Tensor]:
    """Return the loss of a batch of n samples, and the metric of each sample."""
    loss: Loss = wrap_errors(task.loss, "Task.loss fails on a batch of Task.test")
    metric = wrap_errors(task.metric, "Task.metric fails on a batch of Task.test")
    if task.loss is cross_entropy and task.metric is accuracy:
        # One forward pass serves both loss and metric.
        output = wrap_errors(lambda: model(batch[0]), "Task.model fails on a batch of Task.test")()
        known: Any = lambda _: output  # noqa: E731
        return loss(known, batch), _per_sample(metric(known, batch), n)
    value = loss(model, batch)
    check_number(value)
    return value, _per_sample(metric(model, batch), n)


def _per_sample(found: Any, n: int) -> Tensor:
    """Return a metric as n numbers, one for each sample; a single number for the batch is repeated."""
    try:
        return torch.as_tensor(found).double().expand(n)
    except (TypeError, ValueError, RuntimeError):
        shape = f" of shape {list(found.shape)}" if isinstance(found, Tensor) else ""
        raise InputError(
            f"Task.metric must return {n} numbers, one for each sample, or one number for the batch, "
            f"got {type(found).__name__}{shape}"
        ) from None
