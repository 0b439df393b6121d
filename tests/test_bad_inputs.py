"""Wrong inputs, many through each of Python, the command, TOML and Flower: one sentence each."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.serverapp.strategy import FedAvg

from cfedavg import (
    BF16,
    SGD,
    Adam,
    Clip,
    Config,
    Corollary1,
    InputError,
    Task,
    TensorBoard,
    TopK,
    parse,
    run,
)
from cfedavg.flower import CFedAvg, RoundPolicy
from tests.conftest import Command, blobs
from tests.grid import MODEL, Adding, Federation, LocalGrid, record

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


@pytest.fixture
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def held() -> dict[str, bytes]:
    """Return all files and folders of the current folder."""
    return {str(path): b"" if path.is_dir() else path.read_bytes() for path in Path().rglob("*")}


def check_sentence(text: str, name: str) -> None:
    """A sentence is one line without a traceback, names the field, and is short enough to be read."""
    assert name in text
    assert "\n" not in text
    assert "Traceback" not in text
    assert not re.search(r"\b\w+\(\) (takes|got|missing)", text)  # Python's words for a wrong call
    assert 20 < len(text) < 300


SMALL = Config(rounds=1, engine="sequential")


def train(**fields: Any) -> None:
    run(SMALL.replace(**fields), blobs(), out="r")


PYTHON: dict[str, tuple[str, Callable[[], Any]]] = {
    "a peer's name": ("`eta_local`", lambda: Config(learning_rate=0.1)),
    "a number as text": ("`eta_local`", lambda: Config(eta_local="0.1")),
    "a class": ("`server_optimiser`", lambda: Config(server_optimiser=Adam)),
    "a bare number behind >>": ("BF16()", lambda: Config(compressor=TopK(0.99) >> 8)),
    "stages in the wrong order": ("TopK(0.99) >> BF16()", lambda: Config(compressor=BF16() >> TopK(0.99))),
    "an optimiser before a change": ("Clip(1.0) >> SGD()", lambda: SGD() >> Clip(1.0)),
    "a class in a chain": ("SGD()", lambda: Config(local_optimiser=Clip(1.0) >> SGD)),
    "percent": ("comp must be the fraction NOT sent", lambda: TopK(99)),
    "a list that is too short": ("`local_steps` must have one value", lambda: train(local_steps=[3, 5])),
    "a schedule without its constant": ("`smoothness`", lambda: train(schedule=Corollary1())),
    "a tracker without a folder": ("`folder`", lambda: run(SMALL, blobs(), callbacks=[TensorBoard()])),
    "a name as task": ("`task` must be a Task", lambda: run(Config(), "mnist", out="r")),
    "a number as progress": ("`progress`", lambda: run(Config(), blobs(), out="r", progress=2)),
    "a table": ("`local_steps`", lambda: Config(local_steps=np.ones((2, 3), int))),
    "an optimiser of torch": (
        "SGD(momentum=0.9)",
        lambda: Config(local_optimiser=torch.optim.SGD([torch.ones(1)], 0.1)),
    ),
    "no field at all": ("`nonsense`", lambda: Config(nonsense=1)),
    "a path as TOML": ("TOML", lambda: Config.from_toml(Path("c.toml"))),
    "a number as key": ("unknown key 1", lambda: Config.from_dict({1: 2})),
    "a peer's name in a part": ("'rate'", lambda: Adam(lr=0.1)),
    "a rate in a local optimiser": ("`eta_local`", lambda: SGD(lr=0.1)),
    "no such argument": ("'ratio'; known are chunk, comp", lambda: TopK(ratio=0.01)),
    "a text before >>": ("got 'topk(0.9)' >> bf16", lambda: "topk(0.9)" >> BF16()),
    "a text behind >>": ("got topk(0.9) >> 'bf16'", lambda: TopK(0.9) >> "bf16"),
    "a class before >>": ("SGD()", lambda: Clip >> SGD()),
    "a number to parse": ("`compressor` must be text", lambda: parse(3)),
    "a number as messages": ("`messages`", lambda: run(SMALL, blobs(), messages=3)),
    "a text as resume": ("`resume`", lambda: run(SMALL, blobs(), out="r", resume="no")),
    "a number as tracker's folder": ("`folder`", lambda: TensorBoard(3)),
    "a peer's name of the loss": ("'loss'", lambda: Task(blobs().model, blobs().clients, criterion=max)),
    "a class as loss": ("Task.loss", lambda: dataclasses.replace(blobs(), loss=torch.nn.MSELoss)),
    "a text's option for images": ("`tokens`", lambda: run(SMALL.replace(tokens="bytes"), out="r")),
}

COMMAND: dict[str, tuple[str, list[str]]] = {
    "a peer's name": ("--eta-local", ["run", "--lr", "0.1"]),
    "percent": ("--participation", ["run", "--participation", "50%"]),
    "a range with a dash": ("--local-steps", ["run", "--local-steps", "5-50"]),
    "another syntax": ("--compressor", ["run", "--compressor", "topk:0.99"]),
    "a rate of another option": ("--server-optimiser", ["run", "--server-optimiser", "adam(lr=0.01)"]),
    "no such tracker": ("--track", ["run", "--track", "mlflow"]),
    "too small": ("--eta-local", ["run", "--eta-local", "1e-999"]),
    "no such device": ("--device", ["run", "--device", "cuda:99"]),
    "an unknown field": ("'rounds'", ["sweep", "--vary", "num_rounds=5|10"]),
    "a field that is none": ("'nonsense'", ["sweep", "--vary", "nonsense=5|10"]),
    "what is no field": ("--out", ["sweep", "--vary", "out=a|b"]),
    "no field": ("--vary", ["sweep", "--vary", "topk(0.9)|none"]),
    "a picture of another kind": ("--out", ["data", "--out", "who.gif"]),
    "no run": ("nowhere", ["report", "nowhere"]),
    "no such option": ("--help", ["run", "--nonsense", "3"]),
    "one dash": ("two dashes", ["run", "-rounds", "3"]),
    "an option of another command": ("`cfedavg data`", ["data", "--rounds", "5"]),
    "an option of a simulation": ("`cfedavg federate up`", ["federate", "up", "--engine", "batched"]),
    "clients of a federation": ("--nodes", ["federate", "up", "--clients", "5"]),
    "a column of a federation": ("`cfedavg federate up`", ["federate", "up", "--client-column", "role"]),
    "an option of before": ("--out", ["data", "--picture", "x.png"]),
    "a value of its own": ("argument: true", ["run", "--iid", "true"]),
    "no such command": ("sweep, tune, report", ["train"]),
    "a rate of another part": ("--eta-local", ["run", "--local-optimiser", "sgd(lr=0.1)"]),
    "a text's option": ("--sequence-length", ["data", "--sequence-length", "30"]),
}

TOML: dict[str, tuple[str, str]] = {
    "a peer's name": ("'local_epochs'", "epochs = 5"),
    "an option's name": ("'eta_local'", "eta-local = 0.1"),
    "no key": ("'nonsense'", "nonsense = 5"),
    "a heading": ("[data]", "[data]\nclients = 5"),
    "what is no key": ("--out", 'out = "r"'),
    "an old option": ("--link", 'uplink = "fast"'),
    "a feedback as truth": ("ErrorFeedback()", "feedback = false"),
    "a table": ("--compressor", "[compressor]\ncomp = 0.99"),
    "a list of texts": ("--compressor-down", 'compressor_down = ["topk(0.9)", "bf16"]'),
    "a number as text": ("--dirichlet", 'dirichlet = "0.3"'),
    "a fraction of a round": ("--rounds", "rounds = 1e3"),
    "a list of one": ("--local-steps", "local_steps = [10]"),
    "a list of other things": ("--steps-per-second", 'steps_per_second = [1e6, "2e6"]'),
    "a device's number": ("--device", "device = 0"),
    "another word": ("--precision", 'precision = "fp16"'),
    "code of a stranger": ("--feedback", 'feedback = "their.module:Feedback"'),
    "a date": ("--seed", "seed = 2026-01-01"),
    "a truth": ("--feedback", "feedback = true"),
}


def start(tmp: str = "f", **model: Any) -> Any:
    return Federation(Path(tmp), Adding().app, 2, model).start(1)


def start_with(**how: Any) -> Any:
    how = {"initial_arrays": record(MODEL)} | how
    return CFedAvg(out="f").start(LocalGrid([]), **how)


FLOWER: dict[str, tuple[str, Callable[[], Any]]] = {
    "a class of Flower's": ("`inner`", lambda: CFedAvg(FedAvg)),
    "a part of another kind": ("`feedback`", lambda: CFedAvg(feedback=TopK(0.9))),
    "a client's optimiser": ("`server_optimiser`", lambda: CFedAvg(server_optimiser=SGD())),
    "a rate of 0": ("rate must be", lambda: CFedAvg(server_optimiser="adam(rate=0)")),
    "two selectors": ("`compressor_down`", lambda: CFedAvg(compressor_down="topk(0.9) >> rd(0.5)")),
    "a seed as text": ("`seed`", lambda: CFedAvg(seed="1")),
    "a number as path": ("`out`", lambda: CFedAvg(out=3)),
    "half a node": ("`min_nodes`", lambda: RoundPolicy(min_nodes=1.5)),
    "percent": ("`quorum`", lambda: RoundPolicy(quorum=50)),
    "a policy's number": ("`policy`", lambda: CFedAvg(policy={"quorum": 0.5})),
    "one pattern": ("`uncompressed`", lambda: CFedAvg(uncompressed="bn.*")),
    "a share of Flower's": ("RoundPolicy(participation=...)", lambda: CFedAvg(fraction_train=0.5)),
    "nodes of Flower's": ("RoundPolicy(min_nodes=...)", lambda: CFedAvg(min_available_nodes=5)),
    "a policy's peer": ("'participation'", lambda: RoundPolicy(fraction_train=0.5)),
    "no such option": ("'compressor'", lambda: CFedAvg(compresor="topk(0.9)")),
    "a dict as config": ("`config`", lambda: CFedAvg(config={"rounds": 3})),
    "a truth as norm": ("`max_norm`", lambda: CFedAvg(max_norm=True)),
    "no patterns": ("`uncompressed`", lambda: CFedAvg(uncompressed=None)),
    "a pattern of numbers": ("`uncompressed`", lambda: CFedAvg(uncompressed=[3])),
    "a dict as model": ("`initial_arrays`", lambda: start_with(initial_arrays={"w": np.ones(3)})),
    "a module as model": ("`initial_arrays`", lambda: start_with(initial_arrays=torch.nn.Linear(2, 2))),
    "whole numbers as model": ("`initial_arrays`", lambda: start(w=np.arange(3))),
    "a truth as rounds": ("`num_rounds`", lambda: start_with(num_rounds=True)),
    "no function": ("`evaluate_fn`", lambda: start_with(evaluate_fn=3)),
    "a model of NaN": ("`initial_arrays`", lambda: start(w=np.array([np.nan], np.float32))),
}


RETURNS: dict[str, tuple[str, dict[str, Any]]] = {
    "a rate below 0": ("`eta` must return", {"eta": lambda t: -1.0}),
    "a rate as text": ("`eta` must return", {"eta": lambda t: "1"}),
    "a metric without a name": ("`evaluate_fn` must return", {"evaluate_fn": lambda t, arrays: 0.5}),
}


def ids(table: dict[str, Any]) -> Any:
    assert len(table) >= 3
    return pytest.mark.parametrize("case", table.values(), ids=table)


@ids(
    {f"python: {name}": case for name, case in PYTHON.items()}
    | {f"flower: {n}": c for n, c in FLOWER.items()}
)
def test_bad_input_in_python_is_one_sentence(case: tuple[str, Callable[[], Any]]) -> None:
    name, act = case
    with pytest.raises(InputError) as raised:
        act()
    check_sentence(str(raised.value), name)
    assert not held()


@ids(RETURNS)
def test_a_function_that_returns_nonsense(case: tuple[str, dict[str, Any]]) -> None:
    name, options = case
    with pytest.raises(InputError) as raised:
        Federation(Path("f"), Adding().app, 2).start(1, **options)
    check_sentence(str(raised.value), name)


@ids(COMMAND)
def test_bad_input_on_the_command_line_is_one_sentence(case: tuple[str, list[str]], cfedavg: Command) -> None:
    name, arguments = case
    outcome = cfedavg(*arguments)
    assert outcome.code == 2
    assert outcome.err.startswith("error: ")
    check_sentence(outcome.err, name)
    assert outcome.out == ""
    assert not held()


@ids(TOML)
def test_bad_input_in_a_file_is_one_sentence(case: tuple[str, str], cfedavg: Command) -> None:
    name, text = case
    Path("c.toml").write_text(text)
    before = held()
    outcome = cfedavg("run", "--config", "c.toml", "--out", "r")
    assert outcome.code == 2
    assert outcome.err.startswith("error: c.toml")
    check_sentence(outcome.err, name)
    assert held() == before
