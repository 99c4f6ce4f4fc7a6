"""Search over data x tensor x pipeline layouts with microbatches, and over the splits of operators inside them."""

from flexsearch.search.hybrid.given import simulate_layout
from flexsearch.search.hybrid.layout import Layout
from flexsearch.search.hybrid.outcome import Candidate, HybridProgress, HybridResult
from flexsearch.search.hybrid.search import search_hybrid

__all__ = ["Candidate", "HybridProgress", "HybridResult", "Layout", "search_hybrid", "simulate_layout"]
