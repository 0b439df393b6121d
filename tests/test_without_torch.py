"""Parts that a light client needs work where torch is not installed."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest

CLIENT = """
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")

sys.meta_path.insert(0, NoTorch())
"""


def run_without_torch(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", CLIENT + code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_compressor_runs() -> None:
    found = run_without_torch(
        """
import numpy as np
from cfedavg.compress import EXAMPLES, decompress, parse
p = np.random.default_rng(0).standard_normal((3, 400)).astype(np.float32)
for text in EXAMPLES:
    sent = decompress(parse(text).compress(p, np.arange(3)))
    assert sent.shape == p.shape and np.square(sent - p).sum() <= np.square(p).sum(), text
assert "torch" not in sys.modules
print(len(EXAMPLES))
"""
    )
    assert int(found) > 10


def test_a_client_sends_stores_and_restores() -> None:
    """Channel, protocol, wire and store of a federation, with every feedback."""
    found = run_without_torch(
        """
import tempfile
from pathlib import Path
import numpy as np
from cfedavg import Aggregator, Channel, Layout, parse
from cfedavg.feedback import FEEDBACKS
from cfedavg.federate.client import Train, make_answer, receive
from cfedavg.federate.protocol import Request, Stamp
from cfedavg.federate.stores import ClientStore
from cfedavg.federate.server import Server
from cfedavg.federate.server import ServerState
from cfedavg.federate.stores import ServerStore
from cfedavg.federate.client import Uplink, unpack_message
from cfedavg.optimise import SERVER_OPTIMISERS
from cfedavg.wire import decode

layout = Layout.flat(300)
g = np.random.default_rng(0).standard_normal(300).astype(np.float32)
for name in FEEDBACKS.entries:
    feedback = FEEDBACKS.parse(name)
    uplink = Uplink(Channel(parse("topk(0.9)"), feedback, layout), client=4)
    with tempfile.TemporaryDirectory() as folder:
        store = ClientStore(Path(folder), "f", "me", layout)
        with store.lock():
            first = Request(Stamp(1, 1), 0, None)
            client, message = make_answer(receive(store.load(), first, uplink)[0], first, g, uplink)
            store.save(client)
            again, action = receive(store.load(), Request(Stamp(1, 2), 1, None), uplink)
        assert isinstance(action, Train), name
        # The reply was lost: with ef all of g is owed again, with ef21 nothing was ever said.
        wanted = {"ef": g, "ef21": 0 * g, "none": 0 * g}
        assert np.array_equal(again.memory, wanted.get(name, again.memory)), name
        aggregator = Aggregator(feedback, SERVER_OPTIMISERS.parse("adam"))
        payload = decode(unpack_message(message, len(message), 0).payload, layout=layout)
        x = np.zeros(300, np.float32)
        x, memory = aggregator.step(x, aggregator.init(x), [(payload, [1.0])], everyone=1.0, eta=0.1)
        assert np.count_nonzero(x) == 30 and x.dtype == np.float32
        server = ServerStore(Path(folder) / "server", "f", layout)
        with server.lock():
            server.save(ServerState(Server(x), extra=memory.vectors()))
            assert np.array_equal(server.load().extra["optimiser.v"], memory.optimiser["v"])
assert "torch" not in sys.modules
print("done")
"""
    )
    assert found == "done\n"


def test_a_copy_of_the_broadcast_is_kept() -> None:
    """A copy follows by the message, by the values that changed, and whole."""
    found = run_without_torch(
        """
import numpy as np
from cfedavg.compress import parse
from cfedavg.channel import Downlink
from cfedavg.simulate.downloads import Downloads
from cfedavg.core.layout import Layout
from cfedavg.wire import decode, encode

layout, draw = Layout.flat(300), np.random.default_rng(0).standard_normal
for text in ("topk(0.9)", "topk(0.9) >> int3(64)", "rd(0.9) >> bf16"):
    downlink = Downlink(parse(text), layout)
    w = downlink.make(draw(300).astype(np.float32))
    payload, w_next = downlink.send(w + draw(300).astype(np.float32), w, key=7)
    message = encode(payload, layout)
    known = Downloads.none(w).after(0, w, w_next, len(message), [0], 100)
    at = np.flatnonzero(known.changed)
    ways = [
        downlink.receive(w, decode(message, layout=layout)),
        downlink.unpack(w, decode(encode(downlink.pack(w_next, at), layout), layout=layout)),
        downlink.unpack(0 * w, decode(encode(downlink.pack(w_next), layout), layout=layout)),
    ]
    assert {each.tobytes() for each in ways} == {w_next.tobytes()} != {w.tobytes()}, text
    counted = known.count(1, [0, 1], w_next, downlink, lambda count: count)
    assert counted[1]().kind == "whole" and 0 < counted[0]().bytes <= len(message)
assert "torch" not in sys.modules
print("done")
"""
    )
    assert found == "done\n"


@pytest.mark.skipif(find_spec("flwr") is None, reason="Flower is not installed")
def test_the_flower_mod_loads() -> None:
    found = run_without_torch(
        """
from cfedavg.flower import compressed
assert "torch" not in sys.modules
print(compressed.__name__)
"""
    )
    assert found == "compressed\n"
