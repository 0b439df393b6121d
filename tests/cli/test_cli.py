"""The command: what it prints, what it writes, and one sentence with exit code 2 for bad input."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cfedavg import Config, InputError, Layout, __version__, decode
from cfedavg.cli.console import flag
from cfedavg.compress import SELECTORS
from cfedavg.core.config import read_config
from cfedavg.feedback import FEEDBACKS
from cfedavg.optimise.local import LOCAL_OPTIMISERS
from cfedavg.optimise.server import SERVER_OPTIMISERS
from cfedavg.report import read_run
from tests.conftest import Command
from tests.golden_cases import FOLDER as GOLDEN
from tests.golden_cases import NET

SMALL = [
    "--model", "linear", "--clients", "4", "--rounds", "2", "--local-steps", "2", "--engine", "sequential",
]  # fmt: skip


def test_run_writes_everything(cfedavg: Command, tmp_path: Path) -> None:
    out = tmp_path / "run"
    outcome = cfedavg("run", *SMALL, "--out", out)
    assert outcome.code == 0
    assert "round 2/2 accuracy" in outcome.out
    for name in ("config.toml", "metrics.jsonl", "checkpoint.safetensors", "curves.png", "report.html"):
        assert (out / name).stat().st_size > 0
    assert cfedavg("run", "--config", out / "config.toml", "--out", tmp_path / "again").code == 0
    assert (tmp_path / "again" / "config.toml").read_text() == (out / "config.toml").read_text()
    assert cfedavg("run", "--out", out, "--resume", "--rounds", "3").code == 0
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 3


def test_a_run_of_version_0_5_resumes(cfedavg: Command, tmp_path: Path) -> None:
    assert cfedavg("run", *SMALL, "--out", tmp_path).code == 0
    file, gone = tmp_path / "config.toml", ("feedback", "local_optimiser", "server_optimiser")
    kept = [line for line in file.read_text().splitlines() if not line.startswith(gone)]
    file.write_text("\n".join([*kept, "error_feedback = true"]))
    assert cfedavg("run", "--out", tmp_path, "--resume", "--rounds", "3").code == 0
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def test_options_win_over_the_file(cfedavg: Command, tmp_path: Path) -> None:
    file = tmp_path / "base.toml"
    file.write_text('clients = 4\nmodel = "linear"\nrounds = 1\nclasses_per_client = 5\nlocal_epochs = 1\n')
    out = tmp_path / "run"
    assert cfedavg("run", "--config", file, "--iid", "--local-steps", "3", "--out", out).code == 0
    config = read_config(out / "config.toml")
    assert (config.iid, config.classes_per_client) == (True, None)
    assert (config.local_steps, config.local_epochs, config.clients) == ("3", None, 4)


def test_every_field_is_an_option_and_a_toml_key(cfedavg: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    text = cfedavg("run", "--help").out
    for field in dataclasses.fields(Config):
        assert flag(field.name) in text
        assert field.name in Config().to_toml()


def test_sweep_and_report(cfedavg: Command, tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    grid = ["--vary", "compressor,compressor-down=none|topk(0.9)", "--vary", "seed=0|1"]
    outcome = cfedavg("sweep", *SMALL, *grid, "--out", out)
    assert outcome.code == 0
    assert "±" in outcome.out
    assert outcome.out.count("in total, of which") == 2  # whole models come down once a client
    assert sorted(p.name for p in out.iterdir() if p.is_dir()) == [
        "cells", "none-seed0", "none-seed1", "topk0.9-seed0", "topk0.9-seed1",
    ]  # fmt: skip
    assert (out / "report.html").exists()
    assert cfedavg("sweep", *SMALL, *grid, "--out", out, "--resume").code == 0
    two = out / "none-seed0", out / "topk0.9-seed0"
    assert cfedavg("report", *two, "--out", tmp_path / "report").code == 0
    assert (tmp_path / "report" / "report.png").exists()


def test_data_parts_version(cfedavg: Command, tmp_path: Path) -> None:
    picture = tmp_path / "who.png"
    outcome = cfedavg("data", "--clients", "10", "--classes-per-client", "3", "--out", picture)
    assert "10 clients with 999 to 999 train" in outcome.out
    assert picture.exists()
    assert cfedavg("data", "--out", tmp_path / "new" / "folder").code == 0
    assert (tmp_path / "new" / "folder" / "partition.png").exists()
    found = cfedavg("parts").out
    registered = [FEEDBACKS.entries, LOCAL_OPTIMISERS.entries, SERVER_OPTIMISERS.entries, SELECTORS]
    for name in (name for entries in registered for name in entries):
        assert re.search(rf" {name}[ (]", found), name
    for text in ("topk(0.99) >> bf16", "ef(decay=0.95)", "prox(0.01) >> sgd"):
        assert text in found
    assert "ef21" in (few := cfedavg("parts", "feedback").out)
    assert "topk" not in few
    assert "KIND must be one of compressor, feedback," in cfedavg("parts", "shape").err
    assert cfedavg("--version").out == __version__
    assert cfedavg("version").err == "error: no such command: version; write cfedavg --version"


def test_inspect(cfedavg: Command, tmp_path: Path) -> None:
    kept = tmp_path / "messages"
    arguments = ("--messages", kept, "--compressor", "topk(0.5)", "--out", tmp_path / "run")
    assert cfedavg("run", *SMALL, *arguments).code == 0
    message = min(kept.glob("*.cfa"))
    shown = cfedavg("inspect", message).out
    for words in ("client 0, message 0, round 0", "32-bit floats, coded", "entropy", "50.0"):
        assert words in shown
    layout = Layout.from_text((kept / "layout.json").read_text())
    payload = decode(message.read_bytes(), layout=layout)
    dense = np.zeros(layout.d, np.float32)
    dense[payload.indices] = payload.values.data
    dense[np.setdiff1d(np.arange(layout.d), payload.indices)[0]] = 1.0
    np.save(tmp_path / "p.npy", dense)
    expected = float((dense.astype(np.float64) ** 2).sum())
    assert f"= {expected:.6g}" in cfedavg("inspect", message, "--dense", tmp_path / "p.npy").out
    alone = tmp_path / "alone.cfa"
    alone.write_bytes(message.read_bytes())
    assert "needs --layout" in cfedavg("inspect", alone).out


def test_inspect_refuses(cfedavg: Command, tmp_path: Path) -> None:
    good = (GOLDEN / "v1-net-listed-bf16.cfa").read_bytes()
    message, layout, dense = tmp_path / "m.cfa", tmp_path / "layout.json", tmp_path / "p.npy"
    message.write_bytes(good)
    np.save(dense, np.zeros(3))
    other = Layout.flat(7).text
    for arguments, words in (
        ([tmp_path / "none.cfa"], "cannot read"),
        ([message, "--layout", layout], "cannot read"),
        ([message, "--dense", dense], "--dense needs --layout"),
    ):
        refused = cfedavg("inspect", *arguments)
        assert refused.code == 2
        assert words in refused.err
    for text, words in (("[1, 2]", "is not the layout of a model"), (other, "for another model")):
        layout.write_text(text)
        refused = cfedavg("inspect", message)
        assert (refused.code, words in refused.err) == (2, True)
    layout.write_text(NET.text)
    assert "numbers, as many as the model, got 3" in cfedavg("inspect", message, "--dense", dense).err
    for content in (b"", b"PK\3\4", b"no array"):
        dense.write_bytes(content)
        refused = cfedavg("inspect", message, "--dense", dense)
        assert (refused.code, "--dense: cannot read" in refused.err) == (2, True)
    np.save(dense, np.zeros(NET.d, complex))
    assert "one array of real numbers" in cfedavg("inspect", message, "--dense", dense).err
    for text in ("[" * 100_000, '[[1], [[2]], ["float32"]]'):
        layout.write_text(text)
        assert "is not the layout of a model" in cfedavg("inspect", message).err
    layout.write_text(NET.text)
    message.write_bytes(good[:-1])
    assert "cut short" in cfedavg("inspect", message).err
    message.write_bytes(good[:100] + b"?" + good[101:])
    assert "checksum does not fit" in cfedavg("inspect", message).err


BAD = {
    "comp above 1": (["--compressor", "topk(1.5)"], "--compressor: topk(1.5): comp must be the fraction"),
    "comp below 0": (["--compressor", "rd(-0.1)"], "from 0 to below 1, got -0.1"),
    "malformed compressor": (["--compressor", "topk(0.9"], "must be of the form name or name(arguments)"),
    "unknown compressor": (["--compressor", "zip"], "unknown name 'zip'; there are bf16"),
    "p > classes": (["--classes-per-client", "11"], "--classes-per-client must be from 1 to 10, the number"),
    "clients > samples": (["--clients", "20000"], "--clients must be from 1 to 10000, the number of train"),
    "clients > samples, iid": (["--clients", "20000", "--iid"], "--clients must be from 1 to 10000"),
    "K < 1": (["--local-steps", "0"], "--local-steps must be 1 or more, got 0"),
    "K range": (["--local-steps", "9..2"], "--local-steps must be a range low..high, got '9..2'; write 2..9"),
    "K text": (["--local-steps", "many"], "a number, a range a..b or a list a,b,c, got 'many'"),
    "negative rate": (["--eta-local", "-0.1"], "--eta-local must be above 0, got -0.1"),
    "negative eta": (["--eta", "-1"], "--eta must be above 0, got -1"),
    "missing file": (["--config", "nowhere.toml"], "error: cannot read nowhere.toml (No such file"),
    "unknown data set": (["--dataset", "mnits"], "--dataset"),
    "missing folder": (["--data-dir", "nowhere"], "--data-dir"),
    "exclusive": (["--iid", "--dirichlet", "0.1"], "--dirichlet and --iid exclude each other"),
    "participation": (["--participation", "0"], "--participation must be above 0 and at most 1, got 0"),
    "participation nan": (["--participation", "nan"], "--participation must be a finite number below"),
    "minus infinity": (["--eta-local", "-inf"], "--eta-local must be a finite number below 1.8e308, got -"),
    "update": (["--update", "median"], "--update must be auto, sum, mean or fednova, got 'median'"),
    "device": (["--device", "tpu9"], "--device tpu9 cannot be used here"),
    "engine": (["--engine", "warp"], "--engine must be auto, batched, sequential or reference, got 'warp'"),
    "model": (["--model", "gpt"], "--model must be cnn"),
    "per-client list": (["--local-steps", "1,2,3"], "must have one value for each of 4 clients, got 3"),
    "schedule": (["--schedule", "corollary1"], "corollary1 needs --smoothness"),
    "not a number": (["--rounds", "ten"], "--rounds"),
    "unknown option": (["--round", "3"], "--round"),
    "module": (["--model", ":x"], "--model must be of the form package.module:name, got ':x'"),
    "factory": (["--model", "os:getcwd"], "--model: os:getcwd must be a function of (shape, classes)"),
    "device without numbers": (["--device", "meta"], "--device meta cannot be used here"),
    "name too long": (["--data-dir", "a" * 300], "--data-dir"),
    "block": (["--compressor", "qsgd(16, 1000000000000)"], "block must be a whole number from 1 to 2^31 - 1"),
    "k_min": (["--schedule", "corollary3(k_min=1e400)", "--smoothness", "1"], "of 1 or more, got inf"),
    "control character": (["--data-dir", "a\x7fb"], "--data-dir must be printable text, got"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str, cfedavg: Command, tmp_path: Path) -> None:
    arguments, words = BAD[name]
    out = tmp_path / "run"
    outcome = cfedavg("run", *SMALL, *arguments, "--out", out)
    assert outcome.code == 2
    assert words in outcome.err
    assert "Traceback" not in outcome.err
    assert not out.exists()


def test_deadline_without_speed(cfedavg: Command) -> None:
    outcome = cfedavg("run", "--deadline", "3")
    assert outcome.code == 2
    assert "--deadline needs --steps-per-second" in outcome.err


def test_out_with_odd_names(cfedavg: Command, tmp_path: Path) -> None:
    assert "--out: cannot write" in cfedavg("run", *SMALL, "--out", tmp_path / ("a" * 300)).err
    assert "[/x]: curves.png" in cfedavg("run", *SMALL, "--out", tmp_path / "[" / "x]").out


def test_resume_needs_out(cfedavg: Command) -> None:
    assert "--resume needs --out" in cfedavg("run", *SMALL, "--resume").err


def test_no_iid_leaves_the_file_alone(cfedavg: Command, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("dirichlet = 0.3")
    outcome = cfedavg("run", *SMALL, "--config", tmp_path / "c.toml", "--no-iid", "--out", tmp_path / "r")
    assert outcome.code == 0
    assert read_config(tmp_path / "r" / "config.toml").dirichlet == 0.3


def test_no_network_is_one_sentence(
    cfedavg: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CFEDAVG_CACHE", str(tmp_path / "cache"))
    outcome = cfedavg("run", "--dataset", "mnist", "--out", tmp_path / "run")
    assert outcome.code == 2
    assert "--dataset" in outcome.err
    assert "--data-dir" in outcome.err
    assert not (tmp_path / "run").exists()


def test_divergence_stops_with_advice(cfedavg: Command, tmp_path: Path) -> None:
    outcome = cfedavg("run", *SMALL, "--model", "mlp", "--eta-local", "1e30", "--out", tmp_path / "run")
    assert outcome.code == 2
    assert "round 1:" in outcome.err
    assert "clients 0, 1, 2, 3; lower --eta-local" in outcome.err


def test_resume_with_another_model(cfedavg: Command, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert cfedavg("run", *SMALL, "--out", out).code == 0
    other = cfedavg("run", "--model", "mlp", "--out", out, "--resume")
    assert other.code == 2
    assert "cannot resume: --model is 'mlp', but the run" in other.err
    again = cfedavg("run", *SMALL, "--out", out)
    assert again.code == 2
    assert "holds a run already" in again.err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("clients = [1]", "--clients must be a whole number, got [1]"),
        ("clients = true", "--clients must be a whole number, got True"),
        ("rouns = 3", "has an unknown key 'rouns'"),
        ("rounds = ", "is not valid TOML"),
        ("clients = 1" + "0" * 5000, "is not valid TOML"),
        ("eta_local = 1" + "0" * 400, "--eta-local must be a finite number below 1.8e308, got inf"),
        ("eta_local = -1" + "0" * 400, "--eta-local must be a finite number below 1.8e308, got -inf"),
        ("participation = nan", "--participation must be a finite number below 1.8e308, got nan"),
        ('rounds = "3"', "--rounds must be a whole number, got '3'"),
    ],
)
def test_bad_file(text: str, words: str, cfedavg: Command, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(text)
    outcome = cfedavg("run", "--config", tmp_path / "c.toml", "--out", tmp_path / "r")
    assert outcome.code == 2
    assert words in outcome.err


# Files and folders of a stranger

OWN_PARTS = """
from pathlib import Path
from torch import nn
from cfedavg.compress import TopK
from cfedavg.models import linear
Path("imported").touch()
class Own(TopK): name = ""
def model(shape, classes): return linear(shape, classes)
"""


@pytest.fixture
def stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module in the current folder, which shows whether it was imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    name = f"parts_of_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(OWN_PARTS)
    monkeypatch.delitem(sys.modules, name, raising=False)
    return Path(name)


def held(folder: Path) -> set[str]:
    return {str(path) for path in folder.rglob("*")}


@pytest.mark.parametrize("field", ["compressor", "model", "schedule"])
def test_a_file_that_names_code_needs_trust(field: str, cfedavg: Command, stranger: Path) -> None:
    for folder in (Path("file"), Path("run"), Path("up/federation")):
        folder.mkdir(parents=True)
    for file in (Path("file/c.toml"), Path("run/config.toml"), Path("up/config.toml")):
        file.write_text(f'{field} = "{stranger}:Own(0.9)"\nclients = 2\nrounds = 1\n')
    line = f'[[line]]\nname = "a"\nlabel = "a"\n{field} = "{stranger}:Own(0.9)"\n'
    Path("mine.toml").write_text(line)
    Path("run/metrics.jsonl").write_text("")
    before = held(Path())
    for command in (
        ["run", "--config", "file/c.toml"],
        ["run", "--resume", "--out", "run"],
        ["run", "--resume", "--out", "new", "--config", "run/config.toml"],
        ["sweep", "--config", "file/c.toml", "--vary", "seed=0|1"],
        ["federate", "up", "--resume", "--out", "up"],
        ["sweep", "mine.toml"],
    ):
        outcome = cfedavg(*command)
        assert outcome.code == 2
        assert f"--{field} '{stranger}:Own(0.9)' would import Python code" in outcome.err
        assert "--trust" in outcome.err
        assert held(Path()) == before
    assert getattr(read_run(Path("run")).config, field) == f"{stranger}:Own(0.9)"  # as `report` reads it


@pytest.mark.parametrize("name", ["(evil", "(a task from Python", "(a Flower app", "an evil", "evil-"])
@pytest.mark.parametrize("trust", [[], ["--trust"]])
def test_a_module_of_an_odd_name_never_runs(
    name: str, trust: list[str], cfedavg: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Brackets mark a task from Python in reports; a file may have such a name too."""
    monkeypatch.chdir(tmp_path)
    Path(f"{name}.py").write_text("raise SystemExit('a planted module ran')")
    Path("c.toml").write_text(f'model = "{name}:make"\nclients = 2\nrounds = 1\n')
    outcome = cfedavg("run", "--config", "c.toml", *trust)
    assert outcome.code == 2
    assert f"'{name}:make'" in outcome.err
    assert not Path("imported").exists()


