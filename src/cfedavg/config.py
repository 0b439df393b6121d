"""One frozen, typed configuration. The command's options and the TOML file's keys are its fields."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

from cfedavg.errors import InputError
from cfedavg.files import read_file
from cfedavg.spec import Range


def option(default: Any, group: str, text: str, shown: str = "") -> Any:
    """A field with what `--help` says of it and, where None stands for a choice, of its default."""
    return field(default=default, metadata={"group": group, "help": text, "shown": shown})


DATA, MODEL, LOCAL, ROUND, SENT, LINK, RUN = (
    "Data", "Model", "Local work", "Rounds", "What is sent", "Simulated time", "Run",
)  # fmt: skip

PARTS = (
    "model",
    "schedule",
    "local_optimiser",
    "server_optimiser",
    "compressor",
    "feedback",
)  # the fields whose text may name a module:Class
PER_CLIENT = ("local_steps", "steps_per_second", "uplink", "downlink", "latency")

APP = "(a Flower app)"  # stands for a model and data that are the app's, which its server cannot know
OWN = "(a task from Python"  # begins what stands for a model and data that no text names
_NOT_OF_OWN = {"data_dir", "classes_per_client", "dirichlet", "iid"}  # a task has its clients' data
_OF_APP = {"dataset", "model", "clients", "rounds", "update", "compressor", "feedback", "seed"}
_OF_APP_ALONE = {
    "participation",
    "eta",
    "weighting",
    "server_optimiser",
}  # else another strategy decides them

# Of each group at most one may be given; without any, the first default holds.
EXCLUSIVE = (
    ("classes_per_client", "dirichlet", "iid"),
    ("local_steps", "local_epochs", "deadline"),
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that decides the result of a run.

    >>> Config(clients=10, rounds=5).compressor
    'topk(0.99) >> bf16'
    """

    dataset: str = option(
        "embedded", DATA,
        "embedded, mnist, fashion_mnist, cifar10, or owner/name@revision of the Hugging Face hub",
    )  # fmt: skip
    data_dir: str | None = option(None, DATA, "a folder with train-*.parquet and test-*.parquet files")
    clients: int = option(10, DATA, "number of clients, m")
    classes_per_client: int | None = option(None, DATA, "p classes per client, equal counts", "2")
    dirichlet: float | None = option(None, DATA, "instead: class shares drawn from Dirichlet(alpha)")
    iid: bool = option(False, DATA, "instead: every client gets a random share")

    model: str = option(
        "cnn", MODEL, "cnn, resnet18, resnet18_gn, mlp, linear, or module:factory of your own"
    )

    local_steps: str | None = option(
        None, LOCAL, "K: 10, or 5..50 drawn per client and round, or 3,5,8 per client", "10"
    )
    local_epochs: int | None = option(None, LOCAL, "instead: passes over the client's data")
    deadline: float | None = option(None, LOCAL, "instead: seconds; K_i is what the client manages")
    batch_size: int = option(20, LOCAL, "samples of one local step")
    eta_local: float = option(0.1, LOCAL, "local learning rate")
    schedule: str = option(
        "constant", LOCAL,
        "constant, decaying(a=1), or a corollary's rates: corollary1, corollary2(a=1), corollary3",
    )  # fmt: skip
    smoothness: float | None = option(
        None, LOCAL, "the constant L: for the corollaries and the rate conditions"
    )
    local_optimiser: str = option(
        "sgd", LOCAL, "sgd(momentum=0.9), clip(1.0) >> adamw(0.1), prox(0.01) >> sgd; see `cfedavg parts`"
    )

    rounds: int = option(20, ROUND, "communication rounds, T")
    participation: float = option(1.0, ROUND, "share of the clients sampled each round")
    drop_rate: float = option(0.0, ROUND, "share of replies lost; their update goes back into the residual")
    update: str = option(
        "auto", ROUND, "sum: g = x_K - x; mean: g = (x_K - x)/K_i; auto: sum if all K are equal"
    )
    server_optimiser: str = option(
        "sgd", ROUND, "sgd, momentum(0.9), nesterov, adam, adagrad or yogi; see `cfedavg parts`"
    )
    eta: float | None = option(
        None, ROUND, "global learning rate", "that of the server optimiser; sgd: 1, or the mean K with mean"
    )
    weighting: str = option("uniform", ROUND, "how replies are averaged: uniform, or by samples")
    sample_iterate: bool = option(
        False, ROUND, "keep the iterate z of Theorem 2, drawn in proportion to eta_local"
    )

    compressor: str = option("topk(0.99) >> bf16", SENT, "selector >> quantiser; see `cfedavg compressors`")
    feedback: str = option(
        "ef", SENT, "what is remembered of what could not be sent: ef, ef(decay=0.95), ef21 or none"
    )

    steps_per_second: str | None = option(None, LINK, "speed of a client: 20, or 5..50, or 3,5,8 per client")
    uplink: str | None = option(None, LINK, "bit/s from a client: 1e6, or 1e5..1e7, or one per client")
    downlink: str | None = option(None, LINK, "bit/s to a client, likewise")
    latency: str | None = option(None, LINK, "seconds one way, likewise")

    seed: int = option(0, RUN, "decides every random draw")
    device: str = option("auto", RUN, "auto, cpu, cuda, cuda:1, ...")
    engine: str = option(
        "auto", RUN, "who runs the clients: auto, batched (many at once), sequential, or reference"
    )
    workers: int = option(0, RUN, "processes that share the clients; 0: one per core where it pays")
    precision: str = option(
        "float32", RUN, "of the local steps: float32, float64, or bf16 or tf32 products on a GPU"
    )
    residuals: str = option("auto", RUN, "auto, memory, or disk: where the clients' residuals live")
    residual_precision: str = option(
        "full", RUN, "full: as the model; bf16: half the memory, rounded at random"
    )
    eval_every: int = option(1, RUN, "rounds between evaluations on the test set")
    checkpoint_every: int = option(10, RUN, "rounds between checkpoints; 0: only at the end and on Ctrl-C")

    def __post_init__(self) -> None:
        for name, kind in kinds().items():
            object.__setattr__(self, name, _typed(name, getattr(self, name), kind))
        self._check_exclusive()
        self._check_numbers()
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise InputError(
                    f"{flag(name)} is {getattr(self, name)!r}: it must be {' or '.join(choices)}"
                )
        for name in PER_CLIENT:
            self.per_client(name)

    def _check_exclusive(self) -> None:
        for group in EXCLUSIVE:
            given = [name for name in group if getattr(self, name) not in (None, False)]
            if len(given) > 1:
                raise InputError(f"{' and '.join(map(flag, given))} exclude each other: give one")
            if not given:
                object.__setattr__(self, group[0], _DEFAULTS[group[0]])

    def _check_numbers(self) -> None:
        for name, (low, high, words) in _BOUNDS.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise InputError(f"{flag(name)} is {value}: it must be {words}")

    def per_client(self, name: str) -> Range | None:
        """The value of a field that may differ between clients, parsed."""
        text = getattr(self, name)
        if text is None:
            return None
        values = Range.parse(text, flag(name), whole=name == "local_steps")
        low = {"local_steps": 1.0, "latency": 0.0}.get(name, math.ulp(0.0))
        if values.low < low:
            least = (
                "K must be 1 or more"
                if name == "local_steps"
                else f"it must be {'0 or more' if low == 0 else 'above 0'}"
            )
            raise InputError(f"{flag(name)} is {text!r}: {least}")
        return values

    @property
    def is_named(self) -> bool:
        """Whether it names model and data; in place of those from Python or an app stands a remark."""
        return not self.dataset.startswith("(")

    @property
    def names_code(self) -> bool:
        """Whether a field names a `module:Class`, which a run would import."""
        return any(_names_code(getattr(self, name)) for name in PARTS)

    def says(self, name: str) -> bool:
        """Whether a field says something of the run: of a Flower app, only what its server decides.

        Of a task from Python, not how data would have been dealt out.
        """
        if self.dataset.startswith(OWN):
            return name not in _NOT_OF_OWN
        if self.dataset != APP or name in _OF_APP:
            return True
        return self.model == APP and name in _OF_APP_ALONE

    def for_task(self, name: str, model: str, prints: tuple[str, str], clients: int) -> Config:
        """The same for a task from Python: names and fingerprints of its model and data stand in it.

        >>> Config(iid=True).for_task("digits", "Net", ("3fa9", "77fe"), 8).dataset
        '(a task from Python: digits, 77fe)'
        """
        of_model, of_data = prints
        changes: dict[str, Any] = {
            item.name: item.default for item in dataclasses.fields(self) if item.name in _NOT_OF_OWN
        }
        changes["dataset"] = f"{OWN}: {name}, {of_data})"
        changes["model"] = f"{OWN}: {model}, {of_model})"
        return dataclasses.replace(self, **changes, clients=clients)

    def replace(self, **changes: Any) -> Config:
        """A copy with other values; giving one of an exclusive group takes the others back."""
        for group in EXCLUSIVE:
            if any(changes.get(name) not in (None, False) for name in group):
                changes = {name: None if name != "iid" else False for name in group} | changes
        return dataclasses.replace(self, **changes)

    def to_toml(self) -> str:
        """All that it says, with help as comments; `from_toml` reads it back to an equal Config."""
        lines: list[str] = []
        group = ""
        for item in dataclasses.fields(self):
            if not self.says(item.name):
                continue
            if item.metadata["group"] != group:
                group = item.metadata["group"]
                lines += ["", f"# {group}"]
            value = getattr(self, item.name)
            text = f"{item.name} = {toml_value(value)}" if value is not None else f"# {item.name} ="
            lines.append(f"{text:<40} # {item.metadata['help']}")
        return "\n".join(lines).lstrip() + "\n"

    @classmethod
    def from_toml(cls, text: str, where: str = "the configuration", *, trust: bool = False) -> Config:
        """Read a TOML text. Without `trust`, it may not name a `module:Class`, which a run would import."""
        return cls.from_dict(parse_toml(text, where), where, trust=trust)

    @classmethod
    def from_dict(
        cls, table: Mapping[str, Any], where: str = "the configuration", *, trust: bool = False
    ) -> Config:
        """Make a Config of its fields' values. `trust` is as in `from_toml`."""
        known = {item.name for item in dataclasses.fields(cls)}
        for name in table:
            if name in _RETIRED:
                raise InputError(f"{where}: {name} is no longer an option; write {_RETIRED[name](table)}")
            if name not in known:
                raise InputError(f"{where} has an unknown key {name!r}; known are {', '.join(sorted(known))}")
        if not trust:
            refuse_code(table, where, "pass trust=True if you trust it")
        return cls(**table)


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """Read a TOML text; one sentence says what is wrong."""
    try:
        return tomllib.loads(text)
    except ValueError as error:  # TOMLDecodeError is one; a number of thousands of digits another
        raise InputError(f"{where} is not valid TOML: {error}") from None
    except RecursionError:
        raise InputError(f"{where} is not valid TOML: brackets within brackets, too deep") from None


