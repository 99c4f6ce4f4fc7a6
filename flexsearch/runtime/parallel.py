"""``parallelize``: a model, split as a strategy says, as a training step that is called like a function."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from flexsearch.cost import Costs
from flexsearch.errors import ImportModelError, RuntimeFailure, StrategyError
from flexsearch.graph.importer import Imported, import_with_constants, inputs_and_targets
from flexsearch.graph.ops.calls import dtype_of
from flexsearch.graph.prepare import refuse_sharded, unwrapped
from flexsearch.lower import lower_for_ranks
from flexsearch.runtime.group import agree, join
from flexsearch.runtime.initialise import Initialise
from flexsearch.runtime.modes import tell_rounding
from flexsearch.runtime.step import Example, Loss, MakeOptimizer, Parallel, StepOutput
from flexsearch.strategy import Strategy

__all__ = ["Loss", "MakeOptimizer", "Parallel", "StepOutput", "Traced", "distribute", "parallelize", "trace"]


def parallelize(
    model: nn.Module,
    strategy: Strategy,
    *,
    loss: Loss | None = None,
    optimizer: MakeOptimizer | None = None,
    inputs: Any = None,
    targets: Any = None,
    seed: int = 0,
    timeout_s: float = 300.0,
    fuse: bool = True,
    initialise: Initialise | bool = False,
    compile: bool | str = False,
    tolerate: bool = False,
) -> Parallel:
    """Split ``model`` over the ranks of this run (one process for each device of the strategy's cluster, torchrun's
    environment or an existing process group).

    ``loss(output, targets)`` as for ``optimize``; of a strategy that ``optimize`` returned, it is known, and ``inputs``
    and ``targets``, examples that are else only needed if they were nested or keyword arguments. ``optimizer``: short
    cut for loops that only step (:meth:`Parallel.step`): called with this rank's parts of the weights. ``seed``: of
    dropout masks, and of the first weights of a model on the meta device, which ``initialise(module)`` draws (True:
    each module's own ``reset_parameters``), with the buffers that no state has; without, a state has to be loaded.
    ``timeout_s``: after which a silent rank is an error. ``fuse=False`` runs operators one by one, for measuring.
    ``compile``: pass each run of operators to ``torch.compile``, with its usual backend (True) or another one by name;
    predictions are of plain operators. ``tolerate``: replicas that synchronise by gossip, a ring, a matrix or
    asynchronously go on when another one dies. Where the ranks' models differ, rank 0's weights are taken. What wraps
    the model (``torch.compile``, DistributedDataParallel) is taken off. Raises StrategyError if the strategy was made
    for another model, RuntimeFailure if the ranks do not fit it or each other, or if ``torch.compile`` has no such
    backend.
    """
    if not isinstance(strategy, Strategy):
        raise StrategyError(
            f"parallelize needs a strategy, not a {type(strategy).__name__}", "Read a file by Strategy.load(PATH)."
        )
    if not isinstance(model, nn.Module):
        raise RuntimeFailure(f"parallelize needs a model, not a {type(model).__name__}", "Give an nn.Module.")
    if not isinstance(seed, int):
        raise RuntimeFailure(f"seed={seed!r} is no seed", "Give a whole number.")
    if optimizer is not None and (isinstance(optimizer, Optimizer) or not callable(optimizer)):
        raise RuntimeFailure(
            f"optimizer= is a function that makes one, not a {type(optimizer).__name__}",
            "Pass a function of the weights: lambda weights: torch.optim.SGD(weights, lr=0.1).",
        )
    if strategy.example is not None and loss is None and inputs is None:
        inputs, targets, loss = strategy.example
    traced = trace(model, strategy, loss, inputs, targets)
    return distribute(
        model, traced.imported, strategy, optimizer, seed=seed, timeout_s=timeout_s, fuse=fuse, initialise=initialise,
        compile=compile, tolerate=tolerate, example=traced.example,
    )  # fmt: skip


def distribute(
    model: nn.Module,
    imported: Imported,
    strategy: Strategy,
    optimizer: MakeOptimizer | None = None,
    *,
    seed: int = 0,
    timeout_s: float = 300.0,
    fuse: bool = True,
    initialise: Initialise | bool = False,
    compile: bool | str = False,
    tolerate: bool = False,
    example: Example | None = None,
) -> Parallel:
    """:func:`parallelize` for a model that has been imported already (``import_with_constants``), from ``example``:
    (inputs, targets, loss)."""
    device = join(strategy.cluster, timeout_s)
    tell_rounding(strategy.cluster.devices[0], device)
    lowered = lower_for_ranks(imported.graph, strategy, strategy.cluster, Costs(imported.graph, strategy.cluster))
    run = agree({
        "graph": imported.graph.content_hash(), "topology": strategy.topology.hash, "strategy": strategy.content_hash(),
        "torch version": torch.__version__, "order of tasks": lowered.digest,
    })  # fmt: skip
    model = unwrapped(model)
    compiler = _compiler(compile)
    parallel = Parallel(
        model, imported, strategy, lowered, device, run, seed, timeout_s, fuse, compiler, tolerate, optimizer,
        initialised=bool(initialise),
    )  # fmt: skip
    parallel.set_up(model, example, initialise)
    if optimizer is not None:
        parallel.update_by(optimizer)
    return parallel


def _compiler(wanted: bool | str) -> str | None:
    """The backend of ``torch.compile``; None for none. Raises RuntimeFailure if there is none of this name."""
    if wanted is False:
        return None
    name = "inductor" if wanted is True else wanted
    if name not in (names := torch.compiler.list_backends(exclude_tags=())):
        raise RuntimeFailure(f"torch.compile has no backend {name!r}", f"Give True, or one of {', '.join(names)}.")
    return name


class Traced(NamedTuple):
    """A model that was imported, and from what ``example``: (inputs, targets, loss)."""

    imported: Imported
    example: Example

    def check(self, strategy: Strategy) -> None:
        """Raises StrategyError if the strategy was made for another model."""
        planned, graph = strategy.graph, self.imported.graph
        if graph.content_hash() != planned.hash:
            raise StrategyError(
                f"this strategy was made for graph {planned.name!r} ({planned.hash}); this model with this "
                f"loss gives another one ({graph.content_hash()})",
                "Give the model and loss it was made for, or run `flexsearch import` and `flexsearch optimize` again. "
                "If they are the same, the model computes with something that is another in each call (a count, the "
                "time, numbers drawn by numpy): make it a buffer, or draw by PyTorch.",
            )


def trace(model: nn.Module, strategy: Strategy, loss: Loss | None, inputs: Any, targets: Any) -> Traced:
    """Import the model again with inputs of the strategy's shapes, and check that the graph is the same. Takes longer
    than all else that :func:`parallelize` does; it serves all plans of this graph."""
    inputs, targets = inputs_and_targets(inputs, targets, loss)
    example = inputs is not None
    examples = {s.name: torch.empty(s.shape, dtype=dtype_of(s.dtype), device="meta") for s in strategy.inputs}
    if inputs is None:
        inputs = tuple(tensor for name, tensor in examples.items() if not name.startswith("target"))
    if targets is None:
        of_targets = tuple(tensor for name, tensor in examples.items() if name.startswith("target"))
        targets = of_targets[0] if len(of_targets) == 1 else of_targets or None
    planned = strategy.graph
    refuse_sharded(unwrapped(model))
    try:
        imported = import_with_constants(
            model, inputs, loss, targets=targets, name=planned.name, tracing=planned.tracing
        )
    except ImportModelError as error:
        if example:
            raise
        raise ImportModelError(
            f"{error.message} (The strategy comes from a file, so its inputs were passed one after the other.)",
            "If the model takes them by name, or nested, pass an example batch: parallelize(..., inputs=batch). "
            f"Else: {error.remedy}",
        ) from error
    traced = Traced(imported, (inputs, targets, loss))
    traced.check(strategy)
    return traced
