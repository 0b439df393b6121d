"""One local step of many clients at once, for any module that torch.func can handle.

The step of one client is a function of the client's parameters, buffers and batch. `vmap` turns this function
into a step of n clients, each with its own weights.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.utils._pytree import tree_leaves, tree_map

from cfedavg.optimise.local import Fixed, LocalOptimiser
from cfedavg.simulate.vectorised.replacements import Replacements
from cfedavg.task import Batch, Loss


class _Objective(nn.Module):
    """The user's loss as a module that holds the user's model, so that torch can swap the model's tensors."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model = model
        # A function, not a submodule: the tensors of a submodule would be swapped too.
        self.judge: Callable[[Batch], Tensor] = lambda batch: loss(model, batch)

    def forward(self, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        """Return the loss, and the buffers afterwards: some modules replace their buffers."""
        value: Tensor = self.judge(batch)
        return value, list(self.buffers())


class Stack(NamedTuple):
    """The training state of n clients: the first axis of every tensor is the client."""

    parameters: list[Tensor]
    state: dict[str, list[Tensor]]  # of the local optimiser; each list has a tensor for each parameter
    fixed: Fixed  # what stays the same in all steps of a round
    buffers: list[Tensor]
    losses: Tensor  # for each client, the sum of the losses of all steps so far

    def part(self, n: int) -> Stack:
        """Return a stack of the first n clients, which shares this stack's memory."""
        return Stack(*tree_map(lambda tensor: tensor[:n], self))

    def at(self, rows: Tensor) -> Stack:
        """Return a stack with copies of the clients at the places `rows`."""
        return Stack(*tree_map(lambda tensor: tensor[rows], self))

    def put(self, rows: Tensor, stack: Stack) -> None:
        """Write the clients of `stack` into this stack, at the places `rows`."""
        for mine, theirs in zip(tree_leaves(self), tree_leaves(stack), strict=True):
            mine[rows] = theirs


class Step:
    """A local step of many clients at once. A call changes the given Stack in place."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        optimiser: LocalOptimiser,
        *,
        conv_precision: str | None = None,
        autocast: bool = False,
        unused: Collection[str] = (),
    ) -> None:
        """Set up the step; as in torch.optim, `unused` parameters do not change, not even by weight decay."""
        self.objective = _Objective(model, loss)
        self.trainable = [name for name, p in self.objective.named_parameters() if p.requires_grad]
        self.buffers = [name for name, _ in self.objective.named_buffers()]
        self.optimiser, self.conv_precision, self.autocast = optimiser, conv_precision, autocast
        names = [name.removeprefix("model.") for name in self.trainable]
        self.used = [i for i, name in enumerate(names) if name not in unused]

    def __call__(
        self, stack: Stack, batch: Batch, valid: Tensor | None, active: Tensor | None, eta: Tensor
    ) -> None:
        """Run a step of the clients of the stack; `eta` holds the rate of each client.

        `valid` marks the rows of each client's batch that count; `active` marks the clients that change. None
        means all.
        """
        # vmap must be able to split every argument: an empty dictionary stands for no mask.
        masks = {} if valid is None else {"valid": valid}
        # Modules change their buffers in place; buffers of inactive clients must stay unchanged.
        buffers = [buffer.clone() for buffer in stack.buffers]
        # vmap warns where it is slow; users cannot change that.
        with warnings.catch_warnings(action="ignore"):
            grads, (losses, buffers) = vmap(
                grad_and_value(self._one_client, has_aux=True), randomness="different"
            )(*[tree_map(_detach, each) for each in (stack.parameters, buffers, batch, masks)])
        with torch.no_grad():
            self._descend(stack, grads, active, eta)
            for old, new in zip(stack.buffers, buffers, strict=True):
                old.copy_(_choose(active, new, old))
            stack.losses.add_(losses if active is None else torch.where(active, losses, 0.0))

    def _one_client(
        self, parameters: list[Tensor], buffers: list[Tensor], batch: Batch, masks: dict[str, Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the loss of one client, and the client's buffers after the step."""
        swapped = dict(zip(self.trainable + self.buffers, [*parameters, *buffers], strict=True))
        replaced = Replacements(masks.get("valid"), self.conv_precision)
        device, dtype = parameters[0].device.type, parameters[0].dtype
        with replaced, torch.autocast(device, torch.bfloat16, enabled=self.autocast):
            loss, after = functional_call(self.objective, swapped, (batch,))
        return loss.to(dtype), [new.to(old.dtype) for new, old in zip(after, buffers, strict=True)]

    def _descend(self, stack: Stack, grads: Sequence[Tensor], active: Tensor | None, eta: Tensor) -> None:
        """Run the local optimiser's step of the active clients."""
        step, params = self.optimiser.step, self._used(stack.parameters)
        state = {name: self._used(each) for name, each in stack.state.items()}
        with warnings.catch_warnings(action="ignore"):  # as above
            fixed = stack.fixed.part(self.used)
            following, after = vmap(step)(params, self._used(grads), state, eta, fixed)
        pairs = [*zip(params, following, strict=True)]
        for name, each in state.items():
            pairs += zip(each, after[name], strict=True)
        for old, new in pairs:
            old.copy_(_choose(active, new, old))

    def _used(self, each: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors in `each` that belong to parameters that the loss uses."""
        return [each[i] for i in self.used]


def _detach(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _choose(active: Tensor | None, new: Tensor, old: Tensor) -> Tensor:
    """Return `new` for the active clients, `old` for the others."""
    return new if active is None else torch.where(active.view(-1, *[1] * (old.dim() - 1)), new, old)
