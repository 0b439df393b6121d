"""The package imports and runs on Linux, macOS and Windows, or says in one sentence that it cannot."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_house import SOURCE, imports, module_name

ROOT = Path(__file__).parents[2]
# These run on Linux or macOS only. `LocalFederation` and `start_compiler` do not start them elsewhere.
NOT_ON_WINDOWS = {"launch/processes.py", "launch/services.py", "simulate/vectorised/compiler.py"}
# mypy looks at these modules of the standard library for each system.
DIFFERENT = {"os", "signal", "socket", "select", "subprocess", "multiprocessing", "time", "shutil", "mmap",
             "ctypes", "tempfile", "asyncio", "threading", "platform", "locale"}  # fmt: skip


@pytest.mark.parametrize("system", ["win32", pytest.param("darwin", marks=pytest.mark.slow)])
def test_every_name_of_the_standard_library_exists(system: str, tmp_path: Path) -> None:
    """mypy knows which names a system lacks, and skips code that asks for another `sys.platform`."""
    paths = {path.relative_to(SOURCE).as_posix(): path for path in SOURCE.rglob("*.py")}
    paths = {name: path for name, path in paths.items() if imports(path) & DIFFERENT}
    command = [
        *(sys.executable, "-m", "mypy", "--config-file=", f"--platform={system}", "--follow-imports=skip"),
        *("--explicit-package-bases", "--ignore-missing-imports", f"--cache-dir={tmp_path}"),
    ]
    done = subprocess.run([*command, *paths.values()], capture_output=True, text=True, cwd=SOURCE.parent)
    pattern = r'^cfedavg/(\S+?):\d+: error: (Module has no attribute "\w+")'
    found = re.findall(pattern, done.stdout, re.MULTILINE)
    skipped = NOT_ON_WINDOWS if system == "win32" else set()
    assert [error for error in found if error[0] not in skipped] == [], done.stdout
    assert {name for name, _ in found} >= skipped, done.stdout + done.stderr


AS_ON_WINDOWS = """
import sys
import warnings
from pathlib import Path
from tests.windows import install
install()
warnings.filterwarnings("ignore", category=EncodingWarning)
warnings.filterwarnings("error", category=EncodingWarning, module="cfedavg")
"""


def run_as_on_windows(code: str, folder: Path) -> str:
    """Run code in a process where Windows is all that cfedavg sees; return what it prints."""
    command = [sys.executable, "-X", "warn_default_encoding", "-c", AS_ON_WINDOWS + code, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_a_simulation_runs_and_resumes_as_on_windows(tmp_path: Path) -> None:
    """Every module imports; residuals are on disk, others see the lock, the checkpoint can be replaced."""
    modules = sorted(module_name(path, SOURCE) for path in SOURCE.rglob("*.py") if "kernels" not in path.name)
    imports = f"""
from importlib import import_module
for name in {modules!r}:  # without those of Triton, which Windows lacks
    try:
        import_module(name)
    except ModuleNotFoundError as error:
        assert error.name in ("flwr", "cryptography"), name
"""
    code = """
import torch
from cfedavg import Config, InputError, Task, run
from cfedavg.core.files import lock_folder
from cfedavg.core.system import STOPS, count_cores, free_host_memory
from cfedavg.core.tensors import read_tensors

def clients():
    return [(x, x.sum(1, keepdim=True)) for x in torch.ones(3, 8, 4)]

def mse(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()

def config(rounds):
    return Config(rounds=rounds, eta_local=0.01, compressor="topk(0.5)", compressor_down="topk(0.5)",
                  residuals="disk", checkpoint_every=1, seed=3)

out = Path(sys.argv[1]) / "a run"
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
task = Task(model, clients(), loss=mse)
first = run(config(2), task, out=out)
with lock_folder(out, "busy"):
    try:
        run(config(3), task, out=out, resume=True)
    except InputError as error:
        print(error)
found = run(config(3), task, out=out, resume=True)
alone = run(config(3), task)
print(found.final["train_loss"] == alone.final["train_loss"])
held, _ = read_tensors(out / "checkpoint.safetensors")
print("checkpoint" in Path("/proc/self/maps").read_text(), len(held) > 0)
print(count_cores() > 0, free_host_memory() == 1 << 33, len(STOPS))
try:
    run(Config(workers=2), task)
except InputError as error:
    print(error)
"""
    assert run_as_on_windows(imports + code, tmp_path).splitlines() == [
        f"`out`: another run is writing to {tmp_path}/a run right now",
        "True",
        "False True",
        "True True 3",
        "`workers` must be left out on Windows, where a run has one process, got 2",
    ]


def test_the_command_runs_as_on_windows(tmp_path: Path) -> None:
    """A federation is refused in one sentence, before anything is written."""
    code = """
sys.argv = ["cfedavg", "federate", "up", "--out", sys.argv[1] + "/federation"]
from cfedavg.cli import main
try:
    main()
except SystemExit as error:
    print(error.code)
"""
    code, *sentence = run_as_on_windows(code, tmp_path).split()
    assert code == "2"
    assert " ".join(sentence).endswith(
        "Linux or macOS, for which Flower is made; on Windows, start it in WSL"
    )
    assert not [*tmp_path.iterdir()]
