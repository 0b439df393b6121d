"""Config: the configuration of a run. Its fields are the command's options and the keys of a TOML file.

Each field has an Option, which holds its help, its bounds, and which kinds of run use or may change it.
"""

# ruff: noqa: RUF009 - option() returns a field of a dataclass, which ruff cannot see behind our types

from __future__ import annotations

import dataclasses
import json
import math
import sys
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_type_hints

from cfedavg.core.errors import InputError, show
from cfedavg.core.files import read_input
from cfedavg.core.links import parse_links, renew_links
from cfedavg.core.names import QUOTE, advise
from cfedavg.core.parts import Range
from cfedavg.core.values import ClientValues, ModelText, OptionalPartText, OptionalPathText, PartText, convert

DATA, MODEL, LOCAL, ROUND, SENT, LINK, RUN = (
    "Data", "Model", "Local work", "Rounds", "What is sent", "Simulated time", "Run",
)  # fmt: skip

# The default for both directions: 3% of the numbers, at least 10,000, in 3 bits each; see docs/benchmarks.md.
BOTH_WAYS = "topk(0.97, least=10000) >> int3(256)"
APP = "(a Flower app)"  # the value of `model` and `dataset` if a Flower app defines them
OWN = "(a task from Python"  # how the value of `model` and `dataset` begins if a Task object defines them


@dataclass(frozen=True)
class Option:
    """The description of a field of Config: its help, its bounds or choices, and which kinds of run use it.

    >>> Option("Local work", "local learning rate", above=0).check("eta_local", -3)
    Traceback (most recent call last):
    cfedavg.core.errors.InputError: `eta_local` must be above 0, got -3
    """

    group: str  # the heading of the field in a configuration file and in the help
    help: str
    _: KW_ONLY
    shown: str = ""  # the default in words, if the default is None
    low: float = -math.inf
    above: float = -math.inf
    high: float = math.inf
    below: float = math.inf
    bounds: str = ""  # the bounds in words, if the words made from the numbers would read badly
    choices: tuple[str, ...] = ()
    may_change: bool = False  # whether a resumed run may have another value
    federated: bool = True  # whether a federation of real clients uses the field
    # When the server of a Flower app decides the field: never (""), if no inner strategy averages ("alone"),
    # or "always".
    server: Literal["", "alone", "always"] = ""
    in_task: bool = False  # whether a Task object decides the field
    per_client: bool = False  # whether the value is a text for Range; the bounds then hold for its numbers
    integer: bool = False  # whether the numbers of a Range must be integers
    is_part: bool = False  # whether the value is a text that may name a module:Class
    exclusive: str = ""  # the name of a group of fields of which at most one may be given
    otherwise: Any = None  # the value if no field of the group is given

    def check(self, name: str, value: Any) -> None:
        """Raise InputError if `value` is out of bounds or not one of the choices; `name` is the field."""
        is_number = isinstance(value, int | float)
        if is_number and not abs(value) <= sys.float_info.max:
            # An integer may have thousands of digits: do not print it.
            got = repr(value) if isinstance(value, float) else "a larger number"
            raise InputError(f"`{name}` must be a finite number below 1.8e308, got {got}")
        if self.choices:
            holds = value is None or value in self.choices
        else:
            holds = not is_number or (self.low <= value <= self.high and self.above < value < self.below)
        if not holds:
            raise InputError(f"`{name}` must be {self.rule}, got {repr(value).removesuffix('.0')}")

    @property
    def rule(self) -> str:
        """The bounds or the choices in words.

        >>> Option("Rounds", "share of replies lost", low=0, below=1).rule
        '0 or more and below 1'
        """
        if self.choices:
            return f"{', '.join(self.choices[:-1])} or {self.choices[-1]}"
        if self.bounds:
            return self.bounds
        if math.isfinite(self.low) and math.isfinite(self.high):
            return f"from {self.low} to {self.high}"
        bounds = self.low, self.above, self.high, self.below
        words = zip(("{} or more", "above {}", "at most {}", "below {}"), bounds, strict=True)
        return " and ".join(text.format(bound) for text, bound in words if math.isfinite(bound))


