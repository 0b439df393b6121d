"""Spoils good messages in millions of ways and decodes them: only WireError may come of it.

    python bench/fuzz.py --messages 10000000

A message is mutated and, mostly, given fitting lengths and a checksum again, so that the decoders are
reached. What is accepted must keep the laws of a payload and survive being encoded again. A mutation is a
pure function of the seed and its number: `--seed S --first NUMBER --messages 1` does it once more.
"""

from __future__ import annotations

import argparse
import faulthandler
import multiprocessing
import os
import re
import sys
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from cfedavg.core.bases import Rotation
from cfedavg.core.layout import Layout
from cfedavg.core.payload import Floats, Payload
from cfedavg.wire import WireError, decode, encode
from cfedavg.wire.frame import CHECKSUM, SIZE

CLIENT, SEQUENCE = 3, 5  # who sends the good messages, and is expected to have sent the spoilt ones
ACCEPTED = "accepted"
RUN = 32  # mutations of a good message before the next one has its turn: the caches of the machine like it
CHUNK = 5_000  # messages that a worker does at a time
GROWTH = 10_000_000  # bytes by which no worker's memory may grow
HUNG = 120  # seconds after which a chunk that has not ended is taken to hang
SHOWN = 10  # failures that are kept of a chunk, and printed in the end

# Where the fields of the header lie: offset, bytes. After the magic: version, where, kind, coding, schema,
# d, k, client, sequence, round, and the lengths of the three sections.
BYTES = [(4 + i, 1) for i in range(4)]
NUMBERS = [(8, 8), (16, 8), (24, 8), (32, 8), (40, 8), (48, 4)]
LENGTHS = [(52, 8), (60, 8), (68, 8)]
# k and the bytes are what the decoders go by, so they have more turns.
FIELDS = [*BYTES, *BYTES, *NUMBERS, (24, 8), (24, 8), *LENGTHS]
KEEP, BLOCK, TOP, RANK, SIZE_OF_BLOCK = (8, 8), (0, 4), (4, 2), (0, 4), (8, 4)  # in the sections
EXTREMES = [0, 1, 2, 127, 255, 2**16 - 1, 2**31 - 1, 2**32 - 1, 2**53, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1]
NUMBER = re.compile(r"\d+")


class Broken(Exception):
    """A message was accepted whose payload breaks a law."""


class Sample(NamedTuple):
    """A good message in parts: header, coordinates, coded values, copied values."""

    layout: Layout
    parts: tuple[bytes, bytes, bytes, bytes]
    checksum: bytes


Corpus = Sequence[Sample]
Parts = list[bytearray]


