"""Kinds of modules, 50 clients each: do clients train together, and how fast against one after another?

    python bench/modules.py --out results/modules.jsonl --minutes 6     # on a GPU; adds what is missing
    python bench/modules.py --out results/modules.jsonl --table         # prints the table of docs/engines.md

The data are random. For every model the file gets one line of JSON with steps per second of three engines:
`batched`, all clients together (or why not); `recorded`, one after another with a recorded step (or why not);
and `eager`, one after another with the step as it is. Compiling and recording are not counted. The steps of
the next models are compiled while a model is measured. With too few minutes, the first models are measured;
another call goes on after them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from cfedavg import Config, Task
from cfedavg.core.errors import summarise_error
from cfedavg.models import BasicBlock, cnn, mlp
from cfedavg.simulate.engines import BlockEngine, choose_engine
from cfedavg.simulate.engines.recorded import Recorded
from cfedavg.simulate.engines.recording_trial import find_fault_in_recording
from cfedavg.simulate.engines.requests import Request
from cfedavg.simulate.engines.trainers import Sequential, Trainer
from cfedavg.simulate.plan import Plan
from cfedavg.simulate.vectorised.compiler import start_compiler

CLIENTS, STEPS = 50, 40  # local steps of a client in a round
AHEAD = 3  # models whose steps are compiled while another model is measured
SECONDS = 0.7  # for which an engine is measured, at least
VOCABULARY = 90
Made = tuple[nn.Module, Callable[[int], Any], Any]  # the model, n samples, the loss (None: cross entropy)


class Do(nn.Module):
    """Any function of the given modules and x."""

    def __init__(self, forward: Callable[..., Tensor], *parts: nn.Module) -> None:
        super().__init__()
        self.parts, self.function = nn.ModuleList(parts), forward

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.parts)


# Images


def draw_images(n: int, channels: int = 1, size: int = 28) -> tuple[Tensor, Tensor]:
    return torch.randn(n, channels, size, size), torch.randint(10, (n,))


def with_images(*layers: nn.Module, **shape: int) -> Made:
    return nn.Sequential(*layers), partial(draw_images, **shape), None


def normed(first: nn.Module, second: nn.Module) -> Made:
    """Two convolutions, each with a norm."""
    return with_images(
        nn.Conv2d(1, 32, 3), first, nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3), second, nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(1600, 10),
    )  # fmt: skip


def depthwise() -> Made:
    def block(a: int, b: int, stride: int) -> list[nn.Module]:
        deep = nn.Conv2d(a, a, 3, stride, padding=1, groups=a)
        return [deep, nn.ReLU(), nn.Conv2d(a, b, 1), nn.GroupNorm(8, b), nn.ReLU()]

    body = [*block(32, 64, 2), *block(64, 128, 2), *block(128, 128, 1)]
    return with_images(
        nn.Conv2d(1, 32, 3, padding=1), *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)
    )


def dropping() -> Made:
    """The CNN of LEAF's images, with dropout: 1.2 million parameters."""
    return with_images(
        nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25),
        nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10),
    )  # fmt: skip


