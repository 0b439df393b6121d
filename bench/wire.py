"""The wire in numbers: bits against the entropy bound and other coders, times against memcpy and torch.topk.

Everything in one run on one core. The index sets of error feedback are those of messages that real runs have
sent (results/wire); the vectors that are timed are those of short runs on this machine. They are taken in
turns from more memory than the cache holds, as those of many clients would be; "hot" is a copy of the same
vector again and again. Whole models are weights after a few steps on noise.
"""

from __future__ import annotations

import math
import platform
import statistics
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from cfedavg import Config, Layout, decode, decompress, encode, parse
from cfedavg.compress.numerics import find_largest
from cfedavg.core.payload import Floats, Payload
from cfedavg.data.tasks import build_task
from cfedavg.federate.replica import ModelReplica
from cfedavg.models import cnn, resnet18
from cfedavg.simulate.engines import ReferenceEngine
from cfedavg.simulate.plan import Plan
from cfedavg.wire.frame import entropy_bound, read_header

RECORDED = Path(__file__).parent.parent / "results" / "wire"
MEMORY = 100e6  # bytes of vectors to take in turns
TURNS = 101
FEW_TURNS = 21  # of what takes up to a second


def recorded(name: str) -> tuple[Layout, list[Payload]]:
    """The messages of a run, decoded."""
    layout = Layout.from_text((RECORDED / name / "layout.json").read_text())
    files = sorted((RECORDED / name).glob("*.cfa"))
    return layout, [decode(file.read_bytes(), layout=layout) for file in files]


def uniform(layout: Layout, share: float, n: int) -> list[Payload]:
    """Sets that could be any, with values that do not matter."""
    k, draws = round(share * layout.d), np.random.default_rng(0)
    sets = [np.sort(draws.choice(layout.d, k, replace=False)) for _ in range(n)]
    ones = Floats(np.full(k, 0x3F80, np.int16), "bf16")
    return [Payload(layout.d, np.array([0, k]), each, ones) for each in sets]


def varint_zlib(indices: np.ndarray) -> int:
    """Bytes of gaps in groups of 7 bits, deflated: what one would do without a coder of one's own."""
    gaps = np.diff(indices, prepend=-1) - 1
    groups = [
        ((gaps >> 7 * i) & 127 | np.where(gaps >> 7 * (i + 1), 128, 0), gaps >> 7 * i) for i in range(5)
    ]
    used = np.stack([(rest > 0) | (i == 0) for i, (_, rest) in enumerate(groups)], 1)
    return len(zlib.compress(np.stack([low for low, _ in groups], 1)[used].astype(np.uint8).tobytes(), 9))


def index_table() -> Table:
    table = Table("index sets", "k", "bound", "ours", "of the bound: mean", "most", "varint + zlib",
                  title="bits per index; peers send 32 or 64")  # fmt: skip
    cnn, steps = recorded("cnn-steps")
    resnet, wide = recorded("resnet18")
    rows = [(f"uniform, CNN, {share:.1%}", cnn, uniform(cnn, share, 5)) for share in (0.001, 0.01, 0.1)]
    rows += [("uniform, ResNet-18, 1.0%", resnet, uniform(resnet, 0.01, 2))]
    rows += [("error feedback, CNN, K = 10 steps", cnn, steps)]
    rows += [("error feedback, CNN, K = 10 epochs", cnn, recorded("cnn-epochs")[1])]
    rows += [("error feedback, ResNet-18, K = 20 steps", resnet, wide)]
    for name, layout, payloads in rows:
        k = payloads[0].counts()[0]
        bound = entropy_bound(layout.d, k)
        ours = [8 * read_header(encode(p, layout)).index_bytes / k for p in payloads]
        other = statistics.mean(8 * varint_zlib(p.indices) / k for p in payloads if p.indices is not None)
        mean = statistics.mean(ours)
        shown = (
            f"{bound:.2f}",
            f"{mean:.2f}",
            f"{mean / bound:.4f}",
            f"{max(ours) / bound:.4f}",
            f"{other:.2f}",
        )
        table.add_row(name, f"{k:,}", *shown)
    return table


def message_table() -> Table:
    table = Table("what is sent", "CNN, 10 steps", "CNN, 10 epochs", "ResNet-18",
                  title="bytes of a message, mean over the recorded ones")  # fmt: skip
    runs = [recorded(name) for name in ("cnn-steps", "cnn-epochs", "resnet18")]
    counts = [(layout.d, payloads[0].counts()[0]) for layout, payloads in runs]
    table.add_row("all of it, fp32", *(f"{4 * d:,}" for d, _ in counts))
    table.add_row("int64 + fp32, as GRACE", *(f"{12 * k:,}" for _, k in counts))
    table.add_row("int32 + fp32", *(f"{8 * k:,}" for _, k in counts))
    for text in ("fp32", "bf16", "int8(256)", "sign"):
        means = []
        for layout, payloads in runs:
            lengths = [len(encode(with_values(p, text, layout), layout)) for p in payloads]
            means.append(statistics.mean(lengths))
        table.add_row(f"ours, {text}", *(f"{mean:,.0f}" for mean in means))
    return table


