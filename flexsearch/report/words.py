"""What a plan does, in words: consecutive layers with the same treatment, by their module names.

features.conv1..conv5: batch over 4 hosts; classifier.fc6..fc8: output features over 4 hosts
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Final

from flexsearch.graph import Operator, OperatorGraph
from flexsearch.graph.ops import kind_of
from flexsearch.lower import Communication, Lowered, TaskKind
from flexsearch.report.summary import (
    FEW,
    MOST,
    Group,
    layer_of,
    layer_range,
    lines,
    ranges,
    summarised,
    told_apart,
)  # fmt: skip
from flexsearch.strategy import OperatorConfig, States
from flexsearch.topology import Topology

SHOWN: Final = 4
"""So many devices are told of an order, and so many hosts are named."""
_IMAGE = {3: ("batch", "channels", "length"), 4: ("batch", "channels", "height", "width"),
          5: ("batch", "channels", "depth", "height", "width")}  # fmt: skip
_TEXT = {3: ("batch", "sequence", "features"), 4: ("batch", "heads", "sequence", "features")}


def axis_word(op: Operator, axis: str, images: bool = False) -> str:
    """What people call ``axis`` of ``op``. ``images``: the model works on images, which tells channels from heads."""
    role = op.roles[axis]
    if (word := kind_of(op).words.get(axis)) is not None:
        return word
    if role == "sample":
        return "batch"
    summed = " (partial sums)" if axis in op.access.summed else ""
    for operand in (*op.access.outputs, *op.access.inputs):  # by its place in the tensor
        rank = len(operand.dimensions)
        for place, dimension in enumerate(operand.dimensions):
            if axis in dimension.axes:
                spatial = images or kind_of(op).image
                names = (_IMAGE if spatial else _TEXT).get(rank, ("batch", "features") if rank == 2 else ())
                if place < len(names) and (place or role != "attribute"):
                    return names[place] + summed
    return {"attribute": f"axis {axis}", "parameter": "output features", "reduction": f"axis {axis}"}[role] + summed


def device_set(topology: Topology, devices: Iterable[int]) -> str:
    """Devices in words: "4 hosts", "node1", "the 8 GPUs of node0, node1", "GPUs 0-1 of each host", "devices 0-3"."""
    chosen = sorted(set(devices))
    per_host: dict[str, list[int]] = {}
    for index, device in enumerate(topology.devices):
        per_host.setdefault(device.host, []).append(index)
    hosts = list(dict.fromkeys(topology.devices[d].host for d in chosen))
    complete = sorted(d for host in hosts for d in per_host[host]) == chosen
    gpus = all(topology.devices[d].kind == "cuda" for d in chosen)
    noun = "GPUs" if gpus else "devices"
    if len(chosen) == 1:
        return hosts[0] if complete else topology.devices[chosen[0]].name
    if len(hosts) == len(per_host) and complete:
        if len(hosts) == len(chosen):
            return f"{len(hosts)} hosts"
        return f"{len(chosen)} {noun}" + (f" on {len(hosts)} hosts" if len(hosts) > 1 else "")
    names = _host_names(hosts, list(per_host))
    if not complete and (places := _same_places(topology, chosen, per_host)):
        of = "each host" if len(hosts) == len(per_host) else f"each of {names}" if names else ""
        if of:
            return f"{noun if len(places) > 1 else noun[:-1]} {ranges(places)} of {of}"
    if not complete or not names:
        return f"{noun} {ranges(chosen)}"
    return f"{len(hosts)} hosts ({names})" if len(hosts) == len(chosen) else f"the {len(chosen)} {noun} of {names}"


def _same_places(topology: Topology, chosen: Sequence[int], per_host: dict[str, list[int]]) -> tuple[int, ...]:
    """The places in their hosts of devices that are the same ones of several hosts; else none."""
    places: dict[str, list[int]] = {}
    for device in chosen:
        host = topology.devices[device].host
        places.setdefault(host, []).append(per_host[host].index(device))
    alike = {tuple(own) for own in places.values()}
    return alike.pop() if len(places) > 1 and len(alike) == 1 else ()


def _host_names(hosts: Sequence[str], every: Sequence[str]) -> str:
    """Some of ``every`` host: "node0, node2", "node0..node3"; empty if that takes more than ``SHOWN`` names."""
    place = {host: k for k, host in enumerate(every)}
    runs: list[list[str]] = []
    for host in hosts:
        if runs and place[host] == place[runs[-1][-1]] + 1:
            runs[-1].append(host)
        else:
            runs.append([host])
    words = [f"{run[0]}..{run[-1]}" if len(run) > 2 else ", ".join(run) for run in runs]
    return ", ".join(words) if sum(min(2, len(run)) for run in runs) <= SHOWN else ""


def treatment(graph: OperatorGraph, topology: Topology, op: Operator, config: OperatorConfig) -> str:
    """What a config does with an operator: "batch over 4 hosts", "replicated on 4 hosts", "on host1", "heads (2) x
    replicated (2) over 4 GPUs in the order 0,2,1,3"."""
    where = device_set(topology, config.devices)
    weighted = _weighted(graph, graph.index[op.name])
    tail = _sharding_words(topology, config) if weighted and len(config.devices) > 1 else ""
    if not config.degrees:
        return f"on {where}" if len(config.devices) == 1 else f"replicated on {where}{tail}"
    return f"{split_words(graph, op, config)} over {where}{_order_words(config.devices)}{tail}"


