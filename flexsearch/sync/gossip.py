"""With few others: gossip with changing neighbours, a fixed ring, any doubly stochastic matrix.

Row i of the matrix K says what position i makes of what all have: x_i = sum_j K_ij x_j. Where gradients are mixed,
replicas' weights drift apart by what is not yet known to all; where weights are, they are drawn together: W = K (W - lr
G(W)), which is D-PSGD with its lines 4 and 5 exchanged, as its authors allow (Lian et al., 2017)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from flexsearch.errors import RecipeError
from flexsearch.sync.compression import Compression, Sizes
from flexsearch.sync.exchange import Exchange, Group, neighbours
from flexsearch.sync.kinds import Work, times, work
from flexsearch.sync.options import one_of
from flexsearch.sync.partners import Partners

if TYPE_CHECKING:
    from torch import Tensor

TOLERANCE = 1e-9
"""Of sums of rows and columns."""


@dataclass(frozen=True)
class Mixing(Partners):
    """``what``: "gradients" or "weights"."""

    what: str = "gradients"

    exact: ClassVar[bool] = False

    def __post_init__(self) -> None:
        one_of(f"what of {self.name}", self.what, ("gradients", "weights"))

    @property
    def weights(self) -> bool:
        return self.what == "weights"

    def matrix(self, size: int, step: int) -> npt.NDArray[np.float64]:
        """K, (size, size), in a step."""
        raise NotImplementedError

    def average(
        self, x: Tensor, group: Group, compression: Compression, memory: Any, step: int, sizes: Sizes
    ) -> tuple[Tensor, Tensor, Any]:
        self.refuse_alone(compression)
        payload = compression.encode(x, step, group.ranks)

        def decode(arrived: Any) -> Tensor:
            return compression.decode(arrived, sizes.n).to(x.dtype)

        return group.mix(payload, self.matrix(group.size, step).tolist(), decode), decode(payload), memory

    def exchanges(
        self, members: int, hosts: tuple[int, ...], compression: Compression, sizes: Sizes, step: int
    ) -> list[Exchange] | None:
        nbytes = compression.nbytes(sizes)
        if nbytes is None:
            return None
        pairs = neighbours(self.matrix(members, step).tolist())
        return [Exchange("exchange", members, (nbytes,) * len(pairs), pairs)]

    def finishing(self, compression: Compression, sizes: Sizes, members: int, received: int) -> Work:
        others = received // max(1, compression.nbytes(sizes) or 1)
        mixed = work(copy=(1 + others) * sizes.nbytes, add=others * sizes.nbytes)
        return mixed + times(2 + others, compression.decoding(sizes))


@dataclass(frozen=True)
class Gossip(Mixing):
    """With both neighbours at distance s, which goes 1, 2, 4, ... up to P/2 and round again (GossipGraD, Daily et al.,
    2018), equal shares; ``grow``: "double", or "one": 1, 2, 3, ..."""

    grow: str = "double"

    name: ClassVar[str] = "gossip"
    changes: ClassVar[str] = "each replica averages with two others, and it takes steps until all know of a gradient"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("grow of gossip", self.grow, ("double", "one"))

    def distance(self, size: int, step: int) -> int:
        """s in a step."""
        most = size // 2
        return 1 << step % most.bit_length() if self.grow == "double" else 1 + step % most

    def cycle(self, size: int) -> int:
        return (size // 2).bit_length() if self.grow == "double" else size // 2

    def matrix(self, size: int, step: int) -> npt.NDArray[np.float64]:
        return shifted(size, self.distance(size, step))


@dataclass(frozen=True)
class Ring(Mixing):
    """With both neighbours in a fixed ring, equal shares."""

    name: ClassVar[str] = "ring"
    changes: ClassVar[str] = "each replica averages with its two neighbours alone"

    def matrix(self, size: int, step: int) -> npt.NDArray[np.float64]:
        return shifted(size, 1)


def shifted(size: int, distance: int) -> npt.NDArray[np.float64]:
    """Equal shares of oneself and of those at a distance on both sides, who may be the same one."""
    k = np.eye(size)
    for i in range(size):
        others = {(i + distance) % size, (i - distance) % size}
        k[i, i] = 1 / (1 + len(others))
        k[i, list(others)] = 1 / (1 + len(others))
    return k


@dataclass(frozen=True)
class Matrix(Mixing):
    """By any doubly stochastic matrix. ``file``: JSON, a list of rows; or the ``rows`` themselves."""

    file: str = ""
    rows: tuple[tuple[float, ...], ...] = ()

    name: ClassVar[str] = "matrix"
    changes: ClassVar[str] = "replicas average with some others, by the matrix"

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.file) == bool(self.rows):
            raise RecipeError("matrix needs a file", "Write matrix:file=K.json, a list of rows of numbers.")
        if self.file:
            object.__setattr__(self, "rows", _read(self.file))
        if {len(row) for row in self.rows} != {len(self.rows)}:
            raise RecipeError("the matrix is not square", "Give a row, and in it a number, for each worker.")
        k = self.matrix(0, 0)
        for sums, what in ((k.sum(1), "row"), (k.sum(0), "column")):
            worst = int(np.abs(sums - 1).argmax())
            if not abs(sums[worst] - 1) <= TOLERANCE or (k < 0).any():
                wrong = f"{what} {worst} sums to {sums[worst]:.6g}" if (k >= 0).all() else "it has a negative entry"
                raise RecipeError(
                    f"the matrix is not doubly stochastic: {wrong}",
                    "Its entries must not be negative, and each row and each column must sum to 1.",
                )

    def check(self, size: int, hosts: tuple[int, ...], devices: int) -> None:
        if len(self.rows) != size:
            raise RecipeError(
                f"the matrix has {len(self.rows)} rows, but there are {size} workers",
                f"Give a {size}x{size} matrix, or --workers {len(self.rows)}.",
            )

    def matrix(self, size: int, step: int) -> npt.NDArray[np.float64]:
        return np.array(self.rows, np.float64)


def _read(file: str) -> tuple[tuple[float, ...], ...]:
    try:
        rows = json.loads(Path(file).read_text())
        return tuple(tuple(float(value) for value in row) for row in rows)
    except (OSError, ValueError, TypeError) as error:
        raise RecipeError(f"cannot read the matrix {file}: {error}", "Give a JSON file, a list of rows.") from error
