"""A light client works with Flower and NumPy alone, and sends and keeps the same bytes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

from cfedavg.core import native
from cfedavg.core.extras import EXTRAS

# Flower itself needs rich and typer.
LIGHT = (
    "torch", "numba", "llvmlite", "matplotlib", "PIL", "pyarrow", "huggingface_hub", "safetensors", "scipy",
    "pandas",
)  # fmt: skip
ROOT = Path(__file__).parents[1]
BLOCK = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocked())
"""
flower = pytest.mark.skipif(find_spec("flwr") is None, reason="Flower is not installed")
WAYS = [
    pytest.param("c", marks=pytest.mark.skipif(not native.find("encode_numbers"), reason="no C library")),
    "python",
]


def run_without(libraries: tuple[str, ...], code: str, kernels: str = "") -> str:
    """Return what a process prints in which none of the libraries can be imported."""
    command = [sys.executable, "-W", "error", "-c", BLOCK.format(set(libraries)) + code]
    environment = os.environ | {"CFEDAVG_KERNELS": kernels}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_compressor_runs() -> None:
    found = run_without(
        LIGHT,
        """
import numpy as np
from cfedavg.compress import EXAMPLES, decompress, parse
p = np.random.default_rng(0).standard_normal((3, 400)).astype(np.float32)
for text in EXAMPLES:
    sent = decompress(parse(text).compress(p, np.arange(3)))
    assert sent.shape == p.shape and np.square(sent - p).sum() <= np.square(p).sum(), text
assert "torch" not in sys.modules
print(len(EXAMPLES))
""",
    )
    assert int(found) > 10


def test_a_client_sends_stores_and_restores() -> None:
    """Channel, protocol, wire and store of a federation, with every feedback."""
    found = run_without(
        LIGHT,
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
""",
    )
    assert found == "done\n"


def test_a_copy_of_the_broadcast_is_kept() -> None:
    """A copy follows by the message, by the values that changed, and whole."""
    found = run_without(
        LIGHT,
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
""",
    )
    assert found == "done\n"


@flower
@pytest.mark.parametrize("kernels", [*WAYS, "numba"])
def test_a_light_client_sends_and_keeps_the_same_bytes(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages, residuals and model copies of whole federations, and golden and damaged messages."""
    from tests import light

    code = """
from tests import light
light.fix_chance()
print(*light.digests())
"""
    missing = tuple(name for name in LIGHT if kernels != "numba" or name not in ("numba", "llvmlite"))
    found = run_without(missing, code, kernels).split()
    light.fix_chance(monkeypatch.setattr)
    monkeypatch.setattr("cfedavg.report.write_run_pictures", lambda path: None)
    assert found == light.digests()


@flower
@pytest.mark.slow
def test_an_environment_of_a_client_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real environment with `cfedavg[client]` alone. It needs an index of packages."""
    from tests import light

    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path], check=True)
    python = tmp_path / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--constraint"]
    subprocess.run([*pip, ROOT / "constraints.txt", f"{ROOT}[client]"], check=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    code = "from tests import light; light.fix_chance(); print(*light.digests())"
    found = subprocess.run(
        [python, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    light.fix_chance(monkeypatch.setattr)
    monkeypatch.setattr("cfedavg.report.write_run_pictures", lambda path: None)
    assert found.stdout.split() == light.digests()


IMPORTS = {
    "from cfedavg import run": "sim",
    "from cfedavg import Task": "sim",
    "from cfedavg.flower import compressed": "client",
    "from cfedavg.flower import CFedAvg": "flower",
    "from cfedavg.report import import_drawing; import_drawing()": "report",
    "from cfedavg.report import Panel": "report",
    "from cfedavg.report import check_drawing; check_drawing()": "report",
    "from cfedavg.data import build_task": "sim",
    "from cfedavg.data import load; load('mnist')": "data",
    "from cfedavg.data import load; load('own', data_dir='{folder}')": "data",
}


def test_a_missing_library_is_one_sentence_that_names_the_extra(tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / f"{split}-0.parquet").touch()
    code = """
import os
os.environ["CFEDAVG_CACHE"] = "{folder}"
for line in {lines}:
    try:
        exec(line)
    except ModuleNotFoundError as error:
        print(error)
    else:
        print(line, "does not need what is missing")
"""
    lines = [line.format(folder=tmp_path) for line in IMPORTS]
    found = run_without((*LIGHT, *EXTRAS), code.format(folder=tmp_path, lines=lines)).splitlines()
    assert len(found) == len(IMPORTS)
    for line, extra in zip(found, IMPORTS.values(), strict=True):
        assert line.endswith(f' is not installed here: pip install "cfedavg[{extra}]"')


@pytest.mark.parametrize(("missing", "arguments"), [("typer", "parts"), ("rich", "parts"), ("torch", "run")])
def test_the_command_names_the_extra_in_one_sentence(missing: str, arguments: str, tmp_path: Path) -> None:
    code = f"""
import os
os.chdir({str(tmp_path)!r})
sys.argv[1:] = {arguments!r}.split()
sys.stderr = sys.stdout
from cfedavg.cli import main
try:
    main()
except SystemExit as error:
    print("code", error.code)
"""
    found = run_without((missing,), code)
    assert found == f'error: {missing} is not installed here: pip install "cfedavg[sim]"\ncode 2\n'
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("kernels", "words"),
    [
        ("fortran", "CFEDAVG_KERNELS must be numba, c or python, got 'fortran'"),
        ("numba", 'numba is not installed here: pip install "cfedavg[sim]"'),
    ],
)
def test_a_way_that_is_not_there_is_refused(kernels: str, words: str) -> None:
    code = """
try:
    import cfedavg.wire
except Exception as error:
    print(error)
"""
    assert run_without(LIGHT, code, kernels).strip().endswith(words)


def test_the_extras_of_the_table_exist_and_install_what_they_say() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]

    def names(extra: str) -> set[str]:
        found = set()
        for line in extras[extra]:
            name, inner = re.fullmatch(r"([\w-]+)(?:\[([\w,]+)\])?.*", line).groups()
            found |= set().union(*map(names, inner.split(","))) if name == "cfedavg" else {name}
        return found

    for module, (_, extra) in EXTRAS.items():
        library = {"PIL": "pillow", "llvmlite": "numba"}.get(module, module)
        assert library in names(extra), f"{extra} does not install {library}"
    assert project["dependencies"] == ["numpy>=2.0"]
    assert names("client") == {"flwr"}
    assert names("all") == names("sim") | names("flower") | names("data") | names("client") | names("report")
