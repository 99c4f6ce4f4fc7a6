"""Floor 2: graph x strategy x topology -> layouts, reshards and the one task graph."""

from flexsearch.lower.layout import Entry, Layout, bounding
from flexsearch.lower.lowering import Lowered, Lowering, lower, lower_for_ranks
from flexsearch.lower.pieces import Edge, Weight
from flexsearch.lower.refit import refit, refit_forward
from flexsearch.lower.reshard import Exchange, Move, Phase, Reshard
from flexsearch.lower.taskgraph import Communication, Member, TaskGraph, TaskKind

__all__ = [
    "Communication", "Edge", "Entry", "Exchange", "Layout", "Lowered", "Lowering", "Member", "Move", "Phase",
    "Reshard", "TaskGraph", "TaskKind", "Weight", "bounding", "lower", "lower_for_ranks", "refit", "refit_forward",
]  # fmt: skip
