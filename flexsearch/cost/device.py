"""Time of computing on one kind of device: as measured, or by the device's figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from flexsearch.cost.costed import Costed
from flexsearch.cost.efficiency import moving_rate, task_seconds_of, update_rates
from flexsearch.cost.filling import Filling, longer_in_halves
from flexsearch.cost.learned import FULL, TRAFFIC
from flexsearch.cost.profile import Entry, Profile
from flexsearch.cost.ticks import FOREVER, LAUNCH_PARTS, TICK, task_seconds, whole
from flexsearch.cost.updates import CAST_STREAMS, STREAMS, WIDER_STREAMS
from flexsearch.graph.ops import shipped
from flexsearch.topology import Device
from flexsearch.topology.kernels import USUAL, Efficiency

Numbers = npt.NDArray[np.int64]
Seconds = npt.NDArray[np.float64]


class DeviceModel:
    """Costs on one kind of device."""

    def __init__(self, device: Device, profile: Profile | None) -> None:
        self.profile = profile if profile is not None and profile.device.fits(device) else None
        self.device = device
        self._queued = device.launch_s > 0.0  # captured steps have no launches, whatever was measured
        if self.profile is not None:
            self.device = self._measured_device(self.profile)
        self._compute, self._task_s = 1.0, 0.0
        self._filling: Filling | None = None
        self._longer: dict[str, float] = {}
        if self.profile is not None:
            if (learned := self.profile.learned) is not None:
                self._compute, self._task_s = learned.compute, learned.task_s
            self._filling = Filling(self.profile, self.device)
            self._longer = longer_in_halves(self.profile)

    def _measured_device(self, profile: Profile) -> Device:
        """The device with the figures that the profile measured. Without any, its measurements are compared with the
        usual shares of the peaks, and what they lack is estimated by those."""
        if profile.figures is not None:
            return profile.figures.on(self.device)
        taught = {} if profile.learned is None else profile.learned.efficiency
        plain = bool(profile.entries)
        return self.device.model_copy(
            update={
                "efficiency": None if plain else _replaced(self.device.efficiency, taught, ""),
                "efficiency_full": None if plain else _replaced(self.device.efficiency_full, taught, FULL),
            }
        )

    def seconds(self, costed: Costed, extents: Mapping[str, int]) -> tuple[float, float]:
        if self.profile is not None and (entry := self.profile.entries.get(costed.signature(extents))) is not None:
            seconds = entry.forward_s, entry.backward_s
        else:
            seconds = self._estimated(costed, extents, max)
            if self._filling is not None:
                like, kind, work = costed.family, costed.op.kind, costed.counts(extents)
                ratios = (self._filling.ratio(like, kind, *work[back], backward=bool(back)) for back in (0, 1))
                seconds = tuple(s * ratio for s, ratio in zip(seconds, ratios, strict=True))
        return in_ticks(*(s * self._compute + self._task_s for s in seconds))

    @property
    def launch_s(self) -> float:
        """Seconds that the host takes to launch an operator, in whole parts of it; 0.0 where it has no queue for that.
        """
        ticks = round(self.device.launch_s / (LAUNCH_PARTS * TICK))
        return LAUNCH_PARTS * max(1, ticks) * TICK if self._queued else 0.0

    def launches(self, costed: Costed, counts: tuple[int, int, int]) -> tuple[float, ...]:
        """Launches of a piece in its forward task, its backward task, and for gradients of parameters alone: by what
        the host was measured to take for it, for pieces that differ in size, or for the kind; else ``counts`` of
        kernels."""
        forward, backward, weights = counts
        measured = [host for key in (costed.signature(costed.op.sizes), costed.family, costed.op.kind)
                    if (host := self._hosts.get(key)) is not None]  # fmt: skip
        if not measured or not self._queued:
            kernels = self.device.launched.kernels.get(costed.op.kind, 1)
            return forward * kernels, backward * kernels, weights * kernels
        ahead, back = (seconds / self.launch_s for seconds in measured[0])
        return ahead, back if backward else 0.0, back * weights / backward if backward else 0.0

    def update_launches(self, optimizer: str, half: bool) -> float:
        """Launches of an update for each tensor; ``half``: of weights in half precision beside their masters."""
        measured = {} if self.profile is None else self.profile.updates
        seconds = next((entry.host_s_per_tensor for name, entry in measured.items() if name == optimizer), None)
        casts = float(self.device.launched.casts) if half else 0.0
        return casts + (1.0 if seconds is None or not self._queued else seconds / self.launch_s)

    @cached_property
    def _hosts(self) -> Mapping[str, tuple[float, float]]:
        """Seconds of a host to launch forward and backward tasks, medians: by signature, family and kind."""
        rows: dict[str, list[tuple[float, float]]] = {}
        for key, entry in ({} if self.profile is None else self.profile.entries).items():
            if (host := entry.host_s) is not None:
                for name in (key, key.rpartition(" | ")[0], entry.kind):
                    rows.setdefault(name, []).append(host)
        return {name: (median(f for f, _ in row), median(b for _, b in row)) for name, row in rows.items()}

    def halves(
        self, costed: Costed, extents: Mapping[str, int], inputs: float, backward: float
    ) -> tuple[float, float]:  # fmt: skip
        """Seconds of the two halves of a backward task: as measured, or together as much longer than the whole as those
        of the same kind. ``inputs``: of the first by its share of the whole, ``backward``."""
        entry = None if self.profile is None else self.profile.entries.get(costed.signature(extents))
        if entry is not None and entry.halves_s is not None:
            inputs, weights = (s * self._compute + self._task_s for s in entry.halves_s)
        else:
            longer = self._longer.get(costed.op.kind, 1.0)
            inputs, weights = (inputs, backward * longer - inputs) if costed.trained else (backward * longer, 0.0)
        return float(whole(inputs)), float(whole(weights))

    def seconds_many(self, costed: Costed, extents: Mapping[str, Numbers]) -> tuple[Seconds, Seconds]:
        """Seconds of forward and backward tasks of pieces given as arrays of extents."""
        kind, count = costed.op.kind, len(next(iter(extents.values()), np.zeros(1)))
        if not shipped(kind) or any(entry.kind == kind for entry in self._entries):
            rows = [self.seconds(costed, {a: int(column[k]) for a, column in extents.items()}) for k in range(count)]
            return np.array([f for f, _ in rows]), np.array([b for _, b in rows])
        filling = self._filling
        forward, backward = (
            np.broadcast_to(
                task_seconds(
                    seconds * (1.0 if filling is None else filling.ratio("", kind, 0.0, 0.0, bool(back)))
                    * self._compute + self._task_s
                ), (count,)
            )
            for back, seconds in enumerate(self._estimated(costed, extents, np.maximum))
        )  # fmt: skip
        return forward, backward

    def _estimated(self, costed: Costed, extents: Mapping[str, Any], most: Callable[[Any, Any], Any]) -> Any:
        """Seconds of the two tasks by the device's figures. ``most``: the larger of two numbers or arrays."""
        kind, sizes = costed.op.kind, costed.product_sizes(extents)
        return tuple(
            task_seconds_of(kind, flops, nbytes, sizes, costed.dtype, self.device, bool(backward), most)
            for backward, (flops, nbytes) in enumerate(costed.counts(extents))
        )

    def casting(self, nbytes: int) -> float:
        """Seconds of casts that move so many bytes."""
        return float(whole(nbytes / moving_rate(self.device, "float32") * self._compute))

    @property
    def _entries(self) -> Iterable[Entry]:
        return () if self.profile is None else self.profile.entries.values()

    def update_rates(self, optimizer: str, half: bool, wide: bool = False) -> tuple[float, float]:
        """Seconds of an update for each byte of float32 weights, and for each tensor; ``half``: beside weights in half
        precision, ``wide``: but with gradients in float32, which it need not cast."""
        casts = self.device.launched.casts if half else 0
        measured = {} if self.profile is None else self.profile.updates
        entry = next((entry for name, entry in measured.items() if name == optimizer), None)
        if entry is not None:
            per_byte, per_tensor = entry.s_per_byte, entry.s_per_tensor
        else:
            streams = STREAMS[optimizer] + (WIDER_STREAMS if wide and not casts else 0.0)
            per_byte, per_tensor = update_rates(self.device, optimizer, streams)
        if casts:
            per_byte += CAST_STREAMS * (0.5 if wide else 1.0) / moving_rate(self.device, "float32")
            per_tensor += casts * (self.device.overhead_s - self.device.launch_s)
        return per_byte * self._compute, per_tensor * self._compute


def in_ticks(forward_s: float, backward_s: float) -> tuple[float, float]:
    """As ``task_seconds``, of two numbers, which takes less than making arrays of them."""
    # ``round`` rounds halves to even, as ``np.rint`` does.
    forward, backward = (max(round(min(s / TICK, FOREVER)), 1) * TICK for s in (forward_s, backward_s))
    return forward, backward


def _replaced(efficiency: Efficiency | None, taught: Mapping[str, float], prefix: str) -> Efficiency | None:
    """With figures in place of its own: those of ``taught`` whose names begin with ``prefix``."""
    own = {name.removeprefix(prefix): value for name, value in taught.items() if name.startswith(prefix)}
    figures = {name: value for name, value in own.items() if name in Efficiency.model_fields}
    traffic = {name.removeprefix(TRAFFIC): value for name, value in own.items() if name.startswith(TRAFFIC)}
    if not figures and not traffic:
        return efficiency
    before = efficiency or USUAL
    return before.model_copy(update={**figures, "traffic": dict(before.traffic) | traffic})