def option(default: Any, group: str, help: str, **known: Any) -> Any:
    """Return a dataclass field with a default value; the other arguments make its Option."""
    return field(default=default, metadata={"option": Option(group, help, **known)})


@dataclass(frozen=True, kw_only=True)
class Config:
    """The configuration of a run: everything that decides its result.

    >>> Config(clients=10, rounds=5).compressor
    'topk(0.97, least=10000) >> int3(256)'
    """

    dataset: str = option(
        "embedded", DATA,
        "embedded, mnist, fashion_mnist, cifar10, or owner/name@revision of the Hugging Face hub",
        server="always",
    )  # fmt: skip
    data_dir: OptionalPathText = option(
        None, DATA, "read images, texts or a table from this folder or file, not from the hub",
        may_change=True, in_task=True,
    )  # fmt: skip
    text_column: str | None = option(
        None, DATA, "column of texts, to train on next characters", shown="a column named text", in_task=True,
    )  # fmt: skip
    label_column: str | None = option(
        None, DATA, "column to predict", shown="a column named label, labels, target, class or y",
        in_task=True,
    )  # fmt: skip
    # None, so that the settings of runs without text are those of older versions
    sequence_length: int | None = option(
        None, DATA, "characters or bytes of one sample of a text", shown="80", low=1, in_task=True
    )
    tokens: str | None = option(
        None, DATA, "what a text is cut into: characters of the training texts, or bytes",
        shown="characters", choices=("characters", "bytes"), in_task=True,
    )  # fmt: skip
    clients: int = option(
        10, DATA, "number of clients, m", low=1, server="always",
        federated=False,  # a federation has one client per node
    )  # fmt: skip
    classes_per_client: int | None = option(
        None, DATA, "p classes per client, equally many samples of each", low=1, in_task=True,
        exclusive="partition", otherwise=2,
    )  # fmt: skip
    dirichlet: float | None = option(
        None, DATA, "instead: class shares drawn from Dirichlet(alpha)", above=0, in_task=True,
        exclusive="partition",
    )  # fmt: skip
    iid: bool = option(
        False, DATA, "instead: a random share for every client", in_task=True, exclusive="partition"
    )
    partition: OptionalPartText = option(
        None, DATA,
        "instead, a split of the literature: niid_dirichlet(0.5), flower_dirichlet(0.5), niid_quantity(0.5), "
        "niid_classes(2)",
        is_part=True, in_task=True, exclusive="partition",
    )  # fmt: skip
    client_column: str | None = option(
        None, DATA, "instead: one client for each value of this column, or of columns a,b; sets the clients",
        in_task=True, exclusive="partition",
        federated=False,  # the number of nodes sets the clients of a federation
    )  # fmt: skip

    model: ModelText = option(
        "cnn", MODEL,
        "cnn, lenet, resnet18, resnet18_gn, mlp, linear; of a text char_lstm, char_lstm_small, gpt, "
        "gpt_small; or module:factory of your own",
        is_part=True, server="always",
    )  # fmt: skip

    local_steps: ClientValues = option(
        None, LOCAL, "K: 10, or 5..50 drawn per client and round, or 3,5,8 per client",
        per_client=True, integer=True, low=1, exclusive="local work", otherwise="10",
    )  # fmt: skip
    local_epochs: int | None = option(
        None, LOCAL, "instead: passes over the client's data", low=1, exclusive="local work"
    )
    deadline: float | None = option(
        None, LOCAL, "instead: as many steps as fit in this many seconds", above=0, exclusive="local work"
    )
    batch_size: int = option(20, LOCAL, "samples of one local step", low=1)
    eta_local: float = option(0.1, LOCAL, "local learning rate", above=0)
    schedule: PartText = option(
        "constant", LOCAL,
        "constant, decaying(a=1), or the CFedAvg paper's: corollary1, corollary2(a=1), corollary3",
        is_part=True,
    )  # fmt: skip
    smoothness: float | None = option(
        None, LOCAL, "the loss's smoothness L: for corollary1 to 3, and to check the paper's rate conditions",
        above=0,
    )  # fmt: skip
    local_optimiser: PartText = option(
        "sgd", LOCAL,
        "sgd(momentum=0.9), or clip(1.0) >> adamw(0.1), or prox(0.01) >> sgd, ...; see `cfedavg parts`",
        is_part=True,
    )  # fmt: skip

    rounds: int = option(20, ROUND, "communication rounds, T", low=1, may_change=True, server="always")
    participation: float = option(
        1.0, ROUND, "share of the clients sampled each round", above=0, high=1, server="alone"
    )
    drop_rate: float = option(
        0.0, ROUND, "share of replies lost; with feedback their updates go back into the residual",
        low=0, below=1, federated=False,
    )  # fmt: skip
    update: str = option(
        "auto", ROUND,
        "sum: g = x_K - x; mean: g = (x_K - x)/K_i; fednova: (x_K - x)/length of the steps; auto: sum if all "
        "K_i are equal, else mean",
        choices=("auto", "sum", "mean", "fednova"), server="always",
    )  # fmt: skip
    server_optimiser: PartText = option(
        "sgd", ROUND, "sgd, momentum(0.9), nesterov, adam, adagrad or yogi; see `cfedavg parts`",
        is_part=True, server="alone",
    )  # fmt: skip
    eta: float | None = option(
        None, ROUND, "global learning rate", above=0, server="alone",
        shown="the server optimiser's; sgd: 1, or the mean K if update is mean",
    )  # fmt: skip
    weighting: str = option(
        "uniform", ROUND, "weights of the replies in the mean: uniform, or samples",
        choices=("uniform", "samples"), server="alone",
    )  # fmt: skip
    sample_iterate: bool = option(
        False, ROUND,
        "keep z of the paper's Theorem 2: the model of a random round, drawn with weight eta_local",
        federated=False,
    )  # fmt: skip

    compressor: PartText = option(
        BOTH_WAYS, SENT,
        "compressor of the updates: selector >> quantiser; topk(0.97) leaves out 97%; see `cfedavg parts`",
        is_part=True, server="always",
    )  # fmt: skip
    compressor_down: PartText = option(
        BOTH_WAYS, SENT, "compressor of the broadcast; none sends the whole model in every round",
        is_part=True, server="always",
    )  # fmt: skip
    feedback: PartText = option(
        "ef", SENT, "error feedback, which remembers what was not sent: ef, sapef(0.5), ef21, cafe, none",
        is_part=True, server="always",
    )  # fmt: skip
    guard: str = option(
        "warn", SENT,
        "if residuals grow too large: warn says so; adapt also doubles what is sent, until they are bounded",
        choices=("off", "warn", "adapt"), server="always",
    )  # fmt: skip

    steps_per_second: ClientValues = option(
        None, LINK, "speed of a client: 20, or 5..50, or 3,5,8 per client",
        per_client=True, above=0, federated=False,
    )  # fmt: skip
    link: str | None = option(
        None, LINK,
        "the clients' links: nb-iot, 3g, 4g, dsl, datacentre, or up=5Mbit, down=20Mbit, rtt=50ms, "
        "or classes: 70% 4g; 30% dsl",
        federated=False,
    )  # fmt: skip

    seed: int = option(
        0, RUN, "seed of every random draw", low=0, high=2**63 - 1, bounds="from 0 to 2^63 - 1",
        server="always",
    )  # fmt: skip
    device: str = option("auto", RUN, "auto, cpu, cuda, cuda:1, ...", may_change=True, federated=False)
    engine: str = option(
        "auto", RUN, "how clients are run: auto, batched (many at once), sequential, or reference",
        choices=("auto", "batched", "sequential", "reference"), federated=False,
    )  # fmt: skip
    workers: int = option(
        0, RUN, "processes that share the clients; 0: one per core if that is faster", low=0, high=1024,
        may_change=True, federated=False,
    )  # fmt: skip
    precision: str = option(
        "float32", RUN,
        "precision of local steps: float32, float64; bf16, tf32 (GPU): in matrix products only",
        choices=("float32", "float64", "tf32", "bf16"), federated=False,
    )  # fmt: skip
    residuals: str = option(
        "auto", RUN, "where residuals are kept: auto, device, memory (of the host), or disk",
        choices=("auto", "device", "memory", "disk"), may_change=True, federated=False,
    )  # fmt: skip
    residual_precision: str = option(
        "full", RUN, "full: as the model; bf16: half the memory, with random rounding",
        choices=("full", "bf16"), federated=False,
    )  # fmt: skip
    eval_every: int = option(1, RUN, "rounds between evaluations on the test set", low=1)
    checkpoint_every: int = option(
        10, RUN, "rounds between checkpoints; 0: only at the end or when stopped", low=0, may_change=True,
        federated=False,
    )  # fmt: skip

    if not TYPE_CHECKING:  # type checkers know the names of the fields

        def __new__(cls, *values: object, **fields: object) -> Config:
            """Refuse values without a name and unknown names in one sentence."""
            if values:
                raise InputError(f"Config takes named fields, as in Config(rounds=5), got {show(values[0])}")
            for name in fields.keys() - OPTIONS.keys():
                raise InputError(f"`{name}` is not a field of Config; {advise_field(name)}")
            return super().__new__(cls)

    def __post_init__(self) -> None:
        for name, kind in FIELD_TYPES.items():
            known, kinds = OPTIONS[name], getattr(kind, "__args__", (kind,))
            how = {"is_part": known.is_part, "per_client": known.per_client}
            object.__setattr__(self, name, convert(name, getattr(self, name), kinds, **how))
        for group in EXCLUSIVE:
            given = [f"`{name}`" for name in group if _is_given(getattr(self, name))]
            if len(given) > 1:
                raise InputError(f"{' and '.join(given)} exclude each other; give only one of them")
            if not given:
                object.__setattr__(self, group[0], OPTIONS[group[0]].otherwise)
        if self.link is not None:
            parse_links(self.link)
        for name, known in OPTIONS.items():
            values = self.per_client(name) if known.per_client else None
            for value in (values.low, values.high) if values else (getattr(self, name),):
                known.check(name, value)

    def per_client(self, name: str) -> Range | None:
        """Return the field `name`, which may differ between clients, as a Range; None if it is not given."""
        text = getattr(self, name)
        return None if text is None else Range.parse(text, name, integer=OPTIONS[name].integer)

    @property
    def data_name(self) -> str:
        """The name of the data: `dataset`, or that of the folder or file if `dataset` is not given."""
        unnamed = self.data_dir is not None and self.dataset == Config.dataset
        return Path(str(self.data_dir)).stem if unnamed else self.dataset

    @property
    def names_task(self) -> bool:
        """Whether `model` and `dataset` are names to load, not remarks such as `(a Flower app)`."""
        return not self.dataset.startswith("(")

    @property
    def names_code(self) -> bool:
        """Whether a field names a `module:Class`, which a run would import."""
        return any(_names_code(str(getattr(self, name))) for name in PARTS)

    def uses(self, name: str) -> bool:
        """Return whether the run uses the field `name`.

        A Flower app uses only the fields that its server decides. With a Task object, the run does not use
        the fields that split a data set among clients.
        """
        known = OPTIONS[name]
        if self.dataset.startswith(OWN):
            return not known.in_task
        if self.dataset != APP or known.server == "always":
            return True
        return self.model == APP and known.server == "alone"

    def for_task(self, name: str, model: str, prints: tuple[str, str], clients: int) -> Config:
        """Return the configuration for a Task object: `dataset` and `model` become remarks about the task.

        `prints` holds the fingerprint of the model and that of the data.

        >>> Config(iid=True).for_task("digits", "Net", ("3fa9", "77fe"), 8).dataset
        '(a task from Python: digits, 77fe)'
        """
        of_model, of_data = prints
        changes: dict[str, Any] = {each: getattr(Config, each) for each in fields_where(lambda o: o.in_task)}
        changes |= {"dataset": f"{OWN}: {name}, {of_data})", "model": f"{OWN}: {model}, {of_model})"}
        return dataclasses.replace(self, **changes, clients=clients)

    def with_clients(self, clients: int) -> Config:
        """Return the configuration with the number of clients that `client_column` gives, if it is given."""
        return self if self.client_column is None else dataclasses.replace(self, clients=clients)

    def replace(self, **changes: Any) -> Config:
        """Return a copy of the configuration with the fields in `changes` replaced.

        If fields exclude each other, a value for one of them resets the others.
        """
        for group in EXCLUSIVE:
            if any(_is_given(changes.get(name)) for name in group):
                changes = {name: getattr(Config, name) for name in group} | changes
        return dataclasses.replace(self, **changes)

    def to_toml(self) -> str:
        """Return the fields that the run uses as a TOML text, with the help of each field as a comment."""
        lines, group = list[str](), ""
        for name, known in OPTIONS.items():
            if not self.uses(name):
                continue
            if known.group != group:
                group = known.group
                lines += ["", f"# {group}"]
            value = getattr(self, name)
            text = f"{name} = {toml_value(value)}" if value is not None else f"# {name} ="
            lines.append(f"{text:<40} # {known.help}")
        return "\n".join(lines).lstrip() + "\n"

    @classmethod
    def from_toml(cls, text: str, where: str = "the configuration", *, trust: bool = False) -> Config:
        """Return the configuration in a TOML text; `where` names the text in an error.

        Give `trust=True` if the text may name a `module:Class`, which a run would import.
        """
        return cls.from_dict(parse_toml(text, where), where, trust=trust)

    @classmethod
    def from_dict(
        cls, table: Mapping[str, Any], where: str = "the configuration", *, trust: bool = False
    ) -> Config:
        """Return the configuration with the values in `table`; `where` and `trust` are as in `from_toml`."""
        for name, value in table.items():
            if new := RETIRED.get(name):
                raise InputError(f"{where}: {name} is no longer an option; write {_translate(table, new)}")
            if name not in OPTIONS and isinstance(value, dict):
                raise InputError(f"{where} must have no tables, got [{name}]; write its keys without a table")
            if name not in OPTIONS:
                raise InputError(f"{where} has an unknown key {name!r}; {advise_field(str(name), QUOTE)}")
        if not trust:
            refuse_code(table, where, "pass trust=True if you trust it")
        try:
            return cls(**table)
        except InputError as error:
            raise InputError(f"{where}: {error}") from None


