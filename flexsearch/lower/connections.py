"""On which connection a communication goes, compiled.

Messages between two devices share one connection, and a group's collectives share those of the group, or NCCL's
communicator: the first in is the first out. Of the all-reduces of a group, gloo carries out two at once, by two threads
(measured, ``benchmarks/link_sharing.py``).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flexsearch.compiled import ONE, TWO, U32, lean
from flexsearch.cost.collectives import ALL_REDUCE
from flexsearch.cost.tally import Rates
from flexsearch.lower.orbits import RECEIVES, SENDS, mixed, number_of


@lean
def connection_of(
    rates: Rates, form: Any, send: U32, first: Any, last: Any, receive: U32, begin: Any, end: Any
) -> Any:  # fmt: skip
    """A number of the connection from devices ``send[first:last]`` to ``receive[begin:end]``, odd where it carries two
    communications at once."""
    number = mixed(TWO if form == ALL_REDUCE or rates.by_group[form] == 1 else ONE)
    for k in range(first, last):
        number += number_of(send[k], SENDS)
    for k in range(begin, end):
        number += number_of(receive[k], RECEIVES)
    return (number << ONE) | np.uint64(rates.two_at_once[form])
