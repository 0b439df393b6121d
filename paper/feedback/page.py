"""The page of a scale: settings, verdicts, tables and what to take when, all computed from the cells."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

from cfedavg import Config
from cfedavg.report import format_bytes
from cfedavg.sweep import SealedCell, write_markdown
from paper.feedback.experiment import DEFAULT, PLAIN, Experiment
from paper.feedback.measures import (
    BETTER,
    CLOSE,
    LOSS,
    TARGET,
    WINDOW,
    Outcome,
    judge_grid,
    pareto,
    rank,
)
from paper.feedback.pictures import COLOURS, LEAST_DRAWN, SIZES, describe_sizes

NOTHING = "–"
Outcomes = Mapping[str, Outcome]
Judged = Sequence[tuple[Experiment, float, Outcomes]]  # a grid, its target and its outcomes

RULES = f"""\
An accuracy is the mean of {WINDOW} evaluations that follow each other, of the model that clients hold. The
target is {TARGET:.0%} of the final accuracy of no compression, rounded down to whole percent. A line reaches
it if all its seeds do. Bytes are lengths of encoded messages of all clients, up and down, headers included. A
client that takes part for the first time downloads the whole model, later what it missed. In bold: the lines
that no other beats in both bytes to the target and final accuracy. Lines of one seed whose bytes differ by
less than {CLOSE - 1:.0%} cannot be told apart. A line beats the default if it needs at most {BETTER:.0%} of
its bytes to the target and ends at most {100 * LOSS:g} points lower.