def parse_toml(text: str | bytes, where: str) -> dict[str, Any]:
    """Return a TOML text as a dict; raise InputError, which names the text by `where`, if it is not valid."""
    if not isinstance(text, str | bytes):
        raise InputError(f"{where} must be a text in TOML syntax, got {show(text)}")
    try:
        return tomllib.loads(text if isinstance(text, str) else text.decode("utf-8-sig"))
    except ValueError as error:  # a TOMLDecodeError, or an integer of thousands of digits
        raise InputError(f"{where} is not valid TOML: {error}") from None
    except RecursionError:
        raise InputError(f"{where} is not valid TOML: brackets are nested too deep") from None


FIELD_TYPES: dict[str, Any] = get_type_hints(Config)
OPTIONS: dict[str, Option] = {item.name: item.metadata["option"] for item in dataclasses.fields(Config)}


def advise_field(name: str, mark: str = "`") -> str:
    """Return what to write instead of `name`, which is no field of Config.

    A field's name stands between two `mark`s; the command turns a name between backticks into an option.
    """
    if new := RETIRED.get(name):
        return f"write {mark}{new}{mark}"
    if instead := ARGUMENTS.get(name):
        return f"give {instead}"
    return advise(name, OPTIONS, mark)


def fields_where(holds: Callable[[Option], bool]) -> tuple[str, ...]:
    """Return the names of those fields of Config whose Option satisfies `holds`.

    >>> fields_where(lambda known: known.exclusive == "partition")
    ('classes_per_client', 'dirichlet', 'iid', 'partition', 'client_column')
    """
    return tuple(name for name, known in OPTIONS.items() if holds(known))


