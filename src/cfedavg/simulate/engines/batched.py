"""The trainer that trains a block of many clients at once.

The clients of a block may belong to several runs: then runs train side by side.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.utils._pytree import tree_leaves

from cfedavg.core.keys import signed
from cfedavg.optimise.local import Fixed
from cfedavg.simulate.engines.requests import Block, Request, Round, Row, Trained
from cfedavg.simulate.engines.trainers import explain_one_sample, too_large
from cfedavg.simulate.local import Vectors, seed_generators
from cfedavg.simulate.plan import Plan
from cfedavg.simulate.vectorised.batches import Hosted, Pool, Resident, Rows, Timetable, Turn
from cfedavg.simulate.vectorised.recorder import Recorder
from cfedavg.simulate.vectorised.replacements import can_mask
from cfedavg.simulate.vectorised.sizes import busy_times, choose_sizes, fit, halve
from cfedavg.simulate.vectorised.step import Stack, Step
from cfedavg.task import Batch, Task

_PREPARED = 16  # kinds of steps that are compiled before the first round
_CPU_BLOCK = 2**28  # bytes of weights that train at once on a CPU, where larger blocks gain nothing
_GPU_FLOOR = 2**21  # a block of fewer weights takes as long for a step on a GPU

Source = Resident | Hosted
_StepArguments = tuple[Stack, Batch, Tensor | None, Tensor | None, Tensor]


class Batched:
    """A trainer that trains many clients at once, in blocks as large as memory allows.

    The clients may be those of several runs with the same model, loss, local optimiser, precision and batch
    size: `begin` announces their requests for the next round, and `train` gives each run its results.
    """

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
        self.loss, self.vectors, self.device, self.say = task.loss, vectors, device, say
        self.batch_size = plan.config.batch_size
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
        self.pool = Pool(device, self.dtype)
        self.block, self._most = 0, sys.maxsize  # clients at once: now, and the most that fit
        if device.type == "cpu":
            self._most = max(1, _CPU_BLOCK // (vectors.layout.d * self.dtype.itemsize))
        self.make_room(plan.clients_per_round)
        self._sizes: tuple[int, ...] = ()  # to which blocks shrink; see `choose_sizes`
        self._round = Round([])
        self._stack: Stack | None = None
        self._masks: dict[int, bool] = {}  # batch width: whether rows of such a batch can be masked

    def make_room(self, clients: int) -> None:
        """Train blocks of so many clients from now on, or as many as fit; never fewer than before."""
        self.block = min(self._most, max(self.block, clients))

    def choose_sizes(self, requests: Sequence[Request]) -> None:
        """Choose the sizes to which blocks shrink, from the steps of round 0 of the runs.

        A resumed run must choose the same sizes, so they do not depend on the round with which it goes on.
        """
        steps = [row.steps for row in Round(list(requests)).left]
        self.make_room(len(steps))
        blocks = [steps[i : i + self.block] for i in range(0, len(steps), self.block)]
        floor = max(1, _GPU_FLOOR // self.vectors.layout.d) if self.device.type == "cuda" else 1
        self._sizes = choose_sizes(busy_times(blocks), floor)[1:]

    def begin(self, requests: Sequence[Request]) -> None:
        """Announce the next round of several runs: its clients train in the same blocks."""
        self._round = Round(list(requests))
        self.make_room(len(self._round.left))

    def train(self, request: Request) -> Iterator[Trained]:
        """Train one block after another; if a block does not fit into memory, halve the block size.

        A block may hold clients of other runs too (see `begin`); their results wait for their own call.
        """
        if request not in self._round.requests:
            self.begin([request])
        now, left = self._round, len(request.clients)
        now.requests.remove(request)
        while left:
            while not now.ready[id(request)]:
                self._advance(now)
            trained = now.ready[id(request)].pop(0)
            left -= len(trained.clients)
            yield trained

    def _advance(self, now: Round) -> None:
        """Train the next block of a round. If a block has failed, raise its error for every run."""
        if now.error:
            raise now.error
        block = now.left[: self.block]
        try:
            trained = self._train(block)
        except torch.OutOfMemoryError:
            self.block = len(block)
            self.shrink()
            return
        except Exception as error:
            now.error = error
            raise
        del now.left[: len(block)]
        for request, part in trained:
            now.ready[id(request)].append(part)

    def shrink(self) -> None:
        n, self.block = self.block, -(-self.block // 2)
        if n == 1:
            raise too_large(self.device) from None
        self._most = self.block
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

    def prepare(self, requests: Sequence[Request]) -> None:
        """Begin to compile the steps of a round, in the compiler process; the round is trained later.

        Raise an error if a step cannot be listed.
        """
        rows = Round(list(requests)).left
        self.make_room(len(rows))
        block = self._place(rows[: self.block])
        stack, eta, (source, numbers) = self._room(len(block.order)), self._rates(block), self._data(block)
        kinds: dict[Any, Turn] = {}
        for turn in self._turns(block):
            if isinstance(turn.clients, int):
                kind = turn.clients, turn.width
                kinds.setdefault(kind, turn)
        for turn in list(kinds.values())[:_PREPARED]:
            assert isinstance(turn.clients, int)
            self.recorder.prepare(*self._arguments(stack, source, numbers, turn, eta))

    def _train(self, rows: list[Row]) -> list[tuple[Request, Trained]]:
        """Train a block of clients; return each request and the results of its clients in this block."""
        block, parts = self._place(rows), []
        stack = self._room(len(block.order))
        for request, places, mine in block.parts():
            clients = [block.timetable.clients[place] for place in places]
            x_0, correction = request.start(clients), request.correction and request.correction(clients)
            self._fill(stack, places, x_0, request.b, correction)
            if x_0.dim() > 1:
                x_0 = x_0[torch.from_numpy(np.searchsorted(places, mine)).to(x_0.device)]
            parts.append((request, mine, x_0))
        self._init(stack)
        first = rows[0]
        seed_generators(self.device, first.request.plan.config.seed, first.request.t, first.client)
        self._steps(stack, block)
        x_K, b_K = self._flat(stack)
        found = []
        for request, mine, x_0 in parts:
            at, steps = torch.from_numpy(mine).to(self.device), block.timetable.steps[mine]
            loss = stack.losses[at] / torch.from_numpy(steps).to(self.device)
            clients = [block.timetable.clients[place] for place in mine]
            found.append((request, Trained(clients, steps.tolist(), x_0, x_K[at], b_K[at], loss)))
        return found

    def _place(self, rows: list[Row]) -> Block:
        """Return the block of these rows, with its timetable."""
        n, steps = len(rows), np.array([row.steps for row in rows])
        order = np.argsort(-steps, kind="stable")  # clients with few steps come last
        # Idle clients fill the block up, so that only few block sizes are compiled.
        idle = np.zeros(fit(n, [*halve(self.block), *self._sizes]) - n, np.int64)
        order = np.append(order, idle)
        placed = [rows[i] for i in order]
        seeds = np.array([signed(row.request.plan.config.seed) for row in placed], np.int64)
        timetable = Timetable(
            [row.client for row in placed],
            np.array([len(row.samples) for row in placed]),
            np.append(steps[order[:n]], idle),
            self.batch_size,
            seeds,
            np.array([row.request.t for row in placed], np.int64),
        )
        return Block(rows, order, timetable)

    def _data(self, block: Block) -> tuple[Source, Rows]:
        """Return the source of the block's samples, and the sample numbers of every batch."""
        return self.pool.block([row.samples for row in block.placed]), Rows(block.timetable, self.device)

    def _rates(self, block: Block) -> Tensor:
        """Return the local rate of each client of the block."""
        rates = [row.request.plan.rates.eta_local(row.request.t) for row in block.placed]
        return torch.tensor(rates, device=self.device, dtype=self.dtype)

    def _turns(self, block: Block) -> Iterator[Turn]:
        together = block.timetable.uniform or self._can_mask(block.rows)
        n = len(block.order)
        sizes = [n, *(size for size in self._sizes if size < n)]
        return block.timetable.together(sizes) if together else block.timetable.apart()

    def _steps(self, stack: Stack, block: Block) -> None:
        (source, numbers), eta = self._data(block), self._rates(block)
        for turn in self._turns(block):
            try:
                self._step(stack, source, numbers, turn, eta)
            except ValueError as error:
                first = 0 if isinstance(turn.clients, int) else int(turn.clients[0])
                raise explain_one_sample(error, block.timetable.clients[first]) from None

    def _step(self, stack: Stack, source: Source, numbers: Rows, turn: Turn, eta: Tensor) -> None:
        if isinstance(turn.clients, int):
            self.recorder(*self._arguments(stack, source, numbers, turn, eta))
            return
        # Copied out of the block and back; sizes vary, so the step is not recorded.
        batch = source.gather(numbers.at(turn), turn.clients)
        rows = torch.as_tensor(turn.clients, device=self.device)
        part = stack.at(rows)
        self.step(part, batch, None, None, eta[rows])
        stack.put(rows, part)

    def _arguments(
        self, stack: Stack, source: Source, numbers: Rows, turn: Turn, eta: Tensor
    ) -> _StepArguments:
        """Return the arguments of a step of the first clients of the block."""
        assert isinstance(turn.clients, int)
        valid = numbers.valid(turn) if turn.masked else None
        active = None if turn.active is None else numbers.active(turn)
        batch = source.gather(numbers.at(turn), turn.clients)
        return stack.part(turn.clients), batch, valid, active, eta[: turn.clients]

    def _fill(
        self, stack: Stack, places: np.ndarray, x_0: Tensor, b: Tensor, correction: Tensor | None
    ) -> None:
        """Write starting points, buffers and corrections into the clients at `places` of the stack."""
        at: Any = (
            slice(None) if len(places) == len(stack.losses) else torch.from_numpy(places).to(self.device)
        )
        for p, part in zip(stack.parameters, self.vectors.layout.slices(), strict=True):
            p[at] = x_0[..., part].reshape(-1, *p.shape[1:])
        parts, there = self.vectors.layout.slices(), stack.fixed.correction
        for mine, part in zip(there, parts, strict=bool(there)):
            mine[at] = 0.0 if correction is None else correction[:, part].reshape(-1, *mine.shape[1:])
        self.vectors.write(x_0.reshape(-1, x_0.shape[-1])[0], b)
        for mine, buffer in zip(stack.buffers, self.vectors.model.buffers(), strict=True):
            mine[at] = buffer

    def _init(self, stack: Stack) -> None:
        """Put the rest of a stack, whose parameters are set, into its state before the first step."""
        for mine, p in zip(stack.fixed.start, stack.parameters, strict=bool(stack.fixed.start)):
            mine.copy_(p)
        stack.losses.zero_()
        if stack.state:
            first = vmap(self.step.optimiser.init)(stack.parameters)
            for mine, its in zip(tree_leaves(stack.state), tree_leaves(first), strict=True):
                mine.copy_(its)

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
        fixed = Fixed.begin(self.step.optimiser, stacked)
        buffers = [_make_room(buffer, n, last=False) for buffer in self.model.buffers()]
        return Stack(stacked, state, fixed, buffers, torch.zeros(n, device=self.device, dtype=self.dtype))

    def _flat(self, stack: Stack) -> tuple[Tensor, Tensor]:
        """Return the trained parameters x_K and the buffers b_K, each with one row for each client."""
        n = len(stack.losses)
        x_K = torch.cat([p.reshape(n, -1) for p in stack.parameters], 1)
        names = set(self.vectors.buffer_layout.names)
        named = zip((name for name, _ in self.model.named_buffers()), stack.buffers, strict=True)
        b_K = [buffer.reshape(n, -1).to(self.dtype) for name, buffer in named if name in names]
        return x_K, torch.cat([x_K.new_zeros(n, 0), *b_K], 1)

    def _can_mask(self, rows: Sequence[Row]) -> bool:
        """Return whether rows that do not count may fill up short batches; try once for each batch size."""
        samples = max((row.samples for row in rows), key=len)
        n = min(self.batch_size, len(samples))
        if n not in self._masks:
            with torch.random.fork_rng(devices=[]):  # the trial must not change what a round draws
                self._masks[n] = n == 1 or can_mask(self.model, self.loss, samples.batch(np.arange(n)), n)
        return self._masks[n]


def _make_room(tensor: Tensor, n: int, *, last: bool) -> Tensor:
    """Return an uninitialised tensor with room for `tensor` n times, once for each client.

    With `last`, convolution weights (4-D tensors) lie in memory with channels last, as our kernels read them.
    """
    shape = (n, *tensor.shape)
    if last and tensor.dim() == 4:
        return tensor.new_empty([shape[i] for i in (0, 3, 4, 2, 1)]).permute(0, 4, 3, 1, 2)
    return tensor.new_empty(shape)
