"""A plan on one HTML page: words, table and pictures in a single file that needs no network and no script."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Final

from flexsearch.report.tables import PlanRow, plan_rows
from flexsearch.report.units import nbytes, ratio, seconds
from flexsearch.report.words import groups

_STYLE: Final = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #1a1a1a; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; font-size: .9rem; } th, td { padding: .25rem .75rem; text-align: left; }
th { border-bottom: 2px solid #888; } td { border-bottom: 1px solid #ddd; } .number { text-align: right; }
tr.best { font-weight: bold; } tr.short { color: #b00020; } svg { max-width: 100%; height: auto; }
.note { color: #555; }
""".strip()
_HEADINGS: Final = (
    "plan", "iteration", "vs data parallel", "vs one device", "bytes moved", "peak memory", "what takes the time",
)  # fmt: skip


def page(
    title: str, remarks: Sequence[str], plan: PlanRow, rows: Sequence[PlanRow], pictures: Sequence[tuple[str, bytes]]
) -> str:
    """The page. ``remarks``: paragraphs below the title. ``plan``: told in words. ``rows``: the plans of the table,
    ``plan`` among them. ``pictures``: headings, and SVG files."""
    words = "\n".join(f"<li>{escape(group.words)}</li>" for group in groups(plan.lowered))
    drawn = "\n".join(f"<h2>{escape(heading)}</h2>\n{_inline(picture)}" for heading, picture in pictures)
    said = "\n".join(f"<p>{escape(text)}</p>" for text in remarks)
    return f"""<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><title>{escape(title)}</title><style>
{_STYLE}
</style></head>
<body>
<h1>{escape(title)}</h1>
{said}
<h2>The plan</h2>
<ul>
{words}
</ul>
<h2>Beside plans that experts write by hand</h2>
{_table(rows)}
{drawn}
<p class="note">All times are predictions of flexsearch's simulator.</p>
</body>
</html>
"""


def _table(rows: Sequence[PlanRow]) -> str:
    values = plan_rows(rows)
    best = min((one["iteration_s"] for one in values if one["fits"]), default=None)
    lines = [_line("th", _HEADINGS, "")]
    for one in values:
        speedups = (one[f"speedup_vs_{name}"] for name in ("data_parallel", "single"))
        what = one["dominates"] if one["fits"] else f"does not fit: {nbytes(one['shortfall_bytes'])} short"
        cells = (
            one["name"], seconds(one["iteration_s"]), *("-" if s is None else ratio(s) for s in speedups),
            nbytes(one["moved_bytes"]), nbytes(one["peak_bytes"]), what,
        )  # fmt: skip
        style = "short" if not one["fits"] else "best" if one["iteration_s"] == best else ""
        lines.append(_line("td", cells, style))
    return "<table>\n" + "\n".join(lines) + "\n</table>"


def _line(tag: str, cells: Sequence[str], style: str) -> str:
    last = len(cells) - 1
    inside = "".join(
        f'<{tag} class="number">{escape(cell)}</{tag}>' if 0 < k < last else f"<{tag}>{escape(cell)}</{tag}>"
        for k, cell in enumerate(cells)
    )
    return f'<tr class="{style}">{inside}</tr>' if style else f"<tr>{inside}</tr>"


def _inline(svg: bytes) -> str:
    """The <svg> element of a file, without what only a file of its own needs: declaration, document type, metadata."""
    text = svg.decode()
    text = text[text.index("<svg") :]
    if "<metadata>" in text:
        text = text[: text.index("<metadata>")] + text[text.index("</metadata>") + len("</metadata>") :]
    return text
