"""The seconds of each part of one `cfedavg` command, from the start of Python to its exit.

    python bench/phases.py run --iid --dataset mnist --data-dir DIR --clients 100 --model cnn \
        --local-epochs 10 --batch-size 64 --rounds 10 --precision bf16 --device cuda --out runs/phases

Takes any words of the command and prints a table in the order of time: wall seconds and processor seconds of
all threads of this process. A part inside another counts for itself alone, so the parts add up. Imports are
listed by library, where the command imports it. Helper processes are not seen, but waiting for them is.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

# Functions that are timed, by the module in whose namespace they are called.
TIMED = {
    "cfedavg.cli.training": {"start_compiler": "start of helpers", "start_decoder": "start of helpers"},
    "cfedavg.data.tasks": {"build_task": "data and task"},
    "cfedavg.data.loading": {"wait_for_decoder": "wait for the decoder"},
    "cfedavg.data.sources": {"wait_for_decoder": "wait for the decoder"},
    "cfedavg.simulate.run": {
        "import_compiler": "import of torch's compiler", "choose_engine": "engine, device",
        "import_drawing": "import of matplotlib", "write_run_pictures": "report and pictures",
    },
    "cfedavg.simulate.engines": {"_begin_compiling": "list steps", "find_fault_in_batching": "trial"},
    "cfedavg.simulate.vectorised.artifacts": {"load_step": "load compiled steps"},
    "cfedavg.simulate.vectorised.recorder": {"record_graph": "record CUDA graphs"},
}  # fmt: skip
METHODS = {
    "cfedavg.simulate.engines.blocks": {"BlockEngine.round": "rounds", "BlockEngine.evaluate": "evaluate"},
    "cfedavg.simulate.folder": {"Folder.checkpoint": "checkpoints", "Folder.save_models": "save models"},
    "cfedavg.simulate.vectorised.artifacts": {"Compilation.finish": "wait for compiled steps"},
    "cfedavg.simulate.vectorised.recorder": {"Recorder.wait_for_kernels": "wait for kernels"},
}  # fmt: skip


class Clock:
    """Wall and processor seconds of each part of the main thread, without those of the parts inside it."""

    def __init__(self) -> None:
        self.parts: dict[str, list[float]] = {}
        self._inside = ["the rest"]
        self._last = time.perf_counter(), time.process_time()

    def switch(self) -> None:
        """Add the time since the last switch to the part that is under way."""
        now = time.perf_counter(), time.process_time()
        spent = self.parts.setdefault(self._inside[-1], [0.0, 0.0])
        for i in range(2):
            spent[i] += now[i] - self._last[i]
        self._last = now

    def timed(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                return work(*args, **kwargs)
            self.switch()
            self._inside.append(self._rename(name))
            try:
                return work(*args, **kwargs)
            finally:
                self.switch()
                self._inside.pop()

        return wrapped

    def _rename(self, name: str) -> str:
        return "first round" if name == "rounds" and "first round" not in self.parts else name


class TimedLoader(Loader):
    """A loader that times the import of a module, and the functions of the module that are in the tables."""

    def __init__(self, inner: Any, clock: Clock) -> None:
        self._inner, self._clock = inner, clock

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._inner.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        library = module.__name__.partition(".")[0]
        self._clock.timed(f"import {library}", self._inner.exec_module)(module)
        for name, part in TIMED.get(module.__name__, {}).items():
            setattr(module, name, self._clock.timed(part, getattr(module, name)))
        for name, part in METHODS.get(module.__name__, {}).items():
            owner, _, method = name.partition(".")
            found = getattr(module, owner)
            setattr(found, method, self._clock.timed(part, getattr(found, method)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Finder(MetaPathFinder):
    """Finds modules as Python does, and times their imports."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target)
        if spec and spec.loader and hasattr(spec.loader, "exec_module"):
            spec.loader = TimedLoader(spec.loader, self._clock)
        return spec


def run_timed(words: list[str], out: Path) -> None:
    """Run the command in this process; write its parts to `out`."""
    began, clock = time.time(), Clock()
    sys.meta_path.insert(0, Finder(clock))
    sys.argv = ["cfedavg", *words]
    os.fsync = clock.timed("sync files", os.fsync)
    from cfedavg import cli
    from cfedavg.core.interrupts import end_process

    try:
        cli.main()
    except SystemExit as stop:
        clock.switch()
        out.write_text(json.dumps({"began": began, "ended": time.time(), "parts": clock.parts}))
        end_process(int(stop.code or 0))  # as the command ends


def main() -> None:
    if os.environ.get("PHASES"):
        run_timed(sys.argv[1:], Path(os.environ["PHASES"]))
        return
    with tempfile.TemporaryDirectory() as folder:
        out, began = Path(folder) / "parts.json", time.time()
        program = [sys.executable, __file__, *sys.argv[1:]]
        done = subprocess.run(
            program, stdout=subprocess.DEVNULL, check=False, env=os.environ | {"PHASES": str(out)}
        )
        ended, found = time.time(), json.loads(out.read_text())
    parts = {"start of Python": [found["began"] - began, 0.0], **found["parts"]}
    parts["exit of Python"] = [ended - found["ended"], 0.0]
    for name, (wall, processor) in parts.items():
        if wall >= 0.01:
            print(f"{wall:8.2f} s  {processor:8.2f} s of processors  {name}")
    print(f"{ended - began:8.2f} s  all of it")
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
