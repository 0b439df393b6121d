"""Every field of Config: its bounds and choices hold, and errors name it as a field or as an option."""

from __future__ import annotations

import math
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import cfedavg as package
from cfedavg import Config, InputError, run
from cfedavg.cli.console import flag, list_options, name_options
from cfedavg.core.config import EXCLUSIVE, FIELD_TYPES, OPTIONS, PARTS, PER_CLIENT, read_config, renew
from tests.conftest import Command, blobs

SOURCE = Path(package.__file__).parent

# Real command lines, which are right to have options: file, option.
COMMAND_LINES = {
    ("launch/services.py", "--port"),  # Flower's own commands
    ("launch/services.py", "--format"),
    ("report/page.py", "--config"),  # the page says how to run again
    ("report/page.py", "--engine"),
}


def outside(name: str) -> list[float]:
    """Return values on the wrong side of each bound, and the bound itself where it is excluded."""
    known = OPTIONS[name]
    values = [known.low - 1, known.above, known.high + 1, known.below]
    return [value for value in values if math.isfinite(value)]


def inside(name: str) -> list[float]:
    known = OPTIONS[name]
    values = [known.low, known.above + 0.5, known.high, known.below - 0.5]
    return [value for value in values if math.isfinite(value)]


def typed(name: str, value: float) -> Any:
    """Return the value as a user would write it in Python."""
    return str(value) if name in PER_CLIENT else value


NUMBERS = [
    name for name, kind in FIELD_TYPES.items() if {int, float} & {kind, *getattr(kind, "__args__", ())}
]
OUTSIDE = [(name, value) for name in (*NUMBERS, *PER_CLIENT) for value in outside(name)]
CHOICES = [name for name, known in OPTIONS.items() if known.choices]


def test_every_number_has_bounds() -> None:
    assert {name for name, _ in OUTSIDE} == {*NUMBERS, *PER_CLIENT}


@pytest.mark.parametrize(("name", "value"), OUTSIDE)
def test_a_number_out_of_bounds_is_refused(name: str, value: float, cfedavg: Command, tmp_path: Path) -> None:
    words = f"must be {OPTIONS[name].rule}, got {value}"
    with pytest.raises(InputError, match=f"^{re.escape(f'`{name}` {words}')}$"):
        Config(**{name: typed(name, value)})
    (tmp_path / "c.toml").write_text(f"{name} = {value}")
    with pytest.raises(InputError, match=f"c.toml: {re.escape(f'`{name}` {words}')}$"):
        read_config(tmp_path / "c.toml")
    outcome = cfedavg("run", f"{flag(name)}={value}", "--out", tmp_path / "run")
    assert (outcome.code, outcome.err) == (2, f"error: {flag(name)} {words}")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", [*NUMBERS, *PER_CLIENT])
def test_a_number_within_bounds_is_taken(name: str) -> None:
    for value in inside(name):
        assert type(value)(getattr(Config(**{name: typed(name, value)}), name)) == value
    for value in (math.nan, math.inf, -math.inf):
        with pytest.raises(InputError, match=f"^`{name}` must "):
            Config(**{name: typed(name, value)})


def test_a_number_of_any_length_is_refused_in_one_sentence() -> None:
    with pytest.raises(
        InputError, match=r"^`clients` must be a finite number below 1.8e308, got a larger number$"
    ):
        Config(clients=10**5000)


@pytest.mark.parametrize("name", CHOICES)
def test_choices_are_all_there_is(name: str, cfedavg: Command, tmp_path: Path) -> None:
    for choice in OPTIONS[name].choices:
        assert getattr(Config(**{name: choice}), name) == choice
    words = f"must be {OPTIONS[name].rule}, got 'other'"
    with pytest.raises(InputError, match=f"^`{name}` {words}$"):
        Config(**{name: "other"})  # type: ignore[arg-type]
    outcome = cfedavg("run", flag(name), "other", "--out", tmp_path / "run")
    assert (outcome.code, outcome.err) == (2, f"error: {flag(name)} {words}")


@pytest.mark.parametrize("name", OPTIONS)
def test_another_type_is_refused(name: str, cfedavg: Command, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"^`{name}` must be .*, got \[1\]$"):
        Config(**{name: [1]})  # type: ignore[arg-type]
    (tmp_path / "c.toml").write_text(f"{name} = [1]")
    refused = cfedavg("run", "--config", tmp_path / "c.toml", "--out", tmp_path / "run")
    assert refused.code == 2
    assert re.fullmatch(rf"error: .*c\.toml: {flag(name)} must be .*, got \[1\]", refused.err)