Families of compressors are compared at two sizes, thin and wide. Their parameters are such that messages of
Gaussian numbers have nearly equal bytes. The coder shortens messages of real updates, some more than others.
The table has the sizes that came out; messages down include those that a client missed. Curves begin where a
line first has {LEAST_DRAWN:.0%} of the target."""


def judge(grids: Sequence[Experiment], found: Mapping[str, SealedCell]) -> Judged:
    """Return the grids that have cells of no compression, each with its target and outcomes."""
    judged = ((grid, *judge_grid(grid, found)) for grid in grids)
    return [(grid, target, outcomes) for grid, target, outcomes in judged if target is not None]


def write_page(scale: str, judged: Judged, found: Mapping[str, SealedCell]) -> str:
    """Return the page of a scale as Markdown."""
    sections = ["\n\n".join(_section(*each)) for each in judged]
    head = [f"# Feedbacks and compressors: scale {scale}", describe_runs(found), RULES]
    head += ["## In brief", family_table(judged), feedback_table(judged)]
    head += ["## What to take when", _choices(judged)]
    return "\n\n".join([*head, *sections]) + "\n"


def describe_runs(found: Mapping[str, SealedCell]) -> str:
    """Return a sentence on the cells: how many, where they ran and how long they took."""
    hardware = ", ".join(sorted({cell.made["hardware"] for cell in found.values()}))
    versions = ", ".join(sorted({cell.made["version"] for cell in found.values()}))
    seconds = sum(cell.made["seconds"] / cell.made.get("together", 1) for cell in found.values())
    return f"{len(found)} runs of cfedavg {versions} on {hardware}, {seconds / 60:.0f} minutes on the clock."


def _section(grid: Experiment, target: float, outcomes: Outcomes) -> Iterator[str]:
    """Yield the paragraphs of a grid."""
    yield f"## {grid.words}"
    yield f"{_settings(grid)} The target is {target:.0%}."
    yield "### Families at two sizes of message"
    yield f"![Accuracy over bytes of the families]({grid.name}-families.png)"
    yield "\n".join(f"- {family_verdict(grid, outcomes, size)}" for size in SIZES)
    yield "### The frontier"
    yield f"![Accuracy over bytes of all lines]({grid.name}-frontier.png)"
    yield f"![Bytes to the target]({grid.name}-target.png)"
    yield write_markdown(table(grid, outcomes)).rstrip()
    yield "\n".join(f"- {text}" for text in (feedback_verdict(outcomes), default_verdict(grid, outcomes)))


def _settings(grid: Experiment) -> str:
    """Return a sentence with the settings that all lines of a grid share."""
    kind = "epochs" if "local_epochs" in grid.base else "steps"
    work = f"{grid.base[f'local_{kind}']} local {kind} of {grid.base['batch_size']} samples"
    return f"{grid.base['rounds']} rounds of {work}, η_L = {grid.base['eta_local']}."


def table(grid: Experiment, outcomes: Outcomes) -> list[list[str]]:
    """Return the table of a grid: the lines that reach the target by their bytes, then the others."""
    head = ["line", "up and down", "seeds", "message up", "down", "final accuracy", "rounds"]
    head += ["bytes to the target", "without first downloads", "times the default"]
    missed = sorted((e for e in outcomes.values() if not e.reached), key=lambda each: -each.final)
    front, default = pareto(outcomes), outcomes.get(DEFAULT)
    return [head, *(_row(grid, each, default, each in front) for each in [*rank(outcomes), *missed])]


def _row(grid: Experiment, own: Outcome, default: Outcome | None, in_front: bool) -> list[str]:
    changes = grid.line(own.name).changes
    texts = dict.fromkeys(f"`{changes[key]}`" for key in ("compressor", "compressor_down"))
    label = f"**{grid.label(own.name)}**" if in_front else grid.label(own.name)
    costs = [NOTHING] * 4
    if own.reached:
        costs = [f"{own.cost.rounds:.3g}", format_bytes(own.cost.total), format_bytes(own.cost.later)]
        costs.append(_ratio(own, default))
    sizes = format_bytes(own.message_up), format_bytes(own.message_down)
    return [label, ", ".join(texts), str(own.seeds), *sizes, f"{own.final:.2%}", *costs]


def _ratio(own: Outcome, default: Outcome | None) -> str:
    return f"{own.cost.total / default.cost.total:.3g}" if default and default.reached else NOTHING


def _order(names: Mapping[str, str], outcomes: Outcomes) -> tuple[str, str]:
    """Return two texts on the lines in `names`: who reaches the target, by bytes, and who does not."""
    own = {name: outcomes[name] for name in names if name in outcomes}
    reached = [f"{names[e.name]} ({format_bytes(e.cost.total)}, {e.final:.1%})" for e in rank(own)]
    missed = [f"{names[name]} ({each.final:.1%})" for name, each in own.items() if not each.reached]
    return ", ".join(reached), f"; not reached by {', '.join(missed)}" if missed else ""


def family_table(judged: Judged) -> str:
    """Return a table of the families at both sizes of message, with columns for each grid."""
    rows = []
    for size, family in itertools.product(SIZES, COLOURS):
        own = [
            next((n for n in grid.names_of_size(size) if grid.about[n]["family"] == family), "")
            for grid, _, _ in judged
        ]
        if any(own):
            rows.append([f"{family}, {size}", *_brief(judged, own)])
    plain = [PLAIN, *_brief(judged, [PLAIN] * len(judged))]
    return write_markdown([_brief_head(judged), plain, *rows]).rstrip()


def feedback_table(judged: Judged) -> str:
    """Return a table of the feedbacks with the default compressor, with columns for each grid."""
    rows = [[f"`{text}`", *_brief(judged, [name] * len(judged))] for name, text in FEEDBACKS.items()]
    return write_markdown([_brief_head(judged), *rows]).rstrip()


def _brief_head(judged: Judged) -> list[str]:
    names = [(str(grid.base["dataset"]), target) for grid, target, _ in judged]
    columns = [
        [f"{name}: a message up", "accuracy", f"bytes to {target:.0%}", "without first downloads"]
        for name, target in names
    ]
    return ["line", *itertools.chain(*columns)]


def _brief(judged: Judged, names: Sequence[str]) -> list[str]:
    """Return for each grid the message, the final accuracy and the bytes to the target of a line."""
    texts = []
    for (_, _, outcomes), name in zip(judged, names, strict=True):
        own = outcomes.get(name)
        costs = map(format_bytes, own.cost[1:]) if own and own.reached else [NOTHING] * 2
        texts += [format_bytes(own.message_up), f"{own.final:.1%}"] if own else [NOTHING] * 2
        texts += costs
    return texts


def family_verdict(grid: Experiment, outcomes: Outcomes, size: str) -> str:
    """Return a sentence that orders the families of one size of message by their bytes to the target."""
    if not (sizes := describe_sizes(grid, outcomes, size)):
        return f"No {size} messages were run."
    families = {name: grid.about[name]["family"] for name in grid.names_of_size(size)}
    reached, missed = _order(families, outcomes)
    return f"{sizes}. Bytes to the target and final accuracy: {reached or 'none reaches it'}{missed}."


FEEDBACKS = {DEFAULT: "ef", "decay": "ef(decay=0.95)", "sapef": "sapef(0.5)", "ef21": "ef21", "cafe": "cafe",
             "no-feedback": "none"}  # fmt: skip


def feedback_verdict(outcomes: Outcomes) -> str:
    """Return a sentence that orders the feedbacks, with the default compressor, by bytes to the target."""
    reached, missed = _order({name: f"`{text}`" for name, text in FEEDBACKS.items()}, outcomes)
    return f"Feedbacks with the default compressor, fewest bytes first: {reached or 'none'}{missed}."


def beats_default(own: Outcome, default: Outcome, which: str) -> bool:
    """Return whether a line loses no accuracy and needs at most `BETTER` of the default's bytes.

    `which` is total, or later: without first downloads.
    """
    fewer = own.reached and getattr(own.cost, which) <= BETTER * getattr(default.cost, which)
    return fewer and own.final >= default.final - LOSS


def default_verdict(grid: Experiment, outcomes: Outcomes) -> str:
    """Return sentences that name the lines that beat the default by the rule of `beats_default`."""
    default = outcomes.get(DEFAULT)
    if default is None or not default.reached:
        return "The default does not reach the target."
    texts = []
    for which, words in (("total", "all bytes"), ("later", "bytes without first downloads")):
        better = [each for each in rank(outcomes) if beats_default(each, default, which)]
        names = [f"{grid.label(each.name)} ({_advantage(each, default, which)})" for each in better]
        texts.append(f"In {words}, the default is beaten by {'; '.join(names) or 'no line'}.")
    return " ".join(texts)


def _advantage(own: Outcome, default: Outcome, which: str) -> str:
    """Return the share of the default's bytes, the points of accuracy, and whether one seed can tell."""
    ratio = getattr(own.cost, which) / getattr(default.cost, which)
    doubt = ", one seed cannot tell" if own.seeds == 1 and ratio > 1 / CLOSE else ""
    return f"{ratio:.3g} of them, {_points(own, default)}{doubt}"


