"""Trainers, which run the local steps of clients: one client after another, or a block of many at once.

On a CPU, one client after another is the fastest for all but the smallest models.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.utils._pytree import tree_leaves

from cfedavg.core.errors import InputError
from cfedavg.simulate.cpu.replacements import join_layers, quicken
from cfedavg.simulate.local import Vectors, after, batches, local_steps, seed_generators, to_device
from cfedavg.simulate.plan import Plan
from cfedavg.simulate.vectorised.batches import Hosted, Pool, Resident, Rows, Timetable, Turn, round_up
from cfedavg.simulate.vectorised.recorder import Recorder
from cfedavg.simulate.vectorised.replacements import can_mask
from cfedavg.simulate.vectorised.step import Stack, Step
from cfedavg.task import Batch, Task, wrap_errors

_PREPARED = 4  # kinds of steps that are compiled before the first round
_CPU_BLOCK = 2**28  # bytes of weights that train at once on a CPU, where larger blocks gain nothing

_StepArguments = tuple[Stack, Batch, Tensor | None, Tensor | None, Tensor]
Start = Callable[[list[int]], Tensor]  # gives starting points: one x (d,) for all clients, or a row for each


@dataclass(frozen=True)
class Trained:
    """The result of the local steps of a block of n clients."""

    clients: list[int]
    K: list[int]
    x_0: Tensor  # starting point: (d,), or (n, d) if clients differ
    x_K: Tensor  # (n, d)
    b_K: Tensor  # (n, buffers)
    loss: Tensor  # (n,): each client's mean loss over its steps

    def part(self, start: int, stop: int) -> Trained:
        """Return the results of clients `start` to `stop - 1` of the block."""
        rows = slice(start, stop)
        x_0 = self.x_0 if self.x_0.dim() == 1 else self.x_0[rows]
        return Trained(self.clients[rows], self.K[rows], x_0, self.x_K[rows], self.b_K[rows], self.loss[rows])


class Trainer(Protocol):
    """A trainer runs the local steps of clients, one block of clients after another."""

    def train(self, t: int, start: Start, b: Tensor, clients: list[int]) -> Iterator[Trained]:
        """Train the clients in round `t`; yield the results of one block after another, in order.

        Client i takes K_i steps. `start` gives starting points; `b` are the buffers that all start with.
        """

    def shrink(self) -> None:
        """Train fewer clients at once from now on; raise InputError if a block is already one client."""


def too_large(device: torch.device) -> InputError:
    """Return the error that the device has too little memory to train even one client."""
    return InputError(
        f"`device` {device}: not even one client fits into its memory; "
        "lower `batch_size`, keep `residuals` on disk, or take a smaller model"
    )


def is_one_sample(error: Exception) -> bool:
    """Return whether BatchNorm raised the error, because a batch has only one sample."""
    return "more than 1 value per channel" in str(error)


def explain_one_sample(error: ValueError, client: int) -> ValueError:
    """Return a clear error if BatchNorm raised `error` for a batch of one sample, else `error`."""
    if not is_one_sample(error):
        return error
    return InputError(
        f"`batch_size` leaves client {client} a last batch of one sample, from which BatchNorm "
        "cannot compute a variance: choose another `batch_size`, or a model with GroupNorm"
    )


def train_client(
    plan: Plan,
    task: Task,
    vectors: Vectors,
    t: int,
    x: Tensor,
    b: Tensor,
    client: int,
    prepare: Callable[[Batch], Batch] = lambda batch: batch,
) -> Trained:
    """Train one client from parameters `x` and buffers `b` (lines 5 to 9 of Algorithm 1).

    The client trains in `vectors.model`, which is overwritten. `prepare` converts a batch for the model. An
    error in the user's loss or data names the client.
    """
    config, like = plan.config, next(p for p in vectors.model.parameters() if p.requires_grad)
    vectors.write(x, b)
    seed_generators(like.device, config.seed, t, client)
    data = batches(task.clients[client], config.batch_size, config.seed, t, client)
    take = wrap_errors(lambda: next(data), f"Task.clients[{client}] gives no batch")
    half = config.precision == "bf16"
    try:
        # Autocast's cache would reuse the bf16 weights of the first step in all steps.
        with torch.autocast(like.device.type, torch.bfloat16, enabled=half, cache_enabled=False):
            work = local_steps(
                vectors.model,
                wrap_errors(task.loss, f"Task.loss fails on a batch of client {client}"),
                (prepare(to_device(take(), like.device, like.dtype)) for _ in count()),
                plan.local_optimiser,
                plan.rates.eta_local(t),
                after(plan.steps.at(t, client)),
            )
    except ValueError as error:
        raise explain_one_sample(error, client) from error.__cause__
    x_K, b_K = vectors.read()
    return Trained([client], [work.K], x, x_K[None], b_K[None], work.loss[None])


class Sequential:
    """A trainer that trains one client after another; `prepare` converts a batch for the model.

    With `fast`, the model is computed by our layers for CPUs.
    """

    def __init__(
        self,
        plan: Plan,
        task: Task,
        vectors: Vectors,
        device: torch.device,
        prepare: Callable[[Batch], Batch],
        *,
        fast: bool = False,
    ) -> None:
        self.plan, self.task, self.device, self.prepare, self.fast = plan, task, device, prepare, fast
        self.vectors = Vectors(copy.deepcopy(vectors.model))
        if fast:
            self.task = replace(task, loss=quicken(task.loss))
            join_layers(self.vectors.model)

    def train(self, t: int, start: Start, b: Tensor, clients: list[int]) -> Iterator[Trained]:
        for client in clients:
            x = start([client]).reshape(-1)
            yield train_client(self.plan, self.task, self.vectors, t, x, b, client, self.prepare)

    def shrink(self) -> None:
        raise too_large(self.device)


class Batched:
    """A trainer that trains many clients at once, in blocks as large as memory allows."""

    def __init__(
        self,
        plan: Plan,
        task: Task,
        vectors: Vectors,
        device: torch.device,
        say: Callable[[str], None],
        *,
        conv_precision: str | None = None,
        unused: Collection[str] = (),
    ) -> None:
        """Set up the trainer; `unused` names the parameters that the loss does not use.

        `conv_precision` is the precision of our own convolution kernels; None means torch's kernels.
        """
        self.plan, self.task, self.vectors, self.device, self.say = plan, task, vectors, device, say
        self.model = copy.deepcopy(vectors.model).train()
        for module in self.model.modules():
            if isinstance(module, nn.RNNBase):  # vmap's weights have no memory that could be flattened
                vars(module)["flatten_parameters"] = lambda: None
        half, optimiser = plan.config.precision == "bf16", plan.local_optimiser
        self.step = Step(
            self.model, task.loss, optimiser, conv_precision=conv_precision, autocast=half, unused=unused
        )
        self.recorder = Recorder(self.step, device, say)
        self.dtype = next(p.dtype for p in self.model.parameters() if p.requires_grad)
        self.pool = Pool(task.clients, device, self.dtype)
        self.eta = torch.zeros((), device=device, dtype=self.dtype)
        self.block = plan.clients_per_round
        if device.type == "cpu":
            self.block = min(self.block, max(1, _CPU_BLOCK // (vectors.layout.d * self.dtype.itemsize)))
        self._stack: Stack | None = None
        self._masks: dict[int, bool] = {}  # batch width: whether rows of such a batch can be masked

    def train(self, t: int, start: Start, b: Tensor, clients: list[int]) -> Iterator[Trained]:
        """Train one block after another; if a block does not fit into memory, halve the block size."""
        left = list(clients)
        while left:
            block = left[: self.block]
            try:
                trained = self._train(t, start, b, block)
            except torch.OutOfMemoryError:
                self.block = len(block)
                self.shrink()
                continue
            yield trained
            left = left[len(block) :]

    def shrink(self) -> None:
        n, self.block = self.block, -(-self.block // 2)
        if n == 1:
            raise too_large(self.device) from None
        self.release()
        self.say(
            f"{n} clients at once do not fit into the memory of {self.device}: going on with {self.block}"
        )

    def release(self) -> None:
        """Free the memory of the device that this trainer holds."""
        self._stack = None
        self.recorder.forget()
        self.pool.clear()
        torch.cuda.empty_cache()

    def prepare(self, t: int, clients: list[int]) -> None:
        """Begin to compile the steps of round t, in the compiler process; the round is trained later.

        Raise an error if a step cannot be listed.
        """
        _, timetable = self._timetable(t, clients[: self.block])
        stack, source, rows = self._room(len(timetable.clients)), *self._data(timetable)
        kinds: dict[Any, Turn] = {}
        for turn in self._turns(timetable):
            if isinstance(turn.clients, int):
                kind = turn.clients, turn.width, turn.sizes is None, turn.active == turn.clients
                kinds.setdefault(kind, turn)
        for turn in list(kinds.values())[:_PREPARED]:
            batch = source.gather(rows.at(turn), turn.clients)
            self.recorder.prepare(*self._arguments(stack, batch, turn))

    def _train(self, t: int, start: Start, b: Tensor, clients: list[int]) -> Trained:
        order, timetable = self._timetable(t, clients)
        x_0 = start(list(timetable.clients))
        stack = self._fill(len(timetable.clients), x_0, b)
        self.eta.fill_(self.plan.rates.eta_local(t))
        seed_generators(self.device, self.plan.config.seed, t, clients[0])
        self._steps(stack, timetable)
        back = torch.from_numpy(np.argsort(order)).to(self.device)
        steps = timetable.steps[np.argsort(order)]
        K = torch.from_numpy(steps).to(self.device)
        x_K, b_K = self._flat(stack)
        x_0 = x_0 if x_0.dim() == 1 else x_0[back]
        return Trained(clients, steps.tolist(), x_0, x_K[back], b_K[back], stack.losses[back] / K)

    def _timetable(self, t: int, clients: list[int]) -> tuple[np.ndarray, Timetable]:
        """Return the timetable of a block of clients, and the order of the clients in it."""
        config, n = self.plan.config, len(clients)
        steps = np.array([self.plan.steps.at(t, i) for i in clients])
        order = np.argsort(-steps, kind="stable")  # clients with few steps come last
        # Idle clients fill the block up, so that only few block sizes are compiled.
        ordered = [clients[i] for i in order] + [clients[0]] * (round_up(n, self.block) - n)
        samples = np.array([self.plan.samples[i] for i in ordered])
        some = np.append(steps[order], np.zeros(len(ordered) - n, np.int64))
        return order, Timetable(ordered, samples, some, config.batch_size, config.seed, t)

    def _data(self, timetable: Timetable) -> tuple[Resident | Hosted, Rows]:
        """Return the source of the block's samples, and the sample numbers of every batch."""
        return self.pool.block(list(timetable.clients)), Rows(timetable, self.device)

    def _turns(self, timetable: Timetable) -> Iterator[Turn]:
        together = timetable.uniform or self._can_mask(timetable.clients)
        return timetable.together() if together else timetable.apart()

    def _steps(self, stack: Stack, timetable: Timetable) -> None:
        source, rows = self._data(timetable)
        for turn in self._turns(timetable):
            try:
                self._step(stack, source.gather(rows.at(turn), turn.clients), turn)
            except ValueError as error:
                first = 0 if isinstance(turn.clients, int) else int(turn.clients[0])
                raise explain_one_sample(error, timetable.clients[first]) from None

    def _step(self, stack: Stack, batch: Batch, turn: Turn) -> None:
        if isinstance(turn.clients, int):
            self.recorder(*self._arguments(stack, batch, turn))
            return
        # Copied out of the block and back; sizes vary, so the step is not recorded.
        rows = torch.as_tensor(turn.clients, device=self.device)
        part = stack.at(rows)
        self.step(part, batch, None, None, self.eta)
        stack.put(rows, part)

    def _arguments(self, stack: Stack, batch: Batch, turn: Turn) -> _StepArguments:
        """Return the arguments of a step of the first clients of the block."""
        assert isinstance(turn.clients, int)
        valid = active = None
        if turn.sizes is not None:
            sizes = torch.from_numpy(turn.sizes).to(self.device)
            valid = torch.arange(turn.width, device=self.device) < sizes[:, None]
        if turn.active < turn.clients:
            active = torch.arange(turn.clients, device=self.device) < turn.active
        return stack.part(turn.clients), batch, valid, active, self.eta

    def _fill(self, n: int, x_0: Tensor, b: Tensor) -> Stack:
        """Return the training state (Stack) of n clients, each at its starting point in `x_0` and `b`."""
        stack = self._room(n)
        for p, part in zip(stack.parameters, self.vectors.layout.slices(), strict=True):
            p.copy_(x_0[..., part].reshape(-1, *p.shape[1:]).expand_as(p))
        for mine, p in zip(stack.start, stack.parameters, strict=bool(stack.start)):
            mine.copy_(p)
        stack.losses.zero_()
        self.vectors.write(x_0.reshape(-1, x_0.shape[-1])[0], b)
        if stack.state:
            first = vmap(self.step.optimiser.init)(stack.parameters)
            for mine, its in zip(tree_leaves(stack.state), tree_leaves(first), strict=True):
                mine.copy_(its)
        for mine, buffer in zip(stack.buffers, self.vectors.model.buffers(), strict=True):
            mine.copy_(buffer.expand_as(mine))
        return stack

    def _room(self, n: int) -> Stack:
        """Return a stack of n clients with arbitrary values."""
        if self._stack is None or len(self._stack.losses) < n:
            self.recorder.forget()
            self._stack = self._empty(max(n, self.block))
        return self._stack.part(n)

    def _empty(self, n: int) -> Stack:
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        stacked = [_make_room(p, n, last=self.step.conv_precision is not None) for p in parameters]
        state = {
            name: [
                # A state tensor of its parameter's shape has the parameter's memory layout.
                torch.empty_like(p) if first.shape == p.shape[1:] else first.new_empty((n, *first.shape))
                for first, p in zip(each, stacked, strict=True)
            ]
            for name, each in self.step.optimiser.init([p.detach() for p in parameters]).items()
        }
        start = [torch.empty_like(p) for p in stacked] if self.step.optimiser.needs_start else []
        buffers = [_make_room(buffer, n, last=False) for buffer in self.model.buffers()]
        return Stack(stacked, state, start, buffers, torch.zeros(n, device=self.device, dtype=self.dtype))

    def _flat(self, stack: Stack) -> tuple[Tensor, Tensor]:
        """Return the trained parameters x_K and the buffers b_K, each with one row for each client."""
        n = len(stack.losses)
        x_K = torch.cat([p.reshape(n, -1) for p in stack.parameters], 1)
        names = set(self.vectors.buffer_layout.names)
        named = zip((name for name, _ in self.model.named_buffers()), stack.buffers, strict=True)
        b_K = [buffer.reshape(n, -1).to(self.dtype) for name, buffer in named if name in names]
        return x_K, torch.cat([x_K.new_zeros(n, 0), *b_K], 1)

    def _can_mask(self, clients: Sequence[int]) -> bool:
        """Return whether rows that do not count may fill up short batches; try once for each batch size."""
        largest = max(clients, key=lambda i: self.plan.samples[i])
        n = min(self.plan.config.batch_size, self.plan.samples[largest])
        if n not in self._masks:
            with torch.random.fork_rng(devices=[]):  # the trial must not change what a round draws
                batch = self.task.clients[largest].batch(np.arange(n))
                self._masks[n] = n == 1 or can_mask(self.model, self.task.loss, batch, n)
        return self._masks[n]


def _make_room(tensor: Tensor, n: int, *, last: bool) -> Tensor:
    """Return an uninitialised tensor with room for `tensor` n times, once for each client.

    With `last`, convolution weights (4-D tensors) lie in memory with channels last, as our kernels read them.
    """
    shape = (n, *tensor.shape)
    if last and tensor.dim() == 4:
        return tensor.new_empty([shape[i] for i in (0, 3, 4, 2, 1)]).permute(0, 4, 3, 1, 2)
    return tensor.new_empty(shape)
