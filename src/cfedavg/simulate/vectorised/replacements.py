"""Replacements of torch functions in a batched step, for any model and loss.

A step trains many clients at once by `torch.func.vmap`. Three kinds of functions that the user's model or
loss calls are replaced: convolutions, for which vmap's own rule is slow; norms, pooling and attention, so
that a compiler can fuse their operators; and means over the batch, which must leave out the rows that only
fill up the batch of a client with fewer samples.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from cfedavg.simulate.local import to_device
from cfedavg.simulate.vectorised.batch_norm import add, batch_norm, relu
from cfedavg.simulate.vectorised.convolution import convolve
from cfedavg.simulate.vectorised.layers import attention, group_norm, max_pool, mean_pool, multi_head
from cfedavg.simulate.vectorised.recurrent import replace_cell, replace_network
from cfedavg.task import Batch, Loss

DROPOUTS = {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout}
# Losses for which reduction="mean" is the plain mean of the result with reduction="none".
ELEMENTWISE = {
    F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy_with_logits,
    F.binary_cross_entropy, F.soft_margin_loss, F.poisson_nll_loss,
}  # fmt: skip
ENTROPIES = {F.cross_entropy, F.nll_loss}  # in these, a class may have a weight
MEANS = {torch.mean, Tensor.mean}
ADDS = {torch.add, Tensor.add, Tensor.add_}

VF: Any = torch  # torch's stubs lack these functions
NETWORKS = {VF.lstm: "lstm", VF.gru: "gru", VF.rnn_tanh: "tanh", VF.rnn_relu: "relu"}
CELLS = {VF.lstm_cell: "lstm", VF.gru_cell: "gru", VF.rnn_tanh_cell: "tanh", VF.rnn_relu_cell: "relu"}
LAYERS: dict[Any, Callable[..., Any]] = {
    **{func: replace_network(cell) for func, cell in NETWORKS.items()},
    **{func: replace_cell(cell) for func, cell in CELLS.items()},
    F.batch_norm: batch_norm,
    **dict.fromkeys((F.relu, torch.relu, Tensor.relu), relu),
    **dict.fromkeys((torch.relu_, Tensor.relu_), partial(relu, inplace=True)),
    F.group_norm: group_norm,
    F.max_pool2d: max_pool,
    F.adaptive_avg_pool2d: mean_pool,
    F.scaled_dot_product_attention: attention,
    F.multi_head_attention_forward: multi_head,
}


class Replacements(TorchFunctionMode):
    """A mode that replaces torch functions while one client's loss is computed.

    `valid` marks the rows of the batch that count; None means all rows. `conv_precision` is the precision of
    our own convolution kernels; None means torch's kernels.
    """

    def __init__(self, valid: Tensor | None = None, conv_precision: str | None = None) -> None:
        super().__init__()
        self.valid, self.conv_precision = valid, conv_precision
        self.means = 0  # number of means taken over the valid rows

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        found: Any = NotImplemented
        if func is torch.conv2d:
            found = convolve(self.conv_precision, *args, **kwargs)
        elif func in ADDS:
            found = add(func, *args, **kwargs)
        elif func in LAYERS:
            found = LAYERS[func](*args, **kwargs)
        elif self.valid is not None:
            found = self._mean(self.valid, func, args, kwargs)
        return func(*args, **kwargs) if found is NotImplemented else found

    def _mean(self, valid: Tensor, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Return the mean over the valid rows if `func` is a mean over all rows, else NotImplemented."""
        given: dict[str, Any] = {}
        if func in ELEMENTWISE or func in ENTROPIES:
            given = _bound(func, args, kwargs)
        elif func in MEANS and len(args) == 1 and not kwargs:
            given = {"input": args[0], "reduction": "mean"}
        if given.get("reduction") != "mean" or given["input"].shape[:1] != valid.shape:
            return NotImplemented
        self.means += 1
        each, weights = given["input"], None
        if func not in MEANS:
            legacy = dict.fromkeys({"size_average", "reduce"} & given.keys())
            each = func(**given | legacy | {"reduction": "none"})
        if func in ENTROPIES:
            weights = _class_weights(given)
        counts = valid.view(-1, *[1] * (each.dim() - 1)).expand(each.shape)
        terms = torch.where(counts, each, 0.0)
        shares = counts.to(each.dtype) if weights is None else torch.where(counts, weights, 0.0)
        return terms.sum() / shares.sum()


