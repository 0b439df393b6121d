"""The models: sizes, shapes, reproducible weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cfedavg import InputError
from cfedavg.models import MODELS, build_model


def mine(shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], classes))


def not_a_model(shape: tuple[int, ...], classes: int) -> int:
    return 3


@pytest.mark.parametrize("name", [*MODELS, "tests.algorithm.test_models:mine"])
@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32)])
def test_forward(name: str, shape: tuple[int, int, int]) -> None:
    model = build_model(name, shape, 7, seed=0)
    assert model(torch.zeros(2, *shape)).shape == (2, 7)


def test_weights_come_from_the_seed_alone() -> None:
    before = torch.random.get_rng_state()
    a, b, c = (build_model("cnn", (1, 28, 28), 10, seed) for seed in (3, 3, 4))
    assert torch.equal(before, torch.random.get_rng_state())
    assert torch.equal(a[0].weight, b[0].weight)  # type: ignore[index]
    assert not torch.equal(a[0].weight, c[0].weight)  # type: ignore[index]


def test_group_norm_has_no_buffers() -> None:
    assert list(build_model("resnet18_gn", (3, 32, 32), 10, 0).buffers()) == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("vgg", "`model` must be cnn, .* as module:factory, got 'vgg'"),
        ("nowhere:factory", "`model`: cannot import 'nowhere'"),
        ("tests.algorithm.test_models:missing", "has no 'missing'"),
        ("tests.algorithm.test_models:not_a_model", "must return a torch.nn.Module, got int"),
        ("subprocess:Popen", "subprocess:Popen must be a function of .* or a torch.nn.Module class"),
        ("math:pi", "math:pi must be a function of .* or a torch.nn.Module class"),
    ],
)
def test_errors(name: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        build_model(name, (1, 28, 28), 10, 0)


@pytest.mark.parametrize("name", ["cnn", "lenet"])
def test_convolutions_on_small_images(name: str) -> None:
    assert build_model(name, (1, 16, 16), 10, 0)(torch.zeros(2, 1, 16, 16)).shape == (2, 10)
    with pytest.raises(InputError, match=f"`model` {name} needs images of at least 16x16"):
        build_model(name, (1, 8, 8), 10, 0)