def _order_words(devices: Sequence[int]) -> str:
    """What tells devices in this order from the same ones in ascending order."""
    if list(devices) == sorted(devices):
        return ""
    return f" in the order {','.join(map(str, devices[:SHOWN]))}{',...' if len(devices) > SHOWN else ''}"


def _sharding_words(topology: Topology, config: OperatorConfig) -> str:
    """What follows the words of a config whose weights are sharded."""
    if not config.states:
        return ""
    over = config.sharded_over
    where = "" if not 0 < over < len(topology.devices) else " inside each host" if over == topology.host_size else (
        f" over {over} neighbouring devices each"
    )  # fmt: skip
    return f", {config.states.name.lower()} sharded{where}"


def split_words(graph: OperatorGraph, op: Operator, config: OperatorConfig) -> str:
    """How a config splits an operator, wherever it runs: "batch", "output features (2) x replicated (2)", "replicated",
    "whole"."""
    images = any(o.kind.startswith("conv") for o in graph.operators)
    shares = {axis: " " + _ratio(row) for axis, row in config.shares}
    splits = [(axis_word(op, axis, images) + shares.get(axis, ""), parts) for axis, parts in config.degrees]
    if config.replicas > 1:
        splits.append(("replicated", config.replicas))
    if len(splits) <= 1:
        return splits[0][0] if splits else "whole"
    return " x ".join(f"{word} ({parts})" for word, parts in splits)


def _ratio(shares: Sequence[int]) -> str:
    """Relative sizes of parts: "3:1"; of many, runs of equal ones as "4 x 2 : 4 x 1"."""
    if len(shares) <= 4:
        return ":".join(map(str, shares))
    runs = [(share, len(list(run))) for share, run in groupby(shares)]
    return " : ".join(f"{count} x {share}" if count > 1 else str(share) for share, count in runs)


def _weights_apart(lowered: Lowered, operator: int) -> str:
    """What follows the words of a layer whose weights' gradients have a split of their own."""
    if lowered.graph.operators[operator].half != "inputs":
        return ""
    weights = operator - 1  # right before it
    own, config = lowered.configs[weights], lowered.configs[operator]
    if own == config.sharded(States.WHOLE):
        return ", gradients of weights likewise, last"
    return f", gradients of weights {treatment(lowered.graph, lowered.topology, lowered.graph.operators[weights], own)}"


