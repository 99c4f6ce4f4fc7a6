"""What the searches with ``--space native`` share."""

from __future__ import annotations

from pathlib import Path

from flexsearch.cli.common import stdout


def halved(budget: str) -> str:
    """Half of a budget, for each of the two searches."""
    from flexsearch.setting import parse_budget

    seconds, proposals = parse_budget(budget)
    return f"{seconds / 2}s" if seconds is not None else str(max(1, (proposals or 0) // 2))


def native_words(native_s: float, free_s: float | None) -> str:
    """What it costs to keep to native plans."""
    from flexsearch.report.units import percent, seconds

    if free_s is None:
        return f"Native {seconds(native_s)}; no plan of the free search fits into memory."
    text = f"Native {seconds(native_s)}, free {seconds(free_s)}: "
    more = native_s / free_s - 1.0 if free_s else 0.0
    if more <= 0:
        return f"{text}restricting plans to PyTorch's own modules costs nothing here."
    return f"{text}restricting plans to PyTorch's own modules costs {percent(more)}."


def tell_export(output: Path, size: str) -> None:
    """Print what to do with a native plan."""
    command = " ".join(filter(None, (f"flexsearch export {output} --to torch -o apply_plan.py", size)))
    stdout.print(f"As ordinary PyTorch: {command}", soft_wrap=True)
