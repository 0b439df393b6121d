"""What a user may write in Python: objects of parts, lists and ranges become the texts of a Config."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cfedavg import (
    BF16,
    SGD,
    Adam,
    Clip,
    Compressor,
    Config,
    Feedback,
    GradientChange,
    InputError,
    IntBlocks,
    LocalOptimiser,
    ServerSGD,
    Steps,
    Task,
    TopK,
    parse,
    resolve_rates,
)
from cfedavg.compress import QUANTISERS, SELECTORS
from cfedavg.core.config import OPTIONS, PARTS
from cfedavg.core.names import OTHER_NAMES, list_arguments
from cfedavg.data.splits import SPLITTERS
from cfedavg.feedback import FEEDBACKS
from cfedavg.models import linear
from cfedavg.optimise.local import LOCAL_OPTIMISERS, parse_local_optimiser
from cfedavg.optimise.server import SERVER_OPTIMISERS
from cfedavg.schedule import SCHEDULES
from cfedavg.simulate.plan import parse_parts
from tests.conftest import blobs
from tests.own_parts import Halve, Lookahead, Lookout, SignDescent

QUIET = settings(max_examples=100, derandomize=True, database=None)
PARSERS: dict[str, Callable[[str], Any]] = {
    "compressor": parse,
    "feedback": FEEDBACKS.parse,
    "local_optimiser": parse_local_optimiser,
    "server_optimiser": SERVER_OPTIMISERS.parse,
    "schedule": SCHEDULES.parse,
    "partition": SPLITTERS.parse,
}


NUMBERS = [0, 1, 2, 5, 256, 0.0, 0.1, 0.3, 0.5, 0.9, 0.99, 1.05, 1e-12, 1e9]


@st.composite
def parts(draw: st.DrawFn, *kinds: Any) -> Any:
    """A part of one of the classes, with some of the arguments that it takes."""
    kind, arguments = draw(st.sampled_from(kinds)), dict[str, Any]()
    for each in fields(kind):
        if each.default is MISSING or draw(st.booleans()):
            values: list[Any] = [False, True]
            if known := each.metadata.get("argument"):
                numbers = [n for n in NUMBERS if type(n) is int or not known["integer"]]
                values = [n for n in numbers if known["holds"](n)]
            arguments[each.name] = draw(st.sampled_from(values))
    try:
        return kind(**arguments)
    except InputError:  # arguments that exclude each other
        return kind(0.5) if kind is TopK else kind()


LOCAL = list(LOCAL_OPTIMISERS.entries.values())
CHANGES = [kind for kind in LOCAL if issubclass(kind, GradientChange)]  # type: ignore[arg-type]
OPTIMISERS = [kind for kind in LOCAL if issubclass(kind, LocalOptimiser)]  # type: ignore[arg-type]
selectors = parts(*SELECTORS.values())
quantisers = parts(IntBlocks, *(kind for kind in QUANTISERS.values() if isinstance(kind, type)))


@QUIET
@given(
    compressor=st.builds(Compressor, selectors, st.none() | quantisers) | selectors | quantisers,
    feedback=parts(*FEEDBACKS.entries.values()),
    local_optimiser=st.builds(lambda change, end: change >> end, parts(*CHANGES), parts(*OPTIMISERS))
    | parts(*OPTIMISERS),
    server_optimiser=parts(*SERVER_OPTIMISERS.entries.values()),
    schedule=parts(*SCHEDULES.entries.values()),
    partition=parts(*SPLITTERS.entries.values()),
)
def test_an_object_becomes_the_text_of_an_equal_object(**objects: Any) -> None:
    config = Config(**objects)
    for name, parser in PARSERS.items():
        made = parser(getattr(config, name))
        assert (
            made == objects[name] or str(made) == f"none >> {objects[name]}" or made.stages == [objects[name]]
        )
    texts = {name: getattr(config, name) for name in objects}
    assert Config(**texts) == Config.from_toml(config.to_toml()) == config.replace(**objects) == config


def test_objects_and_texts_are_one_configuration() -> None:
    objects = Config(
        compressor=TopK(0.99) >> BF16(),
        compressor_down=IntBlocks(3),
        local_optimiser=Clip(1) >> SGD(momentum=0.9),
        server_optimiser=Adam(0.01, beta1=0.5),
        local_steps=10,
    )
    texts = Config(
        compressor="topk(0.99) >> bf16",
        compressor_down="int3(256)",
        local_optimiser="clip(1) >> sgd(momentum=0.9)",
        server_optimiser="adam(beta1=0.5)",
        local_steps="10",
    )
    assert objects == texts
    assert parse_parts(objects)[-1].rate == 0.01


def test_the_rate_of_adam_is_that_of_the_server_unless_eta_is_given() -> None:
    for given_, eta in (({}, 0.02), ({"eta": 0.5}, 0.5)):
        config = Config(server_optimiser=Adam(0.02), **given_)
        assert resolve_rates(config, Steps(config, [10, 10], [1.0, 1.0]), 2).eta == eta


def test_every_kind_of_part_is_tried() -> None:
    assert {*PARSERS, "compressor_down", "model"} == {*PARTS}


@pytest.mark.parametrize(
    ("field", "part", "text"),
    [
        ("feedback", Lookout(share=0.7), "tests.own_parts:Lookout(share=0.7)"),
        ("feedback", Lookout(), "tests.own_parts:Lookout"),
        ("server_optimiser", Lookahead(), "tests.own_parts:Lookahead"),
        ("local_optimiser", Halve() >> SignDescent(), "tests.own_parts:Halve >> tests.own_parts:SignDescent"),
        ("model", linear, "cfedavg.models:linear"),
    ],
)
def test_a_class_of_ones_own_is_named_by_its_module(field: str, part: Any, text: str) -> None:
    config = Config(**{field: part})
    assert getattr(config, field) == text
    assert field == "model" or PARSERS[field](text) == part
    assert Config.from_toml(config.to_toml(), trust=True) == config


@dataclass(frozen=True)
class Named(TopK):
    """A name that is not registered must not hide where the class is."""

    name: ClassVar[str] = "topk"


@dataclass(frozen=True)
class Holds(Feedback):
    what: Any = None


class Plain(Feedback):
    """No dataclass: its text could not hold its arguments."""


def test_a_users_name_does_not_hide_the_class() -> None:
    assert parse(Config(compressor=Named(0.9) >> BF16()).compressor).selector == Named(0.9)


def local() -> Feedback:
    @dataclass(frozen=True)
    class Hidden(Feedback):
        pass

    return Hidden()


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("compressor", TopK, "`compressor` must be an object, got the class TopK; write TopK(...)"),
        (
            "compressor",
            None,
            "`compressor` must be text or an object, such as 'topk(0.99)' or TopK(0.99), got None",
        ),
        (
            "compressor",
            0.99,
            "`compressor` must be text or an object, such as 'topk(0.99)' or TopK(0.99), got 0.99",
        ),
        (
            "feedback",
            TopK(0.9),
            "`feedback` must be another kind of part, got topk(0.9), which is for `compr",
        ),
        ("server_optimiser", SGD(), "`server_optimiser` must be another kind of part, got sgd, which is for"),
        ("local_optimiser", ServerSGD(), "which is for `server_optimiser`"),
        (
            "feedback",
            local(),
            "`feedback`: the class local.<locals>.Hidden cannot be found by its name; define",
        ),
        ("feedback", Plain(), "`feedback`: tests.core.test_values:Plain must be a frozen dataclass"),
        ("feedback", Holds(np.ones(2)), "must be numbers, texts or lists of them, so that a text can make"),
        ("feedback", Holds(float("inf")), "must be numbers, texts or lists of them"),
        ("feedback", Holds("a >> b"), "must be numbers, texts or lists of them"),
        ("feedback", Holds("x" * 2000), "`feedback`"),
        ("model", object(), "write Task(model, clients)"),
        ("model", lambda shape, classes: None, "write Task(model, clients)"),
        ("dataset", blobs(), "`dataset` must be text, got"),
    ],
)
def test_what_no_text_can_express_is_one_sentence(field: str, value: Any, words: str) -> None:
    with pytest.raises(InputError, match=re.escape(words)) as raised:
        Config(**{field: value})
    assert f"`{field}`" in str(raised.value)
    assert len(str(raised.value)) < 300


@QUIET
@given(st.lists(st.floats(1e-9, 1e9), min_size=2, max_size=5) | st.lists(st.integers(1, 10**9), min_size=2))
def test_a_list_has_a_value_for_each_client(values: list[float]) -> None:
    for given_ in (values, tuple(values), np.array(values)):
        config = Config(steps_per_second=given_)
        each = config.per_client("steps_per_second")
        assert each is not None
        assert list(each.each) == values
        assert Config.from_toml(config.to_toml()) == config.replace(steps_per_second=values) == config


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (range(5, 51), "5..50"),
        (range(7, 8), "7"),
        (10, "10"),
        (np.int64(10), "10"),
        ([3, 5, 8], "3,5,8"),
        (list(range(1, 4)), "1,2,3"),
        ("5..50", "5..50"),
    ],
)
def test_a_range_is_drawn_from_and_a_list_is_dealt(value: Any, text: str) -> None:
    assert Config(local_steps=value).local_steps == text
    assert value == text or Config(local_steps=value) == Config(local_steps=text)


@pytest.mark.parametrize(
    "value",
    [[], [3], range(0), range(0, 9, 2), [1, None], [True, 2], ["3", "4"], {3, 4}, np.ones((2, 2)), b"3"],
)
def test_other_values_of_clients_are_refused(value: Any) -> None:
    with pytest.raises(InputError, match=r"^`local_steps` must be ") as raised:
        Config(local_steps=value)
    assert len(str(raised.value)) < 250


def test_a_toml_file_may_have_a_list() -> None:
    config = Config.from_toml("local_steps = [3, 5]\nsteps_per_second = [1e6, 2e6]")
    assert (config.local_steps, config.steps_per_second) == ("3,5", "1000000.0,2000000.0")


def test_numbers_of_numpy_are_numbers() -> None:
    config = Config(rounds=np.int64(3), eta_local=np.float32(0.5), clients=np.uint8(4))  # type: ignore[arg-type]
    assert (config.rounds, type(config.rounds), config.eta_local, config.clients) == (3, int, 0.5, 4)
    for value in (np.float64(2.5), np.ones(1), np.bool_(True)):
        with pytest.raises(InputError, match="`rounds` must be a whole number"):
            Config(rounds=value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("lr", "`lr` is not a field of Config; write `eta_local`"),
        ("epochs", "write `local_epochs`"),
        ("num_clients", "write `clients`"),
        ("roundz", "write `rounds`"),
        ("momentum", "write `local_optimiser`"),
        ("out", "give `out` to the run, as in run(config, out=...)"),
        ("callbacks", "give it to run(config, callbacks=...)"),
        ("track", "give `track` to the run, as in run(config, callbacks=[...])"),
        ("x", "`cfedavg run --help` lists the fields"),
    ],
)
def test_names_that_others_use(name: str, words: str) -> None:
    with pytest.raises(InputError, match=re.escape(words)):
        Config(**{name: 1})
    with pytest.raises(InputError, match=re.escape(words)):
        Config().replace(**{name: 1})
    if name != "momentum":  # a file is told how to translate its value
        advice = words.split("; ")[-1]
        advice = advice.replace("`", "'") if advice.startswith("write") else advice  # a key, not an option
        with pytest.raises(InputError, match=rf"key '{name}'; {re.escape(advice)}"):
            Config.from_toml(f"{name} = 1")


@pytest.mark.parametrize("name", [name for name in PARTS if name != "model"])
def test_a_wrong_object_is_shown_a_right_one(name: str) -> None:
    with pytest.raises(
        InputError, match=rf"^`{name}` must be text or an object, such as '.*' or \w+\("
    ) as raised:
        Config(**{name: 5})
    text = str(raised.value).split("'")[1]
    parse_parts(Config(**{name: text}))


def test_a_dict_in_place_of_fields() -> None:
    with pytest.raises(InputError, match=r"^Config takes named fields, as in Config\(rounds=5\), got {"):
        Config({"rounds": 3})  # type: ignore[misc]


def test_other_names_are_of_fields_and_no_fields() -> None:
    every = [other for others in OTHER_NAMES.values() for other in others]
    arguments = {*list_arguments(Task), *list_arguments(Adam), "min_nodes"}
    assert OTHER_NAMES.keys() <= {*OPTIONS, *arguments, "out", "track", "nodes"}
    assert all(len(set(others)) == len(others) for others in OTHER_NAMES.values())
    assert {*every} & OPTIONS.keys() == {"clients", "eta"}  # of federate up: nodes; of Adam: rate
