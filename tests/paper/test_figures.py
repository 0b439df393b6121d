"""The paper's figures and tables, from cells that were made up: nothing here is trained."""

from __future__ import annotations

import dataclasses
import functools
import io
import math
import statistics
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from PIL import Image

from cfedavg.report import Panel, Pen, as_png
from cfedavg.sweep import Grid, SealedCell, fill_panel, write_markdown
from paper.cfedavg import experiment as experiments
from paper.cfedavg.experiment import Experiment, names
from paper.cfedavg.tables import table

SENT = {"none": 1.0, "topk(0.9)": 0.1, "topk(0.99)": 0.01, "rd(0.9)": 0.1, "rd(0.99)": 0.01}
Found = dict[str, SealedCell]


@functools.cache
def load(name: str) -> Experiment:
    return experiments.load(name, "smoke")


def at(name: str, *p: int) -> Experiment:
    """A part of an experiment, for speed."""
    return dataclasses.replace(load(name), p=p)


def columns(settings: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Plausible training: what is sent less often right learns more slowly, and the seeds differ a little."""
    sent, off = SENT[settings["compressor"]], 0.001 * settings["seed"]
    residual = [(1 - sent) * (t + 1) for t in range(rounds)]
    return {
        "train_loss": [2.0 * 0.9**t + 0.01 for t in range(rounds)],
        "test_accuracy": [0.95 - 0.8 * (1 - 0.3 * sent) ** (t + 1) + off for t in range(rounds)],
        "uplink_bytes": [round(4e6 * sent) * settings["clients"]] * rounds,
        "model_sizes_sent": [sent] * rounds,
        "delta_norm2": [4.0 * 0.95**t for t in range(rounds)],
        "delta_norm": [2.0 * 0.95 ** (t / 2) for t in range(rounds)],
        "error_norm2": residual,
        "error_norm": [e**0.5 for e in residual],
    }


def cells(experiment: Grid, seeds: int = 1, rounds: int | None = None) -> Found:
    """Every cell of the smallest scale."""
    return {
        name: SealedCell(name, settings, columns(settings, rounds or settings["rounds"]), {})
        for name, settings in experiment.cells(range(seeds)).items()
    }


def without(found: Found, *parts: str) -> Found:
    return {name: entry for name, entry in found.items() if not any(part in name for part in parts)}


def changed(found: Found, name: str, **values: Any) -> Found:
    entry = found[name]
    return found | {name: dataclasses.replace(entry, values=entry.values | values)}


def diverged(found: Found, name: str, rounds: int) -> Found:
    short = {key: values[:rounds] for key, values in found[name].values.items()}
    return changed(found, name, **short, diverged=f"round {rounds}: the loss is no number")


Drawing = Callable[..., Figure]


@pytest.fixture
def drawing() -> Drawing:
    """The figure, neither laid out nor painted."""

    def make(experiment: Grid, found: Found, note: str = "") -> Figure:
        return experiment.figure(found, note)

    return make


def texts(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def strokes(axes: Axes) -> list[tuple[str, bool]]:
    return [(to_hex(line.get_color()).upper(), line.get_linestyle() != "-") for line in lines(axes)]


def lines(axes: Axes) -> list[Any]:
    return [line for line in axes.lines if line.get_linestyle() != "None"]


def crosses(axes: Axes) -> list[Any]:
    return [line for line in axes.lines if line.get_marker() == "x"]


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for each in figure.legends for text in each.get_texts()]


def check_nothing_overlaps(figure: Figure) -> None:
    """No text is cut by the edge or covers another."""
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in visible_texts(figure)]
    for n, box in enumerate(boxes):
        assert box.x0 >= 0
        assert box.y0 >= 0
        assert box.x1 <= figure.bbox.x1
        assert box.y1 <= figure.bbox.y1
        assert not any(box.overlaps(other) for other in boxes[:n])


def visible_texts(figure: Figure) -> list[Any]:
    found = [*figure.texts, *(text for each in figure.legends for text in each.get_texts())]
    for axes in figure.axes:
        found += [axes.xaxis.label, axes.yaxis.label, *axes.texts]
        found += [axes._left_title]  # type: ignore[attr-defined]
        found += [*tick_labels(axes.xaxis, axes.get_xlim()), *tick_labels(axes.yaxis, axes.get_ylim())]
    return [text for text in found if text.get_visible() and text.get_text()]


def tick_labels(axis: Axis, limits: tuple[float, float]) -> list[Any]:
    return [tick.label1 for tick in axis.get_major_ticks() if limits[0] <= tick.get_loc() <= limits[1]]


# Layout


@pytest.mark.parametrize("name", ["fig2-mnist", "fig3-cifar10", "fig6-mnist"])
def test_texts_neither_overlap_nor_leave_the_figure(drawing: Drawing, name: str) -> None:
    experiment = load(name)
    figure = drawing(experiment, cells(experiment, 1, 30), "a note that goes on and on " * 12)
    check_nothing_overlaps(figure)
    assert figure.get_figwidth() == 9
    assert figure.get_figheight() < 1.9 * len({axes.get_position().y0 for axes in figure.axes}) + 2.2


def test_a_picture_comes_out() -> None:
    experiment = load("fig2-mnist")
    with Image.open(io.BytesIO(as_png(experiment.figure(cells(experiment), "a note")))) as image:
        assert image.format == "PNG"
        assert image.width == 1620
        drawn = image.convert("RGB").getcolors(maxcolors=2**24)
    assert drawn is not None
    assert (0, 158, 115) in {colour for _, colour in drawn}  # FedAvg with one step, in green


def test_curves_have_a_row_for_each_p_and_a_column_for_each_number(drawing: Drawing) -> None:
    experiment = load("fig4-fashion")
    figure = drawing(experiment, cells(experiment, rounds=60), "scale smoke")
    assert [axes.get_title("left") for axes in figure.axes] == [
        f"p = {p}" for p in (10, 5, 2, 1) for _ in range(2)
    ]
    assert [axes.get_ylabel() for axes in figure.axes[:2]] == ["train loss", "test accuracy"]
    assert [axes.get_yscale() for axes in figure.axes[:2]] == ["log", "linear"]
    assert [axes.get_xlabel() for axes in figure.axes] == [""] * 6 + ["communication rounds"] * 2
    assert all(len(lines(axes)) == 5 for axes in figure.axes)
    assert legend(figure) == [line.label for line in experiment.lines]
    words = [text.get_text() for text in figure.texts]
    assert words == [experiment.title, "Figure 4 (appendix) · one seed", "scale smoke"]


def test_without_p_there_is_one_row_without_a_title(drawing: Drawing) -> None:
    line = {"name": "none", "label": "all of it", "compressor": "none"}
    experiment = Grid.from_table("own", {"base": {"iid": True, "rounds": 4}, "line": [line]})
    figure = drawing(experiment, cells(experiment))
    assert [axes.get_title("left") for axes in figure.axes] == [""]
    assert figure.axes[0].get_ylabel() == "test accuracy"
    assert list(lines(figure.axes[0])[0].get_xdata()) == [1, 2, 3, 4]


def test_a_budget_is_drawn_in_model_sizes_and_in_bytes_of_one_client(drawing: Drawing) -> None:
    experiment = load("fig2-mnist")
    left, right = drawing(experiment, cells(experiment)).axes
    assert {left.get_xscale(), right.get_xscale()} == {"log"}
    place = [line.name for line in experiment.lines].index("topk0.9")
    assert list(lines(left)[place].get_xdata()) == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
    assert list(lines(right)[place].get_xdata()) == pytest.approx([4e5, 8e5, 12e5, 16e5, 20e5])
    assert list(lines(left)[place].get_ydata()) == list(lines(right)[place].get_ydata())


def test_norms_have_a_column_for_each_line_and_the_squares_on_top(drawing: Drawing) -> None:
    experiment = load("fig8-mnist")
    figure = drawing(experiment, cells(experiment, rounds=40))
    titles = [axes.get_title("left") for axes in figure.axes]
    assert titles[:2] == ["(a) top-k\ncomp = 0.9", "(b) top-k\ncomp = 0.99"]
    assert titles[4:] == [""] * 4
    top, bottom = figure.axes[1], figure.axes[5]
    assert lines(top)[0].get_ydata()[0] == 4.0
    assert lines(bottom)[0].get_ydata()[0] == 2.0
    assert strokes(top) == strokes(bottom)
    assert [dashed for _, dashed in strokes(top)] == [False] * 4 + [True] * 4
    assert len({colour for colour, _ in strokes(top)}) == 4
    assert len({axes.get_ylim() for axes in figure.axes[:4]}) == 1
    assert {axes.get_yscale() for axes in figure.axes} == {"log"}
    assert legend(figure) == ["p = 10", "p = 5", "p = 2", "p = 1", "updates ‖g‖", "residuals ‖e‖"]


# What is missing


@pytest.mark.parametrize("name", ["fig2-cifar10", "fig4-fashion", "fig9-fashion"])
def test_nothing_run_is_empty_axes(drawing: Drawing, name: str) -> None:
    experiment = load(name)
    figure = drawing(experiment, {})
    assert all(texts(axes) == ["not run yet"] for axes in figure.axes)
    check_nothing_overlaps(figure)
    rows = table(experiment, {})
    assert len(rows) == 1 + len(list(experiment.pairs()))
    assert all(set(row[3:]) == {"–"} and row[2] == "0" for row in rows[1:])


def test_a_part_of_the_grid_is_drawn_as_far_as_it_goes(drawing: Drawing) -> None:
    experiment = load("fig4-fashion")
    found = without(cells(experiment), "-p1-", "-p2-", "topk0.99", "p5-rd0.9-")
    figure = drawing(experiment, found)
    assert [len(lines(axes)) for axes in figure.axes] == [4, 4, 3, 3]
    assert [axes.get_title("left") for axes in figure.axes] == ["p = 10"] * 2 + ["p = 5"] * 2
    missing = "p = 2; p = 1; top-k, comp = 0.99; random dropping, comp = 0.9 at p = 5"
    assert figure.texts[-1].get_text() == f"not run yet: {missing}"
    assert "top-k, comp = 0.99" not in legend(figure)
    assert "random dropping, comp = 0.9" in legend(figure)
    assert [bool(axes.get_xlabel()) for axes in figure.axes] == [False, False, True, True]
    check_nothing_overlaps(figure)


def test_columns_that_were_not_kept_are_not_said_to_be_missing_runs(drawing: Drawing) -> None:
    experiment = at("fig4-fashion", 2)
    found = cells(experiment)
    for name in found:
        found = changed(found, name, train_loss=[None] * 5)
    assert texts(drawing(experiment, found).axes[0]) == ["nothing recorded"]


def test_a_column_that_is_not_there_takes_no_other_with_it(drawing: Drawing) -> None:
    experiment = at("fig1-mnist", 10)
    found = cells(experiment)
    for entry in found.values():
        del entry.values["uplink_bytes"]
    assert [len(line.get_xdata()) for line in lines(drawing(experiment, found).axes[0])] == [5] * 5


def test_the_first_column_of_norms_may_be_missing(drawing: Drawing) -> None:
    experiment = at("fig8-mnist", 10, 1)
    figure = drawing(experiment, without(cells(experiment), "topk0.9-", "rd0.9-"))
    assert [axes.get_title("left")[:3] for axes in figure.axes] == ["(b)", "(d)", "", ""]
    labelled = [any(text.get_visible() for text in axes.get_yticklabels()) for axes in figure.axes]
    assert labelled == [True, False] * 2
    assert [bool(axes.get_ylabel()) for axes in figure.axes] == [True, False] * 2
    assert figure.texts[-1].get_text() == "not run yet: top-k, comp = 0.9; random dropping, comp = 0.9"


# Seeds


def test_one_seed_has_no_band_and_three_have_one(drawing: Drawing) -> None:
    experiment = load("fig2-mnist")
    assert not drawing(experiment, cells(experiment, 1)).axes[0].collections
    figure = drawing(experiment, cells(experiment, 3))
    axes = figure.axes[0]
    assert len(axes.collections) == len(lines(axes)) == 6
    mean = cells(experiment, 3)["mnist-p5-none-seed1"].values["test_accuracy"]  # the middle one
    assert list(lines(axes)[0].get_ydata()) == pytest.approx(mean)
    band = np.asarray(axes.collections[0].get_paths()[0].vertices)
    assert band[:, 1].max() == pytest.approx(mean[-1] + 0.001)
    assert "mean of 3 seeds" in figure.texts[1].get_text()


def test_one_round_is_a_point(drawing: Drawing) -> None:
    experiment = at("fig1-mnist", 10)
    found = cells(experiment, rounds=1)
    drawn = lines(drawing(experiment, found).axes[0])
    assert [line.get_marker() for line in drawn] == ["o"] * 5
    final, mean, zigzag = table(experiment, found)[1][4:7]
    assert final == mean == f"{100 * (0.95 - 0.8 * 0.7):.2f}"
    assert zigzag == "0.00"


def test_a_seed_that_diverged_ends_in_a_cross_and_the_others_go_on(drawing: Drawing) -> None:
    experiment = at("fig1-mnist", 5, 1)
    found = diverged(cells(experiment, 3), "mnist-p1-rd0.99-seed1", 2)
    figure = drawing(experiment, found)
    assert [len(crosses(axes)) for axes in figure.axes] == [0, 1]
    cross = crosses(figure.axes[1])[0]
    assert (list(cross.get_xdata()), to_hex(cross.get_color()).upper()) == ([2], "#D55E00")
    ends = [max(line.get_xdata()) for line in lines(figure.axes[1]) if line.get_color() == cross.get_color()]
    assert sorted(ends) == [2, 5]
    assert figure.texts[1].get_text().endswith("× where a seed diverged")
    assert table(experiment, found)[-1][2:4] == ["3, 1 diverged", "2 to 5"]


def test_a_row_that_ends_early_does_not_shorten_the_others(drawing: Drawing) -> None:
    experiment = at("fig1-mnist", 5, 1)
    found = cells(experiment)
    for name in found:
        found = diverged(found, name, 2) if "-p1-" in name else found
    assert [axes.get_xlim()[1] > 5 for axes in drawing(experiment, found).axes] == [True, True]


def test_groups_hold_all_seeds_in_order_and_no_other_lines_cells() -> None:
    experiment = at("fig6-mnist", 2)
    found = without(cells(at("fig6-mnist", 2, 1), 11), "p2-rd0.9-")
    ordered, pen = dict(sorted(found.items())), Pen("#000000")
    drawn = [
        fill_panel(Panel("", "", (), ""), [("", experiment.find_cells(ordered, 2, line), pen)])
        for line in experiment.lines
    ]
    assert [len(lines) for _, lines in drawn] == [1, 1, 1, 1, 0, 0, 1, 1]
    groups = [group for _, lines in drawn for group, _ in lines]
    assert groups[0].seeds == tuple(range(11))
    assert all(run.config.classes_per_client == 2 for group in groups for run in group.runs)
    assert {run.config.feedback for run in groups[0].runs} == {"ef"}
    assert {run.config.feedback for run in groups[1].runs} == {"none"}


# Colours


def pens(experiments: Iterable[Experiment]) -> dict[str, set[tuple[str, bool]]]:
    """By the name of the line, how the experiments draw it."""
    found: dict[str, set[tuple[str, bool]]] = {}
    for experiment in experiments:
        for line in experiment.lines:
            pen = experiment.choose_pen(line)
            found.setdefault(line.name, set()).add((pen.colour, pen.dashed))
    return found


def test_a_line_looks_the_same_in_all_experiments() -> None:
    found = pens(map(load, names()))
    assert {name for name, looks in found.items() if len(looks) > 1} == set()
    assert found["topk0.99"] == {("#0072B2", False)}
    assert found["topk0.99-noef"] == {("#0072B2", True)}
    assert found["none"] == {("#555555", False)}


@pytest.mark.parametrize("name", names())
def test_no_two_lines_of_an_experiment_look_the_same(name: str) -> None:
    looks = [look for found in pens([load(name)]).values() for look in found]
    assert len(set(looks)) == len(looks)


def test_a_line_keeps_its_look_when_others_are_missing(drawing: Drawing) -> None:
    experiment = at("fig5-cifar10", 2)
    full = drawing(experiment, cells(experiment))
    part = drawing(experiment, without(cells(experiment), "none", "topk0.9-", "rd0.9-"))
    assert strokes(part.axes[0]) == [
        ("#0072B2", False), ("#0072B2", True), ("#D55E00", False), ("#D55E00", True),
    ]  # fmt: skip
    assert set(strokes(part.axes[0])) < set(strokes(full.axes[0]))


# Tables


def test_the_numbers_of_curves() -> None:
    experiment = at("fig1-mnist", 10)
    found = cells(experiment, 2, 30)
    first = [0.5 + 0.01 * t for t in range(30)]
    second = [0.9 if t % 2 else 0.8 for t in range(29)] + [None]  # the last round was not evaluated
    found = changed(found, "mnist-p10-topk0.9-seed0", test_accuracy=first)
    found = changed(found, "mnist-p10-topk0.9-seed1", test_accuracy=second)
    header, _, row = table(experiment, found)[:3]
    deviation = statistics.stdev([79.0, 80.0])
    last_five = [100 * statistics.mean(first[-5:]), 100 * statistics.mean([0.8, 0.9, 0.8, 0.9, 0.8])]
    # The first seed rises in a straight line, which counts as one image of ten thousand.
    # The second strays from the line through its last 20.
    seen = second[9:29]
    strays = np.array(seen) - np.polyval(np.polyfit(range(20), seen, 1), range(20))
    zigzag = math.sqrt(float((strays**2).sum()) / 18)
    assert dict(zip(header, row, strict=True)) == {
        "p": "10",
        "line": "top-k, comp = 0.9",
        "seeds": "2",
        "rounds": "30",
        "accuracy after the last round": f"79.50 ± {deviation:.2f}",
        "mean of the last 5": f"{statistics.mean(last_five):.2f} ± {statistics.stdev(last_five):.2f}",
        "zigzag of the last 20, points": f"{math.sqrt(zigzag):.2f} (0.00 to {100 * zigzag:.2f})",
        "uplink of a client": "12 MB",
        "model sizes sent": "3",
    }


def test_the_numbers_at_a_budget() -> None:
    experiment = load("fig2-mnist")
    rows = {row[1]: row[3:] for row in table(experiment, cells(experiment, rounds=100))}

    def accuracy(sent: float, rounds: int) -> str:
        return f"{100 * (0.95 - 0.8 * (1 - 0.3 * sent) ** rounds):.2f}"

    assert rows["line"] == [f"accuracy at {budget} model sizes" for budget in ("0.1", "1", "10", "100")]
    assert rows["no compression"] == ["–", *(accuracy(1.0, rounds) for rounds in (1, 10, 100))]
    assert rows["top-k, comp = 0.9"] == [*(accuracy(0.1, rounds) for rounds in (1, 10, 100)), "–"]
    assert rows["random dropping, comp = 0.99"] == [accuracy(0.01, 10), accuracy(0.01, 100), "–", "–"]


def test_a_budget_between_two_rounds_buys_the_earlier_however_good_it_is() -> None:
    experiment = load("fig2-mnist")
    accuracy = [0.3, 0.2, 0.6, 0.5, 0.4]
    found = changed(
        cells(experiment), "mnist-p5-topk0.9-seed0", model_sizes_sent=[0.4] * 5, test_accuracy=accuracy
    )
    assert table(experiment, found)[2][3:] == ["–", "20.00", "–", "–"]


def test_the_numbers_of_norms() -> None:
    experiment = at("fig8-mnist", 10)
    found = cells(experiment, 2, 20)
    level = [1.0] * 5 + [8.0] * 15
    for seed in range(2):
        found = changed(
            found,
            f"mnist-p10-topk0.99-seed{seed}",
            error_norm2=level,
            delta_norm2=[2.0 + seed] * 20,
            error_norm=level,
            delta_norm=[2.0] * 20,
        )
    header, grows, levelled = table(experiment, found)[:3]
    assert header[3:] == [
        "last ‖g‖²", "last ‖e‖²", "‖e‖/‖g‖, last 20 rounds", "‖e‖, last fifth/middle fifth", "still grows",
    ]  # fmt: skip
    assert levelled[3:] == ["2.5", "8", f"{statistics.mean(level) / 2:.3g}", "1", "no"]
    assert grows[4] == "18"
    assert grows[-1] == "yes"


def test_norms_without_feedback_have_no_growth() -> None:
    experiment = at("fig8-mnist", 10)
    none = {"error_norm2": [0.0] * 5, "error_norm": [0.0] * 5}
    found = changed(cells(experiment), "mnist-p10-topk0.9-seed0", **none)
    assert table(experiment, found)[1][4:] == ["0", "0", "1", "no"]


def test_markdown_has_one_line_for_each_row_and_a_rule() -> None:
    experiment = at("fig1-mnist", 10)
    rows = table(experiment, cells(experiment))
    lines = write_markdown(rows).splitlines()
    assert len(lines) == len(rows) + 1
    assert len({line.count("|") for line in lines}) == 1
    assert lines[2].startswith("| 10 | no compression | 1 | 5 |")
