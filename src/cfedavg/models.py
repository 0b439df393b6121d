"""The paper's models and three small ones, each a function (input shape, number of classes) -> nn.Module."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cfedavg.core.errors import InputError
from cfedavg.core.keys import Purpose, key, signed
from cfedavg.core.parts import load

Shape = tuple[int, ...]


def cnn(shape: Shape, classes: int) -> nn.Module:
    """Build the CNN of the paper's Table 1: two 5x5 convolutions with pooling, then 512 hidden units.

    >>> sum(p.numel() for p in cnn((1, 28, 28), 10).parameters())
    582026
    """
    channels, height, width = shape
    if min(height, width) < 16:
        raise InputError(f"`model` cnn needs images of at least 16x16 pixels, got {height}x{width}")
    features = 64 * (((height - 4) // 2 - 4) // 2) * (((width - 4) // 2 - 4) // 2)
    return nn.Sequential(
        nn.Conv2d(channels, 32, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(features, 512), nn.ReLU(), nn.Linear(512, classes),
    )  # fmt: skip


def lenet(shape: Shape, classes: int) -> nn.Module:
    """Build LeNet-5: two 5x5 convolutions with pooling, then 120 and 84 hidden units, with ReLU.

    >>> sum(p.numel() for p in lenet((1, 28, 28), 10).parameters())
    44426
    >>> sum(p.numel() for p in lenet((3, 32, 32), 10).parameters())
    62006
    """
    channels, height, width = shape
    if min(height, width) < 16:
        raise InputError(f"`model` lenet needs images of at least 16x16 pixels, got {height}x{width}")
    features = 16 * (((height - 4) // 2 - 4) // 2) * (((width - 4) // 2 - 4) // 2)
    return nn.Sequential(
        nn.Conv2d(channels, 6, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(features, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(),
        nn.Linear(84, classes),
    )  # fmt: skip


def mlp(shape: Shape, classes: int) -> nn.Module:
    """Build a network with one hidden layer of 64 units."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 64), nn.ReLU(), nn.Linear(64, classes))


def linear(shape: Shape, classes: int) -> nn.Module:
    """Build a multinomial logistic regression."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), classes))


class BasicBlock(nn.Module):
    """A residual block: two 3x3 convolutions and a shortcut from input to output."""

    def __init__(self, inside: int, outside: int, stride: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, padding=1, bias=False)
        self.norm1 = norm(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, padding=1, bias=False)
        self.norm2 = norm(outside)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inside != outside:
            self.shortcut = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), norm(outside))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


def _resnet18(shape: Shape, classes: int, norm: Callable[[int], nn.Module]) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(shape[0], 64, 3, padding=1, bias=False), norm(64), nn.ReLU()]
    inside = 64
    for outside, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [BasicBlock(inside, outside, stride, norm), BasicBlock(outside, outside, 1, norm)]
        inside = outside
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes))


def resnet18(shape: Shape, classes: int) -> nn.Module:
    """Build ResNet-18 with batch norm; the first convolution is 3x3, as is usual for CIFAR images.

    >>> sum(p.numel() for p in resnet18((3, 32, 32), 10).parameters())
    11173962
    """
    return _resnet18(shape, classes, nn.BatchNorm2d)


def resnet18_gn(shape: Shape, classes: int) -> nn.Module:
    """Build ResNet-18 with group norm (32 groups), which has no running statistics to average."""
    return _resnet18(shape, classes, lambda channels: nn.GroupNorm(32, channels))


MODELS: dict[str, Callable[[Shape, int], nn.Module]] = {
    "cnn": cnn,
    "lenet": lenet,
    "resnet18": resnet18,
    "resnet18_gn": resnet18_gn,
    "mlp": mlp,
    "linear": linear,
}


def build_model(name: str, shape: Shape, classes: int, seed: int) -> nn.Module:
    """Build a model: `name` is one of MODELS, or `module:factory` for a user's own function.

    The initial weights are drawn on the CPU from `seed`.
    """
    factory = load(name, "model") if ":" in name else MODELS.get(name)
    if factory is None:
        known = ", ".join(MODELS)
        raise InputError(f"`model` must be {known}, or your own function as module:factory, got {name!r}")
    if not callable(factory) or (isinstance(factory, type) and not issubclass(factory, nn.Module)):
        raise InputError(f"`model`: {name} must be a function of (shape, classes) or a torch.nn.Module class")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(signed(key(seed, 0, 0, Purpose.INIT)))
        try:
            model: object = factory(shape, classes)
        except TypeError as error:
            raise InputError(f"`model`: {name} must be a function of (shape, classes): {error}") from None
    if not isinstance(model, nn.Module):
        raise InputError(f"`model`: {name} must return a torch.nn.Module, got {type(model).__name__}")
    return model