def build_corpus() -> list[Sample]:
    """The good messages of the tests."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.messages import good_messages, sections  # needs torch, which the workers do without

    good = good_messages(CLIENT, SEQUENCE)
    return [Sample(layout, (m[:SIZE], *sections(m)), m[-CHECKSUM.size :]) for layout, m in good]


class Dice:
    """Random numbers, seeded anew for every message."""

    def __init__(self) -> None:
        self._random = Random()
        self.seed, self.roll, self.bytes = self._random.seed, self._random.random, self._random.randbytes

    def below(self, n: int) -> int:
        return int(self.roll() * n)

    def one_of(self, things: Sequence[Any]) -> Any:
        return things[int(self.roll() * len(things))]

    def section(self, parts: Parts) -> bytearray:
        """One of the parts that has something in it, the header seldom."""
        filled = [part for part in parts[1:] if part]
        return self.one_of(filled) if filled and self.roll() < 0.9 else parts[0]

    def filling(self, n: int) -> bytes:
        """n bytes: random, zeros or ones."""
        return self.one_of((self.bytes(n), bytes(n), b"\xff" * n))


def flip(dice: Dice, parts: Parts, corpus: Corpus) -> None:
    part = dice.section(parts)
    for _ in range(1 + dice.below(8)):
        part[dice.below(len(part))] ^= 1 << dice.below(8)


def overwrite(dice: Dice, parts: Parts, corpus: Corpus) -> None:
    part = dice.section(parts)
    start = dice.below(len(part))
    n = min(1 + dice.below(8), len(part) - start)
    part[start : start + n] = dice.filling(n)


def cut(dice: Dice, parts: Parts, corpus: Corpus) -> None:
    part = dice.one_of(parts[1:])
    if dice.roll() < 0.5:
        del part[dice.below(len(part) + 1) :]
    else:
        del part[-1 - dice.below(8) :]


def extend(dice: Dice, parts: Parts, corpus: Corpus) -> None:
    dice.one_of(parts[1:]).extend(dice.filling(1 + dice.below(dice.one_of((8, 200)))))


def swap(dice: Dice, parts: Parts, corpus: Corpus) -> None:
    a = 1 + dice.below(3)
    b = 1 + (a + dice.below(2)) % 3
    parts[a], parts[b] = parts[b], parts[a]


def splice(dice: Dice, parts: Parts, corpus: Corpus) -> None:
    """Sections of another message, or the end of one; now and then its header."""
    other = dice.one_of(corpus).parts
    kind = dice.below(4)
    if kind == 0:
        i = 1 + dice.below(3)
        a, b = dice.below(len(parts[i]) + 1), dice.below(len(other[i]) + 1)
        parts[i][a:] = other[i][b:]
    elif kind == 1:
        parts[0][:] = other[0]
    else:
        for i in range(1, 4):
            if dice.roll() < 0.5:
                parts[i][:] = other[i]


def change(dice: Dice, part: bytearray, place: tuple[int, int]) -> None:
    """Another number at a place in a part: an extreme one, a neighbour of the one there, or a random one."""
    start, size = place
    if len(part) < start + size:
        return
    kind = dice.below(3)
    if kind == 0:
        number = dice.one_of(EXTREMES)
    elif kind == 1:
        number = int.from_bytes(part[start : start + size], "little") + dice.one_of((-2, -1, 1, 2))
    else:
        number = dice.below(dice.one_of((8, 700, 2 ** (8 * size))))
    part[start : start + size] = (number % 2 ** (8 * size)).to_bytes(size, "little")


def header_field(dice: Dice, parts: Parts, corpus: Corpus) -> None:
    change(dice, parts[0], dice.one_of(FIELDS))


def copied_field(dice: Dice, parts: Parts, corpus: Corpus) -> None:
    """The block or the top of levels, the keep of a mask, a basis; often in what is not what it seems."""
    part, place = dice.one_of(((3, BLOCK), (3, TOP), (1, KEEP), (1, RANK), (1, SIZE_OF_BLOCK)))
    change(dice, parts[part], place)


def stream(dice: Dice, parts: Parts, corpus: Corpus) -> None:
    """One or two sections have other bytes in all of their length."""
    for _ in range(1 + dice.below(2)):
        part = dice.one_of(parts[1:])
        part[:] = dice.filling(len(part))


Action = Callable[[Dice, Parts, Corpus], None]
ACTIONS: list[Action] = [
    flip,
    flip,
    overwrite,
    cut,
    extend,
    swap,
    splice,
    header_field,
    header_field,
    copied_field,
    stream,
]


def mutate(seed: int, number: int, corpus: Corpus, dice: Dice | None = None) -> tuple[Layout, bytes]:
    """The spoilt message of that number, and the layout that it claims to be of."""
    dice = dice or Dice()
    dice.seed(seed << 64 | number)
    good = corpus[number // RUN % len(corpus)]
    parts = [bytearray(part) for part in good.parts]
    dice.one_of(ACTIONS)(dice, parts, corpus)
    while dice.roll() < 0.2:
        dice.one_of(ACTIONS)(dice, parts, corpus)
    if dice.roll() < 0.9:
        for (start, size), new, old in zip(LENGTHS, parts[1:], good.parts[1:], strict=True):
            if len(new) != len(old):
                parts[0][start : start + size] = len(new).to_bytes(size, "little")
    body = b"".join(parts)
    luck = dice.roll()
    if luck < 0.9:
        return good.layout, body + CHECKSUM.pack(zlib.crc32(body))
    message = body + good.checksum
    return good.layout, message if luck < 0.97 else message[: dice.below(len(message))]


def check(message: bytes, layout: Layout) -> str:
    """The words with which a message was refused, numbers left out; or ACCEPTED, if that keeps the laws."""
    try:
        payload = decode(message, layout=layout, client=CLIENT, sequence=SEQUENCE)
    except WireError as error:
        return NUMBER.sub("#", str(error))
    check_laws(payload)
    again = encode(payload, layout, client=CLIENT, sequence=SEQUENCE, code_floats=message[4] == 2)
    if again != message and contents(decode(again, layout=layout)) != contents(payload):
        raise Broken("the payload that was accepted is another one after encode and decode")
    return ACCEPTED


def check_laws(payload: Payload) -> None:
    """Raises Broken unless the payload is one that a compressor could have made."""
    d, k, indices, values = payload.d, int(payload.offsets[1]), payload.indices, payload.values
    if payload.basis is not None:
        if k != payload.basis.count(d) or indices is not None:
            raise Broken(f"k = {k} in a basis of {payload.basis.count(d)} coordinates")
    elif indices is None:
        if k != d:
            raise Broken(f"all coordinates, but k = {k} and d = {d}")
    elif len(indices) != k:
        raise Broken(f"{len(indices)} indices for k = {k}")
    elif k and (indices[0] < 0 or indices[-1] >= d or not (indices[1:] > indices[:-1]).all()):
        raise Broken("indices that do not increase from 0 to d - 1")
    if isinstance(values, Floats):
        data = values.data
        # All exponent bits of a bf16 set mean NaN or Inf.
        finite = (data & 0x7F80) != 0x7F80 if values.dtype == "bf16" else np.isfinite(data)
        if len(data) != k:
            raise Broken(f"{len(data)} values for k = {k}")
        if not finite.all():
            raise Broken("a value that is not finite")
        return
    if len(values.levels) != k or len(values.scales) != values.count_scales(k):
        raise Broken(f"{len(values.levels)} levels and {len(values.scales)} scales for k = {k}")
    if values.top > np.iinfo(values.levels.dtype).max:
        raise Broken(f"top = {values.top} for levels of {values.levels.dtype}")
    if k and max(-int(values.levels.min()), int(values.levels.max())) > values.top:
        raise Broken(f"a level above top = {values.top}")
    if values.per_level and not values.levels.all():
        raise Broken("a level 0 without a scale")
    if not np.isfinite(values.scales).all():
        raise Broken("a scale that is not finite")


def contents(payload: Payload) -> list[object]:
    """All that is in a payload, to be compared bit for bit."""
    indices, mask, values = payload.indices, payload.mask, payload.values
    found = [payload.d, payload.offsets.tobytes(), indices if indices is None else indices.tobytes()]
    found += [mask and (mask.keys.tobytes(), mask.keep)]
    if isinstance(payload.basis, Rotation):
        found += [payload.basis.keys.tobytes(), payload.basis.block]
    else:
        found += [payload.basis]
    if isinstance(values, Floats):
        return [*found, values.dtype, values.data.dtype, values.data.tobytes()]
    return [
        *found,
        values.block,
        values.top,
        values.per_level,
        values.levels.dtype,
        values.levels.tobytes(),
        values.scales.tobytes(),
    ]


@dataclass
class Outcome:
    """What became of some messages."""

    words: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def add(self, other: Outcome) -> None:
        self.words.update(other.words)
        self.failures.extend(other.failures)


def fuzz(seed: int, numbers: Iterable[int], corpus: Corpus) -> Outcome:
    """Mutates and checks the messages of these numbers."""
    outcome, dice = Outcome(), Dice()
    words = outcome.words
    for number in numbers:
        layout, message = mutate(seed, number, corpus, dice)
        try:
            words[check(message, layout)] += 1
        except Exception as error:
            words[f"FAILED: {type(error).__name__}"] += 1
            where = f"--seed {seed} --first {number} --messages 1"
            trace = "".join(traceback.format_exception(error))
            outcome.failures.append(f"{where}\nmessage for {layout}: {message.hex()}\n{trace}")
    return outcome


def resident() -> int:
    """Bytes of memory that this process has."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


