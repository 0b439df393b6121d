"""A small test problem with known constants for the theorems, a bowl with ripples.

    F_i(x) = c * sum_k (x_k^2 / 2 + 2 (1 - cos x_k)) - <b_i, x>

The ripples make F_i non-convex: the curvature lies between -c and 3c = L. The pulls b_i differ between
clients and add up to zero, so the mean f has no pull, and its only stationary point is 0. A sample of
client i has the pull b_i plus noise, and the noise of a client's samples adds up to zero.

The module also holds what the small studies share: the fit of a power law, and the style of axes.
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
from cfedavg.report import BLUE, INK, MUTED, PLAIN, VERMILION, style_axes

METRIC = "test_gradient_norm2"  # the column in which a run writes `gradient_norm2`
COLOURS = {"none": PLAIN, "topk": BLUE, "rd": VERMILION}


class Point(nn.Module):
    """A model whose parameters are a point x of the bowl; `L` is the largest curvature."""

    def __init__(self, x: Tensor, L: float) -> None:
        super().__init__()
        self.x = nn.Parameter(x)
        self.c = L / 3

    def height(self) -> Tensor:
        return self.c * (self.x.square() / 2 + 2 * (1 - self.x.cos())).sum()

    def gradient(self) -> Tensor:
        """Return the exact gradient of f at x."""
        return self.c * (self.x + 2 * self.x.sin())


def tilt_loss(model: nn.Module, pulls: Tensor) -> Tensor:
    """Return the loss at a batch of pulls, one in each row; if all are 0, the loss is f."""
    assert isinstance(model, Point)
    return model.height() - (pulls.mean(0) * model.x).sum()


def gradient_norm2(model: nn.Module, batch: Tensor) -> Tensor:
    """Return |grad f(x)|^2 of the whole objective; `batch` is not used."""
    assert isinstance(model, Point)
    return model.gradient().square().sum()


@dataclass(frozen=True)
class Bowl:
    """The bowl for `m` clients of `samples` samples each, in `d` dimensions; x starts at `start` everywhere.

    sigma_L is exact at every x; sigma_G is the root mean square over clients, and 0 if m = 1.
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
        """Return the bowl that a cell's settings describe; unrelated settings are ignored."""
        return cls(**{field.name: settings[field.name] for field in fields(cls)})

    def task(self) -> Task:
        clients = list(self.pulls())
        # One test sample without a pull: the test loss is f.
        return Task(
            self._first(), clients, test=torch.zeros(1, self.d), loss=tilt_loss, metric=gradient_norm2
        )

    def gap(self) -> float:
        """Return f(start) - min f; the minimum is 0."""
        return float(self._first().height().item())

    def _first(self) -> Point:
        return Point(torch.full((self.d,), self.start), self.L)

    def pulls(self) -> Tensor:
        """Return the random pull of each client and sample, as a tensor (m, samples, d)."""
        generator = torch.Generator().manual_seed(self.seed)
        draw = torch.randn(self.m, self.samples, self.d, generator=generator, dtype=torch.float64)
        apart = torch.randn(self.m, self.d, generator=generator, dtype=torch.float64)
        noise = _centre(draw, dim=1, rms=self.sigma_L)
        return (noise + _centre(apart, dim=0, rms=self.sigma_G)[:, None]).float()


def _centre(draw: Tensor, dim: int, rms: float) -> Tensor:
    """Return the vectors shifted to mean 0 along `dim`, with norms scaled to the root mean square `rms`."""
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
    """Return the exponent of y over x, by least squares of log y; None if its error cannot be estimated.

    The standard error includes the scatter of the points and any deviation from a power law.

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
    """Set the title, names and frame of axes, in the style of the report."""
    axes.set_title(title, loc="left", fontsize=10.5, fontweight="bold", color=INK)
    axes.set_xlabel(x, fontsize=9, color=MUTED)
    axes.set_ylabel(y, fontsize=9, color=MUTED)
    style_axes(axes)


def mark(axis: Axis, values: Iterable[float]) -> None:
    """Put ticks at these values of a logarithmic axis, and no others."""
    axis.set_major_locator(FixedLocator(sorted(set(values))))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
