"""A process that decodes a data set into the cache while the command imports torch.

`load` waits for the process. If the process fails, `load` decodes the data set itself and raises the error.
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from pathlib import Path

_started: list[subprocess.Popen[bytes]] = []


def start_decoder(dataset: str, data_dir: str | Path | None) -> None:
    """Start the process, if the data set is not in the cache yet and no process runs."""
    from cfedavg.data.sources import cached_folder

    with suppress(Exception):  # `load` says what is wrong
        folder = cached_folder(dataset, data_dir)
        if _started or folder is None or folder.exists():
            return
        # -P: modules of the current folder must not take the place of installed ones.
        code = "from cfedavg.data.decoder import fill_cache; fill_cache()"
        command = [sys.executable, "-P", "-c", code, dataset, str(data_dir or "")]
        _started.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL))


def wait_for_decoder() -> None:
    """Wait until the process ends, if it runs."""
    while _started:
        _started[0].wait()
        _started.clear()


def fill_cache() -> None:
    """Decode the data set that the process's arguments name; errors end it silently."""
    from cfedavg.data.sources import load

    dataset, data_dir = sys.argv[1:]
    with suppress(BaseException):
        load(dataset, data_dir or None)
