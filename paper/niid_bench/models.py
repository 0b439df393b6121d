"""The network of NIID-Bench, for images with numbers from 0 to 1, as torchvision's ToTensor gives them.

The package standardises images with the mean and the deviation of the training pixels. The published code
does not, and the scale of the input matters for SGD, so the network undoes it first. For CIFAR-10 the
published code also shifts and mirrors training images at random.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Shape = tuple[int, ...]
# The mean and the deviation of the training pixels / 255, by channel, with which the package standardises.
MNIST = ((0.1306605,), (0.3081078,))
FASHION = ((0.2860053,), (0.3528134,))
CIFAR = ((0.4912504, 0.4820903, 0.4465209), (0.2452316, 0.2427816, 0.2606288))
PAD = 4  # a CIFAR-10 image moves by up to so many pixels; what comes into view mirrors the image
_BITS = 12  # of a random number


class Pixels(nn.Module):
    """Undo the standardisation of images: give numbers from 0 to 1."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.scales = tuple(
            zip(mean, std, strict=True)
        )  # no tensors: a frozen tensor would be a part of a run

    def forward(self, x: Tensor) -> Tensor:
        # Images of fewer channels than the data set's are those of a smoke run.
        pairs = zip(x.unbind(1), self.scales, strict=False)
        return torch.stack([std * channel + mean for channel, (mean, std) in pairs], 1)


class Shift(nn.Module):
    """In training, move each image by up to PAD pixels in both directions, and mirror half of the images."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        down, right, flip = _uniform(x).unbind(1)
        rows = _mirrored(_moved(down, x.shape[2]), x.shape[2])
        columns = _mirrored(_moved(right, x.shape[3]), x.shape[3])
        columns = torch.where(flip[:, None] < 0.5, columns, columns.flip(1))
        x = x.gather(2, rows[:, None, :, None].expand(x.shape))
        return x.gather(3, columns[:, None, None, :].expand(x.shape))


def _uniform(x: Tensor) -> Tensor:
    """Return 3 random numbers from 0 to below 1 for each image.

    Their bits come from dropout, since that is what the engines' trials can switch off: only then do they
    compare steps of one and of many clients, and fill up short batches.
    """
    few = torch.ones_like(x[:, 0, :3, :_BITS])
    bits = (F.dropout(few, 0.5) > 0).to(x.dtype)
    return sum((bits[..., i] * 0.5 ** (i + 1) for i in range(_BITS)), torch.zeros_like(bits[..., 0]))


def _moved(draw: Tensor, size: int) -> Tensor:
    """Return, for each image, the `size` places that come into view, from -PAD to size + PAD - 1."""
    start = torch.floor(draw * (2 * PAD + 1)) - PAD
    return (start[:, None] + torch.arange(size, device=draw.device)).to(torch.int64)


def _mirrored(places: Tensor, size: int) -> Tensor:
    """Return places outside of an image mirrored at its first and last pixel."""
    return size - 1 - (size - 1 - places.abs()).abs()


def mnist(shape: Shape, classes: int) -> nn.Module:
    """Build the network for MNIST.

    >>> sum(p.numel() for p in mnist((1, 28, 28), 10).parameters())
    44426
    """
    return nn.Sequential(Pixels(*MNIST), *_layers(shape, classes))


def fashion_mnist(shape: Shape, classes: int) -> nn.Module:
    """Build the network for Fashion-MNIST."""
    return nn.Sequential(Pixels(*FASHION), *_layers(shape, classes))


def cifar10(shape: Shape, classes: int) -> nn.Module:
    """Build the network for CIFAR-10, which sees shifted and mirrored images.

    >>> sum(p.numel() for p in cifar10((3, 32, 32), 10).parameters())
    62006
    """
    return nn.Sequential(Pixels(*CIFAR), Shift(), *_layers(shape, classes))


def _layers(shape: Shape, classes: int) -> list[nn.Module]:
    """Return the layers of LeNet-5 with ReLU and max-pooling."""
    channels, height, width = shape
    features = 16 * (((height - 4) // 2 - 4) // 2) * (((width - 4) // 2 - 4) // 2)
    return [
        nn.Conv2d(channels, 6, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(features, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(),
        nn.Linear(84, classes),
    ]  # fmt: skip
