"""The simulated speeds of the clients: their local steps per second and their links, drawn once for a run."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from cfedavg.core.config import Config
from cfedavg.core.keys import Purpose, key, uniform
from cfedavg.core.links import LinkClass, count_clients, parse_links


@dataclass(frozen=True)
class Speeds:
    """Each client's steps per second, bit/s up and down, and seconds of a round trip and of waiting."""

    speed: list[float]
    up: list[float]
    down: list[float]
    rtt: list[float]
    wait: list[float]

    def seconds(self, client: int, K: int, up_bytes: int, down_bytes: int) -> float:
        """Return the seconds from the server's request to the arrival of a reply after `K` local steps."""
        work = K / self.speed[client]
        travel = 8 * up_bytes / self.up[client] + 8 * down_bytes / self.down[client]
        return work + travel + self.rtt[client] + self.wait[client]


def draw_speeds(config: Config, clients: int) -> Speeds:
    """Return the speeds of a run's clients; what `config` does not give takes no time."""
    speed = config.per_client("steps_per_second")
    own = {} if speed is None else {"speed": speed}
    settings = [{**each.settings, **own} for each in assign_classes(config, clients)]

    def draw(name: str, purpose: Purpose, absent: float) -> list[float]:
        u = uniform(key(config.seed, 0, 0, purpose), clients)
        return [s[name].at(i, float(u[i])) if name in s else absent for i, s in enumerate(settings)]

    return Speeds(
        draw("speed", Purpose.SPEED, math.inf),
        draw("up", Purpose.UPLINK, math.inf),
        draw("down", Purpose.DOWNLINK, math.inf),
        draw("rtt", Purpose.LATENCY, 0.0),
        draw("wait", Purpose.WAIT, 0.0),
    )


def assign_classes(config: Config, clients: int) -> list[LinkClass]:
    """Return the class of each client's link.

    Classes with numbers take the clients in order. Which clients belong to a share is drawn with the seed.
    """
    if config.link is None:
        return [LinkClass({})] * clients
    classes = parse_links(config.link)
    counts = count_clients(classes, clients)
    in_order = [each for each, count in zip(classes, counts, strict=True) for _ in range(count)]
    if all(each.share is None for each in classes):
        return in_order
    places = np.argsort(uniform(key(config.seed, 0, 0, Purpose.LINK), clients), kind="stable")
    return [in_order[int(place)] for place in places]
