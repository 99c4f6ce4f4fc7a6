"""What importing a model gives: its graph, and what is needed to run that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from flexsearch.graph.fold import Folded
from flexsearch.graph.model import OperatorGraph


@dataclass(frozen=True)
class Imported:
    """A graph and what is needed to run it: the constants' values and the order of the tensor arguments.

    ``constants``: CPU tensors by name; those that depend on a buffer on the meta device are meta tensors themselves. Of
    a model on the meta device they are computed when they are first read. ``derived``: those of them that were computed
    from buffers, for :func:`flexsearch.graph.fold.derive`. ``input_names``, ``target_names``: graph inputs in the order
    of the tensors in ``example_inputs`` and ``targets``.
    """

    graph: OperatorGraph
    constants: Mapping[str, torch.Tensor]
    input_names: tuple[str, ...]
    target_names: tuple[str, ...]
    derived: Mapping[str, Folded] = field(default_factory=dict)
    keywords: tuple[str, ...] = ()
    """Names of the inputs, in the order of import, where they were keyword arguments."""
    outputs: tuple[str, ...] = ()
    """Of a forward pass, the tensors that the model returns, in order."""
    notes: tuple[str, ...] = ()
    """What a user should know about how the model was traced."""
