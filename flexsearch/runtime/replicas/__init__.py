"""Replicas of a model that are trained in one process, under any synchronisation recipe: simulated ranks."""

from flexsearch.runtime.replicas.data import Dataset, load_dataset
from flexsearch.runtime.replicas.models import load_model
from flexsearch.runtime.replicas.replicas import Replicas
from flexsearch.runtime.replicas.training import Trained, Training

__all__ = ["Dataset", "Replicas", "Trained", "Training", "load_dataset", "load_model"]