class _Worker:
    """What a worker process knows."""

    corpus: Corpus = ()
    before = 0


def _start(corpus: Corpus, seed: int) -> None:
    """Compiles or loads the kernels, and lets the memory settle, before it is measured."""
    _Worker.corpus = corpus
    fuzz(seed + 1, range(RUN * len(corpus)), corpus)
    _Worker.before = resident()


def _work(seed: int, numbers: range) -> tuple[Outcome, int, int]:
    """The outcome of a chunk; which process did it, and by how many bytes it has grown."""
    faulthandler.dump_traceback_later(HUNG, exit=True)
    outcome = fuzz(seed, numbers, _Worker.corpus)
    faulthandler.cancel_dump_traceback_later()
    del outcome.failures[SHOWN:]
    return outcome, os.getpid(), resident() - _Worker.before


class Rate(ProgressColumn):
    """Messages a second."""

    def render(self, task: Task) -> Text:
        return Text(f"{task.completed / task.elapsed if task.elapsed else 0:,.0f}/s")


def run(messages: int, seed: int, workers: int, first: int, console: Console) -> tuple[Outcome, list[int]]:
    """All messages, in as many processes; and how much the memory of each has grown."""
    total, growth = Outcome(), dict[int, int]()
    last = first + messages
    chunks = [range(start, min(start + CHUNK, last)) for start in range(first, last, CHUNK)]
    progress = Progress(
        "{task.description}",
        BarColumn(),
        MofNCompleteColumn(),
        Rate(),
        TimeRemainingColumn(),
        console=console,
    )
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start, (build_corpus(), seed))
    with progress, pool:
        bar = progress.add_task("decoding", total=messages)
        futures: dict[Future[tuple[Outcome, int, int]], range] = {
            pool.submit(_work, seed, numbers): numbers for numbers in chunks
        }
        for future in as_completed(futures):
            try:
                outcome, process, grown = future.result()
            except BrokenProcessPool:
                lost = [numbers for each, numbers in futures.items() if not each.done() or each.exception()]
                total.words["FAILED: a worker died"] += 1
                total.failures.append(f"a worker died at --seed {seed} in one of {lost[: 2 * workers]}")
                break
            total.add(outcome)
            growth[process] = grown
            progress.advance(bar, len(futures[future]))
    return total, list(growth.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--messages", type=int, default=10_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first message")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    console = Console()
    outcome, growth = run(options.messages, options.seed, options.workers, options.first, console)
    table = Table("messages", "what became of them")
    for words, n in outcome.words.most_common():
        table.add_row(f"{n:,}", words)
    console.print(table)
    console.print("memory of each worker grew by", ", ".join(f"{grown / 1e6:.1f} MB" for grown in growth))
    for failure in outcome.failures[:SHOWN]:
        console.print(failure, style="red", markup=False, highlight=False, soft_wrap=True)
    return 1 if outcome.failures or any(grown >= GROWTH for grown in growth) else 0


if __name__ == "__main__":
    sys.exit(main())
