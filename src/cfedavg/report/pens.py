"""The colours and strokes of lines; every pair of colours is told apart with any colour vision."""

from __future__ import annotations

from dataclasses import dataclass

# Okabe and Ito's colours; their yellow is too pale for a line on white.
BLUE, VERMILION, GREEN, PINK = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
ORANGE, SKY = "#E69F00", "#56B4E9"
COLOURS = (BLUE, VERMILION, GREEN, PINK, ORANGE, SKY)
PLAIN = "#555555"  # for the uncompressed run that others are measured against


@dataclass(frozen=True)
class Pen:
    """How a line is drawn; a cross at its end says that it ends before its time."""

    colour: str
    dashed: bool = False
    crossed: bool = False
