"""One local step of many clients at once, for any module that torch.func can handle.

The step of one client is a function of the client's parameters, buffers and batch. `vmap` turns this function
into a step of n clients, each with its own weights. The recorder lists, compiles and records that step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.utils._pytree import tree_leaves, tree_map

from cfedavg.optimise.local import LocalOptimiser
from cfedavg.simulate.vectorised.rules import Rules
from cfedavg.task import Batch, Loss


class _Objective(nn.Module):
    """The user's loss as a module that holds the user's model, so that the model's tensors can be swapped."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model = model
        # A function, not a submodule: the tensors of a submodule would be swapped too.
        self.judge: Callable[[Batch], Tensor] = lambda batch: loss(model, batch)

    def forward(self, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        """Return the loss, and the buffers afterwards: some modules replace their buffers."""
        value: Tensor = self.judge(batch)
        return value, list(self.buffers())


@dataclass(frozen=True)
class Stack:
    """The training state of n clients: the first axis of every tensor is the client."""

    parameters: list[Tensor]
    state: dict[str, list[Tensor]]  # of the local optimiser; each list has a tensor for each parameter
    start: list[Tensor]  # the parameters at the start of the round; empty if the optimiser needs none
    buffers: list[Tensor]
    losses: Tensor  # for each client, the sum of the losses of all steps so far

    @property
    def tree(self) -> Any:
        """Return all tensors as a torch pytree."""
        return self.parameters, self.state, self.start, self.buffers, self.losses

    def each(self, change: Callable[[Tensor], Tensor]) -> Stack:
        """Return a stack with `change` applied to every tensor."""
        return Stack(*tree_map(change, self.tree))

    def part(self, n: int) -> Stack:
        """Return a stack of the first n clients, which shares this stack's memory."""
        return self.each(lambda tensor: tensor[:n])

    def at(self, rows: Tensor) -> Stack:
        """Return a stack with copies of the clients at `rows`."""
        return self.each(lambda tensor: tensor[rows])

    def put(self, rows: Tensor, stack: Stack) -> None:
        """Write the clients of `stack` into this stack at `rows`."""
        for mine, theirs in zip(self.tensors(), stack.tensors(), strict=True):
            mine[rows] = theirs

    def tensors(self) -> list[Tensor]:
        """Return all tensors as a list."""
        return tree_leaves(self.tree)


class Step:
    """The step of a model under a loss. A call takes a Stack, which it changes, and the clients' batches."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        optimiser: LocalOptimiser,
        *,
        dots: str | None = None,
        autocast: bool = False,
        unused: Collection[str] = (),
    ) -> None:
        """Set up the step; as in torch.optim, `unused` parameters do not change, not even by weight decay."""
        self.objective = _Objective(model, loss)
        self.trainable = [name for name, p in self.objective.named_parameters() if p.requires_grad]
        self.buffers = [name for name, _ in self.objective.named_buffers()]
        self.optimiser, self.dots, self.autocast = optimiser, dots, autocast
        names = [name.removeprefix("model.") for name in self.trainable]
        self.used = [i for i, name in enumerate(names) if name not in unused]

    def one(self, parameters: list[Tensor], buffers: list[Tensor], batch: Batch, valid: Tensor | None) -> Any:
        """Return the loss of one client, and the client's buffers after the step."""
        swapped = dict(zip(self.trainable + self.buffers, [*parameters, *buffers], strict=True))
        device = parameters[0].device.type
        with Rules(valid, self.dots), torch.autocast(device, torch.bfloat16, enabled=self.autocast):
            loss, after = functional_call(self.objective, swapped, (batch,))
        return loss.to(parameters[0].dtype), [
            new.to(old.dtype) for new, old in zip(after, buffers, strict=True)
        ]

    def __call__(
        self, stack: Stack, batch: Batch, valid: Tensor | None, active: Tensor | None, eta: Tensor
    ) -> None:
        """Run a step of all clients of the stack; only clients marked in `active` change."""
        # vmap must be able to split every argument: an empty dictionary stands for no mask.
        masks = {} if valid is None else {"valid": valid}

        def one(p: list[Tensor], b: list[Tensor], data: Batch, masks: dict[str, Tensor]) -> Any:
            return self.one(p, b, data, masks.get("valid"))

        # Modules change their buffers in place; buffers of inactive clients must stay unchanged.
        buffers = [buffer.clone() for buffer in stack.buffers]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # vmap warns where it is slow; the user cannot change that
            grads, (losses, buffers) = vmap(grad_and_value(one, has_aux=True), randomness="different")(
                *[tree_map(_detach, each) for each in (stack.parameters, buffers, batch, masks)]
            )
        with torch.no_grad():
            self._descend(stack, grads, active, eta)
            for old, new in zip(stack.buffers, buffers, strict=True):
                old.copy_(_choose(active, new, old))
            stack.losses.add_(losses if active is None else torch.where(active, losses, 0.0))

    def _descend(self, stack: Stack, grads: Sequence[Tensor], active: Tensor | None, eta: Tensor) -> None:
        """Run the optimiser's step of all clients, by vmap over the clients."""

        def one(params: Any, grads: Any, state: Any, start: Any) -> Any:
            return self.optimiser.step(params, grads, state, eta, start)

        params, used_grads = self._used(stack.parameters), self._used(grads)
        state = {name: self._used(each) for name, each in stack.state.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # as above
            following, after = vmap(one)(params, used_grads, state, self._used(stack.start))
        pairs = [*zip(params, following, strict=True)]
        for name, each in state.items():
            pairs += zip(each, after[name], strict=True)
        for old, new in pairs:
            old.copy_(_choose(active, new, old))

    def _used(self, each: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors in `each` that belong to parameters that the loss uses."""
        return [each[i] for i in self.used] if each else []


def _detach(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _choose(active: Tensor | None, new: Tensor, old: Tensor) -> Tensor:
    """Return `new` for the active clients, `old` for the others."""
    return new if active is None else torch.where(active.view(-1, *[1] * (old.dim() - 1)), new, old)
