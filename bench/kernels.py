"""Nanoseconds for each number that is selected, encoded and decoded: by numba, by C and by plain Python.

    OMP_NUM_THREADS=1 python bench/kernels.py

The vectors have the layouts of a LeNet (d = 62,006) and of a CNN (d = 582,026), and entries that are larger
in some rows and columns than in others, as those of an update are. `select` is top-k, `encode` and `decode`
are whole messages of bf16 values. Each way runs in a process of its own, without torch. The time is that of
the processor, the least of several calls; it is divided by the k numbers sent.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

WAYS = ("numba", "c", "python")
SHAPES: dict[int, tuple[tuple[int, ...], ...]] = {
    62_006: ((6, 3, 5, 5), (6,), (16, 6, 5, 5), (16,), (120, 400), (120,), (84, 120), (84,), (10, 84), (10,)),
    582_026: ((32, 1, 5, 5), (32,), (64, 32, 5, 5), (64,), (512, 1024), (512,), (10, 512), (10,)),
}
SENT = (0.01, 0.03)
SECONDS = 1.0  # of calls for each number of the table


def make_update(shapes: tuple[tuple[int, ...], ...]) -> np.ndarray:
    """Return a vector whose entries are random numbers times a random scale of their row and column."""
    random, parts = np.random.default_rng(0), []
    for shape in shapes:
        rows = np.exp(random.standard_normal(shape[:1]))
        columns = np.exp(random.standard_normal(shape[1:2])) if len(shape) > 1 else np.ones(())
        scale = np.multiply.outer(rows, columns).reshape(*shape[:2], *[1] * (len(shape) - 2))
        parts.append((random.standard_normal(shape) * scale).reshape(-1))
    return np.concatenate(parts).astype(np.float32)


def least_time(call: Callable[[], Any]) -> float:
    """Return the processor's time of the fastest of several calls, without the first, which may compile."""
    call()
    end, least = time.process_time() + SECONDS, float("inf")
    while time.process_time() < end:
        start = time.process_time()
        call()
        least = min(least, time.process_time() - start)
    return least


def measure() -> list[dict[str, Any]]:
    """Return the measurements of the way in which this process runs kernels, and a hash of each message."""
    from cfedavg import Layout, decode, encode, parse
    from cfedavg.core.kernels import WAY

    found = []
    for d, shapes in SHAPES.items():
        layout = Layout(tuple(map(str, range(len(shapes)))), shapes, ("float32",) * len(shapes))
        p = make_update(shapes)
        for sent in SENT:
            select = partial(parse(f"topk({1 - sent}) >> bf16").compress, p, 0, layout=layout)
            payload = select()
            message = encode(payload, layout)
            coders = {
                "encode": partial(encode, payload, layout),
                "decode": partial(decode, message, layout=layout),
            }
            calls: dict[str, Callable[[], Any]] = {"select": select, **coders}
            k = len(payload.indices)
            times = {name: round(1e9 * least_time(call) / k) for name, call in calls.items()}
            digest = hashlib.sha256(message).hexdigest()
            found.append({"d": d, "k": k, "way": WAY, **times, "bytes": len(message), "sha256": digest})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--way", choices=WAYS, help="measure this way alone and print JSON")
    if parser.parse_args().way:
        print(json.dumps(measure()))
        return
    lines = []
    for way in WAYS:
        command = [sys.executable, __file__, "--way", way]
        environment = os.environ | {"CFEDAVG_KERNELS": way}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
        lines += json.loads(done.stdout) if done.returncode == 0 else []
    print("| d | k | kernels | select | encode | decode | |\n|---|---|---|---|---|---|---|")
    for line in sorted(lines, key=lambda line: (line["d"], line["k"])):
        hashes = {each["sha256"] for each in lines if (each["d"], each["k"]) == (line["d"], line["k"])}
        times = " | ".join(f"{line[name]:,}" for name in ("select", "encode", "decode"))
        bytes_are = "same bytes" if len(hashes) == 1 else "OTHER BYTES"
        print(f"| {line['d']:,} | {line['k']:,} | {line['way']} | {times} | {bytes_are} |")


if __name__ == "__main__":
    main()
