"""The page of a scale: settings, verdicts, tables and what to take when, all computed from the cells."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from cfedavg.report import format_bytes
from cfedavg.sweep import SealedCell, write_markdown
from paper.feedback.experiment import ADAM, DEFAULT, PLAIN, Experiment
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
from paper.feedback.pictures import SIZES

NOTHING = "–"
Outcomes = Mapping[str, Outcome]
Judged = Sequence[tuple[Experiment, float, Outcomes]]  # a grid, its target and its outcomes

RULES = f"""\
An accuracy is the mean of {WINDOW} evaluations that follow each other, of the model that clients hold. The
target of a grid is {TARGET:.0%} of the final accuracy of no compression, rounded down to whole percent. A line
reaches it if all its seeds do. Bytes are lengths of encoded messages of all clients, up and down, headers
included; a client that takes part for the first time downloads the whole model. In bold: the lines that no
other beats in both bytes to the target and final accuracy. Lines of one seed whose bytes differ by less than
{CLOSE - 1:.0%} are not told apart."""


def judge(grids: Sequence[Experiment], found: Mapping[str, SealedCell]) -> Judged:
    """Return the grids that have cells of no compression, each with its target and outcomes."""
    judged = ((grid, *judge_grid(grid, found)) for grid in grids)
    return [(grid, target, outcomes) for grid, target, outcomes in judged if target is not None]


def write_page(scale: str, judged: Judged, found: Mapping[str, SealedCell]) -> str:
    """Return the page of a scale as Markdown."""
    sections = ["\n\n".join(_section(*each)) for each in judged]
    head = [f"# Feedbacks and compressors: scale {scale}", describe_runs(found), RULES]
    return "\n\n".join([*head, *sections, "## What to take when", _choices(judged)]) + "\n"


def describe_runs(found: Mapping[str, SealedCell]) -> str:
    """Return a sentence on the cells: how many, where they ran and how long they took."""
    hardware = ", ".join(sorted({cell.made["hardware"] for cell in found.values()}))
    versions = ", ".join(sorted({cell.made["version"] for cell in found.values()}))
    seconds = sum(cell.made["seconds"] / cell.made.get("together", 1) for cell in found.values())
    return f"{len(found)} runs of cfedavg {versions} on {hardware}, {seconds / 60:.0f} minutes in all."


def _section(grid: Experiment, target: float, outcomes: Outcomes) -> Iterator[str]:
    """Yield the paragraphs of a grid."""
    yield f"## {grid.words}"
    yield f"{_settings(grid)} The target is {target:.0%}."
    yield "### Families at equal bytes"
    yield f"![Accuracy over bytes of the families]({grid.name}-families.png)"
    yield "\n".join(f"- {family_verdict(grid, outcomes, size)}" for size in SIZES)
    yield "### The frontier"
    yield f"![Accuracy over bytes of all lines]({grid.name}-frontier.png)"
    yield f"![Bytes to the target]({grid.name}-target.png)"
    yield write_markdown(table(grid, outcomes)).rstrip()
    yield "\n".join(f"- {text}" for text in (feedback_verdict(outcomes), default_verdict(grid, outcomes)))


def _settings(grid: Experiment) -> str:
    """Return a sentence with the settings that all lines of a grid share."""
    base = grid.base
    work = f"{base['local_epochs']} local epochs" if "local_epochs" in base else f"{base['local_steps']} local steps"
    return f"{base['rounds']} rounds of {work} of {base['batch_size']} samples, η_L = {base['eta_local']}."


def table(grid: Experiment, outcomes: Outcomes) -> list[list[str]]:
    """Return the rows of a grid's table: the lines that reach the target by their bytes, then the others."""
    head = ["line", "up and down", "seeds", "message up", "down", "final accuracy", "rounds", "bytes to target"]
    head += ["without first downloads", "of the default"]
    ranked = rank(outcomes)
    rest = sorted((each for each in outcomes.values() if not each.cost), key=lambda each: -each.final)
    front = {each.name for each in pareto(outcomes)}
    rows = [_row(grid, each, outcomes.get(DEFAULT), each.name in front) for each in [*ranked, *rest]]
    return [head, *rows]


def _row(grid: Experiment, own: Outcome, default: Outcome | None, in_front: bool) -> list[str]:
    changes = grid.line(own.name).changes
    up, down = changes["compressor"], changes["compressor_down"]
    texts = f"`{up}`" if up == down else f"`{up}`, `{down}`"
    label = f"**{grid.label(own.name)}**" if in_front else grid.label(own.name)
    sizes = [format_bytes(own.message_up), format_bytes(own.message_down)]
    costs = [NOTHING] * 4
    if own.cost:
        costs = [str(own.cost.rounds), format_bytes(own.cost.total), format_bytes(own.cost.later)]
        costs.append(_ratio(own, default) if default else NOTHING)
    return [label, texts, str(own.seeds), *sizes, f"{own.final:.2%}", *costs]


def _ratio(own: Outcome, default: Outcome) -> str:
    return f"{own.cost.total / default.cost.total:.3g}" if own.cost and default.cost else NOTHING


