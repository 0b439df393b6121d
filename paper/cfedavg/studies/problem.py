"""A small problem of which every constant of the theorems is known: a rippled bowl.

    F_i(x) = c * sum_k (x_k^2 / 2 + 2 (1 - cos x_k)) - <b_i, x>

The ripples make it non-convex: the curvature goes from 3c = L, at the bottom, down to -c. The b_i pull the
clients apart and add up to zero, so f is the bowl alone, with its only stationary point at 0. A sample of
client i pulls by b_i plus noise that averages to zero over its samples.

Beside it, what the small studies share: the fit of a power law, and the looks of their axes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from torch import Tensor, nn

from cfedavg import Task
from cfedavg.sweep import BLUE, INK, MUTED, PLAIN, VERMILION, style_axes

METRIC = "test_gradient_norm2"  # what a run calls `gradient_norm2` below
COLOURS = {"none": PLAIN, "topk": BLUE, "rd": VERMILION}


class Point(nn.Module):
    """A model that is nothing but its parameters, in a bowl of curvature L."""

    def __init__(self, x: Tensor, L: float) -> None:
        super().__init__()
        self.x = nn.Parameter(x)
        self.c = L / 3

    def height(self) -> Tensor:
        return self.c * (self.x.square() / 2 + 2 * (1 - self.x.cos())).sum()

    def gradient(self) -> Tensor:
        """Return the gradient of f, in closed form."""
        return self.c * (self.x + 2 * self.x.sin())


def tilt_loss(model: nn.Module, pulls: Tensor) -> Tensor:
    """Return the loss of a batch of pulls; with no pull, f itself."""
    assert isinstance(model, Point)
    return model.height() - (pulls.mean(0) * model.x).sum()


def gradient_norm2(model: nn.Module, batch: Tensor) -> Tensor:
    """Return |grad f(x)|^2 of the whole objective, whatever the batch."""
    assert isinstance(model, Point)
    return model.gradient().square().sum()


@dataclass(frozen=True)
class Bowl:
    """m clients with so many samples each, in d dimensions, each coordinate starting at `start`.

    sigma_L is exact everywhere; sigma_G is the clients' root mean square, 0 for a client alone.
    """

    m: int
    L: float
    sigma_L: float
    sigma_G: float
    start: float
    d: int
    samples: int
    seed: int

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Self:
        """Make the bowl of a cell, whose settings have more besides."""
        return cls(**{field.name: settings[field.name] for field in fields(cls)})

    def task(self) -> Task:
        clients = list(self.pulls())
        # One row of no pull: the test loss is f, and the metric needs no data.
        return Task(
            self._first(), clients, test=torch.zeros(1, self.d), loss=tilt_loss, metric=gradient_norm2
        )

    def gap(self) -> float:
        """Return how far f falls from the start to its minimum, which is 0."""
        return float(self._first().height().item())

    def _first(self) -> Point:
        return Point(torch.full((self.d,), self.start), self.L)

    def pulls(self) -> Tensor:
        """Draw the pull of each client and sample, (m, samples, d)."""
        generator = torch.Generator().manual_seed(self.seed)
        draw = torch.randn(self.m, self.samples, self.d, generator=generator, dtype=torch.float64)
        apart = torch.randn(self.m, self.d, generator=generator, dtype=torch.float64)
        noise = _centre(draw, dim=1, rms=self.sigma_L)
        return (noise + _centre(apart, dim=0, rms=self.sigma_G)[:, None]).float()


def _centre(draw: Tensor, dim: int, rms: float) -> Tensor:
    """Shift vectors to mean 0 along `dim`, and scale their norms there to this root mean square."""
    centred = draw - draw.mean(dim, keepdim=True)
    size = centred.square().sum(-1, keepdim=True).mean(dim, keepdim=True).sqrt()
    return rms * centred / size.clamp_min(torch.finfo(draw.dtype).tiny)


@dataclass(frozen=True)
class Fit:
    """The exponent of a power law, and its standard error."""

    slope: float
    se: float

    def __str__(self) -> str:
        return f"{self.slope:.2f} ± {self.se:.2f}"


def power_law(x: Sequence[float], y: Sequence[float]) -> Fit | None:
    """Fit a line to log y over log x; return None if the points do not say how uncertain it is.

    The error is that of least squares: it holds the scatter of the points, and any bend of the line.

    >>> str(power_law([1, 2, 4, 8], [3, 12, 48, 192]))
    '2.00 ± 0.00'
    """
    if len(x) < 3 or len(set(x)) < 2 or min(y) <= 0:
        return None
    centred, heights = np.log(x) - np.mean(np.log(x)), np.log(y)
    spread = float((centred**2).sum())
    slope = float((centred * heights).sum()) / spread
    off = heights - heights.mean() - slope * centred
    return Fit(slope, float(np.sqrt((off**2).sum() / (len(x) - 2) / spread)))


def finish_axes(axes: Axes, title: str, x: str, y: str) -> None:
    """Give axes names and a quiet frame, as the report's figures have them."""
    axes.set_title(title, loc="left", fontsize=10.5, fontweight="bold", color=INK)
    axes.set_xlabel(x, fontsize=9, color=MUTED)
    axes.set_ylabel(y, fontsize=9, color=MUTED)
    style_axes(axes)


def mark(axis: Axis, values: Iterable[float]) -> None:
    """Put ticks at these values of a logarithmic axis, and no others."""
    axis.set_major_locator(FixedLocator(sorted(set(values))))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
