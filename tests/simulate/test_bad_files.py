"""Files that somebody else made, or that a disk has damaged: one sentence and exit code 2, for every command.

Nothing hangs, nothing is allocated because a file says so, and no text of a file is taken for markup.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
import zlib
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cfedavg import Config, InputError, Layout
from cfedavg import run as run_and_draw
from cfedavg.cli.inspect import inspect_message
from cfedavg.core.config import read_config
from cfedavg.sweep import DamagedCell, read_cell
from cfedavg.wire.frame import CHECKSUM, Coding, Header, Kind, Where
from tests.conftest import Command, blobs
from tests.golden_cases import FOLDER as GOLDEN
from tests.golden_cases import NET
from tests.report.test_report import make_run, node_row, rounds, row

run = partial(run_and_draw, draw=False)
Make = Callable[[Path], object]

DEEP = "[" * 200_000
NESTED = "[" * 900 + "]" * 900  # can be read, but not be shown or written where the stack is deeper
ESCAPE = "\x1b[2J"


def text(content: str | bytes) -> Make:
    data = content if isinstance(content, bytes) else content.encode()
    return lambda path: path.write_bytes(data)


# What may stand where a file is expected, whatever it should hold.
NO_FILE: dict[str, Make] = {
    "a pipe": os.mkfifo,
    "a folder": os.mkdir,
    "a link to nothing": lambda path: path.symlink_to(path.with_name("nothing")),
    "a link to itself": lambda path: path.symlink_to(path),
    "a device": lambda path: path.symlink_to("/dev/zero"),
}
NO_TOML: dict[str, Make] = NO_FILE | {
    "brackets": text("x = " + DEEP),
    "tables": text("x = " + "{a=" * 50_000),
    "half a letter": text(b"\xff\xfe"),
    "zeros": text(b"\0" * 100),
    "no value": text("clients ="),
}


def put(path: Path, make: Make) -> Path:
    """The path, with something else there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    make(path)
    return path


def refused(outcome: Any, words: str = "") -> bool:
    """One sentence, exit code 2."""
    return bool(outcome.code == 2 and outcome.err.startswith("error: ") and words in outcome.err)


# Configurations


@pytest.mark.parametrize("name", NO_TOML)
@pytest.mark.parametrize("command", [["run"], ["sweep", "--vary", "seed=0|1"]], ids=["run", "sweep"])
def test_no_configuration(cfedavg: Command, tmp_path: Path, command: list[str], name: str) -> None:
    file = put(tmp_path / "c.toml", NO_TOML[name])
    assert refused(cfedavg(*command, "--config", file, "--out", tmp_path / "out"), str(file))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", [DEEP, "1" * 5000, "\0", "{" * 5000])
def test_no_value_to_vary(cfedavg: Command, tmp_path: Path, value: str) -> None:
    assert refused(cfedavg("sweep", "--vary", f"clients={value}", "--out", tmp_path / "out"), "--clients")


# Reports


def lines(*rows: dict[str, Any] | str) -> Make:
    return text("".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in rows))


NO_METRICS: dict[str, Make] = NO_FILE | {
    "brackets": lines(DEEP),
    "braces": lines('{"a":' * 200_000),
    "a deep value": lines('{"round": 0, "test_loss": ' + NESTED + "}"),
    "no round": lines({key: value for key, value in row(0).items() if key != "round"}),
    "no object": lines("3"),
    "a round that is a truth": lines(row(0, round=True)),
    "a round that is a fraction": lines(row(0, round=0.5)),
    "a negative round": lines(row(0, round=-1)),
    "a large round": lines(row(0, round=2**60)),
    "a large number": lines(row(0, test_accuracy=10**400)),
    "too many digits": lines('{"round": 1' + "0" * 5000 + "}"),
    "a name that steers the terminal": lines(row(0, **{f"test_{ESCAPE}": 1.0})),
    "half a letter as a name": lines('{"round": 0, "test_\\ud800": 1}'),
    "a text for a number": lines(row(0, uplink_bytes="[/]")),
    "zeros": text(b"\0" * 100 + b"\n"),
}
NO_NODES: dict[str, Make] = {
    "brackets": lines(DEEP),
    "no number": lines({"round": 0, "node": "a", "outcome": "lost"}),
    "no name": lines({"round": 0, "number": 0, "outcome": "lost"}),
    "no outcome": lines({"round": 0, "number": 0, "node": "a"}),
    "a deep name": lines('{"round": 0, "number": 0, "outcome": "lost", "node": ' + NESTED + "}"),
    "a large age": lines(node_row(0, 0, age=10**400)),
    **{name: NO_FILE[name] for name in ("a pipe", "a folder", "a device")},
}
REPORTS = (
    [("config.toml", name, make) for name, make in NO_TOML.items()]
    + [("metrics.jsonl", name, make) for name, make in NO_METRICS.items()]
    + [("nodes.jsonl", name, make) for name, make in NO_NODES.items()]
)


