"""A rank's program: values live until their last use and no longer, and gradients are complete when they are used."""

from __future__ import annotations

import ast
import random
from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from functools import cache

import pytest
import torch

from flexsearch.cost import Costs
from flexsearch.graph import OperatorGraph
from flexsearch.graph.importer import Imported, import_model, import_with_constants
from flexsearch.lower import lower, lower_for_ranks
from flexsearch.lower.rows import BACKWARD
from flexsearch.runtime import liveness
from flexsearch.runtime.instructions import (
    Assemble,
    Backward,
    Deliver,
    Empty,
    Forward,
    Free,
    Keep,
    Post,
    Program,
    Result,
    Start,
    Wait,
)
from flexsearch.runtime.listing import listing
from flexsearch.runtime.program import compile_program
from flexsearch.runtime.tasks import tasks_of
from flexsearch.strategy import Options, States, Strategy, make_config
from flexsearch.strategy.baselines import baseline
from flexsearch.topology import Topology
from tests.exported import layout
from tests.staged_plans import deep, staged_plan, tokens_loss
from tests.test_numerics import _imported


@cache
def imported() -> Imported:
    """The model of the staged plans, traced once."""
    model, tokens, targets = deep()
    return import_with_constants(model, (tokens,), tokens_loss, targets=targets)


def programs(plan: Strategy, graph: OperatorGraph) -> list[Program]:
    """Of every rank."""
    lowered = lower_for_ranks(graph, plan, plan.cluster, Costs(graph, plan.cluster))
    return [compile_program(lowered, device) for device in range(len(plan.cluster.devices))]


PLANS = range(6)


@cache
def drawn(number: int) -> list[Program]:
    """The programs of a random plan."""
    graph = imported().graph
    return programs(staged_plan(graph, random.Random(number)), graph)


@pytest.mark.parametrize("number", PLANS)
def test_every_value_is_let_go_of_right_behind_its_last_use(number: int) -> None:
    for program in drawn(number):
        last: dict[int, int] = {}
        freed: dict[int, int] = {}
        for position, instruction in enumerate(program.instructions):
            for slot in (*instruction.reads, *instruction.writes):
                last[slot] = position
            if isinstance(instruction, Free):
                assert not freed.keys() & set(instruction.slots)
                freed.update(dict.fromkeys(instruction.slots, position))
        assert freed.keys() == last.keys()
        for slot, position in last.items():
            between = program.instructions[position + 1 : freed[slot]]
            assert all(isinstance(instruction, Empty) for instruction in between)


@pytest.mark.parametrize("number", PLANS)
def test_what_is_waited_for_has_been_posted_once_and_what_is_read_has_been_written(number: int) -> None:
    for program in drawn(number):
        posted = [i.task for i in program.instructions if isinstance(i, Post)]
        waited = [i.task for i in program.instructions if isinstance(i, Wait)]
        assert len(set(posted)) == len(posted) and len(set(waited)) == len(waited) and set(posted) <= set(waited)
        there: set[int] = set()
        for instruction in program.instructions:
            gradients = isinstance(instruction, Start | Backward | Assemble | Deliver)  # one that is missing is zero
            assert gradients or isinstance(instruction, Free | Empty) or there.issuperset(instruction.reads)
            there.update(instruction.writes)


def test_every_pass_of_every_microbatch_runs_once() -> None:
    for number in PLANS:
        for program in drawn(number):
            passes = [
                (i.segment, i.microbatch, i.again if isinstance(i, Forward) else i.part)
                for i in program.instructions
                if isinstance(i, Forward | Backward)
            ]
            assert len(set(passes)) == len(passes)
            forward = {(s, m) for s, m, what in passes if what is False}
            microbatches = program.lowered.stages.microbatches
            assert forward == {(s, m) for s in range(len(program.segments)) for m in range(microbatches)}


def test_a_gradient_that_grows_after_it_has_been_used_is_an_error() -> None:
    tried = 0
    for number in PLANS:
        for program in drawn(number):
            bare = [i for i in program.instructions if not isinstance(i, Free | Post | Empty)]
            liveness._check_gradients(bare, program.slots)
            sent = next((k for k, i in enumerate(bare) if isinstance(i, Start) and _takes_gradient(program, i)), None)
            if sent is None:
                continue
            slots = {slot for slot in bare[sent].reads if "gradient" in program.slots[slot].kind}
            made = max(k for k in range(sent) if slots & set(bare[k].writes))
            wrong = [*bare[:made], *bare[made + 1 : sent + 1], bare[made], *bare[sent + 1 :]]
            with pytest.raises(AssertionError, match="grows after it has been used"):
                liveness._check_gradients(wrong, program.slots)
            tried += 1
    assert tried > 3


def _takes_gradient(program: Program, instruction: Start) -> bool:
    return any("gradient" in program.slots[slot].kind for slot in instruction.reads)


