"""Tables that read well at any width: what is too wide for a row goes below the table, and what is too narrow for a
table becomes a list. Names are plain text, never markup."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.jupyter import JupyterMixin
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

GAP: Final = 2
"""Cells between two columns."""
NARROW: Final = 16
"""No text column gets less, unless its texts are shorter."""
SHORTEST: Final = 6
"""A word that must be broken leaves no piece with fewer letters."""
_BREAK = re.compile(r"(?<=[./_:>\-])(?=[^./_:>\-])")  # within a word: where a dotted name or a path may be broken

_SPACE = re.compile(r"(?<!\d)(?<!\d like) (?!\(\d)|(?<=\d) (?!(?:%|[kMGT]?B|MiB|[mnµ]?s|alike|like)(?:\W|$))")
"""Where a line may end: not between a number and its unit, in "7 like it", nor before a number in brackets."""


@dataclass(frozen=True)
class Column:
    """``kind``: "text" wraps; "number" never does, and stands at the right; "below" goes below the table if there is no
    room for it, the last of these first. ``least``: cells that a "below" column of text needs."""

    heading: str
    kind: Literal["text", "number", "below", "number below"] = "number"
    least: int = NARROW

    @property
    def wraps(self) -> bool:
        """Whether its cells may have several lines."""
        return self.kind in ("text", "below")


@dataclass
class Grid(JupyterMixin):
    """A table for a terminal or a notebook: a rich renderable that adapts to the width. ``at_most``: cells that a
    text column gets at most."""

    columns: Sequence[Column]
    title: str = ""
    at_most: int = 60
    rows: list[tuple[tuple[str, ...], str]] = field(default_factory=list)
    """Cells, one for each column, and the style of the row."""

    def add(self, *cells: str, style: str = "") -> None:
        """Add a row."""
        assert len(cells) == len(self.columns)
        self.rows.append((cells, style))

    @property
    def row_count(self) -> int:
        """Number of rows."""
        return len(self.rows)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.title:
            yield Text(self.title)
        shown = list(range(len(self.columns)))
        below: list[int] = []
        while (widths := self._widths(shown, options.max_width)) is None:
            movable = [k for k in shown if self.columns[k].kind.endswith("below")]
            if not movable:
                yield from self._list(options.max_width)
                return
            shown.remove(movable[-1])
            below.insert(0, movable[-1])
        yield self._table(shown, widths)
        if below:
            yield from self._below(below, options.max_width)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(min(20, options.max_width), options.max_width)

    def _natural(self, k: int) -> int:
        """Cells of the widest line of a column."""
        lines = [*self.columns[k].heading.split("\n"), *(cells[k] for cells, _ in self.rows)]
        return max(map(cell_len, lines))

    def _widths(self, shown: Sequence[int], room: int) -> list[int] | None:
        """Cells for each column, or None if they do not fit: numbers whole, the rest shared by the texts."""
        natural = {k: self._natural(k) for k in shown}
        texts = [k for k in shown if self.columns[k].wraps]
        left = room - GAP * (len(shown) - 1) - sum(natural[k] for k in shown if k not in texts)
        wanted = {k: min(natural[k], self.at_most if self.columns[k].kind == "text" else room) for k in texts}
        least = {k: min(wanted[k], self.columns[k].least) for k in texts}
        if (left := left - sum(least.values())) < 0:
            return None
        waiting = len(texts)
        for k in sorted(texts, key=lambda k: wanted[k] - least[k]):  # an equal share of the rest for who wants more
            more = min(wanted[k] - least[k], left // waiting)
            natural[k] = least[k] + more
            left, waiting = left - more, waiting - 1
        return [natural[k] for k in shown]

    def _table(self, shown: Sequence[int], widths: Sequence[int]) -> Table:
        table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, GAP - 1, 0, 0))
        for k, width in zip(shown, widths, strict=True):
            column = self.columns[k]
            right = column.kind.startswith("number")
            heading = Text(column.heading)
            table.add_column(heading, justify="right" if right else "left", no_wrap=True, width=width)
        for cells, style in self.rows:
            broken = (
                "\n".join(wrapped(cells[k], width)) if self.columns[k].wraps else cells[k]
                for k, width in zip(shown, widths, strict=True)
            )
            table.add_row(*(Text(cell, style=style) for cell in broken))
        return table

    def _below(self, below: Sequence[int], room: int) -> Iterator[Text]:
        """The columns without room, for each row by its first cell."""
        headings = [self._name(k) for k in below if self.columns[k].wraps]
        yield Text(f"\n{' and '.join(headings).capitalize()}:" if headings else "")
        for cells, style in self.rows:
            facts = [self._fact(k, cells[k]) for k in below if cells[k]]
            if facts:
                yield from hanging(f"{cells[0]}: {', '.join(facts)}", room, style, first=2, indent=4)

    def _fact(self, k: int, cell: str) -> str:
        return f"{self._name(k)} {cell}" if self.columns[k].kind.startswith("number") else cell

    def _name(self, k: int) -> str:
        return self.columns[k].heading.replace("\n", " ")

    def _list(self, room: int) -> Iterator[Text]:
        """Each row as a paragraph."""
        for cells, style in self.rows:
            facts = [f"{self._name(k)} {cell}".strip() for k, cell in enumerate(cells) if k and cell]
            yield from hanging(f"{cells[0]}: {', '.join(facts)}", room, style)


def hanging(text: str, room: int, style: str = "", first: int = 0, indent: int = 2) -> Iterator[Text]:
    """A paragraph, its first line indented by ``first`` cells, the others by ``indent``."""
    for k, line in enumerate(wrapped(text, max(1, room - first), max(1, room - indent))):
        yield Text(" " * (indent if k else first) + line, style=style)


def wrapped(text: str, width: int, later: int | None = None) -> list[str]:
    """``text`` in lines of at most ``width`` cells (after the first: ``later``): broken at spaces, but not between a
    number and its unit; and words that are too long after a point, slash, hyphen or underscore if possible."""
    later = width if later is None else later
    lines: list[str] = []
    first, *words = _SPACE.split(text.lstrip(" "))
    line = ""
    for word in (" " * (len(text) - len(text.lstrip(" "))) + first, *words):
        candidate = f"{line} {word}" if line else word
        if cell_len(candidate) <= (later if lines else width):
            line = candidate
            continue
        if line:
            lines.append(line)
        *whole, line = broken(word, later if lines else width, later)
        lines += whole
    return [*lines, line]


def broken(word: str, width: int, later: int) -> list[str]:
    """A word in pieces of at most ``width`` cells (after the first: ``later``)."""
    pieces: list[str] = []
    while cell_len(word) > (room := max(1, later if pieces else width)):
        most = max(1, room)
        while most > 1 and cell_len(word[:most]) > room:
            most -= 1
        if len(word) >= 2 * SHORTEST:
            most = min(most, len(word) - SHORTEST)
        good = [m.start() for m in _BREAK.finditer(word) if SHORTEST // 2 <= m.start() <= room]
        at = good[-1] if good else most
        pieces.append(word[:at])
        word = word[at:]
    return [*pieces, word]