def with_values(payload: Payload, text: str, layout: Layout) -> Payload:
    """The same coordinates, their values written by another quantiser."""
    dense = decompress(payload.map(torch.from_numpy))
    selector = f"topk({1 - payload.counts()[0] / payload.d!r})"
    made = parse(f"{selector} >> {text}").compress(dense, torch.tensor([1]), layout).numpy()
    assert np.array_equal(made.indices, payload.indices)
    return made


def updates(
    model: str, clients: int, steps: int, batch: int, rounds: int
) -> tuple[Layout, list[torch.Tensor]]:
    """The vectors p = g + e that clients compress in the last round of a short run on this machine."""
    config = Config(model=model, clients=clients, local_steps=str(steps), batch_size=batch, rounds=rounds)
    task = build_task(config)
    with TemporaryDirectory() as folder:
        engine = ReferenceEngine(Plan(config, task), task, torch.device("cpu"), Path(folder))
        state = engine.start()
        for _ in track(range(rounds), f"{model}: {clients} clients, {steps} local steps", transient=True):
            state, _ = engine.round(state)
        files = sorted(Path(folder).glob("*.cfa"))[-clients:]
        sent = [decode(file.read_bytes(), layout=engine.layout).map(torch.from_numpy) for file in files]
    kept = [state.residuals.get(client, state.x) for client in range(clients)]
    return engine.layout, [e + decompress(payload)[0] for e, payload in zip(kept, sent, strict=True)]


def measure(
    contenders: dict[str, tuple[Callable[[Any], object], list[Any]]], turns: int = TURNS
) -> dict[str, float]:
    """The median seconds of each, in turns: a machine that slows down does so for all of them."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(turns + 2):
        for name, (work, things) in contenders.items():
            if name == "topk" and turn > 10:
                continue  # it takes long, and need not be known so well
            thing = things[turn % len(things)]
            began = time.perf_counter()
            work(thing)
            times[name].append(time.perf_counter() - began)
    return {name: statistics.median(found[2:]) for name, found in times.items()}  # two turns to warm up


def entropy(symbols: np.ndarray) -> float:
    """Return the bits per symbol of an ideal code that knows how often each symbol comes."""
    counts = np.unique(symbols, return_counts=True)[1]
    return float(np.log2(len(symbols)) - (counts * np.log2(counts)).sum() / len(symbols))


def weights(model: torch.nn.Module, shape: tuple[int, ...]) -> tuple[Layout, torch.Tensor]:
    """Return a model's layout and its weights after 10 steps of SGD on noise."""
    optimiser = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(10):
        loss = torch.nn.functional.cross_entropy(model(torch.randn(8, *shape)), torch.arange(8))
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    tensors = {name: tensor.detach() for name, tensor in model.named_parameters()}
    shapes = tuple(tuple(tensor.shape) for tensor in tensors.values())
    layout = Layout(tuple(tensors), shapes, ("float32",) * len(tensors))
    return layout, torch.cat([tensor.flatten() for tensor in tensors.values()])


def whole_models() -> dict[str, tuple[Layout, torch.Tensor]]:
    """Return the layouts and weights of both models."""
    torch.manual_seed(0)
    grey, colour = (1, 28, 28), (3, 32, 32)
    return {"CNN": weights(cnn(grey, 10), grey), "ResNet-18": weights(resnet18(colour, 10), colour)}


def whole_model_table() -> Table:
    table = Table("model", "values", "bits", "exponent, sign + rest", "upper 16 + rest", "memcpy", "encode",
                  "GB/s", "/ memcpy", "decode", "GB/s", "/ memcpy",
                  title="whole models: bits per value, milliseconds on one core, GB of float32")  # fmt: skip
    for name, (layout, x) in whole_models().items():
        for values in ("fp32", "bf16"):
            table.add_row(name, values, *whole_model_columns(layout, x, values))
    return table


def whole_model_columns(layout: Layout, x: torch.Tensor, values: str) -> list[str]:
    """Return the columns of the table after the first two."""
    vectors = [x.clone() for _ in range(math.ceil(MEMORY / (4 * layout.d)))]
    payloads = [parse(values).compress(vector, 1, layout).numpy() for vector in vectors]
    messages = [encode(payload, layout, code_floats=True) for payload in payloads]
    target = torch.empty_like(x)
    t = measure({
        "copy": (target.copy_, vectors),
        "encode": (lambda payload: encode(payload, layout, code_floats=True), payloads),
        "decode": (lambda message: decode(message, layout=layout), messages),
    }, FEW_TURNS)  # fmt: skip
    width = 32 if values == "fp32" else 16
    patterns = payloads[0].values.data.view(f"uint{width}")
    bits = 8 * len(messages[0]) / layout.d
    exponents, upper = (
        entropy(patterns >> width - 9) + width - 9,
        entropy(patterns >> width - 16) + width - 16,
    )
    found = [f"{bits:.2f}", f"{exponents:.2f}", f"{upper:.2f}", f"{1e3 * t['copy']:.2f}"]
    for name in ("encode", "decode"):
        speed, ratio = 4e-9 * layout.d / t[name], t[name] / t["copy"]
        found += [f"{1e3 * t[name]:.1f}", f"{speed:.3f}", f"{ratio:.0f}"]
    return found


