"""The use of our layers in any model: a mode that watches a model's calls, and chains in nn.Sequential."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from cfedavg.simulate.cpu.layers import (
    Convolution,
    Linear,
    convolve_and_pool,
    is_pooling_by_two,
    read_convolution,
    takes_linear,
)
from cfedavg.task import Batch, Loss

RELUS = {F.relu, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_}
POOLS = {F.max_pool2d, torch.max_pool2d}


class _Seen(NamedTuple):
    """The last convolution: its result, perhaps after ReLU, and the version of that tensor."""

    result: Tensor
    version: int
    given: Convolution
    relu: bool


class FastLayers(TorchFunctionMode):
    """A mode in which a model computes max-pooling after a convolution, and linear layers, by our layers."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: _Seen | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            return self._linear(*args, **kwargs)
        if func is torch.conv2d:
            result, given = func(*args, **kwargs), read_convolution(*args, **kwargs)
            self._seen = None if given is None else _Seen(result, result._version, given, False)
            return result
        if func in RELUS and (seen := self._match(args)):
            result = func(*args, **kwargs)
            self._seen = _Seen(result, result._version, seen.given, True)
            return result
        if func in POOLS and (seen := self._match(args)) and is_pooling_by_two(*args, **kwargs):
            self._seen = None
            return convolve_and_pool(seen.given, relu=seen.relu, convolved=seen.result)
        return func(*args, **kwargs)

    def _match(self, args: Any) -> _Seen | None:
        """Return the last convolution if its result, unchanged, is the first argument."""
        seen = self._seen
        known = seen is not None and args and args[0] is seen.result and args[0]._version == seen.version
        return seen if known else None

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        linear: Any = Linear.apply if takes_linear(input, weight) else F.linear
        return linear(input, weight, bias)


def quicken(loss: Loss) -> Loss:
    """Return a loss function that computes the same loss by our layers."""

    def quick(model: nn.Module, batch: Batch) -> Tensor:
        with FastLayers():
            return loss(model, batch)

    return quick


def join_layers(model: nn.Module) -> nn.Module:
    """Let each nn.Sequential of the model compute convolution, ReLU and max-pooling in one call.

    The mode alone cannot do so: it learns of the pooling when the convolution has been computed.
    """
    for module in list(model.modules()):
        if type(module) is nn.Sequential:
            vars(module)["forward"] = partial(_forward, module)
    return model


def _forward(module: nn.Sequential, x: Any) -> Any:
    left = list(module)
    while left:
        chain = _chain(left)
        given = _read(chain, x) if chain else None
        if given is not None:
            x, left = convolve_and_pool(given, relu=len(chain) == 3), left[len(chain) :]
        else:
            x = left.pop(0)(x)
    return x


def _chain(left: list[nn.Module]) -> list[Any]:
    """Return the next layers if they are a convolution, perhaps ReLU, and max-pooling; else nothing."""
    for kinds in ((nn.Conv2d, nn.ReLU, nn.MaxPool2d), (nn.Conv2d, nn.MaxPool2d)):
        chain = left[: len(kinds)]
        if tuple(map(type, chain)) == kinds and not any(map(_has_hooks, chain)):
            return chain
    return []


def _has_hooks(module: nn.Module) -> bool:
    kinds = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
    return any(getattr(module, kind) for kind in kinds)


def _read(chain: list[Any], x: Any) -> Convolution | None:
    """Return the arguments of the chain's convolution if one call can compute the chain on x, else None."""
    convolution, pooling = chain[0], chain[-1]
    places = pooling.padding, pooling.dilation, pooling.ceil_mode, pooling.return_indices
    if convolution.padding_mode != "zeros" or type(x) is not Tensor:
        return None
    if not is_pooling_by_two(x, pooling.kernel_size, pooling.stride, *places):
        return None
    weight, bias = convolution.weight, convolution.bias
    sizes = convolution.stride, convolution.padding, convolution.dilation, convolution.groups
    given = read_convolution(x, weight, bias, *sizes)
    return given if given is not None and min(given.sizes) >= 2 else None
