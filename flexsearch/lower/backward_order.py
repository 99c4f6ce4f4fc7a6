"""In which order a backward pass completes the gradients of weights, and the buckets that are filled in that order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from flexsearch.graph import Flow, OperatorGraph
from flexsearch.lower.rows import NOBODY

FIRST_BUCKET_BYTES: Final = 2**20
"""As in PyTorch: ``torch.distributed._DEFAULT_FIRST_BUCKET_BYTES``."""


def buckets_of(
    graph: OperatorGraph, bucket_bytes: int, stage_of: Sequence[int] | None = None, apart: Collection[str] = ()
) -> dict[str, int]:
    """Parameter -> number of its synchronisation bucket. Buckets are filled in the order in which the backward pass
    finishes the gradients, from the whole sizes of these, so that they do not depend on any config. A bucket
    holds weights of one stage, or such that several stages read; the first one of these is smaller, as in PyTorch's
    DistributedDataParallel, so that the links have something to do early. ``apart``: weights that are in none."""
    parameters = [tensor for tensor in graph.of_kind("parameter") if tensor.name not in apart]
    first = {t.name: min((i for i, _ in graph.consumers[t.name]), default=-1) for t in parameters}
    stage = dict.fromkeys(first, 0) if stage_of is None else weight_stages(graph, stage_of)
    bucket_of: dict[str, int] = {}
    bucket = filled = 0
    first_bytes = limit = min(bucket_bytes, FIRST_BUCKET_BYTES)
    last: int | None = None
    for tensor in sorted(parameters, key=lambda t: (stage[t.name] == NOBODY, -first[t.name])):
        nbytes = graph.gradient[tensor.name].nbytes
        if filled and (filled + nbytes > limit or stage[tensor.name] != last):
            bucket, filled = bucket + 1, 0
            limit = bucket_bytes if stage[tensor.name] == last else first_bytes
        bucket_of[tensor.name] = bucket
        filled, last = filled + nbytes, stage[tensor.name]
    return bucket_of


def weight_stages(graph: OperatorGraph, stage_of: Sequence[int]) -> dict[str, int]:
    """Parameter -> the stage that reads it; NOBODY if several do (0 if nothing does)."""
    stage_of_weight = {}
    for tensor in graph.of_kind("parameter"):
        stages = {stage_of[i] for i, _ in graph.consumers[tensor.name]} or {0}
        stage_of_weight[tensor.name] = stages.pop() if len(stages) == 1 else NOBODY
    return stage_of_weight


def backward_pass(graph: OperatorGraph, bucket_of: Mapping[str, int]) -> list[tuple[int, list[list[int]]]]:
    """The backward pass: operators in reverse, each with the buckets (weights, by number among the parameters) whose
    last gradient is complete after it; weights without a bucket are left out."""
    parameters = graph.of_kind("parameter")
    ready: dict[int, list[int]] = {}  # operator -> weights whose gradient is complete after its backward task
    missing: Counter[int] = Counter()
    for w, tensor in enumerate(parameters):
        if tensor.name in bucket_of and (
            readers := [o for o, p in graph.consumers[tensor.name] if graph.flows[o][p] != Flow.VALUE]
        ):
            ready.setdefault(min(readers), []).append(w)
            missing[bucket_of[tensor.name]] += 1
    order: list[tuple[int, list[list[int]]]] = []
    waiting: dict[int, list[int]] = {}
    for i in reversed(range(len(graph.operators))):
        if graph.has_backward[i]:
            complete = []
            for w in ready.get(i, ()):
                bucket = bucket_of[parameters[w].name]
                waiting.setdefault(bucket, []).append(w)
                missing[bucket] -= 1
                if not missing[bucket]:
                    complete.append(waiting.pop(bucket))
            order.append((i, complete))
    return order
