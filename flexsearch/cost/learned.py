"""What measured iteration times have taught beyond the costs that were measured one by one: few figures, each with a
meaning of its own, which a profile keeps beside its entries."""

from __future__ import annotations

import re
from typing import Annotated, Final

from pydantic import Field

from flexsearch.files import FileModel
from flexsearch.quantities import Amount, Count, Factor, Name, Seconds

FULL: Final = "full."
TRAFFIC: Final = "traffic."
"""How names of learned figures begin that belong to a device's ``efficiency_full``, and to ``traffic`` of either."""


class Residual(FileModel):
    """How well costs fit what was measured: ``n`` times, and of |predicted / measured - 1| the ``median`` and the 90th
    percentile, each time predicted from the others."""

    n: Annotated[Count, Field(ge=1)]
    median: Annotated[float, Field(ge=0.0, le=1e9)]
    p90: Annotated[float, Field(ge=0.0, le=1e9)]


class Network(FileModel):
    """Of one kind of cluster. ``time``: of moving bytes, over what the topology says. ``start_s``: what each message or
    collective takes to start beyond what the topology says, s; below 0, less than that."""

    time: Factor = 1.0
    start_s: Annotated[float, Field(ge=-1000.0, le=1000.0)] = 0.0


class Learned(FileModel):
    """``compute``: seconds of a compute task or an update, over what entries and roofline say. ``task_s``: host time of
    each compute task beyond that. ``efficiency``: figures of the device's efficiency in place of its own ("matrix",
    "traffic.loss"), those of ``efficiency_full`` as "full.matrix".
    ``networks``: by ``network_name``. ``plans``: how many taught, over all; ``error``: median of |predicted /
    measured - 1| of the last ones, each predicted from the others; ``residual``: the same of ``calibrate``'s rows."""

    compute: Factor = 1.0
    task_s: Seconds = 0.0
    efficiency: dict[Name, Amount] = Field(default_factory=dict)
    networks: dict[Name, Network] = Field(default_factory=dict)
    plans: Count = 0
    error: Annotated[float, Field(ge=0.0, le=1e9)] | None = None
    residual: Residual | None = None

    def corrects(self, figure: str, topology: str) -> bool:
        """Whether something was learned of a figure: "compute", "task_s", or of a network "time", "start_s"."""
        network, usual = self.network(topology), Network()
        if figure in Network.model_fields:
            return bool(getattr(network, figure) != getattr(usual, figure))
        scaled = bool(getattr(self, figure) != getattr(Learned(), figure))
        return scaled or (figure == "compute" and bool(self.efficiency))

    def network(self, topology: str) -> Network:
        """Of the topology of this name; as it says itself where nothing was learned."""
        return self.networks.get(network_name(topology)) or Network()


def network_name(topology: str) -> str:
    """Name of a kind of cluster: that of a topology without the number of its hosts."""
    return re.sub(r":\d+$", "", topology)