def test_a_gradient_goes_when_it_has_been_sent_though_a_part_of_it_stays() -> None:
    graph, topology = _imported("mlp").graph, Topology.load("ethernet-1g:4")
    lowered = lower(graph, baseline("fsdp", graph, topology), topology, Costs(graph, topology))
    for device in range(4):
        program = compile_program(lowered, device)
        freed = {s: k for k, i in enumerate(program.instructions) if isinstance(i, Free) for s in i.slots}
        delivered = {w: k for k, i in enumerate(program.instructions) if isinstance(i, Deliver) for w, _ in i.weights}
        weight_of = {
            edge: w
            for w, weight in enumerate(lowered.weights)
            if len({entry.box for entry in weight.plan.storage}) > 1
            for edge in weight.edges
        }
        gradients = {
            s: weight_of[int(str(key.name))]
            for s, key in enumerate(program.slots)
            if key.kind == "edge gradient" and key.name in weight_of
        }
        assert gradients and all(freed[slot] < delivered.get(w, freed[slot] + 1) for slot, w in gradients.items())


def weights_under_way(program: Program, only: Collection[int] | None = None) -> list[int]:
    """Of how many weights (``only`` these) gradients have been sent and not been added yet, behind each time that some
    are sent."""
    under_way: set[int] = set()
    counts = []
    for instruction in program.instructions:
        if isinstance(instruction, Start):
            what = program.lowered.tasks.communication[instruction.task]
            if what is not None and what.purpose == "synchronise" and program.device in what.senders:
                under_way |= {member.key for member in what.members if only is None or member.key in only}
                counts.append(len(under_way))
        elif isinstance(instruction, Deliver):
            under_way.difference_update(w for w, _ in instruction.weights)
    return counts


def test_gradients_of_a_microbatch_are_added_up_before_those_of_the_next_operator_but_one_are_sent() -> None:
    for program in drawn(1):  # sends the gradient of each weight by itself, for each microbatch
        counts = weights_under_way(program)
        assert len(counts) > 20 and 2 < max(counts) <= 4  # weights and biases of two operators


@pytest.mark.parametrize("topology", ["ethernet-1g:4", "dgx-a100:1"])
@pytest.mark.parametrize("states", States)
def test_parts_of_gradients_are_added_before_those_of_the_next_operator_but_one_are_sent(
    states: States, topology: str
) -> None:
    graph, cluster = _imported("mlp").graph, Topology.load(topology).subset(range(4))
    whole = baseline("fsdp", graph, cluster)
    configs = {name: replace(c, states=min(c.states, states)) for name, c in whole.configs.items()}
    plan = Strategy.make(graph, cluster, configs, Options(bucket_bytes=1))
    for program in programs(plan, graph):
        # it may store nothing of a small one
        own = {w for i in program.instructions if isinstance(i, Deliver) for w, _ in i.weights}
        counts = weights_under_way(program, own)
        assert len(own) > 3 and (2 < max(counts) <= 4) == (states > States.WHOLE)  # weights and biases of two operators


def test_the_last_parts_of_a_microbatch_are_added_where_the_next_one_begins_to_send() -> None:
    """Also by ranks that send none of the first bucket, whose weights keep their gradients whole."""
    graph, cluster = imported().graph, Topology.load("ethernet-1g:2")
    configs = {op: replace(c, states=States.GRADIENTS) for op, c in baseline("fsdp", graph, cluster).configs.items()}
    configs["layers.2.down"] = replace(configs["layers.2.down"], states=States.WHOLE)
    plan = Strategy.make(graph, cluster, configs, Options(bucket_bytes=1), microbatches=4)
    for program in programs(plan, graph):
        rows, kinds = program.lowered.tasks.identity, program.lowered.rows.schedule.kind
        runs = [  # of the second microbatch, backward: instructions and the blocks that they carry out
            (k, rows[t].block)
            for k, row in enumerate(tasks_of(program))
            for t in row
            if rows[t].microbatch == 1 and kinds[rows[t].block] == BACKWARD
        ]
        first: dict[int, int] = {}
        for k, instruction in enumerate(program.instructions):
            for w, _ in instruction.weights if isinstance(instruction, Deliver) else ():
                first.setdefault(w, k)
        for w in range(len(program.lowered.weights)):
            sent, block = program.lowered.exchanged(w)
            if block <= sent and w in first:
                assert max(k for k, b in runs if b < block) < first[w] < min(k for k, b in runs if b > block)


def test_receives_are_posted_ahead_within_a_limit_and_never_behind_their_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, topology = _imported("mlp").graph, Topology.load("ethernet-1g:4")
    lowered = lower(graph, baseline("fsdp", graph, topology), topology, Costs(graph, topology))

    def ahead() -> int:
        """Most receives at a time whose tasks are still to come."""
        before: set[int] = set()
        most = 0
        for instruction in compile_program(lowered, 0).instructions:
            if isinstance(instruction, Post):
                before.add(instruction.task)
            elif isinstance(instruction, Start):
                before.discard(instruction.task)
            elif isinstance(instruction, Wait):
                assert instruction.task not in before
            most = max(most, len(before))
        return most

    monkeypatch.setattr(liveness, "AHEAD_PART", 1.0)
    assert ahead() > 1
    monkeypatch.setattr(liveness, "AHEAD_BYTES", 0)
    assert ahead() == 1


