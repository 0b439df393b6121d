"""Models by name, each a function (shape of an input, number of outputs) -> nn.Module.

The shape of an image is (channels, height, width), that of a table's row its length, and that of a text the
number of characters; for a text, the outputs are one number per character of the vocabulary.
"""

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


class CharLSTM(nn.Module):
    """An embedding of 8 numbers, LSTM layers, and scores of the next character at every place."""

    def __init__(self, vocabulary: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 8)
        self.lstm = nn.LSTM(8, hidden, layers, batch_first=True)
        self.out = nn.Linear(hidden, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.lstm(self.embedding(x))[0])
        return out


def char_lstm(shape: Shape, classes: int) -> nn.Module:
    """Build the character LSTM of McMahan et al. (2017): embedding 8, two LSTM layers of 256.

    It has 798,720 + 265 V parameters for V characters. torch's LSTM has a second bias vector (2,048 numbers).
    Without it, and with the peephole weights that LSTMs of that time had (1,536 numbers), V = 258 (256 bytes
    and two marks) gives the 866,578 parameters of their paper:

    >>> sum(p.numel() for p in char_lstm((80,), 258).parameters()) - 2048 + 1536
    866578
    """
    return CharLSTM(classes, 256, 2)


def char_lstm_small(shape: Shape, classes: int) -> nn.Module:
    """Build a character LSTM for CPUs: embedding 8, one LSTM layer of 64.

    >>> sum(p.numel() for p in char_lstm_small((80,), 79).parameters())
    24711
    """
    return CharLSTM(classes, 64, 1)


class Attention(nn.Module):
    """Causal self-attention: a place reads itself and the places before it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """A transformer block: attention and two dense layers, each added to its normalised input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.dense = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.dense(self.norm2(x))
        return out


class GPT(nn.Module):
    """A decoder-only transformer with learned places: scores of the next token at every place."""

    def __init__(self, length: int, vocabulary: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, vocabulary)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.norm(self.blocks(self.embedding(x) + self.places[: x.shape[1]])))
        return out


def gpt(shape: Shape, classes: int) -> nn.Module:
    """Build a small GPT: 4 blocks of width 128 with 4 heads; the text's length is its context.

    >>> sum(p.numel() for p in gpt((80,), 256).parameters())
    869376
    """
    return GPT(shape[0], classes, 128, 4, 4)


def gpt_small(shape: Shape, classes: int) -> nn.Module:
    """Build a GPT for CPUs: 2 blocks of width 64 with 4 heads.

    >>> sum(p.numel() for p in gpt_small((80,), 98).parameters())
    117858
    """
    return GPT(shape[0], classes, 64, 2, 4)


Factory = Callable[[Shape, int], nn.Module]
# The models for each kind of data.
MODELS: dict[str, Factory] = {
    "cnn": cnn, "lenet": lenet, "resnet18": resnet18, "resnet18_gn": resnet18_gn, "mlp": mlp,
    "linear": linear,
}  # fmt: skip
TEXT: dict[str, Factory] = {
    "char_lstm": char_lstm, "char_lstm_small": char_lstm_small, "gpt": gpt, "gpt_small": gpt_small,
}  # fmt: skip
TABLE: dict[str, Factory] = {"mlp": mlp, "linear": linear}
KINDS = {"images": MODELS, "text": TEXT, "table": TABLE}


def build_model(name: str, shape: Shape, classes: int, seed: int, kind: str = "images") -> nn.Module:
    """Build a model: `name` is one of KINDS[kind], or `module:factory` for a user's own function.

    The initial weights are drawn on the CPU from `seed`.
    """
    factory = load(name, "model") if ":" in name else KINDS[kind].get(name)
    if factory is None:
        known, data = ", ".join(KINDS[kind]), "" if kind == "images" else f" for a {kind}"
        raise InputError(
            f"`model`{data} must be {known}, or your own function as module:factory, got {name!r}"
        )
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
