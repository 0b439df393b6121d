"""One configuration, round by round: seconds, steps per second, memory, and where the time goes.

    python bench/round.py rounds=21 dataset=mnist data_dir=DIR clients=100 iid=true model=cnn \
        local_epochs=10 batch_size=64 "compressor=topk(0.99)" precision=bf16 device=cuda

takes any field of Config, and prints one line of JSON. The first round warms up (and, on a GPU, compiles) and
is not counted. With --profile the parts of a round are timed in a second run of 3 rounds, which waits for the
device after each part, so that the first run is not disturbed.
"""

from __future__ import annotations

import json
import platform
import resource
import statistics
import sys
import time
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch

import cfedavg
from cfedavg import Config
from cfedavg.algorithm import Aggregator
from cfedavg.callbacks import Callback
from cfedavg.channel import Channel
from cfedavg.data.tasks import build_task
from cfedavg.simulate.engines import BlockEngine, choose_engine
from cfedavg.simulate.engines.rank_round import Messages
from cfedavg.simulate.plan import Plan


def parsed(words: list[str]) -> Config:
    """field=value, the value as in TOML, or as text."""
    found: dict[str, Any] = {}
    for word in words:
        name, _, text = word.partition("=")
        try:
            found[name] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            found[name] = text
    return Config.from_dict(found)


class Watch(Callback):
    """Passes on what a run says."""

    def on_message(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def on_row(self, row: dict[str, Any]) -> None:
        seconds, accuracy = row["seconds"], row.get("test_accuracy", 0.0)
        print(f"round {row['round']}: {seconds:.3f} s, {accuracy:.4f}", file=sys.stderr, flush=True)


class Profile:
    """Seconds in each part of a round, exclusive of the parts inside it."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.seconds = device, defaultdict[str, float](float)
        self._inside: list[str] = []
        self._since = time.perf_counter()

    def switch(self) -> None:
        """Books the time since the last switch on the part that is running."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds[self._inside[-1] if self._inside else "the rest"] += now - self._since
        self._since = now

    def enter(self, name: str) -> None:
        self.switch()
        self._inside.append(name)

    def leave(self) -> None:
        self.switch()
        self._inside.pop()

    def timed(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.enter(name)
            try:
                return work(*args, **kwargs)
            finally:
                self.leave()

        return wrapped

    def timed_items(self, name: str, work: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        def wrapped(*args: Any) -> Iterator[Any]:
            items = work(*args)
            while True:
                self.enter(name)
                try:
                    item = next(items, None)
                finally:
                    self.leave()
                if item is None:
                    return
                yield item

        return wrapped


def profile(config: Config, rounds: int = 3) -> dict[str, float]:
    """The share of each part in a round of one process."""
    task = build_task(config)
    engine = choose_engine(config, Plan(config, task), task)
    assert isinstance(engine, BlockEngine)
    state = engine.begin(engine.start())
    state, finish = engine.round(state)  # warms up
    finish(), engine.evaluate(state)
    watch = Profile(engine.device)
    send, step, add = Channel.send, Aggregator.step, Messages.add
    Channel.send = watch.timed("compress, feed back", send)  # type: ignore[method-assign]
    Aggregator.step = watch.timed("average", step)  # type: ignore[method-assign]
    Messages.add = watch.timed("count bytes", add)  # type: ignore[method-assign]
    engine.trainer.train = watch.timed_items("local SGD", engine.trainer.train)  # type: ignore[method-assign]
    engine._kept = watch.timed("keep residuals", engine._kept)  # type: ignore[method-assign]
    for _ in range(rounds):
        state, finish = watch.timed("norms and the rest", engine.round)(state)
        watch.timed("evaluate", engine.evaluate)(state)
        watch.timed("count bytes", finish)()
    Channel.send, Aggregator.step, Messages.add = send, step, add  # type: ignore[method-assign]
    total = sum(watch.seconds.values())
    return {name: round(seconds / total, 4) for name, seconds in watch.seconds.items()}


def main() -> None:
    words = [word for word in sys.argv[1:] if word != "--profile"]
    config = parsed(words)
    result = cfedavg.run(config, callbacks=[Watch()])
    rows = result.rows[1:]
    seconds = [row["seconds"] for row in rows]
    cuda = torch.cuda.is_available() and config.device != "cpu"
    own, other = (
        resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    resident = 1024 * (own + other * max(0, config.workers - 1))  # of the workers, the largest is known
    line = {
        "who": f"cfedavg {cfedavg.__version__}",
        "config": {word.partition("=")[0]: word.partition("=")[2] for word in words},
        "device": torch.cuda.get_device_name() if cuda else platform.machine(),
        "first_round_seconds": round(result.rows[0]["seconds"], 2),
        "seconds_per_round": [round(each, 4) for each in seconds],
        "median_seconds": round(statistics.median(seconds), 4),
        "steps_per_second": round(
            rows[0]["local_steps_mean"] * rows[0]["clients"] / statistics.median(seconds), 1
        ),
        "test_accuracy": [row.get("test_accuracy") for row in result.rows],
        "uplink_bytes": rows[0]["uplink_bytes"],
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if cuda else resident,
        "share": profile(config) if "--profile" in sys.argv else {},
        "torch": torch.__version__,
    }
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