def chain_table() -> Table:
    table = Table("model", "k", "memcpy", "10 decodes", "chain", "of 10 decodes + 2 memcpys",
                  "(chain - decodes) / memcpy",
                  title="10 messages of topk(0.97) >> int3(256) applied to a copy; milliseconds")  # fmt: skip
    for name, (layout, x) in whole_models().items():
        table.add_row(name, *chain_columns(layout, x))
    return table


def chain_columns(layout: Layout, x: torch.Tensor) -> list[str]:
    """Return the columns of the table after the first. The ten updates are Gaussian noise."""
    compressor, noise = parse("topk(0.97) >> int3(256)"), torch.Generator().manual_seed(1)
    made = [compressor.compress(torch.randn(layout.d, generator=noise), 1, layout).numpy() for _ in range(10)]
    messages = [encode(payload, layout) for payload in made]
    replica = ModelReplica(layout, rounds_values=True)
    vectors = [x.numpy().copy() for _ in range(math.ceil(MEMORY / (4 * layout.d)))]
    copies = [replica.keep(vector) for vector in vectors]
    target = np.empty_like(vectors[0])
    t = measure({
        "copy": (lambda vector: np.copyto(target, vector), vectors),
        "decode": (lambda _: [decode(message, layout=layout) for message in messages], copies),
        "chain": (lambda copy: replica.apply(copy, messages), copies),
    }, FEW_TURNS)  # fmt: skip
    ms = [f"{1e3 * t[name]:.2f}" for name in ("copy", "decode", "chain")]
    share = f"{t['chain'] / (t['decode'] + 2 * t['copy']):.3f}"
    return [f"{made[0].counts()[0]:,}", *ms, share, f"{(t['chain'] - t['decode']) / t['copy']:.1f}"]


def speed_table() -> Table:
    table = Table("model", "sent", "memcpy", "hot", "torch.topk", "select", "faster", "encode",
                  "(select + encode) / memcpy", "decode", "/ memcpy", "compress + encode", "/ memcpy",
                  title="milliseconds, one core, and ratios")  # fmt: skip
    runs = {"CNN": updates("cnn", 4, 10, 20, 12), "ResNet-18": updates("resnet18_gn", 2, 2, 8, 3)}
    cases = [(name, *run, comp) for name, run in runs.items() for comp in (0.99, 0.9)]
    for name, layout, vectors, comp in track(cases, "measuring", transient=True):
        copies = math.ceil(MEMORY / (4 * layout.d * len(vectors)))
        many = [p.clone() for p in vectors for _ in range(copies)]
        table.add_row(name, f"{1 - comp:.0%}", *speeds(layout, many, comp))
    return table


def speeds(layout: Layout, vectors: list[torch.Tensor], comp: float) -> list[str]:
    """The columns of the table after the first two."""
    compressor, k = parse(f"topk({comp}) >> bf16"), round((1 - comp) * layout.d)
    target = torch.empty_like(vectors[0])
    payloads = [compressor.compress(p, 1, layout).numpy() for p in vectors]
    messages = [encode(payload, layout) for payload in payloads]
    t = measure({
        "copy": (target.copy_, vectors),
        "select": (lambda p: find_largest(p.numpy(), k), vectors),
        "encode": (lambda payload: encode(payload, layout), payloads),
        "decode": (lambda message: decode(message, layout=layout), messages),
        "whole": (lambda p: encode(compressor.compress(p, 1, layout).numpy(), layout), vectors),
        "topk": (lambda p: torch.topk(p.abs(), k), vectors),
    })  # fmt: skip
    t |= measure({"hot": (target.copy_, vectors[:1])})
    ms = {name: f"{1e3 * found:.2f}" for name, found in t.items()}
    over = {name: f"{t[name] / t['copy']:.1f}" for name in ("decode", "whole")}
    both = f"{(t['select'] + t['encode']) / t['copy']:.1f}"
    return [ms["copy"], ms["hot"], ms["topk"], ms["select"], f"{t['topk'] / t['select']:.1f}x", ms["encode"],
            both, ms["decode"], over["decode"], ms["whole"], over["whole"]]  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    console = Console(width=160)
    for table in (index_table, message_table, whole_model_table, chain_table, speed_table):
        console.print(table())
    console.print(
        f"{TURNS} turns (9 of torch.topk, {FEW_TURNS} of whole models and chains), medians; "
        f"torch {torch.__version__}, NumPy {np.__version__}, "
        f"{platform.machine()}, one thread; sets and messages of runs: results/wire"
    )


if __name__ == "__main__":
    main()
