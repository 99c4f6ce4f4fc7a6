"""Floor 1: how operators are split, what is legal, the baselines, and the strategy file."""

from flexsearch.strategy.config import OperatorConfig, check_config, make_config
from flexsearch.strategy.model import Options, Prediction, Search, Strategy, StrategyFile

__all__ = [
    "OperatorConfig", "Options", "Prediction", "Search", "Strategy", "StrategyFile", "check_config", "make_config",
]  # fmt: skip