def _points(own: Outcome, default: Outcome) -> str:
    return f"{100 * (own.final - default.final):+.1f} points".replace("-", "−")


# What to take when: each wish, which lines may serve it, and of what it wants least.
_Wish = tuple[str, Callable[[Config], bool], Callable[[Outcome], float]]
WISHES: tuple[_Wish, ...] = (
    ("the fewest bytes, up and down", lambda config: True, lambda each: each.cost.total),
    ("the same without first downloads", lambda config: True, lambda each: each.cost.later),
    ("the shortest messages up", lambda config: True, lambda each: each.message_up),
    ("the fewest rounds", lambda config: config.compressor != "none", lambda each: each.cost.rounds),
    ("no memory on clients", lambda config: config.feedback in ("none", "cafe"),
     lambda each: each.cost.total),
    ("the highest final accuracy", lambda config: config.compressor != "none", lambda each: -each.final),
)  # fmt: skip


def _choices(judged: Judged) -> str:
    """Return a table: for each wish and each grid, the line that serves it best and reaches the target."""
    head = ["if you want", *(grid.words for grid, _, _ in judged)]
    rows = [
        [wish, *(_choose(grid, outcomes, may, want) for grid, _, outcomes in judged)]
        for wish, may, want in WISHES
    ]
    return write_markdown([head, *rows]).rstrip().replace("---:", ":---")  # these are texts


def _choose(
    grid: Experiment,
    outcomes: Outcomes,
    may: Callable[[Config], bool],
    want: Callable[[Outcome], float],
) -> str:
    configs = {name: Config(**grid.line(name).changes) for name in outcomes}
    own = [each for each in rank(outcomes) if may(configs[each.name])]
    if not own:
        return NOTHING
    best = min(own, key=want)
    numbers = f"{format_bytes(best.message_up)} a message up, {best.cost.rounds:.3g} rounds"
    return f"{grid.label(best.name)}: {format_bytes(best.cost.total)}, {numbers}, {best.final:.1%}"