class NoDropout(TorchFunctionMode):
    """A mode that switches dropout off, so that two ways to compute a step can be compared."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func in NETWORKS:
            at = 5 if isinstance(args[3], bool) else 6  # a packed sequence has one more argument before it
            args = (*args[:at], 0.0, *args[at + 1 :])
        if func in (F.scaled_dot_product_attention, F.multi_head_attention_forward):
            # torch's attention is written in C++ and has no signature; ours takes the same arguments.
            signed = attention if func is F.scaled_dot_product_attention else func
            args, kwargs = (), _bound(signed, args, kwargs) | {"dropout_p": 0.0}
        return func(*args, **kwargs)


def _bound(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name, with defaults for missing arguments."""
    bound = inspect.signature(func).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def _class_weights(given: dict[str, Any]) -> Tensor | None:
    """Return the weight of each term of a cross entropy: the class's weight, or 0 for an ignored target."""
    target, weight = given["target"], given["weight"]
    if target.is_floating_point():  # class probabilities: torch takes the plain mean over samples
        return None
    kept: Tensor = target != given["ignore_index"]
    if weight is None:
        return kept.to(given["input"].dtype)
    return torch.where(kept, weight[torch.where(kept, target, 0)], 0.0)


def can_mask(model: nn.Module, loss: Loss, batch: Batch, n: int) -> bool:
    """Return whether masked rows, which do not count, may fill up short batches; try it on `batch`.

    `batch` has n samples. Masked rows would change a step if a layer mixes the samples of a batch
    (BatchNorm), if the loss is no known mean, or if the step averages another tensor that has as many rows as
    the batch (weights, for example).
    """
    few, like = min(4, n), next(p for p in model.parameters() if p.requires_grad)
    try:
        small = tree_map(lambda leaf: leaf[:few], batch)
    except (IndexError, TypeError):  # the batch has no rows
        return False
    if not masks_hold(model, loss, small, few):
        return False
    means = []
    for each, k in ((small, few), (batch, n)):
        mode = Replacements(torch.ones(k, dtype=torch.bool, device=like.device))
        with NoDropout(), mode, torch.no_grad():
            loss(copy.deepcopy(model), to_device(each, like.device, like.dtype))
        means.append(mode.means)
    return means[0] == means[1]


def masks_hold(model: nn.Module, loss: Loss, batch: Batch, n: int) -> bool:
    """Return whether a batch of n samples with masked rows trains like a batch without those rows.

    Try this with the model's weights and with noise added to the weights: the outputs of a fresh model may be
    zeros, which hide that a layer mixes samples.
    """
    kept = max(1, n - 2)
    batch = to_device(batch, torch.device("cpu"), torch.float64)
    try:
        fewer = tree_map(lambda leaf: leaf[:kept], batch)
        for noise in (0.0, 0.1, 1.0):
            noisy, generator = copy.deepcopy(model).double().cpu(), torch.Generator().manual_seed(0)
            with torch.no_grad():
                for p in noisy.parameters():
                    p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype), alpha=noise)
            after = [_after(noisy, loss, fewer, None), _after(noisy, loss, batch, torch.arange(n) < kept)]
            if not all(torch.allclose(a, b, 1e-9, 1e-12) for a, b in zip(*after, strict=True)):
                return False
    except Exception:  # the batch has no rows, or one sample is too few
        return False
    return True


def _after(model: nn.Module, loss: Loss, batch: Batch, valid: Tensor | None) -> list[Tensor]:
    """Return the loss, the gradients and the buffers after a step without dropout."""
    trained = copy.deepcopy(model)
    with NoDropout(), Replacements(valid):
        value = loss(trained, batch)
    value.backward()  # type: ignore[no-untyped-call]
    grads = [p.grad for p in trained.parameters() if p.grad is not None]
    return [each.detach().double() for each in (value, *grads, *trained.buffers())]