def test_what_is_typed_or_trusted_is_imported(cfedavg: Command, stranger: Path) -> None:
    """A class of the current folder works too; a file whose part an option replaces needs no trust."""
    small = ["--clients", "2", "--rounds", "1", "--local-steps", "1"]
    own = ["--compressor", f"{stranger}:Own(0.9)", "--model", f"{stranger}:model"]
    assert cfedavg("run", *small, *own, "--out", "typed").code == 0
    assert Path("imported").exists()
    again = ["run", "--out", "typed", "--resume", "--rounds", "2"]
    assert "typed/config.toml: --model" in cfedavg(*again).err
    assert cfedavg(*again, "--trust").code == 0
    assert cfedavg(*again, *own).code == 0
    file = ["--config", "typed/config.toml"]
    others = ["--compressor", "none", "--model", "linear"]
    assert cfedavg("run", *file, *others, "--rounds", "1", "--out", "replaced").code == 0


PLANTED = (
    "matplotlib", "torch", "numba", "numpy", "rich", "typer", "PIL", "pyarrow", "yaml", "safetensors", "flwr",
    "multiprocessing", "pickle", "json", "typing_extensions", "pandas", "triton", "tensorboard", "orjson",
)  # fmt: skip


def test_nothing_that_lies_in_the_current_folder_runs(tmp_path: Path) -> None:
    """The real command imports no modules from there, and no machine code from numba's cache."""
    for name in PLANTED:
        mark = tmp_path / f"{name} ran"
        (tmp_path / f"{name}.py").write_text(f"import os\nos.mkdir({str(mark)!r})\n")
    (tmp_path / ".numba_config.yaml").write_text("cache_dir: planted cache\n")
    command = Path(sys.executable).with_name("cfedavg")
    convolutions = ["run", *SMALL, "--model", "lenet", "--out", "convolutions"]
    for arguments in (["run", *SMALL, "--workers", "2", "--out", "."], convolutions, ["report", "."]):
        done = subprocess.run([command, *arguments], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert not [path.name for path in tmp_path.glob("* ran")]
        assert not (tmp_path / "planted cache").exists()


def test_a_wrong_environment_variable_is_one_sentence() -> None:
    command = Path(sys.executable).with_name("cfedavg")
    environment = os.environ | {"CFEDAVG_KERNELS": "rust"}
    done = subprocess.run([command, "run"], env=environment, capture_output=True, text=True)
    sentence = "the environment variable CFEDAVG_KERNELS must be numba, c or python, got 'rust'"
    assert (done.returncode, done.stderr) == (2, f"error: {sentence}\n")


def test_config_round_trip() -> None:
    for config in (
        Config(),
        Config(iid=True, local_epochs=3, eta=0.5, link="30% 3g; up=1Mbit..9Mbit"),
        Config(dirichlet=1),
    ):
        assert Config.from_toml(config.to_toml()) == config
    own = Config(compressor="some.module:Thing(1)")
    with pytest.raises(InputError, match=r"`compressor` 'some.module:Thing\(1\)' would .* pass trust=True"):
        Config.from_toml(own.to_toml())
    assert Config.from_toml(own.to_toml(), trust=True) == own


def test_a_rank_of_torchrun_leaves_without_the_interpreters_own_end(
    cfedavg: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A normal exit sometimes aborts, and torchrun then takes a finished rank for a failed one."""
    codes: list[int] = []
    monkeypatch.setattr("cfedavg.cli.leave", codes.append)
    assert cfedavg("--version").code == 0
    assert codes == []
    monkeypatch.setattr("cfedavg.simulate.engines.ranks.Ranks.under_torchrun", True)
    assert cfedavg("--version").code == 0
    assert cfedavg("run", "--rounds", "0").code == 2
    assert codes == [0, 2]


ENDING = """
import atexit, threading, time
from cfedavg.cli import command
atexit.register(print, "handled")
threading.Thread(target=lambda: (time.sleep(1), print("waited"))).start()
command()
"""


@pytest.mark.parametrize(("arguments", "code"), [(["--version"], 0), (["run", "--rounds", "0"], 2)])
def test_the_command_waits_for_threads_and_handlers(arguments: list[str], code: int) -> None:
    """It ends without Python's own end, which takes a second after torch."""
    done = subprocess.run(
        [sys.executable, "-c", ENDING, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == code
    assert done.stdout.endswith("handled\n")
    assert "waited\n" in done.stdout
    assert ("--rounds" in done.stderr) == (code == 2)


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-"])
def test_a_closed_stream_does_not_change_the_exit_code(closed: str) -> None:
    program = shlex.join([sys.executable, "-c", "from cfedavg.cli import command; command()", "--version"])
    done = subprocess.run(["sh", "-c", f"{program} {closed}"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_command_writes_files_that_are_left_open(tmp_path: Path) -> None:
    """Classes of a user may write a log and never close it."""
    program = (
        "import sys, cfedavg.cli; log = open(sys.argv.pop(), 'w'); log.write('text'); "
        "raw = open(log.name + '2', 'wb'); raw.write(b'bytes'); cfedavg.cli.command()"
    )
    subprocess.run([sys.executable, "-c", program, "--version", str(tmp_path / "log")], check=True)
    assert (tmp_path / "log").read_text() == "text"
    assert (tmp_path / "log2").read_bytes() == b"bytes"


def test_a_profiler_goes_on_after_the_command(tmp_path: Path) -> None:
    script, found = tmp_path / "cfedavg", tmp_path / "found"
    script.write_text("from cfedavg.cli import command; command()")
    program = [sys.executable, "-m", "cProfile", "-o", str(found), str(script), "--version"]
    subprocess.run(program, check=True, capture_output=True)
    assert found.exists()
