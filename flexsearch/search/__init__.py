"""Floor 4: the search for a fast plan."""

from flexsearch.search.evaluate import Evaluation, Evaluator
from flexsearch.search.optimize import Improvement, Outcome, Progress, SearchResult, search

__all__ = ["Evaluation", "Evaluator", "Improvement", "Outcome", "Progress", "SearchResult", "search"]