def family_verdict(grid: Experiment, outcomes: Outcomes, size: str) -> str:
    """Return a sentence that orders the families of one size of message by their bytes to the target."""
    own = {n: each for n, each in outcomes.items() if grid.about.get(n, {}).get("size") == size}
    if not own:
        return f"No {size} messages were run."
    ups = sorted(each.message_up for each in own.values())
    texts = [
        f"{grid.about[each.name]['family']} ({format_bytes(each.cost.total)}, {each.final:.1%} in the end)"
        for each in rank(own)
        if each.cost
    ]
    missed = [f"{grid.about[n]['family']} ({own[n].final:.1%})" for n in own if not own[n].cost]
    text = f"Messages of {format_bytes(ups[0])} to {format_bytes(ups[-1])} up: "
    text += f"the fewest bytes to the target take {', then '.join(texts)}" if texts else "none reaches the target"
    return text + (f"; it is not reached by {', '.join(missed)}." if missed else ".")


FEEDBACKS = {DEFAULT: "ef", "decay": "ef(decay=0.95)", "sapef": "sapef(0.5)", "ef21": "ef21", "cafe": "cafe",
             "no-feedback": "none"}  # fmt: skip


def feedback_verdict(outcomes: Outcomes) -> str:
    """Return a sentence that orders the feedbacks, with the default compressor, by bytes to the target."""
    own = {name: outcomes[name] for name in FEEDBACKS if name in outcomes}
    texts = [
        f"`{FEEDBACKS[each.name]}` ({format_bytes(each.cost.total)}, {each.final:.1%})"
        for each in rank(own)
        if each.cost
    ]
    missed = [f"`{FEEDBACKS[name]}` ({own[name].final:.1%})" for name in own if not own[name].cost]
    text = "Feedbacks with the default compressor, the fewest bytes to the target first: "
    text += ", ".join(texts) or "none reaches it"
    return text + (f"; it is not reached by {', '.join(missed)}." if missed else ".")


def beats_default(own: Outcome, default: Outcome) -> bool:
    """Return whether a line needs at most `BETTER` of the default's bytes and loses no accuracy."""
    if not own.cost or not default.cost:
        return False
    return own.cost.total <= BETTER * default.cost.total and own.final >= default.final - LOSS


def default_verdict(grid: Experiment, outcomes: Outcomes) -> str:
    """Return a sentence that names the lines that beat the default by the rule of `beats_default`."""
    default = outcomes.get(DEFAULT)
    if default is None or not default.cost:
        return "The default does not reach the target."
    better = [each for each in rank(outcomes) if beats_default(each, default)]
    rule = f"at most {BETTER:.0%} of its bytes to the target, and no more than {100 * LOSS:g} points behind it"
    if not better:
        return f"No line beats the default ({rule})."
    texts = [f"{grid.label(each.name)} ({_ratio(each, default)}, {_points(each, default)})" for each in better]
    return f"These beat the default ({rule}): {'; '.join(texts)}."


def _points(own: Outcome, default: Outcome) -> str:
    return f"{100 * (own.final - default.final):+.1f} points in the end".replace("-", "−")


# What to take when: each wish, which lines may serve it, and what it wants least of.
_Wish = tuple[str, Callable[[Experiment, Outcome], bool], Callable[[Outcome], float]]
_NO_MEMORY = ("cafe", "none")


def _is_plain_server(grid: Experiment, each: Outcome) -> bool:
    return not each.name.endswith(ADAM)


WISHES: tuple[_Wish, ...] = (
    ("the fewest bytes, up and down", lambda grid, each: True, lambda each: each.cost.total if each.cost else 0),
    ("the same without first downloads", lambda grid, each: True, lambda each: each.cost.later if each.cost else 0),
    ("the fewest rounds with compression", lambda grid, each: each.name != PLAIN,
     lambda each: each.cost.rounds if each.cost else 0),
    ("the shortest messages up", lambda grid, each: True, lambda each: each.message_up),
    ("the fewest bytes without memory on clients",
     lambda grid, each: grid.line(each.name).changes.get("feedback") in _NO_MEMORY,
     lambda each: each.cost.total if each.cost else 0),
    ("the highest final accuracy with compression", lambda grid, each: each.name != PLAIN,
     lambda each: -each.final),
)  # fmt: skip


def _choices(judged: Judged) -> str:
    """Return a table: for each wish and each grid, the line that serves it best and reaches the target."""
    head = ["line", *(grid.words for grid, _, _ in judged)]
    rows = [[wish, *(_choose(grid, outcomes, may, want) for grid, _, outcomes in judged)]
            for wish, may, want in WISHES]  # fmt: skip
    return write_markdown([["if you want (of the lines that reach the target)", *head[1:]], *rows]).rstrip()


def _choose(
    grid: Experiment,
    outcomes: Outcomes,
    may: Callable[[Experiment, Outcome], bool],
    want: Callable[[Outcome], float],
) -> str:
    own = [each for each in rank(outcomes) if may(grid, each)]
    if not own:
        return NOTHING
    best = min(own, key=want)
    cost = format_bytes(best.cost.total) if best.cost else NOTHING
    return f"{grid.label(best.name)}: {cost}, {best.cost.rounds if best.cost else NOTHING} rounds, {best.final:.1%}"
