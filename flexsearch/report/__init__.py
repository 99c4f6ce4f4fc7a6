"""Floor 4: what a plan does and how it runs, for people: words, tables, traces. ``report.plots`` needs matplotlib and
is imported by name."""

from flexsearch.report.grid import Column, Grid, hanging
from flexsearch.report.summary import Group
from flexsearch.report.tables import PlanRow, dominates, plan_rows, plan_table, yardsticks
from flexsearch.report.trace import chrome_trace, save_trace
from flexsearch.report.words import axis_word, device_set, groups, in_words

__all__ = [
    "Column", "Grid", "Group", "PlanRow", "axis_word", "chrome_trace", "device_set", "dominates", "groups", "hanging",
    "in_words", "plan_rows", "plan_table", "save_trace", "yardsticks",
]  # fmt: skip
