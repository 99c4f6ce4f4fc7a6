"""What a step costs, at a price for a device and an hour."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flexsearch.report.units import digits


@dataclass(frozen=True)
class Price:
    """Money for one device and one hour, in any currency. Devices are paid for whether a plan uses them or not."""

    per_device_hour: float

    def step(self, seconds: float, devices: int) -> float:
        """Of a step of so many seconds on a cluster of so many devices."""
        return self.per_device_hour * devices * seconds / 3600.0

    def amount(self, seconds: float, devices: int, samples: int, length: int | None) -> float:
        """Of a billion tokens, or of a million samples where samples have no length (tokens)."""
        return self.step(seconds, devices) / samples * (1e9 / length if length else 1e6)

    def data(self, seconds: float, devices: int, samples: int, length: int | None) -> dict[str, float]:
        """Both as a JSON object."""
        return {
            "per_device_hour": self.per_device_hour, "per_step": self.step(seconds, devices),
            f"per_{unit(length).replace(' ', '_')}": self.amount(seconds, devices, samples, length),
        }  # fmt: skip

    def words(self, seconds: float, devices: int, samples: int, length: int | None) -> str:
        """Both as a sentence."""
        count = f"{devices:,} devices" if devices > 1 else "one device"
        return (
            f"At {money(self.per_device_hour)} an hour for each device ({count}), a step costs "
            f"{money(self.step(seconds, devices))}, a {unit(length)} "
            f"{money(self.amount(seconds, devices, samples, length))}."
        )

    def added(self, data: Mapping[str, Any], devices: int, samples: int, length: int | None) -> dict[str, Any]:
        """A plan as JSON, and the plans that it lists, each with its cost."""
        plans = data.get("plans")
        listed = {"plans": [self.added(plan, devices, samples, length) for plan in plans]} if plans else {}
        return {**data, **listed, "cost": self.data(data["iteration_s"], devices, samples, length)}


def unit(length: int | None) -> str:
    """What amounts of work are counted in, for samples of so many tokens."""
    return "billion tokens" if length else "million samples"


def money(value: float) -> str:
    """An amount of money: "0.0123", "12.3", "1,234"."""
    return f"{value:,.0f}" if value >= 1000 else digits(value)