def resnet() -> Made:
    """Three residual blocks with GroupNorm."""
    norm = partial(nn.GroupNorm, 8)
    blocks = [BasicBlock(a, b, stride, norm) for a, b, stride in ((16, 16, 1), (16, 32, 2), (32, 64, 2))]
    return with_images(
        nn.Conv2d(3, 16, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
        channels=3, size=32,
    )  # fmt: skip


def transposed() -> Made:
    """An autoencoder."""
    model = nn.Sequential(
        nn.Conv2d(1, 16, 4, 2, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 4, 2, padding=1), nn.ReLU(),
        nn.ConvTranspose2d(32, 16, 4, 2, padding=1), nn.ReLU(), nn.ConvTranspose2d(16, 1, 4, 2, padding=1),
    )  # fmt: skip
    return model, draw_images, lambda model, batch: F.mse_loss(model(batch[0]), batch[0])


def waves() -> Made:
    """1-D convolutions over 256 points in time."""
    model = nn.Sequential(
        nn.Conv1d(8, 64, 5, 2), nn.ReLU(), nn.Conv1d(64, 64, 5, 2), nn.ReLU(), nn.AdaptiveAvgPool1d(1),
        nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip
    return model, lambda n: (torch.randn(n, 8, 256), torch.randint(10, (n,))), None


class Attention(nn.Module):
    """A block of a transformer, which may look at the past only."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.body = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        q, k, v = self.qkv(self.first(x)).view(n, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(found.transpose(1, 2).reshape(n, length, width))
        return x + self.body(self.second(x))


class ViT(nn.Module):
    """A transformer over 49 patches of an image."""

    def __init__(self, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 4, 4)
        self.places = nn.Parameter(torch.randn(49, width) * 0.02)
        self.blocks = nn.Sequential(*(Attention(width, 4, causal=False) for _ in range(depth)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 10))

    def forward(self, x: Tensor) -> Tensor:
        found = self.patches(x).flatten(2).transpose(1, 2) + self.places
        out: Tensor = self.head(self.blocks(found).mean(1))
        return out


# Texts


class GPT(nn.Module):
    """A transformer over bytes, whose last layer is its embedding: 0.84 million parameters."""

    def __init__(self, width: int = 128, depth: int = 4, length: int = 128) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Attention(width, 4, causal=True) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        self.head.weight = self.bytes.weight

    def forward(self, x: Tensor) -> Tensor:
        places = self.places(torch.arange(x.shape[1], device=x.device))
        out: Tensor = self.head(self.norm(self.blocks(self.bytes(x) + places)))
        return out


def next_symbol(model: nn.Module, batch: Any) -> Tensor:
    """The loss at every position."""
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def gpt() -> Made:
    return GPT(), partial(draw_text, symbols=256, length=128), next_symbol


def draw_text(n: int, symbols: int, length: int) -> tuple[Tensor, Tensor]:
    text = torch.randint(symbols, (n, length + 1))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def bag() -> Made:
    """A classifier of texts: the mean embedding of 64 words."""
    body = nn.Sequential(nn.EmbeddingBag(5000, 64), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    return body, lambda n: (torch.randint(5000, (n, 64)), torch.randint(4, (n,))), None


def recurrent(kind: Any, width: int = 256, **options: Any) -> Made:
    """A model of the next symbol after 80 symbols, with the loss at every position."""
    embedding, cell = nn.Embedding(VOCABULARY, 8), kind(8, width, batch_first=True, **options)
    out = (options.get("proj_size") or width) * (1 + cell.bidirectional)
    model = Do(lambda x, e, c, head: head(c(e(x))[0]), embedding, cell, nn.Linear(out, VOCABULARY))
    return model, partial(draw_text, symbols=VOCABULARY, length=80), next_symbol


# What clients may not be able to do together


class Doubled(torch.autograd.Function):
    """Without a rule for vmap."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


def layered(middle: nn.Module) -> Made:
    """The MLP of 200 hidden numbers with something in the middle."""
    return with_images(nn.Flatten(), nn.Linear(784, 200), middle, nn.Linear(200, 10))


def spectral() -> Made:
    norm = parametrizations.spectral_norm
    return with_images(
        nn.Conv2d(1, 32, 3), nn.ReLU(), nn.MaxPool2d(2), norm(nn.Conv2d(32, 64, 3)), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), norm(nn.Linear(1600, 10)),
    )  # fmt: skip


def branching() -> Made:
    branch = Do(lambda x, a, b: (a if x.mean() > 0 else b)(x), nn.Linear(200, 200), nn.Linear(200, 200))
    return layered(branch)


def checkpointed() -> Made:
    inner = nn.Sequential(nn.ReLU(), nn.Linear(200, 200), nn.ReLU())
    return layered(Do(lambda x, body: checkpoint(body, x, use_reentrant=False), inner))


class Case(NamedTuple):
    """A model: its name in the table, how to make it, and the size of a batch."""

    name: str
    make: Callable[[], Made]
    batch: int = 64


SHAPE = (1, 28, 28)
CASES = [  # the most important first
    Case("CNN of the paper", lambda: (cnn(SHAPE, 10), draw_images, None)),
    Case("LSTM, two layers of 256", partial(recurrent, nn.LSTM, num_layers=2), 10),
    Case("byte GPT, tied embedding", gpt, 16),
    Case("ViT", lambda: (ViT(), draw_images, None)),
    Case("depthwise CNN", depthwise),
    Case("CNN with dropout", dropping),
    Case("MLP", lambda: (mlp(SHAPE, 10), draw_images, None)),
    Case("CNN with BatchNorm", lambda: normed(nn.BatchNorm2d(32), nn.BatchNorm2d(64))),
    Case("CNN with GroupNorm", lambda: normed(nn.GroupNorm(8, 32), nn.GroupNorm(8, 64))),
    Case("CNN with LayerNorm", lambda: normed(nn.LayerNorm((32, 26, 26)), nn.LayerNorm((64, 11, 11)))),
    Case("own autograd function", lambda: layered(Do(lambda x: Doubled.apply(x).relu()))),
    Case("spectral norm", spectral),
    Case("LSTM with projections", partial(recurrent, nn.LSTM, num_layers=2, proj_size=128), 10),
    Case("checkpoint", checkpointed),
    Case("RReLU", lambda: layered(nn.RReLU())),
    Case("branch on the data", branching),
    Case("small ResNet", resnet),
    Case("GRU", partial(recurrent, nn.GRU), 10),
    Case("LSTM with dropout between layers", partial(recurrent, nn.LSTM, num_layers=2, dropout=0.2), 10),
    Case("LSTM, both directions", partial(recurrent, nn.LSTM, width=128, bidirectional=True), 10),
    Case("RNN", partial(recurrent, nn.RNN), 10),
    Case("embedding bag", bag),
    Case("transposed convolutions", transposed),
    Case("1-D convolutions", waves),
]


class Started(NamedTuple):
    """A model whose steps are being compiled."""

    case: Case
    engine: BlockEngine
    said: list[str]
    task: Task
    seconds: float  # that it took to start


def start(case: Case, config: Config) -> Started:
    """Choose the engine of a model, which begins to compile its steps."""
    began, said = time.perf_counter(), list[str]()
    torch.manual_seed(0)
    model, draw, loss = case.make()
    given = {} if loss is None else {"loss": loss}
    task = Task(model, [draw(2 * case.batch) for _ in range(config.clients)], name=case.name, **given)
    config = config.replace(batch_size=case.batch)
    engine = choose_engine(config, Plan(config, task), task, say=said.append)
    assert isinstance(engine, BlockEngine)
    return Started(case, engine, said, task, time.perf_counter() - began)


def wait(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def speed(engine: BlockEngine, trainer: Trainer, rounds: int) -> float:
    """Return the local steps per second of a trainer; its first block warms up."""
    plan, state, clients = engine.plan, engine.start(), list(range(engine.plan.m))
    at: Any = lambda clients: state.x  # noqa: E731

    def blocks() -> Iterator[int]:
        for t in range(rounds):
            for block in trainer.train(Request(plan, engine.task, t, at, state.b, clients)):
                yield sum(block.K)

    with engine._setting():
        work = blocks()
        next(work)
        began, steps = wait(engine.device), 0
        for done in work:
            steps += done
            if (now := wait(engine.device)) - began > SECONDS:
                break
        work.close()
    return steps / (now - began)


def measure(started: Started) -> dict[str, Any]:
    """Return the line of a model."""
    began, engine = time.perf_counter(), started.engine
    plan, task, device, prepare = engine.plan, started.task, engine.device, engine._prepare
    line: dict[str, Any] = {"model": started.case.name, "parameters": engine.layout.d, "batched": None}
    chosen = [text for text in started.said if text.startswith("engine: ")][-1]
    if chosen.startswith("engine: batched"):
        line["batched"] = round(speed(engine, engine.trainer, rounds=50), 1)
        if notes := [text for text in started.said if "cannot step together" in text]:
            line["batched"] = None  # a later step failed
        engine.trainer._many.release()
    else:
        notes = [chosen]
    line["why_not_batched"] = notes[-1].partition(": ")[2].partition(": ")[2] if notes else ""
    reason = find_fault_in_recording(task, plan.config, engine.vectors, device, prepare)
    line["why_not_recorded"] = reason
    one = Recorded(plan, task, engine.vectors, device, prepare, started.said.append)
    line["recorded"] = None if reason else round(speed(engine, one, rounds=1), 1)
    plain = Sequential(engine.vectors, device, prepare)
    line["eager"] = round(speed(engine, plain, rounds=1), 1)
    engine.close()
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    said = [text for text in started.said if not text.startswith("engine: ")]
    return line | {
        "clients": plan.m, "batch_size": started.case.batch, "precision": plan.config.precision,
        "device": name, "torch": torch.__version__, "said": said,
        "seconds": [round(started.seconds, 1), round(time.perf_counter() - began, 1)],
    }  # fmt: skip


def run(cases: list[Case], config: Config, minutes: float, out: Path) -> None:
    """Measure the cases in order until the time is over, and add a line to `out` after each."""
    end, waiting, left = time.monotonic() + 60 * minutes, deque[Started | dict[str, Any]](), deque(cases)
    while left or waiting:
        while left and len(waiting) <= AHEAD and time.monotonic() < end:
            waiting.append(attempt(left[0].name, partial(start, left.popleft(), config)))
        if not waiting or time.monotonic() > end:
            break
        ready = waiting.popleft()
        line = ready if isinstance(ready, dict) else attempt(ready.case.name, partial(measure, ready))
        del ready
        print(json.dumps(line), flush=True)
        with out.open("a") as file:
            file.write(json.dumps(line) + "\n")


def attempt(name: str, work: Callable[[], Any]) -> Any:
    """Return what `work` returns or, if it fails, a line that says so."""
    try:
        return work()
    except Exception as error:
        return {"model": name, "error": summarise_error(error)}


def table(lines: list[dict[str, Any]]) -> str:
    """Return the Markdown table of the lines, in the order of CASES, and the reasons for each "no"."""
    rows = [
        "| model | parameters | batched | recorded | one by one | best / one by one |",
        "|---|---|---|---|---|---|",
    ]
    order = {case.name: place for place, case in enumerate(CASES)}
    for line in sorted(lines, key=lambda line: order[line["model"]]):
        each = [line[name] for name in ("batched", "recorded", "eager")]
        best = max(value for value in each if value)
        words = [f"{value:,.0f}" if value else "no" for value in each]
        rows.append(
            f"| {line['model']} | {line['parameters']:,} | {' | '.join(words)} | {best / line['eager']:.1f} |"
        )
    reasons = [
        f"- {line['model']}: not {what}: {line[f'why_not_{what}']}"
        for line in lines
        for what in ("batched", "recorded")
        if not line[what]
    ]
    return "\n".join([*rows, "", *reasons])


def read(out: Path) -> list[dict[str, Any]]:
    """Return the lines of the models that were measured without an error."""
    lines = [json.loads(text) for text in out.read_text().splitlines()] if out.exists() else []
    return [line for line in lines if "error" not in line]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/modules.jsonl"))
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--only", help="names of models, separated by semicolons")
    parser.add_argument("--table", action="store_true", help="print the table of the lines in --out")
    given = parser.parse_args()
    if given.table:
        print(table(read(given.out)))
        return
    config = Config(
        clients=given.clients, rounds=1000, local_steps=str(given.steps), compressor="none", eta_local=0.01,
        precision=given.precision, device=given.device,
    )  # fmt: skip
    start_compiler(config.device, config.engine)
    done = {line["model"] for line in read(given.out)}
    wanted = given.only.split(";") if given.only else [case.name for case in CASES]
    given.out.parent.mkdir(parents=True, exist_ok=True)
    cases = [case for case in CASES if case.name in wanted and case.name not in done]
    run(cases, config, given.minutes, given.out)


if __name__ == "__main__":
    main()
