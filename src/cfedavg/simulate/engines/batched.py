"""The batched trainer: the clients of a block take each step together, each with its own weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_leaves, tree_map

from cfedavg.simulate.engines.trainer import Start, Trained, explain_one_sample, too_large
from cfedavg.simulate.local import Vectors, seed_generators, to_device
from cfedavg.simulate.plan import Plan
from cfedavg.simulate.vectorised.pool import Pool
from cfedavg.simulate.vectorised.recorder import Recorder
from cfedavg.simulate.vectorised.rules import count_means, masks_hold
from cfedavg.simulate.vectorised.step import Stack, Step
from cfedavg.simulate.vectorised.timetable import Timetable, Turn, rounded_up
from cfedavg.task import Batch, Task

_CPU_BLOCK = 2**28  # bytes of weights that train at once on a CPU, where larger blocks gain nothing


class Batched:
    """A trainer of blocks of clients; a block is as large as memory allows."""

    def __init__(
        self,
        plan: Plan,
        task: Task,
        vectors: Vectors,
        device: torch.device,
        say: Callable[[str], None],
        *,
        dots: str | None = None,
        unused: Collection[str] = (),
    ) -> None:
        """Set up the trainer; `unused` are parameters that the loss does not use.

        `dots` is the precision of our convolutions on a GPU; None means torch's convolutions.
        """
        self.plan, self.task, self.vectors, self.device, self.say = plan, task, vectors, device, say
        config = plan.config
        self.model = copy.deepcopy(vectors.model).train()
        half, optimiser = config.precision == "bf16", plan.local_optimiser
        self.step = Step(self.model, task.loss, optimiser, dots=dots, autocast=half, unused=unused)
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
        """Train block after block; halve a block that does not fit into memory."""
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
        self._stack = None
        self.recorder.forget()
        self.pool.clear()
        torch.cuda.empty_cache()
        self.say(
            f"{n} clients at once do not fit into the memory of {self.device}: going on with {self.block}"
        )

    def _train(self, t: int, start: Start, b: Tensor, clients: list[int]) -> Trained:
        config, n = self.plan.config, len(clients)
        steps = np.array([self.plan.steps.at(t, i) for i in clients])
        order = np.argsort(-steps, kind="stable")  # clients with few steps come last
        # Idle clients fill the block up, so that only few block sizes are compiled.
        ordered = [clients[i] for i in order] + [clients[0]] * (rounded_up(n, self.block) - n)
        samples = np.array([self.plan.samples[i] for i in ordered])
        some = np.append(steps[order], np.zeros(len(ordered) - n, np.int64))
        timetable = Timetable(ordered, samples, some, config.batch_size, config.seed, t)
        x_0 = start(ordered)
        stack = self._fill(len(ordered), x_0, b)
        self.eta.fill_(self.plan.rates.eta_local(t))
        seed_generators(self.device, config.seed, t, clients[0])
        self._steps(stack, timetable)
        back = torch.from_numpy(np.argsort(order)).to(self.device)
        K = torch.from_numpy(steps).to(self.device)
        x_K, b_K = self._flat(stack)
        x_0 = x_0 if x_0.dim() == 1 else x_0[back]
        return Trained(clients, steps.tolist(), x_0, x_K[back], b_K[back], stack.losses[back] / K)

    def _steps(self, stack: Stack, timetable: Timetable) -> None:
        source = self.pool.block(list(timetable.clients))
        rows = timetable.rows(self.device)
        together = timetable.uniform or self._can_mask(timetable.clients)
        for turn in timetable.together() if together else timetable.apart():
            at = rows.at(turn)
            try:
                if isinstance(turn.clients, int):
                    self._play(stack.part(turn.clients), source.gather(at), turn)
                else:
                    self._some(stack, source.gather(at, turn.clients), turn)
            except ValueError as error:
                first = 0 if isinstance(turn.clients, int) else int(turn.clients[0])
                raise explain_one_sample(error, timetable.clients[first]) from None

    def _play(self, stack: Stack, batch: Batch, turn: Turn) -> None:
        """Run a turn of the first clients of the block."""
        n = len(stack.losses)
        valid = active = None
        if turn.sizes is not None:
            sizes = torch.from_numpy(turn.sizes).to(self.device)
            valid = torch.arange(turn.width, device=self.device) < sizes[:, None]
        if turn.active < n:
            active = torch.arange(n, device=self.device) < turn.active
        self.recorder(stack, batch, valid, active, self.eta)

    def _some(self, stack: Stack, batch: Batch, turn: Turn) -> None:
        """Run a turn of some clients, copied out of the block and back; record nothing, since sizes vary."""
        rows = torch.as_tensor(turn.clients, device=self.device)
        part = stack.at(rows)
        self.step(part, batch, None, None, self.eta)
        stack.put(rows, part)

    def _fill(self, n: int, x_0: Tensor, b: Tensor) -> Stack:
        """Return the stack of n clients, with each client at its starting point."""
        if self._stack is None or len(self._stack.losses) < n:
            self.recorder.forget()
            self._stack = self._empty(max(n, self.block))
        stack = self._stack.part(n)
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

    def _empty(self, n: int) -> Stack:
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        stacked = [_make_room(p, n, last=self.step.dots is not None) for p in parameters]
        mine = self.vectors.model.parameters()
        state = {
            name: [
                # A state tensor of its parameter's shape has the parameter's memory layout.
                torch.empty_like(p) if first.shape == p.shape[1:] else first.new_empty((n, *first.shape))
                for first, p in zip(each, stacked, strict=True)
            ]
            for name, each in self.step.optimiser.init([p.detach() for p in mine if p.requires_grad]).items()
        }
        start = [torch.empty_like(p) for p in stacked] if self.step.optimiser.needs_start else []
        buffers = [_make_room(buffer, n, last=False) for buffer in self.model.buffers()]
        return Stack(stacked, state, start, buffers, torch.zeros(n, device=self.device, dtype=self.dtype))

    def _flat(self, stack: Stack) -> tuple[Tensor, Tensor]:
        """Return the trained parameters x_K and buffers b_K, a row for each client."""
        n = len(stack.losses)
        x_K = torch.cat([p.reshape(n, -1) for p in stack.parameters], 1)
        names = set(self.vectors.buffer_layout.names)
        named = zip((name for name, _ in self.model.named_buffers()), stack.buffers, strict=True)
        b_K = [buffer.reshape(n, -1).to(self.dtype) for name, buffer in named if name in names]
        return x_K, torch.cat([x_K.new_zeros(n, 0), *b_K], 1)

    def _can_mask(self, clients: Sequence[int]) -> bool:
        """Return whether masked rows leave a step unchanged; try this once, in float64, on real samples.

        Masked rows change a step if a layer mixes the samples of a batch (BatchNorm), if the loss is no known
        mean, or if the step averages another tensor with as many rows as the batch (weights, for example).
        """
        largest = max(clients, key=lambda i: self.plan.samples[i])
        n = min(self.plan.config.batch_size, self.plan.samples[largest])
        if n not in self._masks:
            with torch.random.fork_rng(devices=[]):  # the trial must not change what a round draws
                batch = self.task.clients[largest].batch(np.arange(n))
                self._masks[n] = n == 1 or self._try_masks(batch, n)
        return self._masks[n]

    def _try_masks(self, batch: Batch, n: int) -> bool:
        few, loss = min(4, n), self.task.loss
        try:
            small = tree_map(lambda leaf: leaf[:few], batch)
        except (IndexError, TypeError):  # the batch has no rows
            return False
        if not masks_hold(self.model, loss, small, few):
            return False
        found = {
            count_means(self.model, loss, to_device(each, self.device, self.dtype), k)
            for each, k in ((small, few), (batch, n))
        }
        return len(found) == 1


def _make_room(tensor: Tensor, n: int, *, last: bool) -> Tensor:
    """Return an empty tensor for n clients; with `last`, convolution weights lie as our kernels read them."""
    shape = (n, *tensor.shape)
    if last and tensor.dim() == 4:
        return tensor.new_empty([shape[i] for i in (0, 3, 4, 2, 1)]).permute(0, 4, 3, 1, 2)
    return tensor.new_empty(shape)
