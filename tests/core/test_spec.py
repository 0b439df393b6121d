"""The little grammar: calls with plain arguments, and numbers that may differ between clients."""

from __future__ import annotations

import math
import re
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cfedavg.core.errors import InputError
from cfedavg.core.parts import Range, build, load, parse_call

QUIET = settings(max_examples=300, derandomize=True, database=None)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("none", ("none", [], {})),
        ("  none ( ) ", ("none", [], {})),
        ("topk(0.99)", ("topk", [0.99], {})),
        ("topk(0.99, per_tensor=true)", ("topk", [0.99], {"per_tensor": True})),
        ("f(false, -1, 1e-3, 'a, b)', x=None,)", ("f", [False, -1, 1e-3, "a, b)"], {"x": None})),
        ("f(\n  1,\n  y=[2, 3]\n)", ("f", [1], {"y": [2, 3]})),
        ("my.module:Thing(3)", ("my.module:Thing", [3], {})),
        ("_private2", ("_private2", [], {})),
    ],
)
def test_parse_call(text: str, expected: tuple[str, list[Any], dict[str, Any]]) -> None:
    assert parse_call(text, "x") == expected


MALFORMED = [
    "", " ", "2f", "f(", "f)", "f)(", "f(1))", "f((1)", "f 1", "f(1) g", "f-g", "a:b:c", ":f", "f:", "f(,)",
    "f(1 2)", "f(x)", "f(*[1])", "f(**{'a': 1})", "f(a=1, a=2)", "f(a=1, 2)", "f(1)(2)", "f(1).g(2)",
    "f(1)[0](2)", "f(1) + f(2)", "f(__import__('os'))", "f(os.system('true'))", "f(1 if 2 else 3)",
    "f(lambda: 0)", "f(x := 1)", "f(i for i in [1])", "f({[]: 1})", "f(1, # )", "f('a\x00')", "f('\\d)",
    "f(" + "(" * 400 + ")" * 400 + ")", "f(" + "-" * 900 + "1)", "f(" + "-" * 100_000 + "1)", "(" * 100_000,
    "f(10**10**10)", "f('a' * 10**9)", "f(" + "9" * 5000 + ")", "f" + " " * 1_000_000 + "x",
]  # fmt: skip


@pytest.mark.parametrize("text", MALFORMED, ids=lambda text: repr(text[:20]))
def test_malformed_calls_name_the_field(text: str) -> None:
    with pytest.raises(InputError, match="`compressor`"):
        parse_call(text, "compressor")


def test_a_sentence_about_a_long_text_is_short() -> None:
    with pytest.raises(InputError, match=r"at most 1,000 characters, got 1,000,001$") as raised:
        parse_call("f" * 1_000_001, "x")
    assert len(str(raised.value)) < 100


ODD = st.text("f(),.=:'\"[]{}*-x1 \n\\#\x00é\ud800", max_size=20)


@QUIET
@given(ODD | ODD.map(lambda inside: f"f({inside})"))
def test_any_text_is_a_call_or_an_input_error(text: str) -> None:
    try:
        name, _, kwargs = parse_call(text, "x")
    except InputError:
        return
    assert text.strip().startswith(name)
    assert all(word.isidentifier() for word in kwargs)


def fails(error: Exception) -> Any:
    def factory(*_: Any, **__: Any) -> None:
        raise error

    return factory


def test_build_calls_what_the_table_holds() -> None:
    table = {"pair": lambda a, b=0: (a, b)}
    assert build("pair(1, b=2)", table, tuple, "x", trust=False) == (1, 2)
    assert build(" pair(1)", table, tuple, "x", trust=True) == (1, 0)
    assert build("fractions:Fraction(1, 2)", table, Fraction, "x", trust=True) == 0.5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("what(1)", "`x`: unknown name 'what'; there are bad, pair, picky"),
        ("pair()", "`x`: pair() has the wrong arguments ("),
        ("pair(1, 2, 3)", "`x`: pair(1, 2, 3) has the wrong arguments ("),
        ("pair(1, c=2)", "`x`: pair(1, c=2) has the wrong arguments (got an unexpected keyword"),
        (" picky(1) ", "`x`: picky(1): must be 2"),
        ("no_such_module_:Thing", "`x`: cannot import 'no_such_module_' of 'no_such_module_:Thing' ("),
        ("math.:pi", "`x` must be of the form package.module:name, got 'math.:pi'"),
        ("math:tau2(1)", "`x`: the module 'math' ("),
        ("math:pi(1)", "`x`: 'math:pi' must be a subclass of fractions.Fraction"),
        ("fractions:Fraction('x', 'y')", "`x`: fractions:Fraction('x', 'y') has the wrong arguments ("),
    ],
)
def test_build_errors_name_the_field(text: str, message: str) -> None:
    table = {"pair": lambda a, b=0: (a, b), "picky": fails(InputError("must be 2")), "bad": None}
    with pytest.raises(InputError, match=re.escape(message)):
        build(text, table, Fraction, "x", trust=True)


def test_a_bug_in_a_factory_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError):
        build("f", {"f": fails(ZeroDivisionError())}, object, "x", trust=False)


