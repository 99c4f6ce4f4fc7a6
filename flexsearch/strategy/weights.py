"""Which operators have weights or are worth a config of their own, and how their weights may be split and kept."""

from __future__ import annotations

from flexsearch.graph import OperatorGraph
from flexsearch.strategy.config import OperatorConfig, Sharding, States
from flexsearch.topology import Topology


def has_weights(graph: OperatorGraph, operator: int) -> bool:
    """Whether an operator reads parameters."""
    return any(graph.tensor[name].kind == "parameter" for name in graph.operators[operator].inputs)


def shardings(topology: Topology) -> tuple[Sharding, ...]:
    """How a search may keep weights: whole, in parts, in parts inside a host."""
    inside = (Sharding(States.WEIGHTS, topology.host_size),) if topology.host_size else ()
    return Sharding(), Sharding(States.WEIGHTS), *inside


def effective(graph: OperatorGraph, operator: int, config: OperatorConfig) -> OperatorConfig:
    """The config without options that do nothing: states in parts where there are no weights, or on one device."""
    idle = config.states and (len(config.devices) == 1 or not has_weights(graph, operator))
    return config.sharded(States.WHOLE) if idle else config


def is_heavy(graph: OperatorGraph, operator: int) -> bool:
    """Whether an operator is worth a config of its own: it has weights that can be split, or contracts activations.
    Others (pointwise, views, pools, norms) follow it."""
    op = graph.operators[operator]
    if op.kind in ("attention", "einsum"):
        return True
    return any(
        graph.tensor[name].kind == "parameter" and len(operand.dimensions) > 1 and operand.names() & set(op.splittable)
        for operand, name in zip(op.access.inputs, op.inputs, strict=True)
    )


def table_axes(graph: OperatorGraph, operator: int) -> tuple[str, ...]:
    """Axes to split an embedding by: its rows where the table weighs more than what is looked up, or is shared with the
    output layer; a small table (positions) is best replicated."""
    op = graph.operators[operator]
    table = next(name for name in op.inputs if graph.tensor[name].kind == "parameter")
    worth = graph.tensor[table].nbytes > graph.tensor[op.outputs[0]].nbytes or len(graph.consumers[table]) > 1
    return op.axes_of("reduction") if worth else ()