PARTS = fields_where(lambda known: known.is_part)
PER_CLIENT = fields_where(lambda known: known.per_client)
# Of each group at most one field may be given; if none is given, the first field gets its value `otherwise`.
EXCLUSIVE = tuple(
    tuple(name for name in OPTIONS if OPTIONS[name].exclusive == group)
    for group in dict.fromkeys(known.exclusive for known in OPTIONS.values() if known.exclusive)
)


def refuse_code(table: Mapping[str, Any], where: str, remedy: str) -> None:
    """Raise InputError if a field in `table` names a `module:Class`, which a run would import.

    `where` names the table in the error; `remedy` says how to allow the import.
    """
    for name in PARTS:
        if _names_code(text := str(table.get(name))):
            raise InputError(f"{where}: `{name}` {text[:80]!r} would import Python code; {remedy}")


def _names_code(text: str) -> bool:
    """Return whether a text names a `module:Class`; a remark such as `(a Flower app)` does not."""
    return ":" in text and not text.startswith((f"{OWN}: ", APP[:-1]))


def _is_given(value: object) -> bool:
    return value is not None and value is not False  # 0 is given


def read_config(path: Path, *, written: bool = True) -> Config:
    """Return the configuration in a TOML file. This imports no code; call `refuse_code` before a run.

    Set `written` if a run wrote the file: the file may then have option names of version 0.5. In a file that
    a user wrote, these old names are refused.
    """
    table = parse_toml(read_input(path), str(path))
    return Config.from_dict(renew(table) if written else table, str(path), trust=True)


