"""One local step of many clients at once, for any module that torch.func can handle.

The step of one client is written once, as a function of its parameters, buffers and batch; `vmap` makes it
a step of n clients, each with its own weights. The recorder lists, compiles and records it.
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
    """The user's loss as a module that holds the user's model, so that its tensors can be swapped."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model = model
        # A function: as a submodule, the loss's own tensors would be swapped too.
        self.judge: Callable[[Batch], Tensor] = lambda batch: loss(model, batch)

    def forward(self, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        """Return the loss, and the buffers after it: some modules replace theirs."""
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
        """Return all tensors as a pytree of torch."""
        return self.parameters, self.state, self.start, self.buffers, self.losses

    def each(self, change: Callable[[Tensor], Tensor]) -> Stack:
        """Return a stack with every tensor changed."""
        return Stack(*tree_map(change, self.tree))

    def part(self, n: int) -> Stack:
        """Return the first n clients, sharing memory."""
        return self.each(lambda tensor: tensor[:n])

    def at(self, rows: Tensor) -> Stack:
        """Return a copy of some clients."""
        return self.each(lambda tensor: tensor[rows])

    def put(self, rows: Tensor, stack: Stack) -> None:
        """Write some clients back."""
        for mine, theirs in zip(self.tensors(), stack.tensors(), strict=True):
            mine[rows] = theirs

    def tensors(self) -> list[Tensor]:
        """Return all tensors as a list."""
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
        """Leave `unused` parameters unchanged, without weight decay, as torch.optim does."""
        self.objective = _Objective(model, loss)
        self.trainable = [name for name, p in self.objective.named_parameters() if p.requires_grad]
        self.buffers = [name for name, _ in self.objective.named_buffers()]
        self.optimiser, self.dots, self.autocast = optimiser, dots, autocast
        names = [name.removeprefix("model.") for name in self.trainable]
        self.used = [i for i, name in enumerate(names) if name not in unused]

    def one(self, parameters: list[Tensor], buffers: list[Tensor], batch: Batch, valid: Tensor | None) -> Any:
        """Return the loss of one client, and its buffers after the step."""
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
        """Take a step of all clients of the stack; only `active` ones change."""
        # vmap must be able to split every argument: an empty dictionary stands for no mask.
        masks = {} if valid is None else {"valid": valid}

        def one(p: list[Tensor], b: list[Tensor], data: Batch, masks: dict[str, Tensor]) -> Any:
            return self.one(p, b, data, masks.get("valid"))

        # Modules change their buffers in place; those of inactive clients must stay.
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
        """Take the optimiser's step of each client, mapped over all of them."""

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
        """Return the tensors of the parameters that the loss uses."""
        return [each[i] for i in self.used] if each else []


def _detach(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _choose(active: Tensor | None, new: Tensor, old: Tensor) -> Tensor:
    """Return `new` for the active clients, `old` for the others."""
    return new if active is None else torch.where(active.view(-1, *[1] * (old.dim() - 1)), new, old)
