"""A process that compiles steps beside a run: the run's end of the pipe, and the process's end.

`python -m cfedavg.simulate.vectorised.compiler` imports torch's compiler while the run still reads its data.
It forks a child for each job, so jobs run at the same time and none of them imports anything again. This
module does not import torch: the command line starts the process before it imports torch itself.

A job is a pickled triple: a number, the name of a function of `artifacts`, and its arguments. The answer is a
line with the job's number and the exit status of its child, 0 if the job is done.
"""

from __future__ import annotations

import atexit
import os
import pickle
import select
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

from cfedavg.core.system import count_cores
from cfedavg.simulate.driver import sees_gpu

LENGTH = 8  # bytes of the number before a job, which gives the job's length
IDLE = 120.0  # seconds without a job after which the process ends
PAUSE = 0.02  # seconds between two looks at the children
CORES = 4  # on fewer cores, a second process would only slow the run down


class Compiler:
    """The run's end of the pipe: it starts the process, submits jobs and waits for them."""

    def __init__(self) -> None:
        self._ended: dict[int, bool] = {}  # for each job that has ended: whether it is done, not failed
        self._last = 0
        # This check of torch's does not start CUDA. If it did, a forked child could not start CUDA again.
        environment = {**os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        # -P: modules of the current folder must not take the place of installed ones.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=environment,
        )
        atexit.register(self.close)

    def submit(self, function: str, *args: Any) -> int:
        """Submit a job, a call of a function of `artifacts`; return the job's number."""
        self._last += 1
        try:
            job = pickle.dumps((self._last, function, args))
            assert self._process.stdin
            self._process.stdin.write(len(job).to_bytes(LENGTH, "little") + job)
            self._process.stdin.flush()
        except Exception:  # the process has ended, or pickle cannot write an argument
            self._ended[self._last] = False
        return self._last

    def wait(self, job: int) -> bool:
        """Wait until a job ends; return whether it is done. If the process ends, its jobs have failed."""
        while job not in self._ended:
            assert self._process.stdout
            number, _, status = self._process.stdout.readline().partition(b" ")
            if not number:
                return False
            self._ended[int(number)] = status.strip() == b"0"
        return self._ended[job]

    @property
    def alive(self) -> bool:
        """Whether the process can take jobs."""
        return self._process.poll() is None

    def close(self) -> None:
        """End the process and its children."""
        atexit.unregister(self.close)
        with suppress(OSError):
            os.killpg(self._process.pid, 9)
        self._process.communicate()


_started: list[Compiler] = []


def running_compiler() -> Compiler | None:
    """Return the process that `start_compiler` started, if it can take jobs."""
    return next((each for each in _started if each.alive), None)


def start_compiler(device: str, engine: str) -> None:
    """Start the process for a run with these options, if the run may compile steps and no process runs yet.

    Steps are compiled on a GPU only. On a machine with few cores, the process would slow the run down.
    """
    compiles = device != "cpu" and engine in ("auto", "batched") and sees_gpu()
    if compiles and running_compiler() is None and count_cores() >= CORES:
        with suppress(OSError, TypeError):  # Python is embedded, or the system starts no process
            _started[:] = [Compiler()]


def serve() -> None:
    """Run the process's end of the pipe until the run closes the pipe or submits nothing more."""
    from cfedavg.simulate.vectorised import artifacts  # imports torch and its compiler

    artifacts.import_compiler()
    children: dict[int, int] = {}  # for each child's process id: the number of its job
    used = time.monotonic()
    while children or time.monotonic() - used < IDLE:
        ready, _, _ = select.select([sys.stdin], [], [], PAUSE if children else 1.0)
        if ready:
            length = int.from_bytes(_read(LENGTH), "little")
            if not length:
                return
            number, function, args = pickle.loads(_read(length))
            child = os.fork()
            if not child:
                _run(artifacts, function, args)
            children[child], used = number, time.monotonic()
        for child, number in list(children.items()):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                del children[child]
                os.write(1, b"%d %d\n" % (number, status))


def _read(size: int) -> bytes:
    """Return `size` bytes of standard input, or fewer at its end."""
    found = b""
    while len(found) < size and (more := os.read(0, size - len(found))):
        found += more
    return found


def _run(module: Any, function: str, args: tuple[Any, ...]) -> None:
    """Run a job in a child and end the child, with exit status 0 if the job is done."""
    status = 1
    try:
        os.dup2(2, 1)  # only the parent answers
        getattr(module, function)(*args)
        status = 0
    finally:
        os._exit(status)


if __name__ == "__main__":
    serve()
