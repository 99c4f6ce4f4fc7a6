"""Where the figures of a topology come from: measured, published, or guessed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Final, Literal, get_args

from pydantic import Field, Strict

from flexsearch.files import FileModel
from flexsearch.quantities import Text

SourceKind = Literal["measured", "published", "guessed"]
"""``measured``: on such a machine, by a benchmark or from training steps. ``published``: by the maker, as peaks are.
``guessed``: taken from a machine of another kind, or from experience."""
Figure = Literal[
    "devices.flops", "devices.memory_bandwidth", "devices.memory_bytes", "devices.memory_fraction",
    "devices.overhead_s", "devices.efficiency", "devices.efficiency_full", "devices.convolution", "devices.traffic",
    "devices.launches", "devices.recipe_passes", "links.bandwidth", "links.latency_s", "communication.overhead_s",
    "communication.factors", "communication.groups", "communication.message_s", "communication.turn_bytes",
    "communication.cpu_s", "communication.cpu_s_per_byte", "communication.cpu_by_form", "communication.busy_factor",
    "communication.pack_s_per_byte", "communication.tensor_by_form",
]  # fmt: skip
"""Fields of a topology file that have a source of their own; "devices.convolution" is ``convolution`` of
``efficiency``, for half precision, where another source says that than the rest of it; "devices.traffic" are ``other``
and ``traffic`` of the efficiencies, "devices.recipe_passes" is ``kernels.recipe_passes``, which no file of its own
says."""
FIGURES: Final[tuple[Figure, ...]] = get_args(Figure)


class Sources(FileModel):
    """The source of some figures. ``origin``: the data sheet, benchmark or table, in words."""

    figures: Annotated[tuple[Figure, ...], Strict(False), Field(min_length=1)]
    kind: SourceKind
    origin: Text


def said_twice(records: Iterable[Sources]) -> Figure | None:
    """A figure that several records name; None: there is none."""
    seen: set[Figure] = set()
    for record in records:
        for figure in record.figures:
            if figure in seen:
                return figure
            seen.add(figure)
    return None
