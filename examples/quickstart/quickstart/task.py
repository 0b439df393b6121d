"""What is learned: digits, by a small convolutional network."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from cfedavg.data import load  # for the MNIST subset inside the package: no download


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def train_data(part: int, parts: int, batch_size: int, seed: int) -> DataLoader:
    """Every so many images of the training set, shuffled."""
    images = load("embedded", None).train
    shuffled = torch.Generator().manual_seed(seed)
    data = TensorDataset(_pixels(images.pixels[part::parts]), torch.tensor(images.labels[part::parts]))
    return DataLoader(data, batch_size, shuffle=True, generator=shuffled)


def test_data() -> DataLoader:
    images = load("embedded", None).test
    return DataLoader(TensorDataset(_pixels(images.pixels), torch.tensor(images.labels)), 500)


def _pixels(pixels) -> torch.Tensor:
    return torch.tensor(pixels).float() / 255


def train(model: nn.Module, data: DataLoader, epochs: int, rate: float) -> float:
    """SGD; the mean loss of its last epoch."""
    optimiser = torch.optim.SGD(model.parameters(), lr=rate)
    model.train()
    for _ in range(epochs):
        total = 0.0
        for images, labels in data:
            optimiser.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimiser.step()
            total += loss.item()
    return total / len(data)


@torch.no_grad()
def accuracy(model: nn.Module, data: DataLoader) -> float:
    model.eval()
    right = sum(int((model(images).argmax(1) == labels).sum()) for images, labels in data)
    return right / len(data.dataset)
