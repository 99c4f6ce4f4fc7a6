"""``--cost-per-hour``: what a step costs, said and in JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flexsearch.setting import Setting


def with_cost(data: dict[str, Any], setting: Setting, per_hour: float | None) -> dict[str, Any]:
    """A plan as JSON, with its cost if there is a price of a device and an hour."""
    from flexsearch.graph.sequence import sequence_length
    from flexsearch.report.money import Price

    if per_hour is None:
        return data
    devices, graph = len(setting.topology.devices), setting.graph
    return Price(per_hour).added(data, devices, graph.batch, sequence_length(graph))


def tell_cost(setting: Setting, step_s: float, per_hour: float | None) -> None:
    """Print it, if there is a price."""
    from flexsearch.cli.details import tell
    from flexsearch.graph.sequence import sequence_length
    from flexsearch.report.money import Price

    if per_hour is not None:
        graph, devices = setting.graph, len(setting.topology.devices)
        tell(Price(per_hour).words(step_s, devices, graph.batch, sequence_length(graph)))
