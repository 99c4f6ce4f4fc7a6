"""With whom replicas synchronise: what all of these can do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from flexsearch.errors import RecipeError
from flexsearch.sync.compression import Compression, Sizes
from flexsearch.sync.exchange import Exchange, Group
from flexsearch.sync.kinds import Work

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Partners:
    """``name``: as written. ``weights``: whether weights are mixed instead of gradients."""

    name: ClassVar[str]
    changes: ClassVar[str] = ""
    """What it changes in the mathematics, in words; empty: nothing."""
    exact: ClassVar[bool] = True
    """Whether everyone gets the same mean over all."""
    servers: ClassVar[bool] = False

    @property
    def weights(self) -> bool:
        """Whether weights are mixed instead of gradients."""
        return False

    def cycle(self, size: int) -> int:
        """Synchronisations until it exchanges with the same again."""
        return 1

    def check(self, size: int, hosts: tuple[int, ...], devices: int) -> None:
        """Raise RecipeError if so many replicas cannot do this, on hosts by position, among so many devices."""

    def average(
        self, x: Tensor, group: Group, compression: Compression, memory: Any, step: int, sizes: Sizes
    ) -> tuple[Tensor, Tensor, Any]:
        """What each row gets of all rows' (rows, n), after compression; what counts as sent; what compression
        remembers."""
        raise NotImplementedError

    def exchanges(
        self, members: int, hosts: tuple[int, ...], compression: Compression, sizes: Sizes, step: int
    ) -> list[Exchange] | None:
        """Those of ``average`` in a step; None where they depend on the numbers."""
        raise NotImplementedError

    # ---- what a position computes for ``average``

    def encoding(self, compression: Compression, sizes: Sizes, first: Exchange) -> Work:
        """Before its first exchange."""
        return compression.encoding(sizes)

    def merging(self, compression: Compression, sizes: Sizes, members: int, received: int, place: float) -> Work:
        """Between two exchanges, for one who received so many bytes; ``place``: the share of the exchanges that is
        over."""
        return compression.merging(sizes, received, place)

    def finishing(self, compression: Compression, sizes: Sizes, members: int, received: int) -> Work:
        """After its last exchange, in which the position received so many bytes."""
        return compression.finishing(sizes, members)

    def refuse_alone(self, compression: Compression) -> None:
        """Raise RecipeError for a compression that works only among all."""
        if compression.alone:
            raise RecipeError(
                f"{self.name} with {compression.name} makes no sense: {compression.alone}",
                f"Use {compression.name} with all-reduce, or another compression.",
            )
