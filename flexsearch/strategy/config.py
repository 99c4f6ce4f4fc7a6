"""How one operator is split: a degree for each axis, a replica degree, and the devices; and what makes that legal."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import gcd, prod
from typing import Final, NamedTuple

from flexsearch.errors import StrategyError
from flexsearch.files import printable
from flexsearch.graph import Interval, Operator, chunks
from flexsearch.quantities import MAX_DEVICES

Shares = tuple[tuple[str, tuple[int, ...]], ...]


class States(IntEnum):
    """Which states of a weight are kept in parts where several devices need the same weight: each keeps, and updates,
    one part. The levels are those of ZeRO (Rajbhandari et al., SC 2020): 0 to 3.

    ``WHOLE``: none. ``OPTIMIZER``: the optimizer's. Gradients are summed into parts once a step, and the updated
    weights are gathered. ``GRADIENTS``: those and gradients, which are summed into parts after every microbatch.
    ``WEIGHTS``: those and the weights, which are gathered for use, as in fully-sharded data parallelism.
    """

    WHOLE = 0
    OPTIMIZER = 1
    GRADIENTS = 2
    WEIGHTS = 3

    __hash__ = int.__hash__  # an enumeration's is in Python, and configs are looked up all the time


OVER_ALL: Final = 2 * MAX_DEVICES
"""Rank of a level of sharding: the level times this, plus over how many devices; as one less, over all."""


class Sharding(NamedTuple):
    """How the states of a weight are kept: which of them in parts, ``over`` how many consecutive devices (0: all). Of
    the devices that need the same weight, those among so many consecutive ones (of a server) divide its states, and the
    next ones do the same (hybrid sharding: Zhao et al., PyTorch FSDP, VLDB 2023, section 3.2.2)."""

    states: States = States.WHOLE
    over: int = 0

    @property
    def rank(self) -> int:
        """A number, the larger, the more is kept in parts, and the smaller these are; 0 if nothing is. Of several
        readers of a weight, the one with the largest decides."""
        return int(self.states) * OVER_ALL + (self.over or OVER_ALL - 1) if self.states else 0

    @classmethod
    def of_rank(cls, rank: int) -> Sharding:
        """The one with this rank."""
        states, over = divmod(rank, OVER_ALL)
        return cls(States(states), over % (OVER_ALL - 1))


@dataclass(frozen=True, slots=True)
class OperatorConfig:
    """``degrees``: (axis, parts) of the split axes only, in the operator's axis order. ``devices``: indices into the
    topology, row-major over those degrees with the replica as the last, fastest coordinate. ``states``: how the states
    of its weights are kept. ``shares``: (axis, relative sizes of its parts) of the split axes whose parts are not
    equal: 3 : 1 between a fast and a slow device. ``sharded_over``: see ``Sharding``.
    """

    degrees: tuple[tuple[str, int], ...]
    devices: tuple[int, ...]
    replicas: int = 1
    states: States = States.WHOLE
    shares: Shares = ()
    sharded_over: int = 0

    @property
    def sharding(self) -> Sharding:
        """How its weights are kept."""
        return Sharding(self.states, self.sharded_over)

    @property
    def parts(self) -> int:
        """Number of different pieces (replicas not counted)."""
        return prod(parts for _, parts in self.degrees)

    def degree(self, axis: str) -> int:
        """Degree of an axis; 1 if it is not split."""
        for name, parts in self.degrees:
            if name == axis:
                return parts
        return 1

    def on(self, devices: Iterable[int]) -> OperatorConfig:
        """The same split on other devices."""
        return OperatorConfig(
            self.degrees, tuple(devices), self.replicas, self.states, self.shares, self.sharded_over
        )  # fmt: skip

    def sharded(self, states: States, over: int = 0) -> OperatorConfig:
        """The same split with weights that are kept so (``Sharding``)."""
        return OperatorConfig(
            self.degrees, self.devices, self.replicas, states, self.shares, over if states else 0
        )  # fmt: skip

    def intervals(self, op: Operator, position: int) -> dict[str, Interval]:
        """Interval of each axis for the piece on ``devices[position]``."""
        coordinate, shares = position // self.replicas, dict(self.shares)
        intervals = {axis: (0, size) for axis, size in op.sizes.items()}
        for axis, parts in reversed(self.degrees):
            coordinate, index = divmod(coordinate, parts)
            intervals[axis] = chunks(op.sizes[axis], parts, shares.get(axis, ()))[index]
        return intervals


def make_config(
    op: Operator, degrees: Mapping[str, int], devices: Iterable[int], states: States = States.WHOLE,
    shares: Mapping[str, Sequence[int]] | None = None,
) -> OperatorConfig:  # fmt: skip
    """Config with the given degrees; devices beyond their product become replicas. Degrees of 1 are dropped, and shares
    that are equal or leave a part without any index."""
    devices = tuple(devices)
    kept = tuple((axis, degrees[axis]) for axis in op.sizes if degrees.get(axis, 1) > 1)
    replicas = max(1, len(devices) // prod(n for _, n in kept))
    uneven: Shares = ()
    if shares:
        lowest = ((axis, _lowest_terms(shares[axis])) for axis, parts in kept if len(shares.get(axis, ())) == parts)
        uneven = tuple((axis, own) for axis, own in lowest if max(own) > 1 and _fills(op.sizes[axis], own))
    return OperatorConfig(kept, devices, replicas, states, uneven)


def _lowest_terms(shares: Sequence[int]) -> tuple[int, ...]:
    divisor = gcd(*shares)
    return tuple(share // divisor for share in shares)


def _fills(size: int, shares: Sequence[int]) -> bool:
    """Whether each part of ``size`` indices gets one."""
    return all(low < high for low, high in chunks(size, len(shares), shares))


def read_pin(text: str) -> tuple[str, list[tuple[str, str]]]:
    """Pattern of names, and (key, value) pairs, of ``"encoder.*: batch=4, devices=0-3"``; what they mean is told by
    :mod:`flexsearch.search.pins`. Raises StrategyError."""
    pattern, _, rest = text.partition(":")
    parts = [part.partition("=") for part in re.split(r",(?=\s*[A-Za-z_])", rest) if part.strip()]
    settings = [(key.strip(), value.strip()) for key, _, value in parts]
    if not pattern.strip() or not settings or not all(key and value for key, value in settings):
        raise StrategyError(
            f"pin {printable(text)!r} cannot be read",
            'A pin reads "PATTERN: KEY=VALUE, ...", for instance "encoder.*: batch=4, devices=0-3".',
        )
    return pattern.strip(), settings


def check_config(op: Operator, config: OperatorConfig, device_count: int) -> None:
    """Raise StrategyError, naming the operator and the remedy, unless ``config`` is legal for ``op``."""
    where = f"operator {op.name!r}"
    for axis, parts in config.degrees:
        if axis not in op.sizes:
            raise StrategyError(f"{where} has no axis {axis!r}; its axes are {', '.join(op.sizes) or 'none'}")
        if parts < 1 or parts > op.sizes[axis]:
            raise StrategyError(f"{where}: degree {parts} on axis {axis!r} of size {op.sizes[axis]} is impossible")
        if parts > 1 and axis not in op.splittable:
            raise StrategyError(
                f'{where}: axis {axis!r} cannot be split in pattern "{op.pattern}" '
                f"(splittable: {', '.join(op.splittable) or 'none'})"
            )
    order = [axis for axis in op.sizes if config.degree(axis) > 1]
    if [axis for axis, _ in config.degrees] != order:
        raise StrategyError(f"{where}: degrees must name each split axis once, in the order {order}")
    check_shares(op, config)
    if [axis for axis, _ in config.shares] != [axis for axis, _ in config.degrees if axis in dict(config.shares)]:
        raise StrategyError(f"{where}: shares must name each axis once, in the order of the degrees")
    if config.replicas < 1 or config.parts * config.replicas != len(config.devices):
        raise StrategyError(
            f"{where}: degrees {dict(config.degrees)} and {config.replicas} replicas make "
            f"{config.parts * config.replicas} pieces, but {len(config.devices)} devices are given"
        )
    if config.sharded_over and (not config.states or not 1 < config.sharded_over < OVER_ALL - 1):
        raise StrategyError(
            f"{where}: weights cannot be sharded over {config.sharded_over} devices with states "
            f"{config.states.name.lower()}",
            "Give 2 devices or more and states that are sharded, or leave out sharded_over.",
        )
    if len(set(config.devices)) != len(config.devices):
        raise StrategyError(f"{where}: {list(config.devices)} names a device twice; pieces need devices of their own")
    for device in config.devices:
        if not 0 <= device < device_count:
            raise StrategyError(f"{where}: device {device} does not exist; there are devices 0 to {device_count - 1}")


def check_shares(op: Operator, config: OperatorConfig) -> None:
    """Raise StrategyError unless the shares of ``config`` suit its degrees and ``op``."""
    for axis, shares in config.shares:
        where = f"operator {op.name!r}: shares of axis {axis!r}"
        if config.degree(axis) == 1 or len(shares) != config.degree(axis):
            raise StrategyError(
                f"{where}: {len(shares)} are given for {config.degree(axis)} parts", "Give one for each part."
            )
        if op.roles[axis] != "sample":
            samples = ", ".join(a for a in op.splittable if op.roles[a] == "sample") or "none"
            raise StrategyError(f"{where}: only samples can be shared out unequally (axes of samples: {samples})")
        if min(shares) < 1 or not _fills(op.sizes[axis], shares):
            raise StrategyError(
                f"{where}: {':'.join(map(str, shares))} leaves a part of {op.sizes[axis]} indices empty",
                "Give whole numbers from 1 that are closer to each other.",
            )
