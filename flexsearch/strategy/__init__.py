"""Floor 1: how operators are split, what is legal, the baselines, and the strategy file."""

from flexsearch.strategy.config import OVER_ALL, OperatorConfig, Sharding, States, check_config, make_config
from flexsearch.strategy.files import StrategyFile
from flexsearch.strategy.model import Strategy
from flexsearch.strategy.records import Measurement, Options, Prediction, Search
from flexsearch.strategy.stage import Stage

__all__ = [
    "OVER_ALL", "Measurement", "OperatorConfig", "Options", "Prediction", "Search", "Sharding", "Stage", "States",
    "Strategy", "StrategyFile", "check_config", "make_config",
]  # fmt: skip
