"""Clocks of devices. A CPU has computed when a call returns; a GPU says itself when, by events in its stream."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

_SLEEP: Callable[[int], None] | None = getattr(torch.cuda, "_sleep", None)
"""A kernel that counts cycles of the device; private to PyTorch. Where a version has none, the times of small kernels
hold some of what launching them takes."""
_CYCLES, _TRIES, _STEADY = 1 << 25, 40, 0.005


class Clock:
    """Wall-clock of the CPU."""

    def mark(self) -> Any:
        """This moment: when the device has done all that it was given before."""
        return time.perf_counter()

    def wait(self) -> None:
        """Until all marks are known."""

    def hold(self, seconds: float) -> None:
        """Keep the device busy for about so long, so that the host gets ahead of it: marks then tell what the device
        takes, not when the host came to it. Nothing on a CPU, which is its own host."""

    def between(self, start: Any, end: Any) -> float:
        """Seconds between two marks."""
        return float(end - start)

    def when(self, mark: Any, zero: Any, zero_s: float) -> float:
        """A mark on ``time.perf_counter``, on which the mark ``zero`` is ``zero_s``."""
        return float(mark)


class CudaClock(Clock):
    """Events in the stream: the device's own time, without stopping it."""

    _cycles_per_s = 0.0

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def wait(self) -> None:
        torch.cuda.synchronize()

    def hold(self, seconds: float) -> None:
        if _SLEEP is None:
            return
        if not self._cycles_per_s:
            self._cycles_per_s = self._rate(_SLEEP)
        _SLEEP(int(seconds * self._cycles_per_s))

    def _rate(self, sleep: Callable[[int], None]) -> float:
        """Cycles a second of a device that works: one that has not is slower, and takes a while to speed up."""
        rate = 0.0
        for _ in range(_TRIES):
            before, start = rate, self.mark()
            sleep(_CYCLES)
            end = self.mark()
            self.wait()
            rate = _CYCLES / self.between(start, end)
            if before and abs(rate / before - 1.0) < _STEADY:
                break
        return rate

    def between(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) * 1e-3

    def when(self, mark: Any, zero: Any, zero_s: float) -> float:
        return mark if isinstance(mark, float) else zero_s + self.between(zero, mark)


def clock_of(device: torch.device) -> Clock:
    """The clock that times tasks on a device."""
    return CudaClock() if device.type == "cuda" else Clock()
