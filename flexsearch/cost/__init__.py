"""Floor 1: what computing and communicating cost, in seconds. Plain numbers: nothing here imports torch."""

from flexsearch.cost.compute import Costs
from flexsearch.cost.learned import Learned, Network
from flexsearch.cost.profile import Profile, ProfileDevice

__all__ = ["Costs", "Learned", "Network", "Profile", "ProfileDevice"]
