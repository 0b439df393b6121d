"""A trainer for a GPU that trains one client after another and replays their step as a CUDA graph.

It is for models that cannot train many clients at once. A step of a small model is hundreds of short kernels,
and to launch them takes longer than to run them; a CUDA graph launches all of them together. The graph reads
and writes fixed places in memory: parameters, buffers, state of the optimiser, batch and sum of losses.

In every round, the first step with each shape of batch runs as it is, the second is recorded, and the graph
runs all later ones. The graphs are dropped at the end of the round, so a round does not depend on the rounds
before it, which a resumed run has not seen.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

from cfedavg.core.errors import summarise_error
from cfedavg.core.keys import signed
from cfedavg.optimise.local import Fixed, LocalOptimiser
from cfedavg.simulate.engines.requests import Request, Trained
from cfedavg.simulate.engines.trainers import explain_one_sample, too_large
from cfedavg.simulate.engines.trial import plain_attributes
from cfedavg.simulate.local import Vectors, batches, local_step, seed_generators
from cfedavg.simulate.plan import Plan
from cfedavg.simulate.vectorised.batches import Pool, Rows, Timetable
from cfedavg.simulate.vectorised.graphs import record_graph
from cfedavg.simulate.vectorised.recorder import python_generators
from cfedavg.task import Batch, Loss, Task, wrap_errors

MOST = 4  # shapes of batches for which a round records a step; steps with further shapes run as they are

Play = Callable[[list[Any]], None]  # runs a recorded step on the tensors of a batch
Record = Callable[[Callable[[], None], torch.device], Callable[[], None]]  # see `record_graph`


class CannotRecord(RuntimeError):
    """A step cannot be recorded; the message says why."""


class ClientState:
    """The training state of one client, in tensors that keep their place in memory."""

    def __init__(self, vectors: Vectors, optimiser: LocalOptimiser) -> None:
        self.vectors, self.model, self.optimiser = vectors, vectors.model, optimiser
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.state = {name: [each.clone() for each in some] for name, some in self._first_state().items()}
        self.fixed = Fixed.begin(optimiser, self.parameters)
        self.total = self.parameters[0].new_zeros(())  # the sum of the losses of all steps so far
        self._buffers = [
            (module, name, buffer)
            for module in self.model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    @torch.no_grad()
    def _first_state(self) -> Any:
        return self.optimiser.init(self.parameters)

    @torch.no_grad()
    def begin(self, x: Tensor, b: Tensor, correction: Tensor | None = None) -> None:
        """Begin the round of a client with parameters `x` and buffers `b`; `correction` is c - c_i."""
        self.restore()
        self.model.train()
        self.vectors.write(x, b)
        for mine, first in zip(tree_leaves(self.state), tree_leaves(self._first_state()), strict=True):
            mine.copy_(first)
        given = () if correction is None else self.vectors.split(correction)
        first = Fixed.begin(self.optimiser, self.parameters, given)
        for mine, its in zip(tree_leaves(self.fixed), tree_leaves(first), strict=True):
            mine.copy_(its)
        self.total.zero_()

    def step(self, loss: Loss, eta_L: float, batch: Batch) -> None:
        """Run one local step in place."""
        value, after = local_step(
            self.model, self.parameters, loss, batch, self.optimiser, self.state, eta_L, self.fixed
        )
        with torch.no_grad():
            self.total += value
            for name, some in self.state.items():
                for mine, new in zip(some, after[name], strict=True):
                    if mine is not new:
                        mine.copy_(new)
            self._keep_buffers()
        self.restore()

    def _keep_buffers(self) -> None:
        """Copy buffers that the step replaced by other tensors to their places."""
        for module, name, mine in self._buffers:
            new = module._buffers[name]
            if new is mine:
                continue
            if new is None or (new.shape, new.dtype) != (mine.shape, mine.dtype):
                raise CannotRecord(f"a step changes the shape or the dtype of the buffer {name!r}")
            mine.copy_(new)

    def restore(self) -> None:
        """Put the buffers in their places back into the model, and drop gradients."""
        for module, name, mine in self._buffers:
            module._buffers[name] = mine
        for p in self.parameters:
            p.grad = None


class Recorded:
    """A trainer that trains one client after another and records their step.

    `record` makes a recording (None means that no step is recorded). If a step cannot be recorded, it runs as
    it is, or, with `strict`, an error is raised.
    """

    def __init__(
        self,
        plan: Plan,
        task: Task,
        vectors: Vectors,
        device: torch.device,
        prepare: Callable[[Batch], Batch],
        say: Callable[[str], None],
        record: Record | None = record_graph,
        *,
        strict: bool = False,
    ) -> None:
        self.plan, self.task, self.device, self.prepare, self.say = plan, task, device, prepare, say
        self.vectors = Vectors(copy.deepcopy(vectors.model))
        for module in self.vectors.model.modules():
            if isinstance(module, nn.RNNBase):
                module.flatten_parameters()  # torch would join the weights of a copy in every step
        self.state = ClientState(self.vectors, plan.local_optimiser)
        self.dtype = self.state.total.dtype
        self.pool = Pool(device, self.dtype)
        self.record, self.strict = record, strict
        self._plays: dict[Any, Play] = {}
        self._seen: set[Any] = set()  # shapes of the batches of this round
        self._failed = False  # whether a step of this round could not be recorded
        self._said = False

    def train(self, request: Request) -> Iterator[Trained]:
        try:
            for client in request.clients:
                trained = None
                try:
                    trained = self._train(request, client)
                except torch.OutOfMemoryError:
                    if self.strict:
                        raise
                if trained is None:  # the tensors of the failed attempt are free only now
                    self.shrink()
                    trained = self._train(request, client)
                yield trained
        finally:
            self._forget()

    def shrink(self) -> None:
        """Free the memory of recorded steps and record no more; raise InputError if this was done before."""
        if self.record is None:
            raise too_large(self.device) from None
        self.record = None
        self.pool.clear()
        self._forget()
        self.say(f"recorded steps do not fit into the memory of {self.device}: going on without them")

    def _forget(self) -> None:
        self._plays.clear()
        self._seen.clear()
        self._failed = False
        self.state.restore()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _train(self, request: Request, client: int) -> Trained:
        """Train one client, as `train_client` does."""
        t, x, correction = request.t, *request.begin(client)
        config, K = self.plan.config, self.plan.steps.at(t, client)
        loss = wrap_errors(self.task.loss, f"Task.loss fails on a batch of client {client}")
        step = partial(self.state.step, loss, self.plan.rates.eta_local(t))
        self.state.begin(x, request.b, correction)
        seed_generators(self.device, config.seed, t, client)
        half = config.precision == "bf16"
        data = self._batches(t, client, K)
        take = wrap_errors(lambda: next(data), f"Task.clients[{client}] gives no batch")
        try:
            with torch.autocast(self.device.type, torch.bfloat16, enabled=half, cache_enabled=False):
                for _ in range(K):
                    self._step(take(), step)
        except ValueError as error:
            raise explain_one_sample(error, client) from error.__cause__
        x_K, b_K = self.vectors.read()
        return Trained([client], [K], x, x_K[None], b_K[None], (self.state.total / K)[None])

    def _batches(self, t: int, client: int, K: int) -> Iterator[Batch]:
        """Yield the client's K batches on the device; samples that never change stay on it."""
        samples, config = self.task.clients[client], self.plan.config
        if not getattr(samples, "fixed", False):
            each = batches(samples, config.batch_size, config.seed, t, client)
            yield from (_send(batch, self.device, self.dtype) for batch in islice(each, K))
            return
        size, steps, seed = (np.array([each]) for each in (len(samples), K, signed(config.seed)))
        table = Timetable([client], size, steps, config.batch_size, seed, np.array([t]))
        source, rows = self.pool.block([samples]), Rows(table, self.device)
        for turn in table.together([1]):
            yield tree_map(lambda leaf: leaf[0], source.gather(rows.at(turn), 1))

    def _step(self, batch: Batch, step: Callable[[Batch], None]) -> None:
        """Run a step on a batch; replay the recorded step if there is one for such batches."""
        leaves, tree = tree_flatten(batch)
        kind = _kind(leaves, tree)
        play = self._plays.get(kind)
        if play is None and kind in self._seen and self._may_record():
            play = self._try_to_record(kind, leaves, tree, step)
        if play is not None:
            play(leaves)
            return
        if kind is not None:
            self._seen.add(kind)
        step(self.prepare(batch))

    def _may_record(self) -> bool:
        return self.record is not None and not self._failed and len(self._plays) < MOST

    def _try_to_record(
        self, kind: Any, leaves: list[Any], tree: Any, step: Callable[[Batch], None]
    ) -> Play | None:
        """Record a step and keep the recording; if this fails, say so and return None."""
        try:
            self._plays[kind] = self._record(leaves, tree, step)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if self.strict:
                raise
            self._failed = True
            if not self._said:
                why = summarise_error(error)
                self.say(f"the step cannot be recorded ({why}): it is launched piece by piece")
            self._said = True
        finally:
            self.state.restore()
        return self._plays.get(kind)

    def _record(self, leaves: list[Any], tree: Any, step: Callable[[Batch], None]) -> Play:
        """Record a step; return a function that runs it on the tensors of another batch of the same kind."""
        assert self.record is not None
        inputs = [each.clone() for each in tree_leaves(self.prepare(tree_unflatten(leaves, tree)))]
        batch = tree_unflatten(inputs, tree)
        attributes, drawn = plain_attributes(self.state.model), python_generators()
        replay = self.record(lambda: step(batch), self.device)
        now = plain_attributes(self.state.model)
        if changed := next((name for name in now if now[name] != attributes.get(name)), ""):
            raise CannotRecord(f"a step changes the attribute {changed!r}, which a recorded step would not")
        if python_generators() != drawn:
            raise CannotRecord("the model draws with Python's or NumPy's generator")

        def play(leaves: list[Any]) -> None:
            for mine, theirs in zip(inputs, leaves, strict=True):
                mine.copy_(theirs)
            replay()

        return play


def _kind(leaves: list[Any], tree: Any) -> Any:
    """Return what batches have in common that one recorded step can take; None if there is none for this."""
    if not all(isinstance(leaf, Tensor) for leaf in leaves):
        return None
    return tree, tuple((leaf.shape, leaf.dtype, leaf.stride()) for leaf in leaves)


def _send(batch: Batch, device: torch.device, dtype: torch.dtype) -> Batch:
    """Return the batch on `device` as `to_device` does, but do not wait for the copy."""

    def move(leaf: Tensor) -> Tensor:
        leaf = leaf.to(dtype=dtype if leaf.is_floating_point() else leaf.dtype)
        if device.type == "cuda" and leaf.device.type == "cpu":
            leaf = leaf.pin_memory()
        return leaf.to(device, non_blocking=True)

    return tree_map_only(Tensor, move, batch)