def groups(lowered: Lowered) -> tuple[Group, ...]:
    """The plan as groups of consecutive layers, in at most ``summary.MOST`` lines. Operators without weights that only
    follow what feeds them are left out, and gradients of weights are told with their layers; the blocks of a repeated
    structure are told together if they are treated alike."""
    graph = lowered.graph
    every = [i for i, op in enumerate(graph.operators) if op.half != "weights"]
    shown = [i for i in every if not _follows(lowered, i)] or every
    told: dict[int, str] = {}
    tails = {_sharding_words(lowered.topology, config) for config in lowered.configs}
    for i in shown:
        text = treatment(graph, lowered.topology, graph.operators[i], lowered.configs[i]) + _weights_apart(lowered, i)
        before = next(reversed(told.values()), "")
        # An operator without weights does not end a run of layers that shard theirs.
        told[i] = before if not _weighted(graph, i) and before in [text + tail for tail in tails] else text
    if len(set(told.values())) == 1 and len(shown) > 1:
        return (Group("all layers", told[shown[0]], tuple(shown)),)
    runs: list[list[int]] = []
    for i in shown:
        if runs and told[runs[-1][-1]] == told[i]:
            runs[-1].append(i)
        else:
            runs.append([i])
    if len(runs) <= FEW:
        groups = [Group(layer_range([layer_of(graph, i) for i in run]), told[run[0]], tuple(run)) for run in runs]
        if lines(few := told_apart(graph, groups)) <= MOST:
            return few
    return summarised(graph, told)


def in_words(lowered: Lowered) -> str:
    """The whole plan on one line."""
    return "; ".join(group.words for group in groups(lowered))


def _weighted(graph: OperatorGraph, operator: int) -> bool:
    return any(graph.tensor[name].kind == "parameter" for name in graph.operators[operator].inputs)


def _follows(lowered: Lowered, operator: int) -> bool:
    """Whether an operator has no weights, and nothing has to move between it and what feeds it, or (views, pointwise)
    between it and what reads it. Bookkeeping always follows."""
    graph = lowered.graph
    op = graph.operators[operator]
    if kind_of(op).bookkeeping:
        return True
    if op.kind in ("attention", "einsum") or _weighted(graph, operator):
        return False
    before = [lowered.edge_of[operator, p] for p, name in enumerate(op.inputs) if graph.tensor[name].shape]
    after = [e for name in op.outputs for e in lowered.edges_of[name]]
    return _nothing_moves(lowered, before) or (kind_of(op).trivial and _nothing_moves(lowered, after))


def _nothing_moves(lowered: Lowered, edges: Iterable[int]) -> bool:
    plans = (lowered.edges[e].forward for e in edges)
    return not any(plan is not None and plan.exchanges for plan in plans)


def tensor_words(lowered: Lowered, communication: Communication) -> str:
    """What a communication carries: "gradient of fc6.weight and 7 more", "gossip+top-k", "the batch"."""
    if communication.recipe:
        return communication.recipe
    if not communication.members:
        return "the batch"
    names = []
    for member in communication.members:
        if communication.purpose == "synchronise":
            names.append(lowered.weights[member.key].tensor)
        else:
            names.append(lowered.edges[member.key].tensor)
    sizes = {name: lowered.graph.tensor[name].nbytes for name in names}
    largest = max(sizes, key=lambda name: sizes[name])
    prefix = "gradient of " if communication.purpose in ("backward", "synchronise") else ""
    return f"{prefix}{largest}" + (f" and {len(sizes) - 1} more" if len(sizes) > 1 else "")


def task_words(lowered: Lowered, task: int) -> str:
    """Name of a task: "features.conv1", "features.conv1 backward", "features.conv1 again", "update",
    "all_reduce gradient of fc6.weight", "gossip+top-k encode"."""
    tasks = lowered.tasks
    communication = tasks.communication[task]
    if communication is not None:
        return f"{communication.form} {tensor_words(lowered, communication)}"
    if tasks.kind[task] == TaskKind.UPDATE:
        return "update"
    if tasks.kind[task] == TaskKind.SYNCHRONISE:
        return recipe_work(lowered, task)
    name = lowered.graph.operators[tasks.operator[task]].name
    suffix = {
        TaskKind.BACKWARD: " backward", TaskKind.WEIGHT_GRADIENT: " weight gradients", TaskKind.RECOMPUTE: " again",
    }  # fmt: skip
    return name + suffix.get(TaskKind(tasks.kind[task]), "")


def recipe_work(lowered: Lowered, task: int) -> str:
    """What a computation of a recipe does: "gossip+top-k encode"."""
    row = lowered.tasks.identity[task]
    block = lowered.rows.recipes[row.block]
    return f"{lowered.recipe_groups[block.group].recipe.words} {block.work[row.number]}"
