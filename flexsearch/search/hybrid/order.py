"""The order of passes that list scheduling makes for one plan: for stages, or devices, that are not alike."""

from __future__ import annotations

from dataclasses import replace

from flexsearch.lower.actions import actions, read_order
from flexsearch.lower.list_schedule import Passes, list_schedule, peaks
from flexsearch.lower.stage_passes import stage_passes
from flexsearch.simulate.delta import DeltaSimulator
from flexsearch.simulate.memory import memory_of, standing_of
from flexsearch.simulate.units import make_account
from flexsearch.strategy.pipeline import Pipeline
from flexsearch.strategy.schedule import has_halves


def listed(simulator: DeltaSimulator, pipeline: Pipeline) -> Pipeline | None:
    """The plan at hand in the order that list scheduling makes of the ticks of its passes; None where a named schedule
    is as good, by the model of ``lower.list_schedule``. It keeps to the memory that the plan's other bytes leave.
    What a microbatch keeps on a stage follows from the plan's peak, and is not known exactly."""
    passes = _passes(simulator, pipeline)
    if any(sum(passes.nbytes[s] for s in row) > limit for row, limit in zip(passes.held, passes.limit, strict=True)):
        return None
    schedule = list_schedule(passes, pipeline.microbatches)
    if schedule.kind is not None:
        return None
    orders = tuple(" ".join(map(str, row)) for row in schedule.orders)
    return replace(pipeline, schedule="zero-bubble", orders=orders)


def _passes(simulator: DeltaSimulator, pipeline: Pipeline) -> Passes:
    """What the passes take, and keep in memory: the activations of each device at its peak without what it holds all
    the time, shared out among the microbatches that are under way then, by the computing that they took."""
    stages, devices = len(pipeline.first), simulator.topology.devices
    ranks = len(set(pipeline.devices))
    unlimited = stage_passes(simulator.rows, [1] * stages, [stages * pipeline.microbatches] * ranks)
    account, sources = make_account(simulator.rows)
    memory = memory_of(account, sources, simulator.rows.state)
    standing = standing_of(account, sources, simulator.rows.state)
    computing = tuple(max(1, f + i) for f, i in zip(unlimited.forward, unlimited.inputs, strict=True))
    orders = [read_order(text) for text in pipeline.orders] or actions(
        pipeline.schedule, unlimited.held, pipeline.microbatches
    )
    under_way = peaks(replace(unlimited, nbytes=computing), orders)
    nbytes, limit = [0] * stages, list[int]()
    for row, most in zip(unlimited.held, under_way, strict=True):
        fullest = max(pipeline.devices[row[0]], key=lambda d: memory[d].peak / devices[d].usable_bytes)
        kept = memory[fullest].activations - standing[fullest]
        limit.append(devices[fullest].usable_bytes - memory[fullest].peak + kept)
        for stage in row:
            nbytes[stage] = -(-kept * computing[stage] // most)
    return replace(unlimited, nbytes=tuple(nbytes), limit=tuple(limit), between=_between(simulator, pipeline))


def _between(simulator: DeltaSimulator, pipeline: Pipeline) -> tuple[int, ...]:
    """By stage, the gradients of the results of operators with trained weights, which a device keeps from the first
    half of a microbatch's backward pass to the second."""
    graph, ends = simulator.graph, (*pipeline.first[1:], len(simulator.graph.operators))
    gradients, configs = [], simulator.configs
    for first, end in zip(pipeline.first, ends, strict=True):
        kept = [i for i in range(first, end) if any(graph.tensor[x].requires_grad for x in graph.operators[i].inputs)]
        gradients.append(
            sum(graph.tensor[y].nbytes // configs[i].parts for i in kept for y in graph.operators[i].outputs)
        )
    return tuple(nbytes if has_halves(stage) else 0 for stage, nbytes in enumerate(gradients))
