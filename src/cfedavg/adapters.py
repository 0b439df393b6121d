"""Adapters: train a small change of each linear layer of a model, and freeze the model itself (LoRA).

Parameters that are frozen do not travel, so clients send the adapters alone.
"""

from __future__ import annotations

import copy
import math
from fnmatch import fnmatch

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cfedavg.core.errors import InputError


class Adapted(nn.Module):
    """A frozen linear layer W x + b with a trained change of low rank: W x + b + scale * up (down x)."""

    def __init__(self, linear: nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        self.linear, self.scale = linear, scale
        self.down = nn.Parameter(torch.empty(rank, linear.in_features).to(linear.weight))
        self.up = nn.Parameter(torch.zeros(linear.out_features, rank).to(linear.weight))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        changed: Tensor = self.linear(x) + self.scale * F.linear(F.linear(x, self.down), self.up)
        return changed

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """Return the linear layer with the change added to its weights."""
        linear = copy.deepcopy(self.linear)
        linear.weight += self.scale * self.up @ self.down
        return linear


def add_adapters(
    model: nn.Module, rank: int = 8, alpha: float | None = None, layers: str = "*", seed: int = 0
) -> nn.Module:
    """Return a copy of the model with all parameters frozen, and adapters in its linear layers.

    Only layers whose names match the pattern `layers` get an adapter of the given rank, such as
    "blocks.*.attention.*". The change is scaled by alpha / rank (Hu et al., 2021); alpha is by default the
    rank. A new adapter changes nothing; its first weights are drawn from `seed`. A subclass of nn.Linear gets
    no adapter: a module such as nn.MultiheadAttention reads its weights directly.

    >>> adapted = add_adapters(nn.Sequential(nn.Linear(100, 50), nn.ReLU(), nn.Linear(50, 10)), rank=2)
    >>> sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    420
    """
    if not (isinstance(rank, int) and rank >= 1):
        raise InputError(f"add_adapters: `rank` must be a whole number of 1 or more, got {rank!r:.40}")
    adapted = copy.deepcopy(model).requires_grad_(False)
    found = [
        (parent, name, layer)
        for path, parent in adapted.named_modules()
        for name, layer in parent.named_children()
        if type(layer) is nn.Linear and fnmatch(f"{path}.{name}".lstrip("."), layers)
    ]
    if not found:
        raise InputError(f"add_adapters: `layers` must match the name of an nn.Linear, got {layers!r:.80}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for parent, name, layer in found:
            setattr(parent, name, Adapted(layer, rank, (rank if alpha is None else alpha) / rank))
    return adapted


def merge_adapters(model: nn.Module) -> nn.Module:
    """Return a copy of an adapted model whose linear layers hold the changes, without adapters.

    >>> merge_adapters(add_adapters(nn.Sequential(nn.Linear(3, 2)))).state_dict().keys()
    odict_keys(['0.weight', '0.bias'])
    """
    merged = copy.deepcopy(model)
    found = [
        (parent, name, layer)
        for parent in merged.modules()
        for name, layer in parent.named_children()
        if isinstance(layer, Adapted)
    ]
    for parent, name, layer in found:
        setattr(parent, name, layer.merged())
    return merged
