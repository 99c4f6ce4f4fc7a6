"""What computing and communicating cost, in seconds. Nothing here imports torch but ``profiler``, which is not imported
by default."""

from flexsearch.cost.compute import Costs, roofline
from flexsearch.cost.profile import Profile, ProfileDevice

__all__ = ["Costs", "Profile", "ProfileDevice", "roofline"]
