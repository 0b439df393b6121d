"""A real federation, counted at the socket: the quickstart without CFedAvg and with it; Flower's overhead.

    python bench/federation.py --out results/federation [--app examples/quickstart]

Every SuperNode reaches the SuperLink through a relay that counts the bytes of its connections, TLS and all.
First nobody trains for a while, to see what waiting costs; then the app runs without its `compress.diff`,
and with it.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cfedavg.core.run_files import read_rows
from cfedavg.launch.local_federation import LocalFederation
from cfedavg.launch.services import read_log
from relay import Relay

QUICKSTART = Path(__file__).parent.parent / "examples" / "quickstart"
LIMIT = 900.0  # seconds for a run


class Counted:
    """A machine whose nodes all go through relays."""

    def __init__(self, machine: LocalFederation) -> None:
        self.machine = machine
        self.relays = [Relay(machine.link.port) for _ in machine.nodes]
        for node, relay in zip(machine.nodes, self.relays, strict=True):
            node.link = SimpleNamespace(files=machine.link.files, address=relay.address)  # type: ignore[assignment]

    def total(self) -> tuple[int, int]:
        return sum(each.up.count for each in self.relays), sum(each.down.count for each in self.relays)

    def during(self, work: Any) -> dict[str, float]:
        """Bytes and seconds while something is done."""
        before, began = self.total(), time.monotonic()
        work()
        up, down = (now - then for now, then in zip(self.total(), before, strict=True))
        return {"up": up, "down": down, "seconds": time.monotonic() - began}


def run_app(counted: Counted, app: Path, folder: Path, rounds: int, *, with_us: bool) -> dict[str, Any]:
    """One run of an app, and what it cost."""
    shutil.copytree(app, folder)
    if not with_us:
        subprocess.run(
            ["patch", "-R", "-p1", "-i", "compress.diff"], cwd=folder, check=True, capture_output=True
        )
    run: Any = None

    def work() -> None:
        nonlocal run
        run = counted.machine.run(folder, {"num-server-rounds": rounds})
        status = run.wait(LIMIT)
        assert status.text == "finished:completed", status

    found = counted.during(work)
    accuracies = re.findall(r"after round (\d+): accuracy ([\d.]+)", read_log(run.log))
    books = re.search(r"metrics in (\S+)", read_log(run.log))
    rows = read_rows(Path(books[1]) / "metrics.jsonl") if books else []
    ledger = {f"ledger_{way}": sum(row[f"{way}link_bytes"] for row in rows) for way in ("up", "down")}
    ledger["ledger_first"] = sum(row.get("first_download_bytes", 0) for row in rows)
    return found | {"accuracy": [float(each) for _, each in accuracies]} | (ledger if rows else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/federation-bytes"))
    parser.add_argument("--app", type=Path, default=QUICKSTART)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=8)
    given = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as path,
        LocalFederation(Path(path) / "machine", given.nodes) as machine,
    ):
        counted = Counted(machine)
        machine.start()
        found: dict[str, Any] = {"nodes": given.nodes, "rounds": given.rounds}
        print("waiting for a minute", flush=True)
        found["idle"] = counted.during(lambda: time.sleep(60))
        for name, with_us in (("before", False), ("after", True)):
            print(f"{given.app.name}, {name}", flush=True)
            found[name] = run_app(counted, given.app, Path(path) / name, given.rounds, with_us=with_us)
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / f"{given.app.name}.json").write_text(json.dumps(found, indent=1) + "\n")
    show(found)


def show(found: dict[str, Any]) -> None:
    """Per node and round."""
    turns = found["nodes"] * found["rounds"]
    idle = {way: found["idle"][way] / found["idle"]["seconds"] / found["nodes"] for way in ("up", "down")}
    print(f"a node that waits: {idle['up']:.0f} bytes/s up, {idle['down']:.0f} down")
    for name in ("before", "after"):
        run = found[name]
        waited = {way: idle[way] * run["seconds"] / found["rounds"] for way in ("up", "down")}
        print(
            f"{name}: {run['up'] / turns:,.0f} bytes up a node and round, {run['down'] / turns:,.0f} down; "
            f"waiting {waited['up']:,.0f} and {waited['down']:,.0f} of it; "
            f"accuracy {run['accuracy'][-1]:.4f}; {run['seconds']:.0f} s"
        )
        if "ledger_up" in run:
            print(
                f"  ledger: {run['ledger_up'] / turns:,.0f} up, {run['ledger_down'] / turns:,.0f} down, "
                f"of it first downloads {run['ledger_first'] / turns:,.0f}"
            )
    total = {name: found[name]["up"] + found[name]["down"] for name in ("before", "after")}
    print(f"total: {total['before'] / total['after']:.1f} times fewer bytes")


if __name__ == "__main__":
    main()
