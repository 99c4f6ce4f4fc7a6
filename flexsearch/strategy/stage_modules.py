"""Stages as sets of modules: what a rank of a pipeline keeps of the model."""

from __future__ import annotations

from collections.abc import Sequence

from flexsearch.errors import StrategyError
from flexsearch.graph import OperatorGraph

NATIVE = "Search with `flexsearch optimize --space native`, or move the border of the stage."


def stage_modules(graph: OperatorGraph, stage_of: Sequence[int]) -> tuple[tuple[str, ...], ...]:
    """The modules of each stage, in the order in which they run: a rank keeps those of its stages, and in the place of
    the others hands on their first argument. ``stage_of``: by operator. Raises StrategyError where a model cannot be
    taken apart so: a module in two stages that computes something itself, a weight that two stages read, several
    tensors or a second input that cross a border."""
    inside = [i for i, op in enumerate(graph.operators) if op.module != "loss"]
    homes: dict[str, set[int]] = {}
    for i in inside:
        parts = graph.operators[i].module.split(".")
        for k in range(len(parts) + 1):
            homes.setdefault(".".join(parts[:k]), set()).add(stage_of[i])
    modules: list[dict[str, None]] = [{} for _ in range(1 + max(stage_of))]
    for i in inside:
        op = graph.operators[i]
        parts = op.module.split(".") if op.module else []
        path = next((p for k in range(len(parts) + 1) if len(homes[p := ".".join(parts[:k])]) == 1), None)
        if path is None:
            raise StrategyError(
                f"stages: operator {op.name!r} is computed by {f'module {op.module!r}' if op.module else 'the model'} "
                "itself, which is in several stages; each rank of PyTorch's pipeline would compute it",
                NATIVE,
            )
        modules[stage_of[i]][path] = None
    _check_borders(graph, stage_of)
    if empty := [stage for stage, names in enumerate(modules) if not names]:
        raise StrategyError(f"stages: stage {empty[0]} has no module of the model", NATIVE)
    return tuple(tuple(names) for names in modules)


def _check_borders(graph: OperatorGraph, stage_of: Sequence[int]) -> None:
    crossing: dict[int, str] = {}
    for i, op in enumerate(graph.operators):
        if op.module == "loss":
            continue
        for name in op.inputs:
            kind, stage = graph.tensor[name].kind, stage_of[i]
            home = stage_of[graph.producer[name]] if name in graph.producer else stage
            if kind == "parameter" and len({stage_of[reader] for reader, _ in graph.consumers[name]}) > 1:
                raise StrategyError(f"stages: several read {name!r}; PyTorch's pipelining would train two", NATIVE)
            if kind == "input" and stage:
                raise StrategyError(
                    f"stages: operator {op.name!r} in stage {stage} reads the input {name!r}, which PyTorch's "
                    "pipelining gives to the first stage alone",
                    NATIVE,
                )
            if home == stage:
                continue
            if home != stage - 1 or crossing.setdefault(stage, name) != name:
                raise StrategyError(
                    f"stages: {name!r} and another tensor enter stage {stage}, or one from further back; the ranks of "
                    "PyTorch's pipeline hand on one",
                    NATIVE,
                )
