"""Any kind of module trains under the default engine: together where that is right, else one by one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from cfedavg import Config, InputError, Task, run
from cfedavg.callbacks import Callback
from cfedavg.simulate.vectorised.recorder import Recorder
from tests.simulate.test_engines import DEVICES, agree, seeded

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections", "ignore:RNN module weights")


@pytest.fixture(autouse=True)
def _uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling takes 10 seconds a model. Convolutions are tried together on a CPU too."""
    monkeypatch.setattr(Recorder, "compiling", False)
    monkeypatch.setattr("cfedavg.simulate.engines.is_small", lambda model: True)


class Said(Callback):
    """Keeps what a run says of its engine."""

    def __init__(self) -> None:
        self.engine: list[str] = []

    def on_message(self, text: str) -> None:
        self.engine += [text] * text.startswith("engine: ")


class Do(nn.Module):
    """Any function of the modules given and x, before a head."""

    def __init__(self, forward: Callable[..., Tensor], *parts: nn.Module, width: int = 6) -> None:
        super().__init__()
        self.parts, self.head, self.function = nn.ModuleList(parts), nn.Linear(width, 3), forward

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.function(x, *self.parts).flatten(1))
        return out


def recurrent(kind: Any, **options: Any) -> nn.Module:
    """Reads four time steps of six numbers, or two if it is deep; keeps the last output."""
    cell = kind(6, 6, batch_first=True, **options)
    steps = 4 if cell.num_layers == 1 else 2
    return Do(lambda x, cell: cell(x[:, :steps])[0][:, -1], cell, width=12 if cell.bidirectional else 6)


def chain(*parts: nn.Module, width: int = 6) -> nn.Module:
    return Do(lambda x, body: body(x), nn.Sequential(*parts), width=width)


def encoder(**options: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True, **options)
    mask = torch.ones(4, 4).tril() == 0
    return Do(lambda x, layer: layer(x, src_mask=mask.to(x.device)).mean(1), layer)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(6, 6, bias=False), nn.Linear(6, 6), nn.Linear(6, 3)
        self.down.weight = self.up.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.down(self.up(x).relu()).mean(1))
        return out


class TiedEmbedding(nn.Module):
    """Reads symbols by the weights by which it names them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(5, 6), nn.LayerNorm(6), nn.Linear(6, 5)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.embedding(symbols(x)).mean((1, 2))))
        return out[:, :3]


class Counter(nn.Module):
    """Counts its steps in a buffer, or in a number, and learns less and less."""

    def __init__(self, *, buffer: bool) -> None:
        super().__init__()
        self.body = nn.Linear(6, 3)
        self.steps: Any = 0
        if buffer:
            del self.steps
            self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps = self.steps + 1
        out: Tensor = self.body(x.mean(1)) / (1 + self.steps)
        return out


class Remembering(nn.Module):
    """Adds what it saw in the step before: state that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.last = nn.Linear(6, 3), None

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x.mean(1))
        kept, self.last = self.last, out.detach().mean()  # type: ignore[assignment]
        return out if kept is None else out * (1 + kept.abs())


class Doubled(torch.autograd.Function):
    """Without a rule for vmap."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


class Partly(nn.Module):
    """With parameters that are frozen, and some that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.unused = nn.Linear(6, 6).requires_grad_(False), nn.Linear(2, 2)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.frozen(x.mean(1)))
        return out


