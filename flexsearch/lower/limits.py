"""What is too long to be simulated, said before anything is."""

from __future__ import annotations

from collections import Counter
from typing import Final

from flexsearch.cost import Costs
from flexsearch.cost.updates import STREAMS
from flexsearch.errors import StrategyError
from flexsearch.graph import OperatorGraph, whole_piece
from flexsearch.lower.pieces import TURN_S
from flexsearch.topology import Topology

MAX_TURNS: Final = 100_000
"""Of one device: the critical path, which reads every turn in Python, takes at most a second for so many."""


def refuse_endless_turns(graph: OperatorGraph, topology: Topology, costs: Costs) -> None:
    """Raise StrategyError where devices take turns on a processor and have so much to compute that simulating every
    turn of it would take minutes. Elsewhere the cost of a simulation does not depend on how long tasks are."""
    users = Counter(topology.processor_of)
    sharing = [d for d, processor in enumerate(topology.processor_of) if users[processor] > 1]
    pieces = [
        whole_piece(op, [graph.tensor[n].shape for n in op.inputs], [graph.tensor[n].shape for n in op.outputs])
        for op in (graph.operators if sharing else ())
    ]
    weights = graph.of_kind("parameter")
    nbytes = sum(tensor.nbytes for tensor in weights)
    kinds = {topology.devices[d].model_dump_json(exclude={"name", "host", "processor"}): d for d in sharing}
    for device in kinds.values():
        seconds = sum(sum(costs.compute(k, piece, device)) for k, piece in enumerate(pieces))
        seconds += max(costs.update(nbytes, len(weights), device, name) for name in STREAMS)
        if seconds > MAX_TURNS * TURN_S:
            raise StrategyError(
                f"graph {graph.name!r} takes {seconds:.3g} s to compute on device {topology.devices[device].name!r}, "
                f"which shares its processor; turns of {TURN_S:g} s are simulated for at most "
                f"{MAX_TURNS * TURN_S:,.0f} s",
                "Check the device's flops, memory_bandwidth and overhead_s, and the times of the profile.",
            )
