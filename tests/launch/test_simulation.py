"""Flower's own simulation, started by `flwr run` as a user starts it: Ray, several actors, nothing faked.

Ray runs only in a network namespace of its own (`scripts/isolated.py`), with the interpreter of
`.venv-simulation`, which `make test-all` makes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from scripts.isolated import find_obstacle, run_isolated

from cfedavg import Config, run
from cfedavg.core.run_files import read_rows
from cfedavg.core.tensors import read_tensors
from cfedavg.flower.array_layout import Form
from cfedavg.launch.local_federation import format_app
from tests.launch.whole_numbers.whole_numbers import MODEL, is_lost, numbers

ROOT = Path(__file__).parents[2]
BIN = ROOT / ".venv-simulation" / "bin"
MISSING = "run `make .venv-simulation/.installed` first"
LIMIT = 500.0  # seconds for the commands of a test; an idle machine takes 60
START = "flwr ls || flwr ls || flwr ls"  # start Flower's server, which gives up after 15 s on a busy machine
OBSTACLE = find_obstacle()

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(OBSTACLE), reason=f"cannot make a network namespace: {OBSTACLE}"),
]


@pytest.fixture
def home() -> Iterator[Path]:
    """Make a folder for Flower and Ray, whose sockets need a short path."""
    with tempfile.TemporaryDirectory(prefix="sim", dir="/tmp") as path:
        yield Path(path)


def simulate(home: Path, folder: Path, script: str) -> str:
    """Run a shell script in `folder`, in which `flwr` simulates; return its output. It must succeed."""
    assert (BIN / "flwr").exists(), MISSING
    log = folder / "log.txt"
    more = {
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        "FLWR_HOME": str(home / "flower"),
        "RAY_TMPDIR": str(home),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "300",
    }
    script = f"cd '{folder}'; exec >log.txt 2>&1; {START}; {script}"
    status = run_isolated(["sh", "-euc", script], LIMIT, **more)
    text = log.read_text()
    assert status == 0, text[-5000:]
    return text


def flwr_run(app: str, nodes: int, **config: Any) -> str:
    """Return the command that simulates an app with so many nodes, each in an actor with 1 of 2 cores."""
    overrides = " ".join(f"{name}={json.dumps(value)}" for name, value in config.items())
    size = f"num-supernodes={nodes} client-resources-num-cpus=1 init-args-num-cpus=2"
    return f"flwr run {app} --stream --federation-config '{size}' --run-config '{overrides}'"


def simulated_here(config: Config) -> Any:
    """Return the result of the reference engine with one thread, as the actors have."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return run(config.replace(engine="reference", device="cpu"))
    finally:
        torch.set_num_threads(threads)


def test_it_is_what_our_engine_says_over_a_resume(home: Path, tmp_path: Path) -> None:
    """The app of `federate up`: equal losses and models, though the nodes change their ids in between."""
    config = Config(
        clients=3, rounds=4, model="linear", compressor="topk(0.9)", classes_per_client=5, local_steps="5"
    )
    expected = simulated_here(config)
    (tmp_path / "app").mkdir()
    more = {"out": str(tmp_path / "out"), "resume": False, "min_nodes": 3}
    (tmp_path / "app" / "pyproject.toml").write_text(format_app(config, **more))
    simulate(home, tmp_path, f"{flwr_run('app', 3, rounds=2)}; {flwr_run('app', 3, resume=True)}")
    rows = read_rows(tmp_path / "out" / "metrics.jsonl")
    assert [row["outcomes"] for row in rows] == [{"replied": 3}] * 4
    for name in ("train_loss", "coordinates_sent", "test_accuracy"):
        assert [row[name] for row in rows] == [row[name] for row in expected.rows]
    for name, wanted in (("model", expected.model), ("server_model", expected.server_model)):
        found = load_file(tmp_path / "out" / f"{name}.safetensors")
        assert all(np.array_equal(found[key], each.numpy()) for key, each in wanted.state_dict().items())


def test_error_feedback_is_exact_in_two_runs_at_once(home: Path, tmp_path: Path) -> None:
    """Replies get lost after the clients have stored their states; one of the runs is resumed."""
    shutil.copytree(ROOT / "tests/launch/whole_numbers", tmp_path / "app")
    one, other = ({"seed": seed, "out": str(tmp_path / f"run{seed}")} for seed in (1, 2))
    both = f"{flwr_run('app', 4, **one)} & first=$!; {flwr_run('app', 4, **other)}; wait $first"
    resumed = flwr_run("app", 4, **one, rounds=6, resume=True)
    simulate(home, tmp_path, f"{both}; {resumed}")
    for seed, rounds in ((1, 6), (2, 3)):
        out = tmp_path / f"run{seed}"
        rows = read_rows(out / "metrics.jsonl")
        lost = [sum(is_lost(i, t) for i in range(4)) for t in range(1, rounds + 1)]
        assert [row["outcomes"].get("app failed", 0) for row in rows] == lost
        form = Form.of(MODEL)
        added = [form.split(numbers(seed, i, t))[0] for i in range(4) for t in range(1, rounds + 1)]
        states = [read_tensors(path) for path in out.glob("nodes/*/*/state.safetensors")]
        assert {about["federation"] for _, about in states} == {(out / "federation.txt").read_text()}
        found = load_file(out / "server_model.safetensors")
        gained = form.split({name: found[name] for name in MODEL})[0]
        residuals = np.stack([tensors["e"].numpy() for tensors, _ in states])
        assert residuals.any(1).tolist() == [True] * 4
        assert np.array_equal(gained + residuals.sum(0), np.sum(added, 0))


def test_two_lines_make_a_flower_app_compress(home: Path, tmp_path: Path) -> None:
    """The steps of docs/flower.md, typed by `scripts/own_flower_app`, which makes a namespace of its own."""
    assert (BIN / "flwr").exists(), MISSING
    more = {"PYTHONPATH": str(ROOT / "src"), "RAY_TMPDIR": str(home), "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", **more}
    script = [ROOT / "scripts/own_flower_app", tmp_path / "own"]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=LIMIT + 200)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    assert "s from there to the result" in done.stdout
    (metrics,) = (tmp_path / "own").glob("app/runs/*/metrics.jsonl")
    rows = read_rows(metrics)
    assert rows[-1]["test_accuracy"] > 0.9
    d = 215_370  # numbers in the model
    assert all(row["uplink_bytes"] < row["clients"] * 4 * d / 50 for row in rows)