@pytest.mark.parametrize(("file", "name", "make"), REPORTS, ids=[f"{f}, {n}" for f, n, _ in REPORTS])
def test_no_report(cfedavg: Command, tmp_path: Path, file: str, name: str, make: Make) -> None:
    folder = make_run(tmp_path / "run", rounds(2))
    put(folder / file, make)
    outcome = cfedavg("report", folder, "--out", tmp_path / "report")
    assert refused(outcome, file)
    assert ESCAPE not in outcome.err
    assert len(outcome.err) < 1000
    assert not (tmp_path / "report").exists()


@pytest.mark.parametrize("make", [*NO_FILE.values(), text("")], ids=[*NO_FILE, "a file"])
def test_no_folder_to_report_on(cfedavg: Command, tmp_path: Path, make: Make) -> None:
    assert refused(cfedavg("report", put(tmp_path / "run", make)), "is not a run folder")
    assert refused(cfedavg("report", tmp_path / ("a" * 300)), "is not a run folder")


MARKUP = "[/red] [link=x] \\[ [bold"


def test_text_of_a_run_is_no_markup(
    cfedavg: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither what a configuration says, nor a metric's name, nor a folder's."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("cfedavg.report.figures.draw_panel", lambda *_: b"")
    monkeypatch.setattr("cfedavg.report.figures.draw_panels", lambda *_: b"")
    rows = [{"round": 0, f"test_{MARKUP}": 1.0}]
    runs = [make_run(tmp_path / f"[{n}" / "x]", rows, compressor=MARKUP, clients=n) for n in (1, 2)]
    outcome = cfedavg("report", *runs, "--out", tmp_path / "[/report]")
    assert outcome.code == 0
    assert outcome.out.count("[link=x]") == 2  # in the head of the table, which breaks lines, and below
    assert f"test {MARKUP}" in outcome.out
    assert "[/report]/report.html" in outcome.out


def test_half_a_letter_in_a_name(tmp_path: Path, cfedavg: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON may hold one; a page cannot."""
    monkeypatch.setattr("cfedavg.report.figures.draw_panel", lambda *_: b"")
    folder = make_run(tmp_path / "run", rounds(1))
    put(folder / "nodes.jsonl", lines(node_row(0, 0, "lost", node="a\ud800", why=["\ud800"])))
    assert cfedavg("report", folder, "--out", tmp_path / "out").code == 0


# Messages


def layout(*shapes: object) -> str:
    return json.dumps([["[/]"] * len(shapes), shapes, ["float32"] * len(shapes)])


NO_LAYOUT: dict[str, Make] = NO_FILE | {
    "2^50 numbers": text(layout([2**20, 2**30])),
    "2^50 numbers in a row": text(layout([2**50])),
    "many rows": text(layout(*[[2**31 - 1, 1]] * 20)),
    "many columns": text(layout(*[[1, 2**31 - 1]] * 20)),
    "large numbers": text(layout([10**4000] * 30)),
    "many dimensions": text(layout([2**50] * 100_000)),
    "negative": text(layout([-3])),
    "truths": text(layout([True])),
    "fractions": text(layout([2.5])),
    "texts": text(layout("ab")),
    "brackets": text(DEEP),
    "no dtypes": text('[["a"], [[3]]]'),
    "a number": text("3"),
    "a name that steers the terminal": text(json.dumps([[ESCAPE], [[3]], ["float32"]])),
    "half a letter": text(b"\xff"),
}


def forged(found: Layout, where: Where, k: int = 1) -> bytes:
    """A message of k bf16 zeros for this layout that is right but for its indices."""
    section = struct.pack("<qQ", 7, 1) if where is Where.DRAWN else b"\0" * 8 * (where is Where.LISTED)
    sizes = [len(section), 8, 0]
    header = Header(where, Kind.BF16, Coding.CODED, found.schema_hash, found.d % 2**64, k, 0, 0, 0, *sizes)
    body = header.pack() + section + b"\0" * 8
    return body + CHECKSUM.pack(zlib.crc32(body))


@pytest.mark.parametrize("name", NO_LAYOUT)
@pytest.mark.parametrize("where", [Where.ALL, Where.DRAWN, Where.LISTED])
def test_no_layout(cfedavg: Command, tmp_path: Path, name: str, where: Where) -> None:
    """The message says that it is of this layout."""
    file = put(tmp_path / "layout.json", NO_LAYOUT[name])
    found = Layout.flat(3)
    if name.startswith(("2^50", "many")):
        found = Layout.from_text(file.read_text()) if "dim" not in name else found
    put(tmp_path / "m.cfa", text(forged(found, where)))
    outcome = cfedavg("inspect", tmp_path / "m.cfa", "--layout", file)
    assert refused(outcome, str(file))
    assert ESCAPE not in outcome.err + outcome.out


NO_MESSAGE: dict[str, Make] = NO_FILE | {
    "nothing": text(b""),
    "too short": text(b"CFAV"),
    "another file": text(b"\x89PNG" * 100),
    "d and k of 2^64 - 1": text(
        Header(Where.ALL, Kind.FP32, Coding.PLAIN, 0, 2**64 - 1, 2**64 - 1, 0, 0, 0, 0, 0, 0).pack() + b"1234"
    ),
    "sections of 2^64 - 1": text(
        Header(Where.LISTED, Kind.BF16, Coding.CODED, 0, 9, 3, 0, 0, 0, *[2**64 - 1] * 3).pack() + b"1234"
    ),
    "k beyond its bytes": text(forged(NET, Where.LISTED, k=2**40)),
    "k beyond d": text(forged(NET, Where.LISTED, k=NET.d + 1)),
}


@pytest.mark.parametrize("name", NO_MESSAGE)
def test_no_message(cfedavg: Command, tmp_path: Path, name: str) -> None:
    put(tmp_path / "layout.json", text(NET.text))
    file = put(tmp_path / "m.cfa", NO_MESSAGE[name])
    assert refused(cfedavg("inspect", file), str(file))


def npy(header: str) -> Make:
    """A NumPy file with 100 bytes after this header."""
    data = header.encode() + b" " * (63 - (10 + len(header)) % 64) + b"\n"
    return text(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(data)) + data + b"\0" * 100)


def array(descr: str, shape: str) -> Make:
    return npy(f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}")


NO_ARRAY: dict[str, Make] = NO_FILE | {
    "2^50 numbers": array("'<f4'", f"({2**50},)"),
    "2^64 numbers": array("'<f4'", f"({2**32}, {2**32})"),
    "beyond all numbers": array("'<f4'", f"({2**70},)"),
    "nothing of much": array("'<f4'", f"(0, {2**70})"),
    "negative": array("'<f4'", "(-1,)"),
    "truths": array("'<f4'", "(True,)"),
    "objects": array("'|O'", "(3,)"),
    "nothing at all": array("'|V0'", "(3,)"),
    "a table": array("[('a', '<f4')]", "(3,)"),
    "many dimensions": array("'<f4'", "(" + "1," * 70 + ")"),
    "brackets": npy("(" * 300),
    "signs": npy("-" * 9000 + "1"),
    "a pickle": lambda path: np.save(path, np.array([{}], dtype=object), allow_pickle=True),
}


@pytest.mark.parametrize("name", NO_ARRAY)
def test_no_array(cfedavg: Command, tmp_path: Path, name: str) -> None:
    put(tmp_path / "layout.json", text(NET.text))
    file = put(tmp_path / "p.npy", NO_ARRAY[name])
    outcome = cfedavg("inspect", GOLDEN / "v1-net-listed-bf16.cfa", "--layout", tmp_path / "layout.json",
                      "--dense", file)  # fmt: skip
    assert refused(outcome, "--dense: ")


# Data


NO_PARQUET: dict[str, Make] = NO_FILE | {
    "nothing": text(b""),
    "another file": text(b"PAR1" + b"\0" * 100 + b"PAR1"),
    "a large footer": text(b"PAR1" + b"\0" * 100 + struct.pack("<I", 2**31 - 1) + b"PAR1"),
}


@pytest.mark.parametrize("name", NO_PARQUET)
def test_no_data(cfedavg: Command, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CFEDAVG_CACHE", str(tmp_path / "cache"))
    (folder := tmp_path / "data").mkdir()
    for split in ("train", "test"):
        put(folder / f"{split}-0.parquet", NO_PARQUET[name])
    outcome = cfedavg("data", "--data-dir", folder, "--out", tmp_path / "p.png")
    assert refused(outcome, "--data-dir: ")


# Sweeps


@pytest.mark.parametrize("name", NO_TOML)
def test_no_grid(cfedavg: Command, tmp_path: Path, name: str) -> None:
    file = put(tmp_path / "e.toml", NO_TOML[name])
    assert refused(cfedavg("sweep", file, "--out", tmp_path / "out"), "grid")


@pytest.mark.parametrize("name", NO_FILE)
def test_no_cell(cfedavg: Command, tmp_path: Path, name: str) -> None:
    (tmp_path / "cells").mkdir()
    file = put(tmp_path / "cells" / "none-seed0.json", NO_FILE[name])
    sweep = cfedavg("sweep", "--vary", "compressor=none", "--draw", "--out", tmp_path)
    assert refused(sweep)
    assert str(file) in (sweep.out + sweep.err).replace("\n", "")


@pytest.mark.parametrize("content", ["", DEEP, "3", "{}", '{"seal": NaN}', "\0", '{"a":' * 100_000])
def test_a_damaged_cell(tmp_path: Path, content: str) -> None:
    with pytest.raises(DamagedCell, match="is damaged"):
        read_cell(put(tmp_path / "cell.json", text(content)))


# A run's folder, changed at random


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with everything: residuals on disk, rate conditions, an iterate; and one message of it."""
    out = tmp_path_factory.mktemp("fuzz") / "run"
    config = Config(
        rounds=3, local_steps="1", compressor="topk(0.5)", residuals="disk", smoothness=1.0,
        checkpoint_every=2, sample_iterate=True, engine="sequential",
    )  # fmt: skip
    run(config, blobs(m=3), out=out, messages=out / "messages")
    return out


def mutated(data: bytes, draw: random.Random) -> bytes:
    """Bytes flipped, cut out, doubled, inserted or replaced, once or a few times."""
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 5))):
        at = draw.randrange(len(changed) + 1)
        kind = draw.randrange(7)
        if kind == 0 and at < len(changed):
            changed[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del changed[at : at + draw.choice((1, 2, 9, 99))]
        elif kind == 2:
            del changed[at:]
        elif kind == 3:
            changed[at:at] = changed[at : at + draw.choice((1, 9, 99))]
        elif kind == 4:
            changed[at:at] = bytes(draw.randrange(256) for _ in range(draw.choice((1, 4, 8))))
        else:
            _retell(changed, draw)
    return bytes(changed)


TOKENS = [
    b"1e999", b"-1", b"null", b"true", b"NaN", b'"[/]"', b"[]", b"{}", b"1e308", b"-1e-320", b"9" * 400,
    b'""', b"2.5", b"0", str(2**63).encode(), b"[[1]]", b'"\\ud800"',
]  # fmt: skip


def _retell(data: bytearray, draw: random.Random) -> None:
    """Puts another value after one of the signs that stand before values in JSON and TOML."""
    places = [i for i, each in enumerate(data) if each in b":=["]
    if places:
        start = draw.choice(places) + 1
        end = start
        while end < len(data) and data[end] not in b",}]\n":
            end += 1
        data[start:end] = b" " + draw.choice(TOKENS)


def attempt(action: Callable[[], object]) -> bool:
    """Whether it succeeds; else it says why, and anything but an InputError ends the test."""
    try:
        action()
    except InputError:
        return False
    return True


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is synced, and pictures are planned but not drawn."""
    monkeypatch.setattr("cfedavg.core.files.sync", lambda path: None)
    monkeypatch.setattr("cfedavg.report.figures.as_png", lambda figure: b"")


def fuzz(finished: Path, folder: Path, name: str, mutants: int, action: Callable[[Path], object]) -> int:
    """How many mutants of one file were taken; the others were refused."""
    draw, data, taken = random.Random(name), (finished / name).read_bytes(), 0
    for _ in range(mutants):
        shutil.copytree(finished, folder)
        (folder / name).write_bytes(mutated(data, draw))
        taken += attempt(lambda: action(folder))
        shutil.rmtree(folder)
    return taken


def resume(folder: Path) -> None:
    run(read_config(folder / "config.toml"), blobs(m=3), out=folder, resume=True)


RESUMED = [
    "config.toml", "metrics.jsonl", "checkpoint.safetensors", "residuals/000000-000003.safetensors",
]  # fmt: skip
MUTANTS = 40


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("name", RESUMED)
def test_any_damage_to_a_run_is_refused_or_harmless(finished: Path, tmp_path: Path, name: str) -> None:
    fuzz(finished, tmp_path / "run", name, MUTANTS, resume)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("name", ["config.toml", "metrics.jsonl"])
def test_any_damage_is_reported_on_or_refused(finished: Path, tmp_path: Path, name: str) -> None:
    from cfedavg.report import write_report

    fuzz(finished, tmp_path / "run", name, MUTANTS // 2, lambda run: write_report([run], run / "report"))


@pytest.mark.parametrize("name", ["00000-00000.cfa", "layout.json"])
def test_any_damage_to_a_message_is_refused_or_shown(finished: Path, tmp_path: Path, name: str) -> None:
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
        fuzz(
            finished / "messages", tmp_path / "messages", name, 2 * MUTANTS,
            lambda folder: inspect_message(folder / "00000-00000.cfa"),
        )  # fmt: skip