@pytest.mark.parametrize("group", EXCLUSIVE)
def test_one_of_an_exclusive_group_has_a_value(group: tuple[str, ...]) -> None:
    default, first = Config(), group[0]
    assert getattr(default, first) == OPTIONS[first].otherwise is not None
    assert all(getattr(default, name) in (None, False) for name in group[1:])
    assert all(OPTIONS[name].otherwise is None for name in group[1:])


def test_parts_are_texts() -> None:
    assert {FIELD_TYPES[name] for name in PARTS} == {str, str | None}
    assert {FIELD_TYPES[name] for name in PER_CLIENT} == {str | None}


def test_the_command_names_options() -> None:
    assert {
        *OPTIONS,
        "out",
        "resume",
        "messages",
        "config",
        "nodes",
        "track",
        "vary",
    } <= list_options().keys()
    assert name_options("`resume` needs `out`") == "--resume needs --out"
    for text in ("row 3 has no `round`", "try `cfedavg run --resume`", "eta_local is 3", "`a` `b"):
        assert name_options(text) == text


def test_the_library_names_fields() -> None:
    """Errors in Python name fields; only the command names options."""
    option = re.compile(
        rf"(?<![\w-])(?:{'|'.join(sorted(list_options().values(), key=len, reverse=True))})(?![\w-])"
    )
    found = {
        (str(path.relative_to(SOURCE)), text)
        for path in SOURCE.rglob("*.py")
        if path.relative_to(SOURCE).parts[0] != "cli"
        for text in option.findall(path.read_text())
    }
    assert found == COMMAND_LINES


def test_a_file_is_named_whatever_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c").write_text("clients = 0")  # the sentence has a c too
    with pytest.raises(InputError, match=r"^c: `clients` must be 1 or more, got 0$"):
        read_config(Path("c"))


# --- options of before ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "write"),
    [
        ("error_feedback = true", 'feedback = "ef"'),
        ("error_feedback = false", 'feedback = "none"'),
        ("momentum = 0.9\nweight_decay = 0.01", 'local_optimiser = "sgd(momentum=0.9, weight_decay=0.01)"'),
        ("weight_decay = 0.0", 'local_optimiser = "sgd"'),
        ('uplink = "1e5..1e6"\nlatency = 0.25', 'link = "up=100000.0bit..1000000.0bit, rtt=0.5s"'),
        ('downlink = "8,9"', 'link = "1x down=8.0bit; 1x down=9.0bit"'),
    ],
)
def test_an_option_of_before_says_what_to_write(
    line: str, write: str, cfedavg: Command, tmp_path: Path
) -> None:
    (file := tmp_path / "old.toml").write_text(f"rounds = 2\n{line}\n")
    found = cfedavg("run", "--config", file, "--out", tmp_path / "r")
    assert found.code == 2
    assert f"old.toml: {line.split()[0]} is no longer an option; write {write}" in found.err
    assert not (tmp_path / "r").exists()
    assert str(renew(tomllib.loads(line))[write.split()[0]]) == write.split('"')[1]


def test_a_run_of_before_goes_on(tmp_path: Path) -> None:
    """A run of version 0.5 resumes: the old option names in its config.toml are translated."""
    config = Config(rounds=2, local_optimiser="sgd(momentum=0.9)", feedback="none", checkpoint_every=1)
    run(config, blobs(), out=tmp_path)
    text = (tmp_path / "config.toml").read_text()
    kept = [
        line for line in text.splitlines() if not line.startswith(("local_opt", "server_opt", "feedback"))
    ]
    old = "momentum = 0.9\nweight_decay = 0.0\nerror_feedback = false\n"
    (tmp_path / "config.toml").write_text("\n".join(kept) + "\n" + old)
    assert read_config(tmp_path / "config.toml").feedback == "none"
    assert len(run(config.replace(rounds=3), blobs(), out=tmp_path, resume=True).rows) == 3
    with pytest.raises(InputError, match="`feedback` is 'ef', but the run in"):
        run(config.replace(rounds=4, feedback="ef"), blobs(), out=tmp_path, resume=True)
