"""One local step of many clients at once, for any module that torch.func can handle.

The step of one client is written once, as a function of its parameters, buffers and batch; `vmap` makes it
a step of n clients, each with its own weights, and `make_fx` writes down the operators that this comes to.
On a GPU that list is compiled and then recorded as a CUDA graph, so a step costs one launch.
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
    """The user's loss as a module of which the user's model is a part, so that its tensors can be swapped."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model = model
        # Not as a module of its own, for then its tensors would be ours to swap.
        self.judge: Callable[[Batch], Tensor] = lambda batch: loss(model, batch)

    def forward(self, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        """The loss, and the buffers after it: some modules put new ones in the place of the old."""
        value: Tensor = self.judge(batch)
        return value, list(self.buffers())


@dataclass(frozen=True)
class Stack:
    """The training state of n clients: every tensor has a client in front."""

    parameters: list[Tensor]
    state: dict[str, list[Tensor]]  # of the local optimiser, a tensor for each parameter in every list
    start: list[Tensor]  # the parameters at the beginning of the round; empty where nobody needs them
    buffers: list[Tensor]
    losses: Tensor  # of all steps so far, added up

    @property
    def tree(self) -> Any:
        """All tensors, as torch's pytrees have them."""
        return self.parameters, self.state, self.start, self.buffers, self.losses

    def each(self, change: Callable[[Tensor], Tensor]) -> Stack:
        """The same with every tensor changed."""
        return Stack(*tree_map(change, self.tree))

    def part(self, n: int) -> Stack:
        """The first n clients, sharing memory."""
        return self.each(lambda tensor: tensor[:n])

    def at(self, rows: Tensor) -> Stack:
        """A copy of some clients."""
        return self.each(lambda tensor: tensor[rows])

    def put(self, rows: Tensor, stack: Stack) -> None:
        """Writes some clients back."""
        for mine, theirs in zip(self.tensors(), stack.tensors(), strict=True):
            mine[rows] = theirs

    def tensors(self) -> list[Tensor]:
        return tree_leaves(self.tree)


class Step:
    """Steps of a model under a loss. Call it with a Stack, which it changes, and the clients' batches."""

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
        """Parameters that the loss does not use stay as they are, without weight decay, as in torch.optim."""
        self.objective = _Objective(model, loss)
        self.trainable = [name for name, p in self.objective.named_parameters() if p.requires_grad]
        self.buffers = [name for name, _ in self.objective.named_buffers()]
        self.optimiser, self.dots, self.autocast = optimiser, dots, autocast
        names = [name.removeprefix("model.") for name in self.trainable]
        self.used = [i for i, name in enumerate(names) if name not in unused]

    def one(self, parameters: list[Tensor], buffers: list[Tensor], batch: Batch, valid: Tensor | None) -> Any:
        """The loss of one client, and its buffers after the step."""
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
        """One step of all clients of the stack; only those that are `active` change."""
        # vmap wants something to split up for every argument: no mask is an empty dictionary of them.
        masks = {} if valid is None else {"valid": valid}

        def one(p: list[Tensor], b: list[Tensor], data: Batch, masks: dict[str, Tensor]) -> Any:
            return self.one(p, b, data, masks.get("valid"))

        # Modules change their buffers in place, and those of a client that is not active must stay.
        buffers = [buffer.clone() for buffer in stack.buffers]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # vmap says where it is slow; the user cannot help it
            grads, (losses, buffers) = vmap(grad_and_value(one, has_aux=True), randomness="different")(
                *[tree_map(_detached, each) for each in (stack.parameters, buffers, batch, masks)]
            )
        with torch.no_grad():
            self._descend(stack, grads, active, eta)
            for old, new in zip(stack.buffers, buffers, strict=True):
                old.copy_(_chosen(active, new, old))
            stack.losses.add_(losses if active is None else torch.where(active, losses, 0.0))

    def _descend(self, stack: Stack, grads: Sequence[Tensor], active: Tensor | None, eta: Tensor) -> None:
        """The optimiser's step of each client, mapped over all of them."""

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
            old.copy_(_chosen(active, new, old))

    def _used(self, each: Sequence[Tensor]) -> list[Tensor]:
        """Of tensors by parameter, those of the parameters that the loss uses."""
        return [each[i] for i in self.used] if each else []


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _chosen(active: Tensor | None, new: Tensor, old: Tensor) -> Tensor:
    """`new` for the active clients, `old` for the others."""
    return new if active is None else torch.where(active.view(-1, *[1] * (old.dim() - 1)), new, old)
