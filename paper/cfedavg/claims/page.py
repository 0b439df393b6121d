"""The page of claims: each claim with its verdict and the numbers that decide it.

`catalogue` holds the claims, each with its criterion. `judges` decides the cases of a claim. `cases` combines
the cases into a verdict. `measures` computes numbers from a cell.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cfedavg import InputError
from cfedavg.sweep import SealedCell
from paper.cfedavg.claims.cases import DATASETS, MARKS, Claim, Finding
from paper.cfedavg.claims.catalogue import CLAIMS
from paper.cfedavg.claims.measures import Results

Judged = Sequence[tuple[Claim, Finding | None]]

NOT_RUN = "not run yet"
RULES = f"""\
A claim has cases, such as one p and one compressor. A case is marked {MARKS[1]} as claimed, {MARKS[0]} no
difference, {MARKS[-1]} against the claim, or {MARKS[None]} cannot be told. The verdict counts the cases:

- *undecided*, if fewer than half of the cases can be told;
- *does not hold*, if fewer than half of those that can be told go as claimed ({MARKS[0]} counts as not);
- *holds in part*, if half or more go as claimed and some go against the claim;
- *holds*, if half or more go as claimed and none goes against it.

*Where it was run* says that cells are missing. Of runs that were broken off, it cannot be told that they do
not train, nor whether residuals go on growing. Runs with different numbers of rounds are not compared: such
a case cannot be told.

Accuracies are in percent, means over the last 5 rounds unless it says otherwise, ± the standard deviation
over seeds where there are several. One is *ahead* of another, and that *behind*, if they differ by more than
half a point and by more than two standard errors (from the spread over seeds of both, pooled; for single
seeds, from how their curves zigzag, over the root of the rounds that are averaged). There is no difference,
if one is not ahead by half a point even with two standard errors added. One is *as good* as another if it is
at most half a point lower; if it is lower but not behind, that cannot be told. A run *trains* if it ends at
30% (three times chance) or more, and with at least half of what the run without compression gains over
chance; within two standard errors of that, it cannot be told. The accuracy of a run that diverged counts as
chance; residuals, zigzags and what others are held against are taken from the other seeds.

Slopes are ± the standard error of the fit. A slope within two standard errors of its limit cannot be told.
Of two or three seeds, or of a few points, standard errors are rough."""
LITTLE_POWER = """\
These checks would pass, or nearly always pass, even if the paper were wrong. That they hold says little."""


def judge_all(
    found: Mapping[str, SealedCell], planned: Mapping[str, int] | None = None
) -> list[tuple[Claim, Finding | None]]:
    """Return every claim with its finding, or with None if its cells are missing.

    The verdict of a finding says so if runs have fewer rounds than planned.
    """
    results = Results(found, planned)
    return [(claim, claim.judge(results)) for claim in CLAIMS]


def overview(judged: Judged) -> str:
    """Return three tables of verdicts: claims by data set, claims of the theory, and our own questions."""
    shown: dict[str, dict[str, str]] = {}
    theory, questions = list[list[str]](), list[list[str]]()
    for claim, found in judged:
        dataset, _, text = claim.text.rpartition(": ")
        if dataset:
            shown.setdefault(text, {})[dataset] = _brief(found)
        else:
            weak = " (says little, see below)" if found and claim.weak else ""
            (questions if claim.asked else theory).append([text, _brief(found) + weak])
    names = list(DATASETS.values())
    measured = _table(["claim", *names], [[text, *map(own.get, names)] for text, own in shown.items()])
    asked = _table(["what the paper does not say, but one may ask", "verdict"], questions)
    return f"{measured}\n{_table(['claim', 'verdict'], theory)}\n{asked}"


def _brief(found: Finding | None) -> str:
    """Return the verdict, with the number of cases of each mark."""
    if not found:
        return NOT_RUN
    counts = [f"{count}{mark}" for mark in MARKS.values() if (count := found.numbers.count(mark))]
    return found.verdict + (f" ({' '.join(counts)})" if counts else "")


def weak_checks(judged: Judged) -> str:
    """Return a table of the checks of little power, with reasons and results; "" if none was run."""
    rows = [[claim.text, claim.weak, found.numbers] for claim, found in judged if found and claim.weak]
    table = _table(["check", "why it says little", "what came out"], rows)
    return f"{LITTLE_POWER}\n\n{table}" if rows else ""


def write_page(judged: Judged, words: Path | None) -> str:
    """Return the page as Markdown; the TOML file `words` gives its title, intro and, by claim, [why]."""
    table = _read_words(words, {claim.name for claim, _ in judged}) if words else {}
    title, intro = table.get("title", "The claims of the paper"), table.get("intro", "").strip()
    weak = weak_checks(judged)
    weak = f"## Checks that say little\n\n{weak}\n" if weak else ""
    numbers = as_markdown(judged, table.get("why", {}))
    return f"# {title}\n\n{intro}\n\n## The verdicts\n\n{overview(judged)}\n{weak}## The numbers\n\n{numbers}"


def _read_words(path: Path, known: set[str]) -> dict[str, Any]:
    try:
        table = tomllib.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"`words`: cannot read {path} ({getattr(error, 'strerror', error)})") from None
    if strange := table.keys() - {"title", "intro", "why"}:
        raise InputError(f"`words`: {path} has an unknown key {min(strange)!r}; known are title, intro, why")
    why = table.get("why", {})
    texts = isinstance(why, dict) and [table.get("title", ""), table.get("intro", ""), *why.values()]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise InputError(f"`words`: title, intro and every entry of [why] must be texts in {path}")
    if unknown := why.keys() - known:
        raise InputError(f"`words`: [why] must name claims of the catalogue, got {min(unknown)!r}")
    return table


def as_markdown(judged: Judged, why: Mapping[str, str] | None = None) -> str:
    """Return the rules and a table of all claims; `why` holds explanations by the claim's name."""
    rows = [_row(claim, found, (why or {}).get(claim.name, "")) for claim, found in judged]
    head = ["claim", "what was run", "figure", "what came out", "verdict and why"]
    return f"{RULES}\n\n{_table(head, rows)}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str | None]]) -> str:
    lines = [head, ["---"] * len(head), *([cell or "" for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(map(_plain, line))} |\n" for line in lines)


def _row(claim: Claim, found: Finding | None, why: str) -> list[str]:
    verdict = f"**{found.verdict}**" if found else NOT_RUN
    return [
        f"{claim.text} ({claim.where})",
        f"{claim.ran}. *Decides:* {claim.criterion}",
        f"`{claim.figure}`",
        found.numbers if found else NOT_RUN,
        f"{verdict}: {why}" if why else verdict,
    ]


def _plain(text: str) -> str:
    """Return the text as one line with escaped bars, for a cell of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|")
