"""Floor 3: when every task runs, what is busy, what crosses the links, and how much memory it takes."""

from flexsearch.simulate.breakdown import KINDS, Loads, busiest, by_kind, by_resource, loads
from flexsearch.simulate.critical import Step, critical_path
from flexsearch.simulate.memory import Memory, memory
from flexsearch.simulate.simulation import Simulation, makespan, over_memory, simulate
from flexsearch.simulate.usage import SORTS, DeviceTime, device_times

__all__ = [
    "KINDS", "SORTS", "DeviceTime", "Loads", "Memory", "Simulation", "Step", "busiest", "by_kind", "by_resource",
    "critical_path", "device_times", "loads", "makespan", "memory", "over_memory", "simulate",
]  # fmt: skip
