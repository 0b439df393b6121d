"""Run a command in a network namespace of its own, for a limited time, and end all that it started.

    python scripts/isolated.py [--seconds 300] flwr run . --stream

Flower's simulation needs this: Ray binds to the machine's outside interface and probes addresses outside.
The command sees no interface but `lo`. Its processes are in a process namespace that ends with it, even if
this program is killed. This needs `unshare` (util-linux) and the right to make namespaces, which root has.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import secrets
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

UNSHARE = ["unshare", "-r", "-n", "-p", "-f", "--kill-child", "--mount-proc"]
MARK = "CFEDAVG_ISOLATED"  # environment variable: names the processes of a command
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 0x1
_PATIENCE = 10.0  # seconds until killed processes are gone


def find_obstacle() -> str:
    """Return why no namespace can be made here; an empty text if it can."""
    if shutil.which(UNSHARE[0]) is None:
        return "there is no command `unshare`"
    tried = subprocess.run([*UNSHARE, "true"], capture_output=True, text=True)
    return tried.stderr.strip() if tried.returncode else ""


def is_isolated() -> bool:
    """Return whether there is no interface but lo. (/sys/class/net would still show those outside.)"""
    return [name for _, name in socket.if_nameindex()] == ["lo"]


def raise_loopback() -> None:
    """Do what `ip link set lo up` does."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        answer = fcntl.ioctl(any_socket, _GET_FLAGS, struct.pack("16sh14x", b"lo", 0))
        _, flags = struct.unpack("16sh14x", answer)
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sh14x", b"lo", flags | _UP))


def run_isolated(command: Sequence[str | Path], seconds: float, **more: str) -> int:
    """Run `command` with the environment variables `more`; return its exit status, or 124 after `seconds`."""
    token = secrets.token_hex(8)
    environment = {**os.environ, **QUIET, **more, MARK: token}
    inside = [sys.executable, str(Path(__file__).resolve()), "--inside"]
    process = subprocess.Popen([*UNSHARE, *inside, *command], env=environment)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        print(f"ended after {seconds:g} s: {command[0]}", file=sys.stderr)
        return 124
    finally:
        process.kill()
        process.wait()
        _check_end(f"{MARK}={token}".encode())


def _check_end(word: bytes) -> None:
    """Wait until no process has `word` in its environment; raise RuntimeError if one stays."""
    end = time.monotonic() + _PATIENCE
    while left := [pid for pid in Path("/proc").glob("[0-9]*") if word in _read(pid / "environ")]:
        if time.monotonic() > end:
            raise RuntimeError(f"still running: {', '.join(pid.name for pid in left)}")
        time.sleep(0.05)


def _read(path: Path) -> list[bytes]:
    try:
        return path.read_bytes().split(b"\0")
    except OSError:  # the process has ended, or is another user's
        return []


def main() -> int:
    if sys.argv[1:2] == ["--inside"]:
        if not is_isolated():
            raise SystemExit("there are interfaces beside lo: nothing is started")
        raise_loopback()
        return subprocess.run(sys.argv[2:]).returncode
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=300.0, help="the most that the command may take")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    if why := find_obstacle():
        raise SystemExit(f"cannot make a network namespace: {why}")
    return run_isolated(given.command, given.seconds)


if __name__ == "__main__":
    raise SystemExit(main())
