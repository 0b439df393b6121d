"""Simulated seconds beside those of a real federation whose bytes go through a slow relay.

    python bench/link.py --out results/links/fp32.json
    python bench/link.py --out results/links/nb-iot.json --link nb-iot \\
        --compressor "topk(0.92) >> bf16" --compressor-down "topk(0.915) >> bf16"
    python bench/link.py --out results/links/classes.json \\
        --link "1x up=600kbit, down=600kbit, rtt=200ms; 1x 4g"
    FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE=250000 python bench/link.py --out results/links/long-download.json \\
        --times 2 --link "up=640kbit, down=200kbit, rtt=100ms"

A federation of SuperNodes on this machine trains, and after each round the relays change. First, and between
the rounds on the link, come rounds without a limit, which say what a round takes here without its transfer,
and rounds with a round trip of one second, which say how many round trips a round has. The prediction is
`simulated_seconds` of the same run with `--link "LINK, wait=..."`, where `wait` is made of these two and of
the bytes that are no messages of ours. So `wait` is measured here and now, and the transfer is predicted.

Keep each message below 30 s, as far as Flower does not send it in chunks: docs/links.md says what it did with
longer ones.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cfedavg
from cfedavg.core.config import Config
from cfedavg.core.files import make_folder
from cfedavg.core.run_files import METRICS, Record, read_rows
from cfedavg.launch.local_federation import LocalFederation, format_app
from cfedavg.simulate.links import Speeds, draw_speeds
from relay import Relay

LIMIT = 3000.0  # seconds for the whole run
ROUND = 900.0  # seconds for a round
FREE, FAR, LINK = "free", "far", "link"  # no limit; a round trip of one second; the link
FIRST = [FREE, FREE, FAR]  # the first round also fetches the app, and does not count
TURN = [LINK, FREE, FAR]


def limit(relays: list[Relay], kind: str, speeds: Speeds) -> None:
    """Make the relays as slow as a kind of round says; each node has its own link."""
    for i, relay in enumerate(relays):
        if kind == LINK:
            relay.limit(speeds.up[i], speeds.down[i], speeds.rtt[i])
        else:
            relay.limit(rtt=1.0 if kind == FAR else 0.0)


def measure(config: Config, kinds: list[str], folder: Path) -> list[Record]:
    """Train with a round of each kind; return the rows, with the `socket_up` and `socket_down` bytes."""
    speeds, counts = draw_speeds(config, config.clients), list[tuple[int, int]]()
    with LocalFederation(folder / "federation", config.clients) as federation:
        relays = [Relay(federation.link.port, slow=True) for _ in federation.nodes]
        for node, relay in zip(federation.nodes, relays, strict=True):
            node.link = SimpleNamespace(files=federation.link.files, address=relay.address)  # type: ignore[assignment]
        federation.start()
        over = threading.Event()

        def follow() -> None:
            while not over.wait(0.05) and len(counts) < len(kinds):
                while (done := len(read_rows(folder / "run" / METRICS))) >= len(counts):
                    counts.append((sum(r.up.count for r in relays), sum(r.down.count for r in relays)))
                    if done < len(kinds):
                        limit(relays, kinds[done], speeds)
                        print(f"round {done + 1} of {len(kinds)}: {kinds[done]}", flush=True)

        threading.Thread(target=follow, daemon=True).start()
        make_folder(folder / "app", "`out`")
        policy = {"round_timeout": ROUND, "quorum": 1.0, "min_nodes": config.clients}
        text = format_app(config.replace(link=None), out=str(folder / "run"), resume=False, **policy)
        (folder / "app" / "pyproject.toml").write_text(text)
        run = federation.run(folder / "app")
        status = run.wait(LIMIT)
        over.set()
        assert status.text == "finished:completed", status
    rows = read_rows(folder / "run" / METRICS)
    for row, before, after in zip(rows, counts, counts[1:], strict=False):
        row["socket_up"], row["socket_down"] = after[0] - before[0], after[1] - before[1]
    return rows


def compare(config: Config, kinds: list[str], rows: list[Record]) -> dict[str, Any]:
    """Return what a round needs beside its messages, and the prediction for each round on the link."""
    seconds = {
        kind: [r["seconds"] for r, k in zip(rows, kinds, strict=True) if k == kind] for kind in set(kinds)
    }
    base = statistics.median(seconds[FREE][1:])
    trips = max(0.0, statistics.median(seconds[FAR]) - base)
    extra = {
        way: statistics.median(
            (row[f"socket_{way}"] - row[f"{way}link_bytes"]) / config.clients
            for row, kind in zip(rows[:-1], kinds, strict=False)
            if kind == FREE
        )
        for way in ("up", "down")
    }
    speeds = draw_speeds(config, config.clients)
    wait = base + max(
        (trips - 1) * speeds.rtt[i] + 8 * extra["up"] / speeds.up[i] + 8 * extra["down"] / speeds.down[i]
        for i in range(config.clients)
    )
    waiting = "; ".join(f"{part}, wait={wait!r}s" for part in str(config.link).split(";"))
    simulated = cfedavg.run(config.replace(link=waiting, engine="reference")).rows
    on_link = [
        {
            "round": t + 1,
            "transfer": simulated[t]["simulated_seconds"] - wait,
            "predicted": simulated[t]["simulated_seconds"],
            "measured": rows[t]["seconds"],
            "ratio": simulated[t]["simulated_seconds"] / rows[t]["seconds"],
        }
        for t, kind in enumerate(kinds)
        if kind == LINK
    ]
    return {"base": base, "trips": trips, "extra": extra, "wait": wait, "seconds": seconds, "rounds": on_link}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/link.json"))
    parser.add_argument("--link", default="up=640kbit, down=640kbit, rtt=100ms")
    parser.add_argument("--compressor", default="none")
    parser.add_argument("--compressor-down", default="none")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--times", type=int, default=3, help="rounds on the link")
    given = parser.parse_args()
    kinds = FIRST + given.times * TURN
    config = Config(
        clients=given.nodes, classes_per_client=5, local_steps="5", rounds=len(kinds), link=given.link,
        compressor=given.compressor, compressor_down=given.compressor_down, eval_every=len(kinds),
    )  # fmt: skip
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as path:
        rows = measure(config, kinds, Path(path))
    found = {name: vars(given)[name] for name in ("link", "compressor", "compressor_down", "nodes")}
    found |= compare(config, kinds, rows) | {"minutes": (time.monotonic() - began) / 60}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(found, indent=1) + "\n")
    show(found)


def show(found: dict[str, Any]) -> None:
    extra, sent = found["extra"], f"{found['compressor']} up, {found['compressor_down']} down"
    print(
        f"{found['link']}; {sent}: a round takes {found['base']:.1f} s without its transfer, and has "
        f"{found['trips']:.1f} round trips, {extra['up']:,.0f} more bytes up and {extra['down']:,.0f} down: "
        f"wait={found['wait']:.1f}s"
    )
    for row in found["rounds"]:
        print(
            f"round {row['round']}: transfer {row['transfer']:.1f} s, predicted {row['predicted']:.1f} s, "
            f"measured {row['measured']:.1f} s, ratio {row['ratio']:.3f}"
        )
    mean = statistics.fmean(row["measured"] for row in found["rounds"])
    predicted = statistics.fmean(row["predicted"] for row in found["rounds"])
    print(f"mean: predicted {predicted:.1f} s, measured {mean:.1f} s, ratio {predicted / mean:.3f}")


if __name__ == "__main__":
    main()
