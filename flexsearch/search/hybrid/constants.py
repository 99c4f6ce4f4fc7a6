"""Every tuned number of the search over layouts, with what chose it, as in ``search.constants``.

Where it says "taken", or nothing, no measurement chose the number; ``benchmarks.pipeline_quality`` and
``benchmarks.llm_plans`` have the tables that a change must not make worse.
"""

from __future__ import annotations

from math import inf
from typing import Final

# ---- where a graph is cut

NARROW: Final = (1.05, 2.0, 4.0, inf)
"""A cut may let so many times as many bytes through as the narrowest one; the first of these that leaves enough cuts
counts."""
SHORT: Final = 64
"""Graphs with so few places may be cut anywhere: chains of unlike layers have few narrow ones."""

# ---- divisions: stages of different sizes

PLACES: Final = 48
"""Places to cut at that are looked at; with more, evenly spaced ones (by time). Taken."""
UNITS: Final = 32
"""Most groups of devices that are divided among stages. Taken."""
STAGES: Final = 8
"""Most stages. Taken."""
SLACK: Final = 1.5
"""The slowest stage may take so many times as long as it must with so many stages. Taken."""
LIMITS, SUMS = 24, 1 << 21
"""Most limits on the slowest stage that are tried, and most sums with all of them for one stage. Taken."""
FEW_UNITS: Final = 8
"""Most groups that are divided among stages of a long graph on equal devices, where equal stages are good. Taken."""
DIVISIONS: Final = 8
"""Divisions of a block that are estimated in all orders and with all options. Taken."""

# ---- the order in which plans are simulated

UNKNOWN: Final = 0.1
WEIGHT: Final = 4
"""Standard deviation of ratios, relative to their mean, before anything is simulated; it counts as much as ``WEIGHT``
sorts. Taken."""
CLIMBED: Final = 4
"""Layouts that are improved move by move: the best of so many different groups of devices. Taken."""
SURE: Final = 2
"""Sorts of layouts are left out if their estimates are worse than the best plan by so many standard deviations of what
simulations say of others, one upon the other. Taken."""
PATIENCE: Final = 10
"""So many plans in a row that are no better end a series of trials. Taken."""
SHORT_PATIENCE, SHORT_MARGIN = 80, 1.05
"""The same for short graphs, whose plans are simulated in milliseconds; and so many times the best time an estimate of
theirs may be. Taken."""
EXPLORED: Final = 0.4
"""Share of the budget after which no more layouts are estimated, and no more sorts tried. Taken."""
FEW: Final = 6
"""Most plans of a family that are simulated for its own sake. Taken."""
FAR: Final = 1.5
"""A family does not fit for sure if the least estimate of its memory is so many times what there is: estimates are at
most a third off. Taken."""
POLISHED: Final = 2
"""Plans whose splits are improved; of a short graph, those of all groups of devices. Taken."""

# ---- moves

QUARTERS: Final = 4
"""Stages that compute blocks again may do so with every fourth part of them. Taken."""
REACH: Final = 2
"""A border of a long graph moves by so many places at most. Taken."""
LISTED: Final = 4096
"""Most passes in one direction that list scheduling puts in order. Taken."""

# ---- the answer

EQUAL: Final = 0.001
"""Share of the time by which plans differ that count as equally fast: the one that takes less memory is the answer.
Taken: predictions err by more, and two layouts 0.01 % apart differed by 7 GB."""
PLAINER: Final = 0.005
"""Share of the time that a plan must gain by gathering more buckets ahead, or fewer, than is usual. Taken: whoever
trains by it has to set this apart, and predictions err by more."""

# ---- the clock, and how often something is looked at

AHEAD: Final = 32
"""Most plans that are looked at for what will be simulated after the next one."""
ANSWER, MOST_ANSWER = 1.5, 0.3
"""What is told of a plan at the end takes about so many times as long as its simulation; most that is set aside for it,
a share of the budget."""
EVERY_S: Final = 0.2
"""Time between two reports while layouts are estimated."""
LATE_S: Final = 1.0
"""Workers are started only in searches that take longer than this. Taken: it is what starting one costs."""