class Pair(nn.Module):
    """Returns more than a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"scores": self.body(x.mean(1)), "size": len(x)}


def scores(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0])["scores"], batch[1])


def symbols(x: Tensor) -> Tensor:
    """Whole numbers from 0 to 4."""
    return (x.abs() * 2).long().clamp(0, 4)


def branch(x: Tensor, a: nn.Module, b: nn.Module) -> Tensor:
    out: Tensor = (a if x.sum() > 0 else b)(x.mean(1))
    return out


def in_place(x: Tensor, body: nn.Module) -> Tensor:
    y = body(x).clone()
    y[:, 0] += 1
    y.mul_(0.5).relu_()
    return y.mean(1)


def multiplied(x: Tensor, a: nn.Module) -> Tensor:
    return a(x.mean(1), x[:, 0])  # type: ignore[no-any-return]


def padded(x: Tensor, attention: nn.Module) -> Tensor:
    """Attention to other time steps in each sample, with a bias that grows with the distance."""
    at = torch.arange(4, device=x.device, dtype=x.dtype)
    unseen = torch.where(x[..., 0] > x[:, :1, 0], -9.0, 0.0).to(x.dtype)
    out: Tensor = attention(x, x, x, key_padding_mask=unseen, attn_mask=-(at[:, None] - at).abs())[0]
    return out.mean(1)


def causal(x: Tensor, qkv: nn.Module) -> Tensor:
    q, k, v = qkv(x).view(len(x), 4, 2, 9).transpose(1, 2).chunk(3, -1)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).mean(2)


def over_time(kind: Any) -> nn.Module:
    """The first axis is time, of two steps."""
    return Do(lambda x, cell: cell(x[:, :2].transpose(0, 1))[0][-1], kind(6, 6, num_layers=2))


image = (nn.Unflatten(1, (1, 4)), nn.Conv2d(1, 4, 3, padding=1))  # 4 channels of 4 x 6

MODULES: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: recurrent(nn.LSTM),
    "LSTM, deep": lambda: recurrent(nn.LSTM, num_layers=2, bidirectional=True),
    "LSTM, unbiased": lambda: recurrent(nn.LSTM, num_layers=2, bidirectional=True, bias=False),
    "LSTM, all dropped": lambda: recurrent(nn.LSTM, num_layers=3, dropout=1.0),  # nothing is random
    "LSTM, time first": lambda: over_time(nn.LSTM),
    "LSTM, projected": lambda: Do(
        lambda x, c: c(x[:, :2])[0][:, -1], nn.LSTM(6, 6, batch_first=True, proj_size=3), width=3
    ),
    "LSTMCell": lambda: Do(lambda x, cell: cell(x[:, 0])[0], nn.LSTMCell(6, 6)),
    "GRU": lambda: recurrent(nn.GRU),
    "GRU, deep": lambda: recurrent(nn.GRU, num_layers=2, bidirectional=True),
    "GRU, unbiased": lambda: recurrent(nn.GRU, bias=False),
    "GRU, all dropped": lambda: recurrent(nn.GRU, num_layers=2, bidirectional=True, dropout=1.0),
    "GRU, time first": lambda: over_time(nn.GRU),
    "GRUCell": lambda: Do(lambda x, cell: cell(x[:, 0]), nn.GRUCell(6, 6)),
    "RNN": lambda: recurrent(nn.RNN, num_layers=2),
    "RNN, relu": lambda: recurrent(nn.RNN, nonlinearity="relu"),
    "RNN, relu, deep": lambda: recurrent(nn.RNN, nonlinearity="relu", num_layers=3, bidirectional=True),
    "RNN, all dropped": lambda: recurrent(nn.RNN, num_layers=2, dropout=1.0),
    "RNN, time first": lambda: over_time(nn.RNN),
    "embedding": lambda: Do(lambda x, e: e(symbols(x)).mean((1, 2)), nn.Embedding(5, 6)),
    "embedding, padded": lambda: Do(
        lambda x, e: e(symbols(x)).mean((1, 2)), nn.Embedding(5, 6, padding_idx=0)
    ),
    "embedding, tied": TiedEmbedding,
    "embedding, sparse": lambda: Do(lambda x, e: e(symbols(x)).mean((1, 2)), nn.Embedding(5, 6, sparse=True)),
    "embedding, max norm": lambda: Do(
        lambda x, e: e(symbols(x)).mean((1, 2)), nn.Embedding(5, 6, max_norm=1.0)
    ),
    "embedding bag": lambda: Do(lambda x, e: e(symbols(x[:, 0])), nn.EmbeddingBag(5, 6)),
    "attention": lambda: Do(
        lambda x, a: a(x, x, x)[0].mean(1), nn.MultiheadAttention(6, 2, batch_first=True)
    ),
    "attention, masked": lambda: Do(padded, nn.MultiheadAttention(6, 2, batch_first=True)),
    "attention, causal": lambda: Do(causal, nn.Linear(6, 18)),
    "encoder": encoder,
    "encoder, norm first": lambda: encoder(norm_first=True, activation="gelu"),
    "conv1d": lambda: chain(nn.Conv1d(4, 2, 3), nn.ReLU(), width=8),
    "conv1d, depthwise": lambda: chain(nn.Conv1d(4, 8, 3, groups=4, dilation=2), width=16),
    "conv2d": lambda: chain(*image, nn.ReLU(), nn.MaxPool2d(2), width=24),
    "conv2d, depthwise": lambda: chain(*image, nn.Conv2d(4, 4, 3, groups=4), width=32),
    "conv2d, grouped": lambda: chain(*image, nn.Conv2d(4, 6, 3, 2, padding=1, groups=2), width=36),
    "conv2d, dilated": lambda: chain(*image, nn.Conv2d(4, 2, 2, dilation=2, stride=2), width=4),
    "conv2d, circular": lambda: chain(
        *image, nn.Conv2d(4, 1, 3, padding=1, padding_mode="circular"), width=24
    ),
    "conv3d": lambda: chain(nn.Unflatten(1, (1, 2, 2)), nn.Conv3d(1, 2, 2), width=10),
    "conv transpose": lambda: chain(*image, nn.ConvTranspose2d(4, 1, 2, stride=2), width=96),
    "conv transpose 1-D": lambda: chain(nn.ConvTranspose1d(4, 2, 3, stride=2, output_padding=1), width=28),
    "conv transpose, grouped": lambda: chain(
        *image, nn.ConvTranspose2d(4, 4, 3, padding=1, groups=2, dilation=2), width=192
    ),
    "conv transpose 3-D": lambda: chain(nn.Unflatten(1, (1, 2, 2)), nn.ConvTranspose3d(1, 1, 2), width=63),
    "batch norm": lambda: chain(*image, nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), width=4),
    "instance norm": lambda: chain(*image, nn.InstanceNorm2d(4, affine=True), nn.AvgPool2d(2), width=24),
    "group norm": lambda: chain(*image, nn.GroupNorm(2, 4), nn.AdaptiveMaxPool2d(1), width=4),
    "group norm 1-D": lambda: chain(nn.Conv1d(4, 4, 3), nn.GroupNorm(2, 4, affine=False), width=16),
    "layer norm of images": lambda: chain(*image, nn.LayerNorm((4, 4, 6)), nn.ReLU(), width=96),
    "layer norm": lambda: chain(nn.LayerNorm(6), nn.Linear(6, 2), width=8),
    "rms norm": lambda: chain(nn.RMSNorm(6), nn.Linear(6, 2), width=8),
    "local response norm": lambda: chain(*image, nn.LocalResponseNorm(2), nn.Flatten(), width=96),
    "prelu": lambda: chain(nn.Linear(6, 2), nn.PReLU(), nn.GLU(), width=4),
    "bilinear": lambda: Do(multiplied, nn.Bilinear(6, 6, 6)),
    "pixel shuffle": lambda: chain(*image, nn.PixelShuffle(2), nn.Upsample(scale_factor=2), width=384),
    "fold": lambda: chain(*image, nn.Unfold(2), nn.Flatten(), width=240),
    "tied": Tied,
    "weight norm": lambda: chain(parametrizations.weight_norm(nn.Linear(6, 2)), width=8),
    "spectral norm": lambda: chain(parametrizations.spectral_norm(nn.Linear(6, 2)), width=8),
    "orthogonal": lambda: chain(parametrizations.orthogonal(nn.Linear(6, 6)), width=24),
    "branch": lambda: Do(branch, nn.Linear(6, 6), nn.Linear(6, 6)),
    "item": lambda: Do(lambda x, a: a(x.mean(1)) * x.abs().max().item(), nn.Linear(6, 6)),
    "in place": lambda: Do(in_place, nn.Linear(6, 6)),
    "own function": lambda: Do(lambda x, a: Doubled.apply(a(x.mean(1))), nn.Linear(6, 6)),
    "step counter": lambda: Counter(buffer=True),
    "step counter in Python": lambda: Counter(buffer=False),
    "memory": Remembering,
    "checkpoint": lambda: Do(
        lambda x, a: checkpoint(lambda y: a(y).relu(), x.mean(1), use_reentrant=False), nn.Linear(6, 6)
    ),
    "complex": lambda: Do(lambda x, a: torch.fft.rfft(a(x.mean(1))).abs(), nn.Linear(6, 6), width=4),
    "sorted": lambda: Do(lambda x, a: a(x.mean(1)).sort(-1).values, nn.Linear(6, 6)),
    "nonzero": lambda: Do(lambda x, a: a(x.mean(1)) + x[x > 0].mean(), nn.Linear(6, 6)),
    "partly frozen": Partly,
    "float64": lambda: chain(nn.Linear(6, 2), width=8).double(),
    "returns a dict": Pair,
}
RANDOM: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: chain(nn.Linear(6, 6), nn.Dropout(0.3), width=24),
    "dropout2d": lambda: chain(*image, nn.Dropout2d(0.3), nn.Flatten(), width=96),
    "alpha dropout": lambda: chain(nn.Linear(6, 6), nn.AlphaDropout(0.3), width=24),
    "LSTM, dropout": lambda: recurrent(nn.LSTM, num_layers=2, dropout=0.3),
    "encoder, dropout": lambda: Do(
        lambda x, layer: layer(x).mean(1), nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)
    ),
    "rrelu": lambda: chain(nn.Linear(6, 6), nn.RReLU(), width=24),
    "fractional pool": lambda: chain(*image, nn.FractionalMaxPool2d(2, output_size=2), width=16),
    "noise": lambda: Do(lambda x, a: a(x.mean(1) + torch.randn_like(x[:, 0])), nn.Linear(6, 6)),
}
# What a step of many clients cannot do, or would do wrongly, in float32.
APART = {
    "embedding, sparse", "spectral norm", "branch", "item", "nonzero", "own function",
    "step counter in Python", "memory", "checkpoint", "rrelu",
}  # fmt: skip
APART_ON_GPU = {"LSTM, projected"}


def sentences(make: Callable[[], nn.Module]) -> Task:
    """Three clients with sequences of four times six numbers; batches of five, and a short one."""
    generator = torch.Generator().manual_seed(1)

    def draw(n: int) -> tuple[Tensor, Tensor]:
        return torch.randn(n, 4, 6, generator=generator), torch.randint(3, (n,), generator=generator)

    own: dict[str, Any] = {"loss": scores, "metric": scores} if make is Pair else {}
    return Task(seeded(make), [draw(8) for _ in range(3)], test=draw(6), **own)


# State that is neither parameter nor buffer is each engine's own.
LEARNING = [name for name in MODULES if name not in ("step counter in Python", "memory")]
# Others that learn are of the same families, and so train in float32 and on short batches too.
TELLING = {
    "LSTM, deep", "GRU", "RNN, relu", "embedding", "attention, masked", "encoder", "conv1d",
    "conv2d, grouped", "conv transpose", "batch norm", "group norm", "layer norm", "weight norm", "tied",
    "in place", "complex", "partly frozen", "float64", "returns a dict",
}  # fmt: skip


def default(name: str) -> Any:
    """A module that a test of the default suite must train; the others are for `make test-all`."""
    needed = name in TELLING | APART | RANDOM.keys() or name not in LEARNING
    return name if needed else pytest.param(name, marks=pytest.mark.slow)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [default(name) for name in MODULES | RANDOM])
def test_any_module_trains(name: str, device: str) -> None:
    """In float32, on batches of five and of three."""
    said = Said()
    config = Config(device=device, rounds=2, local_steps="4", batch_size=5, compressor="none")
    result = run(config, sentences((MODULES | RANDOM)[name]), callbacks=[said])
    assert len(result.rows) == 2
    assert_engine(said.engine, name, device)


def assert_engine(said: list[str], name: str, device: str) -> None:
    """Clients step together where that is right, and one by one where it is not."""
    assert len(said) == 1
    apart = APART | (APART_ON_GPU if device == "cuda" else set())
    assert ("engine: sequential" in said[0]) == (name in apart), said


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", LEARNING)
def test_any_module_learns_what_the_reference_does(name: str, device: str) -> None:
    said = agree(sentences(MODULES[name]), "auto", device, local_steps="2", batch_size=8, compressor="none")
    assert_engine(said, name, device)


def test_the_output_of_a_recurrent_network_can_be_changed_in_place() -> None:
    """On a GPU torch's own networks refuse it."""
    gru = partial(nn.GRU, 6, 6, batch_first=True)
    task = sentences(lambda: Do(lambda x, layer: layer(x)[0].relu_()[:, -1], gru()))
    agree(task, "batched", "cpu", local_steps="2", batch_size=8, compressor="none")