def toml_value(value: Any) -> str:
    """Return a number, a text or a boolean in TOML syntax."""
    return repr(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


# What is given to a run beside its configuration.
ARGUMENTS = {name: f"it to run(config, {name}=...)" for name in ("task", "callbacks", "progress", "draw")} | {
    name: f"`{name}` to the run, as in run(config, {name}=...)" for name in ("out", "resume", "messages")
}
ARGUMENTS["track"] = "`track` to the run, as in run(config, callbacks=[...])"

# Options of version 0.5 that no longer exist, and the fields that replace them.
RETIRED = {
    "error_feedback": "feedback", "momentum": "local_optimiser", "weight_decay": "local_optimiser",
    "uplink": "link", "downlink": "link", "latency": "link",
}  # fmt: skip


def _translate(table: Mapping[str, Any], new: str) -> str:
    """Return the line of TOML for the field `new` that says what retired options in `table` said."""
    try:
        return f'{new} = "{renew(table)[new]}"'
    except InputError:  # a value that was no valid one then either
        return f"`{new}`"


def renew(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with today's names; `table` comes from a file of version 0.5 or later.

    >>> renew({"rounds": 5, "error_feedback": False, "momentum": 0.0})
    {'rounds': 5, 'local_optimiser': 'sgd', 'server_optimiser': 'sgd', 'feedback': 'none'}
    >>> renew({"dataset": "mnist", "compressor": "rd(0.9)"})  # this run broadcast the whole model
    {'dataset': 'mnist', 'compressor': 'rd(0.9)', 'compressor_down': 'none'}

    The options of a whole run contain `dataset` and `compressor`. If they lack `compressor_down`, the run did
    not compress its broadcast, and `compressor_down` becomes "none".
    """
    found = {name: value for name, value in table.items() if name not in RETIRED}
    if {"dataset", "compressor"} <= table.keys():
        found.setdefault("compressor_down", "none")
    if link := renew_links(table):
        found["link"] = link
    if not any(RETIRED[name] != "link" for name in RETIRED if name in table):
        return found
    given = [f"{name}={table[name]}" for name in ("momentum", "weight_decay") if table.get(name)]
    return found | {
        "local_optimiser": f"sgd({', '.join(given)})" if given else "sgd",
        "server_optimiser": "sgd",
        "feedback": "ef" if table.get("error_feedback", True) else "none",
    }