def test_load() -> None:
    assert load("math:pi", "x") == math.pi


# What a text may run

PART = """
import colorsys
calls = []
class Half:
    def __init__(self, *values): calls.append(values)
class Other(Half): pass
def function(*values): calls.append(values)
"""


@pytest.fixture
def part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the current folder that notes every call."""
    name = f"part_in_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(PART)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    return name


@pytest.mark.parametrize(
    "text", ["os:system('false')", "builtins:print(1)", "PART:function(1)", "PART:Half(1)"]
)
def test_only_a_class_of_the_right_kind_is_called(text: str, part: str) -> None:
    other = load(f"{part}:Other", "x")
    with pytest.raises(InputError, match=r"^`x`: '.*' must be a subclass of "):
        build(text.replace("PART", part), {}, other, "x", trust=True)
    build(f"{part}:Other(2)", {}, load(f"{part}:Half", "x"), "x", trust=True)
    assert load(f"{part}:calls", "x") == [(2,)]


def test_a_text_that_is_not_trusted_imports_nothing(part: str) -> None:
    with pytest.raises(InputError, match=f"^`x`: this text may not import a module: '{part}:Half'"):
        build(f"{part}:Half(1)", {"one": int}, object, "x", trust=False)
    assert part not in sys.modules
    assert build(f"{part}:Half(1)", {f"{part}:Half": float}, object, "x", trust=False) == 1.0


def test_the_current_folder_comes_last_and_goes_again(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("colorsys", "cfedavg", "torch"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a planted module ran')")
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    before = list(sys.path)
    assert load(f"{part}:colorsys", "x").rgb_to_hsv(0, 0, 0) == (0, 0, 0)
    assert load("torch:float32", "x") is not None
    assert sys.path == before


@pytest.mark.parametrize(
    ("text", "low", "high", "each", "mean"),
    [
        ("10", 10, 10, (), 10),
        (" 0.5 ", 0.5, 0.5, (), 0.5),
        ("-3", -3, -3, (), -3),
        ("1e3", 1000, 1000, (), 1000),
        ("5..50", 5, 50, (), 27.5),
        ("0.5 .. 1.5", 0.5, 1.5, (), 1),
        ("-2..-1", -2, -1, (), -1.5),
        ("7..7", 7, 7, (), 7),
        ("3,5,10", 3, 10, (3, 5, 10), 6),
        ("5, 3", 3, 5, (5, 3), 4),
        ("4,4", 4, 4, (4, 4), 4),
    ],
)
def test_range(text: str, low: float, high: float, each: tuple[float, ...], mean: float) -> None:
    found = Range.parse(text, "steps")
    assert (found.low, found.high, found.each, found.integer) == (low, high, each, False)
    assert found.mean() == mean


@pytest.mark.parametrize(
    ("text", "integer"),
    [
        (text, False)
        for text in ("", " ", "x", "1..", "..2", "1..2..3", "1,,2", "1,", "1..2,3", "1-2", "0x10", "1 2")
    ]
    + [(text, False) for text in ("nan", "inf", "1..inf", "-inf..1", "1,nan", "1e999", "3..2", "-1..-2")]
    + [(text, True) for text in ("1.5", "1..2.5", "1,2.5", "nan", "inf", "1e999", "x", "")],
)
def test_range_errors_name_the_field(text: str, integer: bool) -> None:
    with pytest.raises(InputError, match=rf"^`steps` must .*, got {re.escape(repr(text))}"):
        Range.parse(text, "steps", integer=integer)


def test_a_range_that_runs_backwards_says_how_to_write_it() -> None:
    with pytest.raises(InputError, match=re.escape("write 2..3.5")):
        Range.parse("3.5..2", "steps")


LAST = 1 - 2.0**-53  # the largest draw


def test_values_of_clients() -> None:
    assert [Range.parse("7", "").at(client, u) for client, u in ((0, 0.0), (99, LAST))] == [7, 7]
    assert [Range.parse("3,5,8", "").at(client, 0.9) for client in range(3)] == [3, 5, 8]
    assert Range.parse("1..3", "").at(0, 0.25) == 1.5
    dice = Range.parse("1..6", "", integer=True)
    assert [dice.at(0, (side + 0.5) / 6) for side in range(6)] == [1, 2, 3, 4, 5, 6]


@QUIET
@given(st.integers(-1000, 1000), st.integers(0, 10**6), st.floats(0, LAST))
@example(0, 2, LAST)
@example(-1000, 10**6, LAST)
def test_values_stay_within_the_range(low: int, width: int, u: float) -> None:
    text = f"{low}..{low + width}"
    drawn = Range.parse(text, "", integer=True).at(0, u)
    assert low <= drawn <= low + width
    assert drawn == int(drawn)
    assert low <= Range.parse(text, "").at(0, u) <= low + width


def test_both_ends_of_a_whole_range_are_drawn() -> None:
    dice = Range.parse("1..6", "", integer=True)
    assert (dice.at(0, 0.0), dice.at(0, LAST)) == (1, 6)
