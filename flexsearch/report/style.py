"""What all pictures have in common: colours, frames, names as plain text."""

from __future__ import annotations

from typing import Final

from matplotlib.axes import Axes

COLOURS: Final = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000")
"""Okabe and Ito's colours, which colour-blind readers can tell apart."""


def plain(axes: Axes, title: str) -> None:
    """The style of all pictures: title at the left, no frame at the top and at the right."""
    axes.set_title(title, loc="left", fontsize=11, parse_math=False)
    axes.spines[["top", "right"]].set_visible(False)


def literal(name: str, most: int = 60) -> str:
    """A name as it is: dollar signs would be mathematics. Of one that is too long, the end."""
    return (name if len(name) <= most else f"…{name[1 - most :]}").replace("$", r"\$")
