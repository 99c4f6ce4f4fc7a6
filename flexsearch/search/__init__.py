"""Floor 4: the search for a fast plan."""

from flexsearch.search.evaluate import Evaluation, Evaluator
from flexsearch.search.optimize import search
from flexsearch.search.outcome import Improvement, Outcome, Progress, SearchResult, Trail

__all__ = ["Evaluation", "Evaluator", "Improvement", "Outcome", "Progress", "SearchResult", "Trail", "search"]
