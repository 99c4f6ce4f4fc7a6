"""Random legal strategies: any splittable axes (uneven too), unequal shares of samples, replicas, odd device subsets,
weights sharded over all, or over few."""

from __future__ import annotations

from hypothesis import strategies as st

from flexsearch.graph import Operator, OperatorGraph
from flexsearch.graph.weight_gradients import able, weight_gradient_of
from flexsearch.strategy import OperatorConfig, Options, States, Strategy, make_config
from flexsearch.topology import Topology

TYPES: dict[str, dict[str, str]] = {
    "as is": {}, "half": {"precision": "bf16"}, "wide": {"precision": "bf16", "gradients": "float32"},
}  # fmt: skip
"""Options of element types."""


@st.composite
def configs(draw: st.DrawFn, op: Operator, devices: int, unequal: bool = True) -> OperatorConfig:
    """One operator's config on a topology with that many devices; with samples shared out ``unequal``-ly, too. Shrinks
    towards one device, unsplit."""
    degrees: dict[str, int] = {}
    parts = 1
    if op.splittable:
        for axis in draw(st.lists(st.sampled_from(op.splittable), max_size=2, unique=True)):
            degree = draw(st.integers(1, min(op.sizes[axis], devices // parts)))
            degrees[axis] = degree
            parts *= degree
    replicas = draw(st.integers(1, devices // parts))
    order = draw(st.permutations(range(devices)))
    samples = [axis for axis, degree in degrees.items() if op.roles[axis] == "sample" and degree > 1]
    shares = {axis: draw(st.tuples(*[st.integers(1, 4)] * degrees[axis])) for axis in samples if unequal}
    states, over = draw(st.sampled_from(States)), draw(st.sampled_from([0, 2, 3]))
    return make_config(op, degrees, order[: parts * replicas], shares=shares).sharded(states, over)


@st.composite
def strategies(
    draw: st.DrawFn, graph: OperatorGraph, topology: Topology, unequal: bool = True, divided: bool = False,
    types: st.SearchStrategy[str] | None = None,
) -> Strategy:  # fmt: skip
    """A config for every operator. ``divided``: also for the gradients of the weights of most that may have one.
    ``types``: keys of ``TYPES``."""
    chosen = {op.name: draw(configs(op, len(topology.devices), unequal)) for op in graph.operators}
    for name in able(graph) if divided else ():
        if draw(st.sampled_from([True, True, False])):
            op = graph.operators[graph.index[name]]
            chosen[weight_gradient_of(name)] = draw(configs(op, len(topology.devices), unequal)).sharded(States.WHOLE)
    bucket = draw(st.sampled_from([1, 1000, 25 * 2**20]))
    typed = TYPES["as is" if types is None else draw(types)]
    return Strategy.make(graph, topology, chosen, Options(bucket_bytes=bucket, **typed))  # type: ignore[arg-type]