def _written_feedback(table: Mapping[str, Any]) -> str:
    return f'feedback = "{_feedback(table)}"'


def _written_optimiser(table: Mapping[str, Any]) -> str:
    return f'local_optimiser = "{_local_optimiser(table)}"'


def _feedback(table: Mapping[str, Any]) -> str:
    return "ef" if table.get("error_feedback", True) else "none"


def _local_optimiser(table: Mapping[str, Any]) -> str:
    given = [f"{name}={table[name]}" for name in ("momentum", "weight_decay") if table.get(name)]
    return f"sgd({', '.join(given)})" if given else "sgd"


# The options of version 0.5 that are others now, and what to write instead.
_RETIRED = {
    "error_feedback": _written_feedback,
    "momentum": _written_optimiser,
    "weight_decay": _written_optimiser,
}


def renewed(table: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a run that version 0.5 made, by their names of now.

    >>> renewed({"rounds": 5, "error_feedback": False, "momentum": 0.0})
    {'rounds': 5, 'local_optimiser': 'sgd', 'server_optimiser': 'sgd', 'feedback': 'none'}
    """
    if not _RETIRED.keys() & table.keys():
        return dict(table)
    kept = {name: value for name, value in table.items() if name not in _RETIRED}
    parts = {
        "local_optimiser": _local_optimiser(table),
        "server_optimiser": "sgd",
        "feedback": _feedback(table),
    }
    return kept | parts


def refuse_code(table: Mapping[str, Any], where: str, remedy: str) -> None:
    """Refuse fields that name a `module:Class`: a run would import the module, whoever wrote it."""
    for name in PARTS:
        if _names_code(text := str(table.get(name))):
            raise InputError(f"{where}: {flag(name)} {text[:80]!r} would import Python code; {remedy}")


def _names_code(text: str) -> bool:
    """Whether a part's text names a module; the remark of a task or an app is in brackets and names none."""
    return ":" in text and not text.startswith((f"{OWN}: ", APP[:-1]))


@cache
def kinds() -> dict[str, Any]:
    """The type of every field."""
    return get_type_hints(Config)


def read_config(path: Path, *, written: bool = True) -> Config:
    """The configuration in a TOML file. To read it runs nothing; see `refuse_code` before it is run.

    A file that a run has `written` may be of version 0.5; in one of the user's, old names are refused.
    """
    try:
        text = read_file(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--config: cannot read {path} ({getattr(error, 'strerror', error)})") from None
    try:
        table = parse_toml(text, str(path))
        return Config.from_dict(renewed(table) if written else table, str(path), trust=True)
    except InputError as error:
        raise InputError(str(error) if str(path) in str(error) else f"{path}: {error}") from None


def flag(name: str) -> str:
    """The option of a field.

    >>> flag("eta_local")
    '--eta-local'
    """
    return "--" + name.replace("_", "-")


_DEFAULTS: dict[str, Any] = {"classes_per_client": 2, "local_steps": "10"}
_CHOICES = {
    "update": ("auto", "sum", "mean"),
    "weighting": ("uniform", "samples"),
    "engine": ("auto", "batched", "sequential", "reference"),
    "precision": ("float32", "float64", "tf32", "bf16"),
    "residuals": ("auto", "memory", "disk"),
    "residual_precision": ("full", "bf16"),
}
_LARGE = sys.float_info.max
_TINY = math.ulp(0.0)
_BOUNDS: dict[str, tuple[float, float, str]] = {
    "clients": (1, _LARGE, "1 or more"),
    "classes_per_client": (1, _LARGE, "1 or more"),
    "dirichlet": (_TINY, _LARGE, "a finite number above 0"),
    "local_epochs": (1, _LARGE, "1 or more"),
    "deadline": (_TINY, _LARGE, "a finite number of seconds above 0"),
    "batch_size": (1, _LARGE, "1 or more"),
    "eta_local": (_TINY, _LARGE, "a finite number above 0"),
    "smoothness": (_TINY, _LARGE, "a finite number above 0"),
    "rounds": (1, _LARGE, "1 or more"),
    "participation": (_TINY, 1, "in (0, 1]"),
    "drop_rate": (0, 1 - 2**-53, "in [0, 1)"),
    "eta": (_TINY, _LARGE, "a finite number above 0"),
    "seed": (0, 2**63 - 1, "a whole number from 0 to 2^63 - 1"),
    "workers": (0, 1024, "from 0 to 1024"),
    "eval_every": (1, _LARGE, "1 or more"),
    "checkpoint_every": (0, _LARGE, "0 or more"),
}


def _typed(name: str, value: Any, kind: Any) -> Any:
    """The value as the field's type: a whole number may stand for a float, and a number for a Range."""
    kinds = set(kind.__args__) if hasattr(kind, "__args__") else {kind}
    if value is None and type(None) in kinds:
        return None
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if float in kinds and number:
        value = _as_float(value)
    if name in PER_CLIENT and number:
        value = str(value)
    if isinstance(value, str) and not value.isprintable():
        raise InputError(f"{flag(name)} holds characters that cannot be printed: {value!r}")
    if type(value) not in kinds:
        wanted = " or ".join(words for k, words in _WORDS.items() if k in kinds)
        raise InputError(f"{flag(name)} is {value!r}: it must be {wanted}")
    return value


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # a whole number of hundreds of digits
        return math.inf if value > 0 else -math.inf


_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def toml_value(value: Any) -> str:
    """A number, text or truth as TOML writes it."""
    return repr(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)
