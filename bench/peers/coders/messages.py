"""Recorded messages in the hands of three coders: ours, NNCodec's and STC's. All are lossless.

NNCodec codes the dense tensors of levels. It has no place for scales: it is given the bytes that they take in
our message. Of its settings those count that make the messages of a kind shortest. Milliseconds are processor
time, medians over the turns, in which the contenders alternate; each turn takes the next of the messages. The
first call of a turn finds the caches full of what the others did; the same call again finds its own.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from bench.peers.coders import formulas, nnc
from bench.wire import recorded, with_values

from cfedavg import Layout, decode, encode
from cfedavg.core.payload import Levels, Payload
from cfedavg.wire import read_header

# The folder in results/wire, and the quantisers: None for the values as they were sent.
KINDS: list[tuple[str, str | None]] = [
    ("cnn-epochs", "sign"), ("cnn-epochs", "int3(256)"), ("cnn-steps", "sign"), ("cnn-steps", "int3(256)"),
    ("resnet18", "sign"), ("resnet18", "int3(256)"), ("gpt", "sign"), ("gpt", None), ("adapters", "sign"),
    ("adapters", None),
]  # fmt: skip
SENT = {"gpt": "int2(1024)", "adapters": "int3(256)"}
FEW = 3  # messages that are searched for the best settings, and timed
TURNS, LARGE = 15, 10**7  # a third of the turns with more coordinates than LARGE


class Case(NamedTuple):
    """A message and what it says."""

    payload: Payload
    message: bytes
    levels: np.ndarray
    scales: int  # bytes


def read_cases(folder: str, quantiser: str | None) -> tuple[Layout, list[Case]]:
    """Return the recorded messages of a folder with values of a quantiser."""
    layout, payloads = recorded(folder)
    cases = []
    for given in payloads:
        payload = with_values(given, quantiser, layout) if quantiser else given
        assert isinstance(payload.values, Levels)
        message, levels = encode(payload, layout), np.zeros(layout.d, np.int32)
        levels[payload.indices] = payload.values.levels
        cases.append(Case(payload, message, levels, read_header(message).raw_bytes))
    return layout, cases


def shapes_of(layout: Layout) -> dict[str, tuple[int, ...]]:
    """Return the shapes by numbers: NNCodec sends the names, and those of layers are longer."""
    return {str(i): shape for i, shape in enumerate(layout.shapes)}


def choose_settings(layout: Layout, cases: list[Case]) -> nnc.Settings:
    """Return the settings with which NNCodec takes the fewest bytes for these messages."""

    def size(settings: nnc.Settings) -> int:
        tensors = (nnc.arrange(case.levels, shapes_of(layout), settings) for case in cases)
        return sum(len(nnc.encode(each, settings)) for each in tensors)

    return min(nnc.all_settings(), key=size)


def compare(folder: str, quantiser: str | None) -> dict[str, Any]:
    """Return the line of a kind of messages: bytes and seconds of each coder."""
    layout, cases = read_cases(folder, quantiser)
    few = cases[:: max(1, len(cases) // FEW)]
    settings = choose_settings(layout, few)
    names = "ours", "nncodec", "nncodec_bare", "nncodec_default", "stc"
    sizes: dict[str, list[int]] = {name: [] for name in names}
    for case in cases:
        check_ours(case, layout)
        sizes["ours"].append(len(case.message))
        sizes["nncodec"].append(case.scales + measure_nncodec(case, layout, settings))
        tensors = nnc.arrange(case.levels, shapes_of(layout), settings)
        sizes["nncodec_bare"].append(case.scales + sum(map(len, nnc.encode_bare(tensors, settings))))
        sizes["nncodec_default"].append(case.scales + measure_nncodec(case, layout, nnc.DEFAULT))
        sizes["stc"].append(measure_stc(case))
    k = cases[0].payload.counts()[0]
    return {
        "part": "messages", "folder": folder, "values": quantiser or SENT[folder], "d": layout.d, "k": k,
        "messages": len(cases), "settings": settings._asdict(), "grace": formulas.count_grace(k),
        "stc_formula": round(formulas.count_stc(layout.d, k)),
        **{name: round(statistics.fmean(found), 1) for name, found in sizes.items()},
        **measure_times(layout, few, settings),
    }  # fmt: skip


def check_ours(case: Case, layout: Layout) -> None:
    """Check that our message decodes to exactly the payload."""
    found, sent = decode(case.message, layout=layout), case.payload
    assert isinstance(found.values, Levels)
    assert isinstance(sent.values, Levels)
    assert np.array_equal(found.indices, sent.indices)
    assert np.array_equal(found.values.levels, sent.values.levels)
    assert np.array_equal(found.values.scales, sent.values.scales)


def measure_nncodec(case: Case, layout: Layout, settings: nnc.Settings) -> int:
    """Return the bytes of NNCodec's bitstream of the levels, which must decode to exactly these."""
    stream = nnc.encode(nnc.arrange(case.levels, shapes_of(layout), settings), settings)
    assert np.array_equal(nnc.restore(nnc.decode(stream), shapes_of(layout), settings), case.levels)
    return len(stream)


def measure_stc(case: Case) -> int:
    """Return the bytes of STC's message, whose positions must decode to exactly the coordinates."""
    indices, d = case.payload.indices, case.payload.d
    found = formulas.decode_golomb(formulas.encode_golomb(indices, d), d, len(indices))
    assert np.array_equal(found, indices)
    return formulas.measure_stc(indices, d)


def measure_times(layout: Layout, cases: list[Case], settings: nnc.Settings) -> dict[str, dict[str, float]]:
    """Return the milliseconds to encode and to decode, by coder."""
    work: dict[str, list[Callable[[], object]]] = {}
    for name, call in calls(layout, cases, settings):
        work.setdefault(name, []).append(call)
    first: dict[str, list[float]] = {name: [] for name in work}
    again: dict[str, list[float]] = {name: [] for name in work}
    for turn in range((TURNS if layout.d < LARGE else TURNS // 3) + 1):
        for name, each in work.items():
            for times in (first[name], again[name]):
                began = time.process_time()
                each[turn % len(each)]()
                times.append(time.process_time() - began)
    return {
        f"{what}{when}_ms": {
            name.split()[1]: round(1e3 * statistics.median(found[1:]), 4)
            for name, found in times.items()
            if name.startswith(what)
        }
        for what in ("encode", "decode")
        for when, times in (("", first), ("_again", again))
    }


def calls(
    layout: Layout, cases: list[Case], settings: nnc.Settings
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield what is timed, for each of the messages. The first of each name warms up."""
    for case in cases:
        tensors = nnc.arrange(case.levels, shapes_of(layout), settings)
        yield "encode ours", partial(encode, case.payload, layout)
        yield "encode nncodec", partial(nnc.encode, tensors, settings)
        yield "encode nncodec_bare", partial(nnc.encode_bare, tensors, settings)
        yield "decode ours", partial(decode, case.message, layout=layout)
        yield "decode nncodec", partial(nnc.decode, nnc.encode(tensors, settings))