def test_the_listing_shows_what_the_rank_runs() -> None:
    for program in drawn(4):
        ast.parse(text := listing(program))
        lines = text.splitlines()
        for what, kind in (("post(", Post), ("wait(", Wait), ("del ", Free), ("empty(", Empty)):
            assert sum(line.strip().startswith(what) for line in lines) == sum(
                isinstance(i, kind) for i in program.instructions
            )


def test_the_listing_is_python_for_layers_whose_names_are_numbers_too() -> None:
    layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    graph, topology = import_model(layers, torch.zeros(4, 4), torch.sum), Topology.load("ethernet-1g:2")
    lowered = lower(graph, baseline("megatron", graph, topology), topology, Costs(graph, topology))
    ast.parse(listing(compile_program(lowered, 1)))


def test_what_one_device_does_is_one_segment() -> None:
    graph, topology = OperatorGraph.load("llama_7b"), Topology.load("ethernet-1g:1")
    lowered = lower(graph, baseline("single", graph, topology), topology, Costs(graph, topology))
    program = compile_program(lowered, 0)
    kinds = [type(instruction).__name__ for instruction in program.instructions]
    assert len(program.segments) == kinds.count("Forward") == kinds.count("Backward") == 1
    # Rotary embeddings read halves of a query and of a key, which the segment takes itself.
    assert sum(len(call.parts) for call in program.segments[0].calls) == 4 * 32
    # Gradients are those of the weights as they are: one instruction hands all of them over.
    assert kinds.count("Deliver") == 1 and "Assemble" not in kinds


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble", "interleaved-1f1b"])
def test_what_a_stage_sends_leaves_before_the_rank_computes_something_else(schedule: str) -> None:
    graph = imported().graph
    each = 2 if schedule == "interleaved-1f1b" else 1
    blocks = [op.name for op in graph.operators if op.name.endswith("norm")]
    borders = [blocks[0], "head", blocks[1]][: 2 * each - 1]
    borders.sort(key=lambda name: graph.index[name])
    plan = layout(graph, 1, 1, borders, ranks=2, topology="ethernet-1g-2", schedule=schedule, microbatches=4)
    for program in programs(plan, graph):
        tasks, made, sends = program.lowered.tasks, dict[tuple[str, int], int](), 0
        for position, instruction in enumerate(program.instructions):
            if isinstance(instruction, Forward | Backward):
                computing = position
            if isinstance(instruction, Forward):
                for operator in program.segments[instruction.segment].operators:
                    made |= {(name, instruction.microbatch): position for name in graph.operators[operator].outputs}
            if not isinstance(instruction, Start):
                continue
            what = tasks.communication[instruction.task]
            assert what is not None
            name = program.lowered.edges[what.members[0].key].tensor
            if what.purpose == "forward" and name != graph.loss and program.device in what.senders:
                assert made[name, tasks.microbatch[instruction.task]] == computing
                sends += 1
        assert sends == 4 * (each if program.device == 0 else each - 1)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
def test_between_stages_pass_activations_their_gradients_and_the_loss_once(schedule: str) -> None:
    graph = imported().graph
    assert any(op.kind == "valid_count" for op in graph.operators)
    plan = layout(graph, 1, 1, ["head"], ranks=2, topology="ethernet-1g-2", schedule=schedule, microbatches=4)
    for program in programs(plan, graph):
        sent = Counter[tuple[str, str]]()
        for what in filter(None, program.lowered.tasks.communication):
            if what.purpose != "synchronise":  # embedding and head share a weight
                sent[what.purpose, program.lowered.edges[what.members[0].key].tensor] += 1
        (activation,) = {name for purpose, name in sent if purpose == "backward"}
        assert sent == {("forward", activation): 4, ("backward", activation): 4, ("forward", graph.loss): 1}
        assert sum(isinstance(x, Result) for x in program.instructions) == 1


@pytest.mark.parametrize("number", PLANS)
def test_backward_passes_make_no_gradient_that_nobody_reads(number: int) -> None:
    for program in drawn(number):
        written = {slot for x in program.instructions if isinstance(x, Backward) for slot in x.writes}
        read = {slot for x in program.instructions for slot in x.reads}
        assert {program.slots[slot] for slot in written - read if program.slots[slot].kind == "edge gradient"} == set()


def test_what_stays_of_a_gradient_is_cut_out_before_the_next_backward_pass() -> None:
    graph, cluster = imported().graph, Topology.load("ethernet-1g:2")
    configs = {op.name: make_config(op, {}, [0, 1], States.GRADIENTS) for op in graph.operators}
    plan = Strategy.make(graph, cluster, configs)
    lowered = lower_for_ranks(graph, plan, cluster, Costs(graph, cluster))
    for program in (compile_program(lowered, device, fuse=False) for device in range(2)):
        kept = [k for k, x in enumerate(program.instructions) if isinstance(x, Keep)]
        assert kept
        for k in kept:
            sources = set(program.instructions[k].reads)
            passes = [j for j in range(k) if isinstance(program.instructions[j], Backward)]
            assert sources & set(program.instructions[passes[-1]].writes)