def test_the_engine_asked_for_is_refused_in_a_sentence() -> None:
    task = sentences(MODULES["branch"])
    with pytest.raises(InputError, match=r"`engine` batched: the model \(Do\) fails in a step of many"):
        run(Config(device="cpu", engine="batched"), task)
    task = sentences(MODULES["step counter in Python"])
    with pytest.raises(InputError, match="`engine` batched: a step changes the attribute 'steps', which"):
        run(Config(device="cpu", engine="batched"), task)


class Best(nn.Linear):
    """Has an attribute that is not a number, and never touches it."""

    best = 0.0

    def __init__(self) -> None:
        super().__init__(6, 3)
        self.best = float("nan")

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mean(1))


def test_an_attribute_that_is_not_a_number_has_not_changed() -> None:
    said = Said()
    run(Config(device="cpu", rounds=1, local_steps="2", compressor="none"), sentences(Best), callbacks=[said])
    assert said.engine == ["engine: batched on cpu, float32: the model is small"]


def uneven() -> Task:
    """Twelve clients; one that round 0 asks has longer sequences, which a trial of two others cannot see."""
    generator = torch.Generator().manual_seed(1)

    def draw(length: int) -> tuple[Tensor, Tensor]:
        return torch.randn(8, length, 6, generator=generator), torch.randint(3, (8,), generator=generator)

    clients = [draw(5 if i == 4 else 4) for i in range(12)]
    return Task(seeded(lambda: Do(lambda x, a: a(x).tanh().mean(1), nn.Linear(6, 32), width=32)), clients)


def test_a_round_that_cannot_be_batched_says_nothing_of_the_next(tmp_path: Path) -> None:
    config = Config(
        device="cpu", local_steps="4", batch_size=5, participation=0.2, compressor="none", eta_local=0.5
    )
    said, T = Said(), 4
    straight = run(config.replace(rounds=T), uneven(), callbacks=[said])
    assert [line.split(":")[1] for line in said.engine[1:]] == [
        " sequential where clients of a round cannot step together"
    ]
    for t in range(1, T + 1):  # stopped and resumed after every round
        resumed = run(config.replace(rounds=t), uneven(), out=tmp_path, resume=t > 1, draw=False)
    for mine, theirs in zip(resumed.model.parameters(), straight.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
