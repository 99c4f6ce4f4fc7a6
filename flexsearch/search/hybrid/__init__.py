"""Search over data x tensor x pipeline layouts with microbatches, and over the splits of operators inside them."""

from flexsearch.search.hybrid.layout import Layout
from flexsearch.search.hybrid.outcome import Candidate, HybridProgress, HybridResult
from flexsearch.search.hybrid.search import LayoutSearch, search_hybrid
from flexsearch.search.hybrid.simulate import plan_layout, simulate_layout

__all__ = [
    "Candidate", "HybridProgress", "HybridResult", "Layout", "LayoutSearch", "plan_layout", "search_hybrid",
    "simulate_layout",
]  # fmt: skip
