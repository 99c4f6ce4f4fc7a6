"""Floor 3: when every task runs, what is busy, what crosses the links, and how much memory it takes."""

from flexsearch.simulate.keep import Keep, keep, trivial
from flexsearch.simulate.memory import Memory, memory
from flexsearch.simulate.simulation import Simulation, critical_path, makespan, over_memory, simulate

__all__ = [
    "Keep", "Memory", "Simulation", "critical_path", "keep", "makespan", "memory", "over_memory", "simulate", "trivial",
]  # fmt: skip
