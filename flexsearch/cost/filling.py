"""What a profile says of pieces that it lacks: an estimate by the device's figures, times what those of other sizes
take over theirs."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Final

from flexsearch.cost.efficiency import task_seconds_of, work_of
from flexsearch.cost.profile import Entry, Profile
from flexsearch.topology import Device

NEAREST: Final = 3
"""So many of the same operator, of the nearest sizes, say how much longer than estimated one of another size takes."""
LEAST_S: Final = 1e-12


@dataclass(frozen=True)
class _Measured:
    """A task of an entry. ``size``: FLOPs and bytes; ``ratio``: measured over estimated seconds."""

    key: str
    size: tuple[float, float]
    ratio: float


class Filling:
    """Measured over estimated times of a profile's entries. ``device``: with the figures of the estimates.

    A piece takes the median ratio of the ``NEAREST`` of the same form (``profile.family``); where none of that was
    measured, of the same kind; and else no other than its estimate, if the profile has the device's figures. If not,
    that of all kinds that spend their time alike (``work_of``), or of all.
    """

    def __init__(self, profile: Profile, device: Device) -> None:
        self._ratios: tuple[dict[str, list[_Measured]], dict[str, list[_Measured]]] = ({}, {})
        self._medians: dict[tuple[str, bool], float] = {}
        self._general = profile.figures is None
        for key, entry in profile.entries.items():
            for backward in (False, True):
                if (measured := _measured(key, entry, device, backward)) is not None:
                    names = [_family(key), f"kind {entry.kind}"]
                    names += [f"work {work_of(entry.kind)}", "all"] if self._general else []
                    for name in names:
                        self._ratios[backward].setdefault(name, []).append(measured)

    def ratio(self, family: str, kind: str, flops: float, nbytes: float, backward: bool, without: str = "") -> float:
        """Of a task of this work. ``without``: an entry that does not count."""
        for name in (family, f"kind {kind}"):
            if near := self._nearest(name, (flops, nbytes), backward, without):
                return median(near)
        for name in (f"work {work_of(kind)}", "all") if self._general else ():
            if name in self._ratios[backward]:
                return self._median(name, backward)
        return 1.0

    def errors(self, profile: Profile) -> dict[str, list[float]]:
        """By kind of operator, |filled / measured - 1| of each task, filled from the entries of other sizes."""
        errors: dict[str, list[float]] = {}
        for key, entry in profile.entries.items():
            for backward in (False, True):
                rows = self._ratios[backward].get(f"kind {entry.kind}", ())
                own = next((row for row in rows if row.key == key), None)
                if own is not None and len(rows) > 1:
                    work = entry.backward if backward else entry.forward
                    ratio = self.ratio(_family(key), entry.kind, work.flops, work.nbytes, backward, key)
                    errors.setdefault(entry.kind, []).append(abs(ratio / max(own.ratio, LEAST_S) - 1.0))
        return errors

    def _nearest(self, name: str, size: tuple[float, float], backward: bool, without: str) -> list[float]:
        rows = [row for row in self._ratios[backward].get(name, ()) if row.key != without]
        rows.sort(key=lambda row: (_distance(row.size, size), row.key))
        return [row.ratio for row in rows[:NEAREST]]

    def _median(self, name: str, backward: bool) -> float:
        if (name, backward) not in self._medians:
            self._medians[name, backward] = median(row.ratio for row in self._ratios[backward][name])
        return self._medians[name, backward]


def longer_in_halves(profile: Profile) -> dict[str, float]:
    """By kind of operator, how long backward passes in two halves take over whole ones, at the median."""
    ratios: dict[str, list[float]] = {}
    for entry in profile.entries.values():
        if entry.halves_s is not None and entry.backward_s > 0.0:
            ratios.setdefault(entry.kind, []).append(max(1.0, sum(entry.halves_s) / entry.backward_s))
    return {kind: median(values) for kind, values in ratios.items()}


def estimated(entry: Entry, device: Device, backward: bool) -> float:
    """Seconds of a task of an entry by the device's figures."""
    work = entry.backward if backward else entry.forward
    return float(
        task_seconds_of(entry.kind, work.flops, work.nbytes, entry.product, entry.dtype, device, backward)
    )  # fmt: skip


def _measured(key: str, entry: Entry, device: Device, backward: bool) -> _Measured | None:
    seconds, work = (entry.backward_s, entry.backward) if backward else (entry.forward_s, entry.forward)
    if backward and seconds == 0.0:
        return None
    return _Measured(key, (work.flops, work.nbytes), seconds / max(estimated(entry, device, backward), LEAST_S))


def _distance(a: tuple[float, float], b: tuple[float, float]) -> float:
    """By which factor FLOPs and bytes differ, together. No logarithms: these are not the same on all machines."""
    first, second = (max(x, y, 1.0) / max(min(x, y), 1.0) for x, y in zip(a, b, strict=True))
    return first * second


def _family(key: str) -> str:
    return key.rpartition(" | ")[0]
